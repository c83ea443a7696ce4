"""Lower bounds on the step time of every plan in a plan space."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simcore.buckets import gradients_of
from simcore.cluster import Cluster
from simcore.collectives import make_collective
from simcore.cost import cost_table
from simcore.graph import OpClass, OpGraph
from simcore.job import Job
from simcore.lower import Problem, batch_per_copy
from simcore.plan import Plan, Settings
from simcore.result import Result
from simcore.shards import is_sharded

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
        launch = problem.tables.cost["launch"][:, problem.tables.columns]
        launch = np.where(allowed[problem.graph.unit], launch, np.inf)
        bounds.append(float(launch.min(axis=1).sum()) * (1.0 - ROUNDING))
    return max(bounds)


def critical_path_bound(problem: Problem, allowed: NDArray[np.bool_]) -> float:
    """Returns the longest path with every op on the fastest device its unit may use, in s."""
    graph = problem.graph
    duration = np.where(allowed[graph.unit], problem.seconds, np.inf).min(axis=1)
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
    np.add.at(work, graph.unit, problem.seconds)
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
    elif plan.is_pipeline or is_sharded(plan):
        bound = max(use.busy for use in result.devices)
    elif plan.stages[0].mesh is not None:
        devices = [cluster.device_index(name) for name in plan.stages[0].devices]
        bound = copies_bound(graph, cluster, plan.job, devices, settings)
    else:
        bound = placement_bound(Problem.build(graph, cluster, plan.job, settings))
    return min(bound, result.step_time)


def copies_bound(
    graph: OpGraph, cluster: Cluster, job: Job, devices: Sequence[int], settings: Settings
) -> float:
    """Returns seconds that copies of the model on these devices cannot beat, in any buckets.

    Every device computes its share. No gradient is summed before the first is made, all must be
    summed, and the last one after it is made; its update comes after that.

    Args:
        graph: one copy.
        cluster: the cluster.
        job: the job; its batch is divided among the copies.
        devices: device indices, one a copy.
        settings: how plans are simulated.
    """
    batch = batch_per_copy(graph, job, len(devices))
    names = [cluster.devices[device].kind for device in devices]
    kinds = list(dict.fromkeys(names))
    table = cost_table(graph, job, kinds, (batch,))
    seconds = table.seconds[:, [kinds.index(name) for name in names], 0]  # [op, copy]
    bounds = [float(seconds.sum(axis=0).max(initial=0.0))]
    gradients = gradients_of(graph)
    if settings.order == "program" and len(devices) > 1 and len(gradients):
        made = np.cumsum(seconds, axis=0)[graph.tensor_producer[gradients]].max(axis=1)
        sizes = graph.at_batch(batch).tensor_bytes
        sums = [
            make_collective("all_reduce", int(size), cluster, devices).idle_time
            for size in (sizes[gradients].sum(), sizes[gradients[-1]])
        ]
        first = graph.first_consumer[gradients[-1]]
        readers = graph.consumers[first : graph.first_consumer[gradients[-1] + 1]]
        updates = readers[graph.op_class[readers] == OpClass.UPDATE]
        bounds.append(float(made[0]) + sums[0])
        bounds.append(float(made[-1]) + sums[1] + float(seconds[updates].max()))
    return max(bounds) * (1.0 - ROUNDING)
