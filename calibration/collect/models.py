"""A model's name or factory and a batch -> a training step that really runs.

The values of inputs are random; integers are 0 or 1, which any embedding or class target accepts.
The optimizer is torch's fused one, whose work is what the job's update traffic counts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from calibration.run.optimizers import make_optimizer
from calibration.run.source import planned_source, real_model
from simcore.errors import UsageError
from simcore.frontends.torch_capture import loss_of
from simcore.frontends.torch_source import Source
from simcore.job import Job
from simcore.models import model_names, model_spec

SEED = 0


class Workload(NamedTuple):
    """One training step to be measured."""

    model: str  # a known model or ``package.module:factory``
    job: Job  # its batch is what one step of one device sees

    @property
    def label(self) -> str:
        """Returns model, size and batch, as records name them."""
        size = "" if self.job.sequence_length is None else f"@{self.job.sequence_length}"
        return f"{self.model}{size} batch {self.job.batch} {self.job.optimizer}"


def workload(text: str, batch: int, changes: Mapping[str, Any]) -> Workload:
    """Returns the workload of ``MODEL`` or ``MODEL@SIZE`` at a batch.

    Args:
        text: as a user writes it; SIZE is in tokens, or pixels of an image's side.
        batch: samples.
        changes: other fields of the job that differ from the model's own.

    Raises:
        UsageError: there is no such model, or SIZE is not a number.
        JobError: the job is not possible.
    """
    name, _, size = text.partition("@")
    if name not in model_names() and ":" not in name:
        known = ", ".join(model_names())
        raise UsageError(f"{name!r} is neither a model nor package.module:factory; models: {known}")
    if "@" in text and not size.isdigit():
        raise UsageError(f"{text}: the size after @ must be a whole number")
    job = model_spec(name).default_job if name in model_names() else Job()
    more = {"sequence_length": int(size)} if size else {}
    return Workload(name, job.replace(batch=batch, **more, **changes))


class Step(NamedTuple):
    """A training step that can be run again and again."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: Source  # the same model without memory
    optimizer: torch.optim.Optimizer

    def forward(self) -> torch.Tensor:
        """Runs the forward with no gradients left from before; returns the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        return loss_of(self.model(*self.args, **self.kwargs), self.source)

    def run(self) -> None:
        """Runs forward, backward and update."""
        self.forward().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def real_step(work: Workload, device: str) -> Step:
    """Builds a model with memory and values.

    Args:
        work: what to build; its job has a batch.
        device: torch's name of the device it runs on.

    Raises:
        CaptureError: the factory does not do what it must.
        JobError: the model cannot have that size.
    """
    source = planned_source(work.model, work.job)
    made = real_model(work.model, work.job, work.job.batch or 1, SEED)
    model = made.module.to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(work.job, trained)
    args, kwargs = _varied((made.args, made.kwargs), device)
    return Step(model, args, kwargs, source, optimizer)


def _varied(value: Any, device: str) -> Any:
    """Returns nested inputs on a device with random values in place of constant ones."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            return torch.randn_like(value, device=device)
        if value.dtype is torch.bool:
            return value.to(device)
        return torch.randint(0, 2, value.shape, device=device, dtype=value.dtype)
    if isinstance(value, list | tuple):
        return type(value)(_varied(item, device) for item in value)
    if isinstance(value, Mapping):
        return {key: _varied(item, device) for key, item in value.items()}
    return value
