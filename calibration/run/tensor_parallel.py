"""Layers sharded over the ranks of one stage, by torch's tensor parallelism (DTensor)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from calibration.run.copies import EagerStep, describe_part
from calibration.run.source import RealModel, planned_source, real_model
from calibration.run.work import Place, Step
from simcore.errors import RunError
from simcore.job import Job

Style = Literal["column", "row"]


def run_tensor_parallel(
    model: nn.Module, styles: Mapping[str, Style], mesh: DeviceMesh
) -> nn.Module:
    """Shards linear and embedding layers of a module in place, and returns it.

    A column-sharded layer takes what all ranks have and leaves a slice of its output features; a
    row-sharded one takes such a slice and sums over the ranks. So ``{"up": "column", "down":
    "row"}`` is a feed-forward block with one all-reduce in the forward and one in the backward.
    Between the two only what works on single features may stand.

    Args:
        model: the same on all ranks.
        styles: module path -> how its weight is sharded.
        mesh: one axis, over the ranks.

    Raises:
        RunError: there is no such module, or it is of a kind that is not sharded.
    """
    return parallelize_module(model, mesh, parallel_styles(model, styles))


def parallel_styles(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, ParallelStyle]:
    """Returns torch's styles by module path; raises as `run_tensor_parallel` does."""
    known = dict(model.named_modules())
    plan: dict[str, ParallelStyle] = {}
    for path, style in styles.items():
        module = known.get(path)
        if not isinstance(module, nn.Linear | nn.Embedding):
            what = "no such module" if module is None else f"a {type(module).__name__}"
            raise RunError(f"tensor parallel: {path}: {what}; a Linear or an Embedding is sharded")
        plan[path] = _style(module, style)
    return plan


def _style(module: nn.Module, style: Style) -> ParallelStyle:
    if style == "column":
        return ColwiseParallel()
    is_table = isinstance(module, nn.Embedding)  # its input is no slice of features
    return RowwiseParallel(input_layouts=Replicate()) if is_table else RowwiseParallel()


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorWork:
    """A model whose named layers are sharded over all ranks; every rank sees the whole batch."""

    source: str
    job: Job
    styles: Mapping[str, Style]
    seed: int

    def build(self, place: Place) -> Step:
        """Builds the model from the same seed everywhere, and shards it."""
        model = real_model(self.source, self.job, self.job.batch or 1, self.seed)
        kind = place.device.partition(":")[0]
        mesh = init_device_mesh(kind, (place.num_ranks,))
        module = run_tensor_parallel(model.module.to(place.device), self.styles, mesh)
        given = RealModel(module, model.args, model.kwargs).to(place.device)
        return EagerStep(given, planned_source(self.source, self.job), self.job, fused=False)

    def describe(self, position: int) -> tuple[str, bool]:
        """Names the part of the step."""
        return describe_part(position)
