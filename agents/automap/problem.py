"""Decision problems: slots that are filled one after another, masks, and what the whole is worth.

The public Auto-MAP material names three problems (operator partition, automatic data parallelism,
pipelines) but not their states, actions, rewards or ends. Those of this package are a
reconstruction. All share one form: an episode fills the slots of a problem in a fixed order, the
mask says what a slot may hold given those before it, and the reward comes after the last one. An
episode also ends where a mask is empty (a dead end), with `DEAD_END` as its reward.
"""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

DEAD_END = -5.0  # the reward of an episode that cannot go on; plans that do not fit are near it
_OVER = -3.0  # the reward of a plan that is hardly over the memory


class Worth(NamedTuple):
    """What filled slots are worth."""

    reward: NDArray[np.float64]  # [plan]
    step_time: NDArray[np.float64]  # [plan] s, inf where it is not a plan
    overflow: NDArray[np.int64]  # [plan] bytes over capacity

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Whether each is a plan that fits the memory, [plan]."""
        fits: NDArray[np.bool_] = np.isfinite(self.step_time) & (self.overflow == 0)
        return fits


class DecisionProblem(Protocol):
    """What is searched; actions are numbered alike in all slots."""

    @property
    def num_slots(self) -> int:
        """Slots of an episode."""

    @property
    def num_actions(self) -> int:
        """Actions of a slot, masked ones included."""

    @property
    def features(self) -> NDArray[np.float32]:
        """What is known about the slots before anything is decided, [slot, feature], 0 to 1."""

    def mask(self, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns what the next slot may hold, [episode, action].

        Args:
            chosen: the slots before it, [episode, slots filled].
        """

    def evaluate(self, chosen: NDArray[np.int64]) -> Worth:
        """Returns what filled slots are worth, from [plan, slot]."""

    def content_hash(self) -> str:
        """Returns what changes with anything that decides a reward."""


def rewards(
    step_time: NDArray[np.float64],
    overflow: NDArray[np.int64],
    baseline: float,
    capacity: float,
) -> NDArray[np.float64]:
    """Returns log(baseline / step time), or what a plan that does not fit is worth, [plan].

    Args:
        step_time: s, inf where it is not a plan, [plan].
        overflow: bytes over capacity, [plan].
        baseline: the step time that is worth 0, s.
        capacity: bytes of a device; what is over is told in parts of it.
    """
    over = overflow / capacity
    with np.errstate(divide="ignore"):
        value = np.maximum(np.log(baseline / step_time), _OVER + 0.5)
    value = np.where(overflow > 0, _OVER - over / (1.0 + over), value)
    return np.where(np.isfinite(step_time), value, DEAD_END)


def all_plans(problem: DecisionProblem, *, most: int) -> NDArray[np.int64] | None:
    """Returns every way to fill the slots, [plan, slot]; None where there are more than `most`."""
    rows = np.zeros((1, 0), np.int64)
    for _ in range(problem.num_slots):
        mask = problem.mask(rows)
        episode, action = np.nonzero(mask)
        if len(episode) > most:
            return None
        rows = np.concatenate([rows[episode], action[:, None]], axis=1)
    return rows


def grid(sizes: list[int]) -> NDArray[np.int64]:
    """Returns all combinations of numbers below each size, [combination, size]."""
    return np.array(list(product(*map(range, sizes))), np.int64).reshape(-1, len(sizes))


class Toy:
    """A problem with a known optimum, for tests of learners: match a hidden pattern.

    A slot may not hold what the one before it holds. The reward is the share of slots that are as
    in the pattern, and a bonus for the whole of it.
    """

    def __init__(self, slots: int = 6, actions: int = 3, *, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        pattern = [int(rng.integers(actions))]
        while len(pattern) < slots:
            pattern.append(int((pattern[-1] + rng.integers(1, actions)) % actions))
        self.pattern = np.array(pattern)
        self.num_slots, self.num_actions = slots, actions
        self.features = np.zeros((slots, 1), np.float32)

    def mask(self, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """All but what the slot before holds, [episode, action]."""
        allowed = np.ones((len(chosen), self.num_actions), np.bool_)
        if chosen.shape[1]:
            allowed[np.arange(len(chosen)), chosen[:, -1]] = False
        return allowed

    def evaluate(self, chosen: NDArray[np.int64]) -> Worth:
        """Returns shares of the pattern; a plan takes 1 s less its reward."""
        share = (chosen == self.pattern).mean(axis=1)
        reward = 0.5 * share + 0.5 * (share == 1.0)
        return Worth(reward, 1.0 - 0.9 * reward, np.zeros(len(chosen), np.int64))

    def content_hash(self) -> str:
        """Returns the pattern."""
        return "toy " + " ".join(map(str, self.pattern.tolist()))


Listener = Callable[[int, float], None]
"""Called with evaluations made and the best step time, s."""
