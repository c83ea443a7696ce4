"""What the shipped profiles say about measurements: records -> seconds, or why there are none.

Seconds are made of what the record's are. Where an op was timed alone, its launch comes before it;
where a loop of calls was timed, the host launches beside the kernels: the longer of both counts,
and the host of the source may have a least time of its own. A collective or
copy is looked up under its own machine, then under the plain topology; a copy also under the links
of its topology.
"""

from collections.abc import Sequence

from calibration.curve_files import key_of
from calibration.importers import IMPORTERS
from calibration.importers.devices import plain
from calibration.records import Record
from simcore.curves import CurveTable
from simcore.op_curves import Query, op_costs
from simcore.profile import HardwareProfile
from simcore.profile_store import device_kinds, link_kinds, load_link, load_profile
from simcore.signature import Phase, Signature

# their READMEs: means over repeated runs, with one wait for the device at the end
_LOOPS = frozenset({"aceso_v100", "deepbench", "sailor"})
NO_SHAPE = "a whole layer or an op without dims"
Prediction = float | str  # seconds, or the reason why nothing can be said


def predict(records: Sequence[Record], curves: CurveTable) -> list[Prediction]:
    """Returns the prediction of each record.

    Args:
        records: of any kinds; equal ones are predicted once.
        curves: of collectives and links.

    Raises:
        ProfileError: a malformed profile.
    """
    keys = [record.key for record in records]
    distinct = dict(zip(keys, records, strict=True))
    known: dict[tuple[object, ...], Prediction] = {}
    by_device: dict[str, list[tuple[object, ...]]] = {}
    links = frozenset(link_kinds())
    for key, record in distinct.items():
        if record.kind == "op" and record.dims:
            by_device.setdefault(record.device, []).append(key)
        else:
            known[key] = NO_SHAPE if record.kind == "op" else _network(record, curves, links)
    kinds = device_kinds()
    for device, members in by_device.items():
        if device not in kinds:
            known |= dict.fromkeys(members, f"no profile of {device}")
            continue
        found = op_seconds(load_profile(device), [distinct[key] for key in members])
        known |= dict(zip(members, found, strict=True))
    return [known[key] for key in keys]


def op_seconds(profile: HardwareProfile, records: Sequence[Record]) -> list[float]:
    """Returns the seconds of ops on a device kind, with the host's where the records have it."""
    queries = [
        Query(signature_of(record), record.target, Phase[record.phase or "F"]) for record in records
    ]
    seconds = op_costs(profile, queries, 1).seconds.tolist()
    return [
        time if record.contains == "kernel" else _with_host(time, record, profile)
        for time, record in zip(seconds, records, strict=True)
    ]


def _with_host(seconds: float, record: Record, profile: HardwareProfile) -> float:
    launch = profile.launch_overhead
    if record.folder not in _LOOPS:
        return seconds + launch
    return max(seconds, launch, IMPORTERS[record.folder].floor.get(record.phase, 0.0))


def signature_of(record: Record) -> Signature:
    """Returns the signature that the frontends would give the op of a record."""
    return Signature(
        op_class=record.op_class,
        dtype=record.dtype,
        dims=tuple((name, size, 0) for name, size in record.dims.items()),
        factor=record.factor,
        traffic=(record.traffic, 0),
    )


def _network(record: Record, curves: CurveTable, links: frozenset[str]) -> Prediction:
    key = key_of(record)
    for name in (key.topology, plain(key.topology)):
        curve = curves.find(key._replace(topology=name))
        if curve is not None:
            return curve.time(record.bytes)
    if record.kind == "collective":
        return f"no curve of {record.collective} for {plain(key.topology)}"
    name = plain(record.topology).rpartition(", ")[2]
    if name not in links:
        return f"no link profile {name}"
    link = load_link(name)
    return link.latency + record.bytes / link.bandwidth
