"""m-TOPO: units in program order fill one device after the other up to an equal share of memory.

Jeon et al., Baechi: Fast Device Placement of Machine Learning Graphs, SoCC 2020; the share is the
mean over the devices plus the largest unit, bounded by what a device has. A reconstruction: a unit
here is a forward op with its backward and update, there it is a group of fused ops.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace


@dataclass(frozen=True, slots=True)
class MTopo:
    """Fills 1, 2, ... all GPUs, with several margins for what the estimate of memory misses."""

    margins: tuple[float, ...] = (1.0, 0.9, 0.8)
    name: str = "m_topo"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Scores one placement per number of devices and margin."""
        placements = [
            fill(space, space.devices[:count], margin)
            for count in range(2, len(space.devices) + 1)
            for margin in self.margins
        ]
        if placements:
            recorder.evaluate(self.name, space.repair(np.stack(placements)), budget)


def fill(space: PlacementSpace, devices: Sequence[int], margin: float = 1.0) -> NDArray[np.int32]:
    """Returns the device of each unit, [unit]; what fits nowhere stays on the last device.

    Args:
        space: the space.
        devices: in the order of filling.
        margin: fraction of the room of a device that may be used.
    """
    share = space.memory.sum() / len(devices) + space.memory.max(initial=0.0)
    limits = np.minimum(share, space.room[list(devices)] * margin).tolist()
    memory = space.memory.tolist()
    placement = np.zeros(space.num_units, np.int32)
    slot, used = 0, 0.0
    for unit in space.order.tolist():
        while slot < len(devices) - 1 and used + memory[unit] > limits[slot]:
            slot, used = slot + 1, 0.0
        placement[unit] = devices[slot]
        used += memory[unit]
    return placement
