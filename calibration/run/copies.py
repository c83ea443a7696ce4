"""Copies of a model that sum their gradients, by torch's DistributedDataParallel."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from calibration.run.executor import Slice
from calibration.run.optimizers import make_optimizer
from calibration.run.source import RealModel, cut_samples, planned_source, real_model
from calibration.run.work import Place, Step
from simcore.frontends.torch_capture import loss_of
from simcore.frontends.torch_source import Source
from simcore.job import Job
from simcore.plan import DEFAULT_BUCKETS, Buckets
from simcore.units import MiB

_ONE_BUCKET = 2**30  # MiB
_PARTS = ("forward", "backward", "update")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyWork:
    """One copy, with its slice of the batch."""

    source: str
    job: Job
    buckets: Buckets
    seed: int

    def build(self, place: Place) -> Step:
        """Builds the whole model; all ranks from one seed."""
        batch = self.job.batch or place.num_ranks
        model = real_model(self.source, self.job, batch, self.seed)
        share = batch // place.num_ranks
        begin = place.rank * share
        args, kwargs = cut_samples((model.args, model.kwargs), batch, begin, begin + share)
        module = model.module.to(place.device)
        if place.num_ranks > 1:
            module = with_buckets(module, self.buckets)
        given = RealModel(module, args, kwargs).to(place.device)
        return EagerStep(given, planned_source(self.source, self.job), self.job)

    def describe(self, position: int) -> tuple[str, bool]:
        """Names the part of the step."""
        return _PARTS[position], False


def with_buckets(module: nn.Module, buckets: Buckets) -> nn.Module:
    """Wraps a module in DistributedDataParallel with a plan's buckets."""
    size: float | None = buckets.num_bytes / MiB or _ONE_BUCKET
    if buckets.num_bytes == DEFAULT_BUCKETS.num_bytes:
        size = None  # torch's own, of which the first is smaller
    return DistributedDataParallel(
        module, bucket_cap_mb=size, gradient_as_bucket_view=buckets.as_views
    )


class EagerStep:
    """A step as a training script has it."""

    def __init__(self, model: RealModel, source: Source, job: Job) -> None:
        self.model, self.source = model, source
        parameters = [p for p in model.module.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(job, parameters)
        self.losses: list[torch.Tensor] = []
        self.slices: list[Slice] = []
        self.gradients: dict[str, NDArray[np.float64]] = {}

    def forward(self) -> torch.Tensor:
        """Returns the loss."""
        model = self.model
        return loss_of(model.module(*model.args, **model.kwargs), self.source)

    def step(self, watch: Callable[[int], None], *, keeps_gradients: bool = False) -> None:
        """Runs forward, backward and update."""
        times = [time.perf_counter()]
        watch(0)
        loss = self.forward()
        times.append(time.perf_counter())
        watch(1)
        loss.backward()  # type: ignore[no-untyped-call]
        times.append(time.perf_counter())
        watch(2)
        if keeps_gradients:
            self.gradients = _gradients(self.model.module)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if loss.is_cuda:
            torch.cuda.synchronize(loss.device)
        times.append(time.perf_counter())
        self.losses = [loss.detach()]
        self.slices = [
            Slice(name, "run", 0, start, end)
            for name, start, end in zip(_PARTS, times[:-1], times[1:], strict=True)
        ]


def _gradients(module: nn.Module) -> dict[str, NDArray[np.float64]]:
    """Returns the gradients by parameter."""
    found = {}
    for name, parameter in module.named_parameters():
        if (gradient := parameter.grad) is not None:
            found[name.removeprefix("module.")] = gradient.double().cpu().numpy().copy()
    return found
