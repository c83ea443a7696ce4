"""A trained network as a planner: it proposes placements at once, then learns on the task."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agents.planners.grouping import Grouping
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace
from agents.task import PlacementTask
from simcore.errors import UsageError

if TYPE_CHECKING:
    from agents.train import Trained

_FOREVER = 2**60  # evaluations: the planner's budget ends a run


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPlanner:
    """Proposes placements of a network and fine-tunes a copy; torch is loaded when it begins.

    Attributes:
        checkpoint: file of ``placewright train``.
        placements: proposed without training; 0 = none.
        groups: decisions, at most.
        tune: whether to train on the task with what is left of the budget.
        patience: iterations without a better placement that end the training.
    """

    checkpoint: Path
    placements: int = 256
    groups: int = 128
    tune: bool = True
    patience: int = 40
    name: str = "mars"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Proposes, then trains until the budget is spent or nothing better comes.

        Raises:
            PlacewrightError: the checkpoint is missing, damaged or of another system.
            KeyboardInterrupt: Ctrl-C; the recorder has what was found.
        """
        trained: Trained = importlib.import_module("agents.train").Trained.load(self.checkpoint)
        if trained.system != self.name:
            raise UsageError(f"{self.checkpoint}: a network of {trained.system}, not {self.name}")
        grouping = Grouping.of(space, max(self.groups, trained.config.GROUPS))
        if not grouping.num_groups:
            return
        task = PlacementTask.of(grouping).recorded(self.name, recorder, budget)
        seed = int(rng.integers(2**31))
        if self.placements:
            task.evaluate(trained.propose(task, self.placements, seed))
        if self.tune and budget.left():
            result = trained.tuned(task, _FOREVER, seed, patience=self.patience)
            if result.interrupted:
                raise KeyboardInterrupt
