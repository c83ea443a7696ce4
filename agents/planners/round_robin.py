"""Units dealt out in program order, one device after the other."""

from dataclasses import dataclass

import numpy as np

from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """Deals the units over the GPUs."""

    name: str = "round_robin"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Scores one placement."""
        placement = np.zeros((1, space.num_units), np.int32)
        placement[0, space.order] = np.resize(space.devices, space.num_units)
        recorder.evaluate(self.name, space.repair(placement), budget)
