"""Published runs held against their predictions: errors, and ranks inside cells.

A cell has runs of one model, on as many GPUs, at one global batch, and at least four plans. Inside
one, `rank_correlation` is Spearman's, and `regret` what the plan that is predicted fastest really
takes above the one that is fastest.

`interval_coverage` is the share of runs inside the interval from the first to the ninth decile of
log(measured / predicted) of other runs of the same source: models are divided into two halves, each
of which is held against the deciles of the other. It should be 0.8, as `stated_coverage` should,
which is that of the deciles that the program states before it knows any run (see `spread`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr

from calibration.published.described import NotExpressible
from calibration.published.prediction import Prediction, published_run
from calibration.published.rows import FOLDER, Run, read_runs
from calibration.published.scaling import (
    SOURCES,
    known_factors,
    known_reference,
    scaling_errors,
    stated_scaling,
)
from calibration.published.spread import stated_coverage
from calibration.regression_baseline import baseline_seconds
from calibration.splits import errors
from simcore.errors import PlacewrightError

LEAST_PLANS = 4
LEAST_FOR_DECILES = 10  # runs


@dataclass(slots=True)
class RunScore:
    """Predictions of the runs of one source, or of a part of it.

    Attributes:
        runs: those that could be predicted.
        predicted: s, one a run.
        missing: reason -> runs that could not.
        scaling: errors of time relative to the fewest GPUs, of sources that only scale.
        stated: how many runs, or relative times, are inside the deciles that are stated for them.
    """

    runs: list[Run] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)
    missing: Counter[str] = field(default_factory=Counter)
    scaling: dict[str, Any] = field(default_factory=dict)
    stated: dict[str, Any] = field(default_factory=dict)

    def result(self) -> dict[str, Any]:
        """Returns errors, coverage, figures inside cells, and the same of the baseline."""
        cases, missing = len(self.runs), sum(self.missing.values())
        sized = [run for run in self.runs if run.layers and run.hidden and run.length]
        return {
            **scored(self.runs, self.predicted),
            **interval_coverage(self.runs, self.predicted),
            **self.stated,
            "coverage": cases / (cases + missing) if cases + missing else 0.0,
            "not_expressible": dict(self.missing.most_common()),
            "baseline": scored(sized, [baseline_seconds(run) for run in sized]),
            **self.scaling,
        }


def scored(runs: Sequence[Run], predicted: Sequence[float]) -> dict[str, Any]:
    """Returns errors and figures inside cells of predictions in s; None where there are none."""
    guess, truth = np.array(predicted), np.array([run.seconds for run in runs])
    found = errors(guess, truth)._asdict()
    shown = {key: value if runs or key == "cases" else None for key, value in found.items()}
    return shown | inside_cells(runs, guess, truth)


def inside_cells(
    runs: Sequence[Run], predicted: NDArray[np.float64], measured: NDArray[np.float64]
) -> dict[str, Any]:
    """Returns mean rank correlation, and mean and worst regret, over cells; None without cells."""
    members: dict[tuple[object, ...], list[int]] = {}
    for index, run in enumerate(runs):
        members.setdefault(run.cell, []).append(index)
    cells = [np.array(cell) for cell in members.values() if len(cell) >= LEAST_PLANS]
    if not cells:
        return {"cells": 0, "rank_correlation": None, "regret": None, "worst_regret": None}
    ranks = [_rank(predicted[cell], measured[cell]) for cell in cells]
    regrets = [_regret(predicted[cell], measured[cell]) for cell in cells]
    return {
        "cells": len(cells),
        "rank_correlation": float(np.mean(ranks)),
        "regret": float(np.mean(regrets)),
        "worst_regret": max(regrets),
    }


def interval_coverage(runs: Sequence[Run], predicted: Sequence[float]) -> dict[str, Any]:
    """Returns how many runs are inside the deciles of others; None with fewer than ten in a half.

    Args:
        runs: of one source.
        predicted: s, one a run.
    """
    names = sorted({(run.model, run.layers, run.hidden, run.gpu) for run in runs})
    if len(names) > 1:
        half = np.array([names.index((r.model, r.layers, r.hidden, r.gpu)) % 2 for r in runs])
    else:
        half = np.arange(len(runs)) % 2
    if min((half == 0).sum(), (half == 1).sum()) < LEAST_FOR_DECILES:
        return {"interval_coverage": None, "interval": None}
    off = np.log([run.seconds for run in runs]) - np.log(predicted)
    inside = np.zeros(len(runs), np.bool_)
    for mine in (0, 1):
        low, high = np.quantile(off[half != mine], (0.1, 0.9))
        inside |= (half == mine) & (off >= low) & (off <= high)
    low, high = np.exp(np.quantile(off, (0.1, 0.9)))
    return {"interval_coverage": float(inside.mean()), "interval": [float(low), float(high)]}


def _rank(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    if np.ptp(predicted) == 0 or np.ptp(measured) == 0:
        return 0.0
    return float(spearmanr(predicted, measured).statistic)


def _regret(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    """Returns the mean over the plans that are predicted fastest, where several are."""
    best = measured[predicted == predicted.min()].mean()
    return float(best / measured.min() - 1)


def score_runs(root: Path, progress: Callable[[str], None] = lambda _: None) -> dict[str, RunScore]:
    """Returns the scores of the published runs in a folder of data sets, by key.

    Args:
        root: has the folder ``e2e``, or has not: then there is nothing.
        progress: told how far it is.

    Raises:
        MeasurementError: a malformed file.
    """
    return score_each(read_runs(root / FOLDER), progress)


def score_each(
    runs: Iterable[Run], progress: Callable[[str], None] = lambda _: None
) -> dict[str, RunScore]:
    """Returns the scores of runs, by key."""
    found: dict[str, RunScore] = {}
    for number, run in enumerate(sorted(runs, key=lambda run: (run.key, run.layers, run.hidden))):
        if number % 100 == 0:
            progress(f"{run.key}: run {number}")
        score = found.setdefault(run.key, RunScore())
        said = _said(run)
        if isinstance(said, NotExpressible):
            score.missing[said.reason] += 1
        else:
            score.runs.append(run)
            score.predicted.append(said.seconds)
    for score in found.values():
        if score.runs and score.runs[0].source in SOURCES:
            _score_scaling(score)
        elif score.runs:
            score.stated = stated_coverage(score.runs, score.predicted)
    return found


def _said(run: Run) -> Prediction | NotExpressible:
    """Returns the prediction of a run, or why there is none; what is refused does not stop it."""
    try:
        return published_run(run)
    except PlacewrightError as error:
        return NotExpressible(f"refused: {error}")


def _score_scaling(score: RunScore) -> None:
    """Scores relative times: from the profiles alone, and with the references known."""
    factors = known_factors(score.runs)
    known = known_reference(score.runs, factors)
    score.scaling = {
        "scaling_unknown": scaling_errors(score.runs, score.predicted),
        "scaling": scaling_errors(score.runs, known),
    }
    score.stated = stated_scaling(score.runs, factors, known)
