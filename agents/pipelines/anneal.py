"""Simulated annealing and exhaustive search over the plans that the agent acts on."""

import math
from typing import NamedTuple

import numpy as np

from agents.pipelines.env import PipelineTask, Walk, random_actions
from agents.pipelines.moves import random_neighbour
from agents.pipelines.plans import DagPlan, Score
from agents.planners.recorder import Budget

START_HEAT = 0.1  # of the log of the step time
END_HEAT = 0.002
_FIRST = 32  # plans drawn, the best of which is the start


class Best(NamedTuple):
    """The best plan of a search."""

    score: Score
    plan: DagPlan


def anneal(
    task: PipelineTask, budget: Budget, seed: int = 0, start: DagPlan | None = None
) -> Best | None:
    """Returns the best plan that is met while a budget is spent, one simulation after another.

    Kirkpatrick, Gelatt and Vecchi, 1983; the heat falls as a power of what is spent of the budget.

    Args:
        task: the space.
        budget: seconds or evaluations.
        seed: of all that is drawn.
        start: where it begins, None = the best of some that are drawn.
    """
    rng = np.random.default_rng(seed)
    first = (
        [start]
        if start is not None
        else [
            task.plan(row)
            for row in random_actions(task, rng, min(_FIRST, budget.room() or _FIRST))
        ]
    )
    scores = task.score(first)
    budget.charge(len(scores))
    if not scores:
        return None
    here = best = min((Best(*pair) for pair in zip(scores, first, strict=False)), key=_rank)
    while budget.left():
        plan = random_neighbour(task, here.plan, rng)
        found = task.score([plan])
        budget.charge(1)
        if not found:
            break
        heat = START_HEAT * (END_HEAT / START_HEAT) ** budget.spent()
        if _takes(found[0], here.score, heat, rng.random()):
            here = Best(found[0], plan)
        best = min(best, here, key=_rank)
    return best


def _takes(new: Score, old: Score, heat: float, drawn: float) -> bool:
    if new.rank <= old.rank:
        return True
    if not new.fits or not old.fits:
        return False
    return drawn < math.exp(-math.log(new.step_time / old.step_time) / heat)


def _rank(found: Best) -> tuple[int, float]:
    return found.score.rank


def every_plan(task: PipelineTask) -> list[DagPlan]:
    """Returns all plans that the masks lead to: for small cases only."""
    walk = Walk(task, 1)
    actions = np.zeros((1, 0), np.int64)
    for _ in task.widths:
        row, choice = np.nonzero(walk.mask())
        walk.only(row)
        walk.take(choice)
        actions = np.concatenate([actions[row], choice[:, None]], axis=1)
    return [task.plan(each) for each in actions]


def exhaustive(task: PipelineTask) -> Best | None:
    """Returns the best of all plans; for small cases only."""
    plans = every_plan(task)
    scores = task.score(plans)
    pairs = (Best(*pair) for pair in zip(scores, plans, strict=True))
    return min(pairs, key=_rank, default=None)
