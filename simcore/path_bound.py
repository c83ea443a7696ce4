"""A lower bound on the step of placements that counts transfers, work and memory together.

It is found by refutation. Let no plan take longer than T. Ops that one tensor joins must share a
device if sending the tensor would make every way through it longer than T. Ops that share a device
run one after another, so paths through them grow, and a device that is too slow or too small for
all of them drops out. That goes on until something cannot be within T, which proves that T is
impossible, or until nothing changes. The greatest T found impossible is the bound.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.compiled_paths import Inputs, Ops, Tried, earliest_starts, join_groups, make_tried
from simcore.graph import OpClass
from simcore.lower import Problem

_MEMBERS, _INPUTS = 96, 4096  # tried on one device; more are left out
_FIRST_STEP, _PRECISION = 0.01, 5e-4  # relative
_ROUNDS = 20  # of one refutation
_WINDOWS = 16  # starting times that windows of work begin at
ROUNDING = 1e-9  # relative; simulated times are sums in another order


class _Edges(NamedTuple):
    """Tensors between ops, one per pair of ops."""

    producer: NDArray[np.int64]  # [edge] op
    consumer: NDArray[np.int64]  # [edge] op
    delay: NDArray[np.float64]  # [edge] s, from one device to the nearest other


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Task:
    """One problem, looked at from its beginning and from its end."""

    allowed: NDArray[np.bool_]  # [group, dev] of the units, then of collectives
    group: NDArray[np.int64]  # [op] the unit; collectives have one each
    seconds: NDArray[np.float64]  # [op, dev]
    resident: NDArray[np.float64]  # [op] bytes that its device holds for the whole step
    room: NDArray[np.float64]  # [dev] bytes
    edges: _Edges
    forth: Inputs
    back: Inputs  # ops in falling order
    release: NDArray[np.float64]  # [op] s
    in_order: bool  # whether devices run their ops in program order
    tried: Tried


class _Round(NamedTuple):
    """What is known of the ops if no plan takes longer than T."""

    head: NDArray[np.float64]  # [op] s from the beginning to its start, at least
    tail: NDArray[np.float64]  # [op] s from its end to the end of the step, at least
    seconds: NDArray[np.float64]  # [op] on the fastest device that its group may use


def path_bound(problem: Problem, allowed: NDArray[np.bool_], price: NDArray[np.float64]) -> float:
    """Returns seconds that no placement that fits the memory beats; inf if none can fit.

    Args:
        problem: the lowered problem.
        allowed: devices each unit may use, [unit, dev].
        price: of a second on each device, [dev], at least 0, of sum 1; any gives a bound.
    """
    if not problem.graph.num_ops:
        return 0.0
    task = _make_task(problem, allowed)
    most = _longest(task)
    if _is_impossible(task, most, price):
        return most * (1.0 - ROUNDING) if _is_possible_at_all(task) else np.inf
    first = _round(task, task.group, _may_use(task, task.group, _nothing(task), np.inf))
    low = float((first.head + first.seconds + first.tail).max())
    high, reach = low, _FIRST_STEP
    while high < most:
        high, reach = min(low * (1.0 + reach), most), 2.0 * reach
        if not _is_impossible(task, high, price):
            break
        low = high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if _is_impossible(task, middle, price):
            low = middle
        else:
            high = middle
    return low * (1.0 - ROUNDING)


def _make_task(problem: Problem, allowed: NDArray[np.bool_]) -> _Task:
    graph = problem.graph
    group = graph.unit.astype(np.int64)
    alone = np.flatnonzero(graph.op_class == OpClass.COLLECTIVE)
    group[alone] = graph.num_units + np.arange(len(alone))
    anywhere = np.ones((len(alone), allowed.shape[1]), bool)
    edges = _edges(problem)
    last = graph.num_ops - 1
    in_order = problem.settings.order == "program"
    seconds = problem.seconds.copy()
    launch = problem.tables.cost["launch"][:, problem.tables.columns].min(axis=1)
    seconds[alone], launch[alone] = 0.0, 0.0  # what collectives take is not counted
    return _Task(
        allowed=np.concatenate([allowed, anywhere]),
        group=group,
        seconds=seconds,
        resident=problem.tables.ops["resident"][:-1].astype(np.float64),
        room=memory_room(problem),
        edges=edges,
        forth=_inputs(edges.producer, edges.consumer, edges.delay, last + 1),
        back=_inputs(last - edges.consumer, last - edges.producer, edges.delay, last + 1),
        release=np.cumsum(launch) * (problem.settings.host == "one"),
        in_order=in_order,
        tried=make_tried(_MEMBERS if in_order else 0, _INPUTS),
    )


def memory_room(problem: Problem) -> NDArray[np.float64]:
    """Returns the bytes that the allocator can hand out at most, [dev]."""
    room = (problem.capacity - problem.context) / (1.0 + problem.fragmentation)
    return np.floor(np.maximum(room, 0.0)) + 1.0


def _edges(problem: Problem) -> _Edges:
    """Returns the longest transfer between each two ops, on the route that is best for it."""
    graph, pairs = problem.graph, problem.tables.pairs[:-1]
    producers, consumers, tensors = graph.edges()
    num_devices = len(problem.cluster.devices)
    is_route = ~np.eye(num_devices, dtype=bool).ravel() & (pairs["reachable"] > 0)
    delay = np.full(len(tensors), np.inf)
    num_bytes = problem.tables.tensors["num_bytes"][tensors]
    routes = np.stack([pairs["latency"][is_route], pairs["bandwidth"][is_route]], axis=1)
    for latency, bandwidth in np.unique(routes, axis=0).tolist():
        delay = np.minimum(delay, latency + num_bytes / bandwidth)
    collective = graph.op_class == OpClass.COLLECTIVE
    delay[collective[producers] | collective[consumers]] = 0.0
    key, index = np.unique(
        producers.astype(np.int64) * graph.num_ops + consumers, return_inverse=True
    )
    longest = np.zeros(len(key))
    np.maximum.at(longest, index, delay)
    return _Edges(*np.divmod(key, graph.num_ops), longest)


def _inputs(
    source: NDArray[np.int64], reader: NDArray[np.int64], delay: NDArray[np.float64], num_ops: int
) -> Inputs:
    order = np.lexsort((source, reader))
    first = np.searchsorted(reader[order], np.arange(num_ops + 1)).astype(np.int64)
    return Inputs(first, source[order], delay[order])


def _longest(task: _Task) -> float:
    """Returns a time that is enough where anything is possible."""
    slowest = np.where(task.allowed[task.group], task.seconds, 0.0).max(axis=1)
    delay = task.edges.delay
    return float(slowest.sum() + delay[np.isfinite(delay)].sum() + task.release.max()) + 1e-12


def _is_possible_at_all(task: _Task) -> bool:
    return bool(_may_use(task, task.group, _nothing(task), np.inf).any(axis=1).all())


def _nothing(task: _Task) -> NDArray[np.float64]:
    """Returns heads and tails as they are known without a look, [2, op]."""
    return np.zeros((2, len(task.group)))


def _is_impossible(task: _Task, most: float, price: NDArray[np.float64]) -> bool:
    """Returns whether it is proven that no plan takes at most `most` seconds."""
    group = task.group
    known = _nothing(task)
    edges = task.edges
    for _ in range(_ROUNDS):
        allowed = _may_use(task, group, known, most)
        used = np.unique(group)
        if not allowed[used].any(axis=1).all():
            return True
        now = _round(task, group, allowed)
        if (now.head + now.seconds + now.tail).max() > most:
            return True
        through = now.head[edges.producer] + now.seconds[edges.producer] + edges.delay
        through += now.seconds[edges.consumer] + now.tail[edges.consumer]
        together = (through > most) & (group[edges.producer] != group[edges.consumer])
        if not together.any():
            break
        group = join_groups(group, edges.producer[together], edges.consumer[together])
        known = np.stack([now.head, now.tail])
    return _windows(task, group, now, allowed, price) > most


def _may_use(
    task: _Task, group: NDArray[np.int64], known: NDArray[np.float64], most: float
) -> NDArray[np.bool_]:
    """Returns devices that can hold and run all of a group in time, [group, dev]."""
    num_groups = len(task.allowed)
    seconds = np.zeros(task.allowed.shape)
    np.add.at(seconds, group, task.seconds)
    held = np.bincount(group, task.resident, num_groups)
    around = np.zeros(num_groups)
    for times in known:
        least = np.full(num_groups, np.inf)
        np.minimum.at(least, group, times)
        around += least
    lost = np.zeros(task.allowed.shape, np.int64)
    np.add.at(lost, group, ~task.allowed[task.group])
    in_time = np.isfinite(seconds) & (seconds + around[:, None] <= most)
    may: NDArray[np.bool_] = (lost == 0) & in_time & (held[:, None] <= task.room)
    return may


def _round(task: _Task, group: NDArray[np.int64], allowed: NDArray[np.bool_]) -> _Round:
    seconds = np.where(allowed[group], task.seconds, np.inf).min(axis=1)
    forth = Ops(group, _before(task, group), seconds, task.release)
    mirrored = group[::-1].copy()
    zero = np.zeros(len(group))
    back = Ops(mirrored, _before(task, mirrored), seconds[::-1].copy(), zero)
    head = earliest_starts(task.forth, forth, task.tried)
    tail = earliest_starts(task.back, back, task.tried)[::-1]
    return _Round(head, tail, seconds)


def _before(task: _Task, group: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the op of the same group just before each op, [op]; -1 = none."""
    before = np.full(len(group), -1, np.int64)
    if task.in_order:
        order = np.argsort(group, kind="stable")
        same = group[order[1:]] == group[order[:-1]]
        before[order[1:][same]] = order[:-1][same]
    return before


def _windows(
    task: _Task,
    group: NDArray[np.int64],
    now: _Round,
    allowed: NDArray[np.bool_],
    price: NDArray[np.float64],
) -> float:
    """Returns the most that work in a window, with what is before and behind it, takes, in s.

    Ops that start at a or later and have b or more behind them run within the step less a and b,
    and a priced second of a device is worth no more than its price.
    """
    work = np.where(allowed[group], task.seconds, np.inf)
    share = np.where(np.isfinite(work), work, 0.0) * price
    share = np.where(np.isfinite(work), share, np.inf).min(axis=1)
    order = np.argsort(-now.tail, kind="stable")
    head, tail, share = now.head[order], now.tail[order], share[order]
    most = 0.0
    for begin in np.unique(np.quantile(head, np.linspace(0.0, 1.0, _WINDOWS))).tolist():
        inside = np.where(head >= begin, share, 0.0)
        late = np.where(head >= begin, np.cumsum(inside) + tail, 0.0)
        most = max(most, begin + float(late.max()))
    return most
