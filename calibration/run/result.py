"""What a run measured, beside what was predicted: a record to keep, a table, a timeline."""

import hashlib
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from calibration.run.launch import Ranks
from calibration.run.measure import Measured
from simcore.atomic import write_whole
from simcore.errors import RunError
from simcore.plan import Plan
from simcore.result import Result
from simcore.shards import is_sharded
from simcore.units import US

FORMAT = "placewright-run/1"
_PACKAGES = ("placewright", "torch", "numpy")


class RankRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a run."""

    device: str  # of the cluster
    ran_on: str  # torch's device
    predicted_peak_bytes: int  # allocated
    measured_peak_bytes: int  # above the process without a model; allocated, on a GPU


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One validation of a prediction; a line of a record file."""

    format: str = FORMAT
    plan_hash: str
    graph: str
    cluster: str
    schedule: str
    predicted_s: float
    measured_s: float
    spread: float  # half the distance between the quartiles, over the median
    error: float  # predicted over measured, less 1
    stands_in: bool  # it ran on other devices than it was predicted for
    steps: int
    drift: float  # of the yardstick
    first_loss: float
    last_loss: float
    ranks: tuple[RankRecord, ...]
    backend: str
    machine: str
    versions: dict[str, str]


def run_record(plan: Plan, predicted: Result, measured: Measured, ranks: Ranks) -> RunRecord:
    """Returns the record of one run."""
    allocated = {use.name: use.allocated for use in predicted.devices}
    each = zip(ranks.names, ranks.devices, measured.peak_bytes, measured.bare_bytes, strict=True)
    return RunRecord(
        plan_hash=plan_hash(plan),
        graph=plan.graph.name,
        cluster=plan.cluster.name,
        schedule=kind_of(plan),
        predicted_s=predicted.step_time,
        measured_s=measured.median,
        spread=measured.spread,
        error=predicted.step_time / measured.median - 1,
        stands_in=ranks.stands_in,
        steps=len(measured.seconds),
        drift=measured.drift,
        first_loss=measured.losses[0],
        last_loss=measured.losses[-1],
        ranks=tuple(
            RankRecord(
                device=name,
                ran_on=device,
                predicted_peak_bytes=allocated[name],
                measured_peak_bytes=max(0, peak - bare),
            )
            for name, device, peak, bare in each
        ),
        backend=ranks.backend,
        machine=machine(),
        versions={name: version(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
    )


def kind_of(plan: Plan) -> str:
    """Returns in a word what a plan is."""
    if plan.is_pipeline:
        return plan.schedule
    if is_sharded(plan):
        return "sharded"
    return "placement" if plan.stages[0].mesh is None else "data parallel"


def plan_hash(plan: Plan) -> str:
    """Returns 16 hex digits that change with any decision of a plan."""
    return hashlib.sha256(msgspec.json.encode(plan, order="sorted")).hexdigest()[:16]


def machine() -> str:
    """Returns what the processes ran on, in words."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def append_record(path: Path, record: RunRecord) -> None:
    """Adds a line to a record file.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
    except OSError as error:
        raise RunError(f"{path}: cannot write the record: {error.strerror}") from None


def write_timeline(path: Path, measured: Measured, names: Sequence[str]) -> None:
    """Writes the last step as a Chrome trace, one track a rank; all ranks share one clock.

    Raises:
        RunError: the file cannot be written.
    """
    begin = min((s.start for rank in measured.slices for s in rank), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": name}}
        for rank, name in enumerate(names)
    ]
    events += [
        {
            "ph": "X", "name": each.name, "cat": each.what, "pid": 0, "tid": rank,
            "ts": (each.start - begin) / US, "dur": (each.end - each.start) / US,
            "args": {"microbatch": each.microbatch},
        }
        for rank, slices in enumerate(measured.slices)
        for each in slices
    ]  # fmt: skip
    document = {"displayTimeUnit": "ms", "traceEvents": events}
    try:
        write_whole(path, msgspec.json.encode(document))
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise RunError(f"{path}: cannot write the timeline: {reason}") from None
