"""A cost must not fall as an op grows: corrections that would make it do so are toned down.

Real libraries do take back a little where a better kernel becomes worth its while; `MOST_FALL` of
that is allowed from one grid point to the next.
"""

import itertools
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from simcore.op_forms import Device, OpCurve, Surface, Work, seconds

MOST_FALL = 0.08  # of a logarithm, from a grid point to the next
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
_TRAFFIC = 2.0 ** np.arange(8, 36)


def worst_fall(curve: OpCurve, op_class: str, dtype: str, device: Device) -> float:
    """Returns the largest fall of log seconds between neighbours of the class's grid, at least 0.

    Attention grows with both lengths at once.
    """
    lists = GRIDS.get(op_class.partition(".")[0])
    if lists is None:
        found = np.log(seconds(curve, Work({}, _TRAFFIC, dtype), device))
    else:
        points = np.array(list(itertools.product(*lists.values())))
        dims = {name: points[:, at] for at, name in enumerate(lists)}
        if "q" in dims:
            dims |= {"kv": dims["q"]}
        flat = np.log(seconds(curve, Work(dims, np.zeros(len(points)), dtype), device))
        found = flat.reshape([len(values) for values in lists.values()])
    falls = [
        -np.diff(found, axis=axis).min() for axis in range(found.ndim) if found.shape[axis] > 1
    ]
    return max(0.0, float(max(falls)))


def toned_down(curve: OpCurve, op_class: str, dtype: str, device: Device) -> OpCurve:
    """Returns the curve with as much of its corrections as lets it grow."""
    for share in _SHARES:
        surfaces = tuple(
            Surface(s.axes, s.knots, tuple(share * value for value in s.values))
            for s in curve.surfaces
        )
        found = msgspec.structs.replace(curve, surfaces=surfaces)
        if worst_fall(found, op_class, dtype, device) <= MOST_FALL:
            break
    return found if share else msgspec.structs.replace(curve, surfaces=())
