"""Hardware profiles: JSON text with provenance -> rates in SI units.

Rules that the numbers do not say by themselves:

- A dtype without a peak of its own (bf16 on a V100, integers) runs at the fp32 peak.
- fp32 convolutions and recurrent layers use TF32 where the device has it, fp32 matrix products do
  not: PyTorch's defaults (``cudnn.allow_tf32`` is true, ``cuda.matmul.allow_tf32`` is false).
- An op class without an entry, or an entry without the dtype, takes the efficiency of ``default``.
"""

import difflib
import math
from typing import Generic, Literal, NamedTuple, TypeVar

import msgspec

from simcore.errors import ProfileError
from simcore.op_forms import OpCurve, parameter_names
from simcore.signature import CLASS_NAMES
from simcore.units import GB, TERA, US, GiB, MiB

DEFAULT_CLASS = "default"
DEFAULT_RELATIVE_ERROR = 0.3  # of a rate whose source states none
_TF32_CLASSES = frozenset({"convolution", "rnn"})  # cuDNN's, where PyTorch allows TF32

T = TypeVar("T")


class Tagged(msgspec.Struct, Generic[T], frozen=True, forbid_unknown_fields=True):
    """A value and where it comes from.

    Attributes:
        value: the value, in the unit of its key.
        tag: ``spec`` (vendor's sheet), ``borrowed`` (someone's measurement or estimate) or
            ``fitted`` (from measurement records).
        source: who says so.
        date: when, as ``YYYY`` or ``YYYY-MM`` or ``YYYY-MM-DD``.
        relative_error: standard error divided by the value; None = not stated.
        num_samples: measurements behind a fitted value.
        software: versions it holds for.
    """

    value: T
    tag: Literal["spec", "borrowed", "fitted"]
    source: str
    date: str
    relative_error: float | None = None
    num_samples: int | None = None
    software: str | None = None


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fraction of the published peaks that an op class reaches, each in (0, 1]."""

    memory: float  # of the memory bandwidth
    compute: dict[str, float] = {}  # dtype -> fraction of its peak


class MeasuredOp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An op that was measured on the device.

    Attributes:
        target: what the framework calls it; "" = any op of the class, dtype and sizes.
        op_class: lower-case name of an `OpClass`.
        dtype: as in the op's signature.
        dims: name -> size, as in the signature at the batch it was measured at.
        traffic: bytes read and written, likewise.
        seconds: on the device, launch left out.
        relative_error: spread of the repeats / seconds.
        factor: of the FLOPs, as in the signature; None = any.
    """

    target: str
    op_class: str
    dtype: str
    dims: dict[str, int]
    traffic: int
    seconds: float
    relative_error: float
    factor: float | None = None


class SlowDown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many times longer work takes beside other work, each factor at least 1.

    Attributes:
        compute_beside_copy: op class (or ``default``) -> factor while a copy touches the device.
        compute_beside_collective: op class (or ``default``) -> factor beside a collective.
        copy_beside_compute: of a copy while one of its ends computes.
        collective_beside_compute: of a collective while a member computes.
    """

    compute_beside_copy: dict[str, float] = {}
    compute_beside_collective: dict[str, float] = {}
    copy_beside_compute: float = 1.0
    collective_beside_compute: float = 1.0


_ALONE = (1.0,) * len(CLASS_NAMES)


class Limits(NamedTuple):
    """What a device does at once, and how work slows other work there."""

    out_engines: int = 1  # copies that leave it at once, 0 = any number
    in_engines: int = 0  # copies that arrive at once, 0 = any number
    message_overhead: float = 0.0  # s of host time per message
    copy_beside_compute: float = 1.0
    collective_beside_compute: float = 1.0
    compute_beside_copy: tuple[float, ...] = _ALONE  # by OpClass
    compute_beside_collective: tuple[float, ...] = _ALONE  # by OpClass

    @property
    def slows(self) -> bool:
        """Whether any work slows any other."""
        factors = (self.copy_beside_compute, self.collective_beside_compute)
        return max(*factors, *self.compute_beside_copy, *self.compute_beside_collective) > 1.0


class HardwareProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device kind can do. Fields as in the file (with provenance); properties in SI units.

    Attributes:
        kind: the name that cluster files use.
        is_cpu: a host processor; ops of a fixed graph without CPU times cannot run on it.
        synchronous: the host itself executes the ops and waits for each.
        memory_GiB: what an allocator can get, not what the sheet says.
        peak_TFLOPS: dtype -> dense peak.
        efficiency: op class (or ``default``) -> fractions reached.
        out_engines: copies that leave at once, 0 = any number; not stated = 1.
        in_engines: copies that arrive at once, likewise; not stated = 0.
        message_overhead_us: host time per copy, send or receive; not stated = 0.
        slow_down: what work costs other work; not stated = nothing.
        launch_overhead_us: host time to issue one kernel from eager PyTorch.
        context_MiB: taken once a process uses the device.
        multiprocessors: number of them (compute units); curves need it.
        cache_MiB: last-level cache; curves need it.
        curves: op class -> dtype -> cost curve, see `simcore.op_curves`.
        measured: ops whose seconds are known, used before any curve.
        tagged_fragmentation: key ``fragmentation``; reserved / allocated - 1 of the allocator.
    """

    format: Literal["placewright-device-profile/1"]
    kind: str
    description: str
    is_cpu: bool
    synchronous: bool
    memory_GiB: Tagged[float]
    peak_TFLOPS: Tagged[dict[str, float]]
    memory_bandwidth_GBps: Tagged[float]
    launch_overhead_us: Tagged[float]
    context_MiB: Tagged[float]
    tagged_fragmentation: Tagged[float] = msgspec.field(name="fragmentation")
    efficiency: dict[str, Tagged[Efficiency]]
    out_engines: Tagged[int] | None = None
    in_engines: Tagged[int] | None = None
    message_overhead_us: Tagged[float] | None = None
    slow_down: Tagged[SlowDown] | None = None
    multiprocessors: Tagged[int] | None = None
    cache_MiB: Tagged[float] | None = None
    curves: dict[str, dict[str, Tagged[OpCurve]]] = {}
    measured: Tagged[list[MeasuredOp]] | None = None

    @property
    def limits(self) -> Limits:
        """What the device does at once; what the file does not say is as in `Limits`."""
        slow = SlowDown() if self.slow_down is None else self.slow_down.value
        overhead = self.message_overhead_us
        return Limits(
            out_engines=1 if self.out_engines is None else self.out_engines.value,
            in_engines=0 if self.in_engines is None else self.in_engines.value,
            message_overhead=0.0 if overhead is None else overhead.value * US,
            copy_beside_compute=slow.copy_beside_compute,
            collective_beside_compute=slow.collective_beside_compute,
            compute_beside_copy=_by_class(slow.compute_beside_copy),
            compute_beside_collective=_by_class(slow.compute_beside_collective),
        )

    @property
    def memory(self) -> int:
        """Capacity, bytes."""
        return round(self.memory_GiB.value * GiB)

    @property
    def memory_bandwidth(self) -> float:
        """Published memory bandwidth, bytes/s."""
        return self.memory_bandwidth_GBps.value * GB

    @property
    def launch_overhead(self) -> float:
        """Host time per kernel, s."""
        return self.launch_overhead_us.value * US

    @property
    def context(self) -> int:
        """Memory that a process takes by using the device, bytes."""
        return round(self.context_MiB.value * MiB)

    @property
    def fragmentation(self) -> float:
        """Reserved / allocated - 1 of the caching allocator."""
        return self.tagged_fragmentation.value

    def peak(self, dtype: str) -> float:
        """Returns the published FLOP/s of a dtype; a dtype without one has the fp32 peak."""
        peaks = self.peak_TFLOPS.value
        return peaks.get(dtype, peaks["fp32"]) * TERA

    def arithmetic(self, op_class: str, dtype: str) -> str:
        """Returns the dtype an op really computes in: see the rules at the top of this file."""
        peaks = self.peak_TFLOPS.value
        if dtype == "fp32" and op_class in _TF32_CLASSES and "tf32" in peaks:
            return "tf32"
        return dtype if dtype in peaks else "fp32"

    def flop_rate(self, op_class: str, dtype: str) -> float:
        """Returns the achievable FLOP/s of an op class in a dtype."""
        used = self.arithmetic(op_class, dtype)
        default = self.efficiency[DEFAULT_CLASS].value.compute[used]
        return self.peak(used) * self._efficiency(op_class).value.compute.get(used, default)

    def byte_rate(self, op_class: str) -> float:
        """Returns the achievable memory bytes/s of an op class."""
        return self.memory_bandwidth * self._efficiency(op_class).value.memory

    def relative_error(self, op_class: str) -> float:
        """Returns the relative standard error of the rates of an op class."""
        stated = self._efficiency(op_class).relative_error
        return DEFAULT_RELATIVE_ERROR if stated is None else stated

    def _efficiency(self, op_class: str) -> Tagged[Efficiency]:
        return self.efficiency.get(op_class, self.efficiency[DEFAULT_CLASS])


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one link of a kind carries. Fields as in the file; properties in SI units.

    Attributes:
        kind: the name that cluster files use.
        bandwidth_GBps: achievable in one direction, not nominal.
        latency_us: of one hop.
    """

    format: Literal["placewright-link-profile/1"]
    kind: str
    description: str
    bandwidth_GBps: Tagged[float]
    latency_us: Tagged[float]

    @property
    def bandwidth(self) -> float:
        """Achievable bandwidth of one direction, bytes/s."""
        return self.bandwidth_GBps.value * GB

    @property
    def latency(self) -> float:
        """Latency of one hop, s."""
        return self.latency_us.value * US


def parse_profile(text: bytes, source: str) -> HardwareProfile:
    """Returns a checked device profile from the content of its file.

    Args:
        text: JSON.
        source: file name, for messages; its stem must be the kind.

    Raises:
        ProfileError: naming the file, the key and the reason.
    """
    try:
        profile = msgspec.json.decode(text, type=HardwareProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProfileError(f"{source}: {error}") from None
    _check_kind(profile.kind, source)
    peaks = profile.peak_TFLOPS.value
    positive = {
        "memory_GiB": profile.memory_GiB.value,
        "memory_bandwidth_GBps": profile.memory_bandwidth_GBps.value,
    } | {f"peak_TFLOPS.{dtype}": value for dtype, value in peaks.items()}
    for key, value in positive.items():
        _check(value > 0 and math.isfinite(value), f"{source}: {key} must be positive, not {value}")
    not_negative = {
        "launch_overhead_us": profile.launch_overhead_us.value,
        "context_MiB": profile.context_MiB.value,
        "fragmentation": profile.fragmentation,
    }
    for key, value in not_negative.items():
        _check(0 <= value < math.inf, f"{source}: {key} must not be negative, but is {value}")
    _check("fp32" in peaks, f"{source}: peak_TFLOPS needs fp32, the peak of dtypes without one")
    _check_efficiency(profile, source)
    _check_limits(profile, source)
    _check_curves(profile, source)
    for place, op in enumerate(profile.measured.value if profile.measured else ()):
        _check(0 < op.seconds < math.inf, f"{source}: measured[{place}]: seconds {op.seconds}")
    return profile


def parse_link(text: bytes, source: str) -> LinkProfile:
    """Returns a checked link profile from the content of its file.

    Args:
        text: JSON.
        source: file name, for messages; its stem must be the kind.

    Raises:
        ProfileError: naming the file, the key and the reason.
    """
    try:
        profile = msgspec.json.decode(text, type=LinkProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProfileError(f"{source}: {error}") from None
    _check_kind(profile.kind, source)
    bandwidth, latency = profile.bandwidth_GBps.value, profile.latency_us.value
    _check(0 < bandwidth < math.inf, f"{source}: bandwidth_GBps must be positive, not {bandwidth}")
    _check(0 <= latency < math.inf, f"{source}: latency_us must not be negative, but is {latency}")
    return profile


def suggestion(name: str, known: list[str]) -> str:
    """Returns " (did you mean 'x'?)" where a known name is close, else nothing."""
    folded = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f" (did you mean {folded[close[0]]!r}?)" if close else ""


def _check_efficiency(profile: HardwareProfile, source: str) -> None:
    """Refuses unknown classes and dtypes, fractions outside (0, 1], and an incomplete default."""
    peaks = profile.peak_TFLOPS.value
    known = {*CLASS_NAMES, DEFAULT_CLASS}
    for op_class, tagged in profile.efficiency.items():
        where = f"{source}: efficiency.{op_class}"
        _check(op_class in known, f"{where}: unknown op class")
        for key, value in {"memory": tagged.value.memory, **tagged.value.compute}.items():
            _check(key == "memory" or key in peaks, f"{where}: peak_TFLOPS has no {key}")
            _check(0 < value <= 1, f"{where}.{key} must be above 0 and at most 1, not {value}")
    default = profile.efficiency.get(DEFAULT_CLASS)
    missing = set(peaks) - set(default.value.compute if default else ())
    _check(
        default is not None and not missing,
        f"{source}: efficiency.{DEFAULT_CLASS}.compute must give every dtype of peak_TFLOPS",
    )


def _check_curves(profile: HardwareProfile, source: str) -> None:
    """Refuses unknown classes, parameters that are missing, and surfaces that do not fit."""
    units, cache = profile.multiprocessors, profile.cache_MiB
    known = units is not None and cache is not None and units.value > 0 and cache.value > 0
    _check(known or not profile.curves, f"{source}: curves need multiprocessors and cache_MiB")
    for op_class, by_dtype in profile.curves.items():
        name, _, gradient = op_class.partition(".")
        good = name in CLASS_NAMES and gradient in ("", "I", "W", "B")
        _check(good, f"{source}: curves.{op_class}: unknown op class")
        for dtype, tagged in by_dtype.items():
            where, curve = f"{source}: curves.{op_class}.{dtype}", tagged.value
            missing = sorted(parameter_names(curve.form, name) - set(curve.parameters))
            _check(not missing, f"{where}: no parameter {', '.join(missing)}")
            for key, value in curve.parameters.items():
                _check(0 < value < math.inf, f"{where}.{key} must be positive, not {value}")
            for surface in curve.surfaces:
                _check(surface.fits(), f"{where}: a surface has wrong knots or values")


def _by_class(factors: dict[str, float]) -> tuple[float, ...]:
    default = factors.get(DEFAULT_CLASS, 1.0)
    return tuple(factors.get(name, default) for name in CLASS_NAMES)


def _check_limits(profile: HardwareProfile, source: str) -> None:
    """Refuses unknown classes, factors below 1, and counts and times that are negative."""
    limits = profile.limits
    _check(limits.out_engines >= 0, f"{source}: out_engines must not be negative")
    _check(limits.in_engines >= 0, f"{source}: in_engines must not be negative")
    overhead = limits.message_overhead
    _check(0 <= overhead < math.inf, f"{source}: message_overhead_us must not be negative")
    slow = SlowDown() if profile.slow_down is None else profile.slow_down.value
    factors = {
        "copy_beside_compute": slow.copy_beside_compute,
        "collective_beside_compute": slow.collective_beside_compute,
    }
    for key in ("compute_beside_copy", "compute_beside_collective"):
        for op_class, factor in getattr(slow, key).items():
            known = op_class in CLASS_NAMES or op_class == DEFAULT_CLASS
            _check(known, f"{source}: slow_down.{key}.{op_class}: unknown op class")
            factors[f"{key}.{op_class}"] = factor
    for key, factor in factors.items():
        good = 1 <= factor < math.inf
        _check(good, f"{source}: slow_down.{key} must be at least 1, not {factor}")


def _check_kind(kind: str, source: str) -> None:
    _check(f"{kind}.json" == source, f"{source}: kind is {kind!r}; it must be the file's name")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ProfileError(message)
