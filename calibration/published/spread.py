"""Published runs held against the uncertainty that the program itself states.

Before a run is known, `simcore.uncertainty` says how far its step may be off: ops by the errors of
their curves, hosts by the error of the residual factor, links and the state of the machine. To the
first order, without draws: what the step takes longer where devices are slower says which share of
it is theirs; the rest is communication.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binomtest, norm

from calibration.published.assumptions import HOST_FLOOR
from calibration.published.described import Described, NotExpressible
from calibration.published.megatron_ci import HOST_ERROR
from calibration.published.models import graph_of
from calibration.published.node_clusters import node_cluster
from calibration.published.plans import plan_of
from calibration.published.prediction import Prediction, known_cluster, published_run
from calibration.published.reading import describe_run
from calibration.published.rows import Run
from simcore.cluster import Cluster
from simcore.cost import cost_table, kinds_of
from simcore.pipeline_build import stage_of_units
from simcore.shards import one_device
from simcore.signature import Phase
from simcore.uncertainty import MOST_ERROR, Spread, op_errors, total_error

SAMPLE = 20  # runs of a source that are looked at
DECILE = float(norm.ppf(0.9))  # of a standard normal distribution
SLOWER = 1.05  # times as long that devices take, to see which share of a step is theirs
_STATED = re.compile(r"\+/-(\d+)%")  # how far runs differ, in the notes of a row
_HOST = -1  # class and signature of what the host takes


class Parts(NamedTuple):
    """Of a step: what is uncertain, before it is said how much."""

    device: float  # share in which devices or their hosts work
    error: float  # relative standard error of that share

    def log_error(self, spread: Spread) -> float:
        """Returns the standard error of the logarithm of the step time."""
        link = (1 - self.device) * spread.link
        return float(np.sqrt((self.device * self.error) ** 2 + link**2 + spread.machine**2))


def parts_of(run: Run, seconds: float, spread: Spread) -> Parts | None:
    """Returns what of a run is uncertain, given its prediction, s; None = not expressible."""
    described, slow = describe_run(run), published_run(run, slower=SLOWER)
    cluster = node_cluster(run) or known_cluster(run)
    if isinstance(described, NotExpressible) or cluster is None:
        return None
    if not isinstance(slow, Prediction):
        return None
    share = device_share(slow.seconds, seconds)
    return Parts(share, _device_error(described, cluster, spread))


def device_share(slow: float, seconds: float) -> float:
    """Returns the share of devices in a step, s, given what it takes on `SLOWER` ones, s."""
    return float(np.clip((slow / seconds - 1) / (SLOWER - 1), 0.0, 1.0))


def _device_error(described: Described, cluster: Cluster, spread: Spread) -> float:
    """Returns the relative standard error of what the ops of one device take in a step."""
    layout, job = described.layout, described.job
    count = (job.batch or 1) // (layout.dp * layout.microbatch)
    few = replace(layout, dp=min(2, layout.dp))
    small = job.replace(batch=few.dp * few.microbatch * few.pp)
    case = described._replace(job=small, layout=few)
    return _error_of(case, cluster, count, spread)


@functools.lru_cache(maxsize=256)
def _error_of(described: Described, cluster: Cluster, count: int, spread: Spread) -> float:
    """Returns that error of a run with so many microbatches."""
    job, layout = described.job, described.layout
    graph = graph_of(described.size, job.precision)
    plan = plan_of(graph, cluster, job, layout)
    device = one_device(graph, plan, stage_of_units(plan, graph)).graph
    cost = cost_table(device, job, kinds_of(cluster), (layout.microbatch,))
    seconds, error = cost.seconds[:, 0, 0].copy(), op_errors(cost, spread)[:, 0]
    op_class, signature = device.op_class.astype(np.int64), device.signature.astype(np.int64)
    signature = np.where(signature < 0, len(device.signatures), signature)
    if described.waits:
        floor, off = HOST_FLOOR.value, HOST_FLOOR.relative_error
        if described.floor is not None:
            floor, off = described.floor, HOST_ERROR
        hosts = (seconds < floor) & (cost.launch[:, 0] > 0) & (device.phase != Phase.U)
        seconds[hosts], error[hosts] = floor, off
        op_class[hosts] = signature[hosts] = _HOST
    seconds[device.phase != Phase.U] *= count
    return total_error(seconds, error, op_class, signature, spread.shared)


def stated_coverage(
    runs: Sequence[Run], predicted: Sequence[float], spread: Spread | None = None
) -> dict[str, Any]:
    """Returns how many runs are inside the deciles that the program states for them.

    Args:
        runs: of one source; a sample of them is looked at.
        predicted: s, one a run.
        spread: of the errors; None = the program's.
    """
    chosen = spread or Spread()
    inside = []
    every = -(-len(runs) // SAMPLE) or 1
    for run, seconds in list(zip(runs, predicted, strict=True))[::every]:
        parts = parts_of(run, seconds, chosen)
        if parts is not None:
            off = abs(np.log(run.seconds / seconds))
            inside.append(bool(off <= DECILE * parts.log_error(spread_of(run, chosen))))
    return share_inside(inside)


def spread_of(run: Run, spread: Spread) -> Spread:
    """Returns the errors of a run: its source may state how far its machine's runs differ.

    "+/-40%" is taken as p10 to p90, a standard error of 0.26. Four days of one plan of the source
    that says so (BigScience on V100: 129, 217, 125 and 225 s) have one of 0.32.
    """
    stated = _STATED.search(run.notes)
    if stated is None:
        return spread
    own = np.log1p(int(stated[1]) / 100) / DECILE
    return replace(spread, machine=min(MOST_ERROR, float(np.hypot(spread.machine, own))))


def share_inside(inside: Sequence[bool]) -> dict[str, Any]:
    """Returns the share of what is inside its deciles, and how far it is known (95 %, Wilson)."""
    if not inside:
        return {"stated_coverage": None, "stated_cases": 0, "stated_range": None}
    known = binomtest(sum(inside), len(inside)).proportion_ci(method="wilson")
    return {
        "stated_coverage": float(np.mean(inside)),
        "stated_cases": len(inside),
        "stated_range": [float(known.low), float(known.high)],
    }
