"""A trained network as a planner: it proposes placements at once, then learns on the task."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agents.agent_options import SHIPPED
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace
from simcore.errors import UsageError

if TYPE_CHECKING:
    from agents.train import Trained

_FOREVER = 2**60  # evaluations: the planner's budget ends a run


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPlanner:
    """Proposes placements of a network and fine-tunes a copy; torch is loaded when it begins.

    Attributes:
        checkpoint: file of ``placewright train``.
        placements: drawn from the network; 0 = none.
        recombined: made of the draws (`agents.zero_shot`).
        polished: neighbours of the best that are tried after that.
        groups: decisions, at most.
        tune: whether to train on the task with what is left of the budget.
        patience: iterations without a better placement that end the training.
    """

    checkpoint: Path
    placements: int = 128
    recombined: int = 128
    polished: int = 0
    groups: int = 128
    tune: bool = True
    patience: int = 40
    name: str = "mars"

    def load(self) -> "Trained":
        """Returns the network.

        Raises:
            PlacewrightError: the checkpoint is missing, damaged or of another system.
        """
        trained: Trained = importlib.import_module("agents.train").Trained.load(self.checkpoint)
        if trained.system != self.name:
            raise UsageError(f"{self.checkpoint}: a network of {trained.system}, not {self.name}")
        return trained

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
        trained = self.load()
        seed = int(rng.integers(2**31))
        shot = importlib.import_module("agents.zero_shot").ZeroShot(
            placements=self.placements,
            recombined=self.recombined,
            polished=self.polished,
            groups=self.groups,
        )
        task = shot.search(trained, space, seed, budget, recorder, self.name)
        if self.tune and task is not None and budget.left():
            result = trained.tuned(task, _FOREVER, seed, patience=self.patience)
            if result.interrupted:
                raise KeyboardInterrupt


def shipped() -> TrainedPlanner | None:
    """Returns Mars as it ships, without training on the task; None where no network ships."""
    path = SHIPPED / "mars.pt"
    return TrainedPlanner(checkpoint=path, tune=False) if path.is_file() else None
