"""Forms of op cost curves: sizes and a device's peaks -> seconds of the kernel, many ops at once.

A curve is a physical form with a few parameters, each a fraction of a published peak or a time of
the device, times correction surfaces: piecewise multilinear in the logarithms of the op's sizes.
The parameters carry over to another device with its peaks; the surfaces are what its libraries do.

- ``tiles``: matrix products and convolutions as products. The fastest of a set of tile shapes and
  splits of K; each runs in whole waves over the multiprocessors, smaller tiles reuse less (as in
  CUTLASS and in tile models like NeuSight's), and all are bound by the memory.
- ``attention``: fused attention over blocks of 128 queries, masked halves skipped where causal.
- ``recurrent``: time step after time step, then the product with the input for all steps.
- ``bandwidth``: bytes at a bandwidth that is higher while they fit the last-level cache.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Form = Literal["tiles", "attention", "recurrent", "bandwidth"]

_TILES = (
    (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 64), (64, 32),
    (16, 64), (32, 32),
)  # fmt: skip
_SPLITS = (1, 2, 4, 8, 16, 32)
_CONFIGURATIONS = np.array([(m, n, s) for m, n in _TILES for s in _SPLITS], np.float64)
_K_STEP = 32.0  # K is walked in steps of this many elements
_ALIGNMENT = 8  # elements: 16 bytes of a 16-bit type, what tensor cores load at once
_QUERY_BLOCK = 128.0
_US = 1e-6
_SIZES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
TENSOR_CORE_DTYPES = frozenset({"fp16", "bf16", "fp8", "tf32"})
EXTRA_DIMS = frozenset(
    {"causal", "cols", "kv_heads", "rows", "stride"}
)  # a signature may lack them


class Device(NamedTuple):
    """What a form needs of a device; a number, or one value per op."""

    peak: float | Floats  # FLOP/s of the dtype
    bandwidth: float | Floats  # bytes/s of the memory
    units: float | Floats  # multiprocessors
    cache: float | Floats  # bytes of the last-level cache


class Work(NamedTuple):
    """Ops of one class and dtype."""

    dims: Mapping[str, Floats]  # name -> [op] size, 0 where not known
    traffic: Floats  # [op] bytes, 0 where not known
    dtype: str

    def dim(self, name: str) -> Floats:
        """Returns a dimension, [op]; zeros where no op has it."""
        found = self.dims.get(name)
        return np.zeros(len(self.traffic)) if found is None else found


class Surface(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A correction of the logarithm of the seconds.

    Attributes:
        axes: names of dimensions, ``traffic``, ``heads`` (b x h), ``span`` (root of q x kv) or
            ``work`` (FLOPs: a long kernel meets the power limit); an op that lacks one is not
            corrected.
        knots: per axis, ascending base-2 logarithms of sizes; beyond them the ends hold.
        values: at the knots, the last axis fastest; natural logarithms.
    """

    axes: tuple[str, ...]
    knots: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]

    def fits(self) -> bool:
        """Whether every axis has ascending knots and every knot its finite value."""
        ascending = all(len(at) > 1 and bool((np.diff(at) > 0).all()) for at in self.knots)
        number = int(np.prod([len(at) for at in self.knots]))
        same = len(self.axes) == len(self.knots) and len(self.values) == number
        return ascending and same and bool(np.isfinite(self.values).all())


class HeldOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Errors |predicted / measured - 1| on rows that the fit did not see."""

    cases: int
    median: float
    p90: float
    bias: float  # median of predicted / measured - 1


class OpCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of the ops of one class in one dtype on one device kind.

    Attributes:
        form: see the top of this file.
        parameters: of the form.
        surfaces: corrections, added up.
        held_out: ``interpolation``, ``extrapolation``, ``device left out`` -> errors.
        standard_errors: of the logarithms of the parameters.
        outcome: what the fit could do: ``full``, ``few samples`` or ``borrowed``.
    """

    form: Form
    parameters: dict[str, float]
    surfaces: tuple[Surface, ...] = ()
    held_out: dict[str, HeldOut] = {}
    standard_errors: dict[str, float] = {}
    outcome: str = "full"


def seconds(curve: OpCurve, work: Work, device: Device) -> Floats:
    """Returns the seconds of every op, [op]; launching it is not part of them."""
    base = FORMS[curve.form](curve.parameters, work, device)
    return base * np.exp(correction(curve.surfaces, work))


def correction(surfaces: tuple[Surface, ...], work: Work) -> Floats:
    """Returns the sum of the surfaces at the sizes of every op, [op]."""
    total = np.zeros(len(work.traffic))
    for surface in surfaces:
        coordinates, known = surface_coordinates(surface.axes, work)
        corners, weights = hat_weights(coordinates, surface.knots)
        found = (np.array(surface.values)[corners] * weights).sum(axis=1)
        total += np.where(known, found, 0.0)
    return total


def surface_coordinates(
    axes: tuple[str, ...], work: Work
) -> tuple[list[Floats], NDArray[np.bool_]]:
    """Returns base-2 logarithms per axis, [axis][op], and which ops have them all, [op]."""
    sizes = [_axis(name, work) for name in axes]
    known = np.logical_and.reduce([size > 0 for size in sizes])
    return [np.log2(np.maximum(size, 1.0)) for size in sizes], known


def hat_weights(
    coordinates: list[Floats], knots: tuple[tuple[float, ...], ...]
) -> tuple[NDArray[np.int64], Floats]:
    """Returns the corners of the cell of every op and their weights, both [op, 2^axes]."""
    number = len(coordinates[0])
    corners, weights = np.zeros((number, 1), np.int64), np.ones((number, 1))
    for coordinate, axis in zip(coordinates, knots, strict=True):
        at = np.asarray(axis)
        inside = np.clip(coordinate, at[0], at[-1])
        low = np.clip(np.searchsorted(at, inside, side="right") - 1, 0, len(at) - 2)
        share = ((inside - at[low]) / (at[low + 1] - at[low]))[:, None]
        start = corners * len(at) + low[:, None]
        corners = np.concatenate([start, start + 1], axis=1)
        weights = np.concatenate([weights * (1.0 - share), weights * share], axis=1)
    return corners, weights


def product_sizes(work: Work) -> tuple[Floats, Floats, Floats, Floats]:
    """Returns b, m, n, k of the ops, [op] each; a convolution as the product it amounts to."""
    if "filter" in work.dims:
        positions = work.dim("n") * work.dim("out")
        return np.ones(len(positions)), positions, work.dim("k"), work.dim("c") * work.dim("filter")
    batch = np.maximum(work.dim("b"), 1.0)
    return batch, work.dim("m"), work.dim("n"), work.dim("k")


def _axis(name: str, work: Work) -> Floats:
    if name == "traffic":
        return work.traffic
    if name == "heads":
        return work.dim("b") * work.dim("h")
    if name == "span":
        return np.sqrt(work.dim("q") * work.dim("kv"))
    if name == "work":
        b, m, n, k = product_sizes(work)
        return 2.0 * b * m * n * k
    if "filter" in work.dims and name in ("m", "n", "k"):
        return product_sizes(work)["bmnk".index(name)]
    return work.dim(name)


def _column(value: float | Floats) -> float | Floats:
    """Makes values of ops into a column beside the configurations."""
    return value[:, None] if isinstance(value, np.ndarray) else value


def _memory_rate(parameters: Mapping[str, float], num_bytes: Floats, device: Device) -> Floats:
    """Returns achievable bytes/s, with the bytes' shape: cached ones are faster."""
    reach = parameters["cache_share"] * _column_like(device.cache, num_bytes)
    cached = reach / (reach + num_bytes)
    inverse = (1.0 - cached) / parameters["memory"] + cached / parameters["cache"]
    rate: Floats = _column_like(device.bandwidth, num_bytes) / inverse
    return rate


def _column_like(value: float | Floats, like: Floats) -> float | Floats:
    return _column(value) if like.ndim == 2 else value


def _tiles(parameters: Mapping[str, float], work: Work, device: Device) -> Floats:
    size = _SIZES.get(work.dtype, 4.0)
    b, m, n, k = (value[:, None] for value in product_sizes(work))
    tile_m, tile_n, split = _CONFIGURATIONS.T
    waves = np.ceil(b * np.ceil(m / tile_m) * np.ceil(n / tile_n) * split / _column(device.units))
    steps = np.ceil(k / split / _K_STEP) * _K_STEP
    rate = parameters["compute"] * _column(device.peak) / _column(device.units)
    reuse = 1.0 + parameters["edge"] * (1.0 / tile_m + 1.0 / tile_n)
    one_tile = steps * 2.0 * tile_m * tile_n * reuse / rate + parameters["start_us"] * _US
    compute = waves * one_tile
    if "filter" in work.dims:
        compute = compute / _fewer_products(parameters, work)[:, None]
    elif work.dtype in TENSOR_CORE_DTYPES:
        aligned = (n % _ALIGNMENT == 0) & (k % _ALIGNMENT == 0)
        compute = compute * np.where(aligned, 1.0, 1.0 + parameters["misaligned"])
    operands = size * b * (m * k + k * n + m * n)
    moved = np.where(work.traffic[:, None] > 0, work.traffic[:, None], operands)
    moved = moved + np.where(split > 1, 4.0 * b * m * n * split, 0.0)  # partial sums, fp32
    memory = moved / _memory_rate(parameters, moved, device)
    both = (compute**4 + memory**4) ** 0.25 + np.where(split > 1, parameters["split_us"] * _US, 0.0)
    fastest: Floats = both.min(axis=1)
    return parameters["floor_us"] * _US + fastest


def _fewer_products(parameters: Mapping[str, float], work: Work) -> Floats:
    """Returns what Winograd (3 x 3, stride 1) or Fourier transforms (larger) save, [op]."""
    size, stride = work.dim("filter"), work.dim("stride")
    gain = np.where(size > 9, parameters["large_filter"], 1.0)
    return np.where((size == 9) & (stride <= 1), parameters["filter_9"], gain)


def _attention(parameters: Mapping[str, float], work: Work, device: Device) -> Floats:
    size = _SIZES.get(work.dtype, 4.0)
    b, h, q, kv, d = (work.dim(name) for name in ("b", "h", "q", "kv", "d"))
    heads, blocks = b * h, np.ceil(q / _QUERY_BLOCK)
    causal = (work.dim("causal") > 0) & (q > 1)
    longest = np.ceil(kv / _QUERY_BLOCK) * _QUERY_BLOCK
    mean = np.where(causal, np.minimum((longest + _QUERY_BLOCK) / 2.0, longest), longest)
    depth = 1.0 + parameters["depth"] / np.maximum(d, 1.0)  # softmax beside the products
    rate = parameters["compute"] * device.peak / depth
    work_of_row = 4.0 * d * _QUERY_BLOCK
    waves = np.ceil(heads * blocks / device.units)
    whole = np.where(causal, heads * blocks / device.units, waves)
    together = work_of_row * mean * whole / (rate / device.units)
    alone = work_of_row * longest / (parameters["alone"] * rate / device.units)
    groups = np.where(work.dim("kv_heads") > 0, work.dim("kv_heads"), h)
    operands = size * b * d * (2.0 * h * q + 2.0 * groups * kv)
    moved = np.where(work.traffic > 0, work.traffic, operands)
    memory = moved / _memory_rate(parameters, moved, device)
    return parameters["floor_us"] * _US + (together**4 + alone**4 + memory**4) ** 0.25


def _recurrent(parameters: Mapping[str, float], work: Work, device: Device) -> Floats:
    size = _SIZES.get(work.dtype, 4.0)
    t, b, dirs, gates, h, i = (work.dim(name) for name in ("t", "b", "dirs", "gates", "h", "i"))
    rate = parameters["compute"] * device.peak
    weights = size * gates * h * h
    rows = np.maximum(b, 1.0)
    padded = np.ceil(rows / _K_STEP) * _K_STEP
    step = ((2.0 * padded * gates * h * h / rate) ** 4
            + (weights / _memory_rate(parameters, weights, device)) ** 4) ** 0.25  # fmt: skip
    inputs = 2.0 * t * b * dirs * gates * h * i / (parameters["input"] * device.peak)
    one_by_one = t * dirs * (parameters["step_us"] * _US + step)
    return parameters["floor_us"] * _US + one_by_one + inputs


def _bandwidth(parameters: Mapping[str, float], work: Work, device: Device) -> Floats:
    moved = np.where(work.traffic > 0, work.traffic, 8.0 * work.dim("elements"))
    return parameters["floor_us"] * _US + moved / _memory_rate(parameters, moved, device)


FORMS: Mapping[Form, Callable[[Mapping[str, float], Work, Device], Floats]] = {
    "tiles": _tiles,
    "attention": _attention,
    "recurrent": _recurrent,
    "bandwidth": _bandwidth,
}
_SHARED = {"floor_us": 3.0, "memory": 0.85, "cache": 2.0, "cache_share": 0.2}
DEFAULTS: Mapping[Form, Mapping[str, float]] = {
    "tiles": _SHARED
    | {"compute": 1.2, "edge": 60.0, "start_us": 1.5, "split_us": 0.5, "misaligned": 0.5},
    "attention": _SHARED | {"compute": 0.7, "depth": 16.0, "alone": 1.0},
    "recurrent": _SHARED | {"compute": 0.3, "input": 0.6, "step_us": 5.0},
    "bandwidth": _SHARED,
}
CONVOLUTION_DEFAULTS: Mapping[str, float] = {"filter_9": 1.5, "large_filter": 1.2}


def parameter_names(form: Form, op_class: str) -> set[str]:
    """Returns the parameters that a curve of an op class needs."""
    more = CONVOLUTION_DEFAULTS if op_class == "convolution" else {}
    return {*DEFAULTS[form], *more}
