"""A pipeline with ``granularity="op"``: every op of every stage, copy and microbatch on its device.

Slow and exact where `simcore.pipeline_tasks` takes a phase of a stage as one task. What runs is an
`OpGraph` again:

- ops of the forward and backward once per microbatch, those of the update once at the end, or after
  each microbatch where the schedule is asynchronous;
- a gradient is added in place to the sum of earlier microbatches, by an op that reads both and
  writes one; so are the parts of a tied parameter's gradient, which stages exchange once;
- a tensor goes once to each device that reads it; where stages differ in their number of copies,
  each copy fetches the slices of the samples that it lacks;
- copies sum bucket after bucket as soon as its last gradient is complete; with a sharded optimizer
  each keeps its part of the sum, updates its part, and fetches the others' parameters at the end.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.collectives import Collective, make_collective
from simcore.cost import CostTable, cost_table
from simcore.errors import PlanError
from simcore.graph import OpClass, OpGraph, Phase
from simcore.job import Job
from simcore.op_curves import CostSource
from simcore.pipeline import Pipeline
from simcore.pipeline_op_graph import GraphWriter
from simcore.pipeline_op_rows import (
    NOWHERE,
    Kind,
    Staged,
    fill_stage_buckets,
    find_makers,
    list_rows,
)
from simcore.pipeline_op_tensors import Layout, cut_slices
from simcore.profile_store import load_profile
from simcore.program import Program
from simcore.sizes import sizes_at

_ALL_SHARDED = 3  # ZeRO's name for parameters that no device has all of
_SUM_PASSES = 3  # a gradient is read, what was summed before it is read and written


def op_program(
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    pipeline: Pipeline,
    *,
    cost: CostTable | None = None,
) -> Program:
    """Returns what a pipeline runs, op by op.

    Args:
        graph: the graph.
        cluster: the cluster.
        job: the job.
        pipeline: what is decided, made of these three.
        cost: seconds of every op at the samples that one device sees, a variant for each number of
            copies; None = from the hardware profiles.

    Raises:
        PlanError: parameters are sharded; copies of stages train nothing; stages that exchange the
            gradient of a parameter are asynchronous, or sharded among unlike copies.
    """
    _check(graph, pipeline)
    if cost is None:
        batches = dict.fromkeys(tables.batch for tables in pipeline.tables)
        cost = cost_table(graph, job, pipeline.kinds, tuple(batches))
    staged = Staged.build(graph, pipeline)
    by_batch = {t.batch: sizes_at(graph, job, t.batch) for t in pipeline.tables}
    sized = tuple(by_batch[tables.batch] for tables in pipeline.tables)
    rows, buckets = fill_stage_buckets(staged, list_rows(staged), sized)
    layout = Layout(staged, rows, find_makers(staged, rows), buckets, cut_slices(staged, sized))
    writer = GraphWriter(layout, sized)
    base = np.where(rows.kind == Kind.OP, rows.item, NOWHERE)[layout.row]
    return Program(
        graph=writer.write(),
        placement=_placement(layout),
        base=base.astype(np.int32),
        collectives=_collectives(layout, cluster, writer.num_bytes),
        cost=_costs(layout, cost, writer.num_bytes, job),
        held=writer.held(),
    )


def _check(graph: OpGraph, pipeline: Pipeline) -> None:
    cut, sharding = pipeline.tables[0].cut, pipeline.optimizer_sharding
    if sharding >= _ALL_SHARDED:
        raise PlanError(
            "optimizer_sharding 3 fetches the parameters of a phase at once; granularity 'op' does "
            "not know phases"
        )
    if any(mesh.shards > 1 for mesh in pipeline.meshes):
        raise PlanError("granularity 'op' knows no stages whose copies are shared by devices")
    copies = [pipeline.copies(stage) for stage in range(cut.num_stages)]
    if max(copies) > 1 and not (graph.op_class == OpClass.UPDATE).any():
        raise PlanError(
            f"{graph.name}: data parallel needs parameters that are trained; the graph updates none"
        )
    for tensor, source, target in zip(*(column.tolist() for column in cut.update), strict=True):
        tied = f"stages {source} and {target} exchange {graph.tensor_names[tensor]!r}"
        if pipeline.schedule.asynchronous:
            raise PlanError(f"{tied}, so they cannot update without waiting for each other")
        if sharding and copies[source] != copies[target]:
            raise PlanError(
                f"{tied}, but share the optimizer state (optimizer_sharding {sharding}) among "
                f"{copies[source]} and {copies[target]} copies"
            )


def _placement(layout: Layout) -> NDArray[np.int32]:
    """Returns the device of each op, [op]."""
    pipeline, stage = layout.staged.pipeline, layout.rows.stage[layout.row]
    devices = np.full((layout.staged.cut.num_stages, int(layout.staged.copies.max())), NOWHERE)
    for number in range(len(devices)):
        copies = pipeline.places(number)
        devices[number, : len(copies)] = copies
    place = np.where(layout.runs_once[layout.row], NOWHERE, devices[stage, layout.copy])
    return place.astype(np.int32)


def _collectives(
    layout: Layout, cluster: Cluster, num_bytes: NDArray[np.int64]
) -> Mapping[int, Collective]:
    """Returns what each collective does, by op; bytes are of the new tensors."""
    pipeline, rows = layout.staged.pipeline, layout.rows
    kind_of_sum = "reduce_scatter" if pipeline.optimizer_sharding else "all_reduce"
    known: dict[tuple[int, str, int], Collective] = {}
    found = {}
    for row in np.flatnonzero(layout.runs_once).tolist():
        stage = int(rows.stage[row])
        if rows.kind[row] == Kind.SUM:
            kind, size = kind_of_sum, layout.buckets[rows.item[row]].num_bytes
        else:
            kind, size = "all_gather", int(num_bytes[layout.updated(row)[0]].sum())
        algorithm = pipeline.buckets.algorithm if kind == "all_reduce" else "auto"
        if (stage, kind, size) not in known:
            known[stage, kind, size] = make_collective(
                kind, size, cluster, pipeline.places(stage), algorithm=algorithm
            )
        found[int(layout.first_op[row])] = known[stage, kind, size]
    return found


def _costs(layout: Layout, cost: CostTable, num_bytes: NDArray[np.int64], job: Job) -> CostTable:
    """Returns what ops cost at the samples of their stage; bytes are of the new tensors."""
    staged, rows = layout.staged, layout.rows
    is_op, is_add = rows.kind == Kind.OP, rows.kind == Kind.ADD
    item = np.where(is_op, rows.item, 0)
    variant = np.array([cost.batches.index(tables.batch) for tables in staged.pipeline.tables])
    seconds = cost.seconds[item, :, variant[rows.stage]]  # [row, kind]
    shares = staged.is_sharded[rows.stage] & (staged.cut.phase[item] == Phase.U)
    seconds = seconds / np.where(shares, staged.copies[rows.stage], 1)[:, None]
    profiles = [load_profile(kind) for kind in cost.kinds]
    rate = np.array([profile.byte_rate("pointwise") for profile in profiles])
    added = np.zeros(len(rows.kind), np.int64)
    added[is_add] = num_bytes[layout.first_output[layout.first_op[:-1][is_add]]]
    sums = _SUM_PASSES * added[:, None] / rate
    launches = np.array([profile.launch_overhead for profile in profiles])
    error = np.array([profile.relative_error("pointwise") for profile in profiles])

    def choose(of_op: NDArray[Any], of_add: Any, rest: Any) -> NDArray[Any]:
        chosen = np.where(is_op[:, None], of_op, np.where(is_add[:, None], of_add, rest))
        return np.asarray(chosen[layout.row])

    return CostTable(
        seconds=choose(seconds, sums, 0.0)[:, :, None],
        launch=choose(cost.launch[item], launches, 0.0),
        source=choose(cost.source[item], np.uint8(CostSource.ROOFLINE), np.uint8(CostSource.ZERO)),
        relative_error=choose(cost.relative_error[item], error, 0.0),
        kinds=cost.kinds,
        batches=(job.batch,),
        trail=None if cost.trail is None else choose(cost.trail[item], 0.0, 0.0),
    )
