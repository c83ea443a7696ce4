"""A published run -> seconds of its step, through capture, sharding, pipelines and simulator."""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from calibration.published.assumptions import HOST_FLOOR
from calibration.published.clusters import cluster_of, machine_of
from calibration.published.models import GPTSize, graph_of
from calibration.published.plans import Layout, plan_of
from calibration.published.reading import Described, NotExpressible, Timed, describe_run
from calibration.published.rows import Run
from simcore.cluster import Cluster
from simcore.cost import CostTable, cost_table, kinds_of
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.lower import Problem
from simcore.mesh import Mesh
from simcore.pipeline import Pipeline
from simcore.pipeline_build import build_pipeline, stage_of_units
from simcore.pipeline_fold import folded
from simcore.pipeline_tasks import pipeline_program
from simcore.plan import RANK_HOSTS
from simcore.run import run_placement
from simcore.schedule_names import make_schedule
from simcore.shards import OneDevice, one_device
from simcore.signature import Phase

MODULES = ("embedding.", "layers.", "final_layernorm.", "head.")  # of the model, without its loss


class Prediction(NamedTuple):
    """What the simulator says of a published run."""

    seconds: float  # of one step
    layout: Layout


def published_run(run: Run, *, host_floor: float | None = None) -> Prediction | NotExpressible:
    """Returns what the simulator says of a published run, or why it says nothing.

    Args:
        run: a row.
        host_floor: least seconds of an op, see `assumptions.HOST_FLOOR`; None = the fitted one.

    Raises:
        CaptureError: a model that the capture refuses.
        ProfileError: a malformed profile.
    """
    described = describe_run(run)
    if isinstance(described, NotExpressible):
        return described
    machine = machine_of(run)
    if machine is None:
        return NotExpressible(f"no machine known for {run.gpu}")
    floor = HOST_FLOOR.value if host_floor is None else host_floor
    step = Step(cluster_of(run, machine), described, floor if described.waits else 0.0)
    return Prediction(step.seconds(), described.layout)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run.

    Attributes:
        cluster: where it runs.
        described: the run.
        floor: least seconds of an op.
    """

    cluster: Cluster
    described: Described
    floor: float

    def seconds(self) -> float:
        """Returns the seconds of the step."""
        pipeline = self.pipeline()
        if self.described.only == "forward":
            return float(pipeline.tables[0].seconds[0, Phase.F, 0])
        pipeline = folded(pipeline, self.cluster)
        job = self.described.job
        program = pipeline_program("published", self.cluster, pipeline, job.batch)
        problem = Problem.build(
            program.graph,
            self.cluster,
            job,
            RANK_HOSTS,
            cost=program.cost,
            collectives=program.collectives,
        )
        return run_placement(problem, program.placement).step_time

    def pipeline(self) -> Pipeline:
        """Returns the pipeline of the run; the tables of its stages are built once.

        They do not depend on the number of microbatches, nor on that of copies beyond two.
        """
        described = self.described
        job, layout = described.job, described.layout
        few = replace(layout, dp=min(2, layout.dp))
        small = job.replace(batch=few.dp * few.microbatch * few.pp)
        base = _built(_Case(described.size, small, few, described.only, self.floor), self.cluster)
        per_rank = layout.dp * layout.tp
        devices = [tuple(range(per_rank * n, per_rank * (n + 1))) for n in range(layout.pp)]
        schedule = make_schedule(
            base.schedule.name,
            layout.pp,
            (job.batch or 1) // (layout.dp * layout.microbatch),
            stages_per_rank=layout.chunks,
        )
        mesh = Mesh.of({"dp": layout.dp} | ({"tp": layout.tp} if layout.tp > 1 else {}))
        return replace(
            base,
            schedule=schedule,
            devices=tuple(devices),
            meshes=(mesh,) * layout.pp,
            microbatch=layout.dp * layout.microbatch,
        )


class _Case(NamedTuple):
    """What the stage tables of a pipeline depend on, beside the cluster."""

    size: GPTSize
    job: Job
    layout: Layout
    only: Timed
    floor: float


@functools.lru_cache(maxsize=1024)
def _built(case: _Case, cluster: Cluster) -> Pipeline:
    graph = graph_of(case.size, case.job.precision)
    plan = plan_of(graph, cluster, case.job, case.layout)
    device = one_device(graph, plan, stage_of_units(plan, graph))
    batch = case.layout.microbatch
    cost = cost_table(device.graph, case.job, kinds_of(cluster), (batch,))
    cost = with_floor(cost, device, case.floor)
    if case.only != "all":
        cost = without_loss(cost, device.graph)
    return build_pipeline(graph, cluster, case.job, plan, cost=cost)


def with_floor(cost: CostTable, device: OneDevice, floor: float) -> CostTable:
    """Returns costs in which no op of forward or backward takes less than the host's time for it.

    The host's time for a collective is in the op before it: the collective itself takes what its
    curve says.
    """
    update = device.graph.phase == Phase.U
    waits = (cost.launch > 0) & ~update[:, None]
    seconds = np.where(waits[:, :, None], np.maximum(cost.seconds, floor), cost.seconds)
    before = np.array([op - 1 for op in device.communication if not update[op]], np.int64)
    np.add.at(seconds, before, floor)
    return replace(cost, seconds=seconds)


def without_loss(cost: CostTable, graph: OpGraph) -> CostTable:
    """Returns costs in which neither the loss nor the optimizer takes time."""
    timed = np.array([name.startswith(MODULES) for name in graph.op_names])
    free = ((graph.phase == Phase.U) | ~timed)[:, None]
    seconds = np.where(free[:, :, None], 0.0, cost.seconds)
    return replace(cost, seconds=seconds, launch=np.where(free, 0.0, cost.launch))
