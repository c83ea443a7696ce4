"""Graphs of published models, by size: captured once by the product's capture, then kept on disk.

The files are in the folder ``graphs`` of the user's folder; their names change with the sizes, the
code of the model and of the capture.
"""

import functools
import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import simcore
from simcore.errors import GraphError
from simcore.graph import OpGraph
from simcore.graph_file import FORMAT, read_graph, write_graph
from simcore.job import Job, Precision
from simcore.profile_store import home

if TYPE_CHECKING:
    from simcore.models.inputs import Built

GRAPHS = "graphs"
_EXAMPLE_BATCH = 4  # samples; a graph holds for all
EagerFamily = Literal["gpt2", "opt", "bert-words", "bert-classes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTSize:
    """Sizes of a GPT, see `simcore.models.megatron.MegatronShape`."""

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    dropout: float = 0.1
    is_fused: bool = False
    file: str = "megatron"  # module of `simcore.models` that has its code

    def build(self) -> "Built":
        """Returns the model on the meta device."""
        from simcore.models import megatron  # noqa: PLC0415 - imports torch

        fields = {name: getattr(self, name) for name in self.__slots__ if name != "file"}
        module = importlib.import_module(f"simcore.models.{self.file}")
        built: Built = module.sized(megatron.MegatronShape(**fields))
        return built

    @property
    def name(self) -> str:
        """Of its graph."""
        return f"gpt-{self.layers}x{self.width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSize(GPTSize):
    """Sizes of a GPT with experts, see `simcore.models.megatron_moe.Experts`."""

    count: int
    local: int
    choices: int
    inner: int
    shared: int = 0
    is_grouped: bool = False
    file: str = "megatron_moe"

    def build(self) -> "Built":
        """Returns what one device has of the model, on the meta device."""
        from simcore.models import megatron, megatron_moe  # noqa: PLC0415 - imports torch

        fields = {name: getattr(self, name) for name in GPTSize.__slots__ if name != "file"}
        experts = megatron_moe.Experts(
            count=self.count,
            local=self.local,
            choices=self.choices,
            width=self.inner,
            shared=self.shared,
            is_grouped=self.is_grouped,
        )
        return megatron_moe.mixture(megatron.MegatronShape(**fields), experts)

    @property
    def name(self) -> str:
        """Of its graph."""
        return f"moe-{self.layers}x{self.width}-{self.local}of{self.count}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerSize(GPTSize):
    """Sizes of a model of `simcore.models.eager_transformers`."""

    family: EagerFamily
    file: str = "eager_transformers"

    def build(self) -> "Built":
        """Returns the model on the meta device."""
        from simcore.models import eager_transformers, megatron  # noqa: PLC0415 - imports torch

        fields = {name: getattr(self, name) for name in GPTSize.__slots__ if name != "file"}
        return eager_transformers.sized(megatron.MegatronShape(**fields), self.family)

    @property
    def name(self) -> str:
        """Of its graph."""
        return f"{self.family}-{self.layers}x{self.width}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySize:
    """A model of one of the files of `simcore.models`, at one size.

    Attributes:
        factory: ``file:function``; the function takes the size.
        length: the size: tokens of a sequence, or pixels of an image's side.
    """

    factory: str
    length: int

    def build(self) -> "Built":
        """Returns the model on the meta device."""
        from simcore.models.inputs import on_meta  # noqa: PLC0415 - imports torch

        module = importlib.import_module(f"simcore.models.{self.file}")
        return on_meta(getattr(module, self.factory.partition(":")[2]), self.length)

    @property
    def name(self) -> str:
        """Of its graph."""
        return f"{self.factory.partition(':')[2]}-{self.length}"

    @property
    def file(self) -> str:
        """Module of `simcore.models` that has its code."""
        return self.factory.partition(":")[0]


ModelSize = GPTSize | FamilySize


@functools.lru_cache(maxsize=64)
def graph_of(size: ModelSize, precision: Precision) -> OpGraph:
    """Returns the graph of a training step.

    Args:
        size: of the model.
        precision: of parameters and activations.

    Raises:
        CaptureError: the model cannot be captured.
    """
    path = home() / GRAPHS / f"{_name(size, precision)}.json"
    try:
        return read_graph(path)
    except GraphError:  # not captured yet, or another version's
        graph = _capture(size, precision)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_graph(graph, path)
    return graph


def _capture(size: ModelSize, precision: Precision) -> OpGraph:
    from simcore.frontends.torch_capture import capture  # noqa: PLC0415 - imports torch

    built = size.build()
    job = Job(batch=_EXAMPLE_BATCH, sequence_length=size.length, precision=precision)
    return capture(built.module, built.inputs, job, name=size.name)


def _name(size: ModelSize, precision: Precision) -> str:
    text = f"{size} {precision} {FORMAT} {_code(size.file)}"
    return f"{size.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@functools.cache
def _code(model: str) -> str:
    """Returns a hash of the code that a captured graph depends on."""
    root = Path(simcore.__file__).parent
    captures = sorted((root / "frontends").glob("torch_*.py"))
    files = [root / "models" / f"{model}.py", *captures]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
