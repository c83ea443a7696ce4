"""Runs of torch ops under fake tensors -> Tape: what was executed, on which memory, at one batch.

A `Recorder` stands below autograd and sees every op of forward and backward as it is dispatched.
Tensors are known by their storage, so that views, aliases and writes in place are told apart.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from simcore.frontends.torch_loops import emitted_loops, input_loops, loops_of, update_loops
from simcore.frontends.torch_nest import Nest, TapeLoops, Use, tape_loops
from simcore.frontends.torch_private import (
    TorchDispatchMode,
    current_node,
    device_shortcut,
    newest_sequence,
    sequence_of,
    storage_address,
)
from simcore.frontends.torch_signatures import Kind, classify, dtype_name
from simcore.frontends.torch_tape import ALL, Storage, Tape, TapeOp, Value, dense_bytes, region_of
from simcore.signature import OpClass, Phase, Role

Tensor = torch.Tensor

_EMPTY = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
                    "empty_permuted"))  # fmt: skip
_OVERWRITES = frozenset(("zero_", "fill_", "copy_", "bernoulli_", "normal_", "uniform_", "random_",
                         "exponential_", "log_normal_", "cauchy_", "geometric_"))  # fmt: skip
_GATHERS = frozenset(("embedding", "index", "gather", "index_select", "_unsafe_index"))
# their schema hides that they update the running statistics: positions of those and of `training`
_RUNNING_STATISTICS = {"native_batch_norm": (3, 4, 5), "cudnn_batch_norm": (3, 4, 5)}
_ALIASING = frozenset(("_unsafe_view", "_reshape_alias", "lift_fresh", "lift"))


class Failure(NamedTuple):
    """The op that raised while recording."""

    error: Exception
    target: str
    module: str


class _Operator(NamedTuple):
    """What the schema of one overload says."""

    name: str  # without namespace for aten
    target: str  # "aten.mm"
    is_alias: bool
    is_empty: bool
    written: tuple[tuple[int, str], ...]  # arguments it writes: position, name


class _Executed(NamedTuple):
    """One op that ran, in tensors."""

    target: str
    kind: Kind
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]  # fresh ones, then those written in place
    written: Sequence[Tensor] = ()  # in place
    gathered: Tensor | None = None  # an input of which only some rows are read
    kernels: int = 1
    nest: Nest | None = None


_UNKNOWN = Kind(OpClass.OTHER, ())


def _operator(func: Any) -> _Operator:
    namespace, _, base = func._schema.name.partition("::")
    written = tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    aten = namespace == "aten"
    return _Operator(
        name=base if aten else f"{namespace}::{base}",
        target=f"{namespace}.{base}",
        is_alias=func.is_view or torch.Tag.inplace_view in func.tags or base in _ALIASING,
        is_empty=aten and base in _EMPTY,
        written=written,
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists, tuples and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes a tape of every op while active; enter it after the fake mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self.failure: Failure | None = None
        self._operators: dict[Any, _Operator] = {}
        self._index: dict[int, int] = {}  # address of a storage -> index
        self._alive: list[Any] = []  # keeps addresses from being used again
        self._op_of_sequence: dict[int, int] = {}  # autograd's sequence number -> op
        self._path: list[str] = [""]
        self._loss_op = -1  # the last op of the forward, once the backward has begun
        self._runs: dict[tuple[str, str], list[int]] = defaultdict(list)  # forward ops by place
        self._reruns: dict[tuple[str, str], int] = defaultdict(int)

    def register(self, name: str, tensor: Tensor, role: Role) -> int:
        """Names a parameter, buffer or input; returns its storage."""
        known = self._index.get(storage_address(tensor))
        return self._add_storage(name, tensor, role) if known is None else known

    def watch(self, model: torch.nn.Module) -> None:
        """Lets every module tell when its forward begins and ends."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._entering(name), prepend=True)
            module.register_forward_hook(self._leaving, always_call=True)

    def value(self, tensor: Tensor) -> Value:
        """Returns what a tensor is on the tape; memory of unknown origin becomes an input op."""
        index = self._index.get(storage_address(tensor))
        if index is None:
            index = self._add_storage("constant", tensor, Role.INPUT)
        whole = self._current(index)
        region, num_bytes = region_of(tensor, self.tape.storages[index])
        return whole._replace(region=region, bytes=num_bytes)

    def update_loops(self, parameter: Tensor) -> TapeLoops | None:
        """Returns the loops of a parameter's update: it and its gradient are read, it is written.

        None without a gradient, or for a parameter that is a part of its storage.
        """
        storage = self.tape.storages[self.value(parameter).storage]
        if parameter.grad is None or dense_bytes(parameter) < storage.bytes:
            return None
        return tape_loops(update_loops(parameter, parameter.grad), (0, 1, 0))

    def begin_backward(self, loss: Tensor) -> None:
        """Tells that ops which no autograd node runs now start or end the backward of this loss."""
        self._loss_op = max(0, self.tape.storages[self.value(loss).storage].writer)

    def emit(
        self,
        target: str,
        kind: Kind,
        inputs: Iterable[Tensor | None],
        outputs: Iterable[Tensor | None],
        kernels: int = 1,
    ) -> None:
        """Records one op that never ran; its outputs must be fresh."""
        given, results = tuple(inputs), tuple(outputs)
        read = [t for t in given if t is not None]
        made = [t for t in results if t is not None]
        nest = emitted_loops(target, given, results)
        self._append(_Executed(target, kind, read, made, kernels=kernels, nest=nest))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one op and records it."""
        if (device := device_shortcut(func, args)) is not None:
            return device
        kwargs = kwargs or {}
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = _operator(func)
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            self.failure = Failure(error, operator.target, self._path[-1])
            raise
        if operator.is_alias:
            self._note_sequence(self._writer_of(args))
        elif not operator.is_empty:
            executed = self._executed(operator, args, kwargs, result)
            if executed is None:
                self._note_sequence(self._writer_of(args))
            else:
                kind = classify(operator.name, func, args, kwargs, executed.outputs)
                nest = loops_of(operator.name, func, kind.op_class, args, executed.outputs)
                self._append(executed._replace(kind=kind, nest=nest))
        return result

    def _executed(
        self, operator: _Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> "_Executed | None":
        """Returns what an op read and wrote, None where it only returned views."""
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        written = _written(operator, args, kwargs)
        changed = {storage_address(t) for t in written}
        aliased = {storage_address(t) for t in inputs} - changed
        returned = [t for t in tensors_in(result) if storage_address(t) not in aliased | changed]
        outputs = [*returned, *written]
        if not outputs:
            return None
        gathered = inputs[0] if operator.name in _GATHERS else None
        if operator.name in _OVERWRITES or operator.name.endswith("_like"):
            inputs = inputs[1:]  # only its shape is read
        elif operator.name.startswith("new_"):
            inputs = []
        return _Executed(operator.target, _UNKNOWN, inputs, outputs, written, gathered)

    def _append(self, executed: "_Executed") -> None:
        """Writes one op on the tape."""
        target, outputs = executed.target, executed.outputs
        seen = {id(t): self.value(t) for t in executed.inputs if not self._is_number(t)}
        reads = dict.fromkeys(seen.values())
        traffic = sum(value.bytes for value in reads) + sum(dense_bytes(t) for t in outputs)
        if executed.gathered is not None:  # only the rows that are asked for
            traffic += dense_bytes(outputs[0]) - self.value(executed.gathered).bytes
        for tensor in executed.written:  # what was there before the write, if anything
            if (index := self._index.get(storage_address(tensor))) is not None:
                whole = self._current(index)
                reads = {v: None for v in reads if v[:2] != whole[:2]} | {whole: None}
        phase, joins = self._unit(target, reads)
        module = self._path[-1] if joins < 0 else self.tape.ops[joins].module
        op = len(self.tape.ops)
        for value in reads:
            storage = self.tape.storages[value.storage]
            storage.first_user = op if storage.first_user < 0 else storage.first_user
        writes = self._write(op, target, outputs)
        record = TapeOp(
            target=target,
            kind=executed.kind,
            dtype=_arithmetic_dtype(outputs, executed.inputs),
            phase=phase,
            module=module,
            reads=tuple(reads),
            writes=writes,
            traffic=traffic,
            kernels=executed.kernels,
            joins=joins,
            loops=executed.nest and self._loops(executed.nest, seen, reads, writes),
        )
        self.tape.ops.append(record)
        if joins < 0:
            self._runs[module, target].append(op)
        self._note_sequence(op)

    def _loops(
        self,
        nest: Nest,
        seen: Mapping[int, Value],
        reads: Iterable[Value],
        writes: Sequence[Value],
    ) -> TapeLoops | None:
        """Returns the loops of an op as the tape keeps them.

        Args:
            nest: the loops as its rule says them.
            seen: the value of each tensor that it reads, by identity of the tensor.
            reads: the distinct values; what is written in place stands for what is read of it.
            writes: the values that it writes.

        Returns:
            None where it writes a part of a storage, or uses what the rule does not know.
        """
        place = {value: index for index, value in enumerate(reads)}
        whole = {v[:2]: index for v, index in place.items() if v.region == ALL}
        made = {value.storage: index for index, value in enumerate(writes)}
        inputs: list[tuple[Use, int]] = []
        outputs: list[tuple[Use, int]] = []
        for use in nest.uses:
            if not use.is_output:
                value = seen.get(id(use.tensor))
                if value is not None:
                    inputs.append((use, place.get(value, whole.get(value[:2], -1))))
                continue
            index = self._index[storage_address(use.tensor)]
            if dense_bytes(use.tensor) < self.tape.storages[index].bytes:
                return None
            outputs.append((use, made[index]))
            before = whole.get((index, writes[made[index]].version - 1))
            if before is not None and all(before != known for _, known in inputs):
                inputs.append((use._replace(is_output=False, whole=False), before))
        if any(
            {known for _, known in used} != set(range(len(all_of)))
            for used, all_of in ((inputs, place), (outputs, writes))
        ):
            return None
        uses, places = zip(*inputs, *outputs, strict=True)
        return tape_loops(nest._replace(uses=uses), places)

    def _is_number(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is a number that a kernel gets with its arguments."""
        return tensor.dim() == 0 and storage_address(tensor) not in self._index

    def _write(self, op: int, target: str, outputs: Sequence[Tensor]) -> tuple[Value, ...]:
        """Makes a new version of every storage an op writes."""
        writes: dict[int, Value] = {}
        for tensor in outputs:
            index = self._index.get(storage_address(tensor))
            if index is None:
                index = self._add_storage(target, tensor, Role.ACTIVATION)
            elif index not in writes:
                self.tape.storages[index].version += 1
            storage = self.tape.storages[index]
            storage.writer = op
            writes[index] = Value(index, storage.version, ALL, storage.bytes)
        return tuple(writes.values())

    def _unit(self, target: str, reads: Iterable[Value]) -> tuple[Phase, int]:
        """Returns the phase of the op that runs now, and the op whose unit it joins."""
        node = current_node()
        if node is None:
            return (Phase.F, -1) if self._loss_op < 0 else (Phase.B, self._loss_op)
        if len(self._path) > 1:  # a forward that runs again, for its activations
            place = self._path[-1], target
            if runs := self._runs.get(place):
                self._reruns[place] += 1
                return Phase.B, runs[(self._reruns[place] - 1) % len(runs)]
        sequence = sequence_of(node)
        joins = -1
        if sequence is None:
            index = self._index.get(storage_address(node.variable))
            joins = -1 if index is None else self.tape.storages[index].first_user
        elif sequence in self._op_of_sequence:
            joins = self._op_of_sequence[sequence]
        if joins < 0:
            writers = (self.tape.storages[value.storage].writer for value in reads)
            joins = max(writers, default=-1)
        return Phase.B, joins if joins >= 0 else len(self.tape.ops) - 1

    def _note_sequence(self, op: int) -> None:
        """Remembers the op for the autograd node that torch has just made, if it made one."""
        if op >= 0:
            self._op_of_sequence.setdefault(newest_sequence(), op)

    def _writer_of(self, args: Sequence[Any]) -> int:
        """Returns the op that wrote what a view is of, -1 = none."""
        for tensor in tensors_in(args):
            index = self._index.get(storage_address(tensor))
            return -1 if index is None else self.tape.storages[index].writer
        return -1

    def _current(self, index: int) -> Value:
        """Returns a storage as it is now; an input's op is recorded at its first use."""
        storage = self.tape.storages[index]
        if storage.writer < 0 and storage.role is Role.INPUT:
            storage.writer = len(self.tape.ops)
            whole = Value(index, 0, ALL, storage.bytes)
            forward = current_node() is None and self._loss_op < 0
            phase = Phase.F if forward else Phase.B
            kind = Kind(OpClass.INPUT, ())
            self.tape.ops.append(
                TapeOp("input", kind, "", phase, "", (), (whole,), 0, 0, -1, storage.loops)
            )
        return Value(index, storage.version, ALL, storage.bytes)

    def _add_storage(self, name: str, tensor: Tensor, role: Role) -> int:
        memory = tensor.untyped_storage()
        index = len(self.tape.storages)
        self._alive.append(memory)
        self._index[storage_address(tensor)] = index
        storage = Storage(name=name, bytes=memory.nbytes(), role=role)
        if role is Role.INPUT and dense_bytes(tensor) == storage.bytes:
            storage.loops = tape_loops(input_loops(tensor), (0,))
        self.tape.storages.append(storage)
        return index

    def _entering(self, name: str) -> Callable[[Any, Any], None]:
        def hook(_module: Any, _args: Any) -> None:
            self._path.append(name)

        return hook

    def _leaving(self, _module: Any, _args: Any, _output: Any) -> None:
        self._path.pop()


def _written(operator: _Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the arguments that an op writes."""
    written = [
        tensor
        for position, name in operator.written
        for tensor in tensors_in(args[position] if position < len(args) else kwargs.get(name))
    ]
    if positions := _RUNNING_STATISTICS.get(operator.name):
        *statistics, training = positions
        if args[training]:
            written += tensors_in([args[position] for position in statistics])
    return written


def _arithmetic_dtype(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> str:
    """Returns the dtype an op calculates in: of its output, for a comparison of its input."""
    tensors = [*outputs[:1], *inputs]
    chosen = next((t for t in tensors if t.is_floating_point()), tensors[0])
    return dtype_name(chosen.dtype)
