"""A model by name, or a factory of the user's -> a module with values, its inputs and its loss.

The simulator plans for modules without memory (`simcore.frontends.torch_source`); here the same
source is built once more, with values, on the CPU and from a seed.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from simcore.errors import RunError
from simcore.frontends.torch_capture import load_factory
from simcore.frontends.torch_source import Source, open_source
from simcore.job import Job
from simcore.models import build, model_names, model_size, model_spec

Tensor = torch.Tensor


class RealModel(NamedTuple):
    """A module with values, and what it is called with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def to(self, device: str) -> "RealModel":
        """Returns the same with inputs on a device."""
        args, kwargs = _each((self.args, self.kwargs), lambda tensor: tensor.to(device))
        return self._replace(args=args, kwargs=kwargs)


def planned_source(source: str, job: Job) -> Source:
    """Returns the source as the simulator captures it, without memory.

    Args:
        source: a model by name or ``package.module:factory``.
        job: what is trained.
    """
    if source in model_names():
        built = build(source, job)
        return open_source(built.module, built.inputs, job, source)
    return open_source(load_factory(source), None, job, source)


def real_model(source: str, job: Job, batch: int, seed: int) -> RealModel:
    """Builds a source with values.

    Args:
        source: a model by name or ``package.module:factory``.
        job: what is trained; sequence length and precision are used.
        batch: samples of the inputs. A factory whose inputs have another length gets them repeated.
        seed: of parameters and inputs.

    Raises:
        RunError: the source's inputs are of no known form.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module, inputs = (
            _named(source, job) if source in model_names() else _made(source, job, batch)
        )
        given = inputs(batch) if callable(inputs) else inputs
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(job.precision)
    if dtype is not None:
        module = module.to(dtype)
    args, kwargs = _arguments(given, source)
    resized = _resized((args, kwargs), batch, dtype)
    return RealModel(module.train() if not module.training else module, *resized)


def named_tensors(model: RealModel) -> dict[str, Tensor]:
    """Returns parameters, buffers and inputs by the names that the recorder gives them."""
    found: dict[str, Tensor] = dict(model.module.named_parameters())
    found |= dict(model.module.named_buffers())
    named = {str(position): value for position, value in enumerate(model.args)} | model.kwargs
    for name, value in named.items():
        for number, tensor in enumerate(_tensors(value)):
            found[f"input.{name}" + (f".{number}" if number else "")] = tensor
    return found


def cut_samples(value: Any, batch: int, begin: int, end: int) -> Any:
    """Returns nested inputs with samples [begin, end) of every tensor that has `batch` of them."""

    def cut(tensor: Tensor) -> Tensor:
        is_batched = tensor.dim() > 0 and tensor.shape[0] == batch
        return tensor[begin:end].clone() if is_batched else tensor

    return _each(value, cut)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns nested inputs with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [_each(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    return value


def _named(source: str, job: Job) -> tuple[nn.Module, Any]:
    file, _, function = model_spec(source).factory.partition(":")
    module = importlib.import_module(f"simcore.models.{file}")
    built = getattr(module, function)(model_size(source, job))
    return built.module, built.inputs


def _made(source: str, job: Job, batch: int) -> tuple[nn.Module, Any]:
    factory: Callable[..., Any] = load_factory(source)
    known = inspect.signature(factory).parameters
    wanted = {"batch": batch, "sequence_length": job.sequence_length}
    result = factory(**{k: v for k, v in wanted.items() if k in known and v is not None})
    return result[0], result[1]


def _arguments(inputs: Any, source: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise RunError(f"{source}: example inputs are a {type(inputs).__name__}, not tensors")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value
    nested = isinstance(value, list | tuple | Mapping)
    return [tensor for item in items for tensor in _tensors(item)] if nested else []


def _resized(value: Any, batch: int, dtype: torch.dtype | None) -> Any:
    """Repeats the samples of nested inputs until there are `batch`, and casts what is floating."""
    tensors = _tensors(value)
    example = next((tensor.shape[0] for tensor in tensors if tensor.dim()), batch)

    def fit(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == example and example != batch:
            tensor = tensor[torch.arange(batch) % example]
        is_cast = dtype is not None and tensor.is_floating_point()
        return tensor.to(dtype) if is_cast else tensor

    return _each(value, fit)
