"""A cost must not fall as an op grows, nor grow without data: such corrections are toned down.

Real libraries do take back a little where a better kernel becomes worth its while; `MOST_FALL` of
that is allowed from one grid point to the next. Beyond the largest sizes that were measured, a
correction may grow by `MOST_RISE` in all.
"""

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from simcore.op_forms import Device, Floats, OpCurve, Surface, Work, correction, seconds

MOST_FALL = 0.08  # of a logarithm, from a grid point to the next
MOST_RISE = 0.2  # of a logarithm, of a correction, beyond the largest size in the data
_SHARES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)

GRIDS: Mapping[str, Mapping[str, Sequence[float]]] = {
    "matmul": {
        "m": [2.0**e for e in range(5, 14)], "n": [128.0, 1024.0, 4096.0],
        "k": [64.0, 512.0, 4096.0],
    },
    "batched_matmul": {
        "b": [1.0, 16.0, 256.0], "m": [64.0, 512.0, 2048.0], "n": [64.0, 1024.0],
        "k": [64.0, 1024.0],
    },
    "convolution": {
        "n": [1.0, 8.0, 64.0], "k": [64.0, 512.0], "out": [49.0, 784.0, 12544.0],
        "c": [64.0, 512.0], "filter": [1.0],
    },
    "attention": {
        "b": [1.0, 8.0, 64.0], "h": [8.0, 32.0], "q": [128.0, 1024.0, 8192.0],
        "d": [64.0, 128.0],
    },
    "rnn": {
        "t": [1.0, 25.0, 400.0], "b": [16.0, 64.0], "dirs": [1.0, 2.0], "gates": [4.0],
        "h": [512.0, 2048.0], "i": [512.0, 2048.0],
    },
}  # fmt: skip
_BYTES: Mapping[str, Sequence[float]] = {  # of ops that are costed by their bytes
    "traffic": [2.0**e for e in range(8, 36)],
    "cols": [0.0, 64.0, 1024.0, 8192.0, 65536.0],
}
_FURTHER = 2.0 ** np.arange(8)  # times the largest size


def worst_fall(curve: OpCurve, op_class: str, dtype: str, device: Device) -> float:
    """Returns the largest fall of log seconds between neighbours of the class's grid, at least 0.

    Attention grows with both lengths at once; a width is no size by itself.
    """
    lists = _lists(op_class)
    found = np.log(seconds(curve, _grid(lists, dtype), device))
    found = found.reshape([len(values) for values in lists.values()])
    falls = [
        -np.diff(found, axis=axis).min()
        for axis, (name, values) in enumerate(lists.items())
        if len(values) > 1 and name != "cols"
    ]
    return max(0.0, float(max(falls)))


def worst_rise(curve: OpCurve, op_class: str, dtype: str) -> float:
    """Returns by how much a correction grows at most beyond the data, a logarithm, at least 0.

    Each size by itself goes on from its largest knot, or the grid's largest, to 128 times of it.
    """
    lists = _lists(op_class)
    return max(_rise(lists, axis, curve, dtype) for axis in lists if axis != "cols")


def _rise(lists: Mapping[str, Sequence[float]], axis: str, curve: OpCurve, dtype: str) -> float:
    named = "span" if axis == "q" else axis
    ends = [s.knots[s.axes.index(named)][-1] for s in curve.surfaces if named in s.axes]
    start = max(lists[axis][-1] if axis != "traffic" else 0.0, 2.0 ** max(ends, default=0.0))
    further = {axis: start * _FURTHER} | {n: v for n, v in lists.items() if n != axis}
    found = correction(curve.surfaces, _grid(further, dtype)).reshape(len(_FURTHER), -1)
    return max(0.0, float((found - found[0]).max()))


def _lists(op_class: str) -> Mapping[str, Sequence[float]]:
    return GRIDS.get(op_class.partition(".")[0], _BYTES)


def _grid(lists: Mapping[str, Sequence[float] | Floats], dtype: str) -> Work:
    """Returns ops at all combinations of sizes, the last size fastest; both lengths are equal."""
    points = np.array(list(itertools.product(*lists.values())))
    dims = {name: points[:, at] for at, name in enumerate(lists)}
    if "q" in dims:
        dims |= {"kv": dims["q"]}
    traffic = dims.pop("traffic", np.zeros(len(points)))
    return Work(dims, traffic, dtype)


def toned_down(curve: OpCurve, op_class: str, dtype: str, device: Device) -> OpCurve:
    """Returns the curve with as much of its corrections as lets it grow."""
    for share in _SHARES:
        surfaces = tuple(
            Surface(s.axes, s.knots, tuple(share * value for value in s.values))
            for s in curve.surfaces
        )
        found = msgspec.structs.replace(curve, surfaces=surfaces)
        falls = worst_fall(found, op_class, dtype, device) > MOST_FALL
        if not falls and worst_rise(found, op_class, dtype) <= MOST_RISE:
            break
    return found if share else msgspec.structs.replace(curve, surfaces=())
