"""The best contiguous split: dynamic program over ideals, with a bound when it cannot finish.

The program runs with a limit on loads that starts near the lower bound and rises: a run that finds
nothing proves the limit as a bound, and the first split that is found is the best. Below a low
limit few pairs of ideals are worth a look. The split of the best linear order is the last limit.
Where ideals are too many (`MAX_IDEALS`), the split is improved at its borders instead; see `wide`.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from agents.exact.compiled_splits import Limits
from agents.exact.cut_bound import cut_bound
from agents.exact.ideals import Ideals, Search, Split, make_ideals
from agents.exact.linear import linear_split, some_orders
from agents.exact.load_bounds import work_bound
from agents.exact.max_load import MaxLoadProblem
from agents.exact.units import forward_units
from agents.exact.wide import improve

MAX_IDEALS = 400_000
_FEW_UNITS = 20  # so few are never merged: their ideals are few anyway
_MANY_IDEALS = 4_000  # from here on a better split is sought first: it saves most pairs
_QUICK_TRIES = 20  # at borders, before the program over many ideals
_BOUND_SHARE = 0.2  # of the time that is left
_STEPS = (0.3,)  # limits between the lower and the upper bound
_FACTORS = (1.02, 1.1, 1.3, 1.7, 2.5, 4.0)  # limits over the lower bound where nothing is known


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Progress:
    """Where a search stands."""

    stage: str
    load: float  # of the best so far, file's unit
    bound: float  # proven, file's unit
    done: float = 0.0  # of the stage, 0 to 1


Listener = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """A placement and how good it is known to be."""

    load: float  # the largest, file's unit; inf where none was found
    bound: float  # no placement of its kind has a smaller largest load
    placement: NDArray[np.int64] | None  # [node] device
    method: str
    interrupted: bool = False
    num_ideals: int | None = None  # None = more than `MAX_IDEALS`, or not asked for

    @property
    def is_optimal(self) -> bool:
        """Whether nothing better exists, up to rounding."""
        return self.load <= self.bound * (1 + 1e-9)


class _Run:
    """One search: the best split so far, the best bound so far, and the clock."""

    def __init__(
        self, problem: MaxLoadProblem, deadline: float | None, listener: Listener | None
    ) -> None:
        self.problem, self.deadline, self.listener = problem, deadline, listener
        whole = forward_units(problem, merge_leaves=False)
        is_small = whole.num_units <= _FEW_UNITS
        self.units = whole if is_small else forward_units(problem, merge_leaves=True)
        self.limits = Limits(problem.num_accelerators, problem.num_cpus, problem.capacity, math.inf)
        self.bound = work_bound(problem, self.units)
        self.load = math.inf
        self.device: NDArray[np.int64] | None = None
        self.method = "none"
        self.num_ideals: int | None = None

    def tell(self, stage: str, done: float = 0.0) -> None:
        if self.listener is not None:
            self.listener(Progress(stage=stage, load=self.load, bound=self.bound, done=done))

    def keep(self, split: Split, method: str) -> bool:
        """Keeps a split that is better than the best; returns whether it is."""
        if split.unit_device is None or split.load >= self.load:
            return False
        self.load, self.device, self.method = split.load, split.unit_device, method
        return True

    def is_late(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def solution(self, *, interrupted: bool) -> Solution:
        placement = None if self.device is None else self.device[self.units.node_unit]
        return Solution(
            load=self.load,
            bound=min(self.bound, self.load),
            placement=placement,
            method=self.method,
            interrupted=interrupted,
            num_ideals=self.num_ideals,
        )


def best_contiguous(
    problem: MaxLoadProblem, *, seconds: float | None = None, listener: Listener | None = None
) -> Solution:
    """Returns the contiguous split with the smallest largest load.

    Forward operators on each device are contiguous and devices have an order; backward operators
    follow their colour class.

    Args:
        problem: the problem.
        seconds: how long to search; None is until it is solved (wide graphs: until no try helps).
        listener: is told the progress.

    Returns:
        The solution; Ctrl-C ends the search early and keeps the best.
    """
    deadline = None if seconds is None else time.perf_counter() + seconds
    run = _Run(problem, deadline, listener)
    try:
        _search(run)
    except KeyboardInterrupt:
        return run.solution(interrupted=True)
    return run.solution(interrupted=False)


def _search(run: _Run) -> None:
    if not math.isfinite(run.bound):
        return
    run.tell("linear orders")
    for order in some_orders(run.units):
        limits = run.limits._replace(upper=run.load)
        run.keep(linear_split(run.units, order, limits), "best split of a linear order")
    run.tell("listing ideals")
    ideals = make_ideals(run.units, MAX_IDEALS)
    if ideals is None:
        raise_bound(run)
        improve_at_borders(run)
        return
    run.num_ideals = len(ideals.member)
    if run.num_ideals > _MANY_IDEALS:
        improve_at_borders(run, _QUICK_TRIES)
        raise_bound(run)
    mattered = _deepen(run, ideals)
    if mattered and run.bound >= run.load:
        _bound_without_leaves(run, ideals)


def _limits_to_try(run: _Run) -> list[float]:
    """Returns the limits, rising; the last is what is known to be possible."""
    if not math.isfinite(run.load):
        return [run.bound * factor for factor in _FACTORS] + [math.inf]
    gap = run.load - run.bound
    return [run.bound + step * gap for step in _STEPS] + [run.load]


def _deepen(run: _Run, ideals: Ideals) -> bool:
    """Raises the limit until a split is found; returns whether merged leaves' memory mattered."""
    mattered = False
    for upper in _limits_to_try(run):
        if upper <= run.bound:
            continue
        search = Search(run.units, ideals, run.limits._replace(upper=upper))
        split = search.run(run.deadline, lambda done: run.tell("ideals", done))
        mattered |= split.memory_of_leaves_mattered
        if not split.is_proven:
            return mattered
        if split.unit_device is not None:
            run.keep(split, "dynamic program over ideals")
            run.bound = run.load
            break
        run.bound = upper
    run.bound = min(run.bound, run.load)
    return mattered


def _bound_without_leaves(run: _Run, ideals: Ideals) -> None:
    """Bounds the load for splits that put idle leaves elsewhere: there they hold no memory."""
    light = replace(run.units, memory=run.units.own_memory)
    search = Search(light, ideals, run.limits._replace(upper=run.load))
    split = search.run(run.deadline)
    if not split.is_proven:
        run.bound = work_bound(run.problem, run.units)
    elif split.unit_device is not None:
        run.bound = split.load


def raise_bound(run: _Run) -> None:
    """Counts the cheapest transfers in, for a part of the time that is left."""
    run.tell("least cuts")
    until = None
    if run.deadline is not None:
        now = time.perf_counter()
        until = now + _BOUND_SHARE * (run.deadline - now)
    run.bound = cut_bound(run.problem, run.units, (run.bound, run.load), until)


def improve_at_borders(run: _Run, tries: int | None = None) -> None:
    """Improves the split by local searches, until the time is over or so many tries are made."""
    if run.device is None:
        return
    limits = run.limits._replace(upper=run.load)
    found = improve(run.problem, run.units, limits, run.device, run.deadline)
    for load, device in islice(found, tries):
        if load < run.load:
            run.load, run.device, run.method = load, device, "ideals near the borders"
        run.tell("borders")
        if run.is_late():
            return
