"""Writes the tasks, messages and collectives of a pipeline as an `OpGraph`."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.collectives import Collective, make_collective
from simcore.cost import CostTable
from simcore.graph import GraphBuilder, OpClass, Out, Phase, Role
from simcore.mesh import DATA_AXIS
from simcore.op_curves import CostSource
from simcore.pipeline import (
    Cost,
    Part,
    Pipeline,
    action_order,
    last_backwards,
    links,
    update_order,
)
from simcore.pipeline_parts import Messages, Piece, Place, Rule, Task, Work
from simcore.program import NOWHERE, Program
from simcore.schedule import Action, neighbours

ALL = -1  # the microbatch of an update that is for all of them


def pipeline_program(
    name: str, cluster: Cluster, pipeline: Pipeline, batch: int | None = None
) -> Program:
    """Returns what a pipeline runs.

    Args:
        name: of the program.
        cluster: the cluster.
        pipeline: what is decided; its schedule is one that `check` accepts.
        batch: of the job; tasks cost what they do at their share of it.
    """
    return write_pipeline(name, cluster, pipeline, batch).program()


def write_pipeline(
    name: str, cluster: Cluster, pipeline: Pipeline, batch: int | None
) -> "PipelineWriter":
    """Returns the writer that has written all tasks of a pipeline."""
    writer = PipelineWriter(name, cluster, pipeline, batch)
    last = last_backwards(pipeline.schedule)
    for action in action_order(pipeline.schedule):
        is_last = action == last.get(action.stage)
        if action.phase == Phase.F:
            writer.forward(action)
            continue
        writer.backward(action, sums=is_last or pipeline.schedule.asynchronous)
    if not pipeline.schedule.asynchronous:
        for stage in update_order(pipeline):
            writer.update(stage)
    return writer


class PipelineWriter:
    """Appends tasks; remembers which tensors wait for a reader."""

    def __init__(self, name: str, cluster: Cluster, pipeline: Pipeline, batch: int | None) -> None:
        self.builder, self.batch = GraphBuilder(name), batch
        self.cluster, self.pipeline = cluster, pipeline
        schedule = pipeline.schedule
        self.before, self.after = neighbours(schedule.num_stages, schedule.edges)
        self.edges = {edge: number for number, edge in enumerate(schedule.edges)}
        self.between = [pipeline.saved(stage) for stage in range(schedule.num_stages)]
        self.placement: list[int] = []
        zero = np.zeros(len(pipeline.kinds))
        self.nothing = Cost(zero, zero, zero)
        self.costs: list[Cost] = []
        self.collectives: dict[int, Collective] = {}
        self.first_task: dict[Place, int] = {}
        self.recent: dict[Place, list[int]] = {}  # tokens of the tasks so far
        self.inbox: dict[tuple[Phase, int, int, int], list[int]] = {}  # messages that have come
        self.saved: dict[tuple[int, int, int], int] = {}  # by (stage, copy, microbatch)
        self.kept: dict[tuple[int, int, int], list[int]] = {}
        self.gradient: dict[Place, int] = {}
        self.begun: dict[Place, int] = {}  # microbatch that made the first gradients
        self.summed: dict[Place, list[int]] = {}  # what an update waits for
        self.size: dict[int, int] = {}  # bytes of messages
        self.tasks: dict[int, Task] = {}  # by op
        self.rules: dict[int, Rule] = {}  # by tensor; the others have no bytes
        self.links: dict[tuple[int, int], list[tuple[int, int, float]]] = {}  # between stages

    def program(self) -> Program:
        """Returns what was written."""
        graph, costs = self.builder.build(), self.costs
        seconds = np.array([cost.seconds for cost in costs]).reshape(len(costs), -1)
        return Program(
            graph=graph,
            placement=np.array(self.placement, np.int32),
            base=np.full(graph.num_ops, NOWHERE, np.int32),
            collectives=self.collectives,
            held=self._held(graph.num_ops),
            cost=CostTable(
                seconds=seconds[:, :, None],
                launch=np.array([cost.ahead for cost in costs]).reshape(seconds.shape),
                trail=np.array([cost.trail for cost in costs]).reshape(seconds.shape),
                source=np.full(seconds.shape, CostSource.ROOFLINE, np.uint8),
                relative_error=np.zeros(seconds.shape),
                kinds=self.pipeline.kinds,
                batches=(self.batch,),
            ),
        )

    def _held(self, num_ops: int) -> dict[str, NDArray[np.int64]]:
        """Returns what the first task of each place holds for the whole step, by class."""
        held: dict[str, NDArray[np.int64]] = {}
        for (stage, _), op in self.first_task.items():
            for name, size in self.pipeline.held(stage).items():
                held.setdefault(name, np.zeros(num_ops, np.int64))[op] = size
        return held

    def forward(self, action: Action) -> None:
        """Writes a forward of all copies of its stage."""
        gathered = self._gather(action)
        for copy in self.pipeline.written(action.stage):
            place, key = (action.stage, copy), (action.stage, copy, action.microbatch)
            received = self.inbox.pop((Phase.F, *key), [])
            fetched = gathered.get(copy, [])
            messages = self._messages(action, copy)
            saved = self.between[action.stage]
            freed = Out(saved.freed, name=f"{action}.{copy} freed")
            shared = Out(saved.shared, name=f"{action}.{copy} shared")
            cost = self.pipeline.cost(action.stage, Phase.F)
            outs = [freed, shared, *messages.outs]
            made = self._task(Work(str(action), place, Phase.F, cost, [*received, *fetched], outs))
            self.saved[key], self.kept[key] = made[0], [made[1]]
            self.rules[made[0]] = Rule("freed", action.stage)
            self.rules[made[1]] = Rule("shared", action.stage)
            self._post(messages, made[2:])

    def backward(self, action: Action, *, sums: bool) -> None:
        """Writes a backward (B, I or W) of all copies of its stage, and sums the gradients."""
        stage, phase = action.stage, action.phase
        places = self.pipeline.written(stage)
        sums = sums and phase != Phase.I
        parts = self.pipeline.parts[stage] if sums and self.pipeline.copies(stage) > 1 else ()
        gathered = self._gather(action) if phase != Phase.W else {}
        ready: list[list[int]] = []  # by part, then copy
        for number in range(max(len(parts), 1)):
            piece = Piece(
                action=action,
                label=str(action) if len(parts) <= 1 else f"{action} part {number}",
                part=parts[number] if parts else None,
                gathered=gathered if number == 0 else {},
                is_first=number == 0,
                is_end=number + 1 >= len(parts),
                sums=sums,
            )
            ready.append([self._backward_task(piece, copy) for copy in places])
        if parts:
            self._sum(action, parts, ready)
        if sums and self.pipeline.schedule.asynchronous:
            self.update(stage, action.microbatch)

    def update(self, stage: int, microbatch: int = ALL) -> None:
        """Writes the update of all copies of a stage; sharded ones fetch the others' parts."""
        copies = self.pipeline.copies(stage)
        label = f"{stage}U" if microbatch == ALL else f"{stage}U{microbatch}"
        done = []
        for copy in self.pipeline.written(stage):
            place = (stage, copy)
            arrived = self.inbox.pop((Phase.U, *place, microbatch), [])
            copied = [tensor for tensor in arrived if self._is_updated(tensor)]
            inputs = self.summed.pop(place, []) + [t for t in arrived if t not in copied]
            if place in self.gradient:
                inputs.append(self.gradient.pop(place))
            self.begun.pop(place, None)
            messages = self._ties(stage, copy, microbatch, updated=True)
            cost = self.pipeline.cost(stage, Phase.U)
            made = self._task(Work(label, place, Phase.U, cost, inputs, messages.outs))
            self._post(messages, made)
            done.append(self.recent[place][-1])
            if copied:  # parameters that another stage has updated
                self._task(Work(f"{label} copies", place, Phase.U, self.nothing, copied, []))
        if self.pipeline.optimizer_sharding in {1, 2} and copies > 1:
            size = int(self.pipeline.tables[stage].parameter_bytes[stage])
            for shard, group in enumerate(self._groups(stage)):
                waits = [done[place] for place in self._written(group)]
                name = self._name(f"all-gather after {label}", stage, shard)
                self._collective(name, ("all_gather", size), (stage, group), waits, 0)

    # how

    def _task(self, work: Work) -> list[int]:
        """Adds a task of a stage's copy; returns its tensors."""
        label, place, phase, cost, inputs, outs, adds = work
        stage, copy = place
        copies, tables = self.pipeline.places(stage), self.pipeline.tables[stage]
        held = sum(_size(out) for out in outs) + sum(
            self.size[tensor] for tensor in inputs if tensor in self.size
        )
        first = self.first_task.get(place)
        op = self.builder.op(
            label if len(copies) == 1 else f"{label} (copy {copy})",
            phase=phase,
            op_class=OpClass.OTHER,
            inputs=inputs,
            outputs=[*outs, Out(0, name=f"{label}.{copy} done")],
            unit_of=first,
            sync=bool(tables.is_sync[stage, phase, self._kind(copies[copy])]),
            workspace=max(0, self._extra(stage, phase, adds=adds) - held),
            resident=sum(self.pipeline.held(stage).values()) if first is None else 0,
        )
        self.first_task.setdefault(place, op)
        self.tasks[op] = Task(stage, phase, copy, adds, is_free=cost is self.nothing)
        self.placement.append(copies[copy])
        self.costs.append(cost)
        made = list(self.builder.outputs(op))
        self.recent.setdefault(place, []).append(made[-1])
        return made[:-1]

    def _kind(self, device: int) -> int:
        return self.pipeline.kinds.index(self.cluster.devices[device].kind)

    def _extra(self, stage: int, phase: Phase, *, adds: bool) -> int:
        """Returns the bytes that a phase needs above what is alive before it."""
        extra = self.pipeline.extra(stage, phase, adds=adds)
        is_sharded = self.pipeline.optimizer_sharding == 3 and self.pipeline.copies(stage) > 1
        if is_sharded and phase not in {Phase.U, Phase.W}:
            extra += int(self.pipeline.tables[stage].parameter_bytes[stage])  # gathered
        return extra

    def _backward_task(self, piece: Piece, copy: int) -> int:
        """Adds a backward or a part of one; returns the token that its gradients are made."""
        stage, phase, microbatch = piece.action
        place, key = (stage, copy), (stage, copy, microbatch)
        adds = self.begun.setdefault(place, microbatch) != microbatch
        is_new = place not in self.gradient
        inputs = list(piece.gathered.get(copy, []))
        if piece.is_first and phase != Phase.W:
            inputs += self.inbox.pop((Phase.B, *key), [])
        inputs += self._alive(phase, key, is_end=piece.is_end)
        outs = [Out(0, name=f"{piece.label}.{copy} made")]
        if phase == Phase.I:
            outs.append(Out(self.between[stage].made, name=f"{piece.label}.{copy} kept"))
        if not is_new:
            inputs.append(self.gradient[place])
        else:
            size = self.pipeline.gradient(stage)
            outs.append(Out(size, role=Role.GRADIENT, name=f"{piece.label}.{copy} gradient"))
        messages = Messages([], [], [])
        if piece.is_end and phase != Phase.W:
            messages = self._messages(piece.action, copy)
        if piece.is_end and piece.sums:
            many = self.pipeline.schedule.asynchronous
            ties = self._ties(stage, copy, microbatch if many else ALL, updated=False)
            for message in zip(ties.outs, ties.rules, ties.targets, strict=True):
                messages.add(*message)
        cost = self.pipeline.backward_cost(stage, phase, piece.part, adds=adds)
        outs += messages.outs
        made = self._task(Work(piece.label, place, phase, cost, inputs, outs, adds))
        if phase == Phase.I:
            self.kept[key].append(made[1])
            self.rules[made[1]] = Rule("made", stage)
        if is_new:
            self.gradient[place] = made[1 + (phase == Phase.I)]
            self.rules[self.gradient[place]] = Rule("gradient", stage)
        self._post(messages, made[len(made) - len(messages.outs) :])
        return made[0]

    def _is_updated(self, tensor: int) -> bool:
        rule = self.rules[tensor]
        return rule.size_of == "tie" and self.pipeline.ties[rule.number].is_updated

    def _alive(self, phase: Phase, key: tuple[int, int, int], *, is_end: bool) -> list[int]:
        """Returns what a backward finds of its microbatch; at its end that is not needed more."""
        kept = self.kept.pop(key) if is_end and phase != Phase.I else self.kept[key]
        if phase == Phase.W:
            return kept
        return [self.saved.pop(key) if is_end else self.saved[key], *kept]

    def _ties(self, stage: int, copy: int, microbatch: int, *, updated: bool) -> Messages:
        """Returns what a stage's copy tells the updates of stages with the same parameters."""
        found = Messages([], [], [])
        mine = len(self.pipeline.places(stage))
        for number, tie in enumerate(self.pipeline.ties):
            if tie.source != stage or tie.is_updated != updated:
                continue
            for target in self.pipeline.written(tie.target):
                if target % mine == copy:
                    what = "parameters" if updated else "gradients"
                    name = f"{what} of {stage}.{copy} to {tie.target}.{target} ({microbatch})"
                    goal = (Phase.U, tie.target, target, microbatch)
                    found.add(Out(tie.num_bytes, name=name), Rule("tie", number), goal)
        return found

    def _messages(self, action: Action, copy: int) -> Messages:
        """Returns what a task sends."""
        stage, microbatch = action.stage, action.microbatch
        is_forward = action.phase == Phase.F
        found = Messages([], [], [])
        for other in self.after[stage] if is_forward else self.before[stage]:
            pair = (stage, other) if is_forward else (other, stage)
            for source, target, share in self._links(stage, other):
                if source != copy:
                    continue
                size = self.pipeline.sent(pair, forward=is_forward, share=share)
                out = Out(size, name=f"{action}.{copy} to {other}.{target}")
                goal = (Phase.F if is_forward else Phase.B, other, target, microbatch)
                rule = Rule("forward" if is_forward else "backward", self.edges[pair], share)
                found.add(out, rule, goal)
        return found

    def _post(self, messages: Messages, tensors: Sequence[int]) -> None:
        for out, rule, target, tensor in zip(*messages, tensors, strict=True):
            self.inbox.setdefault(target, []).append(tensor)
            self.size[tensor] = _size(out)
            self.rules[tensor] = rule

    def _sum(self, action: Action, parts: Sequence[Part], ready: Sequence[Sequence[int]]) -> None:
        """Sums the gradients of a stage, bucket after bucket; shards apart."""
        stage = action.stage
        kind = "reduce_scatter" if self.pipeline.optimizer_sharding else "all_reduce"
        for shard, group in enumerate(self._groups(stage)):
            token: list[int] = []
            for number, (part, made) in enumerate(zip(parts, ready, strict=True)):
                what = f"{kind.replace('_', '-')} {action} bucket {number}"
                name = self._name(what, stage, shard)
                waits = [*(made[place] for place in self._written(group)), *token]
                outputs = self._collective(
                    name, (kind, part.num_bytes), (stage, group), waits, len(group) + 1
                )
                token = outputs[:1]
                for rank, place in enumerate(self._written(group)):
                    self.summed.setdefault((stage, place), []).append(outputs[1 + rank])

    def _gather(self, action: Action) -> dict[int, list[int]]:
        """Fetches parameters that copies keep a part of, a task ahead; returns each place's."""
        stage = action.stage
        found: dict[int, list[int]] = {}
        if self.pipeline.optimizer_sharding != 3 or self.pipeline.copies(stage) == 1:
            return {}
        size = int(self.pipeline.tables[stage].parameter_bytes[stage])
        for shard, group in enumerate(self._groups(stage)):
            before = [self.recent.get((stage, each), [])[-2:-1] for each in self._written(group)]
            waits = [token for tokens in before for token in tokens]
            name = self._name(f"all-gather for {action}", stage, shard)
            made = self._collective(name, ("all_gather", size), (stage, group), waits, 1)
            found |= dict.fromkeys(group, made)
        return found

    def _groups(self, stage: int) -> list[list[int]]:
        """Returns the places that hold the same shard, in each copy one, [shard][copy]."""
        groups: list[list[int]] = self.pipeline.mesh(stage).members(DATA_AXIS).tolist()
        return groups[:1] if self.pipeline.is_folded else groups

    def _written(self, group: list[int]) -> list[int]:
        return group[:1] if self.pipeline.is_folded else group

    def _name(self, name: str, stage: int, shard: int) -> str:
        return name if self.pipeline.mesh(stage).shards == 1 else f"{name} (shard {shard})"

    def _links(self, stage: int, other: int) -> list[tuple[int, int, float]]:
        """Returns what goes from the places of a stage to those of another."""
        if (stage, other) not in self.links:
            made = links(self.pipeline.mesh(stage), self.pipeline.mesh(other))
            self.links[stage, other] = list(made)
        return self.links[stage, other]

    def _collective(
        self,
        name: str,
        what: tuple[str, int],
        where: tuple[int, Sequence[int]],
        inputs: Sequence[int],
        num_outputs: int,
    ) -> list[int]:
        """Adds a collective, (kind, bytes), of places of a stage; returns its tokens."""
        outs = [Out(0, name=f"{name} token {number}") for number in range(num_outputs)]
        (kind, size), (stage, group) = what, where
        op = self.builder.op(
            name, target=kind, op_class=OpClass.COLLECTIVE, inputs=inputs, outputs=outs, kernels=0
        )
        devices = self.pipeline.places(stage)
        self.collectives[op] = make_collective(
            kind,
            size,
            self.cluster,
            [devices[place] for place in group],
            algorithm=self.pipeline.buckets.algorithm if kind == "all_reduce" else "auto",
        )
        self.placement.append(NOWHERE)
        self.costs.append(self.nothing)
        return list(self.builder.outputs(op))


def _size(out: Out) -> int:
    """Returns the bytes of an output that count as part of what a phase needs."""
    if out.role == Role.GRADIENT:
        return 0
    return out.bytes if isinstance(out.bytes, int) else sum(out.bytes)
