"""Plans of classical planners that a learner begins with; none of them is a search by simulation.

Equal stages on one GPU each (the rule of experts), PipeDream's stages, Alpa's.
"""

from collections.abc import Iterator

import numpy as np

from agents.pipelines.alpa import alpa_best
from agents.pipelines.env import PipelineTask, Rhythm
from agents.pipelines.plans import DagPlan
from agents.pipelines.published import pipedream_best
from simcore.errors import GraphError
from simcore.recompute import Recompute


def taught_plans(task: PipelineTask) -> list[DagPlan]:
    """Returns the distinct plans of classical planners that are in a task's space.

    Args:
        task: the space.
    """
    return [plan for plan in dict.fromkeys(_plans(task)) if is_in(task, plan)]


def _plans(task: PipelineTask) -> Iterator[DagPlan]:
    yield from equal_plans(task)
    try:
        pipedream = pipedream_best(task)
    except GraphError:  # more states than its program can work on
        pipedream = None
    for best in (pipedream, alpa_best(task)):
        if best is not None:
            yield best.plan


def equal_plans(task: PipelineTask) -> Iterator[DagPlan]:
    """Yields equal stages along the program, one GPU each, for each number of microbatches.

    Args:
        task: the space.
    """
    nodes, usable = task.simulator.nodes, task.simulator.nodes.space.devices
    work = nodes.costs(nodes.space.problem.job.batch or 1).seconds.min(axis=1)
    middle = np.cumsum(work) - work / 2
    count = task.counts[-1]
    stage = np.minimum(
        (middle / max(float(work.sum()), 1e-300) * count).astype(np.int64), count - 1
    )
    if len(set(stage.tolist())) < count:
        return
    hows: tuple[Recompute, ...] = ("none", "full") if task.recompute else ("none",)
    for rhythm in task.rhythms:
        for how in hows:
            if rhythm.schedule == "1f1b" and not rhythm.sharding:
                yield DagPlan(
                    stage=tuple(stage.tolist()),
                    devices=tuple((device,) for device in usable[:count]),
                    recompute=(how,) * count,
                    microbatches=rhythm.microbatches,
                )


def is_in(task: PipelineTask, plan: DagPlan) -> bool:
    """Whether a plan is one of a task's.

    Args:
        task: the space.
        plan: any plan over its nodes.
    """
    rhythm = Rhythm(plan.microbatches, plan.schedule, plan.sharding)
    alone = all(len(devices) == 1 for devices in plan.devices)
    again = set(plan.recompute) != {"none"}
    return (
        rhythm in task.rhythms
        and plan.num_stages in task.counts
        and (task.copies or alone)
        and (task.recompute or not again)
        and not plan.apart
    )
