"""Fits of links: times of copies at many sizes -> latency and bandwidth with standard errors.

t = α + S / B + c √S: a latency, the bandwidth of endless copies, and a ramp between, for links that
fill slowly. All three are at least 0. With fewer than six sizes there is no ramp, with fewer than
three measurements no fit. Relative residuals are weighed down where they are large (Huber).
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from calibration.records import Record

_HUBER = 0.05  # relative residual from which a measurement counts less
_ROUNDS = 20
_LEAST_DEVIATION = 1e-3


class LinkFit(NamedTuple):
    """α and B of one link, with standard errors over the values.

    Attributes:
        outcome: what was fitted.
        latency: α, s.
        bandwidth: B, bytes/s; inf where no size was large enough to tell.
        ramp: c, s per square root of a byte.
        latency_error: absolute, s.
        bandwidth_error: relative.
        num_samples: measurements.
    """

    outcome: Literal["alpha-beta with ramp", "alpha-beta", "too few"]
    latency: float
    bandwidth: float
    ramp: float
    latency_error: float
    bandwidth_error: float
    num_samples: int

    def time(self, num_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the seconds of copies, [case]."""
        result: NDArray[np.float64] = (
            self.latency + num_bytes / self.bandwidth + self.ramp * np.sqrt(num_bytes)
        )
        return result


def fit_links(records: Iterable[Record]) -> dict[str, LinkFit]:
    """Returns topology and direction -> fit, of the links among records that can be fitted."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        if record.kind == "link":
            groups.setdefault(f"{record.topology}, {record.direction}", []).append(record)
    fits = {
        name: fit_link(
            np.array([record.bytes for record in group], np.float64),
            np.array([record.seconds for record in group]),
        )
        for name, group in sorted(groups.items())
    }
    return {name: fit for name, fit in fits.items() if fit.outcome != "too few"}


def fit_link(num_bytes: NDArray[np.float64], seconds: NDArray[np.float64]) -> LinkFit:
    """Returns the fit of measurements.

    Args:
        num_bytes: [case] bytes.
        seconds: [case] s.
    """
    sizes = len(np.unique(num_bytes))
    if len(seconds) < 3 or sizes < 2:
        nan = float("nan")
        return LinkFit("too few", nan, nan, nan, nan, nan, len(seconds))
    columns = [np.ones(len(seconds)), num_bytes]
    if sizes >= 6:
        columns.append(np.sqrt(num_bytes))
    design = np.stack(columns, axis=1) / seconds[:, None]
    values, errors = _robust(design)
    ramp = float(values[2]) if len(values) > 2 else 0.0
    rate = float(values[1])
    return LinkFit(
        outcome="alpha-beta with ramp" if ramp > 0 else "alpha-beta",
        latency=float(values[0]),
        bandwidth=1 / rate if rate > 0 else float("inf"),
        ramp=ramp,
        latency_error=float(errors[0]),
        bandwidth_error=float(errors[1]) / rate if rate > 0 else float("inf"),
        num_samples=len(seconds),
    )


def _robust(design: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns values >= 0 with design @ values near 1, and their standard errors."""
    scale = np.linalg.norm(design, axis=0)
    scaled = design / scale
    weight = np.ones(len(design))
    values = np.zeros(design.shape[1])
    for _ in range(_ROUNDS):
        values = nnls(scaled * weight[:, None], weight)[0]
        away = np.abs(scaled @ values - 1)
        weight = np.sqrt(np.minimum(1.0, _HUBER / np.maximum(away, 1e-12)))
    free = values > 0
    used = (scaled * weight[:, None])[:, free]
    deviation = max(_LEAST_DEVIATION, 1.4826 * float(np.median(np.abs(scaled @ values - 1))))
    errors = np.zeros(len(values))
    errors[free] = deviation * np.sqrt(np.diag(np.linalg.pinv(used.T @ used)))
    return values / scale, errors / scale
