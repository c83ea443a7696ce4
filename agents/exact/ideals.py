"""The best split into contiguous sets: the ideals of a partial order and the program over them."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.exact.compiled_ideals import Order, link_ideals, list_ideals, sum_ideals
from agents.exact.compiled_splits import Costs, Lattice, Limits, Scratch, Table, relax_some
from agents.exact.load_bounds import offload_ratio
from agents.exact.units import Pairs, Units, offsets

MAX_THREADS = 8
_CHUNK_SECONDS = 0.05  # of one call into compiled code, so that the clock and Ctrl-C are heard


class Ideals(NamedTuple):
    """All ideals of the units' order, smallest first."""

    first_level: NDArray[np.int64]  # [unit + 2] ideals of each size
    lattice: Lattice
    member: NDArray[np.uint64]  # [ideal, word] bits


class Split(NamedTuple):
    """A chain of contiguous sets.

    Attributes:
        load: the largest, in the file's unit; inf where no split was found below the limit.
        unit_device: device of each unit, [unit]; accelerators first.
        is_proven: whether no split has a smaller load (or any below the limit given).
        memory_of_leaves_mattered: whether a set was refused only for what merged leaves hold.
    """

    load: float
    unit_device: NDArray[np.int64] | None  # [unit]
    is_proven: bool
    memory_of_leaves_mattered: bool


Report = Callable[[float], None]  # is told the fraction of the ideals that are done


def make_ideals(units: Units, limit: int) -> Ideals | None:
    """Returns the ideals of the units' order; None where there are more than `limit`."""
    order = make_order(units.num_units, units.arcs)
    member, first_level, is_complete = list_ideals(order, limit)
    if not is_complete:
        return None
    return Ideals(first_level, Lattice(*link_ideals(order, member)), member)


def make_order(num_units: int, arcs: Pairs) -> Order:
    """Returns what compiled code needs to know of a partial order; see `Units.arcs`."""
    by_target = arcs[np.argsort(arcs[:, 1], kind="stable")]
    by_source = arcs[np.argsort(arcs[:, 0], kind="stable")]
    key = np.random.default_rng(0).integers(0, 2**63, num_units, np.uint64)
    return Order(
        offsets(by_target[:, 1], num_units),
        by_target[:, 0].copy(),
        offsets(by_source[:, 0], num_units),
        by_source[:, 1].copy(),
        key,
    )


class Search:
    """The dynamic program over the ideals of one problem, in steps that can be stopped."""

    def __init__(self, units: Units, ideals: Ideals, limits: Limits) -> None:
        self.units, self.ideals, self.limits = units, ideals, limits
        self.costs = costs_of(units)
        num_ideals = len(ideals.member)
        num_states = (limits.accelerators + 1) * (limits.cpus + 1)
        self.table = Table(
            np.full((num_ideals, num_states), np.inf),
            np.full((num_ideals, num_states), -1, np.int64),
            self._may_pass(),
        )
        self.table.load[0] = 0.0
        self.scratch = [_scratch(units) for _ in range(num_threads())]

    def run(self, deadline: float | None = None, report: Report | None = None) -> Split:
        """Returns the best split below the limit.

        Args:
            deadline: of `time.perf_counter`; None is as long as it takes.
            report: is told the progress.
        """
        done = 1
        total = len(self.ideals.member)
        with ThreadPoolExecutor(len(self.scratch)) as pool:
            for tops in self._levels():
                for part in self._parts(tops):
                    self._relax(pool, part)
                    if deadline is not None and time.perf_counter() > deadline:
                        return Split(np.inf, None, False, False)
                done = int(tops[-1]) + 1 if len(tops) else done
                if report is not None:
                    report(done / total)
        return self._best()

    def run_chain(self) -> Split:
        """Returns the best split below the limit where every ideal holds all smaller ones."""
        tops = np.flatnonzero(self.table.is_open)[1:]
        relax_some(self.costs, self.ideals.lattice, self.limits, self.scratch[0], self.table, tops)
        return self._best()

    def _may_pass(self) -> NDArray[np.bool_]:
        """Returns where a better split can pass, [ideal]: devices hold so much work at most."""
        units, limits = self.units, self.limits
        work = np.where(np.isfinite(units.accelerator), units.accelerator, 0.0)
        below = sum_ideals(*self.ideals.lattice, work)
        if not np.isfinite(limits.upper):
            return np.ones(len(below), bool)
        ratio = offload_ratio(work, units.cpu)
        open_ = np.zeros(len(below), bool)
        open_[0] = True
        for cpus in range(limits.cpus + 1):
            for used in range(limits.accelerators + 1):
                room = np.array([used, limits.accelerators - used], float) * limits.upper
                others = np.array([cpus, limits.cpus - cpus], float)
                if ratio > 0:
                    room[others > 0] += others[others > 0] * limits.upper * ratio
                room += 1e-9 * work.sum()  # sums are rounded
                open_ |= (below <= room[0]) & (work.sum() - below <= room[1])
        return open_

    def _levels(self) -> Iterator[NDArray[np.int64]]:
        first = self.ideals.first_level
        for size in range(1, self.units.num_units + 1):
            tops = np.arange(first[size], first[size + 1])
            yield tops[self.table.is_open[tops]]

    def _parts(self, tops: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Cuts the ideals of a size into parts that take about the same short time."""
        size, begin = 8 * len(self.scratch), 0
        while begin < len(tops):
            started = time.perf_counter()
            yield tops[begin : begin + size]
            begin += size
            spent = time.perf_counter() - started
            size = max(8, min(2**20, int(size * min(4.0, _CHUNK_SECONDS / max(spent, 1e-6)))))

    def _relax(self, pool: ThreadPoolExecutor, tops: NDArray[np.int64]) -> None:
        """Works on ideals of one size, which do not see each other, in all threads."""
        lattice, limits = self.ideals.lattice, self.limits
        work = (self.costs, lattice, limits)
        if len(tops) < 2 * len(self.scratch):
            relax_some(*work, self.scratch[0], self.table, tops)
            return
        waiting = [
            pool.submit(
                relax_some, *work, scratch, self.table, tops[index :: len(self.scratch)].copy()
            )
            for index, scratch in enumerate(self.scratch)
        ]
        for future in waiting:
            future.result()

    def _best(self) -> Split:
        top = len(self.ideals.member) - 1
        mattered = any(scratch.seen[1] for scratch in self.scratch)
        load = float(self.table.load[top, -1])
        if not np.isfinite(load):
            return Split(np.inf, None, True, mattered)
        return Split(load, self._unit_device(top), True, mattered)

    def _unit_device(self, top: int) -> NDArray[np.int64]:
        """Follows the table back from the ideal of all units."""
        width = self.limits.accelerators + 1
        device = np.full(self.units.num_units, -1, np.int64)
        cpus, used, ideal = self.limits.cpus, self.limits.accelerators, top
        while ideal:
            back = int(self.table.back[ideal, cpus * width + used])
            on_cpu = back == -2 or (back >= 0 and back % 2 == 1)
            cpus, used = cpus - on_cpu, used - (not on_cpu)
            if back >= 0:
                moved = self._bits(ideal) & ~self._bits(back // 2)
                device[moved] = self.limits.accelerators + cpus if on_cpu else used
                ideal = back // 2
        return device

    def _bits(self, ideal: int) -> NDArray[np.bool_]:
        row = np.unpackbits(self.ideals.member[ideal].view(np.uint8), bitorder="little")
        return row[: self.units.num_units].astype(bool)

    @property
    def num_pairs(self) -> int:
        """Number of pairs of ideals looked at."""
        return int(sum(scratch.seen[0] for scratch in self.scratch))


def num_threads() -> int:
    """Returns how many threads search at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MAX_THREADS, cores or 1))


def costs_of(units: Units) -> Costs:
    """Returns what compiled code needs to know of the units."""
    return Costs(
        units.accelerator,
        units.cpu,
        units.memory,
        units.own_memory,
        units.tensor_cost,
        units.tensor_readers,
        units.first_use,
        units.use_tensor,
        units.use_writes,
    )


def _scratch(units: Units) -> Scratch:
    depth, tensors = units.num_units + 2, len(units.tensor_cost)
    return Scratch(
        np.zeros(depth, np.int64),
        np.zeros(depth, np.int64),
        np.zeros(depth, np.int64),
        np.zeros((depth, 5)),
        np.zeros(tensors, np.int64),
        np.zeros(tensors, bool),
        np.zeros(2, np.int64),
    )
