"""The dynamic program: one decision after another is taken out of a sum of tables, exactly.

On a chain of decisions this is the dynamic program over it (Viterbi); on anything else it joins the
tables that a decision occurs in (bucket elimination, Dechter 1999). It needs room for the largest
join, and says so where that is too much.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.errors import PlanError

MOST_ENTRIES = 20_000_000  # of a join

Table = NDArray[np.float64]


class Solution(NamedTuple):
    """The least sum and where it is."""

    value: float
    places: tuple[int, ...]  # of each decision's value


@dataclass(slots=True)
class _Factor:
    scope: tuple[int, ...]
    table: Table


def eliminate(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], tables: Sequence[Table]
) -> Solution:
    """Returns the least sum of tables over all plans.

    Args:
        sizes: number of values of each decision.
        scopes: decisions of each table, rising.
        tables: [table][value of each decision of its scope].

    Raises:
        PlanError: a join is larger than `MOST_ENTRIES`.
    """
    factors = [_Factor(scope, table) for scope, table in zip(scopes, tables, strict=True)]
    taken: list[tuple[int, _Factor]] = []
    left = set(range(len(sizes)))
    while left:
        decision = min(left, key=lambda d: (_join_size(factors, d, sizes), d))
        if _join_size(factors, decision, sizes) > MOST_ENTRIES:
            raise PlanError("the decisions are too entangled for a dynamic program")
        mine = [factor for factor in factors if decision in factor.scope]
        joined = _join([*mine, _Factor((decision,), np.zeros(sizes[decision]))])
        axis = joined.scope.index(decision)
        rest = (*joined.scope[:axis], *joined.scope[axis + 1 :])
        factors = [factor for factor in factors if decision not in factor.scope]
        factors.append(_Factor(rest, joined.table.min(axis=axis)))
        taken.append((decision, joined))
        left.remove(decision)
    places = [0] * len(sizes)
    for decision, joined in reversed(taken):
        index = tuple(slice(None) if d == decision else places[d] for d in joined.scope)
        places[decision] = int(np.argmin(joined.table[index]))
    return Solution(float(sum(factor.table for factor in factors)), tuple(places))


def _join_size(factors: Sequence[_Factor], decision: int, sizes: Sequence[int]) -> int:
    scope = {d for factor in factors if decision in factor.scope for d in factor.scope}
    return prod(sizes[d] for d in scope | {decision})


def _join(factors: Sequence[_Factor]) -> _Factor:
    """Returns the sum of tables over all their decisions."""
    scope = tuple(sorted({d for factor in factors for d in factor.scope}))
    total: Table = np.zeros(())
    for factor in factors:
        places = [scope.index(d) for d in factor.scope]
        shape = [1] * len(scope)
        for place, size in zip(places, factor.table.shape, strict=True):
            shape[place] = size
        total = total + factor.table.reshape(shape)
    return _Factor(scope, total)
