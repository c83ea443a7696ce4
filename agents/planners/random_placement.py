"""Every unit on a device drawn at random; the best of a few draws."""

from dataclasses import dataclass

import numpy as np

from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace


@dataclass(frozen=True, slots=True)
class RandomPlacement:
    """Draws placements over the GPUs."""

    draws: int = 16
    name: str = "random"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Scores all draws at once."""
        drawn = rng.integers(len(space.devices), size=(self.draws, space.num_units))
        placements = np.array(space.devices, np.int32)[drawn]
        recorder.evaluate(self.name, space.repair(placements), budget)
