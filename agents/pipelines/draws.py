"""One change of a pipeline drawn at once, for searches that only estimate: thousands a second.

The changes are those of `agents.pipelines.moves` without units and unequal buckets, which list all
of a sort before they draw one.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agents.pipelines.env import PipelineTask, Rhythm
from agents.pipelines.moves import divides, random_neighbour
from agents.pipelines.plans import RECOMPUTES, DagPlan

_BLOCKS = np.array([1, 1, 1, 2, 2, 3, 4, 6, 8])  # nodes that change their stage together
_RARE = 0.04  # part of the changes that split a stage or make two one, or any other
_SORTS = np.array([0.45, 0.35, 0.12, 0.08])  # nodes, devices, rhythm, recomputation


def drawn_change(task: PipelineTask, plan: DagPlan, rng: np.random.Generator) -> DagPlan:
    """Returns a plan of the same space that is one change away, or the plan itself.

    Args:
        task: the space.
        plan: one of its plans.
        rng: what is drawn from.
    """
    if rng.random() < _RARE:
        return random_neighbour(task, plan, rng)
    sort = int(np.searchsorted(np.cumsum(_SORTS), rng.random() * _SORTS.sum()))
    other = (_nodes, _devices, _rhythm, _recompute)[min(sort, 3)](task, plan, rng)
    return other if other is not None and divides(task, other) else plan


def _nodes(task: PipelineTask, plan: DagPlan, rng: np.random.Generator) -> DagPlan | None:
    """Moves nodes over an edge between two stages: the one there, or the last ones of a stage."""
    edges = task.simulator.nodes.edges
    crossing = [(a, b) for a, b in edges if plan.stage[a] != plan.stage[b]]
    if not crossing:
        return None
    a, b = crossing[int(rng.integers(len(crossing)))]
    forward = rng.random() < 0.5
    node, target = (a, plan.stage[b]) if forward else (b, plan.stage[a])
    mine = [other for other, at in enumerate(plan.stage) if at == plan.stage[node]]
    size = int(rng.choice(_BLOCKS))
    block = [node] if size == 1 else (mine[-size:] if forward else mine[:size])
    if len(block) >= len(mine):
        return None
    moved = set(block)
    stage = tuple(target if other in moved else at for other, at in enumerate(plan.stage))
    if any(stage[one] > stage[other] for one, other in edges):
        return None
    kept = tuple(entry for entry in plan.apart if entry[0] not in moved)
    return replace(plan, stage=stage, apart=kept)


def _devices(task: PipelineTask, plan: DagPlan, rng: np.random.Generator) -> DagPlan | None:
    """Swaps two devices, gives one to another stage, or takes an idle one in or a busy one out."""
    usable = task.simulator.nodes.space.devices
    at = {device: number for number, group in enumerate(plan.devices) for device in group}
    device = usable[int(rng.integers(len(usable)))]
    choice = int(rng.integers(plan.num_stages + 1)) - 1  # -1 = idle
    groups = [list(group) for group in plan.devices]
    source = at.get(device, -1)
    if source == choice:
        return None
    if source >= 0:
        groups[source].remove(device)
    if choice >= 0:
        if source >= 0 and rng.random() < 0.5:  # swapped for one of the other stage
            back = groups[choice].pop(int(rng.integers(len(groups[choice]))))
            groups[source].append(back)
        groups[choice].append(device)
    return _grouped(plan, groups)


def _grouped(plan: DagPlan, groups: Sequence[Sequence[int]]) -> DagPlan | None:
    if any(not group for group in groups):
        return None
    return replace(plan, devices=tuple(tuple(sorted(group)) for group in groups))


def _rhythm(task: PipelineTask, plan: DagPlan, rng: np.random.Generator) -> DagPlan:
    """Changes the microbatches, the schedule or how the optimizer is sharded."""
    here = Rhythm(plan.microbatches, plan.schedule, plan.sharding)
    near = [r for r in task.rhythms if sum(a != b for a, b in zip(r, here, strict=True)) == 1]
    if not near:
        return plan
    return replace(plan, **near[int(rng.integers(len(near)))]._asdict())


def _recompute(task: PipelineTask, plan: DagPlan, rng: np.random.Generator) -> DagPlan | None:
    if not task.recompute:
        return None
    again = list(plan.recompute)
    again[int(rng.integers(len(again)))] = RECOMPUTES[int(rng.integers(len(RECOMPUTES)))]
    return replace(plan, recompute=tuple(again))
