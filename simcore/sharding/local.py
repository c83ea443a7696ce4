"""The local graph: what one device of a mesh does, with the collectives between the devices."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.errors import PlanError
from simcore.graph import GraphBuilder, OpClass, OpGraph, Out, Phase, Role
from simcore.loops import LoopKind
from simcore.sharding.groups import BATCH, Linkage
from simcore.sharding.shares import Split, local_signature, scaled, traffic_ratio
from simcore.sharding.states import ANY, PARTIAL, WHOLE, Axis, Change, States, Vector, find_states
from simcore.signature import Affine, Signature


class Communication(NamedTuple):
    """What a collective op of a local graph does.

    Attributes:
        kind: as `simcore.collectives.ALGORITHMS` names it, or ``halo``: with both neighbours.
        axis: number of the mesh axis along which its members lie.
        num_bytes: of the full buffer, as `Collective.num_bytes` counts, (c0, c1).
    """

    kind: str
    axis: int
    num_bytes: Affine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalGraph:
    """What one device does.

    Its batch is the samples of one device: where axes split the samples, b here are b times their
    devices of the whole.

    Attributes:
        graph: ops with the shapes of one shard, and COLLECTIVE ops.
        communication: of each COLLECTIVE op.
        changes: of each op that brings a tensor from one state to another; a slice is one too.
        base: op of the whole graph, NOWHERE for what was put in, [op].
        states: what every op and tensor of the whole graph is.
        samples: devices that share the samples of one local graph, of each part.
    """

    graph: OpGraph
    communication: dict[int, Communication]
    changes: dict[int, Change]
    base: NDArray[np.int32]  # [op] op of the whole graph, -1 = put in
    states: States
    samples: int


def local_graph(
    graph: OpGraph, linkage: Linkage, axes: Sequence[Sequence[Axis]], part: NDArray[np.integer]
) -> LocalGraph:
    """Returns what one device does.

    Args:
        graph: the whole graph.
        linkage: its groups.
        axes: of each part of the model (pipeline stage), the same names in the same order, [part].
        part: which part a placement unit is in, [unit].

    Raises:
        PlanError: the parts split the samples, or a parameter that they share, by different
            numbers.
    """
    of_op = part[graph.unit]
    states = find_states(graph, linkage, axes, of_op)
    return _Writer(graph, linkage, states, axes, of_op.tolist()).write()


_ORDER = ("slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather")  # small ones first


class _Step(NamedTuple):
    """One change of a tensor's state along one axis."""

    kind: str
    axis: int
    goal: int


class _Writer:
    """Writes the ops of one device, and a collective wherever a tensor must change its state."""

    def __init__(
        self,
        graph: OpGraph,
        linkage: Linkage,
        states: States,
        axes: Sequence[Sequence[Axis]],
        part: Sequence[int],
    ) -> None:
        self.graph, self.linkage, self.states = graph, linkage, states
        self.axes, self.part, self.batch = axes, part, graph.batch or 1
        self.samples = _samples(linkage, axes)
        self.builder = GraphBuilder(graph.name, batch=max(1, self.batch // self.samples))
        self.base: list[int] = []
        self.communication: dict[int, Communication] = {}
        self.changes: dict[int, Change] = {}
        self.handle: dict[tuple[int, Vector, int, int], int] = {}  # tensor, state, epoch, part
        self.newest: dict[int, int] = {}  # storage -> handle of its last content
        self.unit_op: dict[int, int] = {}
        self.taken: dict[str, int] = dict.fromkeys(graph.op_names, 1)
        self.pairs: list[Affine] = [(a, b) for a, b in graph.tensor_bytes.tolist()]
        self.storage = graph.tensor_storage.tolist()
        self.producer = graph.tensor_producer.tolist()
        self.home: dict[int, int] = {}  # storage of a parameter -> its tensor
        self.wants_parts = {t for needs in states.needs for t, state in needs if PARTIAL in state}

    def write(self) -> LocalGraph:
        """Writes everything."""
        for tensor in range(int(self.graph.first_output[0])):
            self._persistent(tensor)
        for op in range(self.graph.num_ops):
            self._op(op)
        return LocalGraph(
            graph=self.builder.build(),
            communication=self.communication,
            changes=self.changes,
            base=np.array(self.base, np.int32),
            states=self.states,
            samples=self.samples,
        )

    def _persistent(self, tensor: int) -> None:
        """Adds a parameter or buffer, as it is kept."""
        state, part = self.states.made[tensor], self._part_of(tensor)
        size = self._bytes(tensor, state, part)
        is_parameter = self.graph.tensor_role[tensor] == Role.PARAMETER
        add = self.builder.parameter if is_parameter else self.builder.buffer
        made = add(self.graph.tensor_names[tensor], size)
        self.handle[tensor, state, 0, part] = made
        self.newest[self.storage[tensor]] = made
        self.home[self.storage[tensor]] = tensor

    def _op(self, op: int) -> None:
        """Adds one op behind what it needs, and before what its results need."""
        reads: dict[int, int] = {}  # storage -> handle that this op reads
        inputs = []
        for tensor, state in self.states.needs[op]:
            made = self._fetch(tensor, state, op)
            inputs.append(made)
            reads[self.storage[tensor]] = made
        inputs += self._inner(op, inputs)
        first, end = int(self.graph.first_output[op]), int(self.graph.first_output[op + 1])
        part, tensors = self.part[op], range(first, end)
        outs = [
            Out(
                self._bytes(tensor, self.states.made[tensor], part),
                storage_of=reads.get(self.storage[tensor], self.newest.get(self.storage[tensor])),
                role=Role(int(self.graph.tensor_role[tensor])),
                name=self.graph.tensor_names[tensor],
            )
            for tensor in tensors
        ]
        handle = self._append(op, inputs, outs)
        for tensor, made in zip(tensors, self.builder.outputs(handle), strict=True):
            self.handle[tensor, self.states.made[tensor], 0, part] = made
            self.newest[self.storage[tensor]] = made
            self._settle(tensor, op)

    def _append(self, op: int, inputs: list[int], outs: list[Out]) -> int:
        graph, ratio = self.graph, self._ratio(op)
        number = int(graph.signature[op])
        signature = graph.signatures[number] if number >= 0 else None
        handle = self.builder.op(
            graph.op_names[op],
            module=graph.op_modules[op],
            target=graph.op_targets[op],
            phase=Phase(int(graph.phase[op])),
            op_class=OpClass(int(graph.op_class[op])),
            signature=None if signature is None else self._signature(op, signature, ratio),
            inputs=inputs,
            outputs=outs,
            unit_of=self.unit_op.get(int(graph.unit[op])),
            kernels=int(graph.kernels[op]),
            sync=bool(graph.sync[op]),
            workspace=self._scaled(tuple(graph.workspace[op].tolist()), ratio),
            resident=self._scaled(tuple(graph.resident[op].tolist()), ratio),
            elements=-(-int(graph.elements[op]) // self._parts(op)),
        )
        self.unit_op[int(graph.unit[op])] = handle
        self.base.append(op)
        return handle

    # sizes

    def _bytes(self, tensor: int, state: Vector, part: int) -> Affine:
        """Returns the bytes of a tensor on one device of a part, in samples of one device."""
        split = 1
        for axis, each in enumerate(state):
            split *= self.axes[part][axis].size if each >= 0 else 1
        return self._scaled(self.pairs[tensor], Fraction(1, split))

    def _scaled(self, pair: Affine, ratio: Fraction) -> Affine:
        """Returns a share of a size, rounded up, in samples of one device."""
        return scaled(pair, ratio, self.samples)

    def _splits(self, op: int) -> list[Split]:
        """Returns which loops of an op are split, and by how many devices."""
        mesh = self.axes[self.part[op]]
        return [(n, mesh[axis].size) for axis, n in enumerate(self.states.choice[op]) if n >= 0]

    def _parts(self, op: int) -> int:
        """Returns into how many parts an op is split."""
        return prod(size for _, size in self._splits(op))

    def _ratio(self, op: int) -> Fraction:
        """Returns the share of an op's memory traffic that is left to one device."""
        known = self.graph.loops_of(op)
        loops, splits = self.linkage.factors.loops[op], self._splits(op)
        gathers = bool(self.graph.op_class[op] == OpClass.EMBEDDING)
        return traffic_ratio(known, loops, splits, self.batch, gathers=gathers)

    def _signature(self, op: int, signature: Signature, ratio: Fraction) -> Signature:
        """Returns the signature of one shard."""
        loops = self.linkage.factors.loops[op]
        return local_signature(signature, loops, self._splits(op), ratio, self.samples)

    # communication

    def _inner(self, op: int, inputs: list[int]) -> list[int]:
        """Adds the collectives inside an op whose loop is split; returns what the op waits for."""
        tokens = []
        for axis, number in enumerate(self.states.choice[op]):
            if number < 0:
                continue
            loop = self.linkage.factors.loops[op][number]
            size = self.axes[self.part[op]][axis].size
            if loop.kind in {LoopKind.INNER, LoopKind.HALO} and loop.inner != (0, 0):
                others = max(1, self._parts(op) // size)
                share = self._scaled(loop.inner, Fraction(1, others))
                kind = "halo" if loop.kind == LoopKind.HALO else "all_reduce"
                name = f"{self.graph.op_names[op]} {kind.replace('_', '-')}"
                made = self._communicate(name, Communication(kind, axis, share), inputs, Out(0), op)
                tokens.append(made)
        return tokens

    def _communicate(
        self, name: str, what: Communication | None, inputs: Sequence[int], out: Out, near: int
    ) -> int:
        """Adds a collective (or a slice: None) in the unit of an op; returns its output."""
        count = self.taken.get(name, 0)
        self.taken[name] = count + 1
        unit = int(self.graph.unit[near])
        is_collective = what is not None
        handle = self.builder.op(
            name if not count else f"{name}.{count}",
            module=self.graph.op_modules[near],
            target=what.kind if what is not None else "slice",
            phase=Phase(int(self.graph.phase[near])),
            op_class=OpClass.COLLECTIVE if is_collective else OpClass.VIEW,
            inputs=inputs,
            outputs=[out],
            unit_of=self.unit_op.get(unit),
            kernels=1 if is_collective else 0,
        )
        self.unit_op[unit] = handle
        self.base.append(-1)
        if what is not None:
            self.communication[handle] = what
        return self.builder.outputs(handle)[0]

    def _settle(self, tensor: int, op: int) -> None:
        """Sums partial results as their readers want, and brings updated parameters home."""
        made, goal = self.states.made[tensor], self.states.settled[tensor]
        if self.graph.op_class[op] == OpClass.UPDATE and self.storage[tensor] in self.home:
            goal = self.states.made[self.home[self.storage[tensor]]]
        if goal != made:
            self._convert(tensor, made, goal, op, 0)

    def _fetch(self, tensor: int, need: Vector, op: int) -> int:
        """Returns the handle of a tensor in the state that an op needs."""
        made, settled = self.states.made[tensor], self.states.settled[tensor]
        goal = tuple(settled[axis] if each == ANY else each for axis, each in enumerate(need))
        start = tuple(
            made[axis] if each == PARTIAL else settled[axis] for axis, each in enumerate(goal)
        )
        maker = self.producer[tensor]
        home = self._part_of(tensor)
        if self._sizes(home) != self._sizes(self.part[op]):
            if maker >= 0:
                return self._send(tensor, start, goal, op)
            self._check_alike(tensor, goal, op)
        epoch = int(self.graph.phase[op] != Phase.F)
        return self._convert(tensor, start, goal, op, epoch)

    def _check_alike(self, tensor: int, goal: Vector, op: int) -> None:
        """Refuses a parameter that stages share, but keep in parts of different sizes."""
        home, here = self._part_of(tensor), self.part[op]
        kept = self.states.made[tensor]
        for mine, other, *states in zip(self.axes[home], self.axes[here], kept, goal, strict=True):
            if mine.size != other.size and max(states) >= 0:
                raise PlanError(
                    f"{self.graph.tensor_names[tensor]!r} is used by stages {home} and {here}, "
                    f"which split it over {mine.size} and {other.size} devices along "
                    f"{mine.name!r}; stages that share a parameter need equal meshes"
                )

    def _sizes(self, part: int) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes[part])

    def _send(self, tensor: int, start: Vector, goal: Vector, op: int) -> int:
        """Adds what a part with another mesh is sent: what each of its devices lacks."""
        maker = self.producer[tensor]
        target = self.part[op]
        key = (tensor, goal, 2, target)
        if key not in self.handle:
            have = self._convert(tensor, start, start, maker, 0)
            name = f"{self.graph.tensor_names[tensor]} for another mesh"
            out = Out(self._bytes(tensor, goal, target))
            self.handle[key] = self._communicate(name, None, [have], out, maker)
        return self.handle[key]

    def _convert(self, tensor: int, start: Vector, goal: Vector, near: int, epoch: int) -> int:
        """Returns a tensor in another state, from one that it is in already."""
        part = self._part_of(tensor)
        now, have = start, self._known(tensor, start, epoch, part)
        for step in sorted(_steps(start, goal), key=lambda step: _ORDER.index(step.kind)):
            after = (*now[: step.axis], step.goal, *now[step.axis + 1 :])
            key = (tensor, after, epoch if step.kind == "all_gather" else 0, part)
            if key not in self.handle:
                self.handle[key] = self._change(tensor, (now, after), step, have, near)
            now, have = after, self.handle[key]
        return have

    def _part_of(self, tensor: int) -> int:
        """Returns the part whose mesh a tensor lies on: of its producer, else its first reader."""
        op = self.producer[tensor]
        first, end = self.graph.first_consumer[tensor : tensor + 2].tolist()
        if op < 0 and first < end:
            op = int(self.graph.consumers[first])
        return int(self.part[op]) if op >= 0 else 0

    def _known(self, tensor: int, state: Vector, epoch: int, part: int) -> int:
        for each in (epoch, 0):
            if (tensor, state, each, part) in self.handle:
                return self.handle[tensor, state, each, part]
        made = self.states.made[tensor]  # a sum along some axes only
        return self._convert(tensor, made, state, self.producer[tensor], 0)

    def _change(
        self, tensor: int, states: tuple[Vector, Vector], step: _Step, have: int, near: int
    ) -> int:
        """Adds one collective or slice."""
        part = self._part_of(tensor)
        before, after = (self._bytes(tensor, state, part) for state in states)
        name = f"{self.graph.tensor_names[tensor]} {step.kind.replace('_', '-')}"
        role = Role(int(self.graph.tensor_role[tensor]))
        role = Role.ACTIVATION if role in {Role.PARAMETER, Role.BUFFER} else role
        self.changes[len(self.base)] = Change(tensor, *states, step.axis)
        if step.kind == "slice":
            return self._communicate(name, None, [have], Out(after, role=role), near)
        in_place = step.kind == "all_reduce" and tensor not in self.wants_parts
        out = Out(after, storage_of=have if in_place else None, role=role)
        full = after if step.kind == "all_gather" else before
        return self._communicate(name, Communication(step.kind, step.axis, full), [have], out, near)


def _samples(linkage: Linkage, axes: Sequence[Sequence[Axis]]) -> int:
    """Returns how many devices of a part share the samples of one local graph."""
    batch = [number for number, group in enumerate(linkage.groups) if group.name == BATCH]
    found = set()
    for each in axes:
        samples = 1
        for axis in each:
            samples *= axis.size if set(batch) & set(axis.groups) else 1
        found.add(samples)
    if len(found) > 1:
        raise PlanError("the stages split the samples by different numbers of devices")
    return found.pop()


def _steps(start: Vector, goal: Vector) -> Iterator[_Step]:
    """Yields what must change, axis by axis."""
    for axis, (a, b) in enumerate(zip(start, goal, strict=True)):
        if a == b:
            continue
        if a == WHOLE:
            kind = "slice"
        elif a == PARTIAL:
            kind = "all_reduce" if b == WHOLE else "reduce_scatter"
        else:
            kind = "all_gather" if b == WHOLE else "all_to_all"
        yield _Step(kind, axis, b)
