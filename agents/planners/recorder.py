"""What a search keeps: how much of its budget is spent, and the best placements found so far."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from simcore import Status


class Scores(NamedTuple):
    """What the simulator says about placements."""

    step_time: NDArray[np.float64]  # [plan] s, inf if illegal
    overflow: NDArray[np.int64]  # [plan] bytes over capacity, summed over devices
    status: NDArray[np.uint8]  # [plan] Status


class Evaluator(Protocol):
    """What scores placements, int [plan, unit]."""

    def evaluate(self, unit_placements: NDArray[np.integer]) -> Scores:
        """Simulates placements."""

    def complexity(self, unit_placement: NDArray[np.integer]) -> tuple[int, int]:
        """Returns what makes a placement, [unit], hard to read: devices and changes of device."""


class Budget:
    """Seconds or evaluations that a search may spend; a part of a budget spends the whole's too.

    Nothing depends on the clock where only evaluations are given. Studies count the processor time
    of this process (``clock=time.process_time``), which other work on the machine changes little.
    """

    def __init__(
        self,
        seconds: float | None = None,
        evaluations: int | None = None,
        *,
        parent: "Budget | None" = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        for label, value in (("seconds", seconds), ("evaluations", evaluations)):
            if value is not None and not value >= 0:
                raise ValueError(f"budget: {label} is {value}")
        self.seconds = seconds
        self.evaluations = evaluations
        self.used = 0  # evaluations
        self._parent = parent
        self._stopped = False
        self._clock = clock
        self._started = clock()

    def charge(self, evaluations: int) -> None:
        """Notes evaluations that were made."""
        self.used += evaluations
        if self._parent is not None:
            self._parent.charge(evaluations)

    def stop(self) -> None:
        """Ends the search, the whole of which this is a part: what is left is not needed."""
        self._stopped = True
        if self._parent is not None:
            self._parent.stop()

    def room(self) -> int | None:
        """Returns evaluations that may still be made, None = any number."""
        own = None if self.evaluations is None else max(0, self.evaluations - self.used)
        whole = None if self._parent is None else self._parent.room()
        return min((n for n in (own, whole) if n is not None), default=None)

    def seconds_left(self) -> float | None:
        """Returns seconds that are left, None = any time."""
        own = None
        if self.seconds is not None:
            own = max(0.0, self.seconds - (self._clock() - self._started))
        whole = None if self._parent is None else self._parent.seconds_left()
        return min((s for s in (own, whole) if s is not None), default=None)

    def spent(self) -> float:
        """Returns the fraction that is spent, 0 to 1; an unlimited budget stays at 0."""
        over = self._stopped or (self._parent is not None and not self._parent.left())
        fractions = [float(over)]
        if self.evaluations is not None:
            fractions.append(self.used / self.evaluations if self.evaluations else 1.0)
        if self.seconds is not None:
            elapsed = self._clock() - self._started
            fractions.append(elapsed / self.seconds if self.seconds else 1.0)
        return min(1.0, max(fractions))

    def left(self) -> bool:
        """Whether anything is left."""
        return self.spent() < 1.0

    def part(self, fraction: float) -> "Budget":
        """Returns a budget over a fraction of what is left; what it spends, this one spends."""
        seconds, evaluations = self.seconds_left(), self.room()
        return Budget(
            None if seconds is None else seconds * fraction,
            None if evaluations is None else math.ceil(evaluations * fraction),
            parent=self,
            clock=self._clock,
        )


class Found(NamedTuple):
    """A placement and who found it."""

    placement: NDArray[np.int32]  # [unit] device index
    step_time: float  # s
    overflow: int  # bytes over capacity, summed over devices
    complexity: tuple[int, int]  # devices used, changes of device in program order
    finder: str
    evaluations: int  # made when it was found, itself included

    @property
    def feasible(self) -> bool:
        """Whether it fits the memory."""
        return self.overflow == 0

    @property
    def rank(self) -> tuple[int, float, tuple[int, int]]:
        """What decides which of two is better, least first: bytes over, time, complexity."""
        return self.overflow, self.step_time, self.complexity

    def beats(self, other: "Found | None") -> bool:
        """Whether it is better; a tie is not."""
        return other is None or self.rank < other.rank


@dataclass(slots=True, kw_only=True)
class Recorder:
    """Counts evaluations, keeps the best placement; of equal ones the simpler, then the first."""

    space: Evaluator
    listener: Callable[["Recorder", Budget], None] | None = None  # called after each batch
    evaluations: int = 0
    best: Found | None = None  # that fits
    nearest: Found | None = None  # that does not fit, least over capacity
    by_finder: dict[str, Found] = field(default_factory=dict)  # the best of each planner
    curve: list[Found] = field(default_factory=list)  # each new best, in the order of finding

    def evaluate(self, finder: str, unit_placements: NDArray[np.integer], budget: Budget) -> Scores:
        """Scores placements and keeps what is better than before.

        Args:
            finder: the planner that asks.
            unit_placements: device indices, [plan, unit].
            budget: what pays; only the first placements that it can pay for are scored.

        Returns:
            The scores of the placements that were paid for.
        """
        placements = np.asarray(unit_placements, np.int32)[: budget.room()]
        if not len(placements):
            nothing = np.zeros(0)
            return Scores(nothing, nothing.astype(np.int64), nothing.astype(np.uint8))
        scores = self.space.evaluate(placements)
        budget.charge(len(placements))
        self._keep(finder, placements, scores)
        self.evaluations += len(placements)
        if self.listener is not None:
            self.listener(self, budget)
        return scores

    def _keep(self, finder: str, placements: NDArray[np.int32], scores: Scores) -> None:
        legal = np.isin(scores.status, (Status.OK, Status.OUT_OF_MEMORY))
        if not legal.any():
            return
        over = np.where(legal, scores.overflow, np.iinfo(np.int64).max)
        plan = int(np.lexsort((scores.step_time, over))[0])  # stable: of equal ones the first
        earlier = self.by_finder.get(finder)
        rank = (int(scores.overflow[plan]), float(scores.step_time[plan]))
        if earlier is not None and rank > earlier.rank[:2]:
            return
        found = Found(
            placements[plan].copy(),
            rank[1],
            rank[0],
            self.space.complexity(placements[plan]),
            finder,
            self.evaluations + plan + 1,
        )
        if found.beats(earlier):
            self.by_finder[finder] = found
        if not found.feasible:
            if found.beats(self.nearest):
                self.nearest = found
        elif found.beats(self.best):
            self.best = found
            self.curve.append(found)
