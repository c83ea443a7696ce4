"""Results of simulations -> rewards: a number per plan, and whether the plan fits.

A plan that does not fit the memory or is illegal counts as one that takes longer than any other,
the longer the more bytes it is over, so that a learner sees its way back. What of that belongs in a
baseline's statistics is not decided here: `Rewards.fits` keeps the two kinds apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simcore import Result, Status

_LEAST = 1e-9  # of the baseline; faster plans are not told apart, so that a logarithm exists


class Outcome(Protocol):
    """What a simulation says about plans: a `BatchResult`, or the scores of a placement space."""

    @property
    def step_time(self) -> NDArray[np.float64]:
        """Seconds, inf if illegal, [plan]."""

    @property
    def overflow(self) -> NDArray[np.int64]:
        """Bytes over capacity, summed over devices, [plan]."""

    @property
    def status(self) -> NDArray[np.uint8]:
        """`Status` of each, [plan]."""


Form: TypeAlias = Callable[[NDArray[np.float64], float], NDArray[np.float64]]
"""(step times [plan] s, baseline s) -> rewards [plan]; less time is more reward."""


def negative_log_time(step_time: NDArray[np.float64], baseline: float) -> NDArray[np.float64]:
    """Returns log(baseline / step time): 0 as fast as the baseline, 0.69 twice as fast."""
    return -np.log(step_time / baseline)


def negative_sqrt_time(step_time: NDArray[np.float64], baseline: float) -> NDArray[np.float64]:
    """Returns -sqrt(step time / s), as the code of the Hierarchical Planner (Mirhoseini, 2018)."""
    del baseline
    return -np.sqrt(step_time)


def negative_time(step_time: NDArray[np.float64], baseline: float) -> NDArray[np.float64]:
    """Returns -step time / s."""
    del baseline
    return -step_time


class Rewards(NamedTuple):
    """What plans are worth."""

    value: NDArray[np.float64]  # [plan]
    fits: NDArray[np.bool_]  # [plan] legal and within the memory: counts in a baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """How results become rewards.

    Attributes:
        baseline: a step time to compare with, s, such as that of one device alone.
        capacity: bytes that one device has; what is over is told in parts of it.
        form: what a step time is worth.
        slowest: slower plans, in baselines, are not told apart. A plan that does not fit counts as
            one that takes 2 to 3 times as long as the slowest, an illegal one as 4 times.
    """

    baseline: float
    capacity: float
    form: Form = negative_log_time
    slowest: float = 100.0

    def __post_init__(self) -> None:
        for name in ("baseline", "capacity", "slowest"):
            if not 0 < getattr(self, name) < np.inf:
                raise ValueError(f"reward: {name} is {getattr(self, name)}")

    def of(self, outcome: Outcome) -> Rewards:
        """Returns the rewards of a batch of plans."""
        limit = self.slowest * self.baseline
        over = outcome.overflow / self.capacity
        counted = np.clip(outcome.step_time, _LEAST * self.baseline, limit)
        counted = np.where(over > 0, limit * (2.0 + over / (1.0 + over)), counted)
        illegal = ~np.isin(outcome.status, (Status.OK, Status.OUT_OF_MEMORY))
        counted = np.where(illegal, 4.0 * limit, counted)
        return Rewards(self.form(counted, self.baseline), outcome.status == Status.OK)

    def of_result(self, result: Result) -> float:
        """Returns the reward of one simulated plan; it is the same as in a batch."""
        over = sum(max(0, use.reserved - use.capacity) for use in result.devices)
        status = Status.OUT_OF_MEMORY if over else Status.OK
        one = _One(
            np.array([result.step_time]), np.array([over]), np.array([status], dtype=np.uint8)
        )
        return float(self.of(one).value[0])


class _One(NamedTuple):
    """The outcome of one plan."""

    step_time: NDArray[np.float64]  # [1] s
    overflow: NDArray[np.int64]  # [1] bytes
    status: NDArray[np.uint8]  # [1] Status
