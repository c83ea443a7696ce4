"""Sources that only say how a model scales: seconds a sample, relative to the fewest GPUs.

Their absolute times have in them what no source states (data loading, clocks under a power limit),
but most of it is the same on one GPU and on many. A run is held against the runs of the same model
and kind of GPU on the fewest GPUs, those with as many samples a GPU where there are any. Those runs
themselves are references, and no cases.

`known_reference` gives the simulator what such a run took: ops take as many times longer as make
the prediction of the reference right, and only what the additional GPUs do is predicted.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from calibration.published.described import NotExpressible
from calibration.published.prediction import published_run
from calibration.published.rows import Run
from calibration.splits import errors
from simcore.errors import MeasurementError

SOURCES = ("petuum/adaptdl", "stanford-futuredata/gavel", "kakaobrain/torchgpipe")
LEAST, MOST = 0.05, 50.0  # times as long that an op may take
STEPS = 4  # of the search for it; where devices wait for nothing, the first one is exact


def references(runs: Sequence[Run]) -> dict[int, list[int]]:
    """Returns the runs that each run is held against, by place; references have no entry."""
    models: dict[tuple[str, str, str], list[int]] = {}
    for place, run in enumerate(runs):
        models.setdefault((run.key, run.model, run.gpu), []).append(place)
    found = {}
    for members in models.values():
        fewest = min(runs[place].num_gpus for place in members)
        first = [place for place in members if runs[place].num_gpus == fewest]
        for place in members:
            if runs[place].num_gpus > fewest:
                micro = runs[place].micro_batch
                alike = [each for each in first if runs[each].micro_batch == micro]
                found[place] = alike or first
    return found


def scaling_errors(runs: Sequence[Run], predicted: Sequence[float]) -> dict[str, Any]:
    """Returns the errors of seconds a sample relative to those of the references.

    Args:
        runs: of one source.
        predicted: s of a step, one a run.
    """
    guess = np.array(
        [seconds / run.global_batch for run, seconds in zip(runs, predicted, strict=True)]
    )
    truth = np.array([run.seconds / run.global_batch for run in runs])
    pairs = references(runs)
    said = [guess[place] / guess[first].mean() for place, first in pairs.items()]
    was = [truth[place] / truth[first].mean() for place, first in pairs.items()]
    found = errors(np.array(said), np.array(was))._asdict()
    return {key: value if was or key == "cases" else None for key, value in found.items()}


def known_reference(runs: Sequence[Run]) -> list[float]:
    """Returns the predictions of runs, s, whose references are known.

    Args:
        runs: of one source, all expressible.
    """
    pairs = references(runs)
    known: dict[int, float] = {}  # reference -> times as long that its ops take
    for first in sorted({place for each in pairs.values() for place in each}):
        known[first] = _slower(runs[first])
    found = []
    for place, run in enumerate(runs):
        slower = [known.get(each, 1.0) for each in pairs.get(place, [place])]
        found.append(_seconds(run, float(np.mean(slower))))
    return found


def _slower(run: Run) -> float:
    """Returns how many times as long ops take, for the prediction of a run to be right."""
    factor = 1.0
    for _ in range(STEPS):
        factor = min(MOST, max(LEAST, factor * run.seconds / _seconds(run, factor)))
    return factor


def _seconds(run: Run, slower: float) -> float:
    said = published_run(run, slower=slower)
    if isinstance(said, NotExpressible):
        raise MeasurementError(f"{run.id}: {said.reason}")
    return said.seconds
