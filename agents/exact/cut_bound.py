"""A lower bound for contiguous splits that counts transfers: cuts between stages cost something.

Let no device have a load above T. With F accelerators and what CPUs can take, the work before the
k-th border between accelerators lies in a window, so some units are surely before it and some
surely behind. The cheapest border that respects this is a minimum cut. A tensor that may cross
several borders counts in each with its share, so that no more than its cost is counted. Each
crossing tensor is paid by two devices, by one where a CPU may touch it. If work and cuts together
exceed F x T, then T is impossible; the greatest T that is found impossible is the bound.
"""

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from agents.exact.load_bounds import offload_ratio
from agents.exact.max_load import MaxLoadProblem
from agents.exact.units import Units

MAX_UNITS = 4_000  # the closure is a table of units by units
_HALVINGS = 8
_UNBOUNDED = 2**30
_SCALE = 2**28  # sum of all capacities, as integers


class _Graph(NamedTuple):
    """What the bound needs of the units."""

    work: NDArray[np.float64]  # [unit] file's unit, on an accelerator
    before: NDArray[np.float64]  # [unit] work of it and all before it
    behind: NDArray[np.float64]  # [unit] work of it and all behind it
    writer: NDArray[np.int64]  # [tensor]
    read_tensor: NDArray[np.int64]  # [read]
    reader: NDArray[np.int64]  # [read] unit
    ratio: float  # accelerator work that a CPU saves in a unit of its time, at most


class _Borders(NamedTuple):
    """Where units must be at each border between accelerators, by rank of the border."""

    is_before: NDArray[np.bool_]  # [border, unit]
    is_behind: NDArray[np.bool_]  # [border, unit]


def cut_bound(
    problem: MaxLoadProblem, units: Units, window: tuple[float, float], deadline: float | None
) -> float:
    """Returns a lower bound on the largest load of contiguous splits.

    Args:
        problem: the problem.
        units: its forward units.
        window: a lower bound that is known, and the load of a split, in the file's unit.
        deadline: of `time.perf_counter`; None is as long as it takes.
    """
    low, high = window
    if units.num_units > MAX_UNITS or problem.num_accelerators < 2 or not high < np.inf:
        return low
    graph = _graph(units)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if deadline is not None and time.perf_counter() > deadline:
            break
        if _is_impossible(problem, units, graph, middle):
            low = middle
        else:
            high = middle
    return low


def _graph(units: Units) -> _Graph:
    count = units.num_units
    work = np.where(np.isfinite(units.accelerator), units.accelerator, 0.0)
    reach = np.eye(count, dtype=bool)
    for one, other in units.arcs[np.argsort(units.arcs[:, 1], kind="stable")].tolist():
        reach[other] |= reach[one]  # sorted by target, so what comes before is complete
    unit = np.repeat(np.arange(count), np.diff(units.first_use))
    writer = np.zeros(len(units.tensor_cost), np.int64)
    writer[units.use_tensor[units.use_writes]] = unit[units.use_writes]
    reads = ~units.use_writes
    return _Graph(
        work, reach @ work, work @ reach, writer, units.use_tensor[reads], unit[reads],
        offload_ratio(work, units.cpu),
    )  # fmt: skip


def _is_impossible(problem: MaxLoadProblem, units: Units, graph: _Graph, load: float) -> bool:
    """Returns whether it is proven that no split has loads of at most `load`."""
    accelerators = problem.num_accelerators
    total = float(graph.work.sum())
    offloaded = min(total, problem.num_cpus * load * graph.ratio) if problem.num_cpus else 0.0
    if total - offloaded <= (accelerators - 1) * load:
        return False  # one accelerator may be empty, and one border missing
    borders = _borders(graph, accelerators, load, offloaded)
    spare = accelerators * load - (total - offloaded)
    for position in range(accelerators + 1) if problem.num_cpus else [-1]:
        payers = _payers(problem, graph, position, load, offloaded)
        needed = 0.0
        for border in range(accelerators - 1):
            needed += _least_cut(units, graph, borders, border, payers)
            if needed > spare * (1 + 1e-9):
                break
        else:
            return False
    return True


def _borders(graph: _Graph, accelerators: int, load: float, offloaded: float) -> _Borders:
    total = float(graph.work.sum())
    slack = 1e-9 * total
    rank = np.arange(1, accelerators)[:, None]
    least = total - (accelerators - rank) * load - offloaded
    most = rank * load + offloaded
    return _Borders(
        total - graph.behind[None, :] < least - slack, graph.before[None, :] > most + slack
    )


def _payers(
    problem: MaxLoadProblem, graph: _Graph, position: int, load: float, offloaded: float
) -> NDArray[np.float64]:
    """Returns how many devices pay for a crossing tensor at least, [tensor].

    Args:
        problem: the problem.
        graph: the units.
        position: of the CPU's set: behind so many accelerators; -1 = there is no CPU.
        load: the limit on loads.
        offloaded: work that CPUs can take at most.
    """
    payers = np.full(len(graph.writer), 2.0)
    if position < 0:
        return payers
    if problem.num_cpus > 1:
        return payers / 2
    total = float(graph.work.sum())
    least = total - (problem.num_accelerators - position) * load - offloaded
    may = graph.before <= position * load + offloaded + 1e-9 * total
    may &= total - graph.behind >= least - 1e-9 * total
    payers[may[graph.writer]] = 1.0
    payers[graph.read_tensor[may[graph.reader]]] = 1.0
    return payers


def _least_cut(
    units: Units, graph: _Graph, borders: _Borders, border: int, payers: NDArray[np.float64]
) -> float:
    """Returns the least that tensors across a border cost all devices, each with its share."""
    shares = sum(_may_cross(graph, borders, k) for k in range(len(borders.is_before)))
    cost = units.tensor_cost * payers / np.maximum(shares, 1)
    scale = _SCALE / max(float(cost.sum()), 1e-300)
    capacity = np.floor(cost * scale).astype(np.int64)
    count, tensors = units.num_units, len(cost)
    place = np.arange(count) + 2
    place[borders.is_before[border]] = 0  # the source stands for all that is surely before
    place[borders.is_behind[border]] = 1
    forth = count + 2 + np.arange(tensors)
    back = forth + tensors
    read = graph.read_tensor
    rows = [
        np.stack([place[graph.writer], forth, capacity]),
        np.stack([forth[read], place[graph.reader], np.full(len(read), _UNBOUNDED)]),
        np.stack([place[graph.reader], back[read], np.full(len(read), _UNBOUNDED)]),
        np.stack([back, place[graph.writer], capacity]),
        np.stack([*place[units.arcs[:, ::-1]].T, np.full(len(units.arcs), _UNBOUNDED)]),
    ]
    arcs = np.concatenate(rows, axis=1)
    arcs = arcs[:, (arcs[0] != arcs[1]) & (arcs[2] > 0)]
    distinct, index = np.unique(arcs[:2], axis=1, return_inverse=True)
    merged = np.minimum(np.bincount(index.ravel(), arcs[2]), _UNBOUNDED).astype(np.int32)
    size = count + 2 + 2 * tensors
    network = csr_array((merged, (distinct[0], distinct[1])), shape=(size, size))
    flow = maximum_flow(network, 0, 1).flow_value
    return 0.0 if flow >= _UNBOUNDED else float(flow) / scale


def _may_cross(graph: _Graph, borders: _Borders, border: int) -> NDArray[np.int64]:
    """Returns 1 for tensors that may cross a border, [tensor]."""
    may = np.zeros(len(graph.writer), np.int64)
    for side in (borders.is_before[border], borders.is_behind[border]):
        apart = np.zeros(len(may), bool)
        apart[graph.read_tensor[~side[graph.reader]]] = True
        may += apart | ~side[graph.writer]
    return may // 2
