"""Many pipelines of one schedule: what their stages cost in, step times and memory out.

The tasks of a schedule, and which waits for which, are lowered once. A batch then only says what
each stage costs, holds and sends, and on which devices its ranks are. Each rank is one device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.cost import kinds_of
from simcore.errors import PlanError
from simcore.graph import OpGraph, Phase
from simcore.job import Job
from simcore.kernel import (
    NONE,
    RULE,
    SIZES,
    SPELL,
    STAGE_COST,
    STAGE_SIZE,
    TASK,
    Engine,
    Plans,
    Records,
    StageBatch,
    Template,
    flow_pipelines,
    make_outcome,
    make_records,
    make_scratch,
    play_pipelines,
    sweep_pipelines,
)
from simcore.lower import Problem
from simcore.mesh import Mesh
from simcore.pipeline import Pipeline, Tie
from simcore.pipeline_tasks import PipelineWriter, write_pipeline
from simcore.plan import RANK_HOSTS, Settings
from simcore.run import BatchResult, share_out, with_memory
from simcore.schedule import Schedule
from simcore.stage_cut import Cut, Messages
from simcore.stages import StageTables


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineProblem:
    """A schedule on a cluster, lowered; its pipelines run in batches."""

    schedule: Schedule
    kinds: tuple[str, ...]  # columns of costs
    ties: tuple[tuple[int, int, bool], ...]  # (source, target, whether it is updated)
    problem: Problem
    template: Template

    @classmethod
    def build(
        cls,
        cluster: Cluster,
        job: Job,
        schedule: Schedule,
        settings: Settings = RANK_HOSTS,
        *,
        ties: Sequence[Tie] = (),
    ) -> "PipelineProblem":
        """Lowers a schedule.

        Args:
            cluster: the cluster.
            job: its batch is the samples of a step.
            schedule: one that `check` accepts.
            settings: how pipelines are simulated.
            ties: between stages that use the same parameters; their bytes do not matter.

        Raises:
            PlanError: the cluster has fewer devices than the schedule has ranks.
        """
        if cluster.num_devices < schedule.num_ranks:
            raise PlanError(
                f"{cluster.name}: {cluster.num_devices} devices for {schedule.num_ranks} ranks"
            )
        kinds = kinds_of(cluster)
        blank = blank_tables(schedule, kinds)
        pipeline = Pipeline(
            schedule=schedule,
            devices=tuple((rank,) for rank in range(schedule.num_ranks)),
            meshes=(Mesh.of({}),) * schedule.num_ranks,
            tables=(blank,) * schedule.num_stages,
            parts=((),) * schedule.num_stages,
            ties=tuple(tie._replace(num_bytes=0) for tie in ties),
            microbatch=1,
            kinds=kinds,
        )
        writer = write_pipeline(schedule.name, cluster, pipeline, job.batch)
        program = writer.program()
        problem = Problem.build(program.graph, cluster, job, settings, cost=program.cost)
        return cls(
            schedule=schedule,
            kinds=kinds,
            ties=tuple((tie.source, tie.target, tie.is_updated) for tie in ties),
            problem=problem,
            template=_template(writer, program.graph, program.placement),
        )


def _template(writer: PipelineWriter, graph: OpGraph, placement: NDArray[np.int32]) -> Template:
    tasks = make_records(graph.num_ops, TASK)
    seen: set[int] = set()
    for op, task in writer.tasks.items():
        tasks["stage"][op], tasks["phase"][op] = task.stage, task.phase
        tasks["adds"][op], tasks["is_free"][op] = task.adds, task.is_free
        tasks["is_first"][op] = task.stage not in seen
        seen.add(task.stage)
    tasks["rank"] = placement
    rules = make_records(graph.num_tensors, RULE)
    rules["share"] = 1.0
    for tensor, rule in writer.rules.items():
        rules["size_of"][tensor] = SIZES.index(rule.size_of)
        rules["number"][tensor], rules["share"][tensor] = rule.number, rule.share
    rows = [
        row
        for tensor, rule in sorted(writer.rules.items())
        for row in _spells(graph, placement, tensor, rule.size_of)
    ]
    spells = make_records(len(rows), SPELL)
    for key, values in zip(SPELL.names or (), zip(*rows, strict=True), strict=True):
        spells[key] = values
    return Template(tasks, rules, spells)


def _spells(
    graph: OpGraph, placement: NDArray[np.int32], tensor: int, size_of: str
) -> list[tuple[int, int, int, int, int]]:
    """Returns from which task to which a tensor is on each rank, and where it counts as extra."""
    producer = int(graph.tensor_producer[tensor])
    readers = graph.consumers[graph.first_consumer[tensor] : graph.first_consumer[tensor + 1]]
    uses = [producer, *readers.tolist()]
    is_message = size_of in {"forward", "backward", "tie"}
    is_saved = size_of in {"freed", "shared", "made"}
    found = []
    for rank in dict.fromkeys(int(placement[op]) for op in uses):
        mine = [op for op in uses if placement[op] == rank]
        counts_first = is_message or (is_saved and mine[0] == producer)
        found.append((tensor, min(mine), max(mine), int(counts_first), int(is_message)))
    return found


def blank_tables(schedule: Schedule, kinds: Sequence[str]) -> StageTables:
    """Returns tables of stages that cost and hold nothing."""
    stages, edges = schedule.num_stages, len(schedule.edges)
    none = np.zeros(0, np.int64)
    nowhere = Messages(none, none, none)
    cut = Cut(stages, none, none.astype(np.uint8), schedule.edges, (), nowhere, nowhere, nowhere)
    times = np.zeros((stages, len(Phase), len(kinds)))
    by_stage, by_phase = np.zeros(stages, np.int64), np.zeros((stages, len(Phase)), np.int64)
    sent = np.zeros((edges, 2), np.int64)
    return StageTables(
        kinds=tuple(kinds), batch=None, recompute=(), cut=cut, seconds=times,
        ahead=times, launch=times, is_sync=times > 0, accumulate=np.zeros((stages, len(kinds))),
        saved=by_stage, kept=by_stage, extra=by_phase, first_extra=by_phase, gradient=by_stage,
        new_gradient=by_phase, parameter_bytes=by_stage, buffer_bytes=by_stage, resident=by_stage,
        elements=by_stage, state_bytes=by_stage, forward_bytes=sent, backward_bytes=sent,
        update_bytes=none,
    )  # fmt: skip


def stack_tables(pipelines: Sequence[Pipeline], problem: PipelineProblem) -> StageBatch:
    """Returns a batch of pipelines that have the problem's schedule.

    Raises:
        PlanError: one of them has copies of a stage, or another schedule.
    """
    count, stages = len(pipelines), problem.schedule.num_stages
    edges = problem.schedule.edges
    batch = StageBatch(
        costs=make_records((count, stages, len(Phase), len(problem.kinds)), STAGE_COST),
        adding=np.zeros((count, stages, len(Phase), len(problem.kinds))),
        sizes=make_records((count, stages), STAGE_SIZE),
        extra=np.zeros((count, stages, len(Phase)), np.int64),
        added=np.zeros((count, stages, len(Phase)), np.int64),
        forward=np.zeros((count, len(edges)), np.int64),
        backward=np.zeros((count, len(edges)), np.int64),
        ties=np.zeros((count, len(problem.ties)), np.int64),
        devices=np.zeros((count, problem.schedule.num_ranks), np.int32),
    )
    for row, pipeline in enumerate(pipelines):
        if pipeline.schedule != problem.schedule:
            raise PlanError(f"pipeline {row} has another schedule than the batch")
        if any(len(rank) != 1 for rank in pipeline.devices):
            raise PlanError(f"pipeline {row} has copies of a stage; a batch has none")
        batch.devices[row] = [rank[0] for rank in pipeline.devices]
        for stage, tables in enumerate(pipeline.tables):
            _stack_stage(batch, row, stage, pipeline, tables)
        for number, edge in enumerate(problem.schedule.edges):
            batch.forward[row, number] = pipeline.sent(edge, forward=True)
            batch.backward[row, number] = pipeline.sent(edge, forward=False)
        batch.ties[row] = [tie.num_bytes for tie in pipeline.ties]
    return batch


def _stack_stage(
    batch: StageBatch, row: int, stage: int, pipeline: Pipeline, tables: StageTables
) -> None:
    for phase in Phase:
        cost = pipeline.cost(stage, phase)
        for key in ("seconds", "ahead", "trail"):
            batch.costs[key][row, stage, phase] = getattr(cost, key)
        batch.adding[row, stage, phase] = pipeline.adding(stage, phase)
        batch.costs["sync"][row, stage, phase] = tables.is_sync[stage, phase]
    batch.extra[row, stage] = tables.extra[stage]
    batch.added[row, stage] = tables.new_gradient[stage]
    for key, size in pipeline.saved(stage)._asdict().items():
        batch.sizes[key][row, stage] = size
    batch.sizes["gradient"][row, stage] = pipeline.gradient(stage)
    batch.sizes["held"][row, stage] = sum(pipeline.held(stage).values())


def simulate_pipelines(
    problem: PipelineProblem, stages: StageBatch, *, threads: int | None = None
) -> BatchResult:
    """Simulates many pipelines of one schedule on all cores.

    Args:
        problem: the lowered schedule.
        stages: what the stages of each plan cost, hold and send, and their devices.
        threads: number of threads, None = one per core. The result does not depend on it.

    Returns:
        Times, memory and a status for every plan; an illegal plan raises nothing.
    """
    whole = problem.problem
    count = len(stages.devices)
    out = make_outcome(count, whole.cluster.num_devices)
    run = {Engine.FLUID: flow_pipelines, Engine.EVENTS: play_pipelines}.get(
        whole.engine, sweep_pipelines
    )

    def work(begin: int, end: int) -> None:
        tables = whole.tables._replace(
            cost=_own(whole.tables.cost),
            ops=_own(whole.tables.ops),
            tensors=_own(whole.tables.tensors),
        )
        room = np.full((1, whole.graph.num_ops), NONE, np.int32)
        scratch = make_scratch(tables)
        run(tables, whole.mode, problem.template, stages, Plans(room, out), scratch, begin, end)

    share_out(work, count, count * whole.graph.num_ops, threads)
    return with_memory(whole, out)


def _own(records: Records) -> Records:
    return records.copy()
