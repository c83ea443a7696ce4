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
        """Counts through the placements; the last unit changes fastest."""
        if not self.covers(space):
            return
        options = [np.flatnonzero(row) for row in space.allowed]
        shape = [len(row) for row in options]
        total = math.prod(shape)
        for begin in range(0, total, self.batch):
            if not budget.left():
                return
            digits = np.unravel_index(np.arange(begin, min(begin + self.batch, total)), shape)
            columns = [row[digit] for row, digit in zip(options, digits, strict=True)]
            recorder.evaluate(self.name, np.stack(columns, axis=1), budget)
