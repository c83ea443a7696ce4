"""Why the best plan won: how its GPUs spend the step, beside the best plan of another strategy."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from simcore.plan_summary import MODEL_ERROR
from simcore.result import DeviceUse, Result
from simcore.units import format_bytes, format_seconds

# what seconds of a device are -> what a gain by having fewer of them is called
CAUSES = {
    "compute": "less to compute on each GPU",
    "bubble": "a smaller bubble",
    "communication": "less exposed communication",
    "launch": "less waiting for the host",
}
_WORTH_A_WORD = 0.005  # of the step


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How the GPUs that a plan uses spend its step, in the mean; shares of the step, sum 1.

    Attributes:
        strategy: who found the plan.
        step_time_s: of the plan.
        devices: number of devices in use.
        compute: share of computing.
        bubble: share of waiting for other devices, or having nothing left to do.
        communication: share of idling while an input is on its way.
        launch: share of idling while the host has not issued the next op.
        fullest: the device with least memory to spare.
        reserved_bytes: what it needs.
        capacity_bytes: what it has.
    """

    strategy: str
    step_time_s: float
    devices: int
    compute: float
    bubble: float
    communication: float
    launch: float
    fullest: str
    reserved_bytes: int
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the fullest device has the memory."""
        return self.reserved_bytes <= self.capacity_bytes

    def words(self) -> str:
        """Says it."""
        working = "1 device computes" if self.devices == 1 else f"{self.devices} devices compute"
        parts = [
            f"{working} {self.compute:.0%} of the time",
            f"bubble {self.bubble:.0%}",
            f"exposed communication {self.communication:.0%}",
        ]
        if self.launch >= _WORTH_A_WORD:
            parts.append(f"waiting for the host {self.launch:.0%}")
        memory = f"{self.fullest} holds {format_bytes(self.reserved_bytes)}"
        return f"{', '.join(parts)}, {memory} of {format_bytes(self.capacity_bytes)}"


class Why(NamedTuple):
    """Why a plan won."""

    winner: Use
    runner_up: Use | None  # None: no other strategy has a plan that fits
    others: Mapping[str, str]  # strategies without a plan -> why

    @property
    def margin(self) -> float | None:
        """How much longer the runner-up takes, relative; below 0 where it is faster."""
        if self.runner_up is None or not self.winner.step_time_s:
            return None
        return self.runner_up.step_time_s / self.winner.step_time_s - 1.0

    @property
    def gains(self) -> dict[str, float]:
        """Seconds of a device, in the mean, that the winner spends less on each thing."""
        if self.runner_up is None:
            return {}
        other = self.runner_up
        return {
            cause: getattr(other, cause) * other.step_time_s
            - getattr(self.winner, cause) * self.winner.step_time_s
            for cause in CAUSES
        }

    @property
    def because(self) -> str | None:
        """The largest gain: compute, bubble, communication or launch; memory where none fits."""
        if self.runner_up is None:
            return "memory" if any(" needs " in f" {why}" for why in self.others.values()) else None
        gains = self.gains
        most = max(gains, key=lambda cause: gains[cause])
        return most if gains[most] > 0 else None

    def record(self) -> dict[str, Any]:
        """Returns it for JSON."""
        return {
            "winner": asdict(self.winner),
            "runner_up": None if self.runner_up is None else asdict(self.runner_up),
            "margin": self.margin,
            "because": self.because,
            "gains_s": self.gains,
        }

    def words(self) -> str:
        """Says it in a sentence or two; empty where there is nothing beside the plan."""
        if self.runner_up is None:
            return f"No other strategy fits: {_listed(self.others)}." if self.others else ""
        other, margin = self.runner_up, self.margin or 0.0
        if margin < -MODEL_ERROR:  # a strategy was asked for, and another is faster
            text = f"{self.winner.strategy}: {self.winner.words()}. "
            text += f"Faster is {other.strategy}, which takes"
        else:
            text = f"{self.winner.strategy} wins: {self.winner.words()}. "
            text += f"Runner-up {other.strategy} takes"
        text += f" {format_seconds(other.step_time_s)} ({_compared(margin)}): {other.words()}."
        if margin > 0 and self.because is not None:
            gain = format_seconds(self.gains[self.because])
            text += f" What decides: {CAUSES[self.because]} ({gain})."
        return text


def _compared(margin: float) -> str:
    if margin < -MODEL_ERROR:
        return f"{-margin:.1%} less"
    if margin < 0:
        return f"{-margin:.1%} faster, less than the model's error of {MODEL_ERROR:.0%}"
    return f"{margin:.1%} slower"


def _listed(others: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {why}" for name, why in others.items())


def use_of(strategy: str, result: Result) -> Use:
    """Returns how the devices in use spend the step of a plan.

    Args:
        strategy: who found it.
        result: its simulation.
    """
    used: Sequence[DeviceUse] = [use for use in result.devices if use.num_ops] or result.devices
    offered = result.step_time * len(used)
    shares = [
        sum(getattr(use, key) for use in used) / offered if offered else 0.0
        for key in ("busy", "bubble", "communication", "launch")
    ]
    fullest = min(used, key=lambda use: use.capacity - use.reserved)
    return Use(
        strategy=strategy,
        step_time_s=result.step_time,
        devices=len(used),
        compute=shares[0],
        bubble=shares[1],
        communication=shares[2],
        launch=shares[3],
        fullest=fullest.name,
        reserved_bytes=fullest.reserved,
        capacity_bytes=fullest.capacity,
    )
