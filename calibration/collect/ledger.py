"""What a collection writes as it goes: finished measurements, and which are finished.

``records.jsonl`` has the records, one a line; ``collected.json`` says what is finished, with
findings that are no times (bytes, factors). A collection that is started again skips what is there
for the same software; what a killed one left half written is dropped.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from calibration.records import Record, encode, read_records
from simcore.atomic import write_whole
from simcore.errors import MeasurementError

RECORDS = "records.jsonl"
FINISHED = "collected.json"
SOURCE = "local"

# blocks of measurements; the others are collectives and workloads
PROBES = "arithmetic, memory and launches"
COPIES = "copies between host and GPU"
MESSAGES = "messages"
BESIDE = "messages beside compute"


class _Finished(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="format", tag="placewright-collected/1"
):
    """The content of ``collected.json``: device kind -> software -> block -> findings."""

    devices: dict[str, dict[str, dict[str, dict[str, float]]]] = {}


class Ledger:
    """Finished measurements of one kind of device and one software."""

    def __init__(self, folder: Path, device: str, software: str) -> None:
        """Reads what is there.

        Raises:
            MeasurementError: a file that is malformed.
            OSError: the folder cannot be made.
        """
        self.path, self._marks = folder / RECORDS, folder / FINISHED
        self.device, self.software = device, software
        folder.mkdir(parents=True, exist_ok=True)
        _drop_half_line(self.path)
        found = read_records(self.path) if self.path.exists() else ()
        self.records: list[Record] = [
            record for record in found if record.device == device and record.software == software
        ]
        self._file = _read_marks(self._marks)
        self._done = self._file.devices.setdefault(device, {}).setdefault(software, {})

    def has(self, block: str) -> bool:
        """Returns whether a block of measurements is finished."""
        return block in self._done

    def findings(self, block: str) -> Mapping[str, float]:
        """Returns what a block found that is no time; nothing where it is not finished."""
        return self._done.get(block, {})

    def finish(self, block: str, records: Iterable[Record], findings: Mapping[str, float]) -> None:
        """Appends the records of a finished block, then says that it is."""
        fresh = list(records)
        with self.path.open("ab") as file:
            file.write(b"".join(encode(record) for record in fresh))
        self.records += fresh
        self._done[block] = dict(findings)
        content = msgspec.json.format(msgspec.json.encode(self._file), indent=1)
        write_whole(self._marks, content + b"\n")


def _read_marks(path: Path) -> _Finished:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Finished)
    except FileNotFoundError:
        return _Finished()
    except msgspec.MsgspecError as error:
        raise MeasurementError(f"{path}: {error}") from None


def _drop_half_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
