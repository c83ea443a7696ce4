"""The event loop: plays one placement to its end.

A round takes the earliest event time and applies all events of that time, those that appear
meanwhile included; only then does anything start. What starts at a device depends only on that
device, and a transfer that may start is first in all its queues, so the order in which a round's
starts are decided does not matter. Zero-length tasks end in a later round of the same time.
"""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.heap import pop_event, pop_ready, push_event, push_ready
from simcore.kernel.queues import enter, leave, num_resources, offer, open_queues, route_of
from simcore.kernel.records import (
    NONE,
    Contention,
    Count,
    Host,
    Kind,
    Mode,
    Order,
    Scratch,
    Tables,
)

_READY, _ONE = int(Order.READY), int(Host.ONE)
_FREE, _FIFO = int(Contention.NONE), int(Contention.FIFO)
_COMPUTE_END, _TRANSFER_END = int(Kind.COMPUTE_END), int(Kind.TRANSFER_END)
_LATENCY_OVER, _ISSUE = int(Kind.LATENCY_OVER), int(Kind.ISSUE)
_HEAP, _DIRTY = int(Count.HEAP), int(Count.DIRTY)
_OFFERS, _FINISHED = int(Count.OFFERS), int(Count.FINISHED)


@compiled
def _look_at(s: Scratch, device: int) -> None:
    """Notes that a device may be able to start an op in this round."""
    if s.devices[device].is_dirty == 0:
        s.devices[device].is_dirty = 1
        s.devices[s.counts[_DIRTY]].listed = device
        s.counts[_DIRTY] += 1


@compiled
def _consider(tables: Tables, mode: Mode, s: Scratch, op: int, now: float) -> None:
    """Lets an op arrive if nothing is awaited and it is issued; schedules its issue if later."""
    if s.ops[op].pending > 0:
        return
    device = s.ops[op].place
    if mode.order != _READY:
        if s.devices[device].head == op:
            _look_at(s, device)
        return
    if s.ops[op].issue <= now:
        s.ops[op].arrival = now
        push_ready(tables, s, device, op)
        _look_at(s, device)
    elif s.ops[op].issue != np.inf:
        push_event(s, s.ops[op].issue, op * 4 + _ISSUE)


@compiled
def _advance_host(tables: Tables, mode: Mode, s: Scratch, host: int, now: float) -> None:
    """Issues ops from now on, until the host must wait for one (a sync op) or is through."""
    time = now
    op = s.devices[host].host_op
    while op != NONE:
        device = s.ops[op].place
        time = time + tables.cost[op, device].launch
        s.ops[op].issue = time
        _consider(tables, mode, s, op, now)
        following = s.ops[op].next_op
        if mode.host == _ONE:
            following = op + 1 if op + 1 < tables.cost.shape[0] else NONE
        if tables.cost[op, device].sync == 1:
            s.devices[host].host_waits = op
            s.devices[host].host_op = following
            return
        op = following
    s.devices[host].host_op = NONE


@compiled
def _request(tables: Tables, mode: Mode, s: Scratch, transfer: int, now: float) -> None:
    """The tensor is there: the transfer takes its place in the queues and waits its latency."""
    s.transfers[transfer].request = now
    pair = tables.pairs[route_of(tables, s, transfer)]
    over = now + pair.latency
    if mode.contention == _FREE:
        end = over + tables.tensors[s.transfers[transfer].tensor].num_bytes / pair.bandwidth
        if end > over:
            s.transfers[transfer].start = over
            s.transfers[transfer].end = end
            push_event(s, end, transfer * 4 + _TRANSFER_END)
            return
    elif mode.contention == _FIFO:
        enter(tables, mode, s, transfer)
    if over > now:
        push_event(s, over, transfer * 4 + _LATENCY_OVER)
    else:
        s.transfers[transfer].latency_over = 1
        offer(s, transfer)


@compiled
def _end_compute(tables: Tables, mode: Mode, s: Scratch, op: int, now: float) -> None:
    device = s.ops[op].place
    s.devices[device].running = NONE
    s.counts[_FINISHED] += 1
    _look_at(s, device)
    if mode.order == _READY:
        for tensor in range(tables.ops[op].first_output, tables.ops[op + 1].first_output):
            _deliver(tables, mode, s, tensor, device, now)
    for transfer in range(s.ops[op].first_transfer, s.ops[op + 1].first_transfer):
        _request(tables, mode, s, transfer, now)
    host = 0 if mode.host == _ONE else device
    if s.devices[host].host_waits == op:
        s.devices[host].host_waits = NONE
        _advance_host(tables, mode, s, host, now)


@compiled
def _deliver(
    tables: Tables, mode: Mode, s: Scratch, tensor: int, device: int,
    now: float,
) -> None:  # fmt: skip
    """The tensor is on the device: its readers there wait for one thing less."""
    for use in range(
        tables.tensors[tensor].first_consumer, tables.tensors[tensor + 1].first_consumer
    ):
        reader = tables.consumers[use]
        if s.ops[reader].place == device:
            s.ops[reader].pending -= 1
            if s.ops[reader].pending == 0:
                _consider(tables, mode, s, reader, now)


@compiled
def _apply(tables: Tables, mode: Mode, s: Scratch, now: float) -> None:
    """Applies every event of this time."""
    while s.counts[_HEAP] > 0 and s.heap[0].time == now:
        item = pop_event(s)
        kind = item & 3
        index = item >> 2
        if kind == _COMPUTE_END:
            _end_compute(tables, mode, s, index, now)
        elif kind == _TRANSFER_END:
            if mode.contention != _FREE:
                leave(tables, mode, s, index)
            target = s.transfers[index].target
            _deliver(tables, mode, s, s.transfers[index].tensor, target, now)
        elif kind == _LATENCY_OVER:
            s.transfers[index].latency_over = 1
            offer(s, index)
        elif mode.order == _READY:
            _consider(tables, mode, s, index, now)
        else:
            _look_at(s, s.ops[index].place)


@compiled
def _start_op(tables: Tables, s: Scratch, device: int, op: int, now: float) -> None:
    s.devices[device].running = op
    s.ops[op].start = now
    s.ops[op].end = now + tables.cost[op, device].duration
    push_event(s, s.ops[op].end, op * 4 + _COMPUTE_END)


@compiled
def _start_in_program_order(tables: Tables, s: Scratch, device: int, now: float) -> None:
    op = s.devices[device].head
    if op == NONE or s.devices[device].running != NONE or s.ops[op].pending > 0:
        return
    if s.ops[op].issue <= now:
        s.devices[device].head = s.ops[op].next_op
        _start_op(tables, s, device, op, now)
    elif s.ops[op].issue != np.inf and s.devices[device].woken != op:
        s.devices[device].woken = op
        push_event(s, s.ops[op].issue, op * 4 + _ISSUE)


@compiled
def _start_when_ready(tables: Tables, s: Scratch, device: int, now: float) -> None:
    if s.devices[device].running != NONE or s.devices[device].num_ready == 0:
        return
    op = pop_ready(tables, s, device)
    _start_op(tables, s, device, op, now)
    base = s.devices[device].slot
    at = base + s.devices[device].num_executed
    s.devices[device].num_executed += 1
    # memory is walked by (start, op): zero-length ops of one time may have started out of order
    while at > base:
        before = s.slots[at - 1].executed
        if s.ops[before].start != now or before < op:
            break
        s.slots[at].executed = before
        at -= 1
    s.slots[at].executed = op


@compiled
def _start_transfers(tables: Tables, mode: Mode, s: Scratch, now: float) -> None:
    for index in range(s.counts[_OFFERS]):
        transfer = s.offers[index]
        if s.transfers[transfer].start != np.inf:
            continue
        if mode.contention != _FREE and s.transfers[transfer].num_heads < num_resources(
            tables, mode, s, transfer
        ):
            continue
        size = tables.tensors[s.transfers[transfer].tensor].num_bytes
        s.transfers[transfer].start = now
        bandwidth = tables.pairs[route_of(tables, s, transfer)].bandwidth
        s.transfers[transfer].end = now + size / bandwidth
        push_event(s, s.transfers[transfer].end, transfer * 4 + _TRANSFER_END)
    s.counts[_OFFERS] = 0


@compiled
def _start(tables: Tables, mode: Mode, s: Scratch, now: float) -> None:
    """Starts what can start at this time."""
    for index in range(s.counts[_DIRTY]):
        device = s.devices[index].listed
        s.devices[device].is_dirty = 0
        if mode.order == _READY:
            _start_when_ready(tables, s, device, now)
        else:
            _start_in_program_order(tables, s, device, now)
    s.counts[_DIRTY] = 0
    _start_transfers(tables, mode, s, now)


@compiled
def _open(tables: Tables, mode: Mode, s: Scratch) -> None:
    """Sets everything to the beginning of the step and lets the hosts issue."""
    for op in range(tables.cost.shape[0]):
        s.ops[op].issue = np.inf
    num_devices = tables.cost.shape[1]
    for device in range(num_devices):
        state = s.devices[device]
        state.running = NONE
        state.woken = NONE
        state.host_waits = NONE
        state.num_executed = 0
        state.num_ready = 0
        state.is_dirty = 0
        state.host_op = state.head if mode.host != _ONE else NONE
    for counter in (_HEAP, _DIRTY, _OFFERS, _FINISHED):
        s.counts[counter] = 0
    open_queues(tables, mode, s)
    if mode.host == _ONE:
        s.devices[0].host_op = 0
    for host in range(num_devices):
        _advance_host(tables, mode, s, host, 0.0)


@compiled
def play(tables: Tables, mode: Mode, s: Scratch) -> float:
    """Runs the step and returns its time; transfers and op lists are already in the scratch."""
    _open(tables, mode, s)
    now = 0.0
    _start(tables, mode, s, now)
    while s.counts[_HEAP] > 0:
        now = s.heap[0].time
        _apply(tables, mode, s, now)
        _start(tables, mode, s, now)
    return now
