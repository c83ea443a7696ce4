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
from agents.planners.recorder import Budget, Found, Recorder, Scores
from agents.planners.space import PlacementSpace

_ILLEGAL = 1e6  # energy, above any other


@dataclass(frozen=True, slots=True, kw_only=True)
class Anneal:
    """Walks several chains at once; each round scores a few neighbours of every chain.

    Attributes:
        chains: walks at once, from different starts.
        tries: neighbours of a chain scored at once, of which the first accepted one is taken: a
            batch keeps all cores busy, and most neighbours are refused anyway.
        hot: temperature at the start, in energy: 0.02 accepts 2 % more time once in 2.7 times.
        cold: temperature at the end.
        exchanges: how often the worst chain restarts from the best, evenly over the search.
    """

    chains: int = 4
    tries: int = 8
    hot: float = 0.02
    cold: float = 2e-5
    exchanges: int = 10
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
        starts = _starts(space, recorder, self.chains)
        energies = energy(space, recorder.evaluate(self.name, np.stack(starts), budget))
        states = starts[: len(energies)]
        exchanged = 0
        while budget.left() and len(states):
            spent = budget.spent()
            temperature = self.hot * (self.cold / self.hot) ** spent
            proposals = [
                moves.neighbour(state, rng, spent) for state in states for _ in range(self.tries)
            ]
            scores = recorder.evaluate(self.name, np.stack(proposals), budget)
            self._accept(states, energies, proposals, energy(space, scores), temperature, rng)
            if int(spent * self.exchanges) > exchanged:
                exchanged = int(spent * self.exchanges)
                best, worst = int(energies.argmin()), int(energies.argmax())
                states[worst], energies[worst] = states[best], energies[best]

    def _accept(
        self,
        states: list[NDArray[np.int32]],
        energies: NDArray[np.float64],
        proposals: Sequence[NDArray[np.int32]],
        proposed: NDArray[np.float64],
        temperature: float,
        rng: np.random.Generator,
    ) -> None:
        """Moves each chain to the first of its neighbours that Metropolis' rule accepts."""
        limits = temperature * -np.log1p(-rng.random(len(proposals)))
        for chain in range(len(states)):
            for index in range(chain * self.tries, min((chain + 1) * self.tries, len(proposed))):
                if proposed[index] - energies[chain] <= limits[index]:
                    states[chain], energies[chain] = proposals[index], proposed[index]
                    break


def energy(space: PlacementSpace, scores: Scores) -> NDArray[np.float64]:
    """Returns log(step time / s) + overflow as a multiple of the mean capacity, [plan]."""
    capacity = max(1.0, float(space.problem.capacity[list(space.devices)].mean()))
    time = np.where(np.isfinite(scores.step_time), scores.step_time, 1.0)
    over = scores.overflow / capacity
    values = np.log(np.maximum(time, 1e-300)) + np.where(over > 0, 0.05 + 5.0 * over, 0.0)
    return np.where(np.isfinite(scores.step_time), values, _ILLEGAL)


def _starts(space: PlacementSpace, recorder: Recorder, count: int) -> list[NDArray[np.int32]]:
    """Returns the best placements of different planners, best first; the default if there is none.

    Chains beyond the number of planners start from the best again.
    """

    def rank(found: Found) -> tuple[int, float]:
        return found.overflow, found.step_time

    ranked = sorted(recorder.by_finder.values(), key=rank)
    distinct = {found.placement.tobytes(): found.placement for found in ranked}
    starts = list(distinct.values())[:count] or [space.default]
    return starts + [starts[0]] * (count - len(starts))
