"""Simplifies the best placement: gives up devices and stray runs of units where that costs nothing.

A walk at random leaves units where they do no harm; a plan that a person reads should not.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.planners.recorder import Budget, Found, Recorder
from agents.planners.space import PlacementSpace


@dataclass(frozen=True, slots=True)
class Tidy:
    """Merges devices, and runs of units with the run before or after, as long as none is slower."""

    rounds: int = 20
    batch: int = 32
    name: str = "tidy"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Repeats until nothing changes."""
        for _ in range(self.rounds):
            best = recorder.best
            if best is None or not budget.left():
                return
            self._step(space, best, budget, recorder)
            if recorder.best is best:
                return

    def _step(self, space: PlacementSpace, best: Found, budget: Budget, recorder: Recorder) -> None:
        """Scores all single merges, the simplest first, then all together that are not slower."""
        name = f"{best.finder.removesuffix(f'+{self.name}')}+{self.name}"
        ranked = [(space.complexity(p), p) for p in merges(space, best.placement)]
        ranked = sorted((r for r in ranked if r[0] < best.complexity), key=lambda r: r[0])
        together = best.placement.copy()
        for begin in range(0, len(ranked), self.batch):
            rows = [placement for _, placement in ranked[begin : begin + self.batch]]
            scores = recorder.evaluate(name, np.stack(rows), budget)
            fits = (scores.overflow == 0) & (scores.step_time <= best.step_time)
            for index in np.flatnonzero(fits):
                changed = rows[index] != best.placement
                together[changed] = rows[index][changed]
        recorder.evaluate(name, together[None], budget)


def merges(space: PlacementSpace, placement: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """Returns placements with a device emptied into another, or a run into a neighbouring one."""
    line = placement[space.order]
    used = np.unique(line)
    moves = [(placement == a, b) for a in used for b in used if a != b]
    bounds = [0, *(np.flatnonzero(line[1:] != line[:-1]) + 1).tolist(), len(line)]
    for run in range(len(bounds) - 1):
        units = np.zeros(len(line), np.bool_)
        units[space.order[bounds[run] : bounds[run + 1]]] = True
        neighbours = {
            int(line[at]) for at in (bounds[run] - 1, bounds[run + 1]) if 0 <= at < len(line)
        }
        moves += [(units, device) for device in sorted(neighbours)]
    merged = []
    for units, device in moves:
        changed = placement.copy()
        changed[units & space.allowed[:, device]] = device
        merged.append(changed)
    return merged
