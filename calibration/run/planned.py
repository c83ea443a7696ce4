"""A plan and its graph -> what every rank runs: its device, its script, and who must know what."""

from dataclasses import dataclass

import numpy as np

from calibration.run.pipeline_copies import copy_scripts
from calibration.run.recording import Recording, record
from calibration.run.script import STEP, Event, Script, Scripter, items_of
from calibration.run.source import planned_source
from simcore.cluster import Cluster
from simcore.errors import RunError
from simcore.graph import OpClass, OpGraph
from simcore.pipeline import Pipeline, action_order
from simcore.pipeline_build import build_pipeline
from simcore.pipeline_op_rows import Kind, Staged, list_rows
from simcore.plan import Plan
from simcore.signature import Phase

_AHEAD = 1  # actions of a pipeline that a receive is posted ahead of its reader's
_RANDOM = ("dropout", "bernoulli", "rand")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Ops on ranks.

    Attributes:
        devices: device names of the cluster, [rank].
        scripts: what each rank does, [rank].
        recording: what the scripts' items are.
        num_microbatches: slices of the batch.
        copies: of a pipeline; each has the ranks after those of the copy before.
    """

    devices: tuple[str, ...]
    scripts: tuple[Script, ...]
    recording: Recording
    num_microbatches: int
    copies: int = 1


def place_ops(plan: Plan, graph: OpGraph, cluster: Cluster, source: str) -> Placed:
    """Returns what every rank runs under a placement or a pipeline.

    Args:
        plan: valid for the graph and the cluster.
        graph: captured from the source.
        cluster: the cluster.
        source: a model by name or a factory.

    Raises:
        RunError: the plan is of a kind that is not run for real.
        PlanError: the plan does not go together with its graph.
    """
    if plan.is_pipeline:
        return _pipeline(plan, graph, cluster, source)
    batch = plan.job.batch
    if batch is None:
        raise RunError("the batch is unknown, so nothing can be run (--batch)")
    recording = record(planned_source(source, plan.job), batch)
    names = [cluster.devices[d].name for d in plan.unit_devices(graph, cluster)]
    used = set(names)
    devices = tuple(name for name in plan.stages[0].devices if name in used)
    items = items_of(recording, graph.op_names)
    index = {item.name: number for number, item in enumerate(items)}
    rank = {name: number for number, name in enumerate(devices)}
    events = [
        Event(index[graph.op_names[op]], rank[names[graph.unit[op]]], 0)
        for op in range(graph.num_ops)
        if graph.op_class[op] != OpClass.VIEW
    ]
    scripts = Scripter(recording, items, events).scripts(len(devices), ahead=None)
    return Placed(devices=devices, scripts=tuple(scripts), recording=recording, num_microbatches=1)


def _pipeline(plan: Plan, graph: OpGraph, cluster: Cluster, source: str) -> Placed:
    pipeline = build_pipeline(graph, cluster, plan.job, plan)
    _check(plan, graph, pipeline)
    copies = pipeline.copies(0)
    recording = record(planned_source(source, plan.job), pipeline.microbatch // copies)
    items = items_of(recording, graph.op_names)
    index = {item.name: number for number, item in enumerate(items)}
    staged = Staged.build(graph, pipeline)
    events = _events(staged, [index.get(name, -1) for name in graph.op_names])
    schedule = pipeline.schedule
    scripts = Scripter(recording, items, events).scripts(schedule.num_ranks, ahead=_AHEAD)
    if copies > 1:
        scripts = copy_scripts(scripts, recording, copies, plan.buckets)
    return Placed(
        devices=tuple(
            cluster.devices[rank[copy]].name for copy in range(copies) for rank in pipeline.devices
        ),
        scripts=tuple(scripts),
        recording=recording,
        num_microbatches=schedule.num_microbatches,
        copies=copies,
    )


def _check(plan: Plan, graph: OpGraph, pipeline: Pipeline) -> None:
    if pipeline.schedule.asynchronous:
        raise RunError("an asynchronous schedule is simulated, but not run for real")
    if len({len(rank) for rank in pipeline.devices}) > 1:
        raise RunError(
            "a pipeline whose stages have different numbers of copies is simulated, but not run "
            "for real"
        )
    again = any(stage.recompute != "none" for stage in plan.stages)
    if again and any(word in target for target in graph.op_targets for word in _RANDOM):
        raise RunError("recompute would draw another dropout mask; it is not run for real")


def _events(staged: Staged, items: list[int]) -> list[Event]:
    """Returns the ops of a pipeline in order, each with its rank, microbatch and action."""
    schedule = staged.pipeline.schedule
    counts = [0] * schedule.num_ranks
    action: dict[tuple[int, int, int], int] = {}
    for each in action_order(schedule):
        rank = schedule.stage_rank[each.stage]
        part = Phase.B if each.phase == Phase.I else each.phase
        action[each.stage, part, each.microbatch] = counts[rank]
        counts[rank] += 1
    rows = list_rows(staged)
    late = staged.cut.phase == Phase.U
    events = []
    for row in np.flatnonzero(rows.kind == Kind.OP).tolist():
        op, stage = int(rows.item[row]), int(rows.stage[row])
        if items[op] < 0:
            continue
        again, microbatch = bool(rows.again[row]), int(rows.microbatch[row])
        phase = Phase.B if again else Phase(staged.cut.phase[op])
        rank = schedule.stage_rank[stage]
        if late[op]:
            events.append(Event(items[op], rank, STEP, counts[rank]))
            continue
        if phase == Phase.I or (phase == Phase.W and not schedule.splits):
            phase = Phase.B
        number = action[stage, phase, microbatch]
        events.append(Event(items[op], rank, microbatch, number, again))
    return events
