"""Everything on one device, the best of those that can run it all."""

from dataclasses import dataclass

import numpy as np

from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace


@dataclass(frozen=True, slots=True)
class SingleDevice:
    """Tries every device that may hold all units; the GPUs first."""

    name: str = "single_device"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Scores one placement per device."""
        whole = np.flatnonzero(space.allowed.all(axis=0)).tolist()
        devices = sorted(whole, key=lambda device: (device not in space.devices, device))
        placements = np.repeat(np.array(devices, np.int32)[:, None], space.num_units, axis=1)
        recorder.evaluate(self.name, placements, budget)
