"""Compiled: the dynamic program over pairs of ideals.

Below an ideal, units are taken away in falling order, so each smaller ideal is met once, and what
the set between the two costs changes by one unit at a time. A set grows until no device may hold
it: loads without transfers only grow.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.exact.compiled_options import compiled


class Lattice(NamedTuple):
    """For each ideal those that lack one unit of it; see `ideals.Ideals`."""

    first_down: NDArray[np.int64]  # [ideal + 1] offsets into down
    down_unit: NDArray[np.int32]  # [link] unit that is lacking, rising
    down_ideal: NDArray[np.int32]  # [link] the smaller ideal


class Costs(NamedTuple):
    """What units cost; see `agents.exact.units.Units`."""

    accelerator: NDArray[np.float64]  # [unit]
    cpu: NDArray[np.float64]  # [unit]
    memory: NDArray[np.float64]  # [unit] bytes
    own_memory: NDArray[np.float64]  # [unit] bytes
    tensor_cost: NDArray[np.float64]  # [tensor]
    tensor_readers: NDArray[np.int64]  # [tensor]
    first_use: NDArray[np.int64]  # [unit + 1]
    use_tensor: NDArray[np.int64]  # [use]
    use_writes: NDArray[np.bool_]  # [use]


class Limits(NamedTuple):
    """Devices, and what need not be looked at."""

    accelerators: int
    cpus: int
    capacity: float  # bytes
    upper: float  # loads of this and above are of no interest


class Table(NamedTuple):
    """The best largest load of an ideal on so many devices, state = cpus * (F + 1) + accelerators.

    `back` says how: 2 * smaller ideal + (1 if the rest is on a CPU), -1 = one accelerator fewer,
    -2 = one CPU fewer.
    """

    load: NDArray[np.float64]  # [ideal, state] file's unit
    back: NDArray[np.int64]  # [ideal, state]
    is_open: NDArray[np.bool_]  # [ideal] whether a split better than `upper` can pass here


class Scratch(NamedTuple):
    """Working memory of one thread."""

    ideal: NDArray[np.int64]  # [depth]
    link: NDArray[np.int64]  # [depth]
    unit: NDArray[np.int64]  # [depth]
    sums: NDArray[np.float64]  # [depth, 5] accelerator, cpu, memory, own memory, transfers
    readers: NDArray[np.int64]  # [tensor] of the set
    writes: NDArray[np.bool_]  # [tensor] whether its writer is in the set
    seen: NDArray[np.int64]  # [2] pairs; 1 = memory of merged leaves decided


@compiled
def _join(costs: Costs, scratch: Scratch, unit: int, transfers: float) -> float:
    """Adds a unit to the set; returns the cost of the tensors that now cross its border."""
    for k in range(costs.first_use[unit], costs.first_use[unit + 1]):
        tensor = costs.use_tensor[k]
        readers = scratch.readers[tensor]
        cost = costs.tensor_cost[tensor]
        if costs.use_writes[k]:
            scratch.writes[tensor] = True
            if readers == 0:
                transfers += cost
            elif readers == costs.tensor_readers[tensor]:
                transfers -= cost
        else:
            scratch.readers[tensor] = readers + 1
            if not scratch.writes[tensor]:
                if readers == 0:
                    transfers += cost
            elif readers + 1 == costs.tensor_readers[tensor]:
                transfers -= cost
    return transfers


@compiled
def _leave(costs: Costs, scratch: Scratch, unit: int) -> None:
    for k in range(costs.first_use[unit], costs.first_use[unit + 1]):
        if costs.use_writes[k]:
            scratch.writes[costs.use_tensor[k]] = False
        else:
            scratch.readers[costs.use_tensor[k]] -= 1


@compiled
def _offer(table: Table, limits: Limits, ideal: int, below: int, load: float, on_cpu: int) -> None:
    """Improves the states of an ideal by a device with this load above a smaller ideal."""
    width = limits.accelerators + 1
    for cpus in range(on_cpu, limits.cpus + 1):
        for used in range(1 - on_cpu, width):
            here = cpus * width + used
            rest = table.load[below, here - (width if on_cpu else 1)]
            worst = rest if rest > load else load
            if worst < table.load[ideal, here]:
                table.load[ideal, here] = worst
                table.back[ideal, here] = 2 * below + on_cpu


@compiled
def _close(table: Table, limits: Limits, ideal: int) -> None:
    """A device may stay empty."""
    width = limits.accelerators + 1
    for cpus in range(limits.cpus + 1):
        for used in range(width):
            here = cpus * width + used
            for fewer, exists in ((here - 1, used > 0), (here - width, cpus > 0)):
                if exists and table.load[ideal, fewer] <= table.load[ideal, here]:
                    table.load[ideal, here] = table.load[ideal, fewer]
                    table.back[ideal, here] = -1 if fewer == here - 1 else -2


@compiled
def _step(costs: Costs, limits: Limits, scratch: Scratch, depth: int, unit: int) -> int:
    """Extends the set by a unit; returns 1 if accelerators may hold it, + 2 if CPUs may."""
    sums = scratch.sums
    sums[depth + 1, 0] = sums[depth, 0] + costs.accelerator[unit]
    sums[depth + 1, 1] = sums[depth, 1] + costs.cpu[unit]
    sums[depth + 1, 2] = sums[depth, 2] + costs.memory[unit]
    sums[depth + 1, 3] = sums[depth, 3] + costs.own_memory[unit]
    kinds = 0
    if sums[depth + 1, 0] < limits.upper:
        if sums[depth + 1, 2] <= limits.capacity:
            kinds = 1
        elif sums[depth + 1, 3] <= limits.capacity:
            scratch.seen[1] = 1
    if limits.cpus and sums[depth + 1, 1] < limits.upper:
        kinds += 2
    return kinds


@compiled
def _relax(
    costs: Costs, lattice: Lattice, limits: Limits, scratch: Scratch, table: Table, top: int
) -> None:
    """Finds the best ways to split one ideal, from all smaller ones."""
    depth = 0
    scratch.ideal[0], scratch.link[0] = top, lattice.first_down[top]
    scratch.unit[0] = len(costs.cpu)
    scratch.sums[0] = 0.0
    while depth >= 0:
        link = scratch.link[depth]
        ended = link == lattice.first_down[scratch.ideal[depth] + 1]
        if ended or lattice.down_unit[link] >= scratch.unit[depth]:
            if depth:
                _leave(costs, scratch, scratch.unit[depth])
            depth -= 1
            continue
        scratch.link[depth] += 1
        unit = lattice.down_unit[link]
        kinds = _step(costs, limits, scratch, depth, unit)
        if kinds == 0:
            continue
        sums = scratch.sums
        sums[depth + 1, 4] = _join(costs, scratch, unit, sums[depth, 4])
        depth += 1
        below = lattice.down_ideal[link]
        scratch.ideal[depth], scratch.unit[depth] = below, unit
        scratch.link[depth] = lattice.first_down[below]
        scratch.seen[0] += 1
        if table.is_open[below]:
            load = max(sums[depth, 0] + sums[depth, 4], 0.0)
            if kinds & 1 and load < limits.upper:
                _offer(table, limits, top, below, load, 0)
            if kinds & 2:
                _offer(table, limits, top, below, sums[depth, 1], 1)
    _close(table, limits, top)
    table.is_open[top] = table.load[top].min() < np.inf


@compiled
def relax_some(
    costs: Costs,
    lattice: Lattice,
    limits: Limits,
    scratch: Scratch,
    table: Table,
    tops: NDArray[np.int64],
) -> None:
    """Finds the best ways to split the ideals `tops`, whose smaller ones are all done."""
    for k in range(len(tops)):
        _relax(costs, lattice, limits, scratch, table, tops[k])
