"""A source at one batch -> a `Recording`: every op of its training step, as a call that can run.

The same recorder as the simulator's capture runs, so ops have the names that plans use; beside each
op it keeps the function and where its tensors lie. Memory is named by storage, a tensor is a `Ref`
into one: views need no op of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from calibration.run.whole_ops import Tensors, whole_kernels
from simcore.errors import CaptureError
from simcore.frontends.torch_capture import record as record_run
from simcore.frontends.torch_graph import tape_op_names, with_sums_at_owners
from simcore.frontends.torch_private import storage_address
from simcore.frontends.torch_recorder import Recorder, tensors_in
from simcore.frontends.torch_signatures import Kind
from simcore.frontends.torch_source import Source
from simcore.frontends.torch_tape import Tape, Value
from simcore.signature import Phase, Role

Tensor = torch.Tensor


class Ref(NamedTuple):
    """A tensor as a part of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements


class Call(NamedTuple):
    """What runs one op.

    A kept op (see `whole_ops`) has a function and is called with (context, key, tensors); any other
    is an overload by name, as ``aten.mm.default``, called with its own arguments.
    """

    function: str | Callable[..., Any]
    args: tuple[Any, ...]  # nested; tensors are Refs
    kwargs: dict[str, Any]
    outputs: tuple[Ref | None, ...]  # of the tensors in the result, in order; None = not kept
    key: int = -1  # of a kept op


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A parameter that is updated."""

    name: str
    parameter: Ref
    version: int  # of the parameter when it is updated
    gradient: Ref
    value: Value  # the gradient on the tape


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One forward and backward at one batch.

    Attributes:
        names: of the ops, as in the graph of the same source, [op].
        tape: the ops, and what they read and write.
        calls: what runs an op; inputs and constants have none.
        trained: the parameters.
        homes: parameters and buffers, by storage.
        constants: values of storages that are neither parameters, buffers nor inputs.
        loss: the number whose gradient is taken.
        loss_value: the same on the tape.
        seed: the op that makes the gradient of the loss.
    """

    names: tuple[str, ...]
    tape: Tape
    calls: dict[int, Call]
    trained: tuple[Trained, ...]
    homes: dict[int, Ref]
    constants: dict[int, Tensor]
    loss: Ref
    loss_value: Value
    seed: int


def record(source: Source, batch: int) -> Recording:
    """Runs forward and backward without memory and keeps every call.

    Raises:
        CaptureError: the model cannot be recorded at this batch.
    """
    recorder = _CallRecorder()
    run = record_run(source, batch, recorder, whole_kernels(recorder))
    tape = run.tape
    tape.ops[:] = with_sums_at_owners(run)
    names = tape_op_names(tape.ops, tape.storages)
    seed = next((op for op, each in enumerate(tape.ops) if each.phase == Phase.B), -1)
    if seed < 0 or tape.ops[seed].target != "aten.ones_like" or recorder.loss is None:
        raise CaptureError(f"{source.name}: the backward does not begin at the loss")
    return Recording(
        names=tuple(names), tape=tape, calls=recorder.calls, trained=recorder.trained(),
        homes=recorder.homes, constants=recorder.constants, loss=recorder.loss[0],
        loss_value=recorder.loss[1], seed=seed,
    )  # fmt: skip


class _CallRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A recorder that also keeps calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, Call] = {}
        self.constants: dict[int, Tensor] = {}
        self.homes: dict[int, Ref] = {}
        self.loss: tuple[Ref, Value] | None = None
        self._parameters: dict[str, Tensor] = {}
        self._newest = -1  # the op that was recorded last

    def register(self, name: str, tensor: Tensor, role: Role) -> int:
        """Names a parameter, buffer or input, and keeps where it lies."""
        storage = super().register(name, tensor, role)
        if is_persistent(role):
            self.homes.setdefault(storage, self.ref(tensor))
        if role == Role.PARAMETER and tensor.requires_grad:
            self._parameters[name] = tensor
        return storage

    def begin_backward(self, loss: Tensor) -> None:
        """Notes the loss."""
        super().begin_backward(loss)
        self.loss = self.ref(loss), self.value(loss)

    def trained(self) -> tuple[Trained, ...]:
        """Returns the parameters that got a gradient."""
        return tuple(
            Trained(
                name=name,
                parameter=self.ref(parameter),
                version=self.value(parameter).version,
                gradient=self.ref(parameter.grad),
                value=self.value(parameter.grad),
            )
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        )

    def ref(self, tensor: Tensor) -> Ref:
        """Returns where a tensor of known memory lies."""
        return Ref(
            self._index[storage_address(tensor)],
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def emit_whole(self, target: str, kind: Kind, tensors: Tensors, kernels: int) -> None:
        """Records an op that never ran, and what runs it."""
        self.emit(target, kind, tensors.read, tensors.made, kernels)
        is_backward = target.endswith("_backward")
        first = tensors.read[-2] if is_backward else tensors.made[0]  # the forward's first output
        if first is None:
            raise CaptureError(f"{target} has no output")
        made = tuple(None if tensor is None else self.ref(tensor) for tensor in tensors.made)
        self.calls[self._newest] = Call(
            function=tensors.run,
            args=tuple(self._template(tensor) for tensor in tensors.read[: tensors.num_args]),
            kwargs={},
            outputs=made,
            key=self._index[storage_address(first)],
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one op, records it and keeps the call."""
        self._newest = -1
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._newest >= 0:
            self.calls[self._newest] = Call(
                function=str(func),
                args=tuple(self._template(each) for each in args),
                kwargs={key: self._template(each) for key, each in (kwargs or {}).items()},
                outputs=tuple(self.ref(tensor) for tensor in tensors_in(result)),
            )
        return result

    def _append(self, executed: Any) -> None:
        super()._append(executed)
        self._newest = len(self.tape.ops) - 1

    def _template(self, value: Any) -> Any:
        """Returns nested arguments with tensors as what they are at run time."""
        if isinstance(value, Tensor):
            index = self._index.get(storage_address(value))
            if index is None:
                return _constant(value)
            storage = self.tape.storages[index]
            if storage.name == "constant" and index not in self.constants:
                self.constants[index] = _constant(value)
            return self.ref(value)
        if isinstance(value, list | tuple):
            return type(value)(self._template(item) for item in value)
        if isinstance(value, dict):
            return {key: self._template(item) for key, item in value.items()}
        return value


def _constant(tensor: Tensor) -> Tensor:
    """Returns the value of a tensor that the model made of numbers."""
    value: Tensor | None = tensor
    if hasattr(tensor, "fake_device"):
        value = getattr(tensor, "constant", None)
    if value is None:
        raise CaptureError(
            f"a tensor of shape {tuple(tensor.shape)} that is neither parameter, buffer nor input "
            "has no value to run with"
        )
    memory = value.untyped_storage().clone()  # type: ignore[no-untyped-call]
    place = value.storage_offset(), value.size(), value.stride()
    return torch.empty(0, dtype=value.dtype).set_(memory, *place)


def is_persistent(role: Role) -> bool:
    """Returns whether memory outlives a step."""
    return role in {Role.PARAMETER, Role.BUFFER}
