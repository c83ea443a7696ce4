"""Why the best sharded plan is as it is: its groups or its slots, and the runner-up."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.automap.explain import Explained, explain_row
from agents.automap.operators import OperatorPartition
from agents.automap.planner import Grouped, optimum
from agents.planners.pipeline_shards import Alternative, CombinedSearch
from simcore.errors import PlacewrightError
from simcore.lower import Problem
from simcore.mesh import DATA
from simcore.plan import Plan
from simcore.shard_fold import merged_groups
from simcore.shard_space import MAX_AXES, WHOLE
from simcore.shards import OWN, is_sharded, linkage_of
from simcore.units import format_seconds

_LEAST = 1e-4  # part of the step; less is not worth a word
_NOTHING_SHARED = "No plan that shares out more than the samples fits; this one does not."


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """What is to be said about a sharded plan.

    Attributes:
        step_time: s, in full.
        groups: what is split and why, where it is one mesh that splits.
        slots: what else was tried of a pipeline.
        runner_up: seconds and name of the next best plan that is laid out otherwise.
        caveat: what the groups were compared without.
        shares: whether more is shared out than the samples.
    """

    step_time: float
    groups: Explained | None
    slots: tuple[Alternative, ...]
    runner_up: tuple[float, str] | None
    caveat: str
    shares: bool = True

    def lines(self) -> list[str]:
        """Returns sentences."""
        lines = [] if self.shares else [_NOTHING_SHARED]
        lines += [] if self.groups is None else self.groups.lines()
        if self.groups is not None and self.caveat:
            lines.append(self.caveat)
        lines += [
            f"{slot.slot.capitalize()}: {slot.chosen}. The fastest plan tried with {slot.other} "
            f"takes {format_seconds(slot.seconds)} longer."
            for slot in self.slots
            if slot.seconds > _LEAST * self.step_time
        ]
        if self.runner_up is not None:
            seconds, name = self.runner_up
            more = format_seconds(seconds - self.step_time)
            lines.append(
                f"Runner-up among sharded plans: {name}, {format_seconds(seconds)} ({more} more)."
            )
        return lines

    def record(self) -> dict[str, Any]:
        """Returns the same for JSON."""
        return {
            "groups": None if self.groups is None else self.groups.record(),
            "slots": [
                {"slot": s.slot, "chosen": s.chosen, "other": s.other, "more_s": s.seconds}
                for s in self.slots
            ],
            "runner_up": None
            if self.runner_up is None
            else {
                "layout": self.runner_up[1],
                "step_time_s": self.runner_up[0],
                "more_s": self.runner_up[0] - self.step_time,
            },
            "caveat": self.caveat,
            "shares": self.shares,
            "sentences": self.lines(),
        }


def reasons_of(
    problem: Problem,
    best: tuple[Plan, float],
    grouped: Grouped | None,
    search: CombinedSearch | None,
    runner_up: tuple[float, str] | None,
    *,
    shares: bool,
) -> Reasons:
    """Returns why a plan is as it is.

    Args:
        problem: the graph, the cluster and the job.
        best: the plan and its seconds.
        grouped: what it was made from, if from groups.
        search: that found it, if a pipeline.
        runner_up: seconds and name of the next best.
        shares: whether more is shared out than the samples.
    """
    plan, step_time = best
    explained = None
    if grouped is not None:
        explained = explain_row(grouped.problem, grouped.row, grouped.optimum)
    elif len(plan.stages) == 1 and is_sharded(plan):
        explained = _explain_styled(problem, plan)
    lean = plan.microbatches > 1 or plan.optimizer_sharding > 0
    return Reasons(
        step_time=step_time,
        groups=explained,
        slots=() if search is None else tuple(search.alternatives()),
        runner_up=runner_up,
        caveat="Groups are compared without microbatches and ZeRO." if lean else "",
        shares=shares,
    )


def _explain_styled(problem: Problem, plan: Plan) -> Explained | None:
    """Returns why a plan of a known style is as it is, None where its mesh is no space."""
    mesh = dict(plan.stages[0].mesh or {})
    if len([axis for axis in mesh if axis != DATA]) > MAX_AXES:
        return None
    task = (problem.graph, problem.cluster, problem.job)
    try:
        part = OperatorPartition.build(*task, plan.stages[0].devices, mesh)
        least = optimum(part)[1]
    except PlacewrightError:
        return None
    return explain_row(part, row_of(part, plan), least)


def row_of(part: OperatorPartition, plan: Plan) -> NDArray[np.int8]:
    """Returns a plan of one stage as a plan of a space, [decision].

    A decision is split if any of its groups is.
    """
    graph = part.folded.graph
    linkage = linkage_of(graph)
    axes = part.folded.spaces[0].axes
    axis_of = {
        linkage.number(name.removeprefix(OWN)): number
        for number, axis in enumerate(axes)
        for name in plan.stages[0].sharding.get(axis, ())
    }
    merged = merged_groups(graph, linkage)
    row = [
        max((axis_of.get(group, WHOLE) for group in merged[name]), default=WHOLE)
        for name in part.folded.names
    ]
    return np.array(row, np.int8)
