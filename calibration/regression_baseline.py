"""A closed form with eleven coefficients: what a simulator of training steps has to beat.

Seconds of a step are a sum of terms that are not negative: work, traffic and waiting of one GPU
along the pipeline. The coefficients were fitted by non-negative least squares on relative errors
(`fit_baseline`) to the rows of VIA-Research/vTrain in ``e2e/train.csv``, 900 on one node and 73 on
several, each for itself, and then frozen. Other sources get those of one node or of several.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from calibration.published.rows import Run

VOCABULARY = 51_200
TERMS = (
    "layer FLOP along the pipeline",
    "attention FLOP along the pipeline",
    "vocabulary FLOP of the last stage",
    "layers run along the pipeline",
    "layers run x split",
    "microbatches",
    "tensor-parallel bytes",
    "pipeline bytes",
    "gradient bytes summed",
    "parameters updated",
    "one",
)
ONE_NODE = np.array(
    [
        0.00231683,
        0.0350849,
        0.00609,
        0.00271166,
        0.000328329,
        0.0,
        0.0026196,
        0.0,
        0.00247305,
        0.0,
        0.000644685,
    ]
)  # [term] s each
SEVERAL_NODES = np.array(
    [
        0.00505094,
        0.0434304,
        0.00493245,
        0.0,
        0.00322215,
        0.0,
        0.0100936,
        0.0,
        0.0175655,
        0.0,
        0.0553581,
    ]
)  # [term] s each


def baseline_terms(run: Run) -> NDArray[np.float64]:
    """Returns the terms of a run, [term]: 1e12 FLOP, GB, 1e9 parameters, counts."""
    micro = run.micro_batch or run.global_batch // run.dp
    steps = run.global_batch / (run.dp * micro) + run.pp - 1
    tokens, layers = micro * run.length, run.layers / run.pp
    width, tp = run.hidden, run.tp
    parameters = (12 * layers * width**2 + VOCABULARY * width) / tp
    ring = 2 * (tp - 1) / tp
    return np.array([
        steps * layers * 72 * tokens * width**2 / tp / 1e12,
        steps * layers * 12 * tokens * run.length * width / tp / 1e12,
        steps * 6 * tokens * width * VOCABULARY / tp / 1e12,
        steps * layers,
        steps * layers * (tp > 1),
        steps,
        steps * layers * ring * 8 * tokens * width / 1e9,
        steps * (run.pp > 1) * 4 * tokens * width / 1e9,
        2 * (run.dp - 1) / run.dp * 2 * parameters / 1e9,
        parameters / 1e9,
        1.0,
    ])  # fmt: skip


def baseline_seconds(run: Run) -> float:
    """Returns what the closed form says of a step, s."""
    several = run.num_gpus > (run.per_node or run.num_gpus)
    return float(baseline_terms(run) @ (SEVERAL_NODES if several else ONE_NODE))


def fit_baseline(runs: Sequence[Run]) -> NDArray[np.float64]:
    """Returns the coefficients that fit runs best in relative error, [term] s each."""
    terms = np.array([baseline_terms(run) / run.seconds for run in runs])
    found: NDArray[np.float64] = nnls(terms, np.ones(len(runs)))[0]
    return found
