"""m-ETF: of all ops whose inputs are planned, the one that can start first goes where it can.

Jeon et al., Baechi: Fast Device Placement of Machine Learning Graphs, SoCC 2020: earliest task
first (Hwang et al. 1989) with a check that the device has memory left. Ties go to what came first.
"""

import math
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from agents.planners.earliest import PartialSchedule
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace

_Entry = tuple[float, int]  # (s when the inputs are there, op)


@dataclass(frozen=True, slots=True)
class MEtf:
    """Schedules with several margins for what the estimate of memory misses."""

    margins: tuple[float, ...] = (1.0, 0.85, 0.7)
    name: str = "m_etf"

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
            placement = earliest_first(space, margin)
            if placement.tobytes() in seen or not budget.left():
                return
            seen.append(placement.tobytes())
            recorder.evaluate(self.name, placement[None], budget)


def earliest_first(space: PlacementSpace, margin: float = 1.0) -> NDArray[np.int32]:
    """Returns the device of each unit, [unit]; memory is kept to `margin` of each device's."""
    return Etf(space, margin).run()


class Etf:
    """One heap of waiting ops per device, by the time their inputs are there.

    The start of a heap's top is the later of that time and the device's: so the best of all is
    among the tops, and no op is looked at twice.
    """

    def __init__(self, space: PlacementSpace, margin: float) -> None:
        self.partial = PartialSchedule(space, margin=margin)
        self.waiting = [len({p for p, _ in inputs}) for inputs in self.partial.inputs]
        self.readers: list[list[int]] = [[] for _ in self.waiting]
        for op, inputs in enumerate(self.partial.inputs):
            for producer in {p for p, _ in inputs}:
                self.readers[producer].append(op)
        self.free = [0.0] * space.num_devices  # s
        self.heaps: list[list[_Entry]] = [[] for _ in range(space.num_devices)]
        self.offered: list[set[int]] = [set() for _ in self.waiting]  # [op] devices
        self.done = [False] * len(self.waiting)

    def run(self) -> NDArray[np.int32]:
        """Places op after op."""
        for op, count in enumerate(self.waiting):
            if not count:
                self._offer(op)
        for _ in self.waiting:
            start, op, device = self._earliest()
            self.free[device] = self.partial.place(op, device, start)
            self.done[op] = True
            self.placed(op, device)
            for reader in self.readers[op]:
                self.waiting[reader] -= 1
                if not self.waiting[reader]:
                    self._offer(reader)
        return self.partial.placement()

    def start(self, op: int, ready: float, device: int) -> float:
        """Returns when an op can start on a device, s."""
        del op
        return max(ready, self.free[device])

    def also(self, device: int) -> int:
        """Returns an op that a device prefers to the top of its heap; -1 = none."""
        del device
        return -1

    def placed(self, op: int, device: int) -> None:
        """Is told that an op was placed."""

    def _offer(self, op: int) -> None:
        """Lets an op wait on every device that it may still go to."""
        for device in self.partial.options(op):
            if device not in self.offered[op]:
                self.offered[op].add(device)
                heappush(self.heaps[device], (self.partial.ready(op, device), op))

    def _earliest(self) -> tuple[float, int, int]:
        """Returns (start, op, device) of the op that can start first and takes it off its heap."""
        while True:
            best = (math.inf, math.inf, len(self.waiting), -1)
            for device, heap in enumerate(self.heaps):
                while heap and self.done[heap[0][1]]:
                    heappop(heap)
                if heap:
                    ready, op = heap[0]
                    best = min(best, (self.start(op, ready, device), ready, op, device))
                if (op := self.also(device)) >= 0:
                    ready = self.partial.ready(op, device)
                    best = min(best, (self.start(op, ready, device), ready, op, device))
            start, _, op, device = best
            if self.heaps[device][0][1] == op:
                heappop(self.heaps[device])
            if device in self.partial.options(op):
                return start, op, device
            self.offered[op].discard(device)
            self._offer(op)  # its unit went elsewhere, or the memory is gone
