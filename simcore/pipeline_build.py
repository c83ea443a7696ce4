"""A plan of stages, microbatches and a schedule -> what its pipeline is, checked."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simcore.buckets import close_buckets
from simcore.cluster import Cluster
from simcore.cost import CostTable, cost_table, kinds_of, scaled_costs
from simcore.errors import PlanError
from simcore.graph import OpClass, OpGraph, Phase
from simcore.job import Job
from simcore.mesh import Mesh
from simcore.pipeline import Cost, Part, Pipeline, Tie
from simcore.plan import CUSTOM, SEMANTICS_BATCH_NORM, Buckets, Plan
from simcore.schedule import Schedule
from simcore.schedule_check import check
from simcore.schedule_names import SCHEDULE_NAMES, make_schedule
from simcore.schedule_text import parse_action
from simcore.shards import one_device, plan_meshes, with_collectives
from simcore.stage_cut import check_stages, cut_graph
from simcore.stages import StageTables, stage_tables
from simcore.steady_state import SEMANTICS_ASYNC

ASYNCHRONOUS = "pipedream"  # the schedule by name that updates without waiting
STEADY_MINIBATCHES = 8  # per rank


def stage_of_units(plan: Plan, graph: OpGraph) -> NDArray[np.int32]:
    """Returns the stage of every placement unit, int32 [unit].

    Raises:
        PlanError: a unit is in no stage, in two, or not in the graph.
    """
    if len(plan.stages) == 1 and not plan.stages[0].ops:
        return np.zeros(graph.num_units, np.int32)
    index = {name: unit for unit, name in enumerate(graph.unit_names)}
    found = np.full(graph.num_units, -1, np.int32)
    for number, stage in enumerate(plan.stages):
        for name in stage.ops:
            if name not in index:
                raise PlanError(f"stage {stage.name!r}: no op {name!r} in the graph")
            if found[index[name]] >= 0:
                other = plan.stages[found[index[name]]].name
                raise PlanError(f"op {name!r} is in stages {other!r} and {stage.name!r}")
            found[index[name]] = number
    for number, stage in enumerate(plan.stages):
        if not stage.ops:
            raise PlanError(f"stage {stage.name!r} (number {number}) has no ops")
    if (found < 0).any():
        name = graph.unit_names[int(np.flatnonzero(found < 0)[0])]
        raise PlanError(f"op {name!r} is in no stage")
    return found


def plan_schedule(plan: Plan, edges: Sequence[tuple[int, int]]) -> Schedule:
    """Returns the schedule of a plan: stages with the same devices share a rank.

    Raises:
        PlanError: no such schedule, or one that these stages cannot run (`DeadlockError` where
            ranks wait for each other); its ``grid`` shows where.
    """
    ranks = list(dict.fromkeys(stage.devices for stage in plan.stages))
    stage_rank = tuple(ranks.index(stage.devices) for stage in plan.stages)
    if plan.schedule == CUSTOM:
        return _custom_schedule(plan, stage_rank, tuple(edges))
    if plan.schedule not in SCHEDULE_NAMES:
        raise PlanError(f"no schedule {plan.schedule!r}; known: {', '.join(SCHEDULE_NAMES)}")
    per_rank, rest = divmod(len(plan.stages), len(ranks))
    if rest:
        raise PlanError(f"{len(plan.stages)} stages do not divide among {len(ranks)} ranks")
    count = plan.microbatches
    if plan.schedule == ASYNCHRONOUS:  # it goes on for ever; this many show the steady state
        count = max(count, STEADY_MINIBATCHES * len(ranks))
    schedule = make_schedule(
        plan.schedule,
        len(ranks),
        count,
        stages_per_rank=per_rank,
        edges=tuple(edges) if per_rank == 1 and edges else None,
    )
    if set(edges) - set(schedule.edges):
        odd = min(set(edges) - set(schedule.edges))
        raise PlanError(
            f"schedule {plan.schedule!r} with several stages a rank needs a chain of stages; stage "
            f"{odd[0]} also sends to stage {odd[1]}"
        )
    if schedule.stage_rank != stage_rank:
        wanted = ", ".join(str(rank) for rank in schedule.stage_rank)
        raise PlanError(
            f"schedule {plan.schedule!r} runs stages 0, 1, ... on ranks {wanted}; the plan puts "
            f"them on {', '.join(str(rank) for rank in stage_rank)}"
        )
    return schedule


def _custom_schedule(
    plan: Plan, stage_rank: tuple[int, ...], edges: tuple[tuple[int, int], ...]
) -> Schedule:
    """Returns the schedule whose action lists are in the plan, checked."""
    schedule = Schedule(
        name=CUSTOM,
        num_ranks=max(stage_rank) + 1,
        num_stages=len(plan.stages),
        num_microbatches=plan.microbatches,
        stage_rank=stage_rank,
        actions=tuple(tuple(parse_action(text) for text in row) for row in plan.actions),
        edges=edges,
    )
    check(schedule)
    return schedule


def semantics_of(plan: Plan, graph: OpGraph) -> tuple[str, ...]:
    """Returns what a plan changes in the mathematics of the training step, in words."""
    found = []
    if plan.schedule == ASYNCHRONOUS:
        found.append(SEMANTICS_ASYNC)
    splits = plan.microbatches > 1 and plan.schedule != ASYNCHRONOUS
    if splits and any("batch_norm" in target for target in graph.op_targets):
        found.append(SEMANTICS_BATCH_NORM)
    return tuple(found)


def check_semantics(plan: Plan, graph: OpGraph) -> None:
    """Refuses a plan that changes the mathematics without saying so."""
    for change in semantics_of(plan, graph):
        if change not in plan.semantics:
            raise PlanError(
                f"the plan changes the mathematics ({change}) and its semantics do not say so"
            )


def build_pipeline(
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    plan: Plan,
    *,
    cost: CostTable | None = None,
    scale: NDArray[np.float64] | None = None,
) -> Pipeline:
    """Returns the pipeline that a valid plan describes.

    Args:
        graph: the graph.
        cluster: the cluster.
        job: the job.
        plan: stages with meshes, microbatches, a schedule.
        cost: seconds of every op at the samples that one device sees, a variant for each number of
            copies; None = from the hardware profiles.
        scale: what the seconds of each op are multiplied by, [op, kind]; None = 1.

    Raises:
        PlanError: the stages, the schedule or the batch do not go together.
    """
    check_semantics(plan, graph)
    stage = stage_of_units(plan, graph)
    _check_alone(graph)
    check_stages(graph, stage)
    device = one_device(graph, plan, stage)
    graph, stage = device.graph, device.stage
    schedule = plan_schedule(plan, cut_graph(graph, stage).edges)
    meshes = plan_meshes(plan)
    copies = [mesh.copies for mesh in meshes]
    microbatch = split_batch(job, plan, schedule.asynchronous, device.samples)
    sizes = [microbatch // (count * device.samples) for count in copies]
    kinds, batches = kinds_of(cluster), tuple(dict.fromkeys(sizes))
    cost = cost_table(graph, job, kinds, batches) if cost is None else cost
    cost = cost if scale is None else scaled_costs(cost, scale, device.base)
    cost = with_collectives(cost, device, plan, cluster, sizes)
    recompute = tuple(each.recompute for each in plan.stages)
    tables: dict[int, StageTables] = {
        size: stage_tables(graph, job, kinds, stage, size, recompute=recompute, cost=cost)
        for size in batches
    }
    splits = schedule.splits
    parts = [
        backward_parts(graph, cost, tables[size], stage, plan.buckets, weights_only=splits)
        if copies[stage] > 1
        else ()
        for stage, size in enumerate(sizes)
    ]
    mesh_of = {each.devices: mesh for each, mesh in zip(plan.stages, meshes, strict=True)}
    return Pipeline(
        schedule=schedule,
        devices=tuple(tuple(map(cluster.device_index, rank)) for rank in mesh_of),
        meshes=tuple(mesh_of.values()),
        tables=tuple(tables[size] for size in sizes),
        parts=tuple(parts),
        ties=find_ties(graph, tables[sizes[0]]),
        microbatch=microbatch,
        kinds=kinds,
        optimizer_sharding=plan.optimizer_sharding,
        buckets=plan.buckets,
    )


def _check_alone(graph: OpGraph) -> None:
    """Refuses a graph of several copies."""
    if (graph.op_class == OpClass.COLLECTIVE).any():
        op = int(np.argmax(graph.op_class == OpClass.COLLECTIVE))
        raise PlanError(
            f"{graph.name}: {graph.op_names[op]!r} is a collective; stages are cut from one copy"
        )


def find_ties(graph: OpGraph, tables: StageTables) -> tuple[Tie, ...]:
    """Returns what stages that use the same parameters tell each other once a step."""
    found: dict[tuple[int, int, bool], int] = {}
    cut = tables.cut
    sizes = graph.at_batch(tables.batch).tensor_bytes
    for tensor, source, target in zip(*cut.update, strict=True):
        updated = bool(cut.phase[graph.tensor_producer[tensor]] == Phase.U)
        key = (int(source), int(target), updated)
        found[key] = found.get(key, 0) + int(sizes[tensor])
    return tuple(Tie(a, b, size, updated) for (a, b, updated), size in sorted(found.items()))


def split_batch(job: Job, plan: Plan, asynchronous: bool, samples: int = 1) -> int:
    """Returns the samples of a microbatch, over all copies.

    Args:
        job: the job.
        plan: the plan.
        asynchronous: whether microbatches are minibatches of their own.
        samples: devices of a copy that share its samples.

    Raises:
        PlanError: the batch is unknown, or does not divide.
    """
    if job.batch is None:
        raise PlanError("the batch is unknown, so it cannot be divided (--batch)")
    count = 1 if asynchronous else plan.microbatches
    if job.batch % count:
        raise PlanError(f"a batch of {job.batch} does not divide by {count} microbatches")
    size = job.batch // count
    for stage in plan.stages:
        parts = Mesh.of(stage.mesh or {}).copies * samples
        if size % parts:
            raise PlanError(
                f"stage {stage.name!r}: a microbatch of {size} does not divide by {parts} copies"
            )
    return size


def backward_parts(
    graph: OpGraph,
    cost: CostTable,
    tables: StageTables,
    stage: int,
    buckets: Buckets,
    *,
    weights_only: bool,
) -> tuple[Part, ...]:
    """Returns the backward of one stage in the pieces that fill one bucket each.

    Args:
        graph: the graph.
        cost: has a variant for the batch of the tables.
        tables: of the stages; what the backward runs again is spread over the pieces.
        stage: which stage.
        buckets: how gradients are put together.
        weights_only: whether the weight gradients have a phase of their own.
    """
    cut, variant = tables.cut, cost.batches.index(tables.batch)
    wanted = [Phase.W] if weights_only else [Phase.B, Phase.I, Phase.W]
    ops = np.flatnonzero((cut.stage == stage) & np.isin(cut.phase, wanted))
    sizes = graph.at_batch(tables.batch).tensor_bytes
    filled = close_buckets(_gradients(graph, tables, stage), sizes, buckets)
    parts, begin = [], 0
    for index, bucket in enumerate(filled):
        last = int(graph.tensor_producer[bucket].max())
        end = len(ops) if index + 1 == len(filled) else int(np.searchsorted(ops, last, "right"))
        mine, begin = ops[begin : max(begin, end)], max(begin, end)
        made = task_cost(cost.seconds[mine, :, variant], cost.launch[mine])
        parts.append(Part(int(sizes[bucket].sum()), made))
    whole = tables.seconds[stage, Phase.W if weights_only else Phase.B]
    total = sum((part.cost.seconds for part in parts), np.zeros(len(cost.kinds)))
    with np.errstate(divide="ignore", invalid="ignore"):
        more = np.nan_to_num(whole / total, nan=1.0, posinf=1.0)
    return tuple(
        part._replace(cost=part.cost._replace(seconds=part.cost.seconds * more)) for part in parts
    )


def _gradients(graph: OpGraph, tables: StageTables, stage: int) -> NDArray[np.int64]:
    """Returns what the backward of a stage makes for the update, partial sums of ties included.

    Tensor ids in the order in which they are made; those of input gradients come first where weight
    gradients have a phase of their own.
    """
    cut = tables.cut
    producer, consumer, tensor = graph.edges()
    made = (cut.stage[producer] == stage) & np.isin(cut.phase[producer], (Phase.I, Phase.W))
    found = np.unique(tensor[made & (cut.phase[consumer] == Phase.U)]).astype(np.int64)
    order: NDArray[np.int64] = found[np.argsort(graph.tensor_producer[found], kind="stable")]
    return order


def task_cost(seconds: NDArray[np.float64], launch: NDArray[np.float64]) -> Cost:
    """Returns what ops that run one after the other cost as one task, both [op, kind] in s."""
    if not len(seconds):
        zero = np.zeros(seconds.shape[1])
        return Cost(zero, zero, zero)
    total = seconds.sum(axis=0)
    issued = np.cumsum(launch, axis=0)
    rest = np.cumsum(seconds[::-1], axis=0)[::-1]
    with np.errstate(invalid="ignore"):  # inf - inf: the device cannot run it anyway
        ahead = np.nan_to_num((issued + rest).max(axis=0) - total, nan=0.0, posinf=0.0)
    ahead = np.maximum(ahead, 0.0)
    return Cost(total, ahead, np.maximum(issued[-1] - ahead, 0.0))
