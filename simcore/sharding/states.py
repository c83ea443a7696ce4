"""What a device holds of every tensor: all of it, a part of a factor, or a partial sum.

Along each axis of the mesh an op takes one of its loops, the first of the groups that the plan
lists for the axis that it has; what it reads and writes follows. Where a tensor is not as a reader
needs it, a collective stands between them (GSPMD's and DTensor's rules): a partial sum is summed
(all-reduce), or summed and split (reduce-scatter); a split one is gathered (all-gather), or split
elsewhere (all-to-all); a whole one is sliced, which costs nothing.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.graph import OpClass, OpGraph
from simcore.loops import Access, LoopKind
from simcore.sharding.affine import at
from simcore.sharding.factors import NOT_SPLIT, AtomicLoop
from simcore.sharding.groups import Linkage

WHOLE = -1  # of a tensor: all of it; of an op: it takes no loop
PARTIAL = -2  # of a tensor: a summand; of an op: it runs on summands
ANY = -3  # what a view needs

Vector = tuple[int, ...]  # state on every axis: WHOLE, PARTIAL or a factor of the storage


class Axis(NamedTuple):
    """One axis of a mesh that splits ops.

    Attributes:
        name: ``tp``, ``cp``, ``ep``, …
        size: devices along it.
        groups: linkage groups in the order in which ops look for one of them.
        own: those of the groups that begin only at ops whose every part has weights of its own (an
            expert's product, not the choice of an expert), and go on where such a part is read.
    """

    name: str
    size: int
    groups: tuple[int, ...]
    own: frozenset[int] = frozenset()


class States(NamedTuple):
    """What every op does, and what every tensor is.

    Attributes:
        choice: atomic loop that an op takes on an axis, WHOLE or PARTIAL, [op][axis].
        made: as the producer leaves a tensor; of a parameter, as it is kept, [tensor].
        settled: after partial sums are summed as its readers want, [tensor].
        needs: (tensor, state) of what an op reads, [op].
    """

    choice: tuple[Vector, ...]
    made: tuple[Vector, ...]
    settled: tuple[Vector, ...]
    needs: tuple[tuple[tuple[int, Vector], ...], ...]


class Change(NamedTuple):
    """What an op that was put in changes: a tensor of the whole graph from one state to another."""

    tensor: int
    before: Vector
    after: Vector
    axis: int  # along which they differ


def find_states(
    graph: OpGraph, linkage: Linkage, axes: Sequence[Sequence[Axis]], part: NDArray[np.integer]
) -> States:
    """Returns what every op does along the axes.

    Args:
        graph: a captured graph.
        linkage: its groups.
        axes: of each part of the model (pipeline stage), the same names in the same order, [part].
        part: which part an op is in, [op].
    """
    walk = _Walk(graph, linkage, axes, part.tolist())
    for op in range(graph.num_ops):
        walk.visit(op)
    return walk.states()


class _Walk:
    """Decides op after op, in program order."""

    def __init__(
        self,
        graph: OpGraph,
        linkage: Linkage,
        axes: Sequence[Sequence[Axis]],
        part: Sequence[int],
    ) -> None:
        self.graph, self.linkage, self.axes, self.part = graph, linkage, axes, part
        self.batch = graph.batch or 1
        self.width = len(axes[0])
        self.whole: Vector = (WHOLE,) * self.width
        self.made: list[Vector | None] = [None] * graph.num_tensors
        self.choice: list[Vector] = []
        self.needs: list[tuple[tuple[int, Vector], ...]] = []
        self.rank = [
            [{group: place for place, group in enumerate(axis.groups)} for axis in each]
            for each in axes
        ]
        self.first_input = graph.first_input.tolist()
        self.inputs = graph.inputs.tolist()
        self.first_output = graph.first_output.tolist()
        self.producer = graph.tensor_producer.tolist()

    def visit(self, op: int) -> None:
        """Decides what one op does."""
        known = self.graph.loops_of(op)
        read = self.inputs[self.first_input[op] : self.first_input[op + 1]]
        if known is None:
            self._visit_unknown(op, read)
            return
        loops = self.linkage.factors.loops[op]
        choice = [self._choose(op, axis) for axis in range(self.width)]
        self._avoid_twice(op, choice)
        if known.is_linear:
            self._stay_partial(op, choice, read)
        needs: dict[tuple[int, Vector], None] = {}
        accessed = set()
        for place, access in enumerate(known.accesses):
            state = self._state(choice, loops, place, sums=access.is_output and not access.whole)
            if access.is_output:
                self.made[access.tensor] = state
                continue
            accessed.add(access.tensor)
            if self.made[access.tensor] is None:  # a parameter is kept as its first reader needs it
                kept = tuple(WHOLE if each == PARTIAL else each for each in state)
                self.made[access.tensor] = kept if self.producer[access.tensor] < 0 else self.whole
            needs[access.tensor, state] = None
        for tensor in read:
            if tensor not in accessed:
                needs[tensor, (ANY,) * self.width] = None
        self._finish(op, tuple(choice), tuple(needs))

    def _visit_unknown(self, op: int, read: Sequence[int]) -> None:
        """A view is what it is of; an op without a rule needs everything whole."""
        is_view = self.graph.op_class[op] == OpClass.VIEW
        state = self.whole
        if is_view and read and (made := self.made[read[0]]) is not None:
            state = made
        for tensor in range(self.first_output[op], self.first_output[op + 1]):
            self.made[tensor] = state
        need = (ANY,) * self.width if is_view else self.whole
        self._finish(op, self.whole, tuple((tensor, need) for tensor in read))

    def _finish(self, op: int, choice: Vector, needs: tuple[tuple[int, Vector], ...]) -> None:
        for tensor in range(self.first_output[op], self.first_output[op + 1]):
            if self.made[tensor] is None:
                self.made[tensor] = self.whole
        self.choice.append(choice)
        self.needs.append(needs)

    def _choose(self, op: int, axis: int) -> int:
        """Returns the atomic loop that an op takes on an axis, WHOLE = none."""
        mesh = self.axes[self.part[op]][axis]
        rank = self.rank[self.part[op]][axis]
        if mesh.size == 1 or not rank:
            return WHOLE
        found, goes_on = [], False
        is_update = self.graph.op_class[op] == OpClass.UPDATE  # a parameter stays as it is kept
        for number, loop in enumerate(self.linkage.factors.loops[op]):
            group = self.linkage.loop_group[op][number]
            if group not in rank or at(loop.most, self.batch) % mesh.size:
                continue
            follows = self._follows(op, loop, axis)
            is_own = group in mesh.own
            if not follows and (is_update or (is_own and not self._has_own(op, loop))):
                continue
            goes_on |= is_own and not self._has_own(op, loop)
            costs = int(loop.kind != LoopKind.MAP), int(self._sums(op, loop))
            found.append((rank[group], *costs, number, not follows, is_own))
        if goes_on:  # what is split already counts most, then what leaves no sums
            found.sort(key=lambda each: (each[4], *each[1:3], each[5], each[0]))
        return min(found[:1] if goes_on else found, default=(WHOLE,) * 4)[3]

    def _accesses(self, op: int, loop: AtomicLoop) -> Iterator[tuple[Access, int]]:
        known = self.graph.loops_of(op)
        return zip(known.accesses if known is not None else (), loop.factor, strict=True)

    def _follows(self, op: int, loop: AtomicLoop, axis: int) -> bool:
        """Whether something that the op reads is split by a loop already."""
        for access, factor in self._accesses(op, loop):
            made = self.made[access.tensor]
            is_known = made is not None and factor != NOT_SPLIT and not access.is_output
            held = self.producer[access.tensor] < 0
            counts = not held or self.graph.op_class[op] == OpClass.UPDATE
            if is_known and counts and made is not None and made[axis] == factor:
                return True
        return False

    def _has_own(self, op: int, loop: AtomicLoop) -> bool:
        """Whether all tensors of an op have a loop, a parameter among them."""
        pairs = list(self._accesses(op, loop))
        held = (self.producer[access.tensor] < 0 for access, _ in pairs)
        return any(held) and all(factor != NOT_SPLIT for _, factor in pairs)

    def _sums(self, op: int, loop: AtomicLoop) -> bool:
        """Whether splitting a loop leaves partial sums."""
        pairs = self._accesses(op, loop)
        return any(a.is_output and not a.whole and factor == NOT_SPLIT for a, factor in pairs)

    def _avoid_twice(self, op: int, choice: list[int]) -> None:
        """Lets a loop be split by a second axis only where all the parts divide it."""
        loops, mesh = self.linkage.factors.loops[op], self.axes[self.part[op]]
        parts: dict[int, int] = {}
        for axis, number in enumerate(choice):
            if number < 0:
                continue
            wanted = parts.get(number, 1) * mesh[axis].size
            if at(loops[number].most, self.batch) % wanted:
                choice[axis] = WHOLE
            else:
                parts[number] = wanted

    def _stay_partial(self, op: int, choice: list[int], read: Sequence[int]) -> None:
        """Lets a linear op run on partial sums where all that it reads is partial."""
        for axis in range(self.width):
            states = {made[axis] for tensor in read if (made := self.made[tensor]) is not None}
            if choice[axis] == WHOLE and states == {PARTIAL}:
                choice[axis] = PARTIAL

    def _state(
        self, choice: Sequence[int], loops: Sequence[AtomicLoop], place: int, *, sums: bool
    ) -> Vector:
        """Returns what an access needs or leaves, given the loops that the op takes."""
        state = []
        for number in choice:
            if number < 0:
                state.append(number)
                continue
            loop = loops[number]
            factor = loop.factor[place]
            is_sum = sums and loop.kind in {LoopKind.MAP, LoopKind.HALO}
            state.append(factor if factor != NOT_SPLIT else PARTIAL if is_sum else WHOLE)
        return tuple(state)

    def states(self) -> States:
        """Returns what was decided."""
        made = [self.whole if state is None else state for state in self.made]
        wanted: list[list[Vector]] = [[] for _ in made]
        for needs in self.needs:
            for tensor, state in needs:
                wanted[tensor].append(state)
        settled = [
            tuple(
                _settle(state[axis], {want[axis] for want in wanted[tensor]})
                for axis in range(self.width)
            )
            for tensor, state in enumerate(made)
        ]
        return States(tuple(self.choice), tuple(made), tuple(settled), tuple(self.needs))


def _settle(made: int, wanted: set[int]) -> int:
    """Returns what becomes of a partial sum: summed where all want it, or stays if nobody reads."""
    if made != PARTIAL:
        return made
    asked = wanted - {PARTIAL, ANY}
    if len(asked) == 1:
        return asked.pop()
    return WHOLE if asked else PARTIAL
