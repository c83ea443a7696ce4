"""Stages of a pipeline, slowly: random training steps, and what their stages do, op by op.

Written from the docstrings of the product; nothing here is clever.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.graph import GraphBuilder, OpClass, OpGraph, Out, Phase, Role
from simcore.recompute import find_segments
from simcore.stage_cut import Cut
from tests.strategies import Draws, Scale, draw_affine

MODULES = ("h.0", "h.0.attn", "h.1", "h.1.mlp.2", "head", "")
CLASSES = (OpClass.OTHER, OpClass.BATCHED_MATMUL, OpClass.SOFTMAX, OpClass.VIEW, OpClass.POINTWISE)
PARTS = (Phase.F, Phase.B, Phase.W, Phase.U)  # B stands for I where the backward is split


class _Step:
    """A random training step that is being drawn."""

    def __init__(self, scale: Scale) -> None:
        self.scale, self.draws = scale, scale.draws
        self.builder = GraphBuilder("step")
        self.sizes: dict[int, tuple[int, int]] = {}  # tensor -> bytes
        self.parameters = []
        for number in range(self.draws.integer(0, 3)):
            size = (scale.bytes(), 0)
            self.parameters.append(self.builder.parameter(f"p{number}", size))
            self.sizes[self.parameters[-1]] = size
        self.buffers = [self.builder.buffer("b0", scale.bytes())] if self.draws.chance(30) else []
        self.users: dict[int, list[int]] = {p: [] for p in self.parameters}
        self.reads: dict[int, list[int]] = {}  # forward op -> activations
        self.owned: dict[int, list[int]] = {}  # forward op -> parameters
        self.stage: dict[int, int] = {}  # forward op -> stage
        self.arriving: dict[int, list[tuple[int, int]]] = {}  # tensor -> (gradient, forward op)
        self.made: dict[int, list[int]] = {p: [] for p in self.parameters}  # parameter gradients
        self.count = 0

    def add(self, **fields) -> int:
        self.count += 1
        handle = self.builder.op(
            f"o{self.count}",
            sync=self.draws.chance(5),
            workspace=draw_affine(self.scale),
            resident=draw_affine(self.scale),
            **fields,
        )
        made = zip(self.builder.outputs(handle), fields.get("outputs", ()), strict=True)
        self.sizes |= {tensor: out.bytes for tensor, out in made}
        return handle

    def size(self) -> tuple[int, int]:
        return (self.scale.bytes(), self.scale.bytes() if self.draws.chance(50) else 0)

    def out(self, inputs: list[int], like: int | None = None, role: Role = Role.ACTIVATION) -> Out:
        size = self.size() if like is None else self.sizes[like]
        base = self.draws.pick(inputs) if inputs and self.draws.chance(20) else None
        return Out(size, storage_of=base, role=role)

    def forward(self, stage: int, tensors: list[int]) -> None:
        draws = self.draws
        read = sorted({draws.pick(tensors) for _ in range(draws.integer(0, 3)) if tensors})
        owned = sorted({draws.pick(self.parameters) for _ in range(2) if self.parameters})
        owned = owned if draws.chance(50) else []
        given = [*owned, *(self.buffers if draws.chance(20) else [])]
        is_input = not read and not given and draws.chance(70)
        mates = [op for op, other in self.stage.items() if other == stage]
        op = self.add(
            module=draws.pick(MODULES) if self.modules else "",
            op_class=OpClass.INPUT if is_input else draws.pick(CLASSES),
            inputs=[*read, *given],
            outputs=[self.out(read) for _ in range(draws.pick((1, 1, 2)))],
            unit_of=draws.pick(mates) if mates and draws.chance(10) else None,
        )
        self.stage[op], self.reads[op], self.owned[op] = stage, read, owned
        for parameter in owned:
            self.users[parameter].append(op)
        tensors += self.builder.outputs(op)

    def gradient_of(self, tensor: int) -> list[int]:
        """Sums what arrives, as autograd does: one after another, with a consumer's backward."""
        arriving = self.arriving.get(tensor, [])
        if len(arriving) < 2 or self.draws.chance(20):
            return [gradient for gradient, _ in arriving]
        total = arriving[0][0]
        for gradient, consumer in arriving[1:]:
            out = self.out([total], total)
            op = self.add(phase=Phase.B, unit_of=consumer, inputs=[total, gradient], outputs=[out])
            (total,) = self.builder.outputs(op)
        return [total]

    def backward(self, op: int) -> None:
        draws = self.draws
        outputs = self.builder.outputs(op)
        gradients = [g for tensor in outputs for g in self.gradient_of(tensor)]
        if not gradients and not draws.chance(40):
            return
        read, owned = self.reads[op], self.owned[op]
        saved = [t for t in (*read, *owned, *outputs[1:]) if draws.chance(60)] + [outputs[0]]
        together = draws.chance(30)
        roles = [Role.GRADIENT if len(self.users[p]) == 1 else Role.ACTIVATION for p in owned]
        main = self.add(
            phase=Phase.B,
            op_class=draws.pick(CLASSES),
            unit_of=op,
            inputs=[*gradients, *saved],
            outputs=[
                *(self.out([*gradients, *saved], tensor) for tensor in read),
                *(self.out([], p, r) for p, r in zip(owned, roles, strict=True) if together),
            ],
        )
        made = self.builder.outputs(main)
        for tensor, gradient in zip(read, made, strict=False):
            self.arriving.setdefault(tensor, []).append((gradient, op))
        parts = list(made[len(read) :])
        for parameter, role in () if together else zip(owned, roles, strict=True):
            extra = self.add(
                phase=Phase.B,
                unit_of=op,
                inputs=[*gradients, *read, outputs[0]] if draws.chance(80) else gradients[:1],
                outputs=[self.out([], parameter, role)],
            )
            parts += self.builder.outputs(extra)
        for parameter, gradient in zip(owned, parts, strict=True):
            self.made[parameter].append(gradient)

    def update(self, parameter: int) -> None:
        owner, *others = self.users[parameter]
        gradients = list(self.made[parameter])
        while len(gradients) > 1:
            role = Role.GRADIENT if len(gradients) == 2 else Role.ACTIVATION
            out = self.out(gradients[:1], parameter, role)
            op = self.add(phase=Phase.B, unit_of=owner, inputs=gradients[:2], outputs=[out])
            gradients[:2] = self.builder.outputs(op)
        extra = [self.out([])] if self.draws.chance(20) else []
        update = self.add(
            phase=Phase.U,
            op_class=OpClass.UPDATE,
            unit_of=owner,
            inputs=[parameter, *gradients],
            outputs=[Out(8, storage_of=parameter), *extra],
            elements=self.draws.integer(0, 1000),
        )
        for user in others:
            self.add(
                phase=Phase.U,
                op_class=OpClass.COPY,
                unit_of=user,
                inputs=self.builder.outputs(update),
            )


def draw_step(draws: Draws, most: int = 14) -> tuple[OpGraph, NDArray[np.int32]]:
    """Draws a training step, and a stage for each of its units, [unit]: a DAG of 1 to 4."""
    step = _Step(Scale(draws, tied=draws.chance(50)))
    step.modules = draws.chance(70)
    num_ops = draws.integer(1, most)
    num_stages = draws.integer(1, min(4, num_ops))
    cuts = sorted({draws.integer(1, num_ops) for _ in range(num_stages - 1)} - {num_ops})
    tensors: list[int] = []
    for op in range(num_ops):
        step.forward(sum(op >= cut for cut in cuts), tensors)
    for op in sorted(step.stage, reverse=True):
        step.backward(op)
    for parameter in step.parameters:
        if step.made[parameter]:
            step.update(parameter)
    graph = step.builder.build(measured_on=None)
    stage = np.zeros(graph.num_units, np.int32)
    for op, number in step.stage.items():
        stage[graph.unit[op]] = number
    return graph, stage


# --- the same by hand -----------------------------------------------------------------------------


def readers(graph: OpGraph, op: int) -> list[int]:
    """Ops that read what an op writes."""
    tensors = range(graph.first_output[op], graph.first_output[op + 1])
    return [int(c) for t in tensors for c in graph.consumers[slice(*graph.first_consumer[t:][:2])]]


def inputs_of(graph: OpGraph, op: int) -> list[int]:
    return graph.inputs[graph.first_input[op] : graph.first_input[op + 1]].tolist()


def outputs_of(graph: OpGraph, op: int) -> list[int]:
    return list(range(graph.first_output[op], graph.first_output[op + 1]))


def slow_phases(graph: OpGraph) -> list[int]:
    """[op] phases with the backward split, each op after all that read it."""
    phases = graph.phase.tolist()
    for op in reversed(range(graph.num_ops)):
        if phases[op] != Phase.B:
            continue
        users = readers(graph, op)
        writes = any(graph.tensor_role[t] == Role.GRADIENT for t in outputs_of(graph, op))
        is_weights = bool(users) or writes
        for user in users:
            makers = graph.tensor_producer[inputs_of(graph, user)]
            is_sum = len(makers) > 1 and all(m >= 0 and graph.phase[m] == Phase.B for m in makers)
            sizes = [*inputs_of(graph, user), *outputs_of(graph, user)[:1]]
            is_sum &= len({tuple(graph.tensor_bytes[t].tolist()) for t in sizes}) == 1
            near = graph.unit[user] == graph.unit[op] or is_sum
            is_weights &= phases[user] == Phase.U or (phases[user] == Phase.W and near)
        phases[op] = Phase.W if is_weights else Phase.I
    return phases


class Run(NamedTuple):
    """One op at its place in what a stage does."""

    op: int
    again: bool


class SlowStage(NamedTuple):
    """What one stage does and holds."""

    runs: list[list[Run]]  # [part]
    alive: list[int]  # [part] bytes at its start
    extra: list[int]  # [part] bytes
    first_extra: list[int]  # [part] bytes
    gradient: list[int]  # [part] bytes


class SlowWalk:
    """Walks the ops of one stage of a cut graph."""

    def __init__(
        self, graph: OpGraph, cut: Cut, stage: int, recompute: Sequence[str], split: bool
    ) -> None:
        self.graph, self.cut, self.stage, self.split = graph, cut, stage, split
        self.segment = find_segments(graph, cut, recompute).tolist()
        self.touched = [self._touched(op) for op in range(graph.num_ops)]
        self.dropped = {
            storage for storage in range(graph.num_storages) if self._is_dropped(storage)
        }
        self.runs = self._runs()

    def _touched(self, op: int) -> dict[int, list[int]]:
        """Storages that an op touches -> tensors."""
        graph, found = self.graph, {}
        for tensor in (*inputs_of(graph, op), *outputs_of(graph, op)):
            storage = int(graph.tensor_storage[tensor])
            if not graph.persistent_storage[storage]:
                found.setdefault(storage, []).append(tensor)
        return found

    def _is_dropped(self, storage: int) -> bool:
        users = [op for op in range(self.graph.num_ops) if storage in self.touched[op]]
        forward = [op for op in users if self.cut.phase[op] == Phase.F]
        return (
            bool(forward)
            and all(self.cut.stage[op] == self.stage for op in users)
            and all(self.cut.phase[op] != Phase.U for op in users)
            and all(self.graph.op_class[op] != OpClass.INPUT for op in forward)
            and len({self.segment[op] for op in forward}) == 1
            and self.segment[forward[0]] >= 0
        )

    def _part(self, op: int) -> int:
        phase = self.cut.phase[op]
        return {Phase.F: 0, Phase.I: 1, Phase.W: 2 if self.split else 1, Phase.U: 3}[phase]

    def _runs(self) -> list[list[Run]]:
        mine = [op for op in range(self.graph.num_ops) if self.cut.stage[op] == self.stage]
        parts = [[Run(op, False) for op in mine if self._part(op) == part] for part in range(4)]
        forward = [op for op in mine if self.cut.phase[op] == Phase.F]
        later = [run.op for part in (1, 2) for run in parts[part]]
        inserted: dict[int, list[Run]] = {}  # op -> what runs again before it
        for segment in {self.segment[op] for op in forward} - {-1}:
            members = [op for op in forward if self.segment[op] == segment]
            inside = {s for op in members for s in self.touched[op]} & self.dropped
            needed = {s for op in later for s in self.touched[op]} & inside
            makers = [
                op
                for op in members
                for t in outputs_of(self.graph, op)
                if self.graph.tensor_storage[t] in needed
            ]
            if makers:
                trigger = next(op for op in later if needed & self.touched[op].keys())
                inserted.setdefault(trigger, []).extend(
                    Run(op, True)
                    for op in members
                    if op <= max(makers) and self.graph.op_class[op] != OpClass.INPUT
                )
        return [
            [r for run in part for r in (*sorted(inserted.get(run.op, [])), run)] for part in parts
        ]

    def walk(self, tensor_bytes: NDArray[np.int64], workspace: NDArray[np.int64]) -> SlowStage:
        flat = [(part, run) for part in range(4) for run in self.runs[part]]
        first: dict[tuple[int, bool], int] = {}  # memory -> index in flat
        last: dict[tuple[int, bool], int] = {}
        size: dict[tuple[int, bool], int] = {}
        for index, (_, run) in enumerate(flat):
            for storage, tensors in self.touched[run.op].items():
                for tensor in tensors:
                    memory = (storage, self._is_fresh(run, storage, tensor))
                    first.setdefault(memory, index)
                    last[memory] = index
                    size[memory] = max(size.get(memory, 0), int(tensor_bytes[tensor]))
        updated = {
            s for op in range(self.graph.num_ops) if self.cut.phase[op] == Phase.U
            for s in self.touched[op]
        }  # fmt: skip
        kept = {m for m in first if m[0] in updated and not m[1] and flat[first[m]][0] != 3}
        comes: dict[tuple[int, bool], tuple[int, int]] = {}  # memory -> (part, index or -1)
        for memory, index in first.items():
            arrives = min(flat[index][0], self._arrives(memory[0]))
            comes[memory] = (arrives, index if arrives == flat[index][0] else -1)
        return self._levels(flat, workspace, (size, comes, last, kept))

    def _is_fresh(self, run: Run, storage: int, tensor: int) -> bool:
        """Whether a touch is of memory that is made a second time."""
        if storage in self.dropped:
            return run.again or self.cut.phase[run.op] != Phase.F
        return run.again and self.graph.tensor_producer[tensor] == run.op

    def _arrives(self, storage: int) -> int:
        """The first part in which a storage is sent here."""
        graph, cut, parts = self.graph, self.cut, [4]
        for op in range(graph.num_ops):
            if cut.stage[op] == self.stage and cut.phase[op] != Phase.U:
                for tensor in inputs_of(graph, op):
                    maker = graph.tensor_producer[tensor]
                    if graph.tensor_storage[tensor] == storage and cut.stage[maker] != self.stage:
                        parts.append(0 if cut.phase[maker] == Phase.F else 1)
        return min(parts)

    def _levels(self, flat, workspace, lives) -> SlowStage:
        size, comes, last, kept = lives
        alive, extra, first_extra, gradient = [], [], [], []
        here: set[tuple[int, bool]] = set()

        def level(*, with_gradients: bool) -> int:
            return sum(size[m] for m in here if with_gradients or m not in kept)

        for part in range(4):
            start, whole = level(with_gradients=False), level(with_gradients=True)
            most, most_whole = start, whole
            here |= {m for m, come in comes.items() if come == (part, -1)}
            for index, (_, run) in [(i, f) for i, f in enumerate(flat) if f[0] == part]:
                here |= {m for m, come in comes.items() if come[1] == index}
                used = int(workspace[run.op])
                most = max(most, level(with_gradients=False) + used)
                most_whole = max(most_whole, level(with_gradients=True) + used)
                here -= {m for m in here if last[m] == index and m not in kept}
            alive.append(start)
            extra.append(max(most, level(with_gradients=False)) - start)
            first_extra.append(max(most_whole, level(with_gradients=True)) - whole)
            gradient.append(sum(size[m] for m in kept if comes[m][0] == part))
        return SlowStage(self.runs, alive, extra, first_extra, gradient)
