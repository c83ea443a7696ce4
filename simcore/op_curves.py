"""What ops take on a device kind: a measured op, else the fitted curve, else the roofline.

`predict` answers for one signature, `op_costs` for many at once. Curves are keyed by op class; a
class with ``.I``, ``.W`` or ``.B`` behind it is that of the input gradient, the weight gradient or
both. Forwards have no suffix, and stand for gradients that have no curve of their own.
"""

import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.op_forms import EXTRA_DIMS, Device, Floats, OpCurve, Work, seconds
from simcore.profile import HardwareProfile, MeasuredOp, Tagged
from simcore.signature import Phase, Signature
from simcore.units import MiB

CURVE_ERROR = 0.2  # relative, of a curve whose file states none
_SUFFIX = {Phase.I: ".I", Phase.W: ".W", Phase.B: ".B"}
_MeasuredKey = tuple[str, str, tuple[tuple[str, int], ...]]
_SAME_TRAFFIC = 1e-3


class CostSource(IntEnum):
    """Where the seconds of an op on a device kind come from."""

    ZERO = 0
    FIXED = 1
    SCALED = 2
    ROOFLINE = 3
    IMPOSSIBLE = 4  # the op cannot run there: its seconds are infinite
    MEASURED = 5  # in the profile's table
    CURVE = 6


class Query(NamedTuple):
    """An op to be costed."""

    signature: Signature
    target: str = ""
    phase: int = Phase.F


class OpCosts(NamedTuple):
    """What ops cost."""

    seconds: NDArray[np.float64]  # [op] s on the device
    source: NDArray[np.uint8]  # [op] CostSource
    relative_error: NDArray[np.float64]  # [op] standard error / seconds


def predict(
    profile: HardwareProfile,
    signature: Signature,
    batch: int = 1,
    *,
    target: str = "",
    phase: int = Phase.F,
) -> float:
    """Returns the seconds of one op; launching it is not part of them.

    Args:
        profile: of the device kind.
        signature: the op's; dimensions beyond those of its class (``causal``, ``kv_heads``,
            ``stride``, ``cols``) are used where a curve knows them.
        batch: at which its dimensions are taken.
        target: what the framework calls it, for the table of measured ops.
        phase: tells a convolution's or recurrent layer's gradients from its forward.
    """
    return float(op_costs(profile, [Query(signature, target, phase)], batch).seconds[0])


def op_costs(profile: HardwareProfile, queries: Sequence[Query], batch: int) -> OpCosts:
    """Returns the costs of ops at a batch: see the top of this file.

    Args:
        profile: of the device kind.
        queries: the ops.
        batch: at which their dimensions are taken.
    """
    costs = _roofline(profile, queries, batch)
    for key, members in _by_curve(profile, queries).items():
        _use_curve(profile, key, queries, np.array(members), batch, costs)
    if profile.measured is not None:
        _use_measured(profile.measured.value, queries, batch, costs)
    return costs


def curve_keys(profile: HardwareProfile, query: Query) -> tuple[tuple[str, str], ...]:
    """Returns (op class, dtype) of the curves whose sum an op takes; empty where there is none."""
    signature, curves = query.signature, profile.curves
    dtype = profile.arithmetic(signature.op_class, signature.dtype)
    name = signature.op_class
    suffix = _SUFFIX.get(Phase(query.phase), "")
    if suffix == ".B" and signature.factor < 2 and f"{name}.W" in curves:
        suffix = ".W"  # the first layer of a network needs no input gradient
    for candidate in ((name + suffix,), (f"{name}.I", f"{name}.W"), (name,)):
        if len(candidate) == 2 and suffix != ".B":
            continue
        keys = tuple((part, _dtype_of(curves.get(part, {}), dtype)) for part in candidate)
        if all(found for _, found in keys):
            return keys
    return ()


def _dtype_of(curves: Mapping[str, Tagged[OpCurve]], dtype: str) -> str:
    """Returns the dtype whose curve serves; what bytes alone decide is the same in all."""
    if dtype in curves:
        return dtype
    return next((name for name, curve in curves.items() if curve.value.form == "bandwidth"), "")


def device_of(profile: HardwareProfile, dtype: str) -> Device:
    """Returns what the curves of a profile need to know of its device."""
    assert profile.multiprocessors is not None  # checked with the file
    assert profile.cache_MiB is not None
    return Device(
        peak=profile.peak(dtype),
        bandwidth=profile.memory_bandwidth,
        units=float(profile.multiprocessors.value),
        cache=profile.cache_MiB.value * MiB,
    )


def work_of(signatures: Sequence[Signature], batch: int, dtype: str) -> Work:
    """Returns the sizes of ops of one class; a factor of the FLOPs is not part of them."""
    names = sorted({dim[0] for signature in signatures for dim in signature.dims} | EXTRA_DIMS)
    dims = {
        name: np.array([signature.dim(name, batch) for signature in signatures], np.float64)
        for name in names
    }
    if signatures[0].op_class == "convolution":
        dims = {name: value for name, value in dims.items() if name not in ("b", "m")}
    traffic = np.array([signature.traffic_bytes(batch) for signature in signatures], np.float64)
    return Work(dims, traffic / _repeats(signatures), dtype)


def _repeats(signatures: Sequence[Signature]) -> Floats:
    """Returns how many times an op does what its dimensions say, [op]; 1 where only bytes count."""
    counted = {"matmul", "batched_matmul", "convolution", "attention", "rnn"}
    if signatures[0].op_class not in counted:
        return np.ones(len(signatures))
    return np.array([signature.factor or 1.0 for signature in signatures], np.float64)


def _roofline(profile: HardwareProfile, queries: Sequence[Query], batch: int) -> OpCosts:
    signatures = [query.signature for query in queries]
    flops = np.array([s.flops(batch) for s in signatures], np.float64)
    traffic = np.array([s.traffic_bytes(batch) for s in signatures], np.float64)
    flop_rate = np.array([profile.flop_rate(s.op_class, s.dtype) for s in signatures], np.float64)
    byte_rate = np.array([profile.byte_rate(s.op_class) for s in signatures], np.float64)
    return OpCosts(
        seconds=np.maximum(flops / flop_rate, traffic / byte_rate),
        source=np.full(len(queries), CostSource.ROOFLINE, np.uint8),
        relative_error=np.array([profile.relative_error(s.op_class) for s in signatures]),
    )


def _by_curve(
    profile: HardwareProfile, queries: Sequence[Query]
) -> dict[tuple[tuple[str, str], ...], list[int]]:
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    if profile.curves:
        for index, query in enumerate(queries):
            keys = curve_keys(profile, query)
            if keys:
                groups.setdefault(keys, []).append(index)
    return groups


def _use_curve(
    profile: HardwareProfile,
    keys: tuple[tuple[str, str], ...],
    queries: Sequence[Query],
    members: NDArray[np.int64],
    batch: int,
    costs: OpCosts,
) -> None:
    """Puts the seconds of curves in place of the roofline's; an op of no size keeps its."""
    signatures = [queries[index].signature for index in members]
    total, error = np.zeros(len(members)), 0.0
    for name, dtype in keys:
        tagged = profile.curves[name][dtype]
        found = seconds(tagged.value, work_of(signatures, batch, dtype), device_of(profile, dtype))
        repeats = _repeats(signatures)
        total += found * (repeats if "." not in name else np.maximum(repeats / 2.0, 1.0))
        stated = tagged.relative_error
        error = max(error, CURVE_ERROR if stated is None else stated)
    sized = costs.seconds[members] > 0
    costs.seconds[members[sized]] = total[sized]
    costs.source[members[sized]] = CostSource.CURVE
    costs.relative_error[members[sized]] = error


def _use_measured(
    table: Sequence[MeasuredOp], queries: Sequence[Query], batch: int, costs: OpCosts
) -> None:
    """Puts measured seconds in place of any others."""
    index: dict[_MeasuredKey, list[MeasuredOp]] = {}
    for entry in table:
        dims = tuple(sorted(entry.dims.items()))
        index.setdefault((entry.op_class, entry.dtype, dims), []).append(entry)
    for at, (signature, target, _) in enumerate(queries):
        dims = tuple(sorted((dim[0], signature.dim(dim[0], batch)) for dim in signature.dims))
        key = signature.op_class, signature.dtype, dims
        traffic = signature.traffic_bytes(batch)
        alike = [e for e in index.get(key, ()) if _is_alike(e.traffic, traffic)]
        alike.sort(key=lambda entry: abs(entry.traffic - traffic))
        found = _best(alike, target, signature.factor)
        if found is not None:
            costs.seconds[at] = found.seconds
            costs.source[at] = CostSource.MEASURED
            costs.relative_error[at] = found.relative_error


def _is_alike(a: int, b: int) -> bool:
    """Whether traffics are those of one op: the sizes of a shard are rounded up part by part."""
    return abs(a - b) <= _SAME_TRAFFIC * max(a, b)


def _best(entries: Sequence[MeasuredOp], target: str, factor: float) -> MeasuredOp | None:
    """Returns the entry of the same target, else one that says none."""
    fits = [e for e in entries if e.factor is None or math.isclose(e.factor, factor)]
    named = [entry for entry in fits if target and entry.target == target]
    return next(iter(named or [entry for entry in fits if not entry.target]), None)
