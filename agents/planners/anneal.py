"""Simulated annealing over placements, from the best that others found.

Kirkpatrick, Gelatt and Vecchi, Optimization by simulated annealing, Science 220, 1983. The energy
is the logarithm of the step time, so that one temperature fits all graphs, plus a penalty for
memory over capacity, so that a walk can leave what does not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.planners.moves import Moves
from agents.planners.recorder import Budget, Recorder, Scores
from agents.planners.space import PlacementSpace

_ILLEGAL = 1e6  # energy, above any other


@dataclass(frozen=True, slots=True, kw_only=True)
class Anneal:
    """Walks several chains at once; each round scores a few neighbours of every chain.

    Attributes:
        chains: walks at once, from different starts.
        tries: neighbours of a chain scored at once, of which the first accepted one is taken: a
            batch keeps all cores busy, and most neighbours are refused anyway.
        legs: fraction of the budget at which a leg ends, and its temperature at the start, in
            energy (0.02 accepts 2 % more time once in 2.7 times). Each leg starts from the best.
            Short ones come first, so that a search that is cut short has something to show.
        cold: temperature at the end of each leg.
    """

    chains: int = 2
    tries: int = 8
    legs: tuple[tuple[float, float], ...] = (
        (0.05, 0.01),
        (0.2, 0.02),
        (0.8, 0.02),
        (0.9, 0.008),
        (1.0, 0.003),
    )
    cold: float = 2e-5
    name: str = "anneal"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Walks until the budget is spent; the temperature falls with what is spent of it."""
        moves = Moves.of(space)
        if not moves.movable.size:
            return
        walks = self._start(space, recorder, budget)
        leg = 0
        while budget.left() and walks.states:
            now, progress = self._leg(budget.spent())
            if now > leg:
                leg = now
                walks = self._start(space, recorder, budget, spread=False)
            hot = self.legs[leg][1]
            temperature = hot * (self.cold / hot) ** progress
            proposals = [
                moves.neighbour(state, rng, progress)
                for state in walks.states
                for _ in range(self.tries)
            ]
            scores = recorder.evaluate(self.name, np.stack(proposals), budget)
            walks.advance(proposals, energy(space, scores), temperature, rng)

    def _leg(self, spent: float) -> tuple[int, float]:
        """Returns which leg a fraction of the budget is in, and how far along it."""
        begin = 0.0
        for leg, (end, _) in enumerate(self.legs):
            if spent < end:
                return leg, (spent - begin) / (end - begin)
            begin = end
        return len(self.legs) - 1, 1.0

    def _start(
        self, space: PlacementSpace, recorder: Recorder, budget: Budget, *, spread: bool = True
    ) -> "_Walks":
        """Returns chains at the best placements: of different planners, or all at the very best."""
        starts = _bests(space, recorder)[: self.chains if spread else 1]
        scores = recorder.evaluate(self.name, np.stack(starts), budget)
        energies: list[float] = energy(space, scores).tolist()
        states = starts[: len(energies)]  # fewer where the budget ended
        more = self.chains - len(starts)
        return _Walks(states + states[:1] * more, energies + energies[:1] * more)


@dataclass(slots=True)
class _Walks:
    """Where the chains are."""

    states: list[NDArray[np.int32]]  # [chain][unit]
    energies: list[float]  # [chain]

    def advance(
        self,
        proposals: Sequence[NDArray[np.int32]],
        energies: NDArray[np.float64],
        temperature: float,
        rng: np.random.Generator,
    ) -> None:
        """Moves each chain to the first of its neighbours that Metropolis' rule accepts.

        Args:
            proposals: neighbours, those of the first chain first, equally many of each.
            energies: theirs, [plan]; fewer where the budget ended.
            temperature: in energy.
            rng: draws the limits.
        """
        limits = temperature * -np.log1p(-rng.random(len(proposals)))
        tries = len(proposals) // len(self.states)
        for index, value in enumerate(energies.tolist()):
            chain, first = divmod(index, tries)
            if first == 0:
                moved = False
            if not moved and value - self.energies[chain] <= limits[index]:
                self.states[chain], self.energies[chain] = proposals[index], value
                moved = True


def energy(space: PlacementSpace, scores: Scores) -> NDArray[np.float64]:
    """Returns log(step time / s), and more for bytes over the mean capacity, [plan]."""
    capacity = max(1.0, float(space.problem.capacity[list(space.devices)].mean()))
    legal = np.isfinite(scores.step_time)
    time = np.where(legal, np.maximum(scores.step_time, 1e-300), 1.0)
    over = scores.overflow / capacity
    penalty = np.where(over > 0, 0.05 + 5.0 * over, 0.0)
    return np.where(legal, np.log(time) + penalty, _ILLEGAL)


def _bests(space: PlacementSpace, recorder: Recorder) -> list[NDArray[np.int32]]:
    """Returns the best placements of the planners, best first; the default if there is none."""
    ranked = sorted(recorder.by_finder.values(), key=lambda found: found.rank)
    distinct = {found.placement.tobytes(): found.placement for found in ranked}
    return list(distinct.values()) or [space.default]
