"""Graphs with too many ideals: a split is improved by exact searches near its borders.

A linear order that agrees with the split is drawn at random. Units near a border stay free, those
between are made one, so few ideals remain, and the program over them finds the best split there.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from agents.exact.compiled_splits import Limits
from agents.exact.ideals import Search, make_ideals
from agents.exact.linear import by_key
from agents.exact.max_load import MaxLoadProblem
from agents.exact.units import Units, grouped

_FEW_IDEALS, _MANY_IDEALS = 2_000, 64_000  # of one local search
_MORE_AFTER = 40  # fruitless tries; then twice as many ideals are allowed
_FIRST_REACH, _LEAST_REACH = 12, 3  # units on each side of a border that stay free
_PATIENCE = 160  # tries without a gain in all, where no time is given


def improve(
    problem: MaxLoadProblem,
    units: Units,
    limits: Limits,
    device: NDArray[np.int64],
    deadline: float | None = None,
) -> Iterator[tuple[float, NDArray[np.int64]]]:
    """Yields (largest load, device of each unit [unit]) of each try; inf where it gave nothing.

    Args:
        problem: the problem of the units.
        units: the units.
        limits: the devices.
        device: of each unit, [unit]; a split to begin with.
        deadline: of `time.perf_counter`; a try stops there.
    """
    rng = np.random.default_rng(0)
    reach, best, fruitless, most = _FIRST_REACH, limits.upper, 0, _FEW_IDEALS
    while deadline is not None or fruitless < _PATIENCE:
        if fruitless % _MORE_AFTER == _MORE_AFTER - 1:
            most, fruitless = min(2 * most, _MANY_IDEALS), fruitless + 1
        group = _groups(units, device, reach, rng)
        coarse = grouped(problem, units, group)
        ideals = make_ideals(coarse, most)
        if ideals is None:
            fruitless += reach == _LEAST_REACH
            reach = max(_LEAST_REACH, reach - 1)
            yield math.inf, device
            continue
        split = Search(coarse, ideals, limits._replace(upper=best)).run(deadline)
        fruitless += 1
        if split.unit_device is not None:
            best, fruitless = split.load, 0
            node_device = split.unit_device[coarse.node_unit]
            device = np.zeros(units.num_units, np.int64)
            device[units.node_unit] = node_device
        elif len(ideals.member) < most // 4:
            reach += 1
        yield split.load, device


def _groups(
    units: Units, device: NDArray[np.int64], reach: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Returns group numbers, [unit]: one each near the borders of the split, one between them."""
    place = _places(units, device)
    draw = rng.random(units.num_units)
    depth = np.arange(units.num_units) if rng.random() < 0.5 else draw
    order = by_key(units, list(zip(place[device].tolist(), depth.tolist(), strict=True)))
    border = np.flatnonzero(np.diff(device[order])) + 1
    distance = np.full(units.num_units, units.num_units)
    for at in border.tolist():
        near = np.abs(np.arange(units.num_units) - at + 0.5)
        distance = np.minimum(distance, near.astype(np.int64))
    is_free = distance < reach
    opens = is_free | np.concatenate(([True], is_free[:-1]))
    group = np.empty(units.num_units, np.int64)
    group[order] = np.cumsum(opens) - 1
    return group


def _places(units: Units, device: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the place of each device in the pipeline, [device]."""
    after: dict[int, set[int]] = {int(one): set() for one in np.unique(device)}
    for one, other in device[units.arcs].tolist():
        if one != other:
            after[one].add(other)
    place = np.zeros(int(device.max()) + 1, np.int64)
    rank = 0
    while after:
        free = min(d for d in after if not any(d in others for others in after.values()))
        place[free], rank = rank, rank + 1
        del after[free]
    return place
