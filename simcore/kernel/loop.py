"""The event loop: plays one placement to its end.

A round takes the earliest event time and applies all events of that time, those that appear
meanwhile included; only then does anything start. What starts at a device depends only on that
device, and a comm that may start is first in all its queues, so the order in which a round's starts
are decided does not matter. Zero-length tasks end in a later round of the same time.

Where rates change (`mode.fluid`), what starts gets its end from `simcore.kernel.fluid`.
"""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.fluid import (
    begin_comm,
    begin_compute,
    enter_engines,
    finish_comm,
    leave_engines,
)
from simcore.kernel.heap import line_up, pop_ready, push_event, take_event
from simcore.kernel.hosts import advance_host, arrive, look_at
from simcore.kernel.queues import enter, leave, num_resources, offer, route_of
from simcore.kernel.records import (
    NONE,
    P2P,
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
_FREE, _PORT = int(Contention.NONE), int(Contention.PORT)
_FIFO, _FAIR = int(Contention.FIFO), int(Contention.FAIR)
_INLINE, _RENDEZVOUS = int(P2P.INLINE), int(P2P.RENDEZVOUS)
_COMPUTE_END, _COMM_END = int(Kind.COMPUTE_END), int(Kind.COMM_END)
_LATENCY_OVER, _ISSUE = int(Kind.LATENCY_OVER), int(Kind.ISSUE)
_DIRTY = int(Count.DIRTY)
_OFFERS, _FINISHED = int(Count.OFFERS), int(Count.FINISHED)
_TRANSFERS, _WANTED = int(Count.TRANSFERS), int(Count.WANTED)


@compiled
def _end_later(s: Scratch, comm: int, start: float, end: float) -> None:
    s.comms[comm].start = start
    s.comms[comm].end = end
    push_event(s, end, comm * 4 + _COMM_END)


@compiled
def _want(s: Scratch, comm: int) -> None:
    """Notes that all is there for a comm: it is requested before anything starts in this round."""
    s.wanted[s.counts[_WANTED]] = comm
    s.counts[_WANTED] += 1


@compiled
def _request(tables: Tables, mode: Mode, s: Scratch, comm: int, now: float) -> None:
    """The comm takes its place in the queues and waits its latency."""
    s.comms[comm].request = now
    collective = comm - s.counts[_TRANSFERS]
    if collective >= 0:
        over = now + tables.collectives[collective].latency
    else:
        pair = tables.pairs[route_of(tables, s, comm)]
        over = now + pair.latency
        if mode.contention == _FREE and mode.fluid == 0:
            end = over + tables.tensors[s.comms[comm].tensor].num_bytes / pair.bandwidth
            if end > over:
                _end_later(s, comm, over, end)
                return
        elif mode.contention == _FAIR:
            enter_engines(tables, s, comm)
    if mode.contention == _FIFO:
        enter(tables, mode, s, comm)
    if over > now:
        line_up(s, over, comm * 4 + _LATENCY_OVER)
    else:
        s.comms[comm].latency_over = 1
        offer(s, comm)


@compiled
def _meet(s: Scratch, transfer: int) -> None:
    """One of the two things that a transfer of rendezvous awaits has happened."""
    s.messages[transfer].awaited -= 1
    if s.messages[transfer].awaited == 0:
        _want(s, transfer)


@compiled
def end_compute(tables: Tables, mode: Mode, s: Scratch, op: int, now: float) -> None:
    """An op is through: what it wrote is sent, and a host that waited for it goes on."""
    device = s.ops[op].place
    s.devices[device].running = NONE
    s.ops[op].end = now
    s.counts[_FINISHED] += 1
    look_at(s, device)
    if mode.order == _READY or tables.last_producer.shape[0] > 0:
        for tensor in range(tables.ops[op].first_output, tables.ops[op + 1].first_output):
            _deliver_here(tables, mode, s, tensor, device, now)
    for transfer in range(s.ops[op].first_transfer, s.ops[op + 1].first_transfer):
        if mode.p2p == _RENDEZVOUS:
            _meet(s, transfer)
        elif mode.p2p != _INLINE:
            _request(tables, mode, s, transfer, now)
    host = 0 if mode.host == _ONE else device
    if s.devices[host].host_waits == op:
        s.devices[host].host_waits = NONE
        advance_host(tables, mode, s, host, now)


@compiled
def _deliver_here(
    tables: Tables, mode: Mode, s: Scratch, tensor: int, device: int,
    now: float,
) -> None:  # fmt: skip
    """A tensor was made: collectives that read it wait for one thing less, and so do local ops."""
    for use in range(
        tables.tensors[tensor].first_consumer, tables.tensors[tensor + 1].first_consumer
    ):
        reader = tables.consumers[use]
        if s.ops[reader].place == NONE:
            s.ops[reader].pending -= 1
            if s.ops[reader].pending == 0:
                _want(s, s.counts[_TRANSFERS] + tables.ops[reader].collective)
        elif mode.order == _READY and s.ops[reader].place == device:
            s.ops[reader].pending -= 1
            if s.ops[reader].pending == 0:
                arrive(tables, s, reader, now)


@compiled
def _deliver(
    tables: Tables, mode: Mode, s: Scratch, tensor: int, device: int,
    now: float,
) -> None:  # fmt: skip
    """The tensor is on the device (NONE: wherever it is read): its readers wait for one less."""
    for use in range(
        tables.tensors[tensor].first_consumer, tables.tensors[tensor + 1].first_consumer
    ):
        reader = tables.consumers[use]
        place = s.ops[reader].place
        if place == NONE and device == NONE:
            s.ops[reader].pending -= 1
            if s.ops[reader].pending == 0:
                _want(s, s.counts[_TRANSFERS] + tables.ops[reader].collective)
        elif place == device or device == NONE:
            s.ops[reader].pending -= 1
            if s.ops[reader].pending == 0:
                if mode.order == _READY:
                    arrive(tables, s, reader, now)
                elif s.devices[place].head == reader:
                    look_at(s, place)


@compiled
def end_comm(tables: Tables, mode: Mode, s: Scratch, comm: int, now: float) -> None:
    """A transfer or collective is through: it holds nothing any more and its tensors are there."""
    s.comms[comm].end = now
    collective = comm - s.counts[_TRANSFERS]
    if mode.contention == _FAIR:
        if collective < 0:
            leave_engines(tables, s, comm)
    elif mode.contention != _FREE:
        leave(tables, mode, s, comm)
    if mode.fluid == 1:
        finish_comm(tables, mode, s, comm)
    if collective >= 0:
        op = tables.collectives[collective].op
        s.ops[op].start = s.comms[comm].start
        s.ops[op].end = now
        s.counts[_FINISHED] += 1
        for tensor in range(tables.ops[op].first_output, tables.ops[op + 1].first_output):
            _deliver(tables, mode, s, tensor, NONE, now)
        return
    if mode.p2p == _INLINE:
        for device in (s.comms[comm].source, s.comms[comm].target):
            s.devices[device].running = NONE
            look_at(s, device)
    _deliver(tables, mode, s, s.comms[comm].tensor, s.comms[comm].target, now)


@compiled
def want_collectives(tables: Tables, s: Scratch) -> None:
    """Notes the collectives that wait for nothing."""
    for collective in range(tables.last_producer.shape[0]):
        if tables.last_producer[collective] == NONE:
            _want(s, s.counts[_TRANSFERS] + collective)


@compiled
def apply_events(tables: Tables, mode: Mode, s: Scratch, now: float) -> None:
    """Applies every event of this time."""
    item = take_event(s, now)
    while item != NONE:
        kind = item & 3
        index = item >> 2
        if kind == _COMPUTE_END:
            end_compute(tables, mode, s, index, now)
        elif kind == _COMM_END:
            end_comm(tables, mode, s, index, now)
        elif kind == _LATENCY_OVER:
            s.comms[index].latency_over = 1
            offer(s, index)
        elif mode.order == _READY:
            arrive(tables, s, index, now)
        else:
            _wake(tables, s, index)
        item = take_event(s, now)


@compiled
def _wake(tables: Tables, s: Scratch, item: int) -> None:
    """An item of a stream has been issued."""
    num_ops = tables.cost.shape[0]
    if item < num_ops:
        look_at(s, s.ops[item].place)
    else:
        look_at(s, s.comms[item - num_ops].source)
        look_at(s, s.comms[item - num_ops].target)


@compiled
def _start_op(tables: Tables, mode: Mode, s: Scratch, device: int, op: int, now: float) -> None:
    s.devices[device].running = op
    s.ops[op].start = now
    duration = tables.cost[op, tables.columns[device]].duration
    if mode.slow == 1 and duration > 0.0:
        begin_compute(s, device, duration, now)
        return
    s.ops[op].end = now + duration
    push_event(s, s.ops[op].end, op * 4 + _COMPUTE_END)


@compiled
def _is_issued(s: Scratch, device: int, item: int, issue: float, now: float) -> bool:
    """Whether an item at the head of its stream is issued; if it will be, its device is woken."""
    if issue <= now:
        return True
    if issue != np.inf and s.devices[device].woken != item:
        s.devices[device].woken = item
        line_up(s, issue, item * 4 + _ISSUE)
    return False


@compiled
def _start_in_program_order(
    tables: Tables, mode: Mode, s: Scratch, device: int, now: float
) -> None:
    op = s.devices[device].head
    if op == NONE or s.devices[device].running != NONE:
        return
    if mode.messages == 1:
        if op >= tables.cost.shape[0]:
            _start_inline(tables, mode, s, device, op - tables.cost.shape[0], now)
            return
        if mode.p2p == _RENDEZVOUS and s.posts[op].is_posted == 0:
            _post(tables, mode, s, device, op, now)
    if s.ops[op].pending > 0:
        return
    if _is_issued(s, device, op, s.ops[op].issue, now):
        s.devices[device].head = s.ops[op].next_op
        _start_op(tables, mode, s, device, op, now)


@compiled
def _post(tables: Tables, mode: Mode, s: Scratch, device: int, op: int, now: float) -> None:
    """Posts the receives of what an op at the head of its stream reads, once they are issued."""
    transfer = s.posts[op].first_inbound
    if transfer == NONE or not _is_issued(s, device, op, s.posts[op].time, now):
        return
    s.posts[op].is_posted = 1
    s.devices[device].woken = NONE  # the op itself may have to be waited for
    while transfer != NONE:
        _meet(s, transfer)
        transfer = s.messages[transfer].next_inbound


@compiled
def _start_inline(
    tables: Tables, mode: Mode, s: Scratch, device: int, transfer: int,
    now: float,
) -> None:  # fmt: skip
    """Requests a transfer that both streams have come to; both are occupied from now on."""
    item = tables.cost.shape[0] + transfer
    source, target = s.comms[transfer].source, s.comms[transfer].target
    other = source + target - device
    if s.devices[other].head != item or s.devices[other].running != NONE:
        return
    if not _is_issued(s, device, item, s.messages[transfer].issue, now):
        return
    s.devices[source].head = s.messages[transfer].next_at_source
    s.devices[target].head = s.messages[transfer].next_at_target
    s.devices[source].running = item
    s.devices[target].running = item
    _want(s, transfer)


@compiled
def _start_when_ready(tables: Tables, mode: Mode, s: Scratch, device: int, now: float) -> None:
    if s.devices[device].running != NONE or s.devices[device].num_ready == 0:
        return
    op = pop_ready(tables, s, device)
    _start_op(tables, mode, s, device, op, now)
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
def _start_comms(tables: Tables, mode: Mode, s: Scratch, now: float) -> None:
    for index in range(s.counts[_OFFERS]):
        comm = s.offers[index]
        if s.comms[comm].start != np.inf:
            continue
        collective = comm - s.counts[_TRANSFERS]
        if mode.contention == _FAIR:
            if collective < 0 and s.comms[comm].num_heads < 2:
                continue
        elif mode.contention != _FREE and s.comms[comm].num_heads < num_resources(
            tables, mode, s, comm
        ):
            continue
        if mode.fluid == 1 and begin_comm(tables, mode, s, comm, now):
            continue
        if collective >= 0:
            duration = tables.collectives[collective].duration
        else:
            bandwidth = tables.pairs[route_of(tables, s, comm)].bandwidth
            duration = tables.tensors[s.comms[comm].tensor].num_bytes / bandwidth
        _end_later(s, comm, now, now + duration)
    s.counts[_OFFERS] = 0


@compiled
def start(tables: Tables, mode: Mode, s: Scratch, now: float) -> None:
    """Starts what can start at this time."""
    for index in range(s.counts[_DIRTY]):
        device = s.devices[index].listed
        s.devices[device].is_dirty = 0
        if mode.order == _READY:
            _start_when_ready(tables, mode, s, device, now)
        else:
            _start_in_program_order(tables, mode, s, device, now)
    s.counts[_DIRTY] = 0
    for index in range(s.counts[_WANTED]):
        _request(tables, mode, s, s.wanted[index], now)
    s.counts[_WANTED] = 0
    _start_comms(tables, mode, s, now)
