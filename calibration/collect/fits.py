"""Records of one kind of device -> the numbers of its profile.

How the host's time is accounted for, on a CPU: the seconds of a timed op hold the call itself, so
that part (measured on tiny tensors) is taken off each op, and the launch overhead, which the
simulator adds once per kernel, is what an op costs in a plain step of tiny tensors: call, autograd
and the module's Python. The seconds of a step are then the sum of its ops' seconds and launches.

How a message costs compute, on a CPU: both ends copy through the kernel on the core that computes.
The part of the message's time in which a core works on it, *c*, is measured without compute; the
core does that work sooner or later, whatever else it does. In the simulator compute beside a copy
is slower by a factor f, so a copy of t seconds costs compute t (1 - 1 / f); hence f = 1 / (1 - c).
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from calibration.collect.rows import CORE_TIME, IN_CALL, LAUNCH, beside_topology
from calibration.records import Record
from simcore.signature import Signature

FLOP_CLASSES = frozenset({"matmul", "batched_matmul", "convolution", "attention", "rnn"})
LARGE = 2**20  # bytes, from which the rate of a message is its bandwidth
MOST_SLOW = 20.0  # of compute beside a message
LEAST_SECONDS = 1e-7  # of an op
STEADY_SECONDS = 5e-5  # of an op that takes long enough for a rate
_LEAST_FRACTION = 1e-4  # of a peak


class OpEntry(NamedTuple):
    """One line of the table of measured ops."""

    target: str
    op_class: str
    dtype: str
    dims: tuple[tuple[str, int], ...]
    factor: float
    traffic: int  # bytes
    seconds: float  # without the launch
    relative_error: float
    samples: int


class Rates(NamedTuple):
    """Peaks that were reached, and the shares that op classes reach of them."""

    peak: Mapping[str, float]  # dtype -> FLOP/s
    bandwidth: float  # bytes/s
    usual_compute: Mapping[str, float]  # dtype -> share of the peak
    usual_memory: float  # share of the bandwidth
    compute: Mapping[tuple[str, str], float]  # (op class, dtype) -> share
    memory: Mapping[str, float]  # op class -> share
    error: Mapping[str, float]  # op class -> relative standard error of single ops
    samples: Mapping[str, int]  # op class -> ops


class Line(NamedTuple):
    """A time that grows with bytes as latency + bytes / bandwidth."""

    latency: float  # s
    bandwidth: float  # bytes/s
    relative_error: float  # of single sizes
    samples: int


def launch_of(records: Iterable[Record]) -> tuple[float, float]:
    """Returns what a kernel costs the host, and the part of it that is in a timed op, s."""
    found = {record.target: record.seconds for record in records if record.kind == "op"}
    return found[LAUNCH], found[IN_CALL]


def op_entries(records: Sequence[Record], *, on_gpu: bool) -> list[OpEntry]:
    """Returns the table of measured ops, one line for each distinct op."""
    launch, in_call = (0.0, 0.0) if on_gpu else launch_of(records)
    groups: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in records:
        if record.kind == "op" and record.dims:
            dims = tuple(sorted(record.dims.items()))
            what = (record.target, record.op_class, record.dtype, record.factor)
            key = (*what, dims, record.traffic)
            groups[key].append(record)
    return [_entry(group, launch, in_call) for _, group in sorted(groups.items(), key=str)]


def _entry(group: Sequence[Record], launch: float, in_call: float) -> OpEntry:
    """Returns the line of one op; what launches of several kernels take is not counted twice."""
    first, count = group[0], sum(record.count for record in group)
    mean = sum(record.seconds * record.count for record in group) / count
    spread = max(record.spread or 0.0 for record in group)
    kernels = first.dims.get("t", 1) if first.op_class == "rnn" else 1
    seconds = mean - in_call - (kernels - 1) * launch
    return OpEntry(
        target=first.target,
        op_class=first.op_class,
        dtype=first.dtype,
        dims=tuple(first.dims.items()),
        factor=first.factor,
        traffic=first.traffic,
        seconds=max(seconds, LEAST_SECONDS),
        relative_error=min(1.0, spread / mean),
        samples=count,
    )


def rates_of(entries: Sequence[OpEntry]) -> Rates:
    """Returns rates from which the time of an op that was not measured can be had.

    The peaks are the greatest rates of measured ops that take long enough for a rate, so that no
    share is above 1. The share of a class is that of all its time together, so that sums come out
    right.
    """
    table = _Table.of(entries)
    long = table.seconds >= STEADY_SECONDS
    dtypes = [str(dtype) for dtype in np.unique(table.dtypes[table.counted])]
    peak = {d: _greatest(table.flops, table, table.counted & (table.dtypes == d)) for d in dtypes}
    bandwidth = _greatest(table.traffic, table, ~table.counted & long & (table.traffic > 0))

    def compute_share(rows: NDArray[np.bool_], dtype: str) -> float:
        return _share(table.flops, table, rows & (table.dtypes == dtype), peak[dtype])

    def memory_share(rows: NDArray[np.bool_]) -> float:
        return _share(table.traffic, table, rows & ~table.counted, bandwidth)

    by_class = {str(name): table.classes == name for name in np.unique(table.classes)}
    rates = Rates(
        peak=peak,
        bandwidth=bandwidth,
        usual_compute={dtype: compute_share(table.counted, dtype) for dtype in dtypes},
        usual_memory=memory_share(table.traffic > 0),
        compute={
            (name, dtype): compute_share(rows, dtype)
            for name, rows in by_class.items()
            for dtype in dtypes
            if (rows & table.counted & (table.dtypes == dtype)).any()
        },
        memory={
            name: memory_share(rows)
            for name, rows in by_class.items()
            if (rows & ~table.counted & (table.traffic > 0)).any()
        },
        error={},
        samples={name: int(rows.sum()) for name, rows in by_class.items()},
    )
    return rates._replace(error=_errors(entries, rates))


class _Table(NamedTuple):
    """Measured ops as columns."""

    flops: NDArray[np.float64]  # [op]
    traffic: NDArray[np.float64]  # [op] bytes
    seconds: NDArray[np.float64]  # [op] s
    classes: NDArray[np.str_]  # [op]
    dtypes: NDArray[np.str_]  # [op]
    counted: NDArray[np.bool_]  # [op] its FLOPs say how long it takes

    @classmethod
    def of(cls, entries: Sequence[OpEntry]) -> "_Table":
        classes = np.array([entry.op_class for entry in entries])
        return cls(
            flops=np.array([_flops(entry) for entry in entries]),
            traffic=np.array([float(entry.traffic) for entry in entries]),
            seconds=np.array([entry.seconds for entry in entries]),
            classes=classes,
            dtypes=np.array([entry.dtype for entry in entries]),
            counted=np.isin(classes, sorted(FLOP_CLASSES)),
        )


def _greatest(work: NDArray[np.float64], table: _Table, rows: NDArray[np.bool_]) -> float:
    """Returns the greatest rate of some ops; of short ones only where there are no others."""
    long = rows & (table.seconds >= STEADY_SECONDS)
    chosen = long if long.any() else rows
    return float((work / table.seconds)[chosen].max())


def _share(work: NDArray[np.float64], table: _Table, rows: NDArray[np.bool_], rate: float) -> float:
    reached = work[rows].sum() / max(table.seconds[rows].sum(), LEAST_SECONDS) / rate
    return float(np.clip(reached, _LEAST_FRACTION, 1.0))


def _errors(entries: Sequence[OpEntry], rates: Rates) -> dict[str, float]:
    """Returns how far single ops are from the rates of their class, as a share."""
    logs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for entry in entries:
        if entry.op_class in FLOP_CLASSES:
            rate = rates.peak[entry.dtype] * rates.compute[entry.op_class, entry.dtype]
            predicted = _flops(entry) / rate
        else:
            predicted = entry.traffic / rates.bandwidth / rates.memory.get(entry.op_class, 1.0)
        if predicted > 0:
            logs[entry.op_class].append((math.log(predicted / entry.seconds), entry.seconds))
    return {name: _deviation(pairs) for name, pairs in logs.items()}


def _deviation(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the root mean square of logarithms, weighted by time; 1 at most."""
    logs, seconds = np.array(pairs).T
    return min(1.0, float(np.sqrt(np.average(logs**2, weights=seconds))))


def _flops(entry: OpEntry) -> float:
    dims = tuple((name, size, 0) for name, size in entry.dims)
    return Signature(entry.op_class, entry.dtype, dims, entry.factor).flops(0)


def line_of(points: Mapping[int, float]) -> Line:
    """Returns the latency and bandwidth that fit times of sizes best, as ratios.

    Args:
        points: bytes -> s, two or more sizes.
    """
    size = np.array(sorted(points), np.float64)
    seconds = np.array([points[int(each)] for each in size])

    def ratios(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        residuals: NDArray[np.float64] = np.log(
            (np.exp(logs[0]) + size * np.exp(-logs[1])) / seconds
        )
        return residuals

    start = np.log([seconds.min(), size[-1] / seconds[-1]])
    # where noise hides one of the two, it must not run away
    bounds = (start - np.log([100.0, 2.0]), start + np.log([100.0, 10.0]))
    found = least_squares(ratios, start, bounds=bounds, loss="soft_l1", f_scale=0.2)
    latency, bandwidth = np.exp(found.x)
    error = float(np.sqrt(np.mean(ratios(found.x) ** 2)))
    return Line(float(latency), float(bandwidth), error, len(size))


def times_by_size(records: Iterable[Record], topology: str, direction: str) -> dict[int, float]:
    """Returns bytes -> s of the messages or copies of one topology and direction."""
    return {
        record.bytes: record.seconds
        for record in records
        if record.kind == "link" and (record.topology, record.direction) == (topology, direction)
    }


def core_share(records: Iterable[Record], topology: str, *, kind: str) -> float:
    """Returns the share of the time of large messages or collectives in which a core works on them.

    Args:
        records: of one kind of device.
        topology: gloo or nccl.
        kind: ``link`` or ``collective``.
    """
    large = [r for r in records if r.kind == kind and r.bytes >= LARGE and r.direction != "both"]
    core = {
        (r.collective, r.group, r.bytes): r.seconds
        for r in large
        if r.topology == f"{topology}, {CORE_TIME}"
    }
    shares = [
        core[r.collective, r.group, r.bytes] / r.seconds for r in large if r.topology == topology
    ]
    return min(1.0, statistics.median(shares)) if shares else 0.0


def slower(share: float) -> float:
    """Returns how many times longer compute takes beside what takes that share of its core."""
    return min(MOST_SLOW, 1.0 / max(1.0 - share, 1.0 / MOST_SLOW))


def posting_time(records: Iterable[Record], backend: str) -> float:
    """Returns the host's time to post one message, s; 0 where it was not measured."""
    names = {beside_topology(backend, "both", end, "posted") for end in ("sender", "receiver")}
    found = [record.seconds for record in records if record.topology in names]
    return statistics.median(found) if found else 0.0


def longer_beside_compute(records: Sequence[Record], backend: str) -> float:
    """Returns how many times longer a message takes whose sender computes, 1 at least."""
    alone = times_by_size(records, backend, "one")
    beside = times_by_size(records, beside_topology(backend, "sender", "receiver", "both"), "one")
    ratios = [seconds / alone[size] for size, seconds in beside.items() if size in alone]
    return max(1.0, statistics.median(ratios)) if ratios else 1.0
