"""The residual factors, each fitted to a named contrast of rows; `assumptions` has the results.

Rows of vTrain on one node are linear in the number of layers and of microbatches, to the last
digit: two models that differ in layers only say what a layer takes, and what is beside the layers.
Further rows of the same width, split and microbatch would say the same once more.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from calibration.published.prediction import Prediction, published_run
from calibration.published.rows import Run
from simcore.errors import MeasurementError
from simcore.units import US

LEAST, MOST = 1 * US, 500 * US  # host seconds per op that are looked at
LEAST_SLOWER, MOST_SLOWER = 0.5, 4.0  # likewise for products that are not aligned
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
    width and number of tensor-parallel devices. The answer is their median: on eight devices the
    host is slower with one sample than with two.

    Args:
        runs: of vTrain on one node.

    Raises:
        MeasurementError: fewer than two contrasts.
    """

    def excess(floor: float, pair: Pair) -> float:
        return pair.layer(lambda run: _seconds(run, host_floor=floor)) - pair.layer(_measured)

    pairs = _enough(layer_pairs(runs, 1))
    return _median([brentq(excess, LEAST, MOST, (pair,), rtol=1e-2) for pair in pairs])


def fit_unaligned(runs: Sequence[Run]) -> tuple[float, float]:
    """Returns `assumptions.UNALIGNED` and its relative standard error.

    What a step takes beside its layers is the vocabulary, and a row of 50,257 words on one device
    is aligned to 2 bytes only: three halvings. One contrast for each width.

    Args:
        runs: of vTrain on one node.

    Raises:
        MeasurementError: fewer than two contrasts.
    """

    def excess(factor: float, pair: Pair) -> float:
        return pair.beside(lambda run: _seconds(run, unaligned=factor)) - pair.beside(_measured)

    pairs = _enough([pair for pair in layer_pairs(runs, MICROBATCH) if pair.fewer.tp == 1])
    least, most = LEAST_SLOWER, MOST_SLOWER
    return _median([brentq(excess, least, most, (pair,), rtol=1e-2) for pair in pairs])


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


def _enough(pairs: list[Pair]) -> list[Pair]:
    if len(pairs) < 2:
        raise MeasurementError(f"{len(pairs)} contrasts of layers; two are needed")
    return pairs


def _measured(run: Run) -> float:
    return run.seconds


def _seconds(run: Run, **factors: float) -> float:
    said = published_run(run, **factors)
    if not isinstance(said, Prediction):
        raise MeasurementError(f"{run.id}: not expressible: {said.reason}")
    return said.seconds


def _median(found: Sequence[float]) -> tuple[float, float]:
    """Returns the median and its relative standard error, as of a normal distribution."""
    value, spread = float(np.median(found)), float(np.std(found, ddof=1))
    return value, float(np.sqrt(np.pi / 2 / len(found)) * spread / value)
