"""Findings of a collection -> the user's folder: profiles, curves and the cluster ``local``.

On a CPU a device is one core, joined to the others by gloo over the loopback interface; with more
than two ranks, by a switch, so that all messages of a rank share its port as they share its core.
On GPUs a device is a GPU; the host joins them if its cores were collected into the same folder.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from calibration.collect.fits import (
    Line,
    OpEntry,
    Rates,
    core_share,
    launch_of,
    line_of,
    longer_beside_compute,
    op_entries,
    posting_time,
    rates_of,
    slower,
    times_by_size,
)
from calibration.collect.host import CPU_KIND, Host
from calibration.collect.ledger import COPIES, PROBES, Ledger
from calibration.records import COLLECTIVES, Record
from simcore.atomic import write_whole
from simcore.cluster import LOCAL
from simcore.curves import parse_curve
from simcore.profile import DEFAULT_CLASS, parse_link, parse_profile
from simcore.units import GB, TERA, US, GiB, MiB

GLOO, NCCL, HOST_LINK = "local-gloo", "local-NCCL", "local-PCIe"
SOURCE = "placewright calibrate collect"
_LEAST_LATENCY = 1e-6  # s, of a link
_SPIN = "compute beside a message stops while its core copies: slow_down from the core's share"


class _Tag:
    """Makes values with provenance."""

    def __init__(self, software: str) -> None:
        self.shared = {
            "source": SOURCE,
            "date": datetime.now(UTC).date().isoformat(),
            "software": software,
        }

    def fitted(self, value: Any, error: float | None = None, count: int = 1) -> dict[str, Any]:
        """Returns a value that was measured here."""
        stated = {} if error is None else {"relative_error": round(error, 4)}
        return {"value": value, "tag": "fitted", **self.shared, "num_samples": count, **stated}

    def assumed(self, value: Any, why: str) -> dict[str, Any]:
        """Returns a value that was not measured."""
        return {"value": value, "tag": "borrowed", "source": why, "date": self.shared["date"]}


def write_profiles(host: Host, ledger: Ledger, folder: Path) -> tuple[Path, ...]:
    """Writes everything that the findings so far are enough for; returns the paths.

    Args:
        host: what was measured.
        ledger: its block of probes is finished.
        folder: the user's folder.
    """
    tag = _Tag(host.software)
    written = {f"devices/{host.kind}.json": _device(host, ledger, tag)}
    links = _links(host, ledger.records, tag)
    written |= {f"links/{name}.json": link for name, link in links.items()}
    name = NCCL if host.device == "cuda" else GLOO
    if name in links:
        for curve in _curves(host, ledger.records, name, tag):
            written[f"curves/{host.kind}-{curve['kind']}-{curve['num_members']}.json"] = curve
    for path, content in written.items():
        _write(folder / path, msgspec.json.format(msgspec.json.encode(content), indent=1))
    cluster = folder / "clusters" / f"{LOCAL}.toml"
    _write(cluster, _cluster(host, links, folder).encode())
    return (*(folder / path for path in written), cluster)


def _write(path: Path, content: bytes) -> None:
    """Writes a file; what a reader would refuse is not written."""
    parse = {"devices": parse_profile, "links": parse_link, "curves": parse_curve}
    if path.parent.name in parse:
        parse[path.parent.name](content, path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content + b"\n")


def _device(host: Host, ledger: Ledger, tag: _Tag) -> dict[str, Any]:
    records, memory = ledger.records, ledger.findings(PROBES)
    on_gpu = host.device == "cuda"
    entries = op_entries(records, on_gpu=on_gpu)
    rates = rates_of(entries)
    content = {
        "format": "placewright-device-profile/1",
        "kind": host.kind,
        "description": host.description,
        "is_cpu": not on_gpu,
        "synchronous": not on_gpu,
        "memory_GiB": tag.fitted((host.memory or memory["total"]) / GiB),
        "peak_TFLOPS": tag.fitted(
            {dtype: rate / TERA for dtype, rate in rates.peak.items()}, count=len(entries)
        ),
        "memory_bandwidth_GBps": tag.fitted(rates.bandwidth / GB, count=len(entries)),
        "launch_overhead_us": tag.fitted(launch_of(records)[0] / US),
        "context_MiB": tag.fitted(memory["context"] / MiB),
        "fragmentation": tag.fitted(memory["fragmentation"])
        if on_gpu
        else tag.assumed(0.0, "large blocks of the C allocator go back to the system"),
        "efficiency": _efficiency(rates, tag),
        "measured": tag.fitted([_measured(entry) for entry in entries], count=len(entries)),
    }
    return content | _communication(host, ledger, tag)


def _measured(entry: OpEntry) -> dict[str, Any]:
    return {
        "target": entry.target,
        "op_class": entry.op_class,
        "dtype": entry.dtype,
        "dims": dict(entry.dims),
        "factor": entry.factor,
        "traffic": entry.traffic,
        "seconds": entry.seconds,
        "relative_error": round(entry.relative_error, 4),
    }


def _efficiency(rates: Rates, tag: _Tag) -> dict[str, Any]:
    """Returns the shares of the peaks by class, for ops that are not in the table."""
    usual = {"memory": rates.usual_memory, "compute": dict(rates.usual_compute)}
    found = {DEFAULT_CLASS: tag.fitted(usual, count=sum(rates.samples.values()))}
    for name in sorted({*rates.memory, *(name for name, _ in rates.compute)}):
        compute = {dtype: rate for (each, dtype), rate in rates.compute.items() if each == name}
        value = {"memory": rates.memory.get(name, rates.usual_memory), "compute": compute}
        found[name] = tag.fitted(value, rates.error.get(name), rates.samples[name])
    return found


def _communication(host: Host, ledger: Ledger, tag: _Tag) -> dict[str, Any]:
    """Returns what messages cost their ends."""
    if host.device == "cuda":
        found = ledger.findings(COPIES)
        slow = {
            "compute_beside_copy": {DEFAULT_CLASS: found.get("compute", 1.0)},
            "copy_beside_compute": found.get("copy", 1.0),
        }
        return {"slow_down": tag.fitted(slow)} if found else {}
    records = ledger.records
    posting = posting_time(records, "gloo")
    if not times_by_size(records, "gloo", "one"):
        return {}
    longer = longer_beside_compute(records, "gloo")
    slow = {
        "compute_beside_copy": {
            DEFAULT_CLASS: slower(core_share(records, "gloo", kind="link") / longer)
        },
        "compute_beside_collective": {
            DEFAULT_CLASS: slower(core_share(records, "gloo", kind="collective"))
        },
        "copy_beside_compute": longer,
    }
    return {
        "slow_down": tag.fitted(slow) | {"source": f"{SOURCE}; {_SPIN}"},
        "message_overhead_us": tag.fitted(posting / US),
    }


def _links(host: Host, records: Sequence[Record], tag: _Tag) -> dict[str, dict[str, Any]]:
    """Returns the profiles of the links that were measured, by kind."""
    posting = posting_time(records, "gloo")
    found = {}
    for name, topology, directions, words in (
        (GLOO, "gloo", ("one",), "gloo between two processes of this machine, a core each"),
        (NCCL, "nccl", ("one",), "NCCL between two GPUs of this machine"),
        (HOST_LINK, "copy", ("h2d", "d2h"), "page-locked host memory and a GPU of this machine"),
    ):
        lines = [
            line_of(points)
            for direction in directions
            if len(points := times_by_size(records, topology, direction)) > 1
        ]
        if lines:
            ports = 2 if name != HOST_LINK and host.num_devices > 2 else 1
            rest = ", one of the two ports that a message passes" if ports > 1 else ""
            overhead = posting if name == GLOO else 0.0
            found[name] = _link(name, words + rest, _Way(lines, overhead, ports), tag)
    return found


class _Way(NamedTuple):
    """How a message or copy goes."""

    lines: Sequence[Line]  # of each direction
    overhead: float  # s of the host, which is in the device's profile
    ports: int  # links of its route


def _link(kind: str, words: str, way: _Way, tag: _Tag) -> dict[str, Any]:
    """Returns a link's profile."""
    lines = way.lines
    bandwidth = len(lines) / sum(1 / line.bandwidth for line in lines)
    whole = sum(line.latency for line in lines) / len(lines) - way.overhead
    latency = max(whole, _LEAST_LATENCY) / way.ports
    error, count = max(line.relative_error for line in lines), sum(line.samples for line in lines)
    return {
        "format": "placewright-link-profile/1",
        "kind": kind,
        "description": words,
        "bandwidth_GBps": tag.fitted(bandwidth / GB, error, count),
        "latency_us": tag.fitted(latency / US, error, count),
    }


def _curves(
    host: Host, records: Iterable[Record], link: str, tag: _Tag
) -> Iterable[dict[str, Any]]:
    """Yields the curves of the collectives that were measured; times never fall with the bytes."""
    backend = "nccl" if host.device == "cuda" else "gloo"
    known = [r for r in records if r.kind == "collective" and r.topology == backend]
    for kind in COLLECTIVES:
        for members in sorted({r.group for r in known if r.collective == kind}):
            times = {
                r.bytes: r.seconds for r in known if (r.collective, r.group) == (kind, members)
            }
            if len(times) > 1:
                yield {
                    "format": "placewright-collective-curve/1",
                    "kind": kind,
                    "algorithm": "auto",
                    "num_members": members,
                    "topology": topology_of(host.kind, link),
                    "description": f"{backend}, {members} ranks of this machine",
                    "points": tag.fitted(_rising(times), count=len(times)),
                }


def topology_of(kind: str, link: str) -> str:
    """Returns the topology of the ranks of this machine, as `simcore.collectives.topology` does."""
    return f"1 node, {kind}, {link}"


def _rising(times: Mapping[int, float]) -> list[dict[str, float]]:
    points, most = [], 0.0
    for size in sorted(times):
        most = max(most, times[size])
        points.append({"bytes": size, "time_us": most / US})
    return points


def _cluster(host: Host, links: Mapping[str, Mapping[str, Any]], folder: Path) -> str:
    """Returns the cluster file; without a measured link it has one device."""
    on_gpu = host.device == "cuda"
    link = NCCL if on_gpu else GLOO
    count = host.num_devices if link in links else 1
    names = [f"{'gpu' if on_gpu else 'cpu'}{rank}" for rank in range(count)]
    lines = [f'name = "{name}", kind = "{host.kind}"' for name in names]
    ends: list[str] = []
    switches = ["switch"] if count > 2 else []
    if count == 2:
        ends.append(f'a = "{names[0]}", b = "{names[1]}", kind = "{link}"')
    elif switches:
        ends += [f'a = "{name}", b = "switch", kind = "{link}"' for name in names]
    if on_gpu and HOST_LINK in links and (folder / "devices" / f"{CPU_KIND}.json").exists():
        lines.append(f'name = "cpu0", kind = "{CPU_KIND}"')
        ends += [f'a = "cpu0", b = "{name}", kind = "{HOST_LINK}"' for name in names]
    return "\n".join((
        'format = "placewright-cluster/1"',
        f'name = "{LOCAL}"',
        f'description = "this machine: {count} x {host.description}"',
        f"switches = {switches!r}".replace("'", '"'),
        *(f"[[devices]]\n{entry.replace(', ', chr(10))}" for entry in lines),
        *(f"[[links]]\n{entry.replace(', ', chr(10))}" for entry in ends),
        "",
    ))  # fmt: skip
