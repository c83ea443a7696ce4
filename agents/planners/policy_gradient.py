"""PPO as a planner: a policy per level of grouping, trained from the best placement known."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agents.planners.cross_entropy import distinct
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace
from agents.task import PlacementTask

if TYPE_CHECKING:
    from agents.ppo import TrainResult

_FOREVER = 2**60  # evaluations: the planner's budget ends a run


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient:
    """Trains `agents.ppo` on groups of units, few at first; torch is loaded when it begins.

    Attributes:
        levels: numbers of groups, at most; each level begins at the best placement so far, with an
            equal part of the budget.
        placements: sampled per iteration.
        patience: iterations without a better placement that end a level.
        least_evaluations: the planner does nothing where its budget has fewer, if it counts them.
        least_seconds: likewise; loading torch alone takes one to three.
    """

    levels: tuple[int, ...] = (32, 64, 128)
    placements: int = 64
    patience: int = 20
    least_evaluations: int = 0
    least_seconds: float = 0.0
    name: str = "ppo"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Goes from few groups to many.

        Raises:
            KeyboardInterrupt: Ctrl-C; the recorder has what was found.
        """
        evaluations, seconds = budget.room(), budget.seconds_left()
        if evaluations is not None and evaluations < self.least_evaluations:
            return
        if seconds is not None and seconds < self.least_seconds:
            return
        groupings = distinct(space, self.levels)
        for number, grouping in enumerate(groupings):
            part = budget.part(1.0 / (len(groupings) - number))
            if not part.left():
                return
            best = recorder.best or recorder.nearest
            start = None if best is None else grouping.summarise(best.placement)
            task = PlacementTask.of(grouping).recorded(self.name, recorder, part)
            seed = int(rng.integers(2**31))
            if self._train(task, start, seed).interrupted:
                raise KeyboardInterrupt

    def _train(self, task: PlacementTask, start: Any, seed: int) -> "TrainResult":
        ppo = importlib.import_module("agents.ppo")
        config = ppo.Config(
            evaluations=_FOREVER,
            seed=seed,
            placements=self.placements,
            patience=self.patience,
            lives=1,
        )
        result: TrainResult = ppo.train(config, task, start=start)
        return result
