"""A fleet -> measured steps: warm-up dropped, medians, and a yardstick that refuses noise."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from calibration.run.executor import Slice
from calibration.run.fleet import Fleet
from calibration.run.work import StepReport
from calibration.run.yardstick import MOST_DRIFT, drift_of
from simcore.errors import RunError

_ROUNDS = 4  # the yardstick is timed between them
_TRIES = 3


class Effort(NamedTuple):
    """How much is measured."""

    steps: int = 12
    warmup: int = 3
    allow_noise: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run took.

    Attributes:
        seconds: of each step, from the first start to the last end of any rank.
        losses: of each step, warm-up included: the mean over its microbatches.
        peak_bytes: of each rank.
        bare_bytes: of each rank's process before there was a model.
        drift: of the yardstick, as a share.
        slices: what each rank did in the last step, [rank].
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    bare_bytes: tuple[int, ...]
    drift: float
    slices: tuple[tuple[Slice, ...], ...]

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the steps, over the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


def measure(
    fleet: Fleet, number: int, effort: Effort, progress: Callable[[str], None] = lambda _: None
) -> Measured:
    """Runs and times training steps.

    Args:
        fleet: started.
        number: of what was loaded.
        effort: how much.
        progress: is told how far it is.

    Raises:
        RunError: ``noisy machine``, or a rank failed.
    """
    losses = [_loss(fleet.step(number)) for _ in range(effort.warmup)]
    fleet.ask("start_peak")
    for _ in range(_TRIES):
        steps, medians = _round(fleet, number, effort, progress)
        drift = drift_of(medians)
        if drift <= MOST_DRIFT or effort.allow_noise:
            break
        progress(f"the yardstick drifted by {drift:.0%}: measuring again")
    else:
        raise RunError(
            f"noisy machine: the yardstick drifted by {drift:.0%} (over {MOST_DRIFT:.0%}) in "
            f"{_TRIES} tries; stop what else runs, or say --allow-noise"
        )
    peaks = fleet.ask("peak")
    return Measured(
        seconds=tuple(_seconds(step) for step in steps),
        losses=tuple(losses + [_loss(step) for step in steps]),
        peak_bytes=tuple(peak for peak, _ in peaks),
        bare_bytes=tuple(bare for _, bare in peaks),
        drift=drift,
        slices=tuple(report.slices for report in steps[-1]),
    )


def _round(
    fleet: Fleet, number: int, effort: Effort, progress: Callable[[str], None]
) -> tuple[list[list[StepReport]], list[list[float]]]:
    """Returns the steps, [step][rank], and the yardstick around them, [time][rank]."""
    steps: list[list[StepReport]] = []
    medians: list[list[float]] = [fleet.ask("yardstick")]
    share = -(-effort.steps // _ROUNDS)
    while len(steps) < effort.steps:
        for _ in range(min(share, effort.steps - len(steps))):
            is_last = len(steps) == effort.steps - 1
            steps.append(fleet.step(number, keeps_slices=is_last))
        medians.append(fleet.ask("yardstick"))
        progress(f"step {len(steps)} of {effort.steps}")
    return steps, medians


def _seconds(reports: list[StepReport]) -> float:
    return max(each.end for each in reports) - min(each.start for each in reports)


def _loss(reports: list[StepReport]) -> float:
    """Returns the mean loss over all ranks and microbatches that made one."""
    losses = [loss for report in reports for loss in report.losses]
    return statistics.fmean(losses) if losses else float("nan")
