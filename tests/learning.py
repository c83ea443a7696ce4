"""What tests of learners share: whether a run meets the optimum of the toy, and its curve."""

import dataclasses
from collections.abc import Callable
from typing import Any

from agents.diagnostics import Diagnostics
from agents.ppo import TrainResult
from agents.task import TOY_OPTIMUM, toy

EVALUATIONS = 16_384  # random placements meet the optimum within as many in two of five runs


def meets_optimum(train: Callable[..., Any], config: Any) -> bool:
    """Whether a run on the toy meets its optimum; it ends there."""
    task, best = toy(), []

    def score(placements):
        outcome = task.score(placements[: 0 if best else None])
        best.extend(t for t in outcome.step_time if t < TOY_OPTIMUM * (1 + 1e-9))
        return outcome

    train(config, dataclasses.replace(task, score=score))
    return bool(best)


def curve(rows: tuple[Diagnostics, ...] | list[Diagnostics]) -> list[str]:
    """The diagnostics of a run without the clock."""
    return [repr(row._replace(evaluations_per_second=0.0)) for row in rows]


def same_curve(first: TrainResult, second: TrainResult) -> bool:
    return curve(first.history) == curve(second.history)


def raising(at: int) -> Callable[[Diagnostics], None]:
    """A listener that interrupts."""

    def listen(row: Diagnostics) -> None:
        if row.iteration == at:
            raise KeyboardInterrupt

    return listen
