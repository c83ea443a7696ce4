"""The best placements a learner has met: rewards may be cheap, so the best are simulated again."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.task import Evaluation
from simcore.errors import UsageError


class Finalist(NamedTuple):
    """A placement and what is known about it."""

    overflow: int  # bytes over capacity
    step_time: float  # s
    evaluations: int  # made when it was found, itself included
    actions: tuple[int, ...]  # [group] device index

    @property
    def fits(self) -> bool:
        """Whether it fits the memory."""
        return self.overflow == 0


class Finalists:
    """The best distinct placements: least over the memory, then fastest, then first."""

    def __init__(self, limit: int = 16) -> None:
        self.limit = limit
        self.ranked: tuple[Finalist, ...] = ()  # best first

    @property
    def best(self) -> Finalist | None:
        """The best legal placement, None if there was none."""
        return self.ranked[0] if self.ranked else None

    def note(self, actions: NDArray[np.integer], found: Evaluation, before: int) -> None:
        """Takes in a batch, [plan, group], that was simulated after so many evaluations."""
        order = np.lexsort((found.step_time, found.overflow))
        legal = order[np.isfinite(found.step_time[order])][: self.limit]
        new = [
            Finalist(
                int(found.overflow[plan]),
                float(found.step_time[plan]),
                before + plan + 1,
                tuple(actions[plan].tolist()),
            )
            for plan in legal.tolist()
        ]
        distinct: dict[tuple[int, ...], Finalist] = {}
        for finalist in sorted((*self.ranked, *new)):
            distinct.setdefault(finalist.actions, finalist)
        self.ranked = tuple(distinct.values())[: self.limit]

    def state(self) -> list[Any]:
        """Returns what a checkpoint keeps."""
        return [list(finalist) for finalist in self.ranked]

    def restore(self, state: list[Any]) -> None:
        """Takes up what a checkpoint kept."""
        self.ranked = tuple(Finalist(a, b, c, tuple(d)) for a, b, c, d in state)


class Searched(NamedTuple):
    """What a run found that keeps no checkpoint."""

    finalists: tuple[Finalist, ...]  # best first
    iterations: int
    evaluations: int
    interrupted: bool  # whether Ctrl-C ended it


def refuse_folder(name: str, folder: Path | None, *, resume: bool) -> None:
    """Refuses a folder for a learner that keeps no checkpoints.

    Raises:
        UsageError: there is a folder.
    """
    if folder is not None or resume:
        raise UsageError(f"{name} keeps no checkpoints: run it without --folder and --resume")
