"""Plans of classical planners that a learner begins with.

Copies of the whole model (one stage), equal stages with equal copies (the rule of experts),
PipeDream's stages, DAPPLE's and Alpa's, and what the dynamic programs over lines of nodes and rows
of devices propose. Only the rhythm of published stages is chosen by simulation.
"""

from collections.abc import Iterator
from itertools import islice

import msgspec
import numpy as np

from agents.pipelines.alpa import alpa_best
from agents.pipelines.anneal import Best
from agents.pipelines.env import PipelineTask, Rhythm
from agents.pipelines.estimate import Estimator
from agents.pipelines.moves import divides
from agents.pipelines.plans import DagPlan
from agents.pipelines.published import dapple_best, pipedream_best
from agents.planners.recorder import Budget
from agents.planners.stage_dag import proposals
from simcore.errors import GraphError
from simcore.plan import DEFAULT_BUCKETS
from simcore.recompute import Recompute

MOST_COPIED = 16  # equal stages with copies, the likeliest by estimate
MOST_PROPOSED = 24  # of the dynamic programs, likewise
_LOOKED_AT = 400  # proposals of which those are the likeliest
_PROGRAMS = 0.3  # of a budget, for the dynamic programs
_DAPPLE = 0.05  # of a budget of seconds, for DAPPLE's searches


def taught_plans(task: PipelineTask, budget: Budget | None = None) -> list[DagPlan]:
    """Returns the distinct plans of classical planners that are in a task's space.

    Args:
        task: the space; its simulations are not charged here.
        budget: teachers that come after its end are not asked; None = all are.
    """
    budget = budget or Budget()
    found: dict[DagPlan, None] = {}
    for plan in _plans(task, budget):
        if is_in(task, plan):
            found.setdefault(plan)
        if not budget.left():
            break
    return list(found)


def _plans(task: PipelineTask, budget: Budget) -> Iterator[DagPlan]:
    yield from copies_plans(task)
    yield from equal_plans(task)
    for best in _published(task, budget):
        if best is not None:
            yield best.plan
    estimate = Estimator(task)
    yield from _likeliest(estimate, equal_copied_plans(task), MOST_COPIED)
    proposed = islice(proposals(task, budget.part(_PROGRAMS)), _LOOKED_AT)
    yield from _likeliest(estimate, proposed, MOST_PROPOSED)


def _published(task: PipelineTask, budget: Budget) -> Iterator[Best | None]:
    try:
        yield pipedream_best(task)
        is_timed = budget.seconds_left() is not None
        yield dapple_best(task, budget.part(_DAPPLE) if is_timed else None)
    except GraphError:  # more states than their programs can work on
        pass
    yield alpa_best(task)


def _likeliest(estimate: Estimator, plans: Iterator[DagPlan], most: int) -> list[DagPlan]:
    distinct = list(dict.fromkeys(plans))
    return sorted(distinct, key=estimate)[:most]


def copies_plans(task: PipelineTask) -> Iterator[DagPlan]:
    """Yields copies of the whole model on all GPUs and on fewer, the fastest.

    Gradients are summed bucket by bucket, or at once behind the backward.

    Args:
        task: the space.
    """
    space = task.simulator.nodes.space
    ranked = sorted(space.devices, key=lambda device: (space.work[:, device].sum(), device))
    at_once = msgspec.structs.replace(DEFAULT_BUCKETS, num_bytes=0)
    least = min(rhythm.microbatches for rhythm in task.rhythms)
    for count in range(len(ranked), 0, -1):
        for buckets in (DEFAULT_BUCKETS, at_once) if count > 1 else (DEFAULT_BUCKETS,):
            yield DagPlan(
                stage=(0,) * task.num_nodes,
                devices=(tuple(sorted(ranked[:count])),),
                recompute=("none",),
                microbatches=least,
                buckets=buckets,
            )


def equal_plans(task: PipelineTask) -> Iterator[DagPlan]:
    """Yields equal stages along the program, one GPU each, for each number of microbatches.

    Args:
        task: the space.
    """
    yield from _equal(task, task.counts[-1], 1)


def equal_copied_plans(task: PipelineTask) -> Iterator[DagPlan]:
    """Yields equal stages along the program, all with as many copies, on all GPUs.

    Args:
        task: the space.
    """
    for count in task.counts:
        copies = task.num_devices // count
        if copies > 1 and copies * count == task.num_devices:
            yield from _equal(task, count, copies)


def _equal(task: PipelineTask, count: int, copies: int) -> Iterator[DagPlan]:
    nodes, usable = task.simulator.nodes, task.simulator.nodes.space.devices
    work = nodes.costs(nodes.space.problem.job.batch or 1).seconds.min(axis=1)
    middle = np.cumsum(work) - work / 2
    part = middle / max(float(work.sum()), 1e-300) * count
    stage = np.minimum(part.astype(np.int64), count - 1)
    if len(set(stage.tolist())) < count:
        return
    hows: tuple[Recompute, ...] = ("none", "full") if task.recompute else ("none",)
    for rhythm in task.rhythms:
        for how in hows:
            if rhythm.schedule == "1f1b" and not rhythm.sharding:
                yield DagPlan(
                    stage=tuple(stage.tolist()),
                    devices=tuple(
                        tuple(usable[number * copies : (number + 1) * copies])
                        for number in range(count)
                    ),
                    recompute=(how,) * count,
                    microbatches=rhythm.microbatches,
                )


def is_in(task: PipelineTask, plan: DagPlan) -> bool:
    """Whether a plan is one of a task's, but for how gradients are put together.

    Args:
        task: the space.
        plan: any plan over its nodes.
    """
    rhythm = Rhythm(plan.microbatches, plan.schedule, plan.sharding)
    again = set(plan.recompute) != {"none"}
    return (
        rhythm in task.rhythms
        and plan.num_stages in task.counts
        and divides(task, plan)
        and (task.recompute or not again)
        and not plan.apart
    )
