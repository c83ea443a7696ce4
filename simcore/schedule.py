"""Pipeline schedules as data: which rank runs which action, in which order.

An action is one phase of one stage on one microbatch. The update (phase U) is no action: it follows
the last backward of its stage where the schedule is synchronous, and the backward of every
microbatch, which then is a minibatch of its own, where it is asynchronous.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.errors import PlanError
from simcore.signature import Phase

Edges = tuple[tuple[int, int], ...]  # (from stage, to stage)


class Action(NamedTuple):
    """One phase (F, B, I or W) of one stage on one microbatch; ``2F0`` in text."""

    stage: int
    phase: Phase
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{Phase(self.phase).name}{self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What each rank runs, in order; `simcore.schedule_check.check` says whether it can.

    Attributes:
        name: for people.
        num_ranks: pipeline ranks; each runs one action at a time.
        num_stages: stages.
        num_microbatches: microbatches of a step; minibatches, where asynchronous.
        stage_rank: the rank that runs each stage, [stage].
        actions: [rank][position].
        asynchronous: whether weights are updated after each backward (weight stashing).
        edges: the DAG of the stages; none given means a chain.
    """

    name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    stage_rank: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    asynchronous: bool = False
    edges: Edges = ()

    def __post_init__(self) -> None:
        sizes = (self.num_ranks, self.num_stages, self.num_microbatches)
        if min(sizes) < 1:
            raise PlanError(
                f"schedule {self.name!r}: {sizes[0]} ranks, {sizes[1]} stages and {sizes[2]} "
                "microbatches; each must be at least 1"
            )
        if len(self.actions) != self.num_ranks:
            raise PlanError(
                f"schedule {self.name!r}: {len(self.actions)} action lists for "
                f"{self.num_ranks} ranks"
            )
        if len(self.stage_rank) != self.num_stages:
            raise PlanError(
                f"schedule {self.name!r}: ranks of {len(self.stage_rank)} stages for "
                f"{self.num_stages} stages"
            )
        for stage, rank in enumerate(self.stage_rank):
            if not 0 <= rank < self.num_ranks:
                raise PlanError(f"schedule {self.name!r}: stage {stage} is on rank {rank}")
        if not self.edges:
            object.__setattr__(self, "edges", chain(self.num_stages))
        depths(self.num_stages, self.edges)  # refuses what is no DAG

    @property
    def splits(self) -> bool:
        """Whether weight gradients have a phase of their own."""
        return any(action.phase == Phase.W for row in self.actions for action in row)

    @property
    def predecessors(self) -> list[list[int]]:
        """The stages that each stage receives activations from, [stage]."""
        return neighbours(self.num_stages, self.edges)[0]

    @property
    def successors(self) -> list[list[int]]:
        """The stages that each stage receives gradients from, [stage]."""
        return neighbours(self.num_stages, self.edges)[1]


def needs(action: Action, before: list[list[int]], after: list[list[int]]) -> list[Action]:
    """Returns what must have ended before an action starts; phase B stands for B or I.

    Args:
        action: of the schedule.
        before: predecessors of each stage.
        after: successors of each stage.
    """
    stage, phase, microbatch = action
    if phase == Phase.F:
        return [Action(source, Phase.F, microbatch) for source in before[stage]]
    if phase == Phase.W:
        return [Action(stage, Phase.B, microbatch)]
    gradients = [Action(target, Phase.B, microbatch) for target in after[stage]]
    return [Action(stage, Phase.F, microbatch), *gradients]


def made(action: Action) -> Action:
    """Returns what others wait for when they wait for an action, as `needs` says it."""
    return action._replace(phase=Phase.B) if action.phase == Phase.I else action


class ScheduleArrays(NamedTuple):
    """A schedule for compiled code."""

    stage: NDArray[np.int32]  # [action]
    phase: NDArray[np.int32]  # [action] value of a `Phase`
    microbatch: NDArray[np.int32]  # [action]
    first_action: NDArray[np.int64]  # [rank + 1] the actions of a rank are in order


def chain(num_stages: int) -> Edges:
    """Returns the edges of a chain of stages."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def neighbours(num_stages: int, edges: Edges) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the predecessors and the successors of each stage, ascending."""
    before: list[list[int]] = [[] for _ in range(num_stages)]
    after: list[list[int]] = [[] for _ in range(num_stages)]
    for source, target in sorted(edges):
        after[source].append(target)
        before[target].append(source)
    return before, after


def depths(num_stages: int, edges: Edges) -> list[int]:
    """Returns the longest path from each stage to any last one, in edges.

    Raises:
        PlanError: the edges repeat, leave the stages or have a cycle.
    """
    seen: set[tuple[int, int]] = set()
    for edge in edges:
        if not (0 <= edge[0] < num_stages and 0 <= edge[1] < num_stages):
            raise PlanError(f"stage edge {edge[0]} -> {edge[1]}: there are {num_stages} stages")
        if edge in seen:
            raise PlanError(f"stage edge {edge[0]} -> {edge[1]} is there twice")
        seen.add(edge)
    before, after = neighbours(num_stages, edges)
    waiting = [len(targets) for targets in after]
    ready = [stage for stage in range(num_stages) if not waiting[stage]]
    depth = [0] * num_stages
    for stage in ready:  # grows while it is read
        for source in before[stage]:
            depth[source] = max(depth[source], depth[stage] + 1)
            waiting[source] -= 1
            if not waiting[source]:
                ready.append(source)
    if len(ready) != num_stages:
        stage = next(stage for stage in range(num_stages) if waiting[stage])
        raise PlanError(f"stage {stage}: its edges lead round in a cycle")
    return depth


def to_arrays(schedule: Schedule) -> ScheduleArrays:
    """Returns the actions of all ranks, rank after rank."""
    actions = [action for row in schedule.actions for action in row]
    table = np.array(actions, np.int32).reshape(len(actions), 3)
    first = np.zeros(schedule.num_ranks + 1, np.int64)
    np.cumsum([len(row) for row in schedule.actions], out=first[1:])
    stage, phase, microbatch = (np.ascontiguousarray(column) for column in table.T)
    return ScheduleArrays(stage, phase, microbatch, first)


def max_in_flight(schedule: Schedule, *, until: Phase = Phase.I) -> list[int]:
    """Returns how many microbatches each stage holds at most at a time, [stage].

    A microbatch is held from its forward to its backward: to the input gradient (`until` I: most
    activations) or to the weight gradient (`until` W: what that needs; versions of the weights of
    ``pipedream``, whose backward is whole, are counted by either).
    """
    held, most = [0] * schedule.num_stages, [0] * schedule.num_stages
    for row in schedule.actions:
        for stage, phase, _ in row:
            if phase == Phase.F:
                held[stage] += 1
                most[stage] = max(most[stage], held[stage])
            elif phase in (Phase.B, until):
                held[stage] -= 1
    return most
