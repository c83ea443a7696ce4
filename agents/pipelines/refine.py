"""Found plans changed step by step while that helps, and tasks whose simulations a budget pays."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from agents.pipelines.anneal import END_HEAT, START_HEAT, Best
from agents.pipelines.draws import drawn_change
from agents.pipelines.env import PipelineTask
from agents.pipelines.estimate import Estimator
from agents.pipelines.plans import DagPlan, Score
from agents.planners.recorder import Budget
from agents.planners.stage_dag import BEAM, StageDagSearch

_ESTIMATED = 0.5  # of a budget, for changes that are only estimated
_MOVES = 6000  # of those, at most, from each of
_FOR_EACH = 40  # of those, at most, for each simulation where those are counted
_STARTS = 2  # plans
_SIMULATED = 24  # of what those lead to
_ALIKE = 4  # of those, with as many microbatches and copies and the same schedule


def paid(task: PipelineTask, budget: Budget) -> PipelineTask:
    """Returns a task whose simulations a budget pays for; it ends where that does.

    Args:
        task: the task.
        budget: of all simulations.
    """

    def score(plans: Sequence[DagPlan]) -> list[Score]:
        if not budget.left():
            return []
        found = task.score(plans[: budget.room()])
        budget.charge(len(found))
        return found

    return replace(task, score=score)


def refined(task: PipelineTask, found: Sequence[Best], budget: Budget, seed: int) -> list[Best]:
    """Returns found plans and better ones that changes of them lead to, best first.

    First many changes are tried by their estimates only (annealing), and the likeliest plans
    simulated; then all single changes of the best plans are, those with the least estimates first.
    It ends where no change of the best plans helps, or with the budget.

    Args:
        task: the space.
        found: plans to begin with.
        budget: of the search; each simulation is charged to it.
        seed: of all that is drawn.
    """
    front = _ranked(found)[:BEAM]
    if not front:
        return []
    met = set[DagPlan]()
    share = budget.part(_ESTIMATED)
    rng, estimate = np.random.default_rng(seed), Estimator(task)
    starts = list(dict.fromkeys(_whole(best.plan) for best in front))[:_STARTS]
    for left, start in zip(range(len(starts), 0, -1), starts, strict=True):
        met |= _annealed(task, start, estimate, (share.part(1 / left), rng))
    likely = _spread(sorted(met - {best.plan for best in front}, key=estimate))
    scores = paid(task, budget).score(likely)
    front = _ranked([*front, *(Best(*pair) for pair in zip(scores, likely, strict=False))])
    pairs = [(best.score, best.plan) for best in front[:BEAM]]
    search = StageDagSearch(task=task, waiting=[], front=pairs)
    search.best = next((pair for pair in pairs if pair[0].fits), None)
    search.nearest = next((pair for pair in pairs if not pair[0].fits), None)
    search.run(budget)
    better = [Best(*pair) for pair in (search.best, *search.front) if pair is not None]
    return _ranked([*front, *better])


def _whole(plan: DagPlan) -> DagPlan:
    """Returns a plan without nodes that are cut in two, where no stage is empty then."""
    is_full = len(set(plan.stage)) == plan.num_stages
    return replace(plan, apart=()) if is_full else plan


def _spread(plans: Iterable[DagPlan]) -> list[DagPlan]:
    """Returns the first plans, few of each kind: estimates err alike within one."""
    counts = Counter[object]()
    found = []
    for plan in plans:
        kind = plan.microbatches, plan.schedule, tuple(map(len, plan.devices))
        counts[kind] += 1
        if counts[kind] <= _ALIKE:
            found.append(plan)
        if len(found) == _SIMULATED:
            break
    return found


def _ranked(found: Iterable[Best]) -> list[Best]:
    """Returns the distinct legal plans, best first."""
    legal = {best.plan: best for best in found if best.score.step_time < math.inf}
    return sorted(legal.values(), key=lambda best: best.score.rank)


def _annealed(
    task: PipelineTask,
    start: DagPlan,
    estimate: Estimator,
    means: tuple[Budget, np.random.Generator],
) -> set[DagPlan]:
    """Returns the plans that annealing by estimates went through."""
    budget, rng = means
    here, seconds, met = start, estimate(start), {start}
    room = budget.room()
    most = _MOVES if room is None else min(_MOVES, _FOR_EACH * room)
    for move in range(most):
        if not budget.left():
            break
        spent = max(budget.spent(), move / most)
        heat = START_HEAT * (END_HEAT / START_HEAT) ** spent
        other = drawn_change(task, here, rng)
        if other.apart:  # not every such plan can be run
            continue
        now = estimate(other)
        if now < seconds or rng.random() < math.exp(math.log(seconds / now) / heat):
            here, seconds = other, now
            met.add(here)
    return met
