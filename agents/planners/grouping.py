"""Placement units in groups that are decided together, in program order.

A learner samples hundreds of placements at once; with at most a few dozen decisions each it learns
from thousands of them what single units would take millions for.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.planners.space import PlacementSpace
from simcore.coarsen import to_at_most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grouping:
    """Groups of units. Axes: unit, group, dev."""

    space: PlacementSpace
    group: NDArray[np.int32]  # [unit] the group that decides it
    allowed: NDArray[np.bool_]  # [group, dev] where at least one of its units may go
    weight: NDArray[np.float64]  # [unit] s of work, at least a little

    @classmethod
    def of(cls, space: PlacementSpace, num_groups: int) -> "Grouping":
        """Returns at most so many groups of neighbouring units, numbered in program order.

        Devices that simple strategies leave alone (CPUs beside GPUs) are left alone here too, but
        for units that may go nowhere else.
        """
        if not space.num_units:
            empty = np.zeros((0, space.num_devices), np.bool_)
            return cls(space=space, group=np.zeros(0, np.int32), allowed=empty, weight=np.zeros(0))
        coarse = to_at_most(space.problem.graph, num_groups, space.seconds.min(axis=1))
        _, first = np.unique(coarse.group[space.order], return_index=True)
        rank = np.empty_like(first)
        rank[np.argsort(first)] = np.arange(len(first))
        group = rank[coarse.group].astype(np.int32)
        allowed = np.zeros((len(first), space.num_devices), np.bool_)
        np.logical_or.at(allowed, group, space.allowed)
        preferred = allowed.copy()
        preferred[:, sorted(set(range(space.num_devices)) - set(space.devices))] = False
        work = space.work.min(axis=1)
        return cls(
            space=space,
            group=group,
            allowed=np.where(preferred.any(axis=1, keepdims=True), preferred, allowed),
            weight=work + 1e-6 * (work.sum() or 1.0) / len(work),
        )

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.allowed)

    @property
    def members(self) -> tuple[NDArray[np.int32], ...]:
        """Units of each group, ascending, [group][...]."""
        units = np.argsort(self.group, kind="stable").astype(np.int32)
        parts = np.split(units, np.flatnonzero(np.diff(self.group[units])) + 1)
        return tuple(parts[: self.num_groups])

    def expand(self, actions: NDArray[np.integer]) -> NDArray[np.int32]:
        """Returns placements, [..., unit], from devices of groups, [..., group].

        A unit that may not go where its group goes stays on its default device.
        """
        return self.space.repair(actions[..., self.group])

    def summarise(self, placement: NDArray[np.integer]) -> NDArray[np.int32]:
        """Returns for each group the device that most of its work is on, [group]."""
        share = np.zeros(self.allowed.shape)
        np.add.at(share, (self.group, placement), self.weight)
        most: NDArray[np.intp] = np.where(self.allowed, share, -1.0).argmax(axis=1)
        return most.astype(np.int32)
