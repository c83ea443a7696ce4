"""Where a model may be cut into pipeline stages, and which cuts balance them.

Placement units stand in a chain, by their first forward op that computes. A set of contiguous
stages is one that a pipeline can run if no cut separates what `safe_cuts` keeps together: forward
tensors then only go down the chain, so stages are acyclic, and every gradient goes back along an
edge that an activation came by. Joining neighbouring stages keeps both true, so a check of the
finest stages holds for all of them.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.errors import PlanError
from simcore.graph import OpClass, OpGraph, Phase
from simcore.stages import backward_phases, check_stages

MAX_ROUNDS = 64  # of `best_cuts`; it is exact if it ends before, as it did in every case seen


def chain_order(graph: OpGraph) -> NDArray[np.int32]:
    """Returns units by their first forward op that computes, [unit].

    What computes nothing in the forward stands with its readers: an input (labels, say) with the
    first one, a sum of gradients with the unit that it goes to.
    """
    first = np.full(graph.num_units, graph.num_ops, np.int64)
    computes = np.flatnonzero((graph.phase == Phase.F) & (graph.op_class != OpClass.INPUT))
    np.minimum.at(first, graph.unit[computes], computes)
    producer, consumer, _ = graph.edges()
    maker, reader = graph.unit[producer], graph.unit[consumer]
    for phase in (Phase.F, Phase.B):
        within = (graph.phase[producer] == phase) & (graph.phase[consumer] == phase)
        while True:
            unknown = within & (first[maker] == graph.num_ops) & (first[reader] < graph.num_ops)
            if not unknown.any():
                break
            np.minimum.at(first, maker[unknown], first[reader[unknown]])
    return np.argsort(first, kind="stable").astype(np.int32)


def ranks_of(order: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns the place of each unit in an order, [unit]."""
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank


def stages_at(cuts: NDArray[np.integer], rank: NDArray[np.int64]) -> NDArray[np.int32]:
    """Returns the stage of every unit, [unit].

    Args:
        cuts: the number of units before each cut, ascending.
        rank: place of each unit in the chain, [unit].
    """
    return np.searchsorted(cuts, rank, side="right").astype(np.int32)


def safe_cuts(graph: OpGraph, order: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns how many units of the chain may stand before a cut, ascending, [cut].

    Any of these cuts may be combined. There may be more that go together with some of them.

    Raises:
        PlanError: ops that are in no order of forward, backward and update.
    """
    rank = ranks_of(order)
    cuts = _uncrossed(graph, rank)
    try:
        check_stages(graph, stages_at(cuts, rank))
    except PlanError:
        cuts = _one_by_one(graph, rank, cuts)
    return cuts


def _one_by_one(
    graph: OpGraph, rank: NDArray[np.int64], cuts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the cuts that go together, those early in the chain first."""
    check_stages(graph, np.zeros_like(rank))
    kept: list[int] = []
    for cut in cuts.tolist():
        try:
            check_stages(graph, stages_at(np.array([*kept, cut]), rank))
        except PlanError:
            continue
        kept.append(cut)
    return np.array(kept, np.int64)


def _uncrossed(graph: OpGraph, rank: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the cuts that separate nothing that has to stay together, [cut]."""
    phase = backward_phases(graph)
    producer, consumer, _ = graph.edges()
    source, target = rank[graph.unit[producer]], rank[graph.unit[consumer]]
    made, read = phase[producer], phase[consumer]
    backward = np.isin(read, (Phase.I, Phase.W))
    forward = (made == Phase.F) & (read == Phase.F)
    apart = _Apart(len(rank))
    apart.join(target[forward], source[forward])  # up the chain
    back, kept = (made == Phase.I) & backward, (made == Phase.F) & backward
    above = np.concatenate([target[back], source[kept]])  # needs an edge to the one below
    below = np.concatenate([source[back], target[kept]])
    apart.join(below, above)
    apart.join(_last_reader(source[forward], target[forward], above, below), below)
    return apart.cuts()


def _last_reader(
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    above: NDArray[np.int64],
    below: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Returns the last unit that reads `above` in the forward, not behind `below`, [pair].

    `above` itself where there is none.

    Args:
        source: makers of forward tensors, [use].
        target: readers of them, [use].
        above: units, [pair].
        below: later units, [pair].
    """
    size = int(max(source.max(initial=0), target.max(initial=0), below.max(initial=0))) + 1
    keys = np.unique((source * size + target)[source < target])
    if not len(keys):
        return above
    found = keys[np.maximum(np.searchsorted(keys, above * size + below, side="right") - 1, 0)]
    return np.where((found // size == above) & (found % size <= below), found % size, above)


class _Apart:
    """Counts what a cut would separate."""

    def __init__(self, num_units: int) -> None:
        self.change = np.zeros(num_units + 1, np.int64)

    def join(self, first: NDArray[np.int64], last: NDArray[np.int64]) -> None:
        """Keeps pairs of units together, [pair]; only those whose first stands before the last."""
        ahead = first < last
        np.add.at(self.change, first[ahead] + 1, 1)
        np.add.at(self.change, last[ahead] + 1, -1)

    def cuts(self) -> NDArray[np.int64]:
        """Returns the cuts that separate nothing, [cut]."""
        separated = np.cumsum(self.change)[1:-1]
        return np.flatnonzero(separated == 0) + 1


def thin_out(
    cuts: NDArray[np.int64],
    weight: NDArray[np.float64],
    crossing: NDArray[np.float64],
    most: int,
) -> NDArray[np.int64]:
    """Returns at most so many of the cuts: of each equal share of the weight, the cheapest.

    Args:
        cuts: the number of units before each cut, ascending.
        weight: of the units of the chain, [unit].
        crossing: what a cut costs, [cut].
        most: number of cuts to keep.
    """
    if len(cuts) <= most:
        return cuts
    before = np.cumsum(weight)[cuts - 1]
    share = np.minimum(before / (weight.sum() or 1.0) * most, most - 1).astype(np.int64)
    by_cost = np.lexsort((np.arange(len(cuts)), crossing, share))
    cheapest = by_cost[np.unique(share[by_cost], return_index=True)[1]]
    return cuts[np.sort(cheapest)]


def equal_split(weights: NDArray[np.float64], parts: int) -> NDArray[np.int64]:
    """Returns where contiguous parts begin and end that are as even as can be, [part + 1].

    The heaviest part is as light as possible; parts before others get the remainder, so n equal
    items in k parts give ceil(n / k) and then floor(n / k).

    Args:
        weights: of the items in their order, none negative, [item].
        parts: number of parts, at least 1; every part has an item.

    Raises:
        PlanError: fewer items than parts.
    """
    count = len(weights)
    if not 1 <= parts <= count:
        raise PlanError(f"{count} items cannot be split into {parts} parts")
    ahead = np.concatenate([[0.0], np.cumsum(weights)])
    cap = _least_cap(ahead, parts)
    needed = _parts_needed(ahead, cap)
    bounds = [0]
    for left in range(parts, 1, -1):
        begin = bounds[-1]
        high = min(_reach(ahead, begin, cap), count - left + 1)
        wanted = ahead[begin] + (ahead[-1] - ahead[begin]) / left * (1.0 - 1e-12)
        end = max(begin + 1, int(np.searchsorted(ahead, wanted)))
        while end < high and needed[end] > left - 1:
            end += 1
        bounds.append(min(end, high))
    return np.array([*bounds, count], np.int64)


def _reach(ahead: NDArray[np.float64], begin: int, cap: float) -> int:
    """Returns how far a part goes that begins at an item and weighs no more than a cap."""
    return int(np.searchsorted(ahead, ahead[begin] + cap * (1.0 + 1e-12), side="right")) - 1


def _parts_needed(ahead: NDArray[np.float64], cap: float) -> NDArray[np.int64]:
    """Returns the parts, each no heavier than the cap, that all items from one on take, [item]."""
    count = len(ahead) - 1
    needed = np.zeros(count + 1, np.int64)
    for begin in range(count - 1, -1, -1):
        end = _reach(ahead, begin, cap)
        needed[begin] = count + 1 if end == begin else 1 + needed[end]
    return needed


def _least_cap(ahead: NDArray[np.float64], parts: int) -> float:
    """Returns the least weight of the heaviest of so many parts: by bisection over all sums."""
    sums = np.unique((ahead[None, :] - ahead[:, None])[np.triu_indices(len(ahead), 1)])
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        if _parts_needed(ahead, float(sums[middle]))[0] <= parts:
            high = middle
        else:
            low = middle + 1
    return float(sums[low])


class Cuts(NamedTuple):
    """Contiguous stages and what they were found to cost."""

    bounds: tuple[int, ...]  # [stage + 1] places where stages begin, and the last place
    cost: float  # s, of `best_cuts`


def best_cuts(
    seconds: NDArray[np.float64], hops: NDArray[np.float64], microbatches: int
) -> Cuts | None:
    """Returns the cuts with the least time to fill, run and drain a pipeline; None: there are none.

    That time is the sum over stages of their seconds and their hop, and (microbatches - 1) times
    the slowest of all stages and hops: what GPipe and 1F1B take without memory limits and with
    transfers beside the compute. A dynamic program over (stages, place) gives the least sum under a
    cap on the slowest; the cap goes down until nothing can be better.

    Args:
        seconds: of a stage from one place to a later one, per microbatch, [stage, place, place];
            infinite where it does not fit or may not be.
        hops: seconds of what goes into a stage that begins at a place, both ways, [stage, place].
        microbatches: of a step.
    """
    slow = np.maximum(seconds, hops[:, :, None])
    length = seconds + hops[:, :, None]
    fastest = _least_slow(slow)
    if not np.isfinite(fastest):
        return None
    best = _cheapest(length, slow, fastest, microbatches)
    least = _cheapest(length, slow, np.inf, microbatches)
    assert best is not None
    for _ in range(MAX_ROUNDS):
        if least is None:
            break
        best = min(best, least, key=lambda choice: choice.cost)
        if microbatches == 1:
            break
        cap = min((best.cost - least.total) / (microbatches - 1), least.slowest)
        if cap <= fastest:
            break
        least = _cheapest(length, slow, cap * (1.0 - 1e-12), microbatches)
    return Cuts(best.bounds, best.cost)


class _Choice(NamedTuple):
    """Cuts with the least sum under a cap."""

    bounds: tuple[int, ...]  # [stage + 1]
    total: float  # s, sum over stages
    slowest: float  # s
    cost: float  # s


def _least_slow(slow: NDArray[np.float64]) -> float:
    """Returns the least time of the slowest stage, s."""
    value = np.full(slow.shape[1], np.inf)
    value[0] = 0.0
    for stage in slow:
        value = np.maximum(value[:, None], stage).min(axis=0)
    return float(value[-1])


def _cheapest(
    length: NDArray[np.float64], slow: NDArray[np.float64], cap: float, microbatches: int
) -> _Choice | None:
    """Returns the cuts with the least sum of lengths among those with no stage above a cap."""
    value = np.full(slow.shape[1], np.inf)
    value[0] = 0.0
    places = np.arange(slow.shape[1])
    origins = []
    for stage, limited in zip(length, slow, strict=True):
        option = value[:, None] + np.where(limited <= cap, stage, np.inf)
        origins.append(option.argmin(axis=0))
        value = option[origins[-1], places]
    if not np.isfinite(value[-1]):
        return None
    bounds = [len(places) - 1]
    for origin in reversed(origins):
        bounds.append(int(origin[bounds[-1]]))
    bounds.reverse()
    slowest = max(slow[s, a, b] for s, (a, b) in enumerate(pairwise(bounds)))
    total = float(value[-1])
    return _Choice(tuple(bounds), total, slowest, total + (microbatches - 1) * slowest)
