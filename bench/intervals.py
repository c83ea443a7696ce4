"""What cells of a study say of methods: ratios with bootstrap intervals, and how soon they arrive.

Efron, Bootstrap methods: another look at the jackknife, 1979: seeds are drawn again with
replacement, of the method and of what it is compared with, on each model by itself.
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Cell = dict[str, Any]

DRAWS = 2000
TAIL = 2.5  # percent on either side


class Interval(NamedTuple):
    """A value and where it may lie."""

    value: float
    low: float
    high: float


def times(cells: Sequence[Cell], model: str, method: str) -> NDArray[np.float64]:
    """Returns step times of the seeds, [seed] s; inf where nothing fits."""
    found = [
        np.inf if cell["step_time_s"] is None else cell["step_time_s"]
        for cell in cells
        if (cell["model"], cell["method"]) == (model, method)
    ]
    return np.array(found, np.float64)


def ratio(
    cells: Sequence[Cell], models: Sequence[str], method: str, yardstick: str
) -> Interval | None:
    """Returns the geometric mean over models of ratios of medians; None where there is none.

    Models on which either has no cell, or more seeds without a fitting placement than half, are
    left out.
    """
    rng, logs = np.random.default_rng(0), list[NDArray[np.float64]]()
    for model in models:
        own, other = times(cells, model, method), times(cells, model, yardstick)
        if not (len(own) and len(other)):
            continue
        if not (np.isfinite(np.median(own)) and np.isfinite(np.median(other))):
            continue
        drawn = [np.median(rng.choice(x, (DRAWS, len(x))), axis=1) for x in (own, other)]
        medians = [np.append(np.median(x), d) for x, d in zip((own, other), drawn, strict=True)]
        logs.append(np.log(medians[0]) - np.log(medians[1]))  # the value, then the draws
    if not logs:
        return None
    means = np.exp(np.mean(logs, axis=0))
    low, high = np.nanpercentile(means[1:], [TAIL, 100 - TAIL])
    return Interval(float(means[0]), float(low), float(high))


def evaluations_to(
    cells: Sequence[Cell], models: Sequence[str], method: str, within: float
) -> list[float]:
    """Returns the evaluations of each cell until it is near the best that any cell knows.

    Args:
        cells: of one budget.
        models: those that count.
        method: the method.
        within: how near, as a part of the best step time.
    """
    found = []
    for model in models:
        curves = {
            id(cell): cell["curve"] for cell in cells if cell["model"] == model and "curve" in cell
        }
        ends = [curve[-1][1] for curve in curves.values() if curve]
        for cell in cells:
            if cell["method"] == method and id(cell) in curves:
                near = [n for n, t in curves[id(cell)] if t <= min(ends, default=0) * (1 + within)]
                found.append(float(near[0]) if near else np.inf)
    return found


def summary(
    cells: Sequence[Cell], models: Sequence[str], methods: Sequence[str], yardstick: str
) -> str:
    """Returns a table with a row for each method."""
    head = ["method", "ratio", "interval", "cells", "nothing fits", "evaluations to 5 %", "to 1 %"]
    rows = [head]
    for method in methods:
        found = ratio(cells, models, method, yardstick)
        own = [cell for cell in cells if cell["method"] == method]
        if not own:
            continue
        failed = sum(cell["step_time_s"] is None for cell in own)
        arrivals = [evaluations_to(cells, models, method, within) for within in (0.05, 0.01)]
        rows.append([
            method,
            "" if found is None else f"{found.value:.3f}",
            "" if found is None else f"{found.low:.3f} to {found.high:.3f}",
            str(len(own)),
            f"{failed / len(own):.0%}",
            *(_arrival(numbers) for numbers in arrivals),
        ])  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _arrival(numbers: Sequence[float]) -> str:
    """Returns the median of evaluations, and how many cells arrived."""
    if not numbers:
        return ""
    arrived = sum(np.isfinite(numbers))
    middle = statistics.median(numbers)
    text = f"{middle:.0f}" if np.isfinite(middle) else "never"
    return f"{text} ({arrived}/{len(numbers)})"
