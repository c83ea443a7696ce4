"""Fits of collectives and links: times at many sizes -> a curve of few points with errors.

The model is `simcore.curves.Curve`: a polyline of log time over log bytes that never falls. Its
knots are placed where a running median of the measurements bends (Ramer-Douglas-Peucker), their
heights by least squares with a soft L1 loss, so that a few stalled runs do not lift the curve. How
closely the bends are followed is chosen by the error on size groups that the fit did not see; of
equally good ones the fewest points win. The coarsest candidate is no polyline but the line with a
ramp of `calibration.links`, which has three parameters. Fewer sizes get fewer parameters:

- ``curve``: five sizes or more; at most a knot for two sizes.
- ``ramp``: the same, where α + β bytes + γ √bytes is as good.
- ``alpha-beta``: two to four sizes; time is α + β bytes.
- ``beta``: one size, measured five times or more: time is β bytes, from the median.
- ``one size``: no fit.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from calibration.links import fit_link
from calibration.splits import FOLDS, Errors, errors, size_folds
from simcore.curves import Curve

Outcome = Literal["curve", "ramp", "alpha-beta", "beta", "one size"]
RAMP = np.inf  # tolerance that means: no polyline
TOLERANCES = (RAMP, 0.15, 0.08, 0.04, 0.02)  # of log time; the coarsest first
MAX_KNOTS = 16
_SOFT = 0.02  # log time from which a residual counts linearly
_ENOUGH = 1.05  # a finer curve must be better than this
_FLOOR = 1e-3  # least standard deviation of log time; clocks and prints are no finer
_BINS = 8  # of the running median that shows the bends, an octave
_FINE_BINS = 32  # of the one that many measurements are thinned to
_MANY = 300


class Fit(NamedTuple):
    """A fitted curve.

    Attributes:
        outcome: what was fitted.
        curve: None after ``one size``.
        relative_error: standard error of each point over its time.
        num_samples: measurements behind it.
        held_out: on size groups that were not seen, with groups on both sides.
    """

    outcome: Outcome
    curve: Curve | None
    relative_error: NDArray[np.float64]  # [point]
    num_samples: int
    held_out: Errors


def fit(num_bytes: NDArray[np.float64], seconds: NDArray[np.float64]) -> Fit:
    """Returns the fit of measurements.

    Args:
        num_bytes: [case] bytes.
        seconds: [case] s.
    """
    sizes = len(np.unique(num_bytes))
    nothing = errors(np.zeros(0), np.zeros(0))
    if sizes < 2:
        return _one_size(num_bytes, seconds, nothing)
    if sizes < 5:
        curve, error = alpha_beta(num_bytes, seconds)
        return Fit("alpha-beta", curve, error, len(seconds), nothing)
    tolerance, held_out = _choose(num_bytes, seconds)
    curve, error = _fit_curve(num_bytes, seconds, tolerance)
    outcome: Outcome = "ramp" if tolerance == RAMP else "curve"
    return Fit(outcome, curve, error, len(seconds), held_out)


def _one_size(num_bytes: NDArray[np.float64], seconds: NDArray[np.float64], nothing: Errors) -> Fit:
    if len(seconds) < 5:
        return Fit("one size", None, np.zeros(0), len(seconds), nothing)
    shares = np.array([0.5, 1.0])
    curve = Curve(shares * num_bytes[0], shares * np.median(seconds))
    spread = 1.4826 * np.median(np.abs(seconds / np.median(seconds) - 1))
    error = np.full(2, max(_FLOOR, float(spread)))
    return Fit("beta", curve, error, len(seconds), nothing)


def alpha_beta(
    num_bytes: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[Curve, NDArray[np.float64]]:
    """Returns α + β bytes as a curve of its two ends, and the standard errors of these.

    Relative residuals are least; neither α nor β is negative.
    """
    design = np.stack([1 / seconds, num_bytes / seconds], axis=1)
    scale = np.linalg.norm(design, axis=0)
    alpha, beta = nnls(design / scale, np.ones(len(seconds)))[0] / scale
    ends = np.array([num_bytes.min(), num_bytes.max()])
    times = alpha + beta * ends
    spread = max(_FLOOR, float(np.std((alpha + beta * num_bytes) / seconds)))
    return Curve(ends, times), np.full(2, spread)


def _choose(num_bytes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, Errors]:
    """Returns the coarsest tolerance that is about as good as the best, and its errors."""
    folds = size_folds(num_bytes)
    found = [_cross_validated(num_bytes, seconds, folds, tolerance) for tolerance in TOLERANCES]
    best = min(error.mean for error in found)
    for tolerance, error in zip(TOLERANCES, found, strict=True):
        if not error.mean > _ENOUGH * best:  # NaN: nothing could be held out
            return tolerance, error
    return TOLERANCES[-1], found[-1]


def _cross_validated(
    num_bytes: NDArray[np.float64],
    seconds: NDArray[np.float64],
    folds: NDArray[np.int64],
    tolerance: float,
) -> Errors:
    predicted = np.zeros(len(seconds))
    for fold in range(FOLDS):
        out = folds == fold
        if not out.any():
            continue
        curve, _ = _fit_curve(num_bytes[~out], seconds[~out], tolerance)
        predicted[out] = times(curve, num_bytes[out])
    seen = folds >= 0
    return errors(predicted[seen], seconds[seen])


def times(curve: Curve, num_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the seconds of many sizes, [case]."""
    unique, back = np.unique(num_bytes, return_inverse=True)
    result: NDArray[np.float64] = np.array([curve.time(size) for size in unique])[back]
    return result


def _fit_curve(
    num_bytes: NDArray[np.float64], seconds: NDArray[np.float64], tolerance: float
) -> tuple[Curve, NDArray[np.float64]]:
    if tolerance < RAMP:
        return _fit_polyline(num_bytes, seconds, tolerance)
    line = fit_link(num_bytes, seconds)
    sizes = np.geomspace(num_bytes.min(), num_bytes.max(), MAX_KNOTS)
    away = np.abs(line.time(num_bytes) / seconds - 1)
    spread = max(_FLOOR, 1.4826 * float(np.median(away)))
    return Curve(sizes, line.time(sizes)), np.full(len(sizes), spread)


def _fit_polyline(
    num_bytes: NDArray[np.float64], seconds: NDArray[np.float64], tolerance: float
) -> tuple[Curve, NDArray[np.float64]]:
    x, y = np.log(num_bytes), np.log(seconds)
    most = min(MAX_KNOTS, max(2, len(np.unique(x)) // 2))
    knots = _bends(*_running_median(x, y, _BINS), tolerance, most)
    if len(x) > _MANY:
        x, y = _running_median(x, y, _FINE_BINS)
    hats = _hats(x, knots)
    start = np.maximum.accumulate(np.linalg.lstsq(hats, y, rcond=None)[0])
    rising = np.tril(np.ones((len(knots), len(knots))))
    design = hats @ rising
    lower = np.full(len(knots), 0.0)
    lower[0] = -np.inf
    first = np.maximum(np.diff(start, prepend=0.0), 1e-9)
    first[0] = start[0]
    solved = least_squares(
        lambda steps: design @ steps - y, first, lambda _: design,
        bounds=(lower, np.inf), loss="soft_l1", f_scale=_SOFT,
    )  # fmt: skip
    heights = rising @ solved.x
    return (
        Curve(np.exp(knots), np.exp(np.maximum.accumulate(heights))),
        _standard_errors(hats, hats @ heights - y),
    )


def _standard_errors(
    hats: NDArray[np.float64], residuals: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the standard error of each height, with the spread from the median residual."""
    deviation = max(_FLOOR, 1.4826 * float(np.median(np.abs(residuals))))
    covariance = np.linalg.pinv(hats.T @ hats)
    result: NDArray[np.float64] = deviation * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return result


def _hats(x: NDArray[np.float64], knots: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns how much each knot's height counts at each x, [case, knot]."""
    unit = np.eye(len(knots))
    return np.stack([np.interp(x, knots, row) for row in unit], axis=1)


def _running_median(
    x: NDArray[np.float64], y: NDArray[np.float64], per_octave: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns medians of neighbouring sizes; the smallest and the largest stand for themselves."""
    bins = np.round(x / np.log(2) * per_octave)
    bins[x == x.min()], bins[x == x.max()] = -np.inf, np.inf
    middle = [(np.median(x[bins == b]), np.median(y[bins == b])) for b in np.unique(bins)]
    points = np.array(middle, np.float64)
    return points[:, 0], points[:, 1]


def _bends(
    x: NDArray[np.float64], y: NDArray[np.float64], tolerance: float, most: int
) -> NDArray[np.float64]:
    """Returns the x of a polyline that stays within the tolerance, greedily, from both ends."""
    kept = [0, len(x) - 1]
    while len(kept) < min(most, len(x)):
        away = np.abs(np.interp(x, x[kept], y[kept]) - y)
        worst = int(away.argmax())
        if away[worst] <= tolerance:
            break
        kept = sorted([*kept, worst])
    return x[kept]
