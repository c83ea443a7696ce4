"""Neighbours of a placement: a unit, a run, a module or a group moves, or two devices swap.

Groups are the units of coarser graphs. In a chain they are runs of the program order, which move
anyway; where branches lie side by side, no run is a branch, and groups are what moves one. So the
more of them are no runs, the more neighbours move a group; in a chain, none does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.planners.grouping import Grouping
from agents.planners.space import PlacementSpace
from simcore.graph import OpGraph

_LEVELS = (16, 32, 64, 128)  # groups of each coarser graph, at most
_GROUPED = 0.8  # fraction of neighbours that move a group, where no group is a run
_DRAWS = 3  # of a neighbour, until it differs: one that does not wastes an evaluation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """What can move together. Axes: unit, entry (of a list of lists)."""

    space: PlacementSpace
    movable: NDArray[np.int32]  # [...] units that have a choice
    options: tuple[NDArray[np.int32], ...]  # [unit][...] devices it may use
    rank: NDArray[np.int64]  # [unit] its place in the program order
    first_friend: NDArray[np.int64]  # [unit + 1] offsets into friends
    friends: NDArray[np.int32]  # [entry] units it exchanges tensors with
    modules: tuple[NDArray[np.int32], ...]  # [module][...] units, where there are several
    groups: tuple[NDArray[np.int32], ...]  # [group][...] units of a unit of a coarser graph
    group_share: float  # of the neighbours that move a group

    @classmethod
    def of(cls, space: PlacementSpace) -> "Moves":
        """Returns the moves of a space."""
        rank = np.empty(space.num_units, np.int64)
        rank[space.order] = np.arange(space.num_units)
        first, friends = _friends(space.problem.graph)
        groups = _groups(space)
        return cls(
            space=space,
            movable=np.flatnonzero(space.allowed.sum(axis=1) > 1).astype(np.int32),
            options=tuple(np.flatnonzero(row).astype(np.int32) for row in space.allowed),
            rank=rank,
            first_friend=first,
            friends=friends,
            modules=_modules(space.problem.graph),
            groups=groups,
            group_share=_GROUPED * _scattered(groups, rank) ** 0.5,
        )

    def neighbour(
        self, placement: NDArray[np.int32], rng: np.random.Generator, spent: float
    ) -> NDArray[np.int32]:
        """Returns a changed copy of a placement, [unit]; changes are smaller the more is spent."""
        for _ in range(_DRAWS):
            drawn = self._draw(placement, rng, spent)
            if not np.array_equal(drawn, placement):
                break
        return drawn

    def _draw(
        self, placement: NDArray[np.int32], rng: np.random.Generator, spent: float
    ) -> NDArray[np.int32]:
        """Returns a copy of a placement, [unit], in which what moves may be where it was."""
        if self.group_share and rng.random() < self.group_share:
            units = self.groups[rng.integers(len(self.groups))]
            return self._move(placement, units, self._near(placement, int(units[0]), rng))
        kind = rng.random()
        unit = int(self.movable[rng.integers(len(self.movable))])
        if kind < 0.25 + 0.25 * spent:
            return self._move(placement, np.array([unit]), self._other(placement, unit, rng))
        if kind < 0.75:
            run = self._run(unit, rng, spent)
            return self._move(placement, run, self._near(placement, unit, rng))
        if kind < 0.85:
            return self._border(placement, unit, rng)
        if kind < 0.95 and self.modules:
            units = self.modules[rng.integers(len(self.modules))]
            return self._move(placement, units, self._near(placement, int(units[0]), rng))
        return self._swap(placement, unit, rng, spent)

    def _move(
        self, placement: NDArray[np.int32], units: NDArray[np.integer], device: int
    ) -> NDArray[np.int32]:
        """Moves units to a device, those that may use it."""
        moved = placement.copy()
        moved[units[self.space.allowed[units, device]]] = device
        return moved

    def _other(self, placement: NDArray[np.int32], unit: int, rng: np.random.Generator) -> int:
        """Returns a device that the unit may use and is not on: a friend's, every other time."""
        if rng.random() < 0.5:
            device = self._near(placement, unit, rng)
            if device != placement[unit]:
                return device
        others = self.options[unit][self.options[unit] != placement[unit]]
        return int(others[rng.integers(len(others))]) if len(others) else int(placement[unit])

    def _near(self, placement: NDArray[np.int32], unit: int, rng: np.random.Generator) -> int:
        """Returns the device of a friend, or any that the unit may use."""
        begin, end = self.first_friend[unit], self.first_friend[unit + 1]
        if end > begin and rng.random() < 0.5:
            friend = self.friends[rng.integers(begin, end)]
            if placement[friend] != placement[unit]:
                return int(placement[friend])
        return int(self.options[unit][rng.integers(len(self.options[unit]))])

    def _run(self, unit: int, rng: np.random.Generator, spent: float) -> NDArray[np.int32]:
        """Returns consecutive units from one on; about a tenth of all at first, then fewer."""
        mean = max(2.0, self.space.num_units * 0.1 * (1.0 - spent))
        length = 1 + int(rng.geometric(1.0 / mean))
        begin = int(self.rank[unit])
        return self.space.order[begin : begin + length]

    def _border(
        self, placement: NDArray[np.int32], unit: int, rng: np.random.Generator
    ) -> NDArray[np.int32]:
        """Moves the next border between two devices, in program order, by a few units."""
        line = placement[self.space.order]
        borders = np.flatnonzero(line[1:] != line[:-1]) + 1
        if not len(borders):
            return self._move(placement, np.array([unit]), self._other(placement, unit, rng))
        border = int(borders[rng.integers(len(borders))])
        length = int(rng.geometric(0.25))
        if rng.random() < 0.5:
            units, device = self.space.order[border : border + length], line[border - 1]
        else:
            units, device = self.space.order[max(0, border - length) : border], line[border]
        return self._move(placement, units, int(device))

    def _swap(
        self, placement: NDArray[np.int32], unit: int, rng: np.random.Generator, spent: float
    ) -> NDArray[np.int32]:
        """Exchanges two devices, everywhere or in a run of units."""
        a, b = int(placement[unit]), self._other(placement, unit, rng)
        mask = np.ones(len(placement), np.bool_)
        if rng.random() < 0.5:
            mask[:] = False
            mask[self._run(unit, rng, spent)] = True
        swapped = placement.copy()
        swapped[mask & (placement == a) & self.space.allowed[:, b]] = b
        swapped[mask & (placement == b) & self.space.allowed[:, a]] = a
        return swapped


def _friends(graph: OpGraph) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Returns the units that exchange tensors with each unit, as offsets and entries."""
    source, target, _ = graph.edges()
    a, b = graph.unit[source], graph.unit[target]
    pairs = np.stack([np.concatenate([a, b]), np.concatenate([b, a])], axis=1)
    pairs = np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)
    first = np.searchsorted(pairs[:, 0], np.arange(graph.num_units + 1)).astype(np.int64)
    return first, pairs[:, 1].astype(np.int32)


def _modules(graph: OpGraph) -> tuple[NDArray[np.int32], ...]:
    """Returns the units of every module with several units but not all, at any depth."""
    members: dict[str, set[int]] = {}
    for module, unit in zip(graph.op_modules, graph.unit.tolist(), strict=True):
        path = module
        while path:
            members.setdefault(path, set()).add(unit)
            path = path.rpartition(".")[0]
    groups = {tuple(sorted(units)) for units in members.values()}
    kept = sorted(group for group in groups if 1 < len(group) < graph.num_units)
    return tuple(np.array(group, np.int32) for group in kept)


def _groups(space: PlacementSpace) -> tuple[NDArray[np.int32], ...]:
    """Returns the distinct groups of several units but not all, at every level."""
    every = (units for level in _LEVELS for units in Grouping.of(space, level).members)
    distinct = {units.tobytes(): units for units in every if 1 < len(units) < space.num_units}
    return tuple(distinct.values())


def _scattered(groups: Sequence[NDArray[np.int32]], rank: NDArray[np.int64]) -> float:
    """Returns the fraction of groups whose units do not follow each other in program order."""
    apart = sum(int(np.ptp(rank[units])) >= len(units) for units in groups)
    return apart / max(1, len(groups))
