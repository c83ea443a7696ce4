"""m-SCT: earliest task first, where a device waits for the favourite child of what it just ran.

Jeon et al., Baechi: Fast Device Placement of Machine Learning Graphs, SoCC 2020, after Hanen and
Munier's small communication times. A linear program says which child of each op should follow on
the same device: x = 0 on an edge spares its transfer, each op may spare one edge to a child and one
from a parent, and the latest end is least. Rounded at one half, as Baechi does. A device whose last
op has a favourite child takes another op only once the child's input could be anywhere else.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from agents.planners.earliest import mean_route, producers
from agents.planners.m_etf import Etf
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace

Edge = tuple[int, int]  # (producer op, consumer op)


@dataclass(frozen=True, slots=True, kw_only=True)
class MSct:
    """Schedules with several margins for what the estimate of memory misses.

    Attributes:
        margins: fractions of each device's room that may be used.
        most_edges: a graph with more is left alone: the linear program would take minutes.
    """

    margins: tuple[float, ...] = (1.0, 0.85, 0.7)
    most_edges: int = 12_000
    name: str = "m_sct"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Scores one placement per margin, fewer if memory never binds."""
        del rng
        if len(space.problem.graph.edges()[0]) > self.most_edges or not space.num_units:
            return
        favourite, seen = favourite_children(space), list[bytes]()
        for margin in self.margins:
            placement = _Sct(space, margin, favourite).run()
            if placement.tobytes() in seen or not budget.left():
                return
            seen.append(placement.tobytes())
            recorder.evaluate(self.name, placement[None], budget)


def transfers(space: PlacementSpace) -> dict[Edge, float]:
    """Returns the mean seconds of each transfer between different devices, largest per edge."""
    latency, per_byte = mean_route(space, space.devices)
    seconds: dict[Edge, float] = {}
    for op, inputs in enumerate(producers(space)):
        for producer, num_bytes in inputs:
            time = latency + num_bytes * per_byte
            seconds[producer, op] = max(seconds.get((producer, op), 0.0), time)
    return seconds


def favourite_children(space: PlacementSpace) -> dict[int, int]:
    """Returns op -> the child that should follow on its device, by the linear program.

    Variables: the start of each op, x of each edge, and the latest end, which is least.
    """
    seconds = transfers(space)
    if not seconds:
        return {}
    edges, size = list(seconds), space.problem.graph.num_ops
    work = np.where(np.isfinite(space.seconds), space.seconds, np.inf).min(axis=1)
    work = np.where(np.isfinite(work), work, 0.0)
    scale = max(float(work.sum()), 1e-300)  # solvers like numbers near 1
    rows, limits = _constraints(edges, np.array(list(seconds.values())) / scale, work / scale)
    cost = np.zeros(size + len(edges) + 1)
    cost[-1] = 1.0
    bounds = [(0.0, None)] * size + [(0.0, 1.0)] * len(edges) + [(0.0, None)]
    solved = linprog(cost, A_ub=rows, b_ub=limits, bounds=bounds, method="highs")
    if solved.x is None:
        return {}
    x = solved.x[size : size + len(edges)]
    return {edge[0]: edge[1] for edge, value in zip(edges, x, strict=True) if value < 0.5}


def _constraints(
    edges: list[Edge], transfer: NDArray[np.float64], work: NDArray[np.float64]
) -> tuple[coo_array, NDArray[np.float64]]:
    """Returns A and b of A variables <= b."""
    size, count = len(work), len(edges)
    source, target = np.array(edges).T
    column, one = size + np.arange(count), np.ones(count)
    # start[target] >= start[source] + work[source] + transfer x
    order = coo_array(
        (np.concatenate([one, -one, transfer]),
         (np.tile(np.arange(count), 3), np.concatenate([source, target, column]))),
        shape=(count, size + count + 1),
    )  # fmt: skip
    parts, limits = [order], [-work[source]]
    for ends in (source, target):  # at most one edge of each end has x = 0
        degree = np.bincount(ends, minlength=size)
        parts.append(coo_array((-one, (ends, column)), shape=(size, size + count + 1)))
        limits.append(np.where(degree > 0, 1.0 - degree, 0.0))
    every, last = np.arange(size), np.full(size, size + count)
    values = np.concatenate([np.ones(size), -np.ones(size)])
    where = (np.tile(every, 2), np.concatenate([every, last]))
    parts.append(coo_array((values, where), shape=(size, size + count + 1)))
    limits.append(-work)
    height = np.cumsum([0, *(part.shape[0] for part in parts)])
    rows = np.concatenate(
        [part.coords[0] + at for part, at in zip(parts, height[:-1], strict=True)]
    )
    columns = np.concatenate([part.coords[1] for part in parts])
    data = np.concatenate([part.data for part in parts])
    shape = (int(height[-1]), size + count + 1)
    return coo_array((data, (rows, columns)), shape=shape), np.concatenate(limits)


class _Sct(Etf):
    """Earliest task first, with devices that wait."""

    def __init__(self, space: PlacementSpace, margin: float, favourite: dict[int, int]) -> None:
        super().__init__(space, margin)
        self.favourite = favourite
        self.seconds = transfers(space)
        self.awaited: list[tuple[int, float]] = [(-1, 0.0)] * space.num_devices  # (op, s until)

    def start(self, op: int, ready: float, device: int) -> float:
        """Returns when an op can start on a device, that may be waiting for another."""
        awaited, until = self.awaited[device]
        waits = awaited >= 0 and awaited != op and not self.done[awaited]
        return max(ready, self.free[device], until if waits else 0.0)

    def also(self, device: int) -> int:
        """Returns the op that a device waits for, if it may run now."""
        awaited = self.awaited[device][0]
        is_offered = awaited >= 0 and not self.done[awaited] and device in self.offered[awaited]
        return awaited if is_offered else -1

    def placed(self, op: int, device: int) -> None:
        """Notes that an op was placed: its favourite child is awaited."""
        child = self.favourite.get(op, -1)
        until = self.free[device] + self.seconds[op, child] if child >= 0 else -math.inf
        self.awaited[device] = (child, until)
