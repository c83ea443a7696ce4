"""Searches over a decision problem that need no learning: greedy, random, annealing, exhaustive.

All count evaluations, one for each plan that is asked for, so that they can be compared at equal
ones; a plan that is asked for again counts again. Exhaustive search is exact.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from agents.automap.problem import DecisionProblem, all_plans
from simcore.errors import PlanError

MOST_PLANS = 200_000  # of an exhaustive search
_BATCH = 64
_HOT, _COLD = 0.3, 0.003  # of annealing, in units of reward

Progress: TypeAlias = Callable[[int, float], None]
"""Called with evaluations made and the best step time that fits, s."""


class Found(NamedTuple):
    """What a search found.

    Attributes:
        chosen: the best filled slots, [slot]; None where there was no plan at all.
        reward: what they are worth.
        step_time: s, inf where nothing fits.
        evaluations: made.
        found_at: evaluations made when it was found.
        is_exact: whether nothing better exists.
    """

    chosen: NDArray[np.int64] | None  # [slot] action
    reward: float
    step_time: float
    evaluations: int
    found_at: int
    is_exact: bool = False


class Keeper:
    """Counts evaluations and keeps the best."""

    def __init__(
        self,
        problem: DecisionProblem,
        evaluations: int,
        progress: Progress | None = None,
        goes_on: Callable[[], bool] | None = None,
    ) -> None:
        self.problem, self.limit, self.progress = problem, evaluations, progress
        self.goes_on = goes_on
        self.used, self.found_at = 0, 0
        self.best: NDArray[np.int64] | None = None
        self.reward, self.step_time = -math.inf, math.inf

    @property
    def left(self) -> int:
        """Evaluations that may still be made; the first always may."""
        if self.used and self.goes_on is not None and not self.goes_on():
            return 0
        return max(0, self.limit - self.used)

    def evaluate(self, plans: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the rewards of the first plans that can be paid for, [plan]."""
        plans = plans[: self.left]
        if not len(plans):
            return np.zeros(0)
        worth = self.problem.evaluate(plans)
        top = int(np.argmax(worth.reward))
        if worth.reward[top] > self.reward:
            self.best, self.reward = plans[top].copy(), float(worth.reward[top])
            self.step_time = float(worth.step_time[top]) if worth.fits[top] else math.inf
            self.found_at = self.used + top + 1
        self.used += len(plans)
        if self.progress is not None:
            self.progress(self.used, self.step_time)
        return worth.reward

    def result(self, *, is_exact: bool = False) -> Found:
        """Returns what is kept."""
        return Found(self.best, self.reward, self.step_time, self.used, self.found_at, is_exact)


def draw(
    problem: DecisionProblem, count: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns random plans, [plan, slot], and which of them are whole, [plan]; others dead-end."""
    plans = np.zeros((count, 0), np.int64)
    alive = np.ones(count, np.bool_)
    for _ in range(problem.num_slots):
        mask = problem.mask(plans)
        alive &= mask.any(axis=1)
        weight = np.where(mask, rng.random(mask.shape), -1.0)
        plans = np.concatenate([plans, weight.argmax(axis=1)[:, None]], axis=1)
    return plans, alive


def is_legal(problem: DecisionProblem, plan: NDArray[np.int64]) -> bool:
    """Whether the masks allow a plan, [slot]."""
    return all(problem.mask(plan[None, :slot])[0, plan[slot]] for slot in range(problem.num_slots))


def random_search(
    problem: DecisionProblem, evaluations: int, *, seed: int, progress: Progress | None = None
) -> Found:
    """Draws plans by their masks."""
    keeper, rng = Keeper(problem, evaluations, progress), np.random.default_rng(seed)
    for _ in range(1 + 4 * evaluations // _BATCH):
        plans, alive = draw(problem, _BATCH, rng)
        keeper.evaluate(plans[alive])
        if not keeper.left:
            break
    return keeper.result()


def greedy(
    problem: DecisionProblem, evaluations: int, *, seed: int, progress: Progress | None = None
) -> Found:
    """Changes one slot after another to what is best for it, until nothing helps; then again.

    It begins at what fills every slot with its first action, then at random plans.
    """
    keeper, rng = Keeper(problem, evaluations, progress), np.random.default_rng(seed)
    start = _first(problem)
    for _ in range(evaluations):
        if not keeper.left:
            break
        if start is not None:
            _descend(problem, keeper, start)
        plans, alive = draw(problem, 1, rng)
        start = plans[0] if alive[0] else None
    return keeper.result()


def anneal(
    problem: DecisionProblem,
    evaluations: int,
    *,
    seed: int,
    start: NDArray[np.int64] | None = None,
    progress: Progress | None = None,
    goes_on: Callable[[], bool] | None = None,
) -> Found:
    """Changes one or two slots at random and keeps what is better, or by chance what is worse.

    Kirkpatrick, Gelatt and Vecchi, Optimization by simulated annealing, 1983; as FlexFlow searches.
    It ends early where `goes_on` says so.
    """
    keeper = Keeper(problem, evaluations, progress, goes_on)
    rng = np.random.default_rng(seed)
    here = start if start is not None else _first(problem)
    if here is None:
        return random_search(problem, evaluations, seed=seed, progress=progress)
    value = float(keeper.evaluate(here[None])[0])
    for _ in range(20 * evaluations):
        if not keeper.left or not problem.num_slots:
            break
        heat = _HOT * (_COLD / _HOT) ** (keeper.used / evaluations)
        there = _moved(problem, here, rng)
        if there is None:
            continue
        new = float(keeper.evaluate(there[None]).max(initial=-math.inf))
        if new >= value or rng.random() < math.exp((new - value) / heat):
            here, value = there, new
    return keeper.result()


def exhaustive(
    problem: DecisionProblem, *, most: int = MOST_PLANS, progress: Progress | None = None
) -> Found:
    """Simulates every plan.

    Raises:
        PlanError: there are more than `most`.
    """
    plans = all_plans(problem, most=most)
    if plans is None:
        raise PlanError(f"more than {most:,} plans are too many to try each")
    keeper = Keeper(problem, max(1, len(plans)), progress)
    for begin in range(0, len(plans), 256):
        keeper.evaluate(plans[begin : begin + 256])
    return keeper.result(is_exact=True)


def _first(problem: DecisionProblem) -> NDArray[np.int64] | None:
    """Returns what fills each slot with the first action that it may hold."""
    plan = np.zeros((1, 0), np.int64)
    for _ in range(problem.num_slots):
        mask = problem.mask(plan)
        if not mask.any():
            return None
        plan = np.concatenate([plan, mask.argmax(axis=1)[:, None]], axis=1)
    first: NDArray[np.int64] = plan[0]
    return first


def _descend(problem: DecisionProblem, keeper: Keeper, start: NDArray[np.int64]) -> None:
    here, improves = start, True
    value = float(keeper.evaluate(here[None]).max(initial=-math.inf))
    while improves and keeper.left:
        improves = False
        for slot in range(problem.num_slots):
            tried = np.repeat(here[None], problem.num_actions, axis=0)
            tried[:, slot] = np.arange(problem.num_actions)
            tried = np.array([t for t in tried if t[slot] != here[slot] and is_legal(problem, t)])
            if not len(tried) or not keeper.left:
                continue
            found = keeper.evaluate(tried)
            if found.max() > value:
                here, value, improves = tried[int(found.argmax())], float(found.max()), True


def _moved(
    problem: DecisionProblem, here: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64] | None:
    """Returns a legal plan near another, None where the one that was drawn is not legal."""
    there = here.copy()
    for slot in rng.integers(problem.num_slots, size=int(rng.integers(1, 3))).tolist():
        there[slot] = rng.integers(problem.num_actions)
    same = bool((there == here).all())
    return None if same or not is_legal(problem, there) else there
