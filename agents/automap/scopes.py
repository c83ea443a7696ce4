"""Which decisions each part of a sharded plan's cost depends on.

An op's choice depends on the groups that it runs over; where it may only go on with what is split
already, or run on partial sums, also on how its inputs were made. What a tensor costs depends on
its producer and on all that read it. Scopes are bit masks of decisions, and never too small.
"""

import numpy as np
from numpy.typing import NDArray

from simcore.kernel import NONE, Rule, ShardTables
from simcore.shard_space import WHOLE, ShardSpace


def allowed_values(space: ShardSpace) -> NDArray[np.bool_]:
    """Returns along which axis a decision changes anything, [decision, 1 + axis]; 0 = whole."""
    tables = space.tables
    allowed = np.zeros((space.num_decisions, 1 + len(space.axes)), np.bool_)
    allowed[:, 0] = True
    decision = tables.decision[tables.loops["group"]]
    for axis in range(len(space.axes)):
        divides = ((tables.loops["divides"] >> axis) & 1 == 1) & (decision != NONE)
        allowed[decision[divides], 1 + axis] = True
        batch = tables.batch_group
        if batch != NONE and not tables.divides[1 + axis]:
            allowed[tables.decision[batch], 1 + axis] = False
    return allowed


def item_scopes(tables: ShardTables, free: NDArray[np.bool_]) -> list[int]:
    """Returns the decisions that each op and each tensor depends on, as bit masks, [item].

    Args:
        tables: of a space.
        free: decisions that have more than one value, [decision].
    """
    walk = _Walk(tables, free)
    for op in range(len(tables.ops) - 1):
        walk.visit(op)
    return walk.scopes()


class _Walk:
    """Goes through the ops in program order, as the kernel does."""

    def __init__(self, tables: ShardTables, free: NDArray[np.bool_]) -> None:
        self.tables = tables
        bits = [1 << int(d) if d != NONE and free[d] else 0 for d in tables.decision]
        self.loops = [bits[group] for group in tables.loops["group"].tolist()]
        self.begins = tables.loops["begins"].tolist()
        self.place, self.tensor = tables.reads["place"].tolist(), tables.reads["tensor"].tolist()
        self.ops = {name: tables.ops[name].tolist() for name in tables.ops.dtype.names}
        self.made = [0] * len(tables.tensors)
        self.is_made = [producer != NONE for producer in tables.tensors["producer"].tolist()]
        self.cost = [0] * len(tables.tensors)
        self.choice: list[int] = []
        batch = tables.batch_group
        self.always = bits[batch] if batch != NONE else 0  # it sizes everything

    def visit(self, op: int) -> None:
        """Notes what an op depends on, and what that makes of its tensors."""
        rows = self.ops
        reads = range(rows["first_read"][op], rows["first_read"][op + 1])
        scope = 0
        if rows["rule"][op] == Rule.LOOPS:
            scope = self._choice(op, reads)
        elif rows["rule"][op] == Rule.VIEW and reads:
            scope = self.made[self.tensor[reads[0]]]
        for read in reads:
            tensor = self.tensor[read]
            self.cost[tensor] |= scope
            if not self.is_made[tensor] and self.place[read] >= 0:
                self.made[tensor], self.is_made[tensor] = scope, True
        for tensor in range(rows["first_tensor"][op], rows["first_tensor"][op + 1]):
            self.made[tensor] = scope
            home = self.tables.home[self.tables.tensors["storage"][tensor]]
            if rows["is_update"][op] and home != NONE:
                self.cost[tensor] |= self.made[home]
        self.choice.append(scope)

    def _choice(self, op: int, reads: range) -> int:
        loops = range(self.ops["first_loop"][op], self.ops["first_loop"][op + 1])
        scope = 0
        for loop in loops:
            scope |= self.loops[loop]
        follows = self.ops["is_update"][op] or any(not self.begins[loop] for loop in loops)
        if self.ops["is_linear"][op] or (follows and scope):
            for read in reads:
                scope |= self.made[self.tensor[read]]
        return scope

    def scopes(self) -> list[int]:
        """Returns the scopes of ops, then tensors."""
        tensors = [made | cost for made, cost in zip(self.made, self.cost, strict=True)]
        return [scope | self.always for scope in (*self.choice, *tensors)]


def largest(scopes: list[int]) -> list[int]:
    """Returns those that no other contains, in a fixed order."""
    kept: list[int] = []
    for scope in sorted(set(scopes), key=lambda each: (-each.bit_count(), each)):
        if not any(scope | other == other for other in kept):
            kept.append(scope)
    return kept


def members(scope: int) -> tuple[int, ...]:
    """Returns the decisions of a bit mask."""
    return tuple(bit for bit in range(scope.bit_length()) if scope >> bit & 1)


def as_axis(values: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Returns the allowed values of one decision as a plan has them, rising from WHOLE."""
    return (np.flatnonzero(values) + WHOLE).astype(np.int8)
