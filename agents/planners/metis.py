"""METIS as a planner: balanced parts with few bytes between them, one for each device.

Karypis and Kumar, A fast and high quality multilevel scheme for partitioning irregular graphs,
1998; the stand-in of `agents.planners.partition` where the extra ``metis`` is not installed. A
partition knows nothing of time: parts that wait for each other are as good to it as any.
"""

from dataclasses import dataclass

import numpy as np

from agents.planners.grouping import Grouping
from agents.planners.partition import partition
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Metis:
    """Cuts the units into as many parts as there are devices, and into fewer.

    Attributes:
        units: groups that are cut, at most; fewer are found faster.
    """

    units: int = 1024
    name: str = "metis"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Proposes one placement for each number of devices, parts in program order."""
        del rng
        grouping = Grouping.of(space, self.units)
        if not grouping.num_groups:
            return
        devices = np.array(space.devices)
        for parts in range(2, len(devices) + 1):
            member = partition(grouping, parts, "metis")
            _, first, inverse = np.unique(member, return_index=True, return_inverse=True)
            rank = np.argsort(np.argsort(first))
            placement = grouping.expand(devices[rank[inverse]])
            recorder.evaluate(self.name, placement[None], budget)
