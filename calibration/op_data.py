"""Measurement records -> samples for the fits: one set for each op class, dtype and device kind.

Seconds that contain the host (``+sync``: a loop of one operator, averaged) are the larger of host
and kernel, so the shortest of a source and phase tell the host's floor (a backward calls more
kernels), and rows near it tell nothing of the kernel. Gradients of convolutions and recurrent
layers are classes of their own (``.I``, ``.W``, ``.B`` for both); where a source has the two apart,
their sum is added as both.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from calibration.op_models import Samples, form_of
from calibration.records import Record, merge_duplicates
from simcore.op_curves import device_of
from simcore.op_forms import EXTRA_DIMS, Device, Floats, Work
from simcore.profile import HardwareProfile

CURVED = frozenset({
    "matmul", "batched_matmul", "convolution", "attention", "rnn", "normalisation", "softmax",
    "pointwise", "pooling", "embedding",
})  # fmt: skip
ABOVE_FLOOR = 2.0  # rows with the host in their seconds count from this multiple of its floor
LAST_RESORT = ("sailor",)  # wall clock that spreads widely: used where nothing else is known
_SPLIT_CLASSES = ("convolution", "rnn")
_WIDTHS = ("normalisation", "softmax")  # whose rows have a width that matters
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "matmul": ("m", "n", "k"),
    "batched_matmul": ("b", "m", "n", "k"),
    "convolution": ("n", "k", "out", "c", "filter", "stride"),
    "attention": ("b", "h", "q", "kv", "d", "causal", "kv_heads"),
    "rnn": ("t", "b", "dirs", "gates", "h", "i"),
    "normalisation": ("elements", "rows", "cols"),
    "softmax": ("elements", "rows", "cols"),
}
_GROUPED_BY: Mapping[str, tuple[str, ...]] = {
    "matmul": ("n", "k"),
    "batched_matmul": ("n", "k"),
    "convolution": ("k", "c", "filter"),
    "attention": ("h", "kv_heads", "d"),
    "rnn": ("h", "gates"),
}


class Key(NamedTuple):
    """What a curve is of."""

    op_class: str  # with its suffix
    dtype: str  # of the arithmetic
    kind: str


def samples_of(
    records: Iterable[Record], profiles: Mapping[str, HardwareProfile]
) -> dict[Key, Samples]:
    """Returns the samples of every op class, dtype and device kind that has a profile.

    Args:
        records: of any kinds; those that are no op of a class with curves are left out.
        profiles: device kind -> profile with ``multiprocessors`` and ``cache_MiB``.
    """
    groups: dict[Key, list[Record]] = defaultdict(list)
    for record in _with_sums(merge_duplicates(_usable(records, profiles))):
        profile = profiles[record.device]
        dtype = profile.arithmetic(record.op_class, record.dtype)
        groups[Key(_class_of(record), dtype, record.device)].append(record)
    return {key: _samples(key, found, profiles[key.kind]) for key, found in groups.items()}


def _usable(records: Iterable[Record], profiles: Mapping[str, HardwareProfile]) -> list[Record]:
    """Returns records of kernels, without those that the host hides."""
    found = [
        record
        for record in records
        if record.kind == "op" and record.op_class in CURVED and record.device in profiles
    ]
    better = {record.device for record in found if record.folder not in LAST_RESORT}
    found = [r for r in found if r.folder not in LAST_RESORT or r.device not in better]
    shortest: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for record in found:
        if record.contains.endswith("+sync"):
            shortest[record.folder, record.device, record.phase].append(record.seconds)
    floors = {key: float(np.quantile(values, 0.02)) for key, values in shortest.items()}
    return [
        record
        for record in found
        if not record.contains.endswith("+sync")
        or record.seconds > ABOVE_FLOOR * floors[record.folder, record.device, record.phase]
    ]


def _class_of(record: Record) -> str:
    split = record.op_class in _SPLIT_CLASSES and record.phase in ("I", "W", "B")
    return f"{record.op_class}.{record.phase}" if split else record.op_class


def _with_sums(records: Sequence[Record]) -> list[Record]:
    """Returns the records and, where both gradients were timed apart, their sums."""
    halves: dict[tuple[object, ...], dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record.op_class in _SPLIT_CLASSES and record.phase in ("I", "W"):
            dims = tuple(sorted(record.dims.items()))
            halves[record.device, record.dtype, record.op_class, dims][record.phase] = record
    sums = [
        msgspec.structs.replace(
            pair["I"], phase="B", factor=2.0, seconds=pair["I"].seconds + pair["W"].seconds,
            traffic=pair["I"].traffic + pair["W"].traffic,
        )
        for pair in halves.values()
        if len(pair) == 2
    ]  # fmt: skip
    return [*records, *sums]


def _samples(key: Key, records: Sequence[Record], profile: HardwareProfile) -> Samples:
    op_class = key.op_class.partition(".")[0]
    names = _NEEDED.get(op_class, ("elements",))
    dims = {name: np.array([r.dims.get(name, 0) for r in records], np.float64) for name in names}
    counted = form_of(key.op_class) != "bandwidth"
    repeats = np.array([r.factor if counted and r.factor else 1.0 for r in records])
    whole = repeats if "." not in key.op_class else np.maximum(repeats / 2.0, 1.0)
    traffic = np.array([r.traffic for r in records], np.float64) / repeats
    one = np.ones(len(records))
    spec = device_of(profile, key.dtype)
    return Samples(
        op_class=key.op_class,
        work=Work(dims, traffic, key.dtype),
        device=Device(*(one * value for value in spec)),
        seconds=np.array([record.seconds for record in records]) / whole,
        group=np.array([_group(op_class, record) for record in records], np.int64),
        flops=_size(op_class, dims, traffic),
        weight=one,
        kinds=(key.kind,),
    )


def _group(op_class: str, record: Record) -> int:
    """Returns the shape group: rows of one are held out together."""
    dims = record.dims
    if op_class in _GROUPED_BY:
        shape: tuple[object, ...] = tuple(dims.get(name, 0) for name in _GROUPED_BY[op_class])
    else:
        rows = dims.get("rows") or dims.get("elements", 1)
        shape = (dims.get("cols", 0) if op_class in _WIDTHS else 0, int(2.0 * np.log2(rows)))
    return zlib.crc32(repr(shape).encode())


def _size(op_class: str, dims: Mapping[str, Floats], traffic: Floats) -> Floats:
    """Returns what extrapolation goes by: FLOPs, or bytes where an op is bound by them."""
    if op_class not in _GROUPED_BY:
        return traffic
    factors = [value for name, value in dims.items() if name not in EXTRA_DIMS | {"i"}]
    product: Floats = np.prod(np.maximum(factors, 1.0), axis=0)
    return product * dims["h"] if op_class == "rnn" else product
