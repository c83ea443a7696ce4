"""Two binary heaps on flat arrays: events by time, and the arrived ops of a device.

Events of one time are all applied before anything starts, and what starts does not depend on the
order in which they were applied, so events need no tie-break; arrived ops do. Most latencies are
alike, so what waits for one comes in the order of its end: such events stand in line, and only one
that would have to push in goes to the heap.
"""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.records import NONE, Count, Scratch, Tables

_HEAP, _FRONT, _BACK = int(Count.HEAP), int(Count.FRONT), int(Count.BACK)


@compiled
def push_event(s: Scratch, time: float, item: int) -> None:
    """Adds an event."""
    at = s.counts[_HEAP]
    s.counts[_HEAP] = at + 1
    while at > 0:
        parent = (at - 1) >> 1
        if s.heap[parent].time <= time:
            break
        s.heap[at].time = s.heap[parent].time
        s.heap[at].payload = s.heap[parent].payload
        at = parent
    s.heap[at].time = time
    s.heap[at].payload = item


@compiled
def pop_event(s: Scratch) -> int:
    """Removes an event of the earliest time and returns its item."""
    top = s.heap[0].payload
    size = s.counts[_HEAP] - 1
    s.counts[_HEAP] = size
    time, item = s.heap[size].time, s.heap[size].payload
    at, child = 0, 1
    while child < size:
        if child + 1 < size and s.heap[child + 1].time < s.heap[child].time:
            child += 1
        if s.heap[child].time >= time:
            break
        s.heap[at].time = s.heap[child].time
        s.heap[at].payload = s.heap[child].payload
        at = child
        child = 2 * at + 1
    s.heap[at].time = time
    s.heap[at].payload = item
    return top


@compiled
def line_up(s: Scratch, time: float, item: int) -> None:
    """Adds an event that is probably later than those in the line."""
    front, back = s.counts[_FRONT], s.counts[_BACK]
    if front == back:
        front, back = 0, 0
    elif s.line[back - 1].time > time or back == s.line.shape[0]:
        push_event(s, time, item)
        return
    s.line[back].time = time
    s.line[back].payload = item
    s.counts[_FRONT] = front
    s.counts[_BACK] = back + 1


@compiled
def next_time(s: Scratch) -> float:
    """Returns the time of the earliest event; inf if there is none."""
    time = s.heap[0].time if s.counts[_HEAP] > 0 else np.inf
    front = s.counts[_FRONT]
    return float(min(time, s.line[front].time) if front < s.counts[_BACK] else time)


@compiled
def take_event(s: Scratch, now: float) -> int:
    """Removes an event of this time and returns its item; NONE if there is no more."""
    front = s.counts[_FRONT]
    if front < s.counts[_BACK] and s.line[front].time == now:
        s.counts[_FRONT] = front + 1
        return int(s.line[front].payload)
    if s.counts[_HEAP] > 0 and s.heap[0].time == now:
        return pop_event(s)
    return NONE


@compiled
def _before(tables: Tables, s: Scratch, a: int, b: int) -> bool:
    if tables.ops[a].priority != tables.ops[b].priority:
        return tables.ops[a].priority < tables.ops[b].priority
    if s.ops[a].arrival != s.ops[b].arrival:
        return s.ops[a].arrival < s.ops[b].arrival
    return a < b


@compiled
def push_ready(tables: Tables, s: Scratch, device: int, op: int) -> None:
    """Adds an arrived op to its device's heap, ordered by (priority, arrival, op)."""
    base = s.devices[device].slot
    at = s.devices[device].num_ready
    s.devices[device].num_ready = at + 1
    while at > 0:
        parent = (at - 1) >> 1
        if _before(tables, s, s.slots[base + parent].ready, op):
            break
        s.slots[base + at].ready = s.slots[base + parent].ready
        at = parent
    s.slots[base + at].ready = op


@compiled
def pop_ready(tables: Tables, s: Scratch, device: int) -> int:
    """Removes the first of a device's arrived ops."""
    base = s.devices[device].slot
    top = s.slots[base].ready
    size = s.devices[device].num_ready - 1
    s.devices[device].num_ready = size
    op = s.slots[base + size].ready
    at, child = 0, 1
    while child < size:
        if child + 1 < size and _before(
            tables, s, s.slots[base + child + 1].ready, s.slots[base + child].ready
        ):
            child += 1
        if not _before(tables, s, s.slots[base + child].ready, op):
            break
        s.slots[base + at].ready = s.slots[base + child].ready
        at = child
        child = 2 * at + 1
    s.slots[base + at].ready = op
    return top
