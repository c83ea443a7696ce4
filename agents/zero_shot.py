"""Plans of a trained network without training it: draws, recombined and then polished.

The network is asked once. Its draws are recombined in groups (`agents.refine`), and the best is
then improved unit by unit, by annealing that is cold from the beginning. All of that is simulation;
where only the network's own plans are of interest, both can be left out.
"""

from dataclasses import dataclass

import numpy as np

from agents.planners.anneal import Anneal
from agents.planners.grouping import Grouping
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace
from agents.refine import Refinement
from agents.task import PlacementTask
from agents.train import Trained

COLD = ((0.5, 0.004), (1.0, 0.002))  # legs of annealing, in energy


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroShot:
    """What is simulated.

    Attributes:
        placements: drawn from the network, the likeliest one included.
        recombined: made of the draws.
        polished: neighbours of the best that are tried, unit by unit.
        groups: decisions, at most.
    """

    placements: int = 128
    recombined: int = 384
    polished: int = 1536
    groups: int = 128

    def search(
        self,
        trained: Trained,
        space: PlacementSpace,
        seed: int,
        budget: Budget,
        recorder: Recorder,
        name: str = "mars",
    ) -> PlacementTask | None:
        """Simulates through a recorder; returns the network's task, None where nothing is decided.

        Args:
            trained: the network.
            space: what is placed.
            seed: of all that is drawn.
            budget: what pays.
            recorder: keeps the best, under the name.
            name: what reports call the network.
        """
        grouping = Grouping.of(space, max(self.groups, trained.config.GROUPS))
        if not grouping.num_groups:
            return None
        task = PlacementTask.of(grouping).recorded(name, recorder, budget)
        if self.placements:
            draws = trained.propose(task, self.placements, seed)
            Refinement().run(task, draws, self.placements + self.recombined, seed)
        if self.polished and budget.left():
            own = Budget(evaluations=self.polished, parent=budget)
            rng = np.random.default_rng([seed, 1])
            Anneal(legs=COLD, name=name).search(space, rng, own, recorder)
        return task
