"""A published run -> seconds of its step, through capture, sharding, pipelines and simulator."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from calibration.published.assumptions import FITTED, HOST_FLOOR, SENDING, Factors
from calibration.published.blocking import with_stops
from calibration.published.cause_compiler import with_compiler
from calibration.published.cause_host import Host, with_host
from calibration.published.cause_kernels import Kernels, kernel_counts, with_kernels
from calibration.published.cause_overlap import with_overlap
from calibration.published.clusters import cluster_of, machine_of
from calibration.published.described import Described, NotExpressible, Products, Timed
from calibration.published.messages import with_messages, with_sending
from calibration.published.mixtures import with_plain_ops
from calibration.published.models import GPTSize, ModelSize, graph_of
from calibration.published.node_clusters import node_cluster
from calibration.published.plans import Layout, block_schedule, plan_of
from calibration.published.reading import describe_run
from calibration.published.rows import Run
from calibration.published.sustained import with_power_limit
from calibration.published.tensor_float import with_tf32
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
from simcore.program import Program
from simcore.run import run_placement
from simcore.schedule_names import make_schedule
from simcore.shards import one_device, with_collectives
from simcore.signature import Phase
from simcore.stages import StageTables

_WIDE_PASSES = 3  # 16 bits are cast (6 bytes), then added to 32 (12); added to 16 bits: 6 bytes
_WIDE_BYTES = 4  # an all-reduce of 32 bits against a reduce-scatter of 16
_FIRST_BACKWARD = re.compile(r"(\d+)B0\b")  # name of a stage's task
MODULES = ("embedding.", "layers.", "final_layernorm.", "head.")  # of the model, without its loss


class Prediction(NamedTuple):
    """What the simulator says of a published run."""

    seconds: float  # of one step
    layout: Layout


def published_run(
    run: Run, *, factors: Factors = FITTED, slower: float = 1.0
) -> Prediction | NotExpressible:
    """Returns what the simulator says of a published run, or why it says nothing.

    Args:
        run: a row.
        factors: residual factors.
        slower: how many times as long ops take as the profiles say.

    Raises:
        CaptureError: a model that the capture refuses.
        ProfileError: a malformed profile.
    """
    described = describe_run(run)
    if isinstance(described, NotExpressible):
        return described
    cluster = node_cluster(run) or known_cluster(run)
    if cluster is None:
        return NotExpressible(f"no machine known for {run.gpu}")
    stated = HOST_FLOOR.value if described.floor is None else described.floor
    floor = stated if factors.floor is None else factors.floor
    slower *= described.waiting
    step = Step(cluster, described, floor if described.waits else 0.0, slower, factors)
    return Prediction(step.seconds(), described.layout)


def known_cluster(run: Run) -> Cluster | None:
    """Returns the cluster of a run on nodes of one kind, None = unknown."""
    machine = machine_of(run)
    return None if machine is None else cluster_of(run, machine)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a run.

    Attributes:
        cluster: where it runs.
        described: the run.
        floor: least seconds of an op.
        slower: how many times as long ops take as the profiles say.
        factors: residual factors, but for the floor.
    """

    cluster: Cluster
    described: Described
    floor: float
    slower: float = 1.0
    factors: Factors = FITTED

    def seconds(self) -> float:
        """Returns the seconds of the step."""
        pipeline = self.pipeline()
        if self.described.only == "forward":
            return float(pipeline.tables[0].seconds[0, Phase.F, 0])
        pipeline = folded(pipeline, self.cluster)
        job = self.described.job
        program = pipeline_program("published", self.cluster, pipeline, job.batch)
        cost = self._spared(program)
        problem = Problem.build(
            program.graph,
            self.cluster,
            job,
            RANK_HOSTS,
            cost=cost,
            collectives=program.collectives,
        )
        step = run_placement(problem, program.placement).step_time + self.described.idle
        return max(step, self.described.loading)

    def pipeline(self) -> Pipeline:
        """Returns the pipeline of the run; the tables of its stages are built once.

        They do not depend on the number of microbatches, nor on that of copies beyond two.
        """
        described = self.described
        job, layout = described.job, described.layout
        few = replace(layout, dp=min(2, layout.dp))
        small = job.replace(batch=few.dp * few.microbatch * few.pp)
        case = _Case(
            size=described.size,
            job=small,
            layout=few,
            only=described.only,
            factors=self.factors._replace(floor=self.floor),
            products=described.products,
            kernels=described.kernels,
        )
        base = slowed(_built(case, self.cluster), self.slower)
        per_rank = layout.per_rank
        devices = [tuple(range(per_rank * n, per_rank * (n + 1))) for n in range(layout.pp)]
        count = (job.batch or 1) // (layout.dp * layout.microbatch)
        if layout.blocks > 1:
            schedule = block_schedule(layout.blocks, count)
        else:
            schedule = make_schedule(
                base.schedule.name, layout.pp, count, stages_per_rank=layout.chunks
            )
        mesh = Mesh.of(layout.mesh)
        return replace(
            base,
            schedule=schedule,
            devices=tuple(devices),
            meshes=(mesh,) * layout.pp,
            microbatch=layout.dp * layout.microbatch,
            tables=self._with_messages(base.tables, devices),
        )

    def _with_messages(
        self, tables: Sequence[StageTables], devices: Sequence[Sequence[int]]
    ) -> tuple[StageTables, ...]:
        """Returns tables in which stages have what messages cost them beside the way."""
        described = self.described
        found = (self._first_table(tables[0]), *tables[1:])
        if described.waits and not described.kernels.runs_ahead:
            found = with_messages(found, self.floor)
        if described.kernels.traced:
            return with_sending(found, SENDING)
        if described.kernels.blocks or described.splits:
            return with_stops(found, self.cluster, devices)
        return found

    def _spared(self, program: Program) -> CostTable:
        """Returns the costs of a program's tasks, the first backwards running nothing again."""
        if not self.described.layout.spares:
            return program.cost
        plain = replace(self.described.layout, recompute="none", spares=False)
        without = replace(self, described=self.described._replace(layout=plain)).pipeline()
        seconds = program.cost.seconds.copy()
        for op, name in enumerate(program.graph.op_names):
            if first := _FIRST_BACKWARD.match(name):
                seconds[op] = without.cost(int(first[1]), Phase.B).seconds[:, None]
        return replace(program.cost, seconds=seconds)

    def _first_table(self, table: StageTables) -> StageTables:
        """Returns the table that has the sizes of messages, as this framework sends them."""
        if not (self.described.splits or self.described.kernels.fused):
            return table
        tp = self.described.layout.tp
        forward, backward = table.forward_bytes // tp, table.backward_bytes // tp
        return replace(table, forward_bytes=forward, backward_bytes=backward)


class _Case(NamedTuple):
    """What the stage tables of a pipeline depend on, beside the cluster."""

    size: ModelSize
    job: Job
    layout: Layout
    only: Timed
    factors: Factors
    products: Products
    kernels: Kernels


@functools.lru_cache(maxsize=1024)
def _built(case: _Case, cluster: Cluster) -> Pipeline:
    graph = graph_of(case.size, case.job.precision)
    plan = plan_of(graph, cluster, case.job, case.layout)
    device = one_device(graph, plan, stage_of_units(plan, graph))
    batch = case.layout.microbatch
    cost = cost_table(device.graph, case.job, kinds_of(cluster), (batch,))
    if case.products == "tf32":
        cost = with_tf32(cost, device.graph, case.job, (batch,))
    elif case.products == "sustained":
        cost = with_power_limit(cost, device.graph, (batch,))
    if case.kernels.compiled:
        cost = with_compiler(cost, device.graph, (batch,))
    cost = with_kernels(
        cost,
        device.graph,
        case.kernels,
        row_bytes=_row_bytes(case),
        unaligned=case.factors.unaligned,
        attentions=_attentions(case),
    )
    kernels = kernel_counts(device.graph, case.kernels, _attentions(case))
    alone = with_collectives(cost, device, plan, cluster, [batch] * case.layout.num_stages)
    if case.kernels.overlaps:
        cost = with_overlap(cost, device, alone.seconds)
    hosted = with_host(cost, device, _host(case), kernels, alone.seconds)
    cost = with_plain_ops(hosted, cost, device.graph)
    if case.only != "all":
        cost = without_loss(cost, device.graph)
    pipeline = build_pipeline(graph, cluster, case.job, plan, cost=cost)
    return _summed(pipeline, case.kernels)


def _summed(pipeline: Pipeline, kernels: Kernels) -> Pipeline:
    """Returns a pipeline that adds and sums gradients as its framework does."""
    if not (kernels.overlaps or kernels.wide or kernels.traced):
        return pipeline
    passes = _WIDE_PASSES if kernels.wide else 0.0
    tables = tuple(replace(each, accumulate=each.accumulate * passes) for each in pipeline.tables)
    if not kernels.wide:
        return replace(pipeline, tables=tables)
    parts = tuple(
        tuple(part._replace(num_bytes=part.num_bytes * _WIDE_BYTES) for part in stage)
        for stage in pipeline.parts
    )
    return replace(pipeline, tables=tables, parts=parts)


def _host(case: _Case) -> Host:
    """Returns what launches the ops."""
    floor, kernels = case.factors.floor or 0.0, case.kernels
    gap = case.factors.gap if kernels.traced else 0.0
    return Host(floor, kernels.runs_ahead, kernels.blocks, kernels.traced, gap)


def _attentions(case: _Case) -> int:
    """Returns samples x heads of one device, 0 where they do not matter."""
    if not isinstance(case.size, GPTSize):
        return 0
    return case.layout.microbatch * case.size.heads // case.layout.tp


def _row_bytes(case: _Case) -> int:
    """Returns the bytes of a row of logits on one device, 0 where they do not matter."""
    if not isinstance(case.size, GPTSize) or case.job.precision == "fp32":
        return 0  # products in fp32 use no tensor cores
    return case.size.vocabulary // case.layout.tp * 2


def slowed(pipeline: Pipeline, factor: float) -> Pipeline:
    """Returns a pipeline whose devices take so many times as long; hosts and links do not."""
    if factor == 1:
        return pipeline
    tables = tuple(
        replace(each, seconds=each.seconds * factor, accumulate=each.accumulate * factor)
        for each in pipeline.tables
    )
    parts = tuple(
        tuple(
            part._replace(cost=part.cost._replace(seconds=part.cost.seconds * factor))
            for part in stage
        )
        for stage in pipeline.parts
    )
    return replace(pipeline, tables=tables, parts=parts)


def without_loss(cost: CostTable, graph: OpGraph) -> CostTable:
    """Returns costs in which neither the loss nor the optimizer takes time."""
    timed = np.array([name.startswith(MODULES) for name in graph.op_names])
    free = ((graph.phase == Phase.U) | ~timed)[:, None]
    seconds = np.where(free[:, :, None], 0.0, cost.seconds)
    return replace(cost, seconds=seconds, launch=np.where(free, 0.0, cost.launch))
