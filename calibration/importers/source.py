"""What all importers share: a result to fill, and CSV tables whose every column is known.

An importer reads one folder of the layout of the public data (same file names and columns, any
rows). What it cannot express as a record is counted with the reason; a malformed file, an unknown
or a missing column is refused.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from calibration.records import Contents, Kind, Record
from simcore.errors import MeasurementError
from simcore.units import MiB

UNKNOWN_DEVICE = "unknown"  # the source does not say what it ran on
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Imported:
    """Records of a folder, and what is no record: (kind, reason) -> rows."""

    records: list[Record] = field(default_factory=list)
    skipped: Counter[tuple[Kind, str]] = field(default_factory=Counter)
    files: list[str] = field(default_factory=list)  # read

    def skip(self, reason: str, rows: int = 1, *, kind: Kind = "op") -> None:
        """Counts rows that are no record of a kind."""
        self.skipped[kind, reason] += rows

    def add(self, **fields: Any) -> None:
        """Adds a record; a time of 0 is below the clock of the source, and no measurement."""
        if fields["seconds"] == 0:
            self.skip("time rounded to 0", kind=fields["kind"])
            return
        try:
            self.records.append(Record(**fields))
        except ValueError as error:
            raise MeasurementError(f"{fields['source']}: {error}") from None


@dataclass(frozen=True, slots=True)
class Importer:
    """One source of measurements.

    Attributes:
        name: of the source, and of its folder unless that is stated.
        contains: what its seconds contain, most of them.
        patterns: of its files, and who reads each.
        how: how they were measured.
        software: versions, where known.
        folder: of its files, where its name is another.
        floor: phase -> least seconds of an op that its loop of calls can show: the host's.
    """

    name: str
    contains: Contents
    patterns: dict[str, Callable[["Importer", Path, Imported], None]]
    how: str
    software: str = ""
    floor: dict[str, float] = field(default_factory=dict)
    folder: str = ""

    def place(self, root: Path) -> Path:
        """Returns where its files are in a folder of sources."""
        return root / (self.folder or self.name)

    def read(self, folder: Path) -> Imported:
        """Returns what the folder holds; files of the source that are absent are nothing.

        Raises:
            MeasurementError: naming the file, the line or column, and the reason.
        """
        result = Imported()
        for pattern, reader in self.patterns.items():
            for path in sorted(folder.glob(pattern)):
                result.files.append(path.name)
                reader(self, path, result)
        return result

    def fields(self, path: Path, **more: Any) -> dict[str, Any]:
        """Returns the fields that all records of a file have."""
        return {
            "contains": self.contains,
            "how": self.how,
            "software": self.software,
            "source": f"{self.name}/{path.name}",
        } | more


class Row(dict[str, str]):
    """One line of a table: column -> text, with numbers on demand."""

    where = ""  # file and line

    def number(self, column: str) -> float:
        """Returns a finite number that is not negative.

        Raises:
            MeasurementError: it is none.
        """
        try:
            value = float(self[column])
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise MeasurementError(f"{self.where}: {column}: {self[column]!r} is not a number >= 0")
        return value

    def whole(self, column: str) -> int:
        """Returns a whole number, else as `number`."""
        value = self.number(column)
        if value != int(value):
            raise MeasurementError(f"{self.where}: {column}: {self[column]!r} is not whole")
        return int(value)


def read_table(path: Path, columns: str, optional: str = "") -> Iterator[Row]:
    """Yields the rows of a CSV file.

    Args:
        path: the file.
        columns: the names that it must have, with spaces between.
        optional: those that it may have.

    Raises:
        MeasurementError: an unknown or missing column, a row of another length, no UTF-8.
    """
    name = f"{path.parent.name}/{path.name}"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = csv.reader(file, strict=True)
            header = next(lines, [])
            _check_columns(name, header, set(columns.split()), set(optional.split()))
            for number, line in enumerate(lines, 2):
                yield _row(f"{name}:{number}", header, line)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MeasurementError(f"{name}: {error}") from None


def _check_columns(name: str, header: list[str], columns: set[str], optional: set[str]) -> None:
    for column in header:
        if column not in columns | optional:
            raise MeasurementError(f"{name}: unknown column {column!r}")
    missing = sorted(columns - set(header))
    if missing:
        raise MeasurementError(f"{name}: no column {missing[0]!r}")
    if len(set(header)) < len(header):
        raise MeasurementError(f"{name}: a column comes twice")


def _row(where: str, header: list[str], line: list[str]) -> Row:
    if len(line) != len(header):
        raise MeasurementError(f"{where}: {len(line)} fields, not {len(header)}")
    row = Row(zip(header, line, strict=True))
    row.where = where
    return row


def from_mib(size: float) -> int:
    """Returns bytes of a size that a source calls MB and means MiB."""
    return round(size * MiB)


def matmul_fields(m: int, n: int, k: int, dtype: str, factor: float = 1.0) -> dict[str, Any]:
    """Returns the fields of a matrix product; with both gradients (factor 2) it moves twice."""
    size = DTYPE_BYTES[dtype]
    return {
        "kind": "op",
        "op_class": "matmul",
        "dtype": dtype,
        "dims": {"m": m, "n": n, "k": k},
        "factor": factor,
        "traffic": round(factor * size * (m * k + k * n + m * n)),
    }


def batched_fields(
    b: int, m: int, n: int, k: int, dtype: str, *, factor: float = 1.0
) -> dict[str, Any]:
    """Returns the fields of a batched matrix product."""
    one = matmul_fields(m, n, k, dtype, factor)
    return one | {
        "op_class": "batched_matmul",
        "dims": {"b": b, "m": m, "n": n, "k": k},
        "traffic": b * one["traffic"],
    }


def elements_fields(
    op_class: str, dtype: str, passes: float, rows: int, cols: int
) -> dict[str, Any]:
    """Returns the fields of an op that is costed by its bytes: ``passes`` over rows x cols."""
    elements = rows * cols
    return {
        "kind": "op",
        "op_class": op_class,
        "dtype": dtype,
        "dims": {"elements": elements, "rows": rows, "cols": cols},
        "traffic": round(passes * elements * DTYPE_BYTES[dtype]),
    }
