"""Plans in, results out: what a plan runs is built, played and described."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.cost import CostTable, cost_table, kinds_of, scaled_costs
from simcore.describe import describe
from simcore.errors import PlanError
from simcore.graph import OpGraph, Phase
from simcore.job import Job
from simcore.lower import Problem, batch_per_copy
from simcore.pipeline import Pipeline
from simcore.pipeline_build import build_pipeline
from simcore.pipeline_fold import folded, unfolded
from simcore.pipeline_ops import op_program
from simcore.pipeline_tasks import pipeline_program
from simcore.plan import DEFAULT_BUCKETS, ONE_HOST, Buckets, Plan, Settings
from simcore.program import NOWHERE, Sharded, copy_program
from simcore.result import DeviceUse, Result
from simcore.run import BatchResult, run_placement, simulate_batch
from simcore.shards import communication_at, is_sharded, one_device, plan_meshes
from simcore.steady_state import steady_period

__all__ = [
    "BatchResult",
    "Options",
    "run_placement",
    "simulate",
    "simulate_batch",
    "simulate_copies",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to simulate.

    Attributes:
        settings: order, host, contention and so on.
        reserve_memory: bytes to leave free on every GPU.
        priorities: one number per op, least first, used under ``ready`` order.
        scale: what the seconds of each op are multiplied by, for what-if questions; None = 1.
    """

    settings: Settings = ONE_HOST
    reserve_memory: int = 0
    priorities: Sequence[int] = ()
    scale: NDArray[np.float64] | None = None  # [op, kind] kinds as `kinds_of` orders them

    @classmethod
    def of(cls, plan: Plan, settings: Settings | None = None) -> "Options":
        """Returns how a plan says that it is to be simulated."""
        return cls(
            settings=settings or plan.settings,
            reserve_memory=plan.constraints.reserve_memory_bytes,
            priorities=plan.priorities,
        )


def simulate(
    graph: OpGraph, cluster: Cluster, job: Job, plan: Plan, *, settings: Settings | None = None
) -> Result:
    """Simulates one plan.

    Args:
        graph: the graph the plan is for.
        cluster: the cluster it is for.
        job: the job it is for.
        plan: the plan.
        settings: how to simulate; None = as the plan says.

    Returns:
        Step time, use of each device, memory and timeline; a plan that does not fit the memory is a
        result with ``feasible`` false, not an error.

    Raises:
        PlanError: the plan is for something else or breaks a rule; the first violation is named.
    """
    if violations := plan.validate(graph, cluster, job):
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise PlanError(violations[0] + more)
    return simulate_checked(graph, cluster, job, plan, Options.of(plan, settings))


def simulate_checked(
    graph: OpGraph, cluster: Cluster, job: Job, plan: Plan, options: Options
) -> Result:
    """Simulates a plan that `Plan.validate` has nothing against, maybe on another cluster.

    Args:
        graph: the graph the plan is for.
        cluster: it has the devices of the plan.
        job: the job.
        plan: the plan.
        options: how to simulate.

    Raises:
        PlanError: what only its parts together show.
    """
    if plan.is_pipeline:
        return simulate_pipeline(graph, cluster, job, plan, options)
    if is_sharded(plan):
        return simulate_sharded(graph, cluster, job, plan, options)
    if plan.stages[0].mesh is not None:
        devices = [cluster.device_index(name) for name in plan.stages[0].devices]
        return simulate_copies(graph, cluster, job, devices, options, buckets=plan.buckets)
    problem = Problem.build(
        graph,
        cluster,
        job,
        options.settings,
        cost=_cost(graph, cluster, job, (batch_per_copy(graph, job, 1),), options),
        reserve_memory=options.reserve_memory,
        priorities=options.priorities,
    )
    placement = problem.expand(plan.unit_devices(graph, cluster))
    return describe(problem, run_placement(problem, placement))


def simulate_copies(
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    devices: Sequence[int],
    options: Options,
    *,
    buckets: Buckets = DEFAULT_BUCKETS,
) -> Result:
    """Simulates copies of the model, each with its slice of the batch, that sum their gradients.

    Args:
        graph: one copy.
        cluster: the cluster.
        job: the job; its batch is divided among the copies.
        devices: device indices, one a copy, in rank order.
        options: how to simulate.
        buckets: how gradients are put together for the all-reduces.

    Raises:
        PlanError: no parameter is trained, the batch does not divide, a route is missing, or the
            seconds of the graph were measured at one batch.
    """
    batch = batch_per_copy(graph, job, len(devices))
    cost = _cost(graph, cluster, job, (batch,), options)
    program = copy_program(graph, cluster, devices, cost, buckets)
    problem = Problem.build(
        program.graph,
        cluster,
        job,
        options.settings,
        cost=program.cost,
        copies=len(devices),
        reserve_memory=options.reserve_memory,
        priorities=program.priorities(options.priorities),
        collectives=program.collectives,
    )
    return describe(problem, run_placement(problem, program.placement), program.held)


def simulate_sharded(
    graph: OpGraph, cluster: Cluster, job: Job, plan: Plan, options: Options
) -> Result:
    """Simulates a plan of one stage in which several devices share a copy, op by op.

    Args:
        graph: the whole graph.
        cluster: the cluster.
        job: the job; its batch is divided among the copies.
        plan: the plan; `Plan.validate` has nothing against it.
        options: how to simulate.

    Raises:
        PlanError: the graph cannot be sharded so, or the batch does not divide.
    """
    device = one_device(graph, plan, np.zeros(graph.num_units, np.int32))
    mesh = plan_meshes(plan)[0]
    parts = mesh.copies * device.samples
    batch = batch_per_copy(graph, job, parts)
    cost = _cost(device.graph, cluster, job, (batch,), options, device.base)
    places = [cluster.device_index(name) for name in plan.stages[0].devices]
    sharded = Sharded(mesh, communication_at(device, mesh, batch or 1))
    program = copy_program(device.graph, cluster, places, cost, plan.buckets, sharded)
    base = np.append(device.base, NOWHERE)[program.base]
    program = replace(program, base=np.maximum(base, NOWHERE).astype(np.int32))
    problem = Problem.build(
        program.graph,
        cluster,
        job,
        options.settings,
        cost=program.cost,
        copies=parts,
        reserve_memory=options.reserve_memory,
        priorities=program.priorities(options.priorities),
        collectives=program.collectives,
    )
    return describe(problem, run_placement(problem, program.placement), program.held)


def simulate_pipeline(
    graph: OpGraph, cluster: Cluster, job: Job, plan: Plan, options: Options
) -> Result:
    """Simulates a plan of stages and microbatches, task by task or op by op.

    Args:
        graph: the graph.
        cluster: the cluster.
        job: the job.
        plan: the plan; `Plan.validate` has nothing against it.
        options: how to simulate; `settings.granularity` says what a task is.

    Raises:
        PlanError: the stages, the schedule or the batch do not go together.
    """
    pipeline = build_pipeline(graph, cluster, job, plan, scale=options.scale)
    if options.settings.granularity == "op":
        batches = tuple(dict.fromkeys(tables.batch for tables in pipeline.tables))
        cost = _cost(graph, cluster, job, batches, options)
        program = op_program(graph, cluster, job, pipeline, cost=cost)
    else:
        if options.settings.host == "per_rank":
            pipeline = folded(pipeline, cluster)
        program = pipeline_program(graph.name, cluster, pipeline, job.batch)
    problem = Problem.build(
        program.graph,
        cluster,
        job,
        options.settings,
        cost=program.cost,
        reserve_memory=options.reserve_memory,
        collectives=program.collectives,
    )
    result = describe(problem, run_placement(problem, program.placement), program.held)
    result = unfolded(result, pipeline, cluster)
    if pipeline.schedule.asynchronous:
        return per_minibatch(result, pipeline, cluster)
    return result


def _cost(
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    batches: Sequence[int | None],
    options: Options,
    base: NDArray[np.int32] | None = None,
) -> CostTable:
    """Returns the cost of every op, [op of the graph]; `base` names the whole graph's ops."""
    cost = cost_table(graph, job, kinds_of(cluster), batches)
    return cost if options.scale is None else scaled_costs(cost, options.scale, base)


def per_minibatch(result: Result, pipeline: Pipeline, cluster: Cluster) -> Result:
    """Returns what one minibatch of an asynchronous pipeline takes in the steady state.

    Its seconds are the maximum cycle mean of the schedule with hops that nothing else shares; where
    stages have copies, or hosts are slower, what the third quarter of the timeline shows.
    """
    count = pipeline.schedule.num_microbatches
    updates = np.flatnonzero(result.graph.phase == Phase.U)
    seconds = max((use.busy for use in result.devices), default=0.0) / count
    if len(updates) >= count:
        ends = result.run.end[updates].reshape(-1, len(updates) // count).max(1)
        ends = np.maximum.accumulate(ends)
        early, late = count // 2, 3 * count // 4
        seconds = max(seconds, float(ends[late] - ends[early]) / max(1, late - early))
    if all(len(rank) == 1 for rank in pipeline.devices):
        seconds = max(seconds, hop_period(pipeline, cluster))
    devices = tuple(_use_per_minibatch(use, count, seconds) for use in result.devices)
    return replace(result, step_time=seconds, devices=devices)


def _use_per_minibatch(use: DeviceUse, count: int, seconds: float) -> DeviceUse:
    """Returns how a device spends one minibatch; idle causes of the start and the end are cut."""
    busy = use.busy / count
    communication = min(use.communication / count, seconds - busy)
    launch = min(use.launch / count, seconds - busy - communication)
    rest = seconds - busy - communication - launch
    return replace(use, busy=busy, communication=communication, launch=launch, bubble=rest)


def hop_period(pipeline: Pipeline, cluster: Cluster) -> float:
    """Returns the steady seconds per minibatch of stages of one device each."""
    schedule = pipeline.schedule
    device = [pipeline.places(stage)[0] for stage in range(schedule.num_stages)]
    kind = [pipeline.kinds.index(cluster.devices[index].kind) for index in device]
    phases = {action.phase for row in schedule.actions for action in row}
    cost = {
        phase: [
            float(pipeline.cost(stage, phase).seconds[kind[stage]])
            for stage in range(schedule.num_stages)
        ]
        for phase in phases
    }
    update = [
        float(pipeline.cost(stage, Phase.U).seconds[kind[stage]])
        for stage in range(schedule.num_stages)
    ]
    hops = {}
    for edge in schedule.edges:
        for way in (edge, edge[::-1]):
            pair = (device[way[0]], device[way[1]])
            size = pipeline.sent(edge, forward=way == edge)
            hops[way] = float(cluster.route_latency[pair] + size / cluster.route_bandwidth[pair])
    return steady_period(schedule, cost, hops, update).seconds
