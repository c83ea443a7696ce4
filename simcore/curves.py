"""Collective curves: JSON files with provenance -> seconds of a collective as a curve of its bytes.

A curve holds for one kind, one algorithm (``auto`` where a library chose), one number of members
and one topology (see `simcore.collectives.topology`). Times are those of the whole collective on an
idle network, its latency included.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from simcore.errors import ProfileError
from simcore.profile import FOLDER, Tagged
from simcore.units import US


class CurveKey(NamedTuple):
    """What a curve holds for."""

    kind: str
    algorithm: str
    num_members: int
    topology: str


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Measured or fitted times at two or more sizes.

    Between two sizes the curve is a straight line of log time over log bytes; outside, time is
    α + β bytes with the slope of the nearest two sizes.

    Raises:
        ValueError: fewer than two points, sizes that do not grow, times that are not positive or
            that fall.
    """

    num_bytes: NDArray[np.float64]  # [point] ascending
    seconds: NDArray[np.float64]  # [point] not falling

    def __post_init__(self) -> None:
        if len(self.num_bytes) < 2:
            raise ValueError("points: needs at least two")
        if not (np.isfinite(self.num_bytes).all() and np.isfinite(self.seconds).all()):
            raise ValueError("points: must be finite")
        if self.num_bytes[0] <= 0 or (np.diff(self.num_bytes) <= 0).any():
            raise ValueError("points: bytes must be positive and grow from point to point")
        if self.seconds[0] <= 0 or (np.diff(self.seconds) < 0).any():
            raise ValueError("points: times must be positive and must not fall as bytes grow")

    @property
    def latency(self) -> float:
        """α: the time that is left as the bytes go to 0, s."""
        return self.time(0)

    def time(self, num_bytes: float) -> float:
        """Returns the seconds of a collective of that many bytes."""
        size, seconds = self.num_bytes, self.seconds
        if num_bytes < size[0]:
            slope = (seconds[1] - seconds[0]) / (size[1] - size[0])
            line = seconds[0] - slope * (size[0] - num_bytes)
            # a curve that rises faster than its bytes has no α: it goes to 0 with them
            return float(max(line, seconds[0] * num_bytes / size[0]))
        if num_bytes > size[-1]:
            slope = (seconds[-1] - seconds[-2]) / (size[-1] - size[-2])
            return float(seconds[-1] + slope * (num_bytes - size[-1]))
        log_time = np.interp(np.log(num_bytes), np.log(size), np.log(seconds))
        return float(np.exp(log_time))


class CurvePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of one size."""

    bytes: int
    time_us: float


class CurveFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One curve as its file has it.

    Attributes:
        kind: as in `simcore.collectives.ALGORITHMS`.
        algorithm: the same, or ``auto``.
        num_members: devices that take part.
        topology: as `simcore.collectives.topology` writes it.
        description: for a person.
        points: with provenance, ascending in bytes.
    """

    format: Literal["placewright-collective-curve/1"]
    kind: Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"]
    algorithm: Literal["auto", "ring", "tree", "hierarchical", "pairwise"]
    num_members: int
    topology: str
    description: str
    points: Tagged[list[CurvePoint]]


def parse_curve(text: bytes, source: str) -> tuple[CurveKey, Curve]:
    """Returns a checked curve and what it holds for, from the content of its file.

    Args:
        text: JSON.
        source: file name, for messages.

    Raises:
        ProfileError: naming the file, the key and the reason.
    """
    try:
        record = msgspec.json.decode(text, type=CurveFile)
        points = record.points.value
        curve = Curve(
            np.array([point.bytes for point in points], np.float64),
            np.array([point.time_us * US for point in points], np.float64),
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise ProfileError(f"{source}: {error}") from None
    if record.num_members < 2:
        raise ProfileError(f"{source}: num_members must be at least 2, not {record.num_members}")
    return CurveKey(record.kind, record.algorithm, record.num_members, record.topology), curve


def load_curves(folder: Path) -> dict[CurveKey, Curve]:
    """Returns the curves of all JSON files of a folder; none where there is no such folder.

    Raises:
        ProfileError: a malformed file, or two files for the same thing.
    """
    curves: dict[CurveKey, Curve] = {}
    for path in sorted(folder.glob("*.json")):
        key, curve = parse_curve(path.read_bytes(), path.name)
        if key in curves:
            raise ProfileError(
                f"{path.name}: another file has a curve for {' '.join(map(str, key))}"
            )
        curves[key] = curve
    return curves


@functools.cache
def shipped_curves() -> Mapping[CurveKey, Curve]:
    """Returns the curves that ship with the program."""
    return load_curves(FOLDER / "collectives")
