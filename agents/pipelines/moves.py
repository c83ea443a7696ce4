"""Changes of a pipeline over nodes, each of which gives a pipeline of the same space."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import msgspec
import numpy as np

from agents.pipelines.env import PipelineTask, Rhythm
from agents.pipelines.plans import RECOMPUTES, DagPlan, Score
from simcore.recompute import Recompute
from simcore.schedule import Edges

BLOCKS = (1, 2, 4, 8, 16)  # nodes that change their stage together
FEW = 12  # stages; of more, only near ones swap devices or become one
NEAR = 2


def neighbours(task: PipelineTask, plan: DagPlan, score: Score | None = None) -> list[DagPlan]:
    """Returns all plans that are one change away, those likely to help first.

    Args:
        task: the space.
        plan: one of its plans.
        score: what the simulator says of it; where it is over the memory, stages on full devices
            run more again first.
    """
    is_over = score is not None and score.overflow > 0
    found = list(_smaller(task, plan, score)) if score is not None and is_over else []
    found += _rhythms(task, plan)
    found += _nodes(task, plan)
    found += _devices(task, plan)
    found += _recomputes(task, plan)
    found += _merged(task, plan)
    found += _split(task, plan)
    if max(len(devices) for devices in plan.devices) > 1:
        found.append(_with_buckets(plan, num_bytes=0))
    legal = (other for other in dict.fromkeys(found) if other != plan)
    return [other for other in legal if divides(task, other)]


def random_neighbour(task: PipelineTask, plan: DagPlan, rng: np.random.Generator) -> DagPlan:
    """Returns a plan that is one change away: first its sort is drawn, then the change."""
    sorts = (
        lambda: _nodes(task, plan),
        lambda: units_moved(task, plan),
        lambda: _devices(task, plan),
        lambda: _rhythms(task, plan),
        lambda: _recomputes(task, plan),
        lambda: _merged(task, plan),
        lambda: _split(task, plan),
    )
    for sort in rng.choice(len(sorts), size=16, p=(0.4, 0.1, 0.2, 0.1, 0.1, 0.05, 0.05)).tolist():
        found = [p for p in sorts[sort]() if p != plan and divides(task, p)]
        if found:
            return found[int(rng.integers(len(found)))]
    return plan


def divides(task: PipelineTask, plan: DagPlan) -> bool:
    """Whether the copies of all stages divide a microbatch, and the task allows for them."""
    samples = (task.simulator.nodes.space.problem.job.batch or 0) // plan.microbatches
    sizes = {len(devices) for devices in plan.devices}
    return all(samples % size == 0 and (task.copies or size == 1) for size in sizes)


def _with_buckets(plan: DagPlan, **changes: object) -> DagPlan:
    return replace(plan, buckets=msgspec.structs.replace(plan.buckets, **changes))


def _smaller(task: PipelineTask, plan: DagPlan, score: Score) -> Iterator[DagPlan]:
    full = set(score.full)
    stages = [bool(full & set(devices)) for devices in plan.devices]
    hows: tuple[Recompute, ...] = ("full", "selective") if task.recompute else ()
    for how in hows:
        again: tuple[Recompute, ...] = tuple(
            how if is_full else was for is_full, was in zip(stages, plan.recompute, strict=True)
        )
        yield replace(plan, recompute=again)
    if max(len(devices) for devices in plan.devices) > 1:
        yield _with_buckets(plan, as_views=True)
        yield replace(_with_buckets(plan, as_views=True), sharding=1)


def _rhythms(task: PipelineTask, plan: DagPlan) -> list[DagPlan]:
    """Returns the plan with other microbatches or another schedule, the next ones first."""
    has_copies = max(len(devices) for devices in plan.devices) > 1
    here = Rhythm(plan.microbatches, plan.schedule, plan.sharding)
    counts = sorted({rhythm.microbatches for rhythm in task.rhythms})
    place = counts.index(here.microbatches)
    near = counts[max(0, place - 2) : place + 3]
    found = []
    for rhythm in task.rhythms:
        changed = sum(a != b for a, b in zip(rhythm, here, strict=True))
        if changed == 1 and rhythm.microbatches in near and (has_copies or not rhythm.sharding):
            found.append(replace(plan, **rhythm._asdict()))
    return found


def _nodes(task: PipelineTask, plan: DagPlan) -> list[DagPlan]:
    """Returns the plan with one or more nodes at the end of a stage moved over an edge."""
    edges = task.simulator.nodes.edges
    links = sorted(
        {(plan.stage[a], plan.stage[b]) for a, b in edges} - {(k, k) for k in plan.stage}
    )
    found = []
    for one, other in links:
        for source, target, side in ((one, other, -1), (other, one, 1)):
            mine = [node for node, at in enumerate(plan.stage) if at == source][::side]
            near = {b if side < 0 else a for a, b in edges if plan.stage[a] == one}
            blocks = [mine[:size] for size in BLOCKS if size < len(mine)]
            blocks += [[node] for node in mine[1:] if len(mine) > 1 and _touches(edges, node, near)]
            for block in blocks:
                stage = list(plan.stage)
                for node in block:
                    stage[node] = target
                if all(stage[a] <= stage[b] for a, b in edges):
                    kept = tuple(entry for entry in plan.apart if entry[0] not in block)
                    found.append(replace(plan, stage=tuple(stage), apart=kept))
    return found


def units_moved(task: PipelineTask, plan: DagPlan) -> list[DagPlan]:
    """Returns the plan with a node at an edge of stages cut in two, its first units before it."""
    found, edges = [], task.simulator.nodes.edges
    names = task.simulator.names
    apart = {node: (count, stage) for node, count, stage in plan.apart}
    for one, other in sorted({(plan.stage[a], plan.stage[b]) for a, b in edges}):
        if one == other:
            continue
        ends = {b for a, b in edges if (plan.stage[a], plan.stage[b]) == (one, other)}
        ends |= {a for a, b in edges if (plan.stage[a], plan.stage[b]) == (one, other)}
        for node in sorted(ends):
            size, was = len(names[node]), apart.get(node, (0, one))[0]
            near = {was + step for step in (1, -1, 4, -4, 16, -16)} | {1, size - 1}
            near |= {size * eighth // 8 for eighth in range(8)}
            for count in sorted(near):
                if 0 <= count < size:
                    stage = (*plan.stage[:node], other, *plan.stage[node + 1 :])
                    entries = apart | {node: (count, one)}
                    kept = tuple((n, *e) for n, e in sorted(entries.items()) if e[0])
                    found.append(replace(plan, stage=stage, apart=kept))
    sized = (p for p in dict.fromkeys(found) if len(set(p.stage)) == p.num_stages)
    return [other for other in sized if other != plan]


def _touches(edges: Edges, node: int, near: set[int]) -> bool:
    return any((a == node and b in near) or (b == node and a in near) for a, b in edges)


def _devices(task: PipelineTask, plan: DagPlan) -> list[DagPlan]:
    """Returns the plan with devices of two stages swapped, or a device with another work."""
    found = []
    idle = sorted(set(task.simulator.nodes.space.devices) - {d for g in plan.devices for d in g})
    for one, other in _pairs(plan):
        found += [_changed(plan, {one: plan.devices[other], other: plan.devices[one]})]
        for a, b in ((one, other), (other, one)):
            if len(plan.devices[a]) > 1:
                taken = plan.devices[a][-1]
                rest = plan.devices[a][:-1]
                found.append(_changed(plan, {a: rest, b: (*plan.devices[b], taken)}))
    for stage, devices in enumerate(plan.devices):
        found += [_changed(plan, {stage: (*devices[:-1], other)}) for other in idle]
        found += [_changed(plan, {stage: (*devices, *idle[:n])}) for n in range(1, len(idle) + 1)]
        if len(devices) > 1:
            found.append(_changed(plan, {stage: devices[:-1]}))
            found.append(_changed(plan, {stage: devices[: len(devices) // 2]}))
    return found


def _pairs(plan: DagPlan) -> list[tuple[int, int]]:
    """Returns pairs of stages: all where there are few, else those of near numbers."""
    near = NEAR if plan.num_stages > FEW else plan.num_stages
    return [(a, b) for a, b in combinations(range(plan.num_stages), 2) if b - a <= near]


def _changed(plan: DagPlan, devices: dict[int, tuple[int, ...]]) -> DagPlan:
    return replace(plan, devices=tuple(devices.get(s, was) for s, was in enumerate(plan.devices)))


def _recomputes(task: PipelineTask, plan: DagPlan) -> list[DagPlan]:
    found: list[DagPlan] = []
    if not task.recompute:
        return found
    for stage, was in enumerate(plan.recompute):
        for how in RECOMPUTES:
            if how != was:
                again = (*plan.recompute[:stage], how, *plan.recompute[stage + 1 :])
                found.append(replace(plan, recompute=again))
    return found


def _merged(task: PipelineTask, plan: DagPlan) -> list[DagPlan]:
    """Returns the plan with two stages made one, on the devices of both or of the first."""
    if plan.num_stages - 1 not in task.counts:
        return []
    found = []
    for one, other in _pairs(plan):
        stage = [one if s == other else s for s in plan.stage]
        for devices in {(*plan.devices[one], *plan.devices[other]), plan.devices[one]}:
            kept = {s: d for s, d in enumerate(plan.devices) if s != other} | {one: devices}
            again = dict(enumerate(plan.recompute))
            merged = _numbered(task, plan, stage, kept, again)
            if merged is not None:
                found.append(merged)
    return found


def _split(task: PipelineTask, plan: DagPlan) -> list[DagPlan]:
    """Returns the plan with a stage made two, the second on idle devices or half of the copies."""
    if plan.num_stages + 1 not in task.counts:
        return []
    idle = sorted(set(task.simulator.nodes.space.devices) - {d for g in plan.devices for d in g})
    found, new = [], plan.num_stages
    for stage, devices in enumerate(plan.devices):
        nodes = [node for node, at in enumerate(plan.stage) if at == stage]
        half = len(devices) // 2
        pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]
        pairs = [(devices, (device,)) for device in idle[:1]]
        pairs += [(devices[:half], devices[half:])] if half else []
        for kept, given in pairs:
            for end in sorted({len(nodes) // 2, len(nodes) // 4, 3 * len(nodes) // 4} - {0}):
                labels = list(plan.stage)
                for node in nodes[end:]:
                    labels[node] = new
                groups = dict(enumerate(plan.devices)) | {stage: kept, new: given}
                again = dict(enumerate(plan.recompute)) | {new: plan.recompute[stage]}
                made = _numbered(task, plan, labels, groups, again)
                if made is not None:
                    found.append(made)
    return found


def _numbered(
    task: PipelineTask,
    plan: DagPlan,
    stage: Sequence[int],
    devices: dict[int, tuple[int, ...]],
    recompute: dict[int, Recompute],
) -> DagPlan | None:
    """Returns the plan with stages numbered along their edges; None where they have a cycle."""
    edges = task.simulator.nodes.edges
    links = {(stage[a], stage[b]) for a, b in edges if stage[a] != stage[b]}
    left, order = set(devices), list[int]()
    while left:
        free = [s for s in left if not any(b == s and a in left for a, b in links)]
        if not free:
            return None
        order.append(min(free, key=stage.index))
        left.discard(order[-1])
    number = {s: k for k, s in enumerate(order)}
    return replace(
        plan,
        stage=tuple(number[s] for s in stage),
        devices=tuple(devices[s] for s in order),
        recompute=tuple(recompute[s] for s in order),
        apart=(),
    )
