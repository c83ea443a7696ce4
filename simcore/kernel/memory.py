"""Peak allocated bytes per device, walked in the order in which the host issues the ops."""

from simcore.kernel.compiled import compiled
from simcore.kernel.records import NONE, Mode, Order, Scratch, Tables

_READY = int(Order.READY)


@compiled
def _earlier(s: Scratch, by_start: bool, a: int, b: int) -> bool:
    if by_start and s.ops[a].start != s.ops[b].start:
        return s.ops[a].start < s.ops[b].start
    return a < b


@compiled
def _hold_persistent(tables: Tables, s: Scratch) -> None:
    """Counts parameters and buffers once on each device that uses them, and resident bytes."""
    num_devices = tables.cost.shape[1]
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
        s.devices[s.ops[op].place].current += tables.ops[op].resident
    for device in range(num_devices):
        s.devices[device].peak = s.devices[device].current


@compiled
def _place_storages(tables: Tables, mode: Mode, s: Scratch) -> None:
    """Finds where each storage is allocated and freed on each device that touches it."""
    by_start = mode.order == _READY
    for op in range(tables.cost.shape[0]):
        s.ops[op].allocate = 0
        s.ops[op].release = 0
    for device in range(tables.cost.shape[1]):
        s.devices[device].stamp = NONE
    for storage in range(tables.first_touch.shape[0] - 1):
        num_devices = 0
        for touch in range(tables.first_touch[storage], tables.first_touch[storage + 1]):
            op = tables.touches[touch].op
            device = s.ops[op].place
            size = tables.touches[touch].num_bytes
            if s.devices[device].stamp != storage:
                s.devices[device].stamp = storage
                s.devices[num_devices].listed = device
                num_devices += 1
                s.devices[device].first_touch = op
                s.devices[device].last_touch = op
                s.devices[device].largest = size
                continue
            s.devices[device].largest = max(s.devices[device].largest, size)
            if _earlier(s, by_start, op, s.devices[device].first_touch):
                s.devices[device].first_touch = op
            if _earlier(s, by_start, s.devices[device].last_touch, op):
                s.devices[device].last_touch = op
        for index in range(num_devices):
            device = s.devices[index].listed
            s.ops[s.devices[device].first_touch].allocate += s.devices[device].largest
            s.ops[s.devices[device].last_touch].release += s.devices[device].largest


@compiled
def _step(tables: Tables, s: Scratch, device: int, op: int) -> None:
    s.devices[device].current += s.ops[op].allocate
    s.devices[device].peak = max(
        s.devices[device].peak, s.devices[device].current + tables.ops[op].workspace
    )
    s.devices[device].current -= s.ops[op].release


@compiled
def walk_memory(tables: Tables, mode: Mode, s: Scratch) -> None:
    """Leaves each device's peak allocated bytes in the scratch."""
    _hold_persistent(tables, s)
    _place_storages(tables, mode, s)
    if mode.order != _READY:
        for op in range(tables.cost.shape[0]):
            _step(tables, s, s.ops[op].place, op)
        return
    for device in range(tables.cost.shape[1]):
        base = s.devices[device].slot
        for index in range(s.devices[device].num_executed):
            _step(tables, s, device, s.ops[base + index].executed)
