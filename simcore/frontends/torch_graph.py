"""Tapes of one model at three batches -> OpGraph: what is affine in the batch, units, updates.

The tapes must hold the same ops; every size is fitted as c0 + c1 * batch on two of them and
checked on the third. Units: a forward op and what autograd runs for it; the ops that change a
buffer and those that read what was in it before; the update of a parameter with its first user.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from simcore.errors import CaptureError
from simcore.frontends.torch_loop_fit import constant_loops, fitted
from simcore.frontends.torch_nest import TapeLoops
from simcore.frontends.torch_tape import ALL, Storage, Tape, TapeOp, Value
from simcore.graph import GraphBuilder, OpGraph, Out
from simcore.loops import OpLoops, renumbered
from simcore.signature import Affine, OpClass, Phase, Role, Signature

_ADDITIONS = ("aten.add", "aten.add_")
_PERSISTENT = (Role.PARAMETER, Role.BUFFER)


class Trainable(NamedTuple):
    """A parameter that wants a gradient."""

    name: str
    storage: int
    elements: int
    dtype: str
    gradient: Value | None  # None: it got none
    loops: TapeLoops | None  # of its update: reads it and its gradient, writes it


class Run(NamedTuple):
    """One recorded forward and backward."""

    batch: int
    tape: Tape
    trainables: tuple[Trainable, ...]


def graph_of(runs: Sequence[Run], name: str, batch: int) -> OpGraph:
    """Returns the training step that three runs of one model have in common.

    Args:
        runs: three, at different batches.
        name: the graph's name.
        batch: the example batch that the graph keeps.

    Raises:
        CaptureError: the runs differ in structure, or a size is not affine in the batch.
    """
    ops = with_sums_at_owners(runs[0])
    names = tape_op_names(ops, runs[0].tape.storages)
    _check_structure(runs, names, name)
    return _Emission(runs, ops, names, GraphBuilder(name, batch=batch)).build()


def with_sums_at_owners(run: Run) -> list[TapeOp]:
    """Returns the ops; sums of one parameter's gradients join the parameter's first user."""
    ops = list(run.tape.ops)
    writer = {value[:2]: index for index, op in enumerate(ops) for value in op.writes}
    for trainable in run.trainables:
        owner = run.tape.storages[trainable.storage].first_user
        pending = [] if trainable.gradient is None else [trainable.gradient]
        while pending:
            index = writer.get(pending.pop()[:2], -1)
            if index < 0 or ops[index].phase != Phase.B or ops[index].target not in _ADDITIONS:
                continue
            ops[index] = ops[index]._replace(joins=owner, module=ops[owner].module)
            pending += ops[index].reads
    return ops


def tape_op_names(ops: Sequence[TapeOp], storages: Sequence[Storage]) -> list[str]:
    """Returns a unique name for each op: module and op; for backward ops, whose backward."""
    taken: dict[str, int] = {}
    names: list[str] = []
    for op in ops:
        short = op.target.removeprefix("aten.")
        if op.kind.op_class is OpClass.INPUT:
            name = storages[op.writes[0].storage].name
        elif 0 <= op.joins < len(names):
            forward = ops[op.joins].target.removeprefix("aten.")
            name = f"{names[op.joins]}.backward"
            name += "" if short == f"{forward}_backward" else f".{short}"
        else:
            name = f"{op.module}.{short}" if op.module else short
        names.append(_unique(name, taken))
    return names


def _unique(name: str, taken: dict[str, int]) -> str:
    """Returns the name, with a number from its second use on."""
    count = taken.get(name)
    while count is not None:
        taken[name] = count + 1
        numbered = f"{name}.{count}"
        if numbered not in taken:
            name = numbered
            break
        count += 1
    taken[name] = 1
    return name


def _structure(op: TapeOp) -> tuple[object, ...]:
    """Returns all of an op that must not depend on the batch."""
    dims = tuple(dim[0] for dim in op.kind.dims)
    values = tuple(value[:3] for value in (*op.reads, *op.writes))
    kind = (op.kind.op_class, op.kind.factor, dims)
    return op.target, kind, op.dtype, op.phase, op.module, values, op.joins


def _check_structure(runs: Sequence[Run], names: Sequence[str], name: str) -> None:
    first = runs[0]
    for run in runs[1:]:
        batches = f"{name}: the model runs other ops at batch {run.batch} than at {first.batch}"
        for index, (a, b) in enumerate(zip(first.tape.ops, run.tape.ops, strict=False)):
            if a is not b and _structure(a) != _structure(b):
                other = "" if a.target == b.target else f" ({b.target})"
                raise CaptureError(f"{batches}; the first that differs is {names[index]}{other}")
        counts = len(first.tape.ops), len(run.tape.ops)
        if counts[0] != counts[1]:
            raise CaptureError(f"{batches}: {counts[1]} ops, not {counts[0]}")


class _Sizes:
    """Everything that may grow with the batch, as (c0, c1), in the order of `_numbers`."""

    def __init__(self, runs: Sequence[Run], names: Sequence[str], name: str) -> None:
        table = np.array(
            [[number for op in run.tape.ops for number in _numbers(op)] for run in runs], np.int64
        ).reshape(3, -1)
        b = [run.batch for run in runs]
        slope, rest = np.divmod(table[1] - table[0], b[1] - b[0])
        constant = table[0] - slope * b[0]
        bad = (rest != 0) | (table[2] != constant + slope * b[2]) | (slope < 0)
        counts = [len(_numbers(op)) for op in runs[0].tape.ops]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(int).tolist()
        self._pairs: list[Affine] = list(zip(constant.tolist(), slope.tolist(), strict=True))
        if bad.any():
            position = int(np.argmax(bad))
            op = int(np.searchsorted(self._first, position, side="right")) - 1
            dims = [dim[0] for dim in runs[0].tape.ops[op].kind.dims]
            what = (dims + ["bytes"] * counts[op])[position - self._first[op]]
            sizes = ", ".join(str(size) for size in table[:, position])
            raise CaptureError(
                f"{name}: op {names[op]}: {what} is {sizes} at batch {b[0]}, {b[1]}, {b[2]}, which "
                "is not a constant plus a whole multiple of the batch"
            )

    def of(self, op: int) -> Iterator[Affine]:
        """Yields the sizes of one op: its dims, its traffic, its reads, its writes."""
        return iter(self._pairs[self._first[op] : self._first[op + 1]])


def _numbers(op: TapeOp) -> list[int]:
    values = [value.bytes for value in (*op.reads, *op.writes)]
    return [dim[1] for dim in op.kind.dims] + [op.traffic] + values


class _Emission:
    """Feeds one tape to a builder."""

    def __init__(
        self, runs: Sequence[Run], ops: list[TapeOp], names: list[str], builder: GraphBuilder
    ) -> None:
        self.ops, self.names, self.builder = ops, names, builder
        self.storages = runs[0].tape.storages
        self.trainables = runs[0].trainables
        self.sizes = _Sizes(runs, names, builder.name)
        columns = [[op.loops for op in run.tape.ops] for run in runs]
        self.loops = fitted(columns, [run.batch for run in runs])  # [op]
        self.writer = {value[:2]: op for op, record in enumerate(ops) for value in record.writes}
        self.readers: dict[tuple[int, int], list[int]] = defaultdict(list)
        for op, record in enumerate(ops):
            for value in record.reads:
                self.readers[value[:2]].append(op)
        self.gradients = {t.gradient[:2] for t in self.trainables if t.gradient is not None}
        self.unit = self._units()  # [op] least op of its unit
        self.unit_op: dict[int, int] = {}  # unit -> builder's handle of one of its ops
        self.tensor: dict[tuple[int, int], int] = {}  # (storage, version) -> builder's handle
        self.view: dict[tuple[int, ...], int] = {}
        self.done: dict[int, int] = {}  # op -> zero-byte tensor that says it has read
        self.waits = self._waits()
        self.watched = {reader for readers in self.waits.values() for reader in readers}
        self.taken: dict[str, int] = dict.fromkeys(names, 1)

    def build(self) -> OpGraph:
        for index, storage in enumerate(self.storages):
            if storage.role is Role.PARAMETER:
                self.tensor[index, 0] = self.builder.parameter(storage.name, storage.bytes)
            elif storage.role is Role.BUFFER:
                self.tensor[index, 0] = self.builder.buffer(storage.name, storage.bytes)
        for op in range(len(self.ops)):
            self._add(op)
        for trainable in self.trainables:
            if trainable.gradient is not None:
                self._update(trainable, trainable.gradient)
        return self.builder.build()

    def _units(self) -> list[int]:
        parent = list(range(len(self.ops)))

        def find(op: int) -> int:
            while parent[op] != op:
                parent[op] = parent[parent[op]]
                op = parent[op]
            return op

        def merge(a: int, b: int) -> None:
            low, high = sorted((find(a), find(b)))
            parent[high] = low

        for op, record in enumerate(self.ops):
            if record.joins >= 0:
                merge(record.joins, op)
            elif not any(value[:2] in self.writer for value in record.reads):
                merge(op, self._next_to(op))
        for index, storage in enumerate(self.storages):
            if storage.role is Role.BUFFER and storage.version > 0:
                writers = [self.writer[index, v] for v in range(1, storage.version + 1)]
                for op in (*self.readers[index, 0], *writers):
                    merge(writers[0], op)
        return [find(op) for op in range(len(parent))]

    def _next_to(self, op: int) -> int:
        """Returns where an op that needs nothing from other ops belongs.

        Inputs, and what is made of nothing, belong to their first user; what counts in a buffer
        that no other op reads, to the next op of its module. Ops with parameters stand alone.
        """
        record = self.ops[op]
        users = [user for value in record.writes for user in self.readers[value[:2]]]
        if not record.reads:
            return min(users, default=op)
        roles = {self.storages[value.storage].role for value in record.reads}
        after = self.ops[op + 1 : op + 2]
        if not users and roles == {Role.BUFFER} and after and after[0].module == record.module:
            return op + 1
        return op

    def _waits(self) -> dict[int, list[int]]:
        """Returns, for ops that write in place, the readers of the old content they must follow."""
        waits: dict[int, list[int]] = {}
        for (storage, version), op in self.writer.items():
            reads = {value[:2] for value in self.ops[op].reads}
            before = [
                reader
                for reader in dict.fromkeys(self.readers[storage, version - 1])
                if reader < op and not reads & {value[:2] for value in self.ops[reader].writes}
            ]
            if before:
                waits[op] = before
        return waits

    def _add(self, op: int) -> None:
        record, sizes = self.ops[op], self.sizes.of(op)
        dims = tuple((dim[0], *next(sizes)) for dim in record.kind.dims)
        traffic = next(sizes)
        op_class = record.kind.op_class
        read_bytes = [next(sizes) for _ in record.reads]
        inputs = [
            self._value(value, num_bytes, op)
            for value, num_bytes in zip(record.reads, read_bytes, strict=True)
        ]
        outputs = [
            self._out(value, num_bytes)
            for value, num_bytes in zip(record.writes, sizes, strict=True)
        ]
        if op in self.watched:
            outputs.append(Out(0, name=f"{self.names[op]}:done"))
        signature = None
        if op_class is not OpClass.INPUT:
            signature = Signature(
                op_class.name.lower(), record.dtype, dims, record.kind.factor, traffic
            )
        handle = self.builder.op(
            self.names[op],
            module=record.module,
            target=record.target,
            phase=record.phase,
            op_class=op_class,
            signature=signature,
            inputs=[*inputs, *(self.done[reader] for reader in self.waits.get(op, ()))],
            outputs=outputs,
            unit_of=self.unit_op.get(self.unit[op]),
            kernels=record.kernels,
            loops=_with_inputs(self.loops[op], inputs),
        )
        self.unit_op[self.unit[op]] = handle
        made = self.builder.outputs(handle)
        for value, tensor in zip(record.writes, made, strict=False):
            self.tensor[value[:2]] = tensor
        if op in self.watched:
            self.done[op] = made[-1]

    def _out(self, value: Value, num_bytes: Affine) -> Out:
        storage = self.storages[value.storage]
        role = Role.INPUT if storage.role is Role.INPUT and value.version == 0 else Role.ACTIVATION
        if value[:2] in self.gradients:
            role = Role.GRADIENT
        before = self.tensor[value.storage, value.version - 1] if value.version else None
        return Out(num_bytes, storage_of=before, role=role)

    def _value(self, value: Value, num_bytes: Affine, reader: int) -> int:
        """Returns the tensor an op reads; a part of a storage is a view op's output."""
        key = value[:2]
        if value.region == ALL:
            return self.tensor[key]
        writer = self.writer.get(key, reader)  # persistent memory is viewed where it is used
        place = (*value[:3], self.unit[writer])
        if place not in self.view:
            base = self.names[writer] if key in self.writer else self.storages[value.storage].name
            role = Role.GRADIENT if key in self.gradients else Role.ACTIVATION
            handle = self.builder.op(
                _unique(f"{base}.view", self.taken),
                module=self.ops[writer].module,
                target="view",
                phase=self.ops[reader].phase,
                op_class=OpClass.VIEW,
                inputs=(self.tensor[key],),
                outputs=(Out(num_bytes, storage_of=self.tensor[key], role=role),),
                unit_of=self.unit_op.get(self.unit[writer]),
                kernels=0,
            )
            self.unit_op[self.unit[writer]] = handle
            self.view[place] = self.builder.outputs(handle)[0]
        return self.view[place]

    def _update(self, trainable: Trainable, gradient: Value) -> None:
        """Adds a parameter's update in its first user's unit, and a refresh in each other."""
        storage = self.storages[trainable.storage]
        versions = range(storage.version + 1)
        users = [op for version in versions for op in self.readers[trainable.storage, version]]
        units = dict.fromkeys(self.unit[op] for op in (storage.first_user, *users))
        owner, *others = units
        parameter = self.tensor[trainable.storage, storage.version]
        writer = self.writer[gradient[:2]]
        read = self._value(gradient, (gradient.bytes, 0), writer)
        signature = Signature("update", trainable.dtype, (("elements", trainable.elements, 0),))
        loops = _with_inputs(constant_loops(trainable.loops), (parameter, read))
        update = self.builder.op(
            _unique(f"{trainable.name}.update", self.taken),
            module=trainable.name.rpartition(".")[0],
            target="update",
            phase=Phase.U,
            op_class=OpClass.UPDATE,
            signature=signature,
            inputs=(parameter, read),
            outputs=(Out(storage.bytes, storage_of=parameter),),
            unit_of=self.unit_op[owner],
            elements=trainable.elements,
            loops=loops,
        )
        (updated,) = self.builder.outputs(update)
        for number, unit in enumerate(others):
            self.builder.op(
                _unique(f"{trainable.name}.refresh.{number}", self.taken),
                module=trainable.name.rpartition(".")[0],
                target="refresh",
                phase=Phase.U,
                op_class=OpClass.COPY,
                inputs=(updated,),
                unit_of=self.unit_op[unit],
                kernels=0,
                loops=_reading_output(loops, updated),
            )


def _with_inputs(loops: OpLoops | None, inputs: Sequence[int]) -> OpLoops | None:
    """Returns loops that call inputs by the builder's handles; outputs keep their places."""
    return loops and renumbered(loops, dict(enumerate(inputs)), 0)


def _reading_output(loops: OpLoops | None, tensor: int) -> OpLoops | None:
    """Returns the loops of an op that reads what an op of one output writes."""
    if loops is None:
        return None
    read = tuple(a._replace(tensor=tensor, is_output=False) for a in loops.accesses if a.is_output)
    return loops._replace(accesses=read)
