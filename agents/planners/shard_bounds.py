"""What no plan beats of all those that a search over ways to shard may answer with."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from agents.automap.combined_bound import CombinedBound
from agents.automap.planner import GroupSearch
from agents.planners.shard_sets import ShardSet


@dataclass(slots=True, kw_only=True)
class Searched:
    """What was searched.

    Attributes:
        sets: of GPUs.
        pipelines: what pipelines of sharded stages cannot beat, on each set of one kind.
        groups: the search over groups, None where there was none.
        all_styles: whether every known style was simulated, on every set.
    """

    sets: Sequence[ShardSet]
    pipelines: list[tuple[ShardSet, CombinedBound]] = field(default_factory=list)
    groups: GroupSearch | None = None
    all_styles: bool = False

    @property
    def floor(self) -> float:
        """Seconds that no equal shares over any set beat; 0 where there is none."""
        return min((each.floor for each in self.sets), default=0.0)


def proven(
    searched: Searched,
    best: float,
    *,
    sharded: bool,
    goes_on: Callable[[], bool] | None = None,
) -> float:
    """Returns seconds that no plan beats.

    A known style has one plan, which was simulated, or needs less memory and is as slow; so the
    fastest plan stands for them. Groups are bounded mesh by mesh, pipelines by number of ranks,
    kind of sharding and microbatches. What was not looked at is bounded by the floor of its GPUs.

    Args:
        searched: what was searched.
        best: s, of the fastest plan that may be the answer.
        sharded: whether the answer has to share something out.
        goes_on: asked before each pipeline; None: all are looked at.
    """
    return min(best, *_bounds(searched, sharded=sharded, goes_on=goes_on))


def _bounds(
    searched: Searched, *, sharded: bool, goes_on: Callable[[], bool] | None
) -> Iterator[float]:
    """Yields what plans of each way cannot beat; inf where there is nothing to say."""
    yield float("inf")
    groups, floors = searched.groups, {each.names: each.floor for each in searched.sets}
    if not searched.all_styles:
        yield searched.floor
    if groups is None:
        yield from (each.floor for each in searched.sets if each.is_uniform)
        return
    yield groups.bound
    yield from (floors[tuple(names)] for names, _ in groups.unknown)
    plain = groups.failed > 0  # a mesh without groups may still have a known style
    for each, bound in searched.pipelines:
        yield bound.least(sharded=True, plain=plain, goes_on=goes_on, floor=each.floor)
        if not sharded:
            yield bound.least(sharded=False, plain=True, goes_on=goes_on, floor=each.floor)
