"""A torch model and example inputs -> OpGraph of its training step; nothing is computed.

The model runs forward and backward eagerly on fake tensors, which have no memory, while a
recorder notes every op, at three batches: see `torch_recorder`, `torch_fused` (what is kept in one
piece) and `torch_graph`.

The loss is, in this order: the factory's option ``loss`` applied to the output; the output where it
is one number; its ``loss`` attribute or key; its first item where that is one number; else a
stand-in, the sum of the means of all floating outputs.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from simcore.errors import CaptureError
from simcore.frontends.torch_fused import fused_kernels
from simcore.frontends.torch_graph import Run, Trainable, graph_of
from simcore.frontends.torch_private import (
    DATA_DEPENDENT,
    NO_FAKE,
    composite_kernels,
    fake_mode,
    quiet,
)
from simcore.frontends.torch_recorder import Failure, Recorder, tensors_in
from simcore.frontends.torch_signatures import dtype_name
from simcore.frontends.torch_source import (
    Captured,
    Source,
    describe,
    load_factory,
    open_source,
    place,
)
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.signature import Role

__all__ = ["CaptureReport", "capture", "capture_report", "load_factory", "loss_of", "record"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """How a graph was captured."""

    missing_gradients: tuple[str, ...]  # trainable parameters that got none: they are not updated
    route: str  # where the model was built, and what recorded it
    batches: tuple[int, int, int]  # samples
    seconds: float
    torch_version: str


def capture(
    model_or_factory: Any, inputs: Any = None, job: Job | None = None, *, name: str
) -> OpGraph:
    """Captures the training step of a model.

    Args:
        model_or_factory: an `nn.Module`, real or on the meta device, or a callable, with or without
            parameters ``batch`` and ``sequence_length``, that returns (model, inputs) or (model,
            inputs, options).
        inputs: tuple of arguments, mapping of keyword arguments or one tensor; dimension 0 of the
            first tensor is the batch, and every tensor with that dimension 0 is resized to capture
            at other batches. Or a callable of the batch that returns one of these.
        job: precision and example batch; None = the default job.
        name: the graph's name.

    Raises:
        CaptureError: the model cannot be captured; one line with the reason, the op, the module and
            the place in the model.
    """
    return capture_report(model_or_factory, inputs, job, name=name)[0]


def capture_report(
    model_or_factory: Any, inputs: Any = None, job: Job | None = None, *, name: str
) -> tuple[OpGraph, CaptureReport]:
    """Captures as `capture` does, and also tells how."""
    start = time.perf_counter()
    job = job or Job()
    source = open_source(model_or_factory, inputs, job, name)
    batches = source.batches(job)
    runs = [record(source, batch, Recorder()) for batch in batches]
    missing = tuple(t.name for t in runs[0].trainables if t.gradient is None)
    if len(missing) == len(runs[0].trainables):
        raise CaptureError(f"{name}: no parameter gets a gradient from the loss")
    graph = graph_of(runs, name, job.batch or source.example or batches[0])
    report = CaptureReport(
        missing_gradients=missing,
        route=f"{'built on meta' if source.on_meta else 'built as it is'}, dispatch recorder",
        batches=batches,
        seconds=time.perf_counter() - start,
        torch_version=str(torch.__version__),
    )
    return graph, report


def record(
    source: Source,
    batch: int,
    recorder: Recorder,
    kernels: Mapping[str, Callable[..., Any]] | None = None,
) -> Run:
    """Runs forward and backward at one batch on fake tensors, and returns what was recorded.

    Args:
        source: the model.
        batch: samples.
        recorder: records.
        kernels: what runs in place of ops that are kept whole; None = `fused_kernels`.

    Raises:
        CaptureError: as `capture`.
    """
    mode = fake_mode()
    captured = source.at(batch, mode)
    with quiet(), mode:
        _register(recorder, captured)
        try:
            with composite_kernels(kernels or fused_kernels(recorder)), recorder:
                loss = loss_of(captured.model(*captured.args, **captured.kwargs), source)
                recorder.begin_backward(loss)
                loss.backward()  # type: ignore[no-untyped-call]
        except CaptureError:
            raise
        except (Exception, SystemExit) as error:
            is_example = source.example in (None, batch)
            name = source.name if is_example else f"{source.name}: at batch {batch}"
            raise CaptureError(_explain(error, recorder.failure, name)) from None
        trainables = tuple(
            Trainable(
                name=name,
                storage=recorder.value(parameter).storage,
                elements=parameter.numel(),
                dtype=dtype_name(parameter.dtype),
                gradient=None if parameter.grad is None else recorder.value(parameter.grad),
                loops=recorder.update_loops(parameter),
            )
            for name, parameter in captured.parameters.items()
            if parameter.requires_grad
        )
    return Run(batch, recorder.tape, trainables)


def _register(recorder: Recorder, captured: Captured) -> None:
    recorder.watch(captured.model)
    for name, parameter in captured.parameters.items():
        recorder.register(name, parameter, Role.PARAMETER)
    for name, buffer in captured.buffers.items():
        recorder.register(name, buffer, Role.BUFFER)
    named = {str(position): value for position, value in enumerate(captured.args)} | captured.kwargs
    for name, value in named.items():
        for number, tensor in enumerate(tensors_in(value)):
            recorder.register(
                f"input.{name}" + (f".{number}" if number else ""), tensor, Role.INPUT
            )


def loss_of(output: Any, source: Source) -> torch.Tensor:
    """Returns the number whose gradient is taken: see the top of this file.

    Raises:
        CaptureError: there is none.
    """
    if source.loss is not None:
        loss = source.loss(output)
        if not _is_number(loss):
            raise CaptureError(f"{source.name}: the option loss must return one number per batch")
        return loss
    candidates = [output, getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, tuple | list) and output:
        candidates.append(output[0])
    for candidate in candidates:
        if _is_number(candidate):
            return candidate  # type: ignore[no-any-return]
    floating = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    if not floating:
        raise CaptureError(f"{source.name}: no parameter gets a gradient from the model's output")
    first, *others = (tensor.mean() for tensor in floating)
    return sum(others, start=first)


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _explain(error: BaseException, failure: Failure | None, name: str) -> str:
    """Returns what went wrong in a recorded run, as one line for the model's author."""
    caused = failure is not None and failure.error in (error, error.__cause__, error.__context__)
    module = f" in module {failure.module}" if failure and caused and failure.module else ""
    where = place(error)
    at = f" at {where}" if where else ""
    if isinstance(error, DATA_DEPENDENT):
        what = failure.target if failure and caused else "an op"
        return (
            f"{name}: the model depends on the values of tensors ({what}{module}{at}), which "
            "capture does not have: decide by shapes, or by arguments that are no tensors"
        )
    if failure and caused and (isinstance(error, NO_FAKE) or "fake impl" in str(error)):
        namespace, _, op = failure.target.partition(".")
        return (
            f"{name}: op {namespace}::{op}{module}{at} has no shape rule: register one with "
            f'torch.library.register_fake("{namespace}::{op}"), and its FLOPs with '
            f"torch.utils.flop_counter.register_flop_formula(torch.ops.{namespace}.{op})"
        )
    if "SparseTensorImpl" in str(error):
        return f"{name}: gradients in sparse form cannot be captured: use sparse=False"
    what = f"op {failure.target}{module}: " if failure and caused else ""
    return f"{name}: the model raised {what}{describe(error)}"
