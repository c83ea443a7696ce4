"""Lower bounds on the step time of every plan in a plan space."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.buckets import gradients_of
from simcore.cluster import Cluster
from simcore.collectives import make_collective
from simcore.cost import cost_table
from simcore.graph import OpClass, OpGraph
from simcore.job import Job
from simcore.lower import Problem, batch_per_copy
from simcore.path_bound import memory_room, path_bound
from simcore.plan import Plan, Settings
from simcore.result import Result
from simcore.shards import is_sharded

DUAL_STEPS = 200
_INFEASIBLE = 2  # scipy's status
ROUNDING = 1e-12  # relative; a sum of seconds added in another order may be less by this


def placement_bound(problem: Problem, allowed: NDArray[np.bool_] | None = None) -> float:
    """Returns seconds that no op -> device map of the problem that fits the memory can beat.

    The largest of: the critical path with every op on its fastest device and free transfers; the
    work bound (units divided at will over the devices); where one host drives all devices, the
    time it takes to issue everything; and `path_bound`, which sees transfers and shared devices.

    Args:
        problem: the lowered problem.
        allowed: which devices each unit may use, [unit, dev]; None = all that can run it.
    """
    allowed = problem.supported if allowed is None else allowed & problem.supported
    if not allowed.any(axis=1).all():
        return np.inf
    work, price = _work_prices(problem, allowed)
    bounds = [critical_path_bound(problem, allowed), work, path_bound(problem, allowed, price)]
    if problem.settings.host == "one":
        launch = problem.tables.cost["launch"][:, problem.tables.columns]
        launch = np.where(allowed[problem.graph.unit], launch, np.inf)
        launch = launch[problem.graph.op_class != OpClass.COLLECTIVE]
        bounds.append(float(launch.min(axis=1).sum()) * (1.0 - ROUNDING))
    return max(bounds)


def critical_path_bound(problem: Problem, allowed: NDArray[np.bool_]) -> float:
    """Returns the longest path with every op on the fastest device its unit may use, in s."""
    graph = problem.graph
    duration = np.where(allowed[graph.unit], problem.seconds, np.inf).min(axis=1)
    duration[graph.op_class == OpClass.COLLECTIVE] = 0.0  # what they take is not counted
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
    improved by projected subgradient steps. Devices that are alike share one price. Where what
    units hold for the whole step may be too much for the devices of a kind, memory has a price too.
    """
    return _work_prices(problem, allowed)[0]


class _Kinds(NamedTuple):
    """Devices that are alike to all units, and what units ask of each."""

    seconds: NDArray[np.float64]  # [unit, kind]; inf where not allowed
    memory: NDArray[np.float64]  # [unit] of the room of a device, held for the whole step
    room: NDArray[np.float64]  # [kind] in the same unit
    devices: NDArray[np.float64]  # [kind] how many


def _work_prices(problem: Problem, allowed: NDArray[np.bool_]) -> tuple[float, NDArray[np.float64]]:
    """Returns the work bound, in s, and its price of a second on each device, [dev]."""
    kinds, kind = _kinds(problem, allowed)
    if len(kinds.devices) == 1 and kinds.memory.sum() > kinds.room[0] * kinds.devices[0]:
        return np.inf, np.full(len(kind), 1.0 / len(kind))
    price = np.ones(len(kinds.devices)) / kinds.devices.sum()
    best, best_price = 0.0, price
    for step in range(1, DUAL_STEPS + 1):
        value, load = _priced(kinds, price)
        if value > best:
            best, best_price = value, price
        if len(price) == 1 or not load.any():
            break
        price = price * np.exp((load / load.max() - 1.0) * 2.0 / np.sqrt(step))
        price = price / (price * kinds.devices).sum()
    if len(price) > 1 and (kinds.memory.sum() > kinds.room * kinds.devices).any():
        best = max(best, _tight_bound(kinds))
    return best * (1.0 - ROUNDING), best_price[kind]


def _tight_bound(kinds: _Kinds) -> float:
    """Returns the work bound where memory is short: the linear program, solved outright, in s."""
    from scipy.optimize import linprog  # noqa: PLC0415 - slow to import, and seldom needed
    from scipy.sparse import eye_array, hstack, kron, vstack  # noqa: PLC0415

    num_units, num_kinds = kinds.seconds.shape
    may = np.isfinite(kinds.seconds).ravel()
    share = kron(eye_array(num_units), np.ones((1, num_kinds)))
    asked = [np.where(may, kinds.seconds.ravel(), 0.0), np.repeat(kinds.memory, num_kinds)]
    totals = [kron(np.ones((1, num_units)), eye_array(num_kinds)).multiply(row) for row in asked]
    limits = np.block([[-kinds.devices[:, None]], [np.zeros((num_kinds, 1))]])
    answer = linprog(
        np.append(np.zeros(may.size), 1.0),
        A_ub=hstack([vstack(totals), limits]),
        b_ub=np.append(np.zeros(num_kinds), kinds.room * kinds.devices),
        A_eq=hstack([share, np.zeros((num_units, 1))]),
        b_eq=np.ones(num_units),
        bounds=[(0.0, None if here else 0.0) for here in may] + [(0.0, None)],
    )
    if answer.status == _INFEASIBLE:
        return np.inf
    if not answer.success:
        return 0.0
    dual = np.maximum(-answer.ineqlin.marginals, 0.0)
    return _priced(kinds, dual[:num_kinds], dual[num_kinds:])[0]


def _kinds(problem: Problem, allowed: NDArray[np.bool_]) -> tuple[_Kinds, NDArray[np.int64]]:
    """Returns the kinds, and the kind of each device, [dev]."""
    graph, num_devices = problem.graph, len(problem.cluster.devices)
    work = np.zeros((graph.num_units, num_devices))
    computes = graph.op_class != OpClass.COLLECTIVE
    np.add.at(work, graph.unit[computes], problem.seconds[computes])
    work = np.where(allowed, work, np.inf)
    held = np.bincount(graph.unit, problem.tables.ops["resident"][:-1], graph.num_units)
    room = memory_room(problem)
    scale = max(float(room.max()), 1.0)
    columns, kind = np.unique(np.vstack([work, room]), axis=1, return_inverse=True)
    count = np.bincount(kind.ravel(), minlength=columns.shape[1]).astype(np.float64)
    return _Kinds(columns[:-1], held / scale, columns[-1] / scale, count), kind.ravel()


def _priced(
    kinds: _Kinds, price: NDArray[np.float64], rent: NDArray[np.float64] | float = 0.0
) -> tuple[float, NDArray[np.float64]]:
    """Returns what prices prove, in s, and what each device of a kind then does, in s.

    Args:
        kinds: the kinds.
        price: of a second on each of its devices, [kind].
        rent: of the memory of each of its devices, [kind].
    """
    scale = max(float((price * kinds.devices).sum()), 1e-300)
    may = np.isfinite(kinds.seconds)
    total = np.where(may, kinds.seconds, 0.0) * price + kinds.memory[:, None] * rent
    total = np.where(may, total, np.inf)
    choice = total.argmin(axis=1)
    rows = np.arange(len(choice))
    value = float(total[rows, choice].sum()) - float(np.sum(rent * kinds.room * kinds.devices))
    load = np.bincount(choice, kinds.seconds[rows, choice], len(price)) / kinds.devices
    return value / scale, load


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
