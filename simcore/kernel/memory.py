"""Peak allocated bytes per device, walked in the order in which the host issues the ops."""

from simcore.kernel.compiled import compiled
from simcore.kernel.records import NONE, Scratch, Tables


@compiled
def _earlier(s: Scratch, a: int, b: int) -> bool:
    if s.ops[a].start != s.ops[b].start:
        return s.ops[a].start < s.ops[b].start
    return a < b


@compiled
def _hold_persistent(tables: Tables, s: Scratch) -> None:
    """Counts parameters and buffers once on each device that uses them, and resident bytes."""
    num_devices = tables.columns.shape[0]
    for device in range(num_devices):
        s.devices[device].current = 0
        s.devices[device].stamp = NONE
    for held in range(tables.held_bytes.shape[0]):
        for use in range(tables.first_holder[held], tables.first_holder[held + 1]):
            device = s.ops[tables.holders[use]].place
            if s.devices[device].stamp != held:
                s.devices[device].stamp = held
                s.devices[device].current += tables.held_bytes[held]
    for op in range(tables.cost.shape[0]):
        if s.ops[op].place != NONE:
            s.devices[s.ops[op].place].current += tables.ops[op].resident
    for device in range(num_devices):
        s.devices[device].peak = s.devices[device].current


@compiled
def _place_by_start(tables: Tables, s: Scratch) -> None:
    """Finds where each storage is allocated and freed on each device, ops in order of start."""
    for op in range(tables.cost.shape[0]):
        s.slots[op].allocate = 0
        s.slots[op].release = 0
    for device in range(tables.columns.shape[0]):
        s.devices[device].stamp = NONE
    for storage in range(tables.first_touch.shape[0] - 1):
        num_devices = 0
        for touch in range(tables.first_touch[storage], tables.first_touch[storage + 1]):
            op = tables.touches[touch].op
            state = s.devices[s.ops[op].place]
            size = tables.touches[touch].num_bytes
            if state.stamp != storage:
                state.stamp = storage
                s.devices[num_devices].listed = s.ops[op].place
                num_devices += 1
                state.first_touch = op
                state.last_touch = op
                state.largest = size
                continue
            state.largest = max(state.largest, size)
            if _earlier(s, op, state.first_touch):
                state.first_touch = op
            if _earlier(s, state.last_touch, op):
                state.last_touch = op
        _note_lifetimes(s, num_devices)


@compiled
def _place_by_program(tables: Tables, s: Scratch) -> None:
    """Finds the same in program order, where only storages of several units need a look.

    Nothing branches on where ops are: such a branch would be mispredicted every other time.
    """
    num_ops = tables.cost.shape[0]
    for op in range(num_ops):
        s.slots[op].allocate = tables.ops[op].allocate
        s.slots[op].release = tables.ops[op].release
    for shared in range(tables.first_span.shape[0] - 1):
        begin, end = tables.first_span[shared], tables.first_span[shared + 1]
        for index in range(begin, end):
            state = s.devices[s.ops[tables.spans[index].first].place]
            state.first_touch = num_ops
            state.last_touch = 0
            state.largest = 0
        for index in range(begin, end):
            span = tables.spans[index]
            state = s.devices[s.ops[span.first].place]
            state.first_touch = min(state.first_touch, span.first)
            state.last_touch = max(state.last_touch, span.last)
            state.largest = max(state.largest, span.num_bytes)
        for index in range(begin, end):
            state = s.devices[s.ops[tables.spans[index].first].place]
            s.slots[state.first_touch].allocate += state.largest
            s.slots[state.last_touch].release += state.largest
            state.largest = 0  # it is counted once for a device


@compiled
def _note_lifetimes(s: Scratch, num_devices: int) -> None:
    """Adds the storage at hand to the ops before and after which the listed devices hold it."""
    for index in range(num_devices):
        state = s.devices[s.devices[index].listed]
        s.slots[state.first_touch].allocate += state.largest
        s.slots[state.last_touch].release += state.largest


@compiled
def _step(tables: Tables, s: Scratch, device: int, op: int) -> None:
    s.devices[device].current += s.slots[op].allocate
    s.devices[device].peak = max(
        s.devices[device].peak, s.devices[device].current + tables.ops[op].workspace
    )
    s.devices[device].current -= s.slots[op].release


@compiled
def walk_by_program(tables: Tables, s: Scratch) -> None:
    """Leaves each device's peak allocated bytes in the scratch, ops issued in program order."""
    _hold_persistent(tables, s)
    _place_by_program(tables, s)
    for op in range(tables.cost.shape[0]):
        if s.ops[op].place != NONE:
            _step(tables, s, s.ops[op].place, op)


@compiled
def walk_by_start(tables: Tables, s: Scratch) -> None:
    """Leaves the same for ops issued in the order of their start."""
    _hold_persistent(tables, s)
    _place_by_start(tables, s)
    for device in range(tables.columns.shape[0]):
        base = s.devices[device].slot
        for index in range(s.devices[device].num_executed):
            _step(tables, s, device, s.slots[base + index].executed)
