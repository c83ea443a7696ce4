"""Published runs held against the uncertainty that the program itself states.

Before a run is known, `simcore.uncertainty` says how far its step may be off: ops by the errors of
their curves, hosts by the error of the residual factor, links and the state of the machine. To the
first order, without draws: what the step takes longer where devices are slower says which share of
it is theirs; the rest is communication.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm

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
from simcore.uncertainty import Spread, total_error

SAMPLE = 20  # runs of a source that are looked at
DECILE = float(norm.ppf(0.9))  # of a standard normal distribution
_SLOWER = 1.05  # times as long that devices take, to see which share of a step is theirs
_HOST = -1  # class and signature of what the host takes


class Parts(NamedTuple):
    """Of a step: what is uncertain, before it is said how much."""

    device: float  # share in which devices or their hosts work
    error: float  # relative standard error of that share

    def log_error(self, spread: Spread) -> float:
        """Returns the standard error of the logarithm of the step time."""
        link = (1 - self.device) * spread.link
        return float(np.sqrt((self.device * self.error) ** 2 + link**2 + spread.machine**2))


def parts_of(run: Run, said: Prediction, spread: Spread) -> Parts | None:
    """Returns what of a run is uncertain, given its prediction; None = it cannot be expressed."""
    described, slow = describe_run(run), published_run(run, slower=_SLOWER)
    cluster = node_cluster(run) or known_cluster(run)
    if isinstance(described, NotExpressible) or cluster is None:
        return None
    if not isinstance(slow, Prediction):
        return None
    share = (slow.seconds / said.seconds - 1) / (_SLOWER - 1)
    return Parts(float(np.clip(share, 0.0, 1.0)), _device_error(described, cluster, spread.shared))


def _device_error(described: Described, cluster: Cluster, shared: float) -> float:
    """Returns the relative standard error of what the ops of one device take in a step."""
    layout, job = described.layout, described.job
    count = (job.batch or 1) // (layout.dp * layout.microbatch)
    few = replace(layout, dp=min(2, layout.dp))
    small = job.replace(batch=few.dp * few.microbatch * few.pp)
    case = described._replace(job=small, layout=few)
    return _error_of(case, cluster, count, shared)


@functools.lru_cache(maxsize=256)
def _error_of(described: Described, cluster: Cluster, count: int, shared: float) -> float:
    """Returns that error of a run with so many microbatches."""
    job, layout = described.job, described.layout
    graph = graph_of(described.size, job.precision)
    plan = plan_of(graph, cluster, job, layout)
    device = one_device(graph, plan, stage_of_units(plan, graph)).graph
    cost = cost_table(device, job, kinds_of(cluster), (layout.microbatch,))
    seconds, error = cost.seconds[:, 0, 0].copy(), cost.relative_error[:, 0].copy()
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
    return total_error(seconds, error, op_class, signature, shared)


def stated_coverage(runs: Sequence[Run], spread: Spread | None = None) -> dict[str, Any]:
    """Returns how many runs are inside the deciles that the program states for them.

    Args:
        runs: of one source, each of which can be predicted; a sample of them is looked at.
        spread: of the errors; None = the program's.
    """
    chosen = spread or Spread()
    inside = []
    for run in runs[:: -(-len(runs) // SAMPLE) or 1]:
        said = published_run(run)
        if not isinstance(said, Prediction):
            continue
        parts = parts_of(run, said, chosen)
        if parts is not None:
            off = abs(np.log(run.seconds / said.seconds))
            inside.append(off <= DECILE * parts.log_error(chosen))
    return {
        "stated_coverage": float(np.mean(inside)) if inside else None,
        "stated_cases": len(inside),
    }
