"""A pipeline plan as a program: one task per stage, phase, microbatch and device.

A task stands for all ops of a phase. What it costs, keeps and sends is in the stage tables
(`simcore.stages`); here it gets its place in the program, its messages and its collectives. Task
order is that of the schedule played with unit costs, so it is topological, and each device meets
its tasks in the order of its action list.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from simcore.errors import PlanError
from simcore.graph import Phase
from simcore.mesh import DATA_AXIS, Mesh
from simcore.plan import DEFAULT_BUCKETS, Buckets
from simcore.schedule import Action, Schedule
from simcore.schedule_times import simulate_unit
from simcore.stages import StageTables
from simcore.steady_state import weight_versions

UNIT_COSTS = {Phase.F: 1.0, Phase.B: 2.0, Phase.I: 1.0, Phase.W: 1.0}


class Cost(NamedTuple):
    """What a task costs on every kind of device.

    With its device free at s and its host at h it ends at max(s, h + ahead) + seconds, and the host
    goes on at h + ahead + trail.
    """

    seconds: NDArray[np.float64]  # [kind] s
    ahead: NDArray[np.float64]  # [kind] s of the host before it can start
    trail: NDArray[np.float64]  # [kind] s of the host after that


class Part(NamedTuple):
    """A piece of a stage's backward, which makes the gradients of one bucket."""

    num_bytes: int
    cost: Cost


class Saved(NamedTuple):
    """Bytes of one microbatch of a stage."""

    freed: int  # from the forward to the backward, or to the input gradients
    shared: int  # from the forward to the weight gradients
    made: int  # from the input gradients to the weight gradients


class Tie(NamedTuple):
    """What one stage's update needs of another stage, once a step."""

    source: int  # stage
    target: int  # stage
    num_bytes: int
    is_updated: bool  # a parameter that the source has updated; else a sum of gradients


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipeline:
    """What a pipeline plan decides, and what follows for its stages.

    Attributes:
        schedule: who runs what, in which order.
        devices: device indices of every rank, in the order of its mesh, [rank][place].
        meshes: of the devices of every rank, [rank]; its copies share each microbatch, and the
            devices of a copy do the ops of one shard each.
        tables: costs and sizes of each stage on one device at the samples that it sees, [stage].
        parts: the last backward of each stage that has copies, by bucket, [stage].
        ties: between stages that use the same parameters.
        microbatch: samples of a microbatch, over all copies.
        optimizer_sharding: 0 = every copy updates all; 1 = each updates its part of the state; 2 =
            and keeps only its part of the gradients; 3 = and only its part of the parameters.
        buckets: how gradients are put together for the sums.
        is_folded: all places of a stage do the same at the same time, so that only the first of
            each stage is written (see `simcore.pipeline_fold`).
        kinds: device kinds, the last axis of costs.
    """

    schedule: Schedule
    devices: tuple[tuple[int, ...], ...]
    meshes: tuple[Mesh, ...]
    tables: tuple[StageTables, ...]
    parts: tuple[tuple[Part, ...], ...]
    ties: tuple[Tie, ...]
    microbatch: int
    kinds: tuple[str, ...]
    optimizer_sharding: int = 0
    buckets: Buckets = DEFAULT_BUCKETS
    is_folded: bool = False

    def places(self, stage: int) -> tuple[int, ...]:
        """Returns the devices of a stage, in the order of its mesh."""
        return self.devices[self.schedule.stage_rank[stage]]

    def written(self, stage: int) -> range:
        """Returns the places of a stage whose tasks are written."""
        return range(1 if self.is_folded else len(self.places(stage)))

    def mesh(self, stage: int) -> Mesh:
        """Returns the mesh of a stage."""
        return self.meshes[self.schedule.stage_rank[stage]]

    def copies(self, stage: int) -> int:
        """Returns how many copies a stage has."""
        return self.mesh(stage).copies

    def cost(self, stage: int, phase: Phase, *, adds: bool = False) -> Cost:
        """Returns what a phase of a stage costs.

        Args:
            stage: the stage.
            phase: the phase.
            adds: whether gradients are added to those of earlier microbatches.
        """
        tables = self.tables[stage]
        seconds, ahead = tables.seconds[stage, phase], tables.ahead[stage, phase]
        if adds:
            seconds = seconds + self.adding(stage, phase)
        if phase == Phase.U and self.optimizer_sharding:
            seconds = seconds / self.copies(stage)
        return Cost(seconds, ahead, tables.launch[stage, phase] - ahead)

    def backward_cost(self, stage: int, phase: Phase, part: Part | None, *, adds: bool) -> Cost:
        """Returns what a backward costs, or the part of it that fills a bucket."""
        if part is None:
            return self.cost(stage, phase, adds=adds)
        if not adds:
            return part.cost
        share = part.num_bytes / max(1, sum(each.num_bytes for each in self.parts[stage]))
        seconds = part.cost.seconds + share * self.adding(stage, phase)
        return part.cost._replace(seconds=seconds)

    def adding(self, stage: int, phase: Phase) -> NDArray[np.float64]:
        """Returns the seconds to add what a phase makes to earlier gradients, [kind]."""
        tables = self.tables[stage]
        share = int(tables.new_gradient[stage, phase]) / max(1, int(tables.gradient[stage]))
        adding: NDArray[np.float64] = share * tables.accumulate[stage]
        return adding

    def extra(self, stage: int, phase: Phase, *, adds: bool) -> int:
        """Returns the bytes that a phase needs above what is alive before it.

        A gradient that is to be added exists beside the sum until then.
        """
        tables = self.tables[stage]
        extra = int(tables.extra[stage, phase])
        return extra + (int(tables.new_gradient[stage, phase]) if adds else 0)

    def saved(self, stage: int) -> Saved:
        """Returns what one microbatch of a stage holds between its phases."""
        tables = self.tables[stage]
        saved, kept = int(tables.saved[stage]), int(tables.kept[stage])
        if not self.schedule.splits:
            return Saved(saved, 0, 0)
        shared = min(saved, kept)
        return Saved(saved - shared, shared, kept - shared)

    def sent(self, edge: tuple[int, int], *, forward: bool, share: float = 1.0) -> int:
        """Returns the bytes that go along an edge for a share of a microbatch's samples."""
        tables = self.tables[0]
        if edge not in tables.edges:
            return 0  # one only waits for the other
        rows = tables.forward_bytes if forward else tables.backward_bytes
        constant, growing = rows[tables.edges.index(edge)].tolist()
        samples = 1 if tables.batch is None else self.microbatch / tables.batch
        return int(constant + round(growing * samples * share))

    def held(self, stage: int) -> dict[str, int]:
        """Returns the bytes, by class, that one device of a stage holds for the whole step."""
        tables, copies = self.tables[stage], self.copies(stage)
        state = int(tables.state_bytes[stage])
        if self.optimizer_sharding >= 1:
            state = -(-state // copies)
        parameters = int(tables.parameter_bytes[stage]) * weight_versions(self.schedule)[stage]
        if self.optimizer_sharding == 3:
            parameters = -(-parameters // copies)
        return {
            "parameters": parameters,
            "optimizer state": state,
            "buffers": int(tables.buffer_bytes[stage]),
            "other": int(tables.resident[stage]),
        }

    def gradient(self, stage: int) -> int:
        """Returns the bytes of parameter gradients, and of their buckets, on one device."""
        copies, gradient = self.copies(stage), int(self.tables[stage].gradient[stage])
        kept = -(-gradient // copies) if self.optimizer_sharding >= 2 else gradient
        return kept + (0 if copies == 1 or self.buckets.as_views else kept)


def slices(sources: int, targets: int) -> Iterator[tuple[int, int, float]]:
    """Yields (source, target, share of the samples) for copies that split the same samples.

    Each target fetches from each source what the two have in common, once.
    """
    for target in range(targets):
        for source in range(sources):
            common = min((source + 1) * targets, (target + 1) * sources)
            common -= max(source * targets, target * sources)
            if common > 0:
                yield source, target, common / (sources * targets)


def links(source: Mesh, target: Mesh) -> Iterator[tuple[int, int, float]]:
    """Yields (place, place, share of the samples) of what one mesh sends another.

    Each shard of a copy fetches all that it needs from one shard of each copy it needs samples of,
    the one with its own number where there is one.
    """
    mine, theirs = source.members(DATA_AXIS), target.members(DATA_AXIS)  # [shard, copy]
    for first, second, share in slices(source.copies, target.copies):
        for shard in range(target.shards):
            peer = shard * source.shards // target.shards
            yield int(mine[peer, first]), int(theirs[shard, second]), share


def action_order(schedule: Schedule) -> list[Action]:
    """Returns the actions by their start with unit costs, then by rank and position."""
    times = simulate_unit(schedule, UNIT_COSTS)
    actions = [action for row in schedule.actions for action in row]
    ranks = np.repeat(np.arange(schedule.num_ranks), np.diff(times.first_action))
    order = np.lexsort((np.arange(len(actions)), ranks, times.start))
    return [actions[index] for index in order.tolist()]


def update_order(pipeline: Pipeline) -> list[int]:
    """Returns the stages so that who updates a shared parameter comes before who copies it."""
    order = nx.DiGraph()
    order.add_nodes_from(range(pipeline.schedule.num_stages))
    order.add_edges_from((tie.source, tie.target) for tie in pipeline.ties if tie.is_updated)
    try:
        return list(nx.lexicographical_topological_sort(order))
    except nx.NetworkXUnfeasible:
        circle = ", ".join(str(edge[0]) for edge in nx.find_cycle(order))
        raise PlanError(f"stages {circle} wait for each other's shared parameters") from None


def last_backwards(schedule: Schedule) -> dict[int, Action]:
    """Returns, for each stage, the action after which all its gradients are there."""
    return {
        action.stage: action
        for row in schedule.actions
        for action in row
        if action.phase in {Phase.B, Phase.W}
    }
