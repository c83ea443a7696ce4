"""The residual factors, each fitted to a named contrast of rows; `assumptions` has the results."""

import itertools
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq

from calibration.published.prediction import Prediction, published_run
from calibration.published.rows import Run
from simcore.errors import MeasurementError
from simcore.units import US

LEAST, MOST = 1 * US, 500 * US  # host seconds per op that are looked at


def fit_host_floor(runs: Sequence[Run]) -> tuple[float, float]:
    """Returns the host's seconds per op and their relative standard error.

    Each contrast is two models of one width that differ in layers only, one sample at a time on one
    device of a copy: what the additional layers take, launch bound, is the host's time. The answer
    is the mean over the contrasts.

    Args:
        runs: of vTrain on one node.

    Raises:
        MeasurementError: fewer than two contrasts.
    """
    groups: dict[tuple[int, ...], list[Run]] = {}
    for run in runs:
        if run.part == "single" and run.tp == run.pp == run.micro_batch == 1:
            groups.setdefault((run.hidden, run.dp, run.global_batch), []).append(run)
    largest = {  # the most microbatches of each width, so that what comes once a step is small
        width: max((key for key in groups if key[0] == width), key=lambda key: key[2] / key[1])
        for width in {key[0] for key in groups}
    }
    pairs = [
        pair
        for key in sorted(largest.values())
        for pair in itertools.pairwise(sorted(groups[key], key=lambda run: run.layers))
    ]
    if len(pairs) < 2:
        raise MeasurementError(f"{len(pairs)} contrasts of layers at one sample; two are needed")
    found = np.array([_floor(*pair) for pair in pairs])
    value = float(found.mean())
    return value, float(found.std(ddof=1) / np.sqrt(len(found)) / value)


def _floor(fewer: Run, more: Run) -> float:
    """Returns the seconds per op at which predicted and measured differences are the same."""

    def excess(floor: float) -> float:
        few, many = (published_run(run, host_floor=floor) for run in (fewer, more))
        if not (isinstance(few, Prediction) and isinstance(many, Prediction)):
            raise MeasurementError(f"{fewer.id}, {more.id}: not expressible")
        return (many.seconds - few.seconds) - (more.seconds - fewer.seconds)

    return float(brentq(excess, LEAST, MOST, rtol=1e-3))
