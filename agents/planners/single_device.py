"""Everything on one device, the best of those that can run it; a CPU as the last resort."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace


@dataclass(frozen=True, slots=True)
class SingleDevice:
    """Tries every GPU; where there is none, every device."""

    name: str = "single_device"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Scores one placement per device that may hold all units."""
        devices = [device for device in space.devices if space.allowed[:, device].all()]
        recorder.evaluate(self.name, _on_one(space, devices), budget)


@dataclass(frozen=True, slots=True)
class CpuOnly:
    """Tries every CPU, where no placement that fits is known: slow, but it may have the memory."""

    name: str = "cpu_only"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Scores one placement per CPU that may hold all units."""
        if recorder.best is None:
            others = set(range(space.num_devices)) - set(space.devices)
            cpus = [device for device in sorted(others) if space.allowed[:, device].all()]
            recorder.evaluate(self.name, _on_one(space, cpus), budget)


def _on_one(space: PlacementSpace, devices: list[int]) -> NDArray[np.int32]:
    return np.repeat(np.array(devices, np.int32)[:, None], space.num_units, axis=1)
