"""Fitted curves of collectives and links -> files that `simcore.curves` reads, and a report.

Every machine that was measured has a file. Where one is the best witness of its kind of machine,
its curves also hold for the plain topology, which is what clusters look up (`PLAIN`), and for
devices of the same family (`FAMILY`). A few machines without measurements borrow a curve, with its
times above the latency scaled by the bandwidth of the links (`BORROWED`).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from calibration.collective_fit import Fit, fit, times
from calibration.importers.devices import plain
from calibration.importers.source import UNKNOWN_DEVICE
from calibration.records import Record
from calibration.splits import Errors, errors
from simcore.atomic import write_whole
from simcore.curves import CurveKey, CurveTable
from simcore.profile import Tagged

FORMAT = "placewright-collective-curves/1"
DATE = "2026-11"
LINK = "send_recv"
BORROWED_ERROR = 0.3  # of a curve of another machine
# source -> collectives whose curves hold for the plain topology
_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
PLAIN: dict[str, tuple[str, ...]] = {
    "aiconfigurator": _ALL,
    "nnscaler_mi200": _ALL,
    "vtrain": ("all_reduce",),
    "aceso_v100": ("all_reduce",),  # others hold copies of lists of tensors
    "sailor": ("all_reduce",),
    "vidur": ("all_reduce", LINK),
}
# where two sources measured the same plain topology, the first that is here speaks for it
_RANK = tuple(PLAIN)
FAMILY = {
    "A100-SXM4-80GB": ("A100-SXM4-40GB",),
    "V100-SXM2-32GB": ("V100-SXM2-16GB",),
    "H100-SXM5-80GB": ("H200-SXM-141GB",),
    "B200-SXM-180GB": ("GB200-186GB",),
}
UNSTATED = ("vtrain",)  # sources that do not say which of a family their GPUs are
# plain topology -> whose curves, and how many times as long a byte takes
BORROWED = {
    "1 node, RTX-PRO-6000-96GB, PCIe5x16": ("1 node, L40S-48GB, PCIe4x16", 0.5),
    "1 node, H100-NVL-94GB, NVLink4-bridge": ("1 node, A100-PCIE-80GB, NVLink3-bridge", 1.0),
    "1 node, H100-PCIE-80GB, NVLink4-bridge": ("1 node, A100-PCIE-80GB, NVLink3-bridge", 1.0),
    "1 node, H100-NVL-94GB, NVLink4-bridge+PCIe5x16": (
        "1 node, A100-PCIE-80GB, NVLink3-bridge+PCIe4x16", 0.5,
    ),
    "1 node, A40-48GB, NVLink3-bridge": ("1 node, A100-PCIE-80GB, NVLink3-bridge", 300 / 56),
    "1 node, A40-48GB, NVLink3-bridge+PCIe4x16": (
        "1 node, A100-PCIE-80GB, NVLink3-bridge+PCIe4x16", 1.0,
    ),
}  # fmt: skip


class Fitted(NamedTuple):
    """One fitted curve.

    Attributes:
        key: what it holds for.
        fit: its points and errors.
        source: where the measurements are from.
        software: versions.
        in_sample: errors on the measurements it was fitted to.
    """

    key: CurveKey
    fit: Fit
    source: str
    software: str
    in_sample: Errors


def key_of(record: Record) -> CurveKey:
    """Returns what a record of a link or a collective is a measurement of."""
    if record.kind == "link":
        way = "" if record.direction in ("", "p2p") else f" {record.direction}"
        return CurveKey(LINK, "auto", 2, record.topology + way)
    return CurveKey(record.collective, "auto", record.group, record.topology)


def fit_all(
    records: Iterable[Record], progress: Callable[[str], None] = lambda _: None
) -> list[Fitted]:
    """Returns the fits of all links and collectives among records, by key.

    Args:
        records: of any kind; ops, and what ran on an unknown device, are left out.
        progress: told each curve before it is fitted.
    """
    groups: dict[CurveKey, list[Record]] = {}
    for record in records:
        if record.kind != "op" and record.device != UNKNOWN_DEVICE:
            groups.setdefault(key_of(record), []).append(record)
    result = []
    for number, key in enumerate(sorted(groups), 1):
        progress(f"{number} of {len(groups)}: {key.kind} of {key.num_members}, {key.topology}")
        result.append(_fit(key, groups[key]))
    return result


def _fit(key: CurveKey, records: list[Record]) -> Fitted:
    sizes = np.array([record.bytes for record in records], np.float64)
    seconds = np.array([record.seconds for record in records])
    found = fit(sizes, seconds)
    predicted = seconds if found.curve is None else times(found.curve, sizes)
    sources = ", ".join(sorted({record.source for record in records}))
    return Fitted(key, found, sources, records[0].software, errors(predicted, seconds))


def left_out_groups(fitted: Iterable[Fitted], records: Iterable[Record]) -> dict[CurveKey, Errors]:
    """Returns how well a group size is predicted from the next smaller and larger one."""
    curves = {item.key: item.fit.curve for item in fitted if item.fit.curve is not None}
    measured: dict[CurveKey, list[Record]] = {}
    for record in records:
        if record.kind == "collective":
            measured.setdefault(key_of(record), []).append(record)
    result: dict[CurveKey, Errors] = {}
    for key, rows in measured.items():
        others = {k: c for k, c in curves.items() if k != key}
        curve = CurveTable(others).find(key)
        if curve is not None:
            sizes = np.array([row.bytes for row in rows], np.float64)
            seconds = np.array([row.seconds for row in rows])
            result[key] = errors(times(curve, sizes), seconds)
    return result


def write_curves(fitted: list[Fitted], folder: Path) -> list[Path]:
    """Writes one file for each topology, and one of what is borrowed; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    by_topology: dict[str, list[Fitted]] = {}
    for item in fitted:
        if item.fit.curve is not None:
            by_topology.setdefault(item.key.topology, []).append(item)
    also = _plain_names(fitted)
    paths = []
    for name, items in by_topology.items():
        more = _relatives(name) if items[0].source.startswith(UNSTATED) else []
        entries = [_entry(item, also.get(item.key, []) + more) for item in items]
        paths.append(_write(folder, name, f"fitted: {items[0].source}", entries))
    for name, (lender, factor) in BORROWED.items():
        entries = [_lent(item, lender, factor) for item in fitted if _speaks_for(item, lender)]
        if entries:
            paths.append(_write(folder, name, f"borrowed from {lender}", entries))
    return paths


def _speaks_for(item: Fitted, name: str) -> bool:
    return item.fit.curve is not None and plain(item.key.topology) == name and _is_plain(item)


def _is_plain(item: Fitted) -> bool:
    source = item.source.partition("/")[0]
    if item.fit.curve is None or item.key.kind not in PLAIN.get(source, ()):
        return False
    return ";" in item.key.topology and item.key.topology.startswith("1 node,")


def _plain_names(fitted: list[Fitted]) -> dict[CurveKey, list[str]]:
    """Returns key -> the plain topologies that its curve speaks for."""
    ranked = sorted(
        (item for item in fitted if _is_plain(item)),
        key=lambda item: _RANK.index(item.source.partition("/")[0]),
    )
    taken: dict[CurveKey, CurveKey] = {}
    for item in ranked:
        own = item.key._replace(topology=plain(item.key.topology))
        for name in (own.topology, *_relatives(own.topology)):
            taken.setdefault(own._replace(topology=name), item.key)
    names: dict[CurveKey, list[str]] = {}
    for target, speaker in taken.items():
        names.setdefault(speaker, []).append(target.topology)
    return names


def _relatives(topology: str) -> list[str]:
    """Returns the topologies of devices of the same family."""
    return [
        topology.replace(f", {device},", f", {relative},")
        for device, relatives in FAMILY.items()
        for relative in relatives
        if f", {device}," in topology
    ]


def _points(fitted: Fit, factor: float = 1.0) -> list[dict[str, Any]]:
    assert fitted.curve is not None
    curve, latency = fitted.curve, fitted.curve.latency
    return [
        {
            "bytes": round(float(size)),
            "time_us": _rounded((latency + factor * (seconds - latency)) * 1e6),
            "relative_error": _rounded(float(error), 2),
        }
        for size, seconds, error in zip(
            curve.num_bytes, curve.seconds, fitted.relative_error, strict=True
        )
    ]


def _rounded(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")


def _entry(item: Fitted, also: list[str]) -> dict[str, Any]:
    held_out = item.fit.held_out
    spread = held_out.median if held_out.cases else float(item.fit.relative_error.max())
    points: Tagged[Any] = Tagged(
        value=_points(item.fit),
        tag="fitted",
        source=f"{item.source}; {item.fit.outcome}",
        date=DATE,
        relative_error=_rounded(max(spread, 0.001), 2),
        num_samples=item.fit.num_samples,
        software=item.software or None,
    )
    entry = {"kind": item.key.kind, "num_members": item.key.num_members}
    return entry | ({"also": sorted(also)} if also else {}) | {"points": points}


def _lent(item: Fitted, lender: str, factor: float) -> dict[str, Any]:
    points: Tagged[Any] = Tagged(
        value=_points(item.fit, factor),
        tag="borrowed",
        source=f"curve of {lender} ({item.source}), a byte takes {factor:.3g} times as long",
        date=DATE,
        relative_error=BORROWED_ERROR,
    )
    return {"kind": item.key.kind, "num_members": item.key.num_members, "points": points}


def _write(folder: Path, name: str, description: str, entries: list[dict[str, Any]]) -> Path:
    path = folder / f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}.json"
    head: Mapping[str, str] = {"format": FORMAT, "topology": name, "description": description}
    lines = [f"  {_text(key)}: {_text(value)}," for key, value in head.items()]
    curves = ",\n    ".join(_text(entry) for entry in entries)
    text = "\n".join(["{", *lines, f'  "curves": [\n    {curves}\n  ]', "}", ""])
    write_whole(path, text.encode())
    return path


def _text(value: object) -> str:
    compact = msgspec.json.encode(value)
    return msgspec.json.format(compact, indent=0).decode()
