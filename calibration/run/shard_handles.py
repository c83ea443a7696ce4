"""What the tensors of a local graph are: which tensor of the whole graph, in which state."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from calibration.run.layouts import LayoutError, strides_of
from calibration.run.recording import Call, Ref
from calibration.run.shard_ops import Around, Uses
from calibration.run.shard_program import Operand
from simcore.sharding.local import LocalGraph
from simcore.sharding.states import ANY, Vector


class Handles:
    """The tensors of the local graph, called handles, as they come to be known.

    Attributes:
        info: of each handle, the tensor of the whole graph and its state.
    """

    def __init__(self, around: Around, local: LocalGraph) -> None:
        self.around, self.local = around, local
        self.info: dict[int, tuple[int, Vector]] = {}

    def know(self, handle: int, tensor: int, state: Vector) -> None:
        """Notes what a handle is.

        Raises:
            LayoutError: the axes do not divide it.
        """
        self.around.layout(tensor).check(state)
        self.info[handle] = tensor, state

    def reads(self, op: int) -> list[int]:
        """Returns what an op of the local graph reads."""
        graph = self.local.graph
        return [int(h) for h in graph.inputs[graph.first_input[op] : graph.first_input[op + 1]]]

    def find(self, op: int, tensor: int, need: Vector) -> int:
        """Returns what an op of the local graph reads for a need of the whole op."""
        settled = self.around.states.settled[tensor]
        goal = tuple(settled[a] if each == ANY else each for a, each in enumerate(need))
        for handle in self.reads(op):
            if self.info.get(handle) == (tensor, goal):
                return handle
        name = self.around.graph.tensor_names[tensor]
        raise LayoutError(f"{name} is not there in the state it needs")

    def made_by(self, op: int, base: int, tensor: int) -> int:
        """Returns the handle of a tensor that an op makes."""
        start = int(self.local.graph.first_output[op])
        return start + tensor - int(self.around.graph.first_output[base])


class Made(NamedTuple):
    """What an op returns."""

    operands: list[Operand | None]  # of the tensors of its result; None = it is an argument
    first: int  # tensor of the whole graph, -1 = none
    shape: tuple[int, ...]  # local, of the first


def outputs_of(handles: Handles, op: int, base: int, call: Call) -> Made:
    """Returns the tensors of an op's result on a rank's part."""
    around = handles.around
    operands: list[Operand | None] = []
    first = -1
    shape: tuple[int, ...] = ()
    writes = {v.storage: v for v in around.tensors.record(base).writes}
    for ref in call.outputs:
        if ref is None or ref.storage not in writes:
            operands.append(None)
            continue
        tensor = around.tensors.tensor(base, writes[ref.storage])
        local = around.layout(tensor).place(ref, around.states.made[tensor], ())
        operands.append(Operand(handles.made_by(op, base, tensor), local))
        if first < 0:
            first, shape = tensor, local.size
    return Made(operands, first, shape)


class Arguments:
    """The arguments of one op, as a rank has them.

    Attributes:
        storages: of the tape, that are arguments.
        written: (handle before, handle after) of what the op changes.
        fresh: (handle, local bytes) of what it is the first to write.
    """

    def __init__(self, handles: Handles, op: int, uses: Uses, shape: tuple[int, ...]) -> None:
        """Begins.

        Args:
            handles: known so far.
            op: of the local graph.
            uses: its tensors in the whole graph.
            shape: local, of its first output.
        """
        self.handles, self.op, self.uses, self.shape = handles, op, uses, shape
        self.around = handles.around
        self.storages: set[int] = set()
        self.written: list[tuple[int, int]] = []
        self.fresh: list[tuple[int, int]] = []
        self._writes = {v.storage: v for v in self.around.tensors.record(uses.op).writes}

    def operand(self, ref: Ref) -> Operand:
        """Returns an argument."""
        around = self.around
        self.storages.add(ref.storage)
        value = around.tensors.read(self.uses.op, ref)
        if value is not None:
            tensor = around.tensors.tensor(self.uses.op, value)
            state, expanded = self.uses.read(tensor, ref)
            handle = self.handles.find(self.op, tensor, state)
            local = around.layout(tensor).place(ref, self.handles.info[handle][1], expanded)
            self._note_write(ref, handle)
            return Operand(handle, local)
        if ref.storage in self._writes:
            return self._unread(ref)
        size: Sequence[int] = self.shape if len(self.shape) == len(ref.size) else ref.size
        return Operand(-1, Ref(-1, ref.dtype, tuple(size), strides_of(size), 0))

    def _note_write(self, ref: Ref, handle: int) -> None:
        if ref.storage in self._writes:
            tensor = self.around.tensors.tensor(self.uses.op, self._writes[ref.storage])
            pair = handle, self.handles.made_by(self.op, self.uses.op, tensor)
            if pair not in self.written:
                self.written.append(pair)

    def _unread(self, ref: Ref) -> Operand:
        """Returns memory that the op is the first to write."""
        around = self.around
        tensor = around.tensors.tensor(self.uses.op, self._writes[ref.storage])
        handle = self.handles.made_by(self.op, self.uses.op, tensor)
        layout, state = around.layout(tensor), around.states.made[tensor]
        count = int(np.prod(layout.local(state), dtype=np.int64))
        self.fresh.append((handle, count * ref.dtype.itemsize))
        return Operand(handle, layout.place(ref, state, ()))
