"""A model and example inputs, however a user has them -> fake copies of both at any batch.

Models are built on the meta device, which needs no memory; a factory that cannot work there (it
reads a value it has just made) is run as it is. What is captured is a copy whose parameters and
buffers are fake tensors on the CPU device, shared as in the original; the original is not touched.
"""

import copy
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from simcore.errors import CaptureError
from simcore.frontends.torch_private import FakeTensorMode, storage_address
from simcore.frontends.torch_recorder import tensors_in
from simcore.job import Job

Factory = Callable[..., Any]
_OPTIONS = ("loss",)
_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_BATCH = 2


def load_factory(spec: str, cwd: str | Path | None = None) -> Factory:
    """Imports ``package.module:factory`` and returns the factory.

    Args:
        spec: module path and attribute, parted by a colon.
        cwd: folder that is importable beside the installed packages; None = the current one.

    Raises:
        CaptureError: no such module or attribute, not callable, or the import raised; names which.
    """
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute):
        raise CaptureError(f"factory {spec!r}: must be written package.module:factory")
    folder = str(Path(cwd or Path.cwd()).resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise CaptureError(f"factory {spec!r}: no module named {error.name!r}") from None
        raise CaptureError(f"factory {spec!r}: importing it needs {error.name!r}") from None
    except (Exception, SystemExit) as error:
        raise CaptureError(f"factory {spec!r}: importing it raised {describe(error)}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise CaptureError(f"factory {spec!r}: {module_name} has no attribute {part!r}")
        found = getattr(found, part)
    if not callable(found):
        kind = type(found).__name__
        raise CaptureError(f"factory {spec!r}: {attribute} is a {kind}, not callable")
    return found  # type: ignore[no-any-return]


def describe(error: BaseException) -> str:
    """Returns an exception as one line: type, message, and the user's line that raised it."""
    text = " ".join(str(error).split())
    parts = [type(error).__name__]
    if text:
        parts.append(f": {text[:297]}..." if len(text) > 300 else f": {text}")
    if where := place(error):
        parts.append(f" ({where})")
    return "".join(parts)


def place(error: BaseException) -> str:
    """Returns file:line of the innermost frame outside torch and this program, "" = none."""
    own = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parent}{os.sep}", "<")
    found = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(own) and "importlib" not in file:
            found = f"{_short(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _short(file: str) -> str:
    """Returns a path from the current folder or from the installed packages on."""
    _, packages, rest = file.rpartition("site-packages/")
    if packages:
        return rest
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


class Captured(NamedTuple):
    """Fake copies, ready to run inside the fake mode they were made in."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: dict[str, nn.Parameter]  # distinct ones, first names
    buffers: dict[str, torch.Tensor]


class _Built(NamedTuple):
    model: nn.Module
    inputs: Any
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where models and inputs come from."""

    name: str
    built: _Built
    rebuild: Callable[[int], _Built] | None  # a factory that wants to know the batch
    example: int | None  # batch of the example tensors; None = inputs are made for any batch
    precision: str
    on_meta: bool

    @property
    def loss(self) -> Callable[[Any], torch.Tensor] | None:
        """The user's own loss of the model's output."""
        return self.built.options.get("loss")

    def batches(self, job: Job) -> tuple[int, int, int]:
        """Returns the three batches to capture at: multiples of the example, none 1."""
        base = self.example or job.batch or DEFAULT_BATCH
        return (base, 2 * base, 3 * base) if base > 1 else (2, 3, 5)

    def at(self, batch: int, mode: FakeTensorMode) -> Captured:
        """Returns fake copies at one batch, for use inside the mode."""
        built = self.rebuild(batch) if self.rebuild else self.built
        inputs = built.inputs
        if callable(inputs):
            try:
                inputs = _on_meta(inputs, batch)[0]
            except Exception as error:
                what = f"{self.name}: making example inputs for batch {batch} raised"
                raise CaptureError(f"{what} {describe(error)}") from None
        example = None if self.rebuild or callable(built.inputs) else self.example
        cast = _CASTS.get(self.precision)
        args, kwargs = _arguments(inputs, self.name)
        fake = _FakeTensors(mode, cast)
        model, parameters, buffers = fake.model(built.model, self.name)
        args, kwargs = fake.inputs((args, kwargs), example, batch)
        return Captured(model, args, kwargs, parameters, buffers)


def open_source(model_or_factory: Any, inputs: Any, job: Job, name: str) -> Source:
    """Returns the source of one model.

    Args:
        model_or_factory: a module, or a callable that returns (model, inputs[, options]).
        inputs: tuple of arguments, mapping of keyword arguments, one tensor, or a callable of the
            batch that returns one of these; None = the factory's.
        job: batch and precision.
        name: for messages.

    Raises:
        CaptureError: the factory raised, or returned something else.
    """
    rebuild = None
    if isinstance(model_or_factory, nn.Module):
        built, on_meta = _Built(model_or_factory, inputs, {}), False
    elif callable(model_or_factory):
        known = _parameters_of(model_or_factory)
        if job.sequence_length is not None and "sequence_length" not in known:
            raise CaptureError(f"{name}: the factory has no parameter sequence_length to be set")
        first = job.batch if job.batch and job.batch > 1 else DEFAULT_BATCH

        def make(batch: int) -> tuple[_Built, bool]:
            wanted = {"batch": batch, "sequence_length": job.sequence_length}
            arguments = {k: v for k, v in wanted.items() if k in known and v is not None}
            return _build(model_or_factory, arguments, inputs, name)

        built, on_meta = make(first)
        if "batch" in known and not callable(built.inputs):
            rebuild = partial(_rebuilt, make, first, built)
    else:
        kind = type(model_or_factory).__name__
        raise CaptureError(f"{name}: a {kind} is neither a model nor a factory")
    if isinstance(built.model, torch.jit.ScriptModule):
        raise CaptureError(f"{name}: a scripted or traced model hides its ops: give the plain one")
    if built.inputs is None:
        raise CaptureError(f"{name}: no example inputs were given")
    example = None
    if not callable(built.inputs) and rebuild is None:
        example = next((t.shape[0] for t in tensors_in(built.inputs) if t.dim()), None)
    return Source(
        name=name, built=built, rebuild=rebuild, example=example, precision=job.precision,
        on_meta=on_meta,
    )  # fmt: skip


def _rebuilt(
    make: Callable[[int], tuple[_Built, bool]], first: int, built: _Built, batch: int
) -> _Built:
    return built if batch == first else make(batch)[0]


def _parameters_of(factory: Factory) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}


def _on_meta(function: Factory, *args: Any, **kwargs: Any) -> tuple[Any, bool]:
    """Calls with new tensors on the meta device, else as it is; returns whether meta worked."""
    try:
        with torch.device("meta"):
            return function(*args, **kwargs), True
    except Exception:
        return function(*args, **kwargs), False


def _build(
    factory: Factory, arguments: dict[str, int], inputs: Any, name: str
) -> tuple[_Built, bool]:
    try:
        result, on_meta = _on_meta(factory, **arguments)
    except (Exception, SystemExit) as error:
        raise CaptureError(f"{name}: the factory raised {describe(error)}") from None
    parts = result if isinstance(result, tuple) else (result,)
    if not (isinstance(parts[0], nn.Module) and len(parts) <= 3):
        raise CaptureError(
            f"{name}: the factory must return (model, example_inputs) or (model, example_inputs, "
            f"options), not {type(result).__name__} of {type(parts[0]).__name__}"
        )
    model, made, options = (*parts, None, None)[:3]
    options = options or {}
    if unknown := [key for key in options if key not in _OPTIONS]:
        raise CaptureError(f"{name}: unknown factory option {unknown[0]!r}; known: {_OPTIONS[0]}")
    return _Built(model, made if inputs is None else inputs, options), on_meta


def _arguments(inputs: Any, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise CaptureError(
        f"{name}: example inputs must be a tuple, a mapping, a tensor or a callable of the batch, "
        f"not {type(inputs).__name__}"
    )


class _FakeTensors:
    """Makes fake tensors that share storage as the originals do."""

    def __init__(self, mode: FakeTensorMode, cast: torch.dtype | None) -> None:
        self._mode = mode
        self._cast = cast
        self._base: dict[int, torch.Tensor] = {}  # address of an original storage -> flat fake

    def model(
        self, model: nn.Module, name: str
    ) -> tuple[nn.Module, dict[str, nn.Parameter], dict[str, torch.Tensor]]:
        """Returns a copy of the model with fake parameters and buffers, and those by name."""
        memo: dict[int, Any] = {}
        parameters: dict[str, nn.Parameter] = {}
        buffers: dict[str, torch.Tensor] = {}
        for key, parameter in model.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise CaptureError(f"{name}: parameter {key} has no shape yet: run the model once")
            fake = nn.Parameter(self._like(parameter), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = parameters[key] = fake
        for key, buffer in model.named_buffers():
            memo[id(buffer)] = buffers[key] = self._like(buffer)
        for module in model.modules():
            plain = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers")}
            for tensor in tensors_in(plain):
                if id(tensor) not in memo and (tensor.is_meta or not tensor.is_leaf):
                    memo[id(tensor)] = self._like(tensor)
        try:
            twin = copy.deepcopy(model, memo)
        except Exception as error:
            raise CaptureError(f"{name}: the model cannot be copied: {describe(error)}") from None
        return twin if twin.training else twin.train(), parameters, buffers

    def inputs(self, value: Any, example: int | None, batch: int) -> Any:
        """Returns nested inputs with fake tensors, resized where they have the example's batch."""
        if isinstance(value, torch.Tensor):
            shape = list(value.shape)
            if example is not None and shape and shape[0] == example:
                shape[0] = batch
            with self._mode:
                fake = torch.empty(shape, dtype=self._dtype(value), device="cpu")
                return fake.requires_grad_(value.requires_grad)
        if isinstance(value, list | tuple):
            items = [self.inputs(item, example, batch) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: self.inputs(item, example, batch) for key, item in value.items()}
        return value

    def _dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._cast if self._cast and tensor.is_floating_point() else tensor.dtype

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        address, dtype = storage_address(tensor), self._dtype(tensor)
        with self._mode, torch.no_grad():
            if address not in self._base:
                count = memory.nbytes() // tensor.element_size()
                self._base[address] = torch.empty(count, dtype=dtype, device="cpu")
            return self._base[address].as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
