"""Sharded plans to the ops of one device, with the collectives between them.

Does for a batch of plans what `simcore.sharding.local` does for one, in the same order and with the
same numbers; it says why. Axes as in `shard_records`.
"""

from simcore.kernel.compiled import compiled, compiled_apart
from simcore.kernel.records import NONE
from simcore.kernel.shard_records import (
    ANY,
    AXES,
    PARTIAL,
    WHOLE,
    Change,
    Count,
    ShardScratch,
    ShardTables,
)

_HANDLES, _LOCALS, _INPUTS = int(Count.HANDLES), int(Count.LOCALS), int(Count.INPUTS)
_STORES = int(Count.STORES)
_SLICE, _REDUCE_SCATTER = int(Change.SLICE), int(Change.REDUCE_SCATTER)
_ALL_REDUCE, _ALL_TO_ALL = int(Change.ALL_REDUCE), int(Change.ALL_TO_ALL)
_ALL_GATHER = int(Change.ALL_GATHER)

# tensors in their states


@compiled
def _key(first: int, second: int, epoch: int) -> int:
    return ((first + 16) * 256 + second + 16) * 2 + epoch


@compiled
def _find(s: ShardScratch, tensor: int, key: int) -> int:
    """Returns the handle of a tensor in a state, NONE = there is none."""
    handle = s.first_handle[tensor]
    while handle != NONE and s.handles[handle].key != key:
        handle = s.handles[handle].next
    return int(handle)


@compiled
def _size(t: ShardTables, sample: int, tensor: int, first: int, second: int) -> int:
    """Returns the bytes of a tensor in a state on one device."""
    mask = (1 if first >= 0 else 0) + (2 if second >= 0 else 0)
    return int(t.num_bytes[sample, tensor, mask])


@compiled
def _add_handle(s: ShardScratch, tensor: int, key: int, num_bytes: int, store: int) -> int:
    """Notes a tensor in a new state; store NONE = it gets a storage of its own."""
    handle = s.counts[_HANDLES]
    s.counts[_HANDLES] = handle + 1
    if store == NONE:
        store = s.counts[_STORES]
        s.counts[_STORES] = store + 1
        s.stores[store].first = NONE
        s.stores[store].num_bytes = 0
        s.stores[store].largest = 0
        s.stores[store].is_held = 0
        s.stores[store].is_used = 0
    s.stores[store].largest = max(s.stores[store].largest, num_bytes)
    row = s.handles[handle]
    row.key = key
    row.next = NONE
    row.store = store
    row.num_bytes = num_bytes
    row.producer = s.counts[_LOCALS] - 1
    row.bucket = NONE
    row.ready = 0.0
    if tensor != NONE:
        row.next = s.first_handle[tensor]
        s.first_handle[tensor] = handle
    return int(handle)


@compiled
def _touch(s: ShardScratch, handle: int) -> None:
    """Notes that the last local op reads or writes a tensor."""
    local = s.counts[_LOCALS] - 1
    store = s.stores[s.handles[handle].store]
    if store.first == NONE:
        store.first = local
    store.last = local
    store.num_bytes = max(store.num_bytes, s.handles[handle].num_bytes)


@compiled
def _add_local(s: ShardScratch, change: int, axis: int, num_bytes: int, op: int) -> int:
    """Begins a local op; what it reads and writes is added next."""
    local = s.counts[_LOCALS]
    s.counts[_LOCALS] = local + 1
    row = s.locals[local]
    row.change = change
    row.axis = axis
    row.num_bytes = num_bytes
    row.op = op
    row.first_input = s.counts[_INPUTS]
    row.first_handle = s.counts[_HANDLES]
    row.behind = NONE
    row.allocate = 0
    row.release = 0
    s.locals[local + 1].first_input = s.counts[_INPUTS]
    s.locals[local + 1].first_handle = s.counts[_HANDLES]
    return int(local)


@compiled
def _add_input(s: ShardScratch, handle: int) -> None:
    s.inputs[s.counts[_INPUTS]] = handle
    s.counts[_INPUTS] += 1
    s.locals[s.counts[_LOCALS]].first_input = s.counts[_INPUTS]


@compiled
def _end_local(s: ShardScratch) -> None:
    s.locals[s.counts[_LOCALS]].first_handle = s.counts[_HANDLES]


# changes of state


@compiled
def _kind(start: int, goal: int) -> int:
    """Returns what leads from one state to another along one axis, NONE = nothing."""
    if start == goal:
        return NONE
    if start == WHOLE:
        return _SLICE
    if start == PARTIAL:
        return _ALL_REDUCE if goal == WHOLE else _REDUCE_SCATTER
    return _ALL_GATHER if goal == WHOLE else _ALL_TO_ALL


@compiled_apart
def _change(  # noqa: PLR0913, PLR0917 - a step from one state to another
    t: ShardTables,
    s: ShardScratch,
    sample: int,
    tensor: int,
    have: int,
    key: int,
    kind: int,
    axis: int,
    num_bytes: int,
) -> int:
    """Adds one collective or slice; returns the handle of what it makes."""
    full = num_bytes if kind == _ALL_GATHER else s.handles[have].num_bytes
    _add_local(s, kind, axis, full, NONE)
    _add_input(s, have)
    in_place = kind == _ALL_REDUCE and s.adds_parts[tensor] == 0
    made = _add_handle(s, tensor, key, num_bytes, s.handles[have].store if in_place else NONE)
    if kind == _SLICE:
        _touch(s, have)
        _touch(s, made)
        if s.handles[have].producer == NONE:
            s.stores[s.handles[have].store].is_used = 1
    _end_local(s)
    return made


@compiled_apart
def _steps(  # noqa: PLR0913, PLR0917 - a tensor, two states of two axes, and where it is now
    t: ShardTables,
    s: ShardScratch,
    sample: int,
    tensor: int,
    a0: int,
    a1: int,
    b0: int,
    b1: int,
    have: int,
    epoch: int,
) -> int:
    """Returns the handle of a tensor in state b, given that of state a."""
    first, second = _kind(a0, b0), _kind(a1, b1)
    axis = 1 if first == NONE or (second != NONE and second < first) else 0
    for _ in range(AXES):
        kind = first if axis == 0 else second
        if kind != NONE:
            if axis == 0:
                a0 = b0
            else:
                a1 = b1
            later = epoch if kind == _ALL_GATHER else 0
            key = _key(a0, a1, later)
            found = _find(s, tensor, key)
            if found == NONE:
                size = _size(t, sample, tensor, a0, a1)
                found = _change(t, s, sample, tensor, have, key, kind, axis, size)
            have = found
        axis = 1 - axis
    return have


@compiled
def _fetch(t: ShardTables, s: ShardScratch, sample: int, read: int, epoch: int) -> int:
    """Returns the handle of a tensor in the state that an op needs."""
    tensor = t.reads[read].tensor
    m0, m1 = s.made[tensor, 0], s.made[tensor, 1]
    z0, z1 = s.settled[tensor, 0], s.settled[tensor, 1]
    g0, g1 = s.need[read, 0], s.need[read, 1]
    g0, g1 = z0 if g0 == ANY else g0, z1 if g1 == ANY else g1
    a0, a1 = m0 if g0 == PARTIAL else z0, m1 if g1 == PARTIAL else z1
    have = _find(s, tensor, _key(a0, a1, epoch))
    if have == NONE and epoch == 1:
        have = _find(s, tensor, _key(a0, a1, 0))
    if have == NONE:  # a sum along some axes only
        made = _find(s, tensor, _key(m0, m1, 0))
        have = _steps(t, s, sample, tensor, m0, m1, a0, a1, made, 0)
    if a0 == g0 and a1 == g1:
        return have
    return _steps(t, s, sample, tensor, a0, a1, g0, g1, have, epoch)


@compiled
def _settle(t: ShardTables, s: ShardScratch, sample: int, tensor: int, is_update: int) -> None:
    """Sums partial results as their readers want, and brings updated parameters home."""
    g0, g1 = s.settled[tensor, 0], s.settled[tensor, 1]
    home = t.home[t.tensors[tensor].storage]
    if is_update == 1 and home != NONE:
        g0, g1 = s.made[home, 0], s.made[home, 1]
    m0, m1 = s.made[tensor, 0], s.made[tensor, 1]
    if g0 != m0 or g1 != m1:
        made = _find(s, tensor, _key(m0, m1, 0))
        _steps(t, s, sample, tensor, m0, m1, g0, g1, made, 0)


# ops


@compiled
def _fetch_all(t: ShardTables, s: ShardScratch, sample: int, op: int) -> int:
    """Fetches what an op reads, each tensor and state once; returns how many there are."""
    row, count = t.ops[op], 0
    for read in range(row.first_read, t.ops[op + 1].first_read):
        tensor = t.reads[read].tensor
        again = False
        for other in range(row.first_read, read):
            if t.reads[other].tensor == tensor:
                same = s.need[other, 0] == s.need[read, 0] and s.need[other, 1] == s.need[read, 1]
                again = again or same
        if again:
            continue
        handle = _fetch(t, s, sample, read, row.epoch)
        s.fetched[count] = handle
        count += 1
        storage = t.tensors[tensor].storage
        s.read_by[storage] = op
        s.read_as[storage] = handle
        if row.is_update == 1 and t.tensors[tensor].is_gradient == 1:
            s.handles[handle].bucket = 0
    return count


@compiled
def _add_inner(t: ShardTables, s: ShardScratch, sample: int, op: int, count: int) -> int:
    """Adds the collectives inside an op; returns how much it waits for, their ends included."""
    mask = (1 if s.choice[op, 0] >= 0 else 0) + (2 if s.choice[op, 1] >= 0 else 0)
    tokens = 0
    for axis in range(AXES):
        choice = s.choice[op, axis]
        if choice < 0 or t.loops[choice].inner == NONE:
            continue
        size = t.inner[sample, choice, axis, mask & ~(1 << axis)]
        _add_local(s, t.loops[choice].inner, axis, size, NONE)
        for index in range(count):
            _add_input(s, s.fetched[index])
        s.fetched[count + tokens] = _add_handle(s, NONE, 0, 0, NONE)
        _end_local(s)
        tokens += 1
    return count + tokens


@compiled
def _variant(t: ShardTables, s: ShardScratch, op: int) -> int:
    """Returns the row of an op's costs, given the loops that it splits."""
    first, width = t.ops[op].first_loop, t.ops[op + 1].first_loop - t.ops[op].first_loop + 1
    place = 0
    for axis in range(AXES):
        choice = s.choice[op, axis]
        place = place * width + (choice - first + 1 if choice >= 0 else 0)
    return int(t.ops[op].first_variant + place)


@compiled
def _lower_op(t: ShardTables, s: ShardScratch, sample: int, op: int) -> None:
    """Adds one op behind what it needs, and before what its results need."""
    count = _add_inner(t, s, sample, op, _fetch_all(t, s, sample, op))
    local = _add_local(s, NONE, NONE, 0, op)
    s.locals[local].variant = _variant(t, s, op)
    for index in range(count):
        handle = s.fetched[index]
        _add_input(s, handle)
        _touch(s, handle)
        if s.handles[handle].producer == NONE:
            s.stores[s.handles[handle].store].is_used = 1
    first, end = t.ops[op].first_tensor, t.ops[op + 1].first_tensor
    for tensor in range(first, end):
        storage = t.tensors[tensor].storage
        same = s.read_as[storage] if s.read_by[storage] == op else s.newest[storage]
        store = s.handles[same].store if same != NONE else NONE
        m0, m1 = s.made[tensor, 0], s.made[tensor, 1]
        size = _size(t, sample, tensor, m0, m1)
        handle = _add_handle(s, tensor, _key(m0, m1, 0), size, store)
        s.newest[storage] = handle
        s.stores[s.handles[handle].store].is_held |= t.tensors[tensor].is_held
        _touch(s, handle)
    _end_local(s)
    for tensor in range(first, end):
        _settle(t, s, sample, tensor, t.ops[op].is_update)


@compiled
def lower_shards(t: ShardTables, s: ShardScratch, sample: int) -> None:
    """Writes the ops of one device, and a collective wherever a tensor must change its state."""
    s.first_handle[:] = NONE
    s.newest[:] = NONE
    s.read_by[:] = NONE
    s.counts[:] = 0
    s.locals[0].first_input = 0
    s.locals[0].first_handle = 0
    for tensor in range(t.ops[0].first_tensor):
        m0, m1 = s.made[tensor, 0], s.made[tensor, 1]
        size = _size(t, sample, tensor, m0, m1)
        handle = _add_handle(s, tensor, _key(m0, m1, 0), size, NONE)
        s.stores[s.handles[handle].store].is_held = t.tensors[tensor].is_held
        s.newest[t.tensors[tensor].storage] = handle
    s.locals[0].first_handle = s.counts[_HANDLES]
    for op in range(t.ops.shape[0] - 1):
        _lower_op(t, s, sample, op)
