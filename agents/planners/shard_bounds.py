"""What no plan beats of all those that a search over ways to shard may answer with."""

import math
from dataclasses import dataclass, field

from agents.automap.combined_bound import CombinedBound
from agents.automap.planner import GroupSearch


@dataclass(slots=True, kw_only=True)
class Searched:
    """What was searched.

    Attributes:
        pipelines: what pipelines of sharded stages cannot beat, on each set of GPUs.
        groups: the search over groups, None where there was none.
        all_styles: whether every known style was simulated.
    """

    pipelines: list[CombinedBound] = field(default_factory=list)
    groups: GroupSearch | None = None
    all_styles: bool = False


def proven(searched: Searched, best: float, *, sharded: bool) -> float:
    """Returns seconds that no plan beats; 0 where too little was looked at to say.

    A known style has one plan, which was simulated, or needs less memory and is as slow; so the
    fastest plan stands for them. Groups are bounded mesh by mesh, pipelines by number of ranks,
    kind of sharding and microbatches.

    Args:
        searched: what was searched.
        best: s, of the fastest plan that may be the answer.
        sharded: whether the answer has to share something out.
    """
    groups = searched.groups
    if groups is None or groups.unknown or not searched.all_styles:
        return 0.0
    plain = groups.failed > 0  # a mesh without groups may still have a known style
    bounds = [bound.least(sharded=True, plain=plain) for bound in searched.pipelines]
    if not sharded:
        bounds += [bound.least(sharded=False, plain=True) for bound in searched.pipelines]
    return min(best, groups.bound, *bounds, math.inf)
