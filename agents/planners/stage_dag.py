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
from itertools import islice, product

import numpy as np
from numpy.typing import NDArray

from agents.pipelines.env import Freedom, PipelineTask, Rhythm
from agents.pipelines.estimate import Estimator
from agents.pipelines.moves import neighbours, units_moved
from agents.pipelines.nodes import NodeCosts, NodeGraph
from agents.pipelines.plans import DagPlan, Score, Simulator
from agents.planners.compiled_stage_dag import Paces, Program, solve, stage_paces
from agents.planners.recorder import Budget
from agents.planners.stage_dag_orders import device_orders, node_orders
from simcore.recompute import Recompute

CAPS = (1.0, 1.02, 1.08, 1.2, 1.5)  # paces that stages may have, over the least possible
PROPOSED = 0.4  # of a budget, for what the dynamic programs propose
PROGRAMS = 32  # microbatches and rows of devices that dynamic programs are solved for, all lines
NEIGHBOURS = 60  # of a plan, that are simulated at most
BEAM = 4  # plans that are changed step by step
_PROPOSALS, _LEAST_PROPOSALS = 4, 200  # for each simulation that a budget has, and at least
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
            room = budget.room()
            most = None if room is None else max(_LEAST_PROPOSALS, _PROPOSALS * room)
            found = list(dict.fromkeys(islice(proposals(self.task, budget), most)))
            self.waiting = self._ranked(found, budget)[::-1] or found[:1]
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
                others = self._ranked(others, budget)[:NEIGHBOURS]
            for other in others:
                if not budget.left():
                    return
                found = self._try(other, budget)
                if found is not None and found.rank < score.rank:
                    break  # go on from there

    def _ranked(self, plans: Sequence[DagPlan], budget: Budget) -> list[DagPlan]:
        """Returns plans, the most promising first; those that there is time to estimate."""
        found = []
        for number, plan in enumerate(plans):
            if not budget.left():
                break
            found.append((self.estimate(plan), number))
        return [plans[number] for _, number in sorted(found)]


def proposals(task: PipelineTask, budget: Budget) -> Iterator[DagPlan]:
    """Yields what the dynamic programs find, until a part of a budget of seconds is spent.

    Microbatches and rows of devices whose slowest stage along the program's own line promises most
    come first, then every line for them.
    """
    part = budget.part(PROPOSED)
    lines = node_orders(task.simulator.nodes)
    for microbatches, row in islice(_promising(task, lines[0], part), PROGRAMS):
        for line in lines:
            if not part.left():
                return
            program = make_program(task, microbatches, line, row)
            if program is not None:
                yield from _solved(task, program, microbatches, line, row)


def _promising(
    task: PipelineTask, line: Sequence[int], budget: Budget
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields numbers of microbatches with rows of devices, the most promising first."""
    found = []
    rounds = sorted({rhythm.microbatches for rhythm in task.rhythms}, reverse=True)
    rows = device_orders(task.simulator.nodes)
    for number, (microbatches, row) in enumerate(product(rounds, rows)):
        if number and not budget.left():
            break
        program = make_program(task, microbatches, line, row)
        if program is not None:
            paces = stage_paces(program, microbatches)
            rule = microbatches, task.counts[-1], False
            slowest = solve(program, paces, rule, np.inf)[0][:, 0, 0]
            depth = np.arange(len(slowest))
            found.append((float(((microbatches + depth) * slowest).min()), number))
    every = list(product(rounds, rows))
    yield from (every[number] for seconds, number in sorted(found) if seconds < np.inf)


def _solved(
    task: PipelineTask,
    program: Program,
    microbatches: int,
    line: Sequence[int],
    row: Sequence[int],
) -> Iterator[DagPlan]:
    names = {r.schedule for r in task.rhythms if r.microbatches == microbatches}
    paces = stage_paces(program, microbatches)
    for holds_all in (False, True) if "gpipe" in names else (False,):
        asked = {"gpipe"} if holds_all else names - {"gpipe"}
        if not asked:
            continue
        rule = microbatches, task.counts[-1], holds_all
        least = solve(program, paces, rule, np.inf)[0][list(_after(task)), 0, 0].min()
        if not least < np.inf:
            continue
        for cap in CAPS:
            value, ways, ends = solve(program, paces, rule, float(least) * cap * (1 + 1e-9))
            for after in _after(task):
                if value[after, 0, 0] < np.inf:
                    stages = traced(program, ways, ends, after + 1)
                    again = recomputed(paces, stages, rule)
                    for name in sorted(asked):
                        rhythm = Rhythm(microbatches, name, 0)
                        yield dag_plan(program, stages, again, rhythm, (line, row))


def _after(task: PipelineTask) -> range:
    """Returns the numbers of stages behind the first."""
    return range(task.counts[0] - 1, task.counts[-1])


def traced(
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


def recomputed(
    paces: Paces, stages: Sequence[tuple[int, int, int, int]], rule: tuple[int, int, bool]
) -> tuple[Recompute, ...]:
    """Returns what the backward of each stage runs again."""
    rounds, _, holds_all = rule
    found: list[Recompute] = []
    for number, stage in enumerate(stages):
        in_flight = rounds if holds_all else min(rounds, len(stages) - number)
        found.append("full" if paces.most[stage] < in_flight else "none")
    return tuple(found)


def dag_plan(
    program: Program,
    stages: Sequence[tuple[int, int, int, int]],
    again: tuple[Recompute, ...],
    rhythm: Rhythm,
    orders: tuple[Sequence[int], Sequence[int]],
) -> DagPlan:
    """Returns stages of a line of nodes on a row of devices as a plan.

    Args:
        program: what the stages are of.
        stages: as `traced` gives them.
        again: what the backward of each stage runs again, [stage].
        rhythm: microbatches and schedule.
        orders: the line and the row.
    """
    line, row = orders
    stage = [0] * len(line)
    devices = []
    for number, (way, begin, end, seat) in enumerate(stages):
        for place in range(begin, end):
            stage[line[place]] = number
        devices.append(tuple(row[seat : seat + int(program.copies[way])]))
    return DagPlan(
        stage=tuple(stage),
        devices=tuple(devices),
        recompute=again,
        microbatches=rhythm.microbatches,
        schedule=rhythm.schedule,
        sharding=rhythm.sharding,
    )


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
    never = np.full_like(parts[0]["again"], np.inf)
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
        again=np.stack([part["again"] if task.recompute else never for part in parts]),
        once=np.stack(once),
        held=np.stack([part["held"] for part in parts]),
        saved=np.stack([part["saved"] for part in parts]),
        moved=np.stack([part["moved"] for part in parts]),
        kind=np.array([nodes.chain.kinds.index(cluster.devices[d].kind) for d in row], np.int64),
        room=room[list(row)],
        pace=np.maximum(np.array(bandwidth), 1.0),
        latency=np.array([float(cluster.route_latency[pair]) for pair in pairs]),
        barred=np.pad(np.cumsum(~nodes.allowed[np.ix_(line, row)], axis=0), ((1, 0), (0, 0))),
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
    """Returns sums from one place to another, [place, place, ...]; inf over what is inf."""
    ends = np.isinf(values)
    first = np.zeros((1, *values.shape[1:]))
    ahead = np.concatenate([first, np.cumsum(np.where(ends, 0.0, values), axis=0)])
    barred = np.concatenate([first, np.cumsum(ends, axis=0)])
    sums: NDArray[np.float64] = ahead[None] - ahead[:, None]
    return np.where(barred[None] > barred[:, None], np.inf, sums)


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
