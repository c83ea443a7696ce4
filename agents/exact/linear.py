"""The best split of one linear order of the units: exact for that order, quick for any width."""

import heapq
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from agents.exact.compiled_splits import Limits
from agents.exact.ideals import Search, Split, make_ideals
from agents.exact.units import Units, renumbered


def linear_split(units: Units, order: NDArray[np.int64], limits: Limits) -> Split:
    """Returns the best split into intervals of an order below the limit; not proven for others.

    Args:
        units: the units.
        order: units in a topological order, [unit].
        limits: the devices; `upper` bounds what is looked at.
    """
    steps = np.stack([order[:-1], order[1:]], axis=1)
    line = renumbered(units, order, steps)
    ideals = make_ideals(line, units.num_units + 1)
    assert ideals is not None  # a line has one ideal of each size
    split = Search(line, ideals, limits).run_chain()
    device = split.unit_device
    if device is not None:
        spread = np.empty_like(device)
        spread[order] = device
        device = spread
    return split._replace(unit_device=device, is_proven=False)


def some_orders(units: Units) -> Iterator[NDArray[np.int64]]:
    """Yields linear orders that suit networks: as numbered, and along each branch in turn."""
    count = units.num_units
    yield np.arange(count)
    yield depth_first(units, range(count))
    yield depth_first(units, range(count, 0, -1))


def depth_first(units: Units, priority: Sequence[int]) -> NDArray[np.int64]:
    """Returns a topological order that follows what has become ready last.

    Args:
        units: the units.
        priority: of units that become ready together the greatest comes first, [unit].
    """
    after, waiting = _after(units)
    ready = sorted(
        (unit for unit in range(units.num_units) if not waiting[unit]), key=priority.__getitem__
    )
    order = []
    while ready:
        unit = ready.pop()
        order.append(unit)
        opened = []
        for other in after[unit]:
            waiting[other] -= 1
            if not waiting[other]:
                opened.append(other)
        ready += sorted(opened, key=priority.__getitem__)
    return np.array(order, np.int64)


def by_key(units: Units, key: Sequence[tuple[float, ...]]) -> NDArray[np.int64]:
    """Returns the topological order that takes the least key among the ready, [unit]."""
    after, waiting = _after(units)
    ready = [(key[unit], unit) for unit in range(units.num_units) if not waiting[unit]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, unit = heapq.heappop(ready)
        order.append(unit)
        for other in after[unit]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (key[other], other))
    return np.array(order, np.int64)


def _after(units: Units) -> tuple[list[list[int]], list[int]]:
    """Returns direct successors and number of direct predecessors of each unit."""
    after: list[list[int]] = [[] for _ in range(units.num_units)]
    waiting = [0] * units.num_units
    for one, other in units.arcs.tolist():
        after[one].append(other)
        waiting[other] += 1
    return after, waiting
