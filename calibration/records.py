"""Measurement records: what ran, where, how long, and what the seconds contain; JSON lines.

All times are seconds, all sizes bytes. ``contains`` says what the seconds are made of: ``kernel``
is time on the device only; ``+launch`` that the host's issue is inside (one kernel after another
from Python); ``+sync`` that a wait for the device is inside as well.

How the bytes of a collective are counted differs between sources. A record always has those of
`simcore.collectives.Collective.num_bytes` (the full buffer); ``bytes_are`` keeps what the source
had.
"""

import math
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from simcore.atomic import write_whole
from simcore.errors import MeasurementError
from simcore.signature import CLASS_NAMES, MAX_SIZE

FORMAT = "placewright-measurement/1"
Kind = Literal["op", "link", "collective"]
Contents = Literal["kernel", "kernel+launch", "kernel+launch+sync"]
Phase = Literal["", "F", "B", "I", "W", "U"]
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


class Record(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="format",
    tag=FORMAT,
):
    """One measurement. Fields of the other kinds stay empty.

    Attributes:
        kind: ``op``, ``link`` or ``collective``.
        device: kind of the device, as its profile names it.
        seconds: of one execution.
        contains: what the seconds are made of.
        how: how it was measured, in a few words.
        source: folder and file (of public data), or who measured.
        spread: standard deviation of the seconds; None = not stated.
        software: versions.
        count: measurements that were merged into this one.
        note: what a reader should know.
        target: of an op: its name at the source, for example ``aten.mm`` or ``linear``.
        op_class: lower-case name of a `simcore.signature.OpClass`.
        dtype: of the arithmetic.
        dims: as `simcore.signature.Signature` names them; more may be there.
        phase: F, B (both gradients), I, W or U; see `simcore.signature.Phase`.
        factor: multiplies the FLOPs of the dims, as in `Signature`; what a causal mask leaves out
            is not in it.
        traffic: bytes read and written, 0 = not known.
        topology: of a link or collective: what lies between the devices.
        bytes: that the link carried, or of the full buffer of the collective.
        direction: of a link: ``one`` or ``both`` at once, ``h2d``, ``d2h``, ``p2p``.
        scope: ``intra_node`` or ``inter_node``.
        collective: kind as in `COLLECTIVES`.
        group: members.
        algorithm: ``auto`` where the library chose.
        bytes_are: how the source counts bytes.
    """

    kind: Kind
    device: str
    seconds: float
    contains: Contents
    how: str
    source: str
    spread: float | None = None
    software: str = ""
    count: int = 1
    note: str = ""
    target: str = ""
    op_class: str = ""
    dtype: str = ""
    dims: dict[str, int] = {}
    phase: Phase = ""
    factor: float = 1.0
    traffic: int = 0
    topology: str = ""
    bytes: int = 0
    direction: str = ""
    scope: str = ""
    collective: str = ""
    group: int = 0
    algorithm: str = ""
    bytes_are: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds must be positive and finite, not {self.seconds}")
        if self.spread is not None and not (math.isfinite(self.spread) and self.spread >= 0):
            raise ValueError(f"spread must be finite and not negative, not {self.spread}")
        if self.count < 1:
            raise ValueError(f"count must be at least 1, not {self.count}")
        for name, size in (("traffic", self.traffic), ("bytes", self.bytes), *self.dims.items()):
            if not 0 <= size <= MAX_SIZE:
                raise ValueError(f"{name} {size} is not a size")
        if not (math.isfinite(self.factor) and self.factor >= 0):
            raise ValueError(f"factor {self.factor} is not a count")
        _CHECKS[self.kind](self)

    @property
    def key(self) -> tuple[object, ...]:
        """What the measurement is of; equal for repeats of the same one."""
        return (
            self.kind, self.device, self.op_class, self.target if not self.dims else "",
            self.dtype, tuple(sorted(self.dims.items())), self.phase, self.traffic,
            self.topology, self.bytes, self.direction, self.scope, self.collective, self.group,
            self.algorithm, self.contains,
        )  # fmt: skip

    @property
    def folder(self) -> str:
        """The data set that the record comes from."""
        return self.source.partition("/")[0]


def _check_op(record: Record) -> None:
    if record.op_class not in CLASS_NAMES:
        raise ValueError(f"unknown op class {record.op_class!r}")
    if not record.dtype:
        raise ValueError("an op needs a dtype")


def _check_link(record: Record) -> None:
    if record.bytes < 1:
        raise ValueError("a link needs bytes")


def _check_collective(record: Record) -> None:
    if record.collective not in COLLECTIVES:
        raise ValueError(f"unknown collective {record.collective!r}")
    if record.group < 2:
        raise ValueError(f"a collective needs two members or more, not {record.group}")


_CHECKS = {"op": _check_op, "link": _check_link, "collective": _check_collective}
_DECODER = msgspec.json.Decoder(Record)
_ENCODER = msgspec.json.Encoder()


def read_records(path: str | Path) -> Iterator[Record]:
    """Yields the records of a file, one at a time.

    Raises:
        MeasurementError: naming the file, the line and the reason.
    """
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _decode(line, f"{path}:{number}")
    except OSError as error:
        raise MeasurementError(f"{path}: cannot be read: {error.strerror}") from None


def encode(record: Record) -> bytes:
    """Returns a record as one line of JSON, its line feed included."""
    return _ENCODER.encode(record) + b"\n"


def write_records(records: Iterable[Record], path: str | Path) -> int:
    """Writes records as JSON lines, whole or not at all; returns how many.

    Raises:
        MeasurementError: the file cannot be written.
    """
    lines = [encode(record) for record in records]
    try:
        write_whole(path, b"".join(lines))
    except OSError as error:
        raise MeasurementError(f"{path}: cannot be written: {error.strerror}") from None
    return len(lines)


def merge_duplicates(records: Iterable[Record]) -> list[Record]:
    """Returns one record for each thing measured: the median, with the spread of the repeats.

    Records are of the same thing if device, op class, dtype, dims, phase, traffic (or, of links and
    collectives, bytes, group, topology, ...) and what the seconds contain are equal. An op without
    dims is known by its target.
    """
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(record.key, []).append(record)
    return [_merge(group) for group in groups.values()]


def _merge(group: list[Record]) -> Record:
    if len(group) == 1:
        return group[0]
    seconds = [record.seconds for record in group]
    return msgspec.structs.replace(
        group[0],
        seconds=statistics.median(seconds),
        spread=statistics.stdev(seconds),
        count=sum(record.count for record in group),
    )


def _decode(line: bytes, where: str) -> Record:
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MeasurementError(f"{where}: {error}") from None
