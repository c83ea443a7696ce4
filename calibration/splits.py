"""Which measurements a fit does not see: whole groups, never single rows."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FOLDS = 5


class Errors(NamedTuple):
    """How far predictions are from measurements, |predicted / measured - 1|.

    Attributes:
        cases: number of measurements.
        median: of the errors; NaN without cases.
        p90: the ninth decile.
        mean: of the errors.
        bias: mean of predicted / measured - 1.
    """

    cases: int
    median: float
    p90: float
    mean: float
    bias: float


def errors(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> Errors:
    """Returns the errors of predictions, both [case] s."""
    if not len(measured):
        return Errors(0, *[float("nan")] * 4)
    signed = predicted / measured - 1
    size = np.abs(signed)
    return Errors(
        len(measured),
        float(np.median(size)),
        float(np.quantile(size, 0.9)),
        float(size.mean()),
        float(signed.mean()),
    )


def octaves(num_bytes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the size group of each message: sizes within a factor of two are one group."""
    return np.floor(np.log2(np.maximum(num_bytes, 1))).astype(np.int64)


def size_folds(num_bytes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the fold of each message, -1 of the smallest and the largest group.

    Those two are never held out: without them a prediction would be an extrapolation.
    """
    groups = octaves(num_bytes)
    present = np.unique(groups)
    place = np.searchsorted(present, groups)
    inside = (place > 0) & (place < len(present) - 1)
    folds: NDArray[np.int64] = np.where(inside, place % FOLDS, -1)
    return folds
