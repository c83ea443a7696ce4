"""DAPPLE's planner (Fan et al., PPoPP 2021) under its authors' analytic objective.

It chooses stages and replicas for synchronous training; the length of the schedule that the
objective stands for is here too.

As the published program counts: with M microbatches, block = the slowest of stages (seconds of a
microbatch / replicas) and of transfers between them (twice the cut's bytes); the length of a step
is block x (M - 1) + seconds of a microbatch on one GPU + the transfers of each cut once + what the
longest all-reduce lasts beyond the backward: max over stages i of (AR_i - i x block), at least 0.
All-reduces take 2 W (R - 1) / R over 3 GB/s across servers, over 25 GB/s x floor(R / 2) inside one;
transfers go at 1 GB/s to a stage inside one server, 3 GB/s to one that spans servers, 25 GB/s
within a server. GPUs are taken in three ways: from fresh servers first, from begun ones first, or
spread. The published planner minimises the block by a program and rates the result; this one
searches plans by branch and bound for the objective itself, so it is never worse.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.exact.pipedream_planner import ProfileStates
from agents.planners.recorder import Budget

GPU_RATE = 25e9  # bytes/s between GPUs of a server
NETWORK_RATE = 1e9  # bytes/s between servers, point to point
COLLECTIVE_RATE = 3e9  # bytes/s between servers, collectives
SECONDS = 30.0  # of the search, unless said otherwise

Place = tuple[int, ...]  # GPUs in each server


class DappleProblem(NamedTuple):
    """What is planned."""

    states: ProfileStates
    servers: int
    gpus: int  # in each server
    batch_scale: float  # samples of a step / samples of the profile
    microbatches: int


class DappleStage(NamedTuple):
    """One stage: states begin to end (exclusive), and where its replicas are."""

    begin: int
    end: int
    place: Place

    @property
    def replicas(self) -> int:
        """GPUs that share each microbatch."""
        return sum(self.place)


class DapplePlan(NamedTuple):
    """A plan and how good it is known to be."""

    stages: tuple[DappleStage, ...]
    seconds: float  # of a step, by the analytic objective
    is_optimal: bool  # whether all other plans were ruled out


def allreduce_seconds(place: Place, num_bytes: float) -> float:
    """Returns how long replicas at a place sum gradients of so many bytes."""
    replicas = sum(place)
    if replicas == 1:
        return 0.0
    moved = 2.0 * num_bytes * (replicas - 1) / replicas
    if sum(count > 0 for count in place) > 1:
        return moved / COLLECTIVE_RATE
    return moved / GPU_RATE / (replicas // 2)


def transfer_seconds(source: Place, target: Place, num_bytes: float) -> float:
    """Returns how long a cut's bytes take from the replicas at one place to those at another."""
    inside = [server for server, count in enumerate(target) if count]
    if len(inside) > 1:
        return num_bytes / COLLECTIVE_RATE
    away = sum(count for server, count in enumerate(source) if server != inside[0])
    if not away:
        return num_bytes / GPU_RATE
    return num_bytes / sum(source) * away / NETWORK_RATE


def analytic_seconds(problem: DappleProblem, stages: Sequence[DappleStage]) -> float:
    """Returns the length of a step by the authors' formula."""
    block, cuts = 0.0, 0.0
    for index, stage in enumerate(stages):
        block = max(block, _compute(problem, stage.begin, stage.end) / stage.replicas)
        if index:
            cut = _cut(problem, stage.begin)
            before = stages[index - 1].place
            block = max(block, transfer_seconds(before, stage.place, 2.0 * cut))
            cuts += transfer_seconds(before, stage.place, cut)
    late = max(
        allreduce_seconds(stage.place, _weight(problem, stage.begin, stage.end)) - index * block
        for index, stage in enumerate(stages)
    )
    whole = _compute(problem, 0, problem.states.num_states)
    return block * (problem.microbatches - 1) + whole + cuts + max(0.0, late)


def schedule_seconds(problem: DappleProblem, stages: Sequence[DappleStage]) -> float:
    """Returns the length of a step of the schedule: 1F1B with a flush, hops being stages too.

    A backward takes as long as a forward; gradients are summed after a stage's last backward.
    """
    forward: list[float] = []
    sums: list[float] = []
    for index, stage in enumerate(stages):
        if index:
            cut = _cut(problem, stage.begin)
            forward.append(transfer_seconds(stages[index - 1].place, stage.place, cut))
            sums.append(0.0)
        forward.append(_compute(problem, stage.begin, stage.end) / stage.replicas / 2)
        sums.append(allreduce_seconds(stage.place, _weight(problem, stage.begin, stage.end)))
    ends = _last_backwards(forward, problem.microbatches)
    return max(end + extra for end, extra in zip(ends, sums, strict=True))


def _last_backwards(seconds: Sequence[float], microbatches: int) -> list[float]:
    """Returns when each block ends its last backward."""
    count = len(seconds)
    done = [np.full((2, microbatches), math.inf) for _ in seconds]
    free = [0.0] * count
    todo = [_one_f_one_b(microbatches, count - block) for block in range(count)]
    position = [0] * count
    while any(at < len(actions) for at, actions in zip(position, todo, strict=True)):
        for block in range(count):
            while position[block] < len(todo[block]):
                phase, batch = todo[block][position[block]]
                ready = _ready(done, block, phase, batch)
                if math.isinf(ready):
                    break
                free[block] = max(free[block], ready) + seconds[block]
                done[block][phase, batch] = free[block]
                position[block] += 1
    return free


def _ready(done: list[NDArray[np.float64]], block: int, phase: int, batch: int) -> float:
    if phase == 0:
        return float(done[block - 1][0, batch]) if block else 0.0
    if block == len(done) - 1:
        return float(done[block][0, batch])
    return float(done[block + 1][1, batch])


def _one_f_one_b(microbatches: int, warm: int) -> list[tuple[int, int]]:
    """Returns (0 forward or 1 backward, microbatch) in order, `warm` forwards ahead."""
    ahead = min(warm, microbatches)
    actions = [(0, batch) for batch in range(ahead)]
    for batch in range(microbatches):
        actions.append((1, batch))
        if ahead + batch < microbatches:
            actions.append((0, ahead + batch))
    return actions


def _compute(problem: DappleProblem, begin: int, end: int) -> float:
    done = problem.states.done_seconds
    seconds = done[end - 1] - (done[begin - 1] if begin else 0.0)
    return float(seconds) * problem.batch_scale / problem.microbatches


def _weight(problem: DappleProblem, begin: int, end: int) -> float:
    held = problem.states.states.parameters
    return float(held[end - 1] - (held[begin - 1] if begin else 0.0))


def _cut(problem: DappleProblem, begin: int) -> float:
    """Returns bytes of a microbatch that cross into the stage that begins at a state."""
    return float(problem.states.states.output[begin - 1]) * (
        problem.batch_scale / problem.microbatches
    )


def places(problem: DappleProblem, used: Place, count: int) -> Iterator[Place]:
    """Yields where so many more GPUs may be taken: fresh servers first, begun first, or spread."""
    room = [problem.gpus - taken for taken in used]
    if sum(room) < count:
        return
    by_fresh = sorted(range(problem.servers), key=lambda server: (used[server], server))
    by_begun = sorted(range(problem.servers), key=lambda server: (-used[server], server))
    seen = set()
    for order in (by_begun, by_fresh):
        left, place = count, [0] * problem.servers
        for server in order:
            place[server] = min(left, room[server])
            left -= place[server]
        seen.add(tuple(place))
    place, left = [0] * problem.servers, count
    while left:
        server = max(range(problem.servers), key=lambda s: (room[s] - place[s], -s))
        place[server], left = place[server] + 1, left - 1
    seen.add(tuple(place))
    yield from sorted(seen, reverse=True)


class _Branch(NamedTuple):
    """Stages so far."""

    stages: tuple[DappleStage, ...]
    used: Place
    block: float
    cuts: float


class _Search:
    """Depth first, the fullest stages first, with the best plan so far as the limit."""

    def __init__(self, problem: DappleProblem, budget: Budget) -> None:
        self.problem, self.budget = problem, budget
        self.best: tuple[float, tuple[DappleStage, ...]] = (math.inf, ())
        self.is_late = False
        self.seen: dict[tuple[int, Place, Place, int], list[tuple[float, ...]]] = {}

    def limit(self, branch: _Branch) -> float:
        """Returns a bound on all plans that begin so."""
        problem = self.problem
        end = branch.stages[-1].end if branch.stages else 0
        left = problem.servers * problem.gpus - sum(branch.used)
        rest = _compute(problem, end, problem.states.num_states) if end < self.last else 0.0
        block = max(branch.block, rest / left if left else (math.inf if rest else 0.0))
        whole = _compute(problem, 0, problem.states.num_states)
        return block * (problem.microbatches - 1) + whole + branch.cuts

    @property
    def last(self) -> int:
        return self.problem.states.num_states

    def visit(self, branch: _Branch) -> None:
        if not self.budget.left():
            self.is_late = True
            return
        begin = branch.stages[-1].end if branch.stages else 0
        options = []
        for stage in self.next_stages(branch, begin):
            grown = self.grown(branch, stage)
            bound = self.limit(grown)
            if bound < self.best[0]:
                options.append((bound, stage.end != self.last, grown))
        for bound, _, grown in sorted(options, key=lambda option: option[:2]):
            if bound >= self.best[0]:
                break
            if grown.stages[-1].end == self.last:
                seconds = analytic_seconds(self.problem, grown.stages)
                if seconds < self.best[0]:
                    self.best = (seconds, grown.stages)
            elif not self.is_dominated(grown):
                self.visit(grown)

    def next_stages(self, branch: _Branch, begin: int) -> Iterator[DappleStage]:
        contains = self.problem.states.states.contains
        left = self.problem.servers * self.problem.gpus - sum(branch.used)
        for end in range(begin + 1, self.last + 1):
            if begin and not contains[end - 1, begin - 1]:
                continue
            for count in range(1, left + 1):
                for place in places(self.problem, branch.used, count):
                    yield DappleStage(begin, end, place)

    def grown(self, branch: _Branch, stage: DappleStage) -> _Branch:
        problem = self.problem
        block = max(branch.block, _compute(problem, stage.begin, stage.end) / stage.replicas)
        cuts = branch.cuts
        if branch.stages:
            before, cut = branch.stages[-1].place, _cut(problem, stage.begin)
            block = max(block, transfer_seconds(before, stage.place, 2.0 * cut))
            cuts += transfer_seconds(before, stage.place, cut)
        used = tuple(one + other for one, other in zip(branch.used, stage.place, strict=True))
        return _Branch((*branch.stages, stage), used, block, cuts)

    def is_dominated(self, branch: _Branch) -> bool:
        """Whether a branch with the same rest is at least as good in all that counts later."""
        if len(branch.stages) >= self.problem.microbatches:
            return False  # a shorter block could lengthen the step
        reduces = [
            allreduce_seconds(stage.place, _weight(self.problem, stage.begin, stage.end))
            for stage in branch.stages
        ]
        last = branch.stages[-1]
        key = (last.end, branch.used, last.place, len(branch.stages))
        mine = (branch.block, branch.cuts, *reduces)
        others = self.seen.setdefault(key, [])
        if any(all(o <= m for o, m in zip(other, mine, strict=True)) for other in others):
            return True
        others.append(mine)
        return False


def plan_dapple(problem: DappleProblem, budget: Budget | None = None) -> DapplePlan:
    """Returns the plan with the shortest step by the analytic objective.

    Args:
        problem: states, servers, batch.
        budget: seconds to search, by its own clock; None = `SECONDS` on the wall.
    """
    search = _Search(problem, budget or Budget(SECONDS))
    nothing = (0,) * problem.servers
    search.visit(_Branch((), nothing, 0.0, 0.0))
    return DapplePlan(search.best[1], search.best[0], not search.is_late)
