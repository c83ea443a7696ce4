"""The residual factors, each fitted to a named contrast of rows; `assumptions` has the results.

Rows of vTrain on one node are linear in the number of layers and of microbatches, to the last
digit: two models that differ in layers only say what a layer takes, and what is beside the layers.
Further rows of the same width, split and microbatch would say the same once more.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from calibration.published.assumptions import FITTED, Factors
from calibration.published.prediction import Prediction, published_run
from calibration.published.rows import Run
from simcore.errors import MeasurementError
from simcore.units import US

MICROBATCH = 8  # at which what is beside the layers is the device's time, not the host's


class Pair(NamedTuple):
    """Two runs that differ in layers only."""

    fewer: Run
    more: Run

    def layer(self, seconds: Callable[[Run], float]) -> float:
        """Returns what one layer adds to a step, s."""
        added = self.more.layers - self.fewer.layers
        return (seconds(self.more) - seconds(self.fewer)) / added

    def beside(self, seconds: Callable[[Run], float]) -> float:
        """Returns what a step takes beside its layers, s."""
        return seconds(self.fewer) - self.fewer.layers * self.layer(seconds)


def fit_host_floor(runs: Sequence[Run]) -> tuple[float, float]:
    """Returns the host's seconds per op and their relative standard error.

    What a layer takes with one sample, launch bound, is the host's time: one contrast for each
    width and number of tensor-parallel devices.

    Args:
        runs: of vTrain on one node.

    Raises:
        MeasurementError: fewer than two contrasts.
    """
    return _fit(layer_pairs(runs, 1), "floor", (1 * US, 500 * US), Pair.layer)


def fit_gap(runs: Sequence[Run]) -> tuple[float, float]:
    """Returns `assumptions.GAP` and its relative standard error.

    With many samples the host is ahead; what a layer takes beyond its kernels is between them. One
    contrast for each width and number of tensor-parallel devices.

    Args:
        runs: of vTrain on one node.

    Raises:
        MeasurementError: fewer than two contrasts.
    """
    return _fit(layer_pairs(runs, MICROBATCH), "gap", (0.0, 200 * US), Pair.layer)


def fit_unaligned(runs: Sequence[Run]) -> tuple[float, float]:
    """Returns `assumptions.UNALIGNED` and its relative standard error.

    What a step takes beside its layers is the vocabulary, and a row of 50,257 words on one device
    is a multiple of 2 bytes only. One contrast for each width.

    Args:
        runs: of vTrain on one node.

    Raises:
        MeasurementError: fewer than two contrasts.
    """
    pairs = [pair for pair in layer_pairs(runs, MICROBATCH) if pair.fewer.tp == 1]
    return _fit(pairs, "unaligned", (0.5, 4.0), Pair.beside)


def layer_pairs(runs: Iterable[Run], microbatch: int) -> list[Pair]:
    """Returns the models of fewest and most layers of each width and split, with most microbatches.

    Args:
        runs: of vTrain on one node.
        microbatch: samples.
    """
    groups: dict[tuple[int, int], dict[tuple[int, int], list[Run]]] = {}
    for run in runs:
        if run.part == "single" and run.pp == 1 and run.micro_batch == microbatch:
            shape = groups.setdefault((run.hidden, run.tp), {})
            shape.setdefault((run.global_batch // run.dp, -run.dp), []).append(run)
    found = []
    for _, shapes in sorted(groups.items()):
        models = sorted(shapes[max(shapes)], key=lambda run: run.layers)
        if models[0].layers < models[-1].layers:
            found.append(Pair(models[0], models[-1]))
    return found


def _fit(
    pairs: Sequence[Pair],
    factor: str,
    bounds: tuple[float, float],
    part: Callable[[Pair, Callable[[Run], float]], float],
) -> tuple[float, float]:
    """Returns the median of what a factor must be for each pair, and its relative standard error.

    A pair whose part of a step no value within the bounds explains says nothing of the factor.
    """

    def excess(value: float, pair: Pair) -> float:
        said = part(pair, lambda run: _seconds(run, FITTED._replace(**{factor: value})))
        return said - part(pair, _measured)

    found = []
    for pair in pairs:
        ends = [excess(value, pair) for value in bounds]
        if ends[0] * ends[1] < 0:
            found.append(brentq(excess, *bounds, (pair,), rtol=1e-2))
    if len(found) < 2:
        raise MeasurementError(f"{factor}: {len(found)} contrasts of layers; two are needed")
    return _median(found)


def _measured(run: Run) -> float:
    return run.seconds


def _seconds(run: Run, factors: Factors) -> float:
    said = published_run(run, factors=factors)
    if not isinstance(said, Prediction):
        raise MeasurementError(f"{run.id}: not expressible: {said.reason}")
    return said.seconds


def _median(found: Sequence[float]) -> tuple[float, float]:
    """Returns the median and its relative standard error, as of a normal distribution."""
    value, spread = float(np.median(found)), float(np.std(found, ddof=1))
    return value, float(np.sqrt(np.pi / 2 / len(found)) * spread / value)
