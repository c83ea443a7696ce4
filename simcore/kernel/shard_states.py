"""A sharded plan to states: what every op splits, and what that makes of every tensor.

Does for a batch of plans what `simcore.sharding.states` does for one, in the same order and with
the same numbers; it says why. Axes as in `shard_records`.
"""

from simcore.kernel.compiled import compiled
from simcore.kernel.records import NONE
from simcore.kernel.shard_records import (
    ANY,
    AXES,
    MANY,
    PARTIAL,
    UNSET,
    WHOLE,
    Rule,
    ShardScratch,
    ShardTables,
)

_LOOPS, _VIEW = int(Rule.LOOPS), int(Rule.VIEW)
_NEVER = 64  # above the cost of every loop


@compiled
def _follows(t: ShardTables, s: ShardScratch, op: int, loop: int, axis: int) -> bool:
    """Whether something that an op reads is split by a loop already."""
    for read in range(t.ops[op].first_read, t.ops[op + 1].first_read):
        tensor, place = t.reads[read].tensor, t.reads[read].place
        if place < 0 or (t.tensors[tensor].producer == NONE and t.ops[op].is_update == 0):
            continue
        factor = t.effects[t.loops[loop].first_effect + place]
        if factor >= 0 and s.made[tensor, axis] == factor:
            return True
    return False


@compiled
def _may_split(t: ShardTables, s: ShardScratch, op: int, loop: int, axis: int) -> bool:
    """Whether a plan lets an op split a loop along an axis."""
    row = t.loops[loop]
    if s.axis_of[row.group] != axis or (row.divides >> axis) & 1 == 0:
        return False
    if row.begins == 1 and t.ops[op].is_update == 0:
        return True
    return _follows(t, s, op, loop, axis)


@compiled
def _choose(t: ShardTables, s: ShardScratch, op: int, axis: int) -> int:
    """Returns the loop that an op splits along an axis, WHOLE = none.

    It is the first that it may, but where a loop goes on that cannot begin there: then what is
    split already counts most.
    """
    best, goes_on = WHOLE, False
    first, end = t.ops[op].first_loop, t.ops[op + 1].first_loop
    for loop in range(first, end):
        if _may_split(t, s, op, loop, axis):
            best = loop if best == WHOLE else best
            goes_on = goes_on or t.loops[loop].begins == 0
    if not goes_on:
        return best
    least = _NEVER
    for loop in range(first, end):
        if _may_split(t, s, op, loop, axis):
            cost = t.loops[loop].cost + (0 if _follows(t, s, op, loop, axis) else _NEVER // 2)
            if cost < least:
                best, least = loop, cost
    return best


@compiled
def _stays_partial(t: ShardTables, s: ShardScratch, op: int, axis: int) -> bool:
    """Whether all that a linear op reads is partial along an axis."""
    known = False
    for read in range(t.ops[op].first_read, t.ops[op + 1].first_read):
        state = s.made[t.reads[read].tensor, axis]
        if state == UNSET:
            continue
        if state != PARTIAL:
            return False
        known = True
    return known


@compiled
def _want(s: ShardScratch, tensor: int, axis: int, state: int) -> None:
    if state == PARTIAL:
        s.adds_parts[tensor] = 1
    elif state != ANY:
        wanted = s.wanted[tensor, axis]
        if wanted == UNSET:
            s.wanted[tensor, axis] = state
        elif wanted != state:
            s.wanted[tensor, axis] = MANY


@compiled
def _decide_loops(t: ShardTables, s: ShardScratch, op: int) -> None:
    """Decides what an op does whose loops are known, and what it needs and leaves."""
    row, after = t.ops[op], t.ops[op + 1]
    for axis in range(AXES):
        choice = _choose(t, s, op, axis)
        if choice == WHOLE and row.is_linear == 1 and _stays_partial(t, s, op, axis):
            choice = PARTIAL
        s.choice[op, axis] = choice
    for axis in range(AXES):
        choice = s.choice[op, axis]
        effect = t.loops[choice].first_effect if choice >= 0 else 0
        for read in range(row.first_read, after.first_read):
            tensor, place = t.reads[read].tensor, t.reads[read].place
            state = place if place < 0 else t.effects[effect + place] if choice >= 0 else choice
            s.need[read, axis] = state
            if s.made[tensor, axis] == UNSET and place >= 0:
                kept = state if state != PARTIAL and t.tensors[tensor].producer == NONE else WHOLE
                s.made[tensor, axis] = kept
            _want(s, tensor, axis, state)
        for tensor in range(row.first_tensor, after.first_tensor):
            place = t.tensors[tensor].place
            state = WHOLE if place < 0 else t.effects[effect + place] if choice >= 0 else choice
            s.made[tensor, axis] = state


@compiled
def _decide_unknown(t: ShardTables, s: ShardScratch, op: int) -> None:
    """A view is what it is of; an op without a rule needs everything whole."""
    row, after = t.ops[op], t.ops[op + 1]
    for axis in range(AXES):
        state = WHOLE
        if row.rule == _VIEW and row.first_read < after.first_read:
            made = s.made[t.reads[row.first_read].tensor, axis]
            state = WHOLE if made == UNSET else made
        s.choice[op, axis] = WHOLE
        for read in range(row.first_read, after.first_read):
            s.need[read, axis] = t.reads[read].place
            _want(s, t.reads[read].tensor, axis, t.reads[read].place)
        for tensor in range(row.first_tensor, after.first_tensor):
            s.made[tensor, axis] = state


@compiled
def find_states(t: ShardTables, s: ShardScratch) -> None:
    """Decides what every op does and what every tensor is, op after op."""
    s.made[:] = UNSET
    s.wanted[:] = UNSET
    s.adds_parts[:] = 0
    for op in range(t.ops.shape[0] - 1):
        if t.ops[op].rule == _LOOPS:
            _decide_loops(t, s, op)
        else:
            _decide_unknown(t, s, op)
    for tensor in range(t.tensors.shape[0]):
        for axis in range(AXES):
            state = s.made[tensor, axis]
            if state == UNSET:
                state = WHOLE
                s.made[tensor, axis] = state
            if state == PARTIAL and s.wanted[tensor, axis] != UNSET:
                wanted = s.wanted[tensor, axis]
                state = WHOLE if wanted == MANY else wanted
            s.settled[tensor, axis] = state
