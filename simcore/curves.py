"""Collective curves: JSON files with provenance -> seconds of a collective as a curve of its bytes.

A curve holds for one kind, one algorithm (``auto`` where a library chose), one number of members
and one topology (see `simcore.collectives.topology`). Times are those of the whole collective on an
idle network, its latency included. A file has one curve, or all those of one machine.

Between two group sizes with a curve there is one for every other, `between`: at the same bytes on
the wire (n - 1) / n S, log time is a straight line over log n. Beyond them there is none.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from simcore.errors import ProfileError
from simcore.profile import Tagged
from simcore.profile_store import folders
from simcore.units import US

Kind: TypeAlias = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv"
]
Algorithm: TypeAlias = Literal["auto", "ring", "tree", "hierarchical", "pairwise"]


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


class CurvePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The time of one size, with its standard error over the time where there is one."""

    bytes: int
    time_us: float
    relative_error: float | None = None


class CurveFile(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="format",
    tag="placewright-collective-curve/1",
):
    """One curve as its file has it.

    Attributes:
        kind: as in `simcore.collectives.ALGORITHMS`; ``send_recv`` is between two, and for
            checks of links only.
        algorithm: the same, or ``auto``.
        num_members: devices that take part.
        topology: as `simcore.collectives.topology` writes it.
        description: for a person.
        points: with provenance, ascending in bytes.
    """

    kind: Kind
    algorithm: Algorithm
    num_members: int
    topology: str
    description: str
    points: Tagged[list[CurvePoint]]


class MachineCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One curve of a machine; fields as in `CurveFile`.

    Attributes:
        also: topologies that are taken to be as fast: the same without the machine's name, or of a
            device of the same family.
    """

    kind: Kind
    num_members: int
    points: Tagged[list[CurvePoint]]
    algorithm: Algorithm = "auto"
    also: list[str] = []


class MachineFile(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="format",
    tag="placewright-collective-curves/1",
):
    """The curves of one machine as its file has them.

    Attributes:
        topology: as `simcore.collectives.topology` writes it; behind a semicolon the machine, where
            another of this kind was faster or slower.
        description: for a person.
        curves: one for each kind, algorithm and number of members.
    """

    topology: str
    description: str
    curves: list[MachineCurve]


def parse_curve(text: bytes, source: str) -> tuple[CurveKey, Curve]:
    """Returns a checked curve and what it holds for, from the content of its file.

    Args:
        text: JSON.
        source: file name, for messages.

    Raises:
        ProfileError: naming the file, the key and the reason; more curves than one.
    """
    (found,) = parse_curves(text, source).items()
    return found


def parse_curves(text: bytes, source: str) -> dict[CurveKey, Curve]:
    """Returns the checked curves of a file of either format, as `parse_curve` does."""
    try:
        record = msgspec.json.decode(text, type=CurveFile | MachineFile)
        if isinstance(record, CurveFile):
            return {_key(record, record.topology): _curve(record.points.value)}
        curves = {}
        for entry in record.curves:
            curve = _curve(entry.points.value)
            for name in (record.topology, *entry.also):
                if (key := _key(entry, name)) in curves:
                    raise ValueError(f"curves: two for {' '.join(map(str, key))}")
                curves[key] = curve
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise ProfileError(f"{source}: {error}") from None
    return curves


def _key(record: CurveFile | MachineCurve, name: str) -> CurveKey:
    if record.num_members < 2:
        raise ValueError(f"num_members must be at least 2, not {record.num_members}")
    return CurveKey(record.kind, record.algorithm, record.num_members, name)


def _curve(points: list[CurvePoint]) -> Curve:
    return Curve(
        np.array([point.bytes for point in points], np.float64),
        np.array([point.time_us * US for point in points], np.float64),
    )


def load_curves(folder: Path) -> dict[CurveKey, Curve]:
    """Returns the curves of all JSON files of a folder; none where there is no such folder.

    Raises:
        ProfileError: a malformed file, or two files for the same thing.
    """
    curves: dict[CurveKey, Curve] = {}
    for path in sorted(folder.glob("*.json")):
        found = parse_curves(path.read_bytes(), path.name)
        for key in found.keys() & curves.keys():
            raise ProfileError(
                f"{path.name}: another file has a curve for {' '.join(map(str, key))}"
            )
        curves |= found
    return curves


class CurveTable(dict[CurveKey, Curve]):
    """Curves by what they hold for.

    Attributes:
        identity: another one for every table, for caches of what is made of its curves.
    """

    def __init__(self, curves: Mapping[CurveKey, Curve]) -> None:
        super().__init__(curves)
        self.identity = object()
        self._found: dict[CurveKey, Curve | None] = {}
        self._sizes: dict[CurveKey, list[int]] = {}
        for key in sorted(curves):
            self._sizes.setdefault(key._replace(num_members=0), []).append(key.num_members)

    def find(self, key: CurveKey) -> Curve | None:
        """Returns a group's curve, made of those of a smaller and a larger one if need be."""
        if key not in self._found:
            self._found[key] = self[key] if key in self else self._between(key)
        return self._found[key]

    def _between(self, key: CurveKey) -> Curve | None:
        sizes = self._sizes.get(key._replace(num_members=0), [])
        smaller = [size for size in sizes if size < key.num_members]
        larger = [size for size in sizes if size > key.num_members]
        if not smaller or not larger:
            return None
        ends = (smaller[-1], larger[0])
        curves = {size: self[key._replace(num_members=size)] for size in ends}
        return between(curves, key.num_members)


def between(curves: Mapping[int, Curve], num_members: int) -> Curve:
    """Returns the curve of a group size from those of two others: see the top of this file.

    Args:
        curves: members -> curve, two of them.
        num_members: of the group; outside the two the line goes on.
    """
    low, high = sorted(curves)
    weight = np.log(num_members / low) / np.log(high / low)
    share = {size: (size - 1) / size for size in (low, high, num_members)}
    sizes = np.unique(
        [
            size * share[members] / share[num_members]
            for members, curve in curves.items()
            for size in curve.num_bytes
        ]
    )
    logs = [
        np.log([curves[end].time(size * share[num_members] / share[end]) for size in sizes])
        for end in (low, high)
    ]
    seconds = np.exp((1 - weight) * logs[0] + weight * logs[1])
    return Curve(sizes, np.maximum.accumulate(seconds))


def as_table(curves: Mapping[CurveKey, Curve]) -> CurveTable:
    """Returns curves as a table; a table is not copied."""
    return curves if isinstance(curves, CurveTable) else CurveTable(curves)


def shipped_curves() -> CurveTable:
    """Returns the curves that ship with the program and the user's own, which hide shipped ones."""
    mine, shipped = folders("curves")
    try:
        stamp = mine.stat().st_mtime_ns
    except OSError:
        stamp = 0
    return _merged(mine, shipped, stamp)


@functools.lru_cache(maxsize=8)
def _merged(mine: Path, shipped: Path, _stamp: int) -> CurveTable:
    return CurveTable(load_curves(shipped) | load_curves(mine))
