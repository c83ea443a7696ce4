"""Fits the forms of `simcore.op_forms` to seconds: parameters first, then correction surfaces.

Residuals are of logarithms and robust (soft L1, then Huber weights). Surfaces are penalised least
squares on hat functions; their stiffness, and whether there is one at all, is chosen by
cross-validation over shape groups. Fewer samples leave fewer free parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve
from scipy.optimize import least_squares
from scipy.sparse import block_diag, csr_matrix, diags, hstack, identity, kron, vstack

from calibration.op_growth import toned_down
from simcore.op_forms import (
    CONVOLUTION_DEFAULTS,
    DEFAULTS,
    FORMS,
    Device,
    Floats,
    Form,
    OpCurve,
    Surface,
    Work,
    hat_weights,
    seconds,
    surface_coordinates,
)

MAX_ROWS = 1000  # of the fit of the parameters; the surfaces see all
FOLDS = 3
STIFFNESS = (0.02, 0.2, 2.0)  # candidates; of first and second differences
KNOT_SHARES = (1.0, 0.5, 0.25)  # of the most knots that a surface may have; candidates
_WORTH = 1.05  # smaller surfaces are taken where their held-out loss is within this of the best
_SMALL = 100  # values; fewer are not worth saving
_RIDGE = 1e-2
_HUBER = 0.1  # of a logarithm: 10 %
_BORROWED = 0.02  # residual of a prior by which a parameter goes away from it, per log unit

# what few samples can still tell; with more, all parameters are free
_FEW: Mapping[Form, tuple[str, ...]] = {
    "tiles": ("compute", "memory", "floor_us"),
    "attention": ("compute", "floor_us"),
    "recurrent": ("compute", "step_us"),
    "bandwidth": ("memory", "floor_us"),
}
_BOUNDS: Mapping[str, tuple[float, float]] = {  # what physics and other measurements allow
    "floor_us": (1.0, 12.0), "memory": (0.25, 1.0), "cache": (0.2, 10.0),
    "cache_share": (0.02, 2.0), "compute": (0.05, 12.0), "edge": (1.0, 600.0),
    "start_us": (0.05, 20.0), "split_us": (0.1, 20.0), "misaligned": (0.01, 8.0),
    "depth": (0.5, 200.0), "alone": (0.1, 4.0), "input": (0.05, 2.0), "step_us": (0.5, 200.0),
    "filter_9": (0.5, 2.5), "large_filter": (0.3, 6.0),
}  # fmt: skip
_Shapes = tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
# op class -> alternatives that cross-validation chooses from: surfaces (axes, most knots per axis)
_AXES: Mapping[str, tuple[_Shapes, ...]] = {
    "matmul": (((("m", "n", "k"), (11, 9, 9)),),),
    "batched_matmul": (((("m", "n", "k"), (8, 8, 8)), (("b",), (6,)), (("work",), (10,))),),
    "convolution": (
        ((("m",), (4,)), (("n",), (4,)), (("k",), (5,))),
        ((("m", "n", "k"), (4, 4, 5)), (("filter",), (5,))),
        ((("traffic",), (5,)), (("filter",), (4,))),
    ),
    "attention": (
        ((("span", "heads"), (12, 10)), (("span", "b", "kv_heads"), (9, 7, 7)), (("d",), (4,))),
    ),
    "rnn": (
        ((("b", "h"), (4, 5)), (("gates",), (3,)), (("t",), (4,))),
        ((("b",), (4,)), (("h",), (5,)), (("gates",), (3,)), (("t",), (4,))),
    ),
}
_OTHER_AXES: tuple[_Shapes, ...] = (
    ((("traffic",), (12,)), (("cols",), (8,))),
    ((("traffic", "cols"), (7, 6)), (("cols",), (8,))),
)
_FORMS: Mapping[str, Form] = {
    "matmul": "tiles",
    "batched_matmul": "tiles",
    "convolution": "tiles",
    "attention": "attention",
    "rnn": "recurrent",
}


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Measured ops of one class and dtype, of one device or several."""

    op_class: str
    work: Work
    device: Device  # each field one value per op
    seconds: Floats  # [op] s of the kernel
    group: NDArray[np.int64]  # [op] shape group
    flops: Floats  # [op] size that extrapolation goes by: FLOPs, or bytes
    weight: Floats  # [op] of the surfaces' squares
    kinds: tuple[str, ...] = ()  # of the devices

    def take(self, rows: NDArray[Any]) -> "Samples":
        """Returns some of the samples, by index or mask."""
        dims = {name: value[rows] for name, value in self.work.dims.items()}
        device = Device(*(np.asarray(value)[rows] for value in self.device))
        return replace(
            self,
            work=Work(dims, self.work.traffic[rows], self.work.dtype),
            device=device,
            seconds=self.seconds[rows],
            group=self.group[rows],
            flops=self.flops[rows],
            weight=self.weight[rows],
        )

    def __len__(self) -> int:
        return len(self.seconds)


def form_of(op_class: str) -> Form:
    """Returns the form that an op class has."""
    return _FORMS.get(op_class.partition(".")[0], "bandwidth")


def fit_curve(samples: Samples, start: OpCurve | None = None, *, surfaces: bool = True) -> OpCurve:
    """Returns the curve of some samples.

    Args:
        samples: of one device, or of several for the curve of a class.
        start: the class's curve, to which parameters that the samples do not tell stay near.
        surfaces: whether there may be corrections; those of one device's libraries mean little for
            another's, so a class has none.
    """
    parameters, errors, outcome = _fit_parameters(samples, start)
    curve = OpCurve(form_of(samples.op_class), parameters, (), {}, errors, outcome)
    found = _choose_surfaces(samples, curve) if surfaces else ()
    whole = OpCurve(curve.form, parameters, found, {}, errors, outcome)
    if not found:
        return whole
    typical = Device(*(float(np.median(np.asarray(value))) for value in samples.device))
    return toned_down(whole, samples.op_class, samples.work.dtype, typical)


def pooled(parts: Sequence[Samples]) -> Samples:
    """Returns the samples of several devices as one, each device with the same weight."""
    names = sorted(set.intersection(*(set(part.work.dims) for part in parts)))
    dims = {name: np.concatenate([part.work.dims[name] for part in parts]) for name in names}
    fields = zip(*(part.device for part in parts), strict=True)
    mean = np.mean([len(part) for part in parts])
    return Samples(
        op_class=parts[0].op_class,
        work=Work(dims, np.concatenate([part.work.traffic for part in parts]), parts[0].work.dtype),
        device=Device(*(np.concatenate(list(map(np.atleast_1d, field))) for field in fields)),
        seconds=np.concatenate([part.seconds for part in parts]),
        group=np.concatenate([part.group for part in parts]),
        flops=np.concatenate([part.flops for part in parts]),
        weight=np.concatenate([np.full(len(part), mean / len(part)) for part in parts]),
        kinds=tuple(kind for part in parts for kind in part.kinds),
    )


def predict(curve: OpCurve, samples: Samples) -> Floats:
    """Returns the seconds that a curve gives to samples."""
    return seconds(curve, samples.work, samples.device)


def _fit_parameters(
    samples: Samples, start: OpCurve | None
) -> tuple[dict[str, float], dict[str, float], str]:
    form = form_of(samples.op_class)
    begin = dict(DEFAULTS[form] if start is None else start.parameters)
    if start is None and samples.op_class.startswith("convolution"):
        begin |= CONVOLUTION_DEFAULTS
    few = len(samples) < 6 * len(begin)
    free = _FEW[form] if few else tuple(begin)
    free = tuple(name for name in free if name != "misaligned")  # see `calibration.op_fit`
    rows = np.random.default_rng(0).permutation(len(samples))[:MAX_ROWS]
    sample = samples.take(rows)
    low, high = _bounds(free)
    centre = np.clip(np.log([begin[name] for name in free]), low + 1e-3, high - 1e-3)
    log_seconds = np.log(sample.seconds)

    def residuals(point: Floats) -> Floats:
        parameters = begin | dict(zip(free, np.exp(point), strict=True))
        base = FORMS[form](parameters, sample.work, sample.device)
        prior = _BORROWED * np.sqrt(len(sample)) * (point - centre) * (1.0 if few else 0.1)
        return np.concatenate([np.log(base) - log_seconds, prior])

    found = least_squares(
        residuals, centre, loss="soft_l1", f_scale=_HUBER, bounds=(low, high), max_nfev=30,
    )  # fmt: skip
    noise = float(np.mean(found.fun**2))
    inverse = np.linalg.pinv(found.jac.T @ found.jac)
    deviation = np.sqrt(np.maximum(np.diag(inverse) * noise, 0.0))
    parameters = begin | {name: float(np.exp(v)) for name, v in zip(free, found.x, strict=True)}
    errors = {name: float(value) for name, value in zip(free, deviation, strict=True)}
    return parameters, errors, "few samples" if few else "full"


def _bounds(names: Sequence[str]) -> tuple[Floats, Floats]:
    low, high = np.log([_BOUNDS[name] for name in names]).T
    return low, high


def _choose_surfaces(samples: Samples, curve: OpCurve) -> tuple[Surface, ...]:
    """Returns the surfaces that predict held-out shape groups best; none where none helps.

    Of large ones that do about as well, the smallest.
    """
    wanted = np.log(samples.seconds / predict(curve, samples))
    found = []
    for shapes in _alternatives(samples):
        system = _System(shapes, samples.work)
        losses = [_held_out_loss(system, samples, wanted, each) for each in STIFFNESS]
        best = int(np.argmin(losses))
        found.append((losses[best], system.size, system, STIFFNESS[best]))
    least = min((loss for loss, *_ in found), default=np.inf)
    if not least < 0.98 * float(np.mean(_huber(wanted))):
        return ()
    good = [each for each in found if each[0] <= _WORTH * least]
    _, _, system, stiffness = min(good, key=lambda each: (max(each[1], _SMALL), each[0]))
    point = system.solve(wanted, samples.weight, stiffness)
    return _monotone(system.surfaces(point), curve, samples)


def _alternatives(samples: Samples) -> Iterator[list[Any]]:
    """Yields lists of (axes, knots) that the samples can fill, each once."""
    seen = set()
    for shapes in _AXES.get(samples.op_class.partition(".")[0], _OTHER_AXES):
        for share in KNOT_SHARES:
            filled = [
                (axes, _knots(samples, axes, [_fewer(n, share, len(axes)) for n in most]))
                for axes, most in shapes
            ]
            filled = [(axes, knots) for axes, knots in filled if min(map(len, knots)) >= 2]
            if filled and str(filled) not in seen:
                seen.add(str(filled))
                yield filled


def _fewer(most: int, share: float, axes: int) -> int:
    """Returns the knots of one axis, so that a surface has a share of its values."""
    return max(2, round(float(most * share ** (1.0 / axes))))


def _held_out_loss(system: "_System", samples: Samples, wanted: Floats, stiffness: float) -> float:
    """Returns the mean robust loss on shape groups that the surfaces did not see."""
    fold = samples.group % FOLDS
    loss = 0.0
    for held in range(FOLDS):
        inside = fold != held
        if inside.any():
            point = system.solve(wanted, samples.weight * inside, stiffness)
            loss += float(_huber((wanted - system.matrix @ point)[~inside]).sum())
    return loss / len(samples)


def _huber(residual: Floats) -> Floats:
    size = np.abs(residual)
    loss: Floats = np.where(size < _HUBER, 0.5 * size**2, _HUBER * (size - 0.5 * _HUBER))
    return loss


def _knots(
    samples: Samples, axes: tuple[str, ...], most: Sequence[int]
) -> tuple[tuple[float, ...], ...]:
    """Returns knots at sizes that occur, fewer per axis where samples are few."""
    coordinates, known = surface_coordinates(axes, samples.work)
    number = max(1, int((known.sum() / 4.0) ** (1.0 / len(axes))))
    return tuple(
        _thinned(np.unique(np.round(values[known], 4)), min(limit, number))
        for values, limit in zip(coordinates, most, strict=True)
    )


def _thinned(values: Floats, number: int) -> tuple[float, ...]:
    if len(values) <= number:
        return tuple(map(float, values))
    chosen = {
        int(np.abs(values - at).argmin()) for at in np.linspace(values[0], values[-1], number)
    }
    return tuple(float(values[i]) for i in sorted(chosen))


class _System:
    """The linear system of the values of some surfaces."""

    def __init__(
        self, shapes: Sequence[tuple[tuple[str, ...], tuple[tuple[float, ...], ...]]], work: Work
    ) -> None:
        self.shapes = shapes
        self.matrix = hstack([_design(axes, knots, work) for axes, knots in shapes]).tocsr()
        self.size = int(self.matrix.shape[1])

    def solve(self, wanted: Floats, weight: Floats, stiffness: float) -> Floats:
        """Returns values by penalised least squares with Huber weights."""
        penalty = block_diag([_penalty(knots, stiffness) for _, knots in self.shapes]).tocsr()
        smooth = (penalty.T @ penalty).toarray() + _RIDGE * np.eye(self.matrix.shape[1])
        robust, point = weight, np.zeros(self.matrix.shape[1])
        for _ in range(3):
            weighted = diags(robust) @ self.matrix
            normal = (self.matrix.T @ weighted).toarray() + smooth
            point = solve(normal, weighted.T @ wanted, assume_a="pos", overwrite_a=True)
            distance = np.abs(wanted - self.matrix @ point)
            robust = weight * np.minimum(1.0, _HUBER / np.maximum(distance, 1e-12))
        return np.asarray(point, np.float64)

    def surfaces(self, point: Floats) -> tuple[Surface, ...]:
        """Returns the surfaces of a solution."""
        found, at = [], 0
        for axes, knots in self.shapes:
            size = int(np.prod([len(axis) for axis in knots]))
            found.append(Surface(axes, knots, tuple(map(float, point[at : at + size]))))
            at += size
        return tuple(found)


def _design(axes: tuple[str, ...], knots: tuple[tuple[float, ...], ...], work: Work) -> csr_matrix:
    coordinates, known = surface_coordinates(axes, work)
    corners, weights = hat_weights(coordinates, knots)
    rows = np.repeat(np.arange(len(known)), corners.shape[1])
    size = int(np.prod([len(axis) for axis in knots]))
    values = (weights * known[:, None]).ravel()
    return csr_matrix((values, (rows, corners.ravel())), (len(known), size))


def _penalty(knots: tuple[tuple[float, ...], ...], stiffness: float) -> csr_matrix:
    """Returns first and second differences along every axis, times the root of the stiffness."""
    rows = []
    for axis, at in enumerate(knots):
        steps = np.diff(at)
        slope = diags([-1.0 / steps, 1.0 / steps], [0, 1], shape=(len(steps), len(at)))
        differences = [slope]
        if len(steps) > 1:
            shape = (len(steps) - 1, len(steps))
            differences.append(diags([-1.0, 1.0], [0, 1], shape=shape) @ slope)
        for difference in differences:
            product = np.ones((1, 1))
            for other, values in enumerate(knots):
                factor = difference if other == axis else identity(len(values))
                product = kron(product, factor)
            rows.append(np.sqrt(stiffness) * product)
    return vstack(rows).tocsr()


def _monotone(
    surfaces: tuple[Surface, ...], curve: OpCurve, samples: Samples
) -> tuple[Surface, ...]:
    """Returns surfaces changed so that the curve does not fall from knot to knot along an axis."""
    return tuple(
        surface if set(surface.axes) & {"cols", "filter", "kv_heads", "gates"}
        else _monotone_one(surface, curve, samples)
        for surface in surfaces
    )  # fmt: skip


def _monotone_one(surface: Surface, curve: OpCurve, samples: Samples) -> Surface:
    shape = tuple(len(axis) for axis in surface.knots)
    work, device = _node_work(surface, samples)
    base = np.log(seconds(curve, work, device)).reshape(shape)
    total = base + np.reshape(surface.values, shape)
    for _ in range(50):
        for axis in range(len(shape)):
            upper = np.maximum.accumulate(total, axis=axis)
            lower = np.flip(np.minimum.accumulate(np.flip(total, axis), axis=axis), axis)
            total = 0.5 * (upper + lower)
    for axis in range(len(shape)):
        total = np.maximum.accumulate(total, axis=axis)
    return Surface(surface.axes, surface.knots, tuple(map(float, (total - base).ravel())))


def _node_work(surface: Surface, samples: Samples) -> tuple[Work, Device]:
    """Returns ops at the knots of a surface; dimensions that are no axis are the median's."""
    grids = np.meshgrid(*(np.exp2(axis) for axis in surface.knots), indexing="ij")
    number = grids[0].size
    dims = {
        name: np.full(number, max(1.0, float(np.median(value))))
        for name, value in samples.work.dims.items()
        if name != "filter"
    }
    dims |= {name: grid.ravel() for name, grid in zip(surface.axes, grids, strict=True)}
    traffic = np.zeros(number)
    if "span" in dims:
        dims |= {"q": dims["span"], "kv": dims.pop("span")}
    if "heads" in dims:
        dims |= {"b": dims.pop("heads"), "h": np.ones(number)}
    if "traffic" in dims:
        traffic = dims.pop("traffic")
    if "out" in dims:
        dims = {name: dims[name] for name in ("m", "n", "k") if name in dims}
    if "work" in dims:
        side = np.cbrt(dims.pop("work") / 2.0)
        dims = {"m": side, "n": side, "k": side}
    device = Device(*(float(np.median(np.asarray(value))) for value in samples.device))
    return Work(dims, traffic, samples.work.dtype), device
