"""Validation: folders of measurements -> errors of the shipped profiles, refitting nothing.

A case is a row. Its error is |predicted / measured - 1|, bias the mean of the signed errors.
Coverage is the share of the rows of a source that could be predicted; the others are counted with
the reason.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from calibration.importers import IMPORTERS, import_folder
from calibration.predict import Prediction, predict
from calibration.published.score import RunScore, score_runs
from calibration.records import Kind, Record
from calibration.splits import errors
from simcore.curves import shipped_curves
from simcore.errors import MeasurementError

_PLURAL: dict[Kind, str] = {"op": "ops", "link": "links", "collective": "collectives"}


@dataclass(slots=True)
class Score:
    """Predictions of one kind of record of one source.

    Attributes:
        predicted: s, one a case.
        measured: s, likewise.
        labels: class of each case: op class and dtype, collective, or scope of a link.
        devices: kind of each case's device.
        things: what was measured, each counted once.
        missing: reason -> rows that are no case.
    """

    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    things: set[tuple[object, ...]] = field(default_factory=set)
    missing: Counter[str] = field(default_factory=Counter)

    def add(self, record: Record, predicted: Prediction) -> None:
        """Adds a case, or a reason why it is none."""
        if isinstance(predicted, str):
            self.missing[predicted] += 1
            return
        self.predicted.append(predicted)
        self.measured.append(record.seconds)
        self.labels.append(label(record))
        self.devices.append(record.device)
        self.things.add(record.key)

    def result(self) -> dict[str, Any]:
        """Returns the errors, whole and by class and device; None where there are no cases."""
        cases, missing = len(self.predicted), sum(self.missing.values())
        return {
            **self._errors(range(cases)),
            "coverage": cases / (cases + missing) if cases + missing else 0.0,
            "distinct": len(self.things),
            "not_expressible": dict(self.missing.most_common()),
            "classes": self._by(self.labels),
            "devices": self._by(self.devices),
        }

    def _by(self, names: list[str]) -> dict[str, Any]:
        groups: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            groups.setdefault(name, []).append(index)
        return {name: self._errors(groups[name]) for name in sorted(groups)}

    def _errors(self, cases: Iterable[int]) -> dict[str, Any]:
        chosen = list(cases)
        found = errors(
            np.array([self.predicted[case] for case in chosen]),
            np.array([self.measured[case] for case in chosen]),
        )
        return {
            name: None if found.cases == 0 and name != "cases" else value
            for name, value in found._asdict().items()
        }


def label(record: Record) -> str:
    """Returns the class of a record: what its errors are reported by."""
    if record.kind == "op":
        return f"{record.op_class} {record.dtype}"
    return record.collective if record.kind == "collective" else record.scope


@dataclass(frozen=True, slots=True)
class Validation:
    """Scores of a folder with one subfolder for each source.

    Attributes:
        scores: ``ops/aceso_v100`` -> score.
        absent: sources without a folder, or without any of their files.
        runs: ``e2e/VIA-Research/vTrain/single`` -> score of published training runs.
    """

    scores: dict[str, Score]
    absent: list[str]
    runs: dict[str, RunScore] = field(default_factory=dict)

    def result(self) -> dict[str, Any]:
        """Returns what ``placewright calibrate validate --json`` prints."""
        scores = sorted((self.scores | self.runs).items())
        return {
            "sources": {name: score.result() for name, score in scores},
            "absent": self.absent,
        }


def validate(
    folder: str | Path,
    progress: Callable[[str], None] = lambda _: None,
    *,
    published: bool = False,
) -> Validation:
    """Returns how well the shipped profiles predict the measurements of a folder.

    Args:
        folder: laid out as the public data: a subfolder for each source. Any may be absent.
        progress: told the name of each source before it is read.
        published: whether published training runs are predicted too, which takes minutes.

    Raises:
        MeasurementError: no such folder; a malformed file, an unknown column.
    """
    root = Path(folder)
    if not root.is_dir():
        raise MeasurementError(f"{folder}: no such folder")
    curves = shipped_curves()
    validation = Validation({}, [])
    for name in sorted(IMPORTERS):
        progress(name)
        place = IMPORTERS[name].place(root)
        found = import_folder(name, place) if place.is_dir() else None
        if found is None or not found.files:
            validation.absent.append(name)
            continue
        predicted = predict(found.records, curves)
        for record, seconds in zip(found.records, predicted, strict=True):
            _score(validation, record.kind, name).add(record, seconds)
        for (kind, reason), rows in found.skipped.items():
            _score(validation, kind, name).missing[reason] += rows
    if published:
        validation.runs.update(score_runs(root, progress))
    return validation


def _score(validation: Validation, kind: Kind, name: str) -> Score:
    return validation.scores.setdefault(f"{_PLURAL[kind]}/{name}", Score())
