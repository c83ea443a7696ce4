"""Ways to shard beyond the known styles: linkage groups chosen one by one, on every mesh.

On each mesh the additive objective is minimised exactly, and annealing goes on from there (or
every plan is tried, where they are few) on the compiled simulator. The best plan of each mesh is
handed out, to be simulated in full by whoever asked.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.automap.eliminate import eliminate
from agents.automap.ilp import Limits, solve
from agents.automap.operators import OperatorPartition
from agents.automap.search import Found, anneal, exhaustive
from agents.planners.recorder import Budget
from agents.planners.space import PlacementSpace
from simcore.errors import PlacewrightError
from simcore.plan import Plan
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


def grouped_plans(
    space: PlacementSpace, devices: Sequence[int], budget: Budget, *, reserve_memory: int = 0
) -> list[Grouped]:
    """Returns the best plan of each mesh, best first; what was found when the budget was spent.

    Args:
        space: gives the graph, the cluster and the job.
        devices: indices of GPUs of one kind.
        budget: what pays; an evaluation is one plan on the compiled simulator.
        reserve_memory: bytes to leave free on every GPU.
    """
    found = []
    for mesh in meshes(len(devices)):
        if not budget.left():
            break
        best = _best_of(space, devices, mesh, budget, reserve_memory)
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda each: each.rank)


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
    devices: Sequence[int],
    mesh: dict[str, int],
    budget: Budget,
    reserve_memory: int,
) -> Grouped | None:
    """Returns the best plan of a mesh, None where it has none that splits along every axis."""
    task = space.problem
    names = [task.cluster.devices[device].name for device in devices]
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
