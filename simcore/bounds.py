"""Lower bounds on the step time of every plan in a plan space."""

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.graph import OpGraph
from simcore.lower import Problem
from simcore.plan import Plan, Settings
from simcore.result import Result

DUAL_STEPS = 200
ROUNDING = 1e-12  # relative; a sum of seconds added in another order may be less by this


def placement_bound(problem: Problem, allowed: NDArray[np.bool_] | None = None) -> float:
    """Returns seconds that no op -> device map of the problem can beat.

    The largest of: the critical path with every op on its fastest device and free transfers; the
    work bound (units divided at will over the devices); and, where one host drives all devices,
    the time it takes to issue everything.

    Args:
        problem: the lowered problem.
        allowed: which devices each unit may use, [unit, dev]; None = all that can run it.
    """
    allowed = problem.supported if allowed is None else allowed & problem.supported
    if not allowed.any(axis=1).all():
        return np.inf
    bounds = [critical_path_bound(problem, allowed), work_bound(problem, allowed)]
    if problem.settings.host == "one":
        launch = np.where(allowed[problem.graph.unit], problem.tables.cost["launch"], np.inf)
        bounds.append(float(launch.min(axis=1).sum()) * (1.0 - ROUNDING))
    return max(bounds)


def critical_path_bound(problem: Problem, allowed: NDArray[np.bool_]) -> float:
    """Returns the longest path with every op on the fastest device its unit may use, in s."""
    graph = problem.graph
    duration = np.where(allowed[graph.unit], problem.tables.cost["duration"], np.inf).min(axis=1)
    producers, consumers, _ = graph.edges()
    order = np.argsort(consumers, kind="stable")
    ready = np.zeros(graph.num_ops)
    first = np.searchsorted(consumers[order], np.arange(graph.num_ops + 1))
    sources = producers[order]
    end = np.zeros(graph.num_ops)
    for op in range(graph.num_ops):
        if first[op] < first[op + 1]:
            ready[op] = end[sources[first[op] : first[op + 1]]].max()
        end[op] = ready[op] + duration[op]
    return float(end.max(initial=0.0))


def work_bound(problem: Problem, allowed: NDArray[np.bool_]) -> float:
    """Returns the least makespan if units could be divided over devices at will, in s.

    That is a linear program; any price vector of its dual gives a valid bound, and the prices are
    improved by projected subgradient steps. Devices that are alike share one price.
    """
    graph, num_devices = problem.graph, len(problem.cluster.devices)
    work = np.zeros((graph.num_units, num_devices))
    np.add.at(work, graph.unit, problem.tables.cost["duration"])
    work = np.where(allowed, work, np.inf)
    columns, group = np.unique(work, axis=1, return_inverse=True)
    count = np.bincount(group.ravel(), minlength=columns.shape[1]).astype(float)
    price = np.ones(len(count)) / count.sum()
    best = 0.0
    for step in range(1, DUAL_STEPS + 1):
        priced = columns * price
        choice = priced.argmin(axis=1)
        rows = np.arange(len(choice))
        best = max(best, float(priced[rows, choice].sum()))
        load = np.bincount(choice, weights=columns[rows, choice], minlength=len(count)) / count
        if len(count) == 1 or not load.any():
            break
        scale = np.exp((load / load.max() - 1.0) * 2.0 / np.sqrt(step))
        price = price * scale
        price /= (price * count).sum()
    return best * (1.0 - ROUNDING)


def plan_bound(
    graph: OpGraph, cluster: Cluster, plan: Plan, settings: Settings, result: Result
) -> float:
    """Returns a lower bound for the plan space that a plan was found in, in s.

    The plan's own, which knows what the search was free to do, unless it is simulated otherwise
    than it was planned; then any placement may be compared with.

    Args:
        graph: the graph.
        cluster: the cluster.
        plan: the plan.
        settings: how it is simulated now.
        result: its simulation.
    """
    if plan.predicted is not None and settings == plan.settings:
        bound = plan.predicted.lower_bound_s
    elif plan.stages[0].mesh is not None:
        bound = max(use.busy for use in result.devices) + result.collective_time
    else:
        bound = placement_bound(Problem.build(graph, cluster, plan.job, settings))
    return min(bound, result.step_time)
