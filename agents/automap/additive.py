"""The additive objective of sharded plans: a sum of tables over few decisions each.

All that a device computes, and all its collectives, one after another: nothing hides behind
anything. Gradients that copies sum are charged at the rate of a full bucket. Each op and tensor
depends on few decisions (`agents.automap.scopes`); what it adds is found by lowering the plans of
all combinations of these with the simulator's own kernel, so the sum is exact, as tests check.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from agents.automap.compiled_additive import run_additive
from agents.automap.contention import link_rates
from agents.automap.scopes import allowed_values, as_axis, item_scopes, largest, members
from simcore.errors import PlanError
from simcore.kernel import Change, make_shard_scratch
from simcore.kernel.shard_records import COPIES
from simcore.shard_batch import FoldedSpace
from simcore.shard_fold import extended
from simcore.shard_space import WHOLE, ShardSpace

MOST_ROWS = 200_000  # combinations that are lowered for one table
_CHUNK = 64  # plans whose items are held at once
_USUAL_BUCKET = 25 * 2**20  # bytes, where all gradients are one bucket
# the quantities of a table; BUSY and OTHER: collectives along the first and the second axis
COMPUTE, COLLECTIVE, BUSY, GRADIENT, KEPT, OTHER = range(6)

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Additive:
    """What plans of a space add up to.

    Attributes:
        values: what each decision may be, rising from WHOLE, [decision][value].
        scopes: decisions that each table is over, rising, [table].
        tables: [table][quantity, value of each decision of its scope]; s, s, s, bytes, bytes, s.
        rate: s per byte of gradients that copies sum, at the size of a bucket.
        least_rate: s per byte for which they keep the busiest link busy.
        num_axes: axes that split.
    """

    values: tuple[NDArray[np.int8], ...]  # [decision][value] axis, WHOLE first
    scopes: tuple[tuple[int, ...], ...]
    tables: tuple[Table, ...]
    rate: float
    least_rate: float
    num_axes: int

    @classmethod
    def build(cls, folded: FoldedSpace, *, most_rows: int = MOST_ROWS) -> "Additive":
        """Finds the tables of a space.

        Args:
            folded: the space.
            most_rows: combinations that may be lowered for one table.

        Raises:
            PlanError: one op depends on more decisions than can be tabulated.
        """
        first = folded.spaces[0]
        allowed = np.logical_or.reduce([allowed_values(space) for space in folded.spaces])
        values = tuple(as_axis(row) for row in allowed)
        free = allowed.sum(axis=1) > 1
        items = [item_scopes(space.tables, free) for space in folded.spaces]
        kept = largest([scope for each in items for scope in each])
        rates = [link_rates(space) for space in folded.spaces]
        tables = []
        for number, scope in enumerate(kept):
            shape = tuple(len(values[decision]) for decision in members(scope))
            if prod(shape) > most_rows:
                raise PlanError(
                    f"{folded.graph.name}: one op depends on {len(shape)} decisions, too many to "
                    f"tabulate ({prod(shape):,} combinations, at most {most_rows:,})"
                )
            rows = _combinations(folded.num_decisions, members(scope), values)
            parts = [
                _summed(space, rows, [_home(each, kept) == number for each in scopes], link)
                for space, scopes, link in zip(folded.spaces, items, rates, strict=True)
            ]
            table = extended(parts[0], parts[1:], folded.layers)
            tables.append(np.moveaxis(table.reshape(*shape, -1), -1, 0).copy())
        rate, least = _rates(first, rates[0])
        return cls(
            values=values,
            scopes=tuple(map(members, kept)),
            tables=tuple(tables),
            rate=rate,
            least_rate=least,
            num_axes=len(first.axes),
        )

    @property
    def free(self) -> tuple[int, ...]:
        """Decisions that have more than one value."""
        return tuple(d for d, values in enumerate(self.values) if len(values) > 1)

    def objective(self) -> tuple[Table, ...]:
        """Returns the seconds of the additive objective, [table][value of each decision]."""
        return tuple(t[COMPUTE] + t[COLLECTIVE] + self.rate * t[GRADIENT] for t in self.tables)

    def weighted(self, weights: Sequence[float]) -> tuple[Table, ...]:
        """Returns a weighted sum of what a device has to do, [table][...].

        Args:
            weights: of computing, of the least work of the links along the first axis, along the
                second, and for the gradients that copies sum.
        """
        compute, first, second, sums = weights
        return tuple(
            compute * t[COMPUTE]
            + first * t[BUSY]
            + second * t[OTHER]
            + sums * self.least_rate * t[GRADIENT]
            for t in self.tables
        )

    def kept(self) -> tuple[Table, ...]:
        """Returns the bytes that a device keeps all the time, [table][value of each decision]."""
        return tuple(t[KEPT] for t in self.tables)

    def cost(self, tables: Sequence[Table], rows: NDArray[np.integer]) -> NDArray[np.float64]:
        """Returns what plans add up to in some tables, [plan], from rows [plan, decision]."""
        total = np.zeros(len(rows))
        for scope, table in zip(self.scopes, tables, strict=True):
            places = tuple(np.searchsorted(self.values[d], rows[:, d]) for d in scope)
            total += table[places]
        return total

    def row(self, places: Sequence[int]) -> NDArray[np.int8]:
        """Returns a plan, [decision], from the place of each decision's value."""
        pairs = zip(self.values, places, strict=True)
        return np.array([values[place] for values, place in pairs], np.int8)

    def restricted(self, keep: Sequence[NDArray[np.bool_]]) -> "Additive":
        """Returns the objective over fewer values, keep: [decision][value]."""
        tables = []
        for scope, table in zip(self.scopes, self.tables, strict=True):
            left = table
            for place, decision in enumerate(scope):
                left = np.compress(keep[decision], left, axis=1 + place)
            tables.append(left)
        return Additive(
            values=tuple(v[k] for v, k in zip(self.values, keep, strict=True)),
            scopes=self.scopes,
            tables=tuple(tables),
            rate=self.rate,
            least_rate=self.least_rate,
            num_axes=self.num_axes,
        )


def dominated(additive: Additive) -> list[NDArray[np.bool_]]:
    """Returns which values are left without those that another is never worse than.

    A value goes if, whatever the other decisions are, some other value of the same decision costs
    no more in the additive objective, and keeps no more bytes all the time (dead-end elimination,
    Desmet et al. 1992). One optimum of the objective always stays.

    Returns:
        [decision][value] whether it stays.
    """
    keep = [np.ones(len(values), np.bool_) for values in additive.values]
    changed = True
    while changed:
        changed = False
        now = additive.restricted(keep)
        for decision in now.free:
            out = _beaten(now, decision)
            if out is not None:
                left = np.flatnonzero(keep[decision])
                keep[decision][left[out]] = False
                changed = True
                break
    return keep


def _beaten(additive: Additive, decision: int) -> int | None:
    """Returns a value that another is never worse than, None = there is none."""
    count = len(additive.values[decision])
    worst = np.zeros((2, count, count))  # what the first value costs more than the second, at most
    pairs = (additive.objective(), additive.kept())
    for quantity, tables in enumerate(pairs):
        for scope, table in zip(additive.scopes, tables, strict=True):
            if decision in scope:
                flat = np.moveaxis(table, scope.index(decision), 0).reshape(count, -1)
                worst[quantity] += (flat[:, None] - flat[None, :]).max(axis=2)
    never = (worst[0] <= 0) & (worst[1] <= 0)
    for out in range(count - 1, -1, -1):
        if any(never[other, out] for other in range(count) if other != out):
            return out
    return None


def _home(scope: int, kept: Sequence[int]) -> int:
    """Returns the first table that an item belongs to."""
    return next(number for number, other in enumerate(kept) if scope | other == other)


def _combinations(
    width: int, decisions: Sequence[int], values: Sequence[NDArray[np.int8]]
) -> NDArray[np.int8]:
    """Returns plans of all combinations of some decisions, the others whole, [plan, decision]."""
    choices = list(product(*(values[decision].tolist() for decision in decisions)))
    rows = np.full((len(choices), width), WHOLE, np.int8)
    rows[:, list(decisions)] = np.array(choices, np.int8).reshape(len(choices), -1)
    return rows


def _summed(
    space: ShardSpace,
    rows: NDArray[np.int8],
    belongs: Sequence[bool],
    link: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Returns what some items add to plans, [plan, quantity]."""
    mine = np.flatnonzero(belongs)
    return np.concatenate([costs[:, mine].sum(axis=1) for costs in item_costs(space, rows, link)])


def item_costs(
    space: ShardSpace, rows: NDArray[np.int8], link: NDArray[np.float64]
) -> Iterator[NDArray[np.float64]]:
    """Yields what each op, then each tensor adds to plans, [plan, item, quantity], in chunks.

    Args:
        space: a space.
        rows: plans, [plan, decision].
        link: of `link_rates`.
    """
    tables = space.tables
    scratch = make_shard_scratch(tables)
    owner = np.zeros(len(scratch.handles), np.int64)
    count = len(tables.ops) - 1 + len(tables.tensors)
    for begin in range(0, len(rows), _CHUNK):
        part = np.ascontiguousarray(rows[begin : begin + _CHUNK], np.int8)
        costs = np.zeros((len(part), count, 6))
        run_additive(tables, part, scratch, owner, link, costs)
        yield costs


def _rates(space: ShardSpace, link: NDArray[np.float64]) -> tuple[float, float]:
    """Returns seconds per byte that copies sum: at a bucket, and at the best size."""
    if space.tables.copies == 1:
        return 0.0, 0.0
    curve = space.tables.timings[COPIES, Change.ALL_REDUCE]
    steps = (len(curve) - 1) // 48
    sizes = np.array([2.0 ** (p // steps) * (1 + p % steps / steps) for p in range(len(curve))])
    bucket = space.tables.bucket or _USUAL_BUCKET
    point = int(np.argmin(np.abs(sizes - bucket)))
    whole = (curve["latency"][point] + curve["duration"][point]) / sizes[point]
    return float(whole), float(link[COPIES, Change.ALL_REDUCE])
