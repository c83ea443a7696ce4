"""HEFT: ops by upward rank, each on the device that ends it first, in a gap if one is long enough.

Topcuoglu, Hariri and Wu, Performance-effective and low-complexity task scheduling for heterogeneous
computing, IEEE TPDS 13(3), 2002. Added: ops of one placement unit stay together, and a device must
have memory left for the unit.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.planners.earliest import PartialSchedule, upward_ranks
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace


class Schedule(NamedTuple):
    """What HEFT plans: the simulator may see it differently."""

    placement: NDArray[np.int32]  # [unit] device index
    end: NDArray[np.float64]  # [op] s

    @property
    def makespan(self) -> float:
        """Seconds until the last op ends."""
        return float(self.end.max(initial=0.0))


@dataclass(frozen=True, slots=True)
class Heft:
    """Schedules with several margins for what the estimate of memory misses."""

    margins: tuple[float, ...] = (1.0, 0.85, 0.7)
    name: str = "heft"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Scores one placement per margin, fewer if memory never binds."""
        seen: list[bytes] = []
        for margin in self.margins:
            placement = schedule(space, margin).placement
            if placement.tobytes() in seen or not budget.left():
                return
            seen.append(placement.tobytes())
            recorder.evaluate(self.name, placement[None], budget)


def schedule(space: PlacementSpace, margin: float = 1.0) -> Schedule:
    """Returns HEFT's schedule; memory is kept to `margin` of what each device has."""
    partial = PartialSchedule(space, margin=margin)
    ranks = upward_ranks(space, space.devices)
    gaps = [_Gaps() for _ in range(space.num_devices)]
    # ranks equal but for rounding go by program order, which is topological
    rounded = np.round(ranks / max(float(ranks.max(initial=0.0)), 1e-300), 12)
    for op in np.argsort(-rounded, kind="stable").tolist():
        best = (np.inf, np.inf, -1)
        for device in partial.options(op):
            ready, duration = partial.ready(op, device), partial.duration[op][device]
            start = gaps[device].first_fit(ready, duration)
            best = min(best, (start + duration, start, device))
        _, start, device = best if best[2] >= 0 else (0.0, 0.0, partial.options(op)[0])
        end = partial.place(op, device, start)
        gaps[device].take(start, end)
    return Schedule(partial.placement(), np.array(partial.end))


class _Gaps:
    """The idle intervals of one device, in order; the last one is open."""

    def __init__(self) -> None:
        self.begins = [0.0]
        self.ends = [np.inf]

    def first_fit(self, ready: float, duration: float) -> float:
        """Returns the earliest start at or after `ready` at which an op fits into one gap."""
        if not ready < np.inf:
            return ready
        for gap in range(bisect_left(self.ends, ready), len(self.ends)):
            start = max(ready, self.begins[gap])
            if start + duration <= self.ends[gap]:
                return start
        raise AssertionError("the last gap is open")

    def take(self, start: float, end: float) -> None:
        """Cuts an interval out of the gap it lies in."""
        if not start < end < np.inf:
            return
        gap = bisect_left(self.ends, end)
        begin, close = self.begins[gap], self.ends[gap]
        pieces = [(a, b) for a, b in ((begin, start), (end, close)) if a < b]
        self.begins[gap : gap + 1] = [a for a, _ in pieces]
        self.ends[gap : gap + 1] = [b for _, b in pieces]
