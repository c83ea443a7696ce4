"""Collected profiles against the steps they were collected from: predicted and measured seconds.

The prediction is the simulator's, of the whole model on one device: what the parts add up to is
held against the whole. It tells whether anything of a step is missing or counted twice, not how
well a model that was never measured is predicted.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import asdict

from calibration.collect.collect import Collected
from calibration.collect.models import Workload
from calibration.collect.rows import STEP, STEP_WALL
from simcore.cluster import Cluster, Device
from simcore.cost import cost_table
from simcore.op_curves import CostSource
from simcore.plan import Plan
from simcore.profile_store import home_at
from simcore.signature import OpClass
from simcore.simulation import simulate
from simcore.sources import load_graph


class StepCheck(NamedTuple):
    """One workload, predicted and measured."""

    workload: str
    predicted: float  # s
    measured: float  # s of the core on a CPU; s of the wall on a GPU
    wall: float  # s
    roofline_share: float  # of the predicted device time, of ops neither measured nor updates

    @property
    def error(self) -> float:
        """Returns predicted / measured - 1."""
        return self.predicted / self.measured - 1


def check_steps(collected: Collected, folder: Path) -> list[StepCheck]:
    """Returns, for each workload that was measured, its step as the simulator predicts it.

    Args:
        collected: what a collection has returned.
        folder: where it wrote.
    """
    times = {r.target: r.seconds for r in collected.records if r.kind == "op" and not r.dims}
    on_gpu = collected.host.device == "cuda"
    found = []
    with home_at(folder):
        for work in collected.workloads:
            wall = times.get(f"{STEP_WALL} {work.label}")
            if wall is None:
                continue
            measured = wall if on_gpu else times[f"{STEP} {work.label}"]
            found.append(_predict(work, collected.host.kind, measured, wall))
    return found


def _predict(work: Workload, kind: str, measured: float, wall: float) -> StepCheck:
    graph, job, _ = load_graph(work.model, asdict(work.job))
    cluster = Cluster(name="one device", devices=(Device.of_kind("one", kind),))
    plan = Plan.from_placement(graph, cluster, job, np.zeros(graph.num_units, np.int64))
    result = simulate(graph, cluster, job, plan)
    table = cost_table(graph, job, [kind], [job.batch])
    guessed = (table.source[:, 0] == CostSource.ROOFLINE) & (graph.op_class != OpClass.UPDATE)
    seconds = table.seconds[:, 0, 0]
    share = float(seconds[guessed].sum() / max(seconds.sum(), 1e-12))
    return StepCheck(work.label, result.step_time, measured, wall, share)
