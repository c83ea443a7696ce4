"""Every placement there is, where there are few: the optimum, proven."""

import math
from dataclasses import dataclass

import numpy as np

from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace


@dataclass(frozen=True, slots=True)
class Exhaustive:
    """Scores all placements of a space that has at most `limit` of them."""

    limit: int = 10_000
    batch: int = 256
    name: str = "exhaustive"

    def covers(self, space: PlacementSpace) -> bool:
        """Whether the space is small enough."""
        choices = space.allowed.sum(axis=1)
        return math.fsum(np.log(choices)) <= math.log(self.limit) + 1e-9

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Counts through the placements, the last unit fastest; then nothing is left to find."""
        if not self.covers(space):
            return
        free = np.flatnonzero(space.allowed.sum(axis=1) > 1)
        options = [np.flatnonzero(space.allowed[unit]) for unit in free]
        shape = [len(devices) for devices in options]
        total, room = math.prod(shape), budget.room()
        if room is not None and room < total:
            return  # half of all would be the wrong half
        for begin in range(0, total if shape else 0, self.batch):
            if not budget.left():
                return
            digits = np.unravel_index(np.arange(begin, min(begin + self.batch, total)), shape)
            placements = np.repeat(space.default[None], len(digits[0]), axis=0)
            for unit, devices, digit in zip(free, options, digits, strict=True):
                placements[:, unit] = devices[digit]
            recorder.evaluate(self.name, placements, budget)
        budget.stop()
