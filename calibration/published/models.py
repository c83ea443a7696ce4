"""Graphs of published models, by size: captured once by the product's capture, then kept on disk.

The files are in the folder ``graphs`` of the user's folder; their names change with the sizes, the
code of the model and of the capture.
"""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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

    def build(self) -> "Built":
        """Returns the model on the meta device."""
        from simcore.models import megatron  # noqa: PLC0415 - imports torch

        fields = {name: getattr(self, name) for name in self.__slots__}
        return megatron.sized(megatron.MegatronShape(**fields))


@functools.lru_cache(maxsize=64)
def graph_of(size: GPTSize, precision: Precision) -> OpGraph:
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


def _capture(size: GPTSize, precision: Precision) -> OpGraph:
    from simcore.frontends.torch_capture import capture  # noqa: PLC0415 - imports torch

    built = size.build()
    job = Job(batch=_EXAMPLE_BATCH, sequence_length=size.length, precision=precision)
    name = f"gpt-{size.layers}x{size.width}"
    return capture(built.module, built.inputs, job, name=name)


def _name(size: GPTSize, precision: Precision) -> str:
    text = f"{size} {precision} {FORMAT} {_code()}"
    return f"gpt-{size.layers}x{size.width}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@functools.cache
def _code() -> str:
    """Returns a hash of the code that a captured graph depends on."""
    root = Path(simcore.__file__).parent
    files = [root / "models" / "megatron.py", *sorted((root / "frontends").glob("torch_*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
