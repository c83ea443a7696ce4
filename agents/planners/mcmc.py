"""Markov chain Monte Carlo over placements: FlexFlow's search, on our neighbours.

Jia, Zaharia and Aiken, Beyond data and model parallelism for deep neural networks, MLSys 2019: a
Metropolis walk at one temperature, exp(beta (old - new)), that begins again from the best where it
has found nothing better for long. The energy is the logarithm of the step time, as of `Anneal`;
beta and the number of fruitless steps are ours.
"""

from dataclasses import dataclass

import numpy as np

from agents.planners.anneal import energy
from agents.planners.moves import Moves
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class Mcmc:
    """Walks from the best placement known.

    Attributes:
        beta: inverse temperature, per unit of the logarithm of the step time.
        tries: neighbours scored at once, of which the first accepted one is taken.
        patience: neighbours without a better placement, after which the walk returns to the best.
    """

    beta: float = 200.0
    tries: int = 16
    patience: int = 1000
    name: str = "mcmc"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Walks until the budget is spent."""
        moves = Moves.of(space)
        known = recorder.best or recorder.nearest
        start = space.default if known is None else known.placement
        if not moves.movable.size:
            return
        scores = recorder.evaluate(self.name, start[None], budget)
        if not len(scores.step_time):
            return
        state, now = start, float(energy(space, scores)[0])
        best, least, stale = state, now, 0
        while budget.left():
            tried = [moves.neighbour(state, rng, 0.0) for _ in range(self.tries)]
            values = energy(space, recorder.evaluate(self.name, np.stack(tried), budget))
            accepted = rng.random(len(values)) < np.exp(np.minimum(0.0, self.beta * (now - values)))
            stale += len(values)
            if accepted.any():
                pick = int(accepted.argmax())
                state, now = tried[pick], float(values[pick])
            if now < least:
                best, least, stale = state, now, 0
            if stale > self.patience:
                state, now, stale = best, least, 0
