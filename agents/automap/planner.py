"""Ways to shard beyond the known styles: linkage groups chosen one by one, on every mesh.

On each mesh the additive objective is minimised exactly, and annealing goes on from there (or
every plan is tried, where they are few) on the compiled simulator. The best plan of each mesh is
handed out, to be simulated in full by whoever asked.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agents.automap.bounds import lean_bound, mesh_bound
from agents.automap.eliminate import eliminate
from agents.automap.ilp import Limits, solve
from agents.automap.operators import OperatorPartition
from agents.automap.search import Found, anneal, exhaustive
from agents.planners.recorder import Budget
from agents.planners.space import PlacementSpace
from simcore.cluster import Cluster
from simcore.errors import PlacewrightError
from simcore.lower import Problem
from simcore.plan import Plan
from simcore.profile_store import load_profile
from simcore.shard_batch import simulate_folded

AXES = ("x", "y")
EVALUATIONS = 1500  # of annealing on a mesh
_FEW = 4096  # plans that are all tried
_TABLES = 0.6  # of the seconds, where all meshes are looked at first
_Where: TypeAlias = tuple[Sequence[str], dict[str, int]]  # names of GPUs, and their mesh


class Grouped(NamedTuple):
    """The best plan of a mesh.

    Attributes:
        plan: with the planner's settings.
        problem: the mesh's problem.
        row: the plan, [decision].
        step_time: s, on the compiled simulator.
        overflow: bytes over the memory.
        additive: s, of the plan by the additive objective.
        optimum: s, the least of the additive objective over the mesh's plans.
        is_exact: whether every plan of the mesh was simulated.
    """

    plan: Plan
    problem: OperatorPartition
    row: NDArray[np.int8]  # [decision] axis
    step_time: float
    overflow: int
    additive: float
    optimum: float
    is_exact: bool

    @property
    def rank(self) -> tuple[int, float]:
        """What decides which of two is better, least first."""
        return self.overflow, self.step_time


class Laid(NamedTuple):
    """A mesh whose tables are made."""

    problem: OperatorPartition
    start: NDArray[np.int8]  # [decision] the best plan of the additive objective
    optimum: float  # s, of it
    bound: float  # s that no plan of the mesh beats, in less memory neither

    @property
    def rank(self) -> tuple[int, float]:
        """How many bytes over the memory the best additive plan is, and its sum, least first."""
        folded, reserve = self.problem.folded, self.problem.reserve_memory
        worth = simulate_folded(folded, self.start[None], reserve_memory=reserve)
        return int(worth.overflow[0]), self.optimum


def meshes(count: int) -> list[dict[str, int]]:
    """Returns every mesh of so many devices with one or two axes that split; one axis first."""
    divisors = [n for n in range(2, count + 1) if count % n == 0]
    one = [{"dp": count // n, AXES[0]: n} for n in divisors]
    two = [
        {"dp": count // (a * b), AXES[0]: a, AXES[1]: b}
        for a in divisors
        for b in divisors
        if count % (a * b) == 0
    ]
    return one + two


def device_sets(cluster: Cluster, allowed: Sequence[str] | None = None) -> list[list[str]]:
    """Returns the GPUs that meshes may be laid over: all, and those of the server that has most.

    Args:
        cluster: the cluster.
        allowed: names of devices that may be used, None = all GPUs.
    """
    names = [
        device.name
        for device in cluster.devices
        if not load_profile(device.kind).is_cpu and (allowed is None or device.name in allowed)
    ]
    node = {device.name: device.node for device in cluster.devices}
    servers = Counter(node[name] for name in names)
    if len(servers) < 2:
        return [names]
    most = max(servers, key=lambda each: servers[each])  # of equal ones the first
    return [names, [name for name in names if node[name] == most]]


@dataclass(slots=True, kw_only=True)
class GroupSearch:
    """The search over plans of groups; may be read while it goes on.

    Attributes:
        space: gives the graph, the cluster and the job.
        sets: names of GPUs of one kind, [set][GPU]; each is searched.
        reserve_memory: bytes to leave free on every GPU.
        proves: whether the tables of all meshes are made first, so that no plan beats `bound`, and
            the most promising mesh is searched first; else mesh after mesh.
        limit: s; meshes whose plans cannot be faster are not searched.
        found: the best plan of each mesh that was searched.
        bound: s that no plan of the meshes that were looked at beats.
        unknown: GPUs and mesh of what was not looked at.
        failed: meshes without a plan of groups.
    """

    space: PlacementSpace
    sets: Sequence[Sequence[str]]
    reserve_memory: int = 0
    proves: bool = False
    limit: float = math.inf
    found: list[Grouped] = field(default_factory=list)
    bound: float = math.inf
    unknown: list[_Where] = field(default_factory=list)
    failed: int = 0

    def run(self, budget: Budget) -> None:
        """Searches until the budget is spent; an evaluation is one on the compiled simulator."""
        if not (self.proves or budget.left()):
            self.unknown = list(_rounds(self.sets))
            return
        for laid in self._promising(budget) if self.proves else self._laid(budget):
            if laid.bound >= self.limit or not budget.left():
                continue
            best = _best_of(laid, budget)
            if best is not None:
                self.found = sorted([*self.found, best], key=lambda each: each.rank)

    def _promising(self, budget: Budget) -> list[Laid]:
        """Returns all meshes: those first whose best additive plan fits, or is least over."""
        tables = budget.part(_TABLES) if budget.seconds_left() is not None else Budget()
        return sorted(self._laid(tables), key=lambda laid: laid.rank)

    def _laid(self, budget: Budget) -> Iterator[Laid]:
        """Yields meshes and notes their bounds; the first whatever is left of the budget."""
        for number, where in enumerate(_rounds(self.sets)):
            if number and not budget.left():
                self.unknown.append(where)
                continue
            laid = self._look(where)
            if laid is not None:
                yield laid

    def _look(self, where: _Where) -> Laid | None:
        """Notes the bound of a mesh; returns None where it has no plan."""
        shares = self.space.problem.settings.contention != "none"
        laid = _lay(self.space.problem, where, self.reserve_memory, shares)
        if laid is None:
            self.failed += 1
        else:
            self.bound = min(self.bound, laid.bound)
        return laid

    def prove(self, budget: Budget) -> None:
        """Notes the bounds of meshes that were not looked at, until the budget is spent."""
        while self.unknown and budget.left():
            self._look(self.unknown.pop())


def _lay(task: Problem, where: _Where, reserve: int, shares: bool) -> Laid | None:
    """Returns the problem of a mesh, None where it has no plan.

    Args:
        task: the graph, the cluster and the job.
        where: names of devices, and the mesh.
        reserve: bytes to leave free on every GPU.
        shares: whether collectives at the same time slow each other down.
    """
    try:
        problem = OperatorPartition.build(
            task.graph, task.cluster, task.job, *where, reserve_memory=reserve
        )
        start, least = optimum(problem)
        bounds = [
            mesh_bound(problem.additive, shares_links=shares),
            lean_bound(problem, shares_links=shares),
        ]
    except PlacewrightError:
        return None
    return Laid(problem, start, least, min(bounds))


def _rounds(sets: Sequence[Sequence[str]]) -> Iterator[_Where]:
    """Yields meshes of all sets: those of one axis that splits first, most shards first."""
    pairs = [(names, mesh) for names in sets for mesh in meshes(len(names))]
    yield from sorted(pairs, key=lambda pair: (len(pair[1]), pair[1]["dp"]))


def optimum(problem: OperatorPartition, *, kept: float = np.inf) -> tuple[NDArray[np.int8], float]:
    """Returns the best plan, [decision], of the additive objective, and what it adds up to.

    By the dynamic program; where not all parameters and optimizer state of its plan fit, by the
    integer program with that limit.

    Args:
        problem: the problem of a mesh.
        kept: bytes that a device may keep all the time.

    Raises:
        PlanError: neither can be used, or no plan keeps to the limit.
    """
    less = problem.additive.restricted(problem.keep)
    tables = less.objective()
    best = eliminate([len(values) for values in less.values], less.scopes, tables)
    row = less.row(best.places)
    if less.cost(less.kept(), row[None])[0] > kept:
        found = solve(less, tables, Limits(kept=kept))
        return found.row, found.value
    return row, best.value


def search(
    problem: OperatorPartition,
    start: NDArray[np.int8],
    evaluations: int,
    goes_on: Callable[[], bool] | None = None,
) -> Found:
    """Returns the best plan on the compiled simulator: of all, or by annealing from a start."""
    if problem.space_size <= min(_FEW, evaluations):
        return exhaustive(problem)
    chosen = problem.chosen(start)
    return anneal(problem, evaluations, seed=0, start=chosen, goes_on=goes_on)


def _best_of(laid: Laid, budget: Budget) -> Grouped | None:
    """Returns the best plan of a mesh, None where it has none that splits along every axis."""
    problem, start, least, _ = laid
    room = budget.room()
    most = EVALUATIONS if room is None else min(EVALUATIONS, room)
    found = search(problem, start, max(1, most), budget.left)
    budget.charge(found.evaluations)
    rows = [start] if found.chosen is None else [problem.rows(found.chosen[None])[0], start]
    best = next((each for each in rows if problem.plan(each) is not None), None)
    if best is None:
        best = _least_idle(problem)
    plan = None if best is None else problem.plan(best)
    if best is None or plan is None:
        return None
    reserve = problem.reserve_memory
    worth = simulate_folded(problem.folded, best[None], reserve_memory=reserve)
    additive = float(problem.additive.cost(problem.additive.objective(), best[None])[0])
    times = float(worth.step_time[0]), int(worth.overflow[0])
    return Grouped(plan, problem, best, *times, additive, least, found.is_exact)


def _least_idle(problem: OperatorPartition) -> NDArray[np.int8] | None:
    """Returns the plan of the least sum that splits along every axis, None where it is unknown."""
    try:
        return solve(problem.additive, problem.additive.objective(), Limits(uses_all=True)).row
    except PlacewrightError:
        return None
