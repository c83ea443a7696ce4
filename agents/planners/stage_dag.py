"""Pipelines whose stages form a DAG, for models with branches; a chain is the simplest of them.

GraphPipe (Jeon et al., ASPLOS 2025) showed that stages of parallel branches should run side by
side: the pipeline is then less deep, fills sooner and holds fewer microbatches. Here every way to
write the nodes in a line gives intervals that are such stages: along a line that follows one branch
after the other they are side by side, along one that goes level by level they hold pieces of all.
For each line, each order of the devices and each number of microbatches a dynamic program finds the
stages, their copies (not the same for all) and where they recompute; then the best are simulated,
and single nodes, devices and rhythms changed while that helps. The space includes what chain
planners choose from, but for several stages on a device and asynchronous updates.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from agents.pipelines.env import Freedom, PipelineTask, Rhythm
from agents.pipelines.estimate import Estimator
from agents.pipelines.moves import neighbours, units_moved
from agents.pipelines.nodes import NodeCosts, NodeGraph
from agents.pipelines.plans import DagPlan, Score, Simulator
from agents.planners.compiled_stage_dag import Program, solve, stage_seconds
from agents.planners.recorder import Budget
from simcore.recompute import Recompute

CAPS = (1.0, 1.02, 1.08, 1.2, 1.5)  # paces that stages may have, over the least possible
PROPOSED = 0.4  # of a budget, for what the dynamic programs propose
NEIGHBOURS = 60  # of a plan, that are simulated at most
BEAM = 4  # plans that are changed step by step
_PASSES = 2  # of a ring all-reduce: every byte leaves and comes about twice


@dataclass(slots=True, kw_only=True)
class StageDagSearch:
    """One search for pipelines whose stages form a DAG.

    Attributes:
        task: the space.
        listener: called after each simulation.
        best: the best that fits, with its score.
        nearest: the one that is least over the memory.
    """

    task: PipelineTask
    listener: Callable[[Budget], None] | None = None
    best: tuple[Score, DagPlan] | None = None
    nearest: tuple[Score, DagPlan] | None = None
    waiting: list[DagPlan] | None = None  # most promising last
    front: list[tuple[Score, DagPlan]] = field(default_factory=list)  # best first
    seen: set[DagPlan] = field(default_factory=set)
    estimate: Estimator = field(init=False)

    def __post_init__(self) -> None:
        self.estimate = Estimator(self.task)

    @classmethod
    def build(
        cls,
        simulator: Simulator,
        freedom: Freedom | None = None,
        listener: Callable[[Budget], None] | None = None,
    ) -> "StageDagSearch":
        """Returns a search that has tried nothing.

        Raises:
            PlanError: there is no such pipeline.
        """
        return cls(task=PipelineTask.build(simulator, freedom), listener=listener)

    def run(self, budget: Budget) -> None:
        """Searches until the budget is spent; called again, it goes on."""
        if self.waiting is None:
            found = dict.fromkeys(proposals(self.task, budget))
            self.waiting = sorted(found, key=self.estimate, reverse=True)
        part = budget.part(PROPOSED)
        while self.waiting and (part.left() or not self.seen):
            self._try(self.waiting.pop(), budget)
        self._improve(budget)
        while self.waiting and budget.left():
            self._try(self.waiting.pop(), budget)

    def _try(self, plan: DagPlan, budget: Budget) -> Score | None:
        """Simulates a plan that was not met before; again with less memory where it is over."""
        if plan in self.seen:
            return None
        self.seen.add(plan)
        score = self.task.score([plan])[0]
        budget.charge(1)
        self._note(score, plan)
        if self.listener is not None:
            self.listener(budget)
        return score

    def _note(self, score: Score, plan: DagPlan) -> None:
        if not score.step_time < np.inf:
            return
        if score.fits and (self.best is None or score.rank < self.best[0].rank):
            self.best = score, plan
        if not score.fits and (self.nearest is None or score.rank < self.nearest[0].rank):
            self.nearest = score, plan
        self.front = sorted([*self.front, (score, plan)], key=lambda pair: pair[0].rank)[:BEAM]

    def _improve(self, budget: Budget) -> None:
        """Changes the best plans step by step while that helps."""
        done: set[DagPlan] = set()
        while budget.left():
            left = [(score, plan) for score, plan in self.front if plan not in done]
            if not left:
                return
            score, plan = left[0]
            done.add(plan)
            others = neighbours(self.task, plan, score)
            if not score.overflow:
                others += units_moved(self.task, plan)
                others = sorted(others, key=self.estimate)[:NEIGHBOURS]
            for other in others:
                if not budget.left():
                    return
                found = self._try(other, budget)
                if found is not None and found.rank < score.rank:
                    break  # go on from there


def proposals(task: PipelineTask, budget: Budget) -> Iterator[DagPlan]:
    """Yields what the dynamic programs find, until half of a budget of seconds is spent."""
    part, nodes = budget.part(PROPOSED), task.simulator.nodes
    lines, rows = node_orders(nodes), device_orders(nodes)
    rounds = sorted({rhythm.microbatches for rhythm in task.rhythms}, reverse=True)
    for microbatches, line, row in product(rounds, lines, rows):
        if not part.left():
            return
        program = make_program(task, microbatches, line, row)
        if program is not None:
            yield from _solved(task, program, microbatches, line, row)


def _solved(
    task: PipelineTask,
    program: Program,
    microbatches: int,
    line: Sequence[int],
    row: Sequence[int],
) -> Iterator[DagPlan]:
    most = task.counts[-1]
    names = {r.schedule for r in task.rhythms if r.microbatches == microbatches}
    for holds_all in (False, True) if "gpipe" in names else (False,):
        asked = {"gpipe"} if holds_all else names - {"gpipe"}
        if not asked:
            continue
        paces = solve(program, microbatches, most, holds_all, np.inf)[0][:, 0, 0]
        if not np.isfinite(paces).any():
            continue
        for cap in CAPS:
            limit = float(paces.min()) * cap * (1 + 1e-9)
            value, ways, ends = solve(program, microbatches, most, holds_all, limit)
            for count in task.counts:
                if value[count - 1, 0, 0] < np.inf:
                    stages = _traced(program, ways, ends, count)
                    for name in sorted(asked):
                        yield _plan(program, stages, Rhythm(microbatches, name, 0), line, row)


def _traced(
    program: Program, ways: NDArray[np.int64], ends: NDArray[np.int64], count: int
) -> list[tuple[int, int, int, int]]:
    """Returns the stages of a solution: way, first place, last place, first seat."""
    place = seat = 0
    stages = []
    for after in range(count - 1, -1, -1):
        way, end = int(ways[after, place, seat]), int(ends[after, place, seat])
        stages.append((way, place, end, seat))
        place, seat = end, seat + int(program.copies[way])
    return stages


def _plan(
    program: Program,
    stages: Sequence[tuple[int, int, int, int]],
    rhythm: Rhythm,
    line: Sequence[int],
    row: Sequence[int],
) -> DagPlan:
    stage, again = [0] * len(line), list[Recompute]()
    devices = []
    rounds = rhythm.microbatches
    for number, (way, begin, end, seat) in enumerate(stages):
        for place in range(begin, end):
            stage[line[place]] = number
        devices.append(tuple(row[seat : seat + int(program.copies[way])]))
        in_flight = rounds if rhythm.schedule == "gpipe" else min(rounds, len(stages) - number)
        recomputes = stage_seconds(program, (way, begin, end, seat), rounds, in_flight)[1]
        again.append("full" if recomputes else "none")
    return DagPlan(
        stage=tuple(stage),
        devices=tuple(devices),
        recompute=tuple(again),
        microbatches=rounds,
        schedule=rhythm.schedule,
        sharding=rhythm.sharding,
    )


# orders


def node_orders(nodes: NodeGraph) -> list[tuple[int, ...]]:
    """Returns lines of all nodes in which edges go forward.

    In the order of the program, branch after branch from either side, level by level, and as late
    as possible.
    """
    size = nodes.num_nodes
    weight = nodes.costs(nodes.space.problem.job.batch or 1).seconds.min(axis=1)
    early, late = np.zeros(size), np.zeros(size)
    for source, target in sorted(nodes.edges):
        early[target] = max(early[target], early[source] + weight[source])
    for source, target in sorted(nodes.edges, reverse=True):
        late[source] = max(late[source], late[target] + weight[target])
    orders = [tuple(range(size))]
    orders += [_depth_first(nodes, late, sign) for sign in (1.0, -1.0)]
    orders += [tuple(np.argsort(key, kind="stable").tolist()) for key in (early, -late - weight)]
    return [order for order in dict.fromkeys(orders) if _goes_forward(nodes, order)]


def _depth_first(nodes: NodeGraph, late: NDArray[np.float64], sign: float) -> tuple[int, ...]:
    """Returns a line that finishes a branch before it begins the next."""
    waiting = np.zeros(nodes.num_nodes, np.int64)
    after: list[list[int]] = [[] for _ in waiting]
    for source, target in nodes.edges:
        waiting[target] += 1
        after[source].append(target)
    stack = sorted(np.flatnonzero(waiting == 0).tolist(), key=lambda node: sign * late[node])
    line = []
    while stack:
        node = stack.pop()
        line.append(node)
        for target in sorted(after[node], key=lambda node: sign * late[node]):
            waiting[target] -= 1
            if not waiting[target]:
                stack.append(target)
    return tuple(line)


def _goes_forward(nodes: NodeGraph, order: Sequence[int]) -> bool:
    place = {node: k for k, node in enumerate(order)}
    return all(place[source] < place[target] for source, target in nodes.edges)


def device_orders(nodes: NodeGraph) -> list[tuple[int, ...]]:
    """Returns orders of the usable devices: by index, fastest first, and fastest last."""
    space = nodes.space
    work = np.where(np.isfinite(space.work), space.work, 0.0).sum(axis=0)
    devices = sorted(space.devices)
    fast = sorted(devices, key=lambda device: (work[device], device))
    orders = [tuple(devices), tuple(fast)]
    if len({float(work[device]) for device in devices}) > 1:
        orders.append(tuple(sorted(devices, key=lambda device: (-work[device], device))))
    return list(dict.fromkeys(orders))


# what stages take


def make_program(
    task: PipelineTask, microbatches: int, line: Sequence[int], row: Sequence[int]
) -> Program | None:
    """Returns what intervals of a line take on intervals of a row; None where nothing divides."""
    nodes = task.simulator.nodes
    problem = nodes.space.problem
    samples = (problem.job.batch or 0) // microbatches
    ways = [c for c in range(1, len(row) + 1) if samples % c == 0 and (task.copies or c == 1)]
    ways = [c for c in ways if c <= len(row) - task.counts[0] + 1]
    if not ways:
        return None
    parts = [_intervals(nodes, nodes.costs(samples // c), line, c, microbatches) for c in ways]
    cluster, room = problem.cluster, nodes.room()
    before = [row[0], *row[:-1]]
    pairs = list(zip(before, row, strict=True))
    bandwidth = [float(cluster.route_bandwidth[pair]) for pair in pairs]
    slowest = max(1.0, min(bandwidth[1:], default=np.inf))
    once = [
        part["once"] + _sum_seconds(part["gradient"], c, slowest)
        for part, c in zip(parts, ways, strict=True)
    ]
    return Program(
        copies=np.array(ways, np.int64),
        seconds=np.stack([part["seconds"] for part in parts]),
        again=np.stack([part["again"] for part in parts]),
        once=np.stack(once),
        held=np.stack([part["held"] for part in parts]),
        saved=np.stack([part["saved"] for part in parts]),
        moved=np.stack([part["moved"] for part in parts]),
        kind=np.array([nodes.chain.kinds.index(cluster.devices[d].kind) for d in row], np.int64),
        room=room[list(row)],
        pace=np.maximum(np.array(bandwidth), 1.0),
        latency=np.array([float(cluster.route_latency[pair]) for pair in pairs]),
    )


def _sum_seconds(gradient: NDArray[np.float64], copies: int, rate: float) -> NDArray[np.float64]:
    seconds: NDArray[np.float64] = gradient * (_PASSES * (copies - 1) / copies / rate)
    return seconds


def _intervals(
    nodes: NodeGraph, costs: NodeCosts, line: Sequence[int], copies: int, rounds: int
) -> dict[str, NDArray[np.float64]]:
    """Returns what intervals of a line take, each [place, place] or [kind, place, place]."""
    index = list(line)
    seconds = np.maximum(costs.seconds, costs.launch)[index]
    gradients = 1 + (copies > 1) + (rounds > 1)  # in buckets, and to be added
    held = costs.held + costs.state + costs.gradient * gradients
    extra = _largest(costs.extra[index])
    return {
        "seconds": np.moveaxis(_between(seconds), 2, 0),
        "again": np.moveaxis(_between(costs.forward[index]), 2, 0),
        "once": _between(costs.update[index]).max(axis=2),
        "gradient": _between(costs.gradient[index]),
        "held": _between(held[index]) + extra,
        "saved": _between(costs.saved[index]),
        "moved": _moved(nodes, costs.sent, line),
    }


def _between(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns sums from one place to another, [place, place, ...]."""
    ahead = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
    sums: NDArray[np.float64] = ahead[None] - ahead[:, None]
    return sums


def _largest(values: NDArray[np.float64]) -> NDArray[np.float64]:
    size = len(values)
    found = np.zeros((size + 1, size + 1))
    for place in range(size):
        found[place, place + 1 :] = np.maximum.accumulate(values[place:])
    return found


def _moved(nodes: NodeGraph, sent: NDArray[np.float64], line: Sequence[int]) -> NDArray[np.float64]:
    """Returns bytes that come into an interval from before it, and their gradients back."""
    size = len(line)
    place = {node: k for k, node in enumerate(line)}
    found = np.zeros((size + 1, size + 1))
    for (source, target), num_bytes in zip(nodes.edges, sent.tolist(), strict=True):
        first, last = place[source], place[target]
        found[first + 1 : last + 1, last + 1 :] += num_bytes
    return found
