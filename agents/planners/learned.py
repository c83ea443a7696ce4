"""EAGLE, Mars and their kin as planners: trained on the task, from the best placement known.

`hierarchical` and `placeto` have the constants of their papers and code (`agents.hierarchical`,
`agents.placeto`). `reinforce` and `gdp` are the nearest configurations of EAGLE and Mars to the
Hierarchical Planner and to GDP (Zhou et al., 2019: a graph encoder without contrastive
pre-training, a placer of the Transformer-XL kind, and PPO), not re-implementations.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agents.planners.grouping import Grouping
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace
from agents.task import PlacementTask

_FOREVER = 2**60  # evaluations: the planner's budget ends a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Trains a system on the task; torch is loaded when it begins.

    Attributes:
        system: module of `agents`: ``eagle``, ``mars``, ``hierarchical`` or ``placeto``.
        name: what reports call it.
        groups: decisions, at most; None = as the system has them.
        changes: of the system's configuration.
        near_best: whether it begins near the best placement known; the Hierarchical Planner
            begins from nothing anyway.
    """

    system: str
    name: str
    groups: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    near_best: bool = True

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Trains until the budget is spent or one life has found nothing better for long.

        Raises:
            KeyboardInterrupt: Ctrl-C; the recorder has what was found.
        """
        module = importlib.import_module(f"agents.{self.system}")
        grouping = Grouping.of(space, self.groups or module.Config.GROUPS)
        if not grouping.num_groups or not budget.left():
            return
        task = PlacementTask.of(grouping).recorded(self.name, recorder, budget)
        best = recorder.best or recorder.nearest
        start = grouping.summarise(best.placement) if best and self.near_best else None
        seed = int(rng.integers(2**31))
        settings = {"evaluations": _FOREVER, "seed": seed, **self.changes}
        if module.train(module.Config(**settings), task, start=start).interrupted:
            raise KeyboardInterrupt


ONE_LIFE = {"lives": 1}


def eagle() -> Learned:
    """Returns EAGLE."""
    return Learned(system="eagle", name="eagle", changes=ONE_LIFE)


def mars() -> Learned:
    """Returns Mars."""
    return Learned(system="mars", name="mars", changes=ONE_LIFE)


def hierarchical() -> Learned:
    """Returns the Hierarchical Planner with the constants of its paper."""
    return Learned(system="hierarchical", name="hierarchical")


def reinforce() -> Learned:
    """Returns the configuration of EAGLE that is nearest to the Hierarchical Planner."""
    changes = {"algorithm": "reinforce", "mode": "sequential", "attention": "after"}
    return Learned(system="eagle", name="reinforce", changes=ONE_LIFE | changes)


def placeto() -> Learned:
    """Returns an improver as Placeto."""
    return Learned(system="placeto", name="placeto")


def gdp() -> Learned:
    """Returns the configuration of Mars that is nearest to GDP."""
    changes = {"placer": "transformer", "pretrain": 0}
    return Learned(system="mars", name="gdp", changes=ONE_LIFE | changes)
