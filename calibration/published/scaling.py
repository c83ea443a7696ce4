"""Sources that only say how a model scales: seconds a sample, relative to the fewest GPUs.

Their absolute times have in them what no source states (data loading, clocks under a power limit),
but most of it is the same on one GPU and on many. A run is held against the runs of the same model
and kind of GPU on the fewest GPUs, those with as many samples a GPU where there are any. Those runs
themselves are references, and no cases.

`known_factors` gives the simulator what such a run took: ops take as many times longer as make
the prediction of the reference right, and only what the additional GPUs do is predicted
(`known_reference`), and held against what the program states beforehand (`stated_scaling`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from calibration.published.described import NotExpressible
from calibration.published.prediction import published_run
from calibration.published.rows import Run
from calibration.published.spread import (
    DECILE,
    SAMPLE,
    SLOWER,
    Parts,
    device_share,
    share_inside,
)
from calibration.splits import errors
from simcore.errors import MeasurementError
from simcore.uncertainty import Spread

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


def known_factors(runs: Sequence[Run]) -> list[float]:
    """Returns how many times as long ops take in each run, as its references say.

    Args:
        runs: of one source, all expressible.
    """
    pairs = references(runs)
    known: dict[int, float] = {}  # reference -> its own
    for first in sorted({place for each in pairs.values() for place in each}):
        known[first] = _slower(runs[first])
    return [
        float(np.mean([known.get(each, 1.0) for each in pairs.get(place, [place])]))
        for place in range(len(runs))
    ]


def known_reference(runs: Sequence[Run], factors: Sequence[float]) -> list[float]:
    """Returns the predictions of runs, s, whose ops take so many times as long."""
    return [_seconds(run, factor) for run, factor in zip(runs, factors, strict=True)]


def stated_scaling(
    runs: Sequence[Run],
    factors: Sequence[float],
    predicted: Sequence[float],
    spread: Spread | None = None,
) -> dict[str, Any]:
    """Returns how many relative times are inside the deciles that the program states for them.

    What ops take is known from the reference, so that links and the state of the machine are what
    is left; the state is drawn twice, as the reference was a run of its own.

    Args:
        runs: of one source; a sample of those with a reference is looked at.
        factors: as `known_factors` returns them.
        predicted: as `known_reference` returns them, s.
        spread: of the errors; None = the program's.
    """
    chosen = spread or Spread()
    twice = replace(chosen, machine=float(np.sqrt(2)) * chosen.machine)
    pairs = references(runs)
    inside = []
    for place in sorted(pairs)[:: -(-len(pairs) // SAMPLE) or 1]:
        run, first = runs[place], pairs[place]
        said = predicted[place] / np.mean([predicted[each] for each in first])
        was = run.seconds / np.mean([runs[each].seconds for each in first])
        slow = _seconds(run, factors[place] * SLOWER)
        parts = Parts(device_share(slow, predicted[place]), 0.0)
        inside.append(bool(abs(np.log(was / said)) <= DECILE * parts.log_error(twice)))
    return share_inside(inside)


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
