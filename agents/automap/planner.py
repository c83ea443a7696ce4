"""Ways to shard beyond the known styles: linkage groups chosen one by one, on every mesh.

On each mesh the additive objective is minimised exactly, and annealing goes on from there (or
every plan is tried, where they are few) on the compiled simulator. The best plan of each mesh is
handed out, to be simulated in full by whoever asked.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.automap.eliminate import eliminate
from agents.automap.ilp import Limits, solve
from agents.automap.operators import OperatorPartition
from agents.automap.search import Found, anneal, exhaustive
from agents.planners.recorder import Budget
from agents.planners.space import PlacementSpace
from simcore.cluster import Cluster
from simcore.errors import PlacewrightError
from simcore.plan import Plan
from simcore.profile_store import load_profile
from simcore.shard_batch import simulate_folded

AXES = ("x", "y")
EVALUATIONS = 1500  # of annealing on a mesh
_FEW = 4096  # plans that are all tried


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


def grouped_plans(
    space: PlacementSpace,
    sets: Sequence[Sequence[str]],
    budget: Budget,
    *,
    reserve_memory: int = 0,
) -> list[Grouped]:
    """Returns the best plan of each mesh, best first; what was found when the budget was spent.

    Args:
        space: gives the graph, the cluster and the job.
        sets: names of GPUs of one kind, [set][GPU]; each is searched.
        budget: what pays; an evaluation is one plan on the compiled simulator.
        reserve_memory: bytes to leave free on every GPU.
    """
    found = []
    for names, mesh in _rounds(sets):
        if not budget.left():
            break
        best = _best_of(space, names, mesh, budget, reserve_memory)
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda each: each.rank)


def _rounds(sets: Sequence[Sequence[str]]) -> Iterator[tuple[Sequence[str], dict[str, int]]]:
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


def _best_of(
    space: PlacementSpace,
    names: Sequence[str],
    mesh: dict[str, int],
    budget: Budget,
    reserve_memory: int,
) -> Grouped | None:
    """Returns the best plan of a mesh, None where it has none that splits along every axis."""
    task = space.problem
    try:
        problem = OperatorPartition.build(
            task.graph, task.cluster, task.job, names, mesh, reserve_memory=reserve_memory
        )
        start, least = optimum(problem)
    except PlacewrightError:
        return None
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
    worth = simulate_folded(problem.folded, best[None], reserve_memory=reserve_memory)
    additive = float(problem.additive.cost(problem.additive.objective(), best[None])[0])
    times = float(worth.step_time[0]), int(worth.overflow[0])
    return Grouped(plan, problem, best, *times, additive, least, found.is_exact)


def _least_idle(problem: OperatorPartition) -> NDArray[np.int8] | None:
    """Returns the plan of the least sum that splits along every axis, None where it is unknown."""
    try:
        return solve(problem.additive, problem.additive.objective(), Limits(uses_all=True)).row
    except PlacewrightError:
        return None
