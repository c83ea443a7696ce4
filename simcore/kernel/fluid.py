"""Work whose rate changes while it runs, and the engines that copies wait for under fair sharing.

A work is a compute (one per device, numbered by it) or a comm (numbered after the devices). What
is left of it shrinks at its rate; when the rate changes, what is left is brought up to date and the
end moves. Ends are kept in a heap that knows where each work is.
"""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.queues import node_of, offer, route_of, served_before
from simcore.kernel.records import NONE, Contention, Count, Mode, Scratch, Tables

_FAIR = int(Contention.FAIR)
_TRANSFERS, _COMMS, _TIMED = int(Count.TRANSFERS), int(Count.COMMS), int(Count.TIMED)
_ACTIVE, _CHANGED = int(Count.ACTIVE), int(Count.CHANGED)


@compiled
def _put(s: Scratch, at: int, work: int) -> None:
    s.works[at].listed = work
    s.works[work].place = at


@compiled
def _rise(s: Scratch, at: int, work: int) -> None:
    """Moves a work up the heap from a hole at `at`."""
    while at > 0:
        parent = (at - 1) >> 1
        above = s.works[parent].listed
        if s.works[above].end <= s.works[work].end:
            break
        _put(s, at, above)
        at = parent
    _put(s, at, work)


@compiled
def _sink(s: Scratch, at: int, work: int) -> None:
    """Moves a work down the heap from a hole at `at`."""
    size, child = s.counts[_TIMED], 2 * at + 1
    while child < size:
        below = s.works[child].listed
        if child + 1 < size and s.works[s.works[child + 1].listed].end < s.works[below].end:
            child += 1
            below = s.works[child].listed
        if s.works[below].end >= s.works[work].end:
            break
        _put(s, at, below)
        at = child
        child = 2 * at + 1
    _put(s, at, work)


@compiled
def pop_end(s: Scratch) -> int:
    """Removes the work that ends first and returns it."""
    top = s.works[0].listed
    s.works[top].place = NONE
    s.counts[_TIMED] -= 1
    size = s.counts[_TIMED]
    if size > 0:
        _sink(s, 0, s.works[size].listed)
    return int(top)


@compiled
def set_rate(s: Scratch, work: int, rate: float, now: float) -> None:
    """Changes the rate of a work from now on and moves its end."""
    state = s.works[work]
    if rate == state.rate:
        return
    state.left = max(0.0, state.left - state.rate * (now - state.since))
    state.since = now
    state.rate = rate
    before = state.end
    state.end = now + state.left / rate
    if state.place == NONE:
        s.counts[_TIMED] += 1
        _rise(s, s.counts[_TIMED] - 1, work)
    elif state.end < before:
        _rise(s, state.place, work)
    else:
        _sink(s, state.place, work)


@compiled
def begin_compute(s: Scratch, device: int, duration: float, now: float) -> None:
    """Makes a compute a work; its rate is set at the end of the round."""
    state = s.works[device]
    state.left = duration
    state.rate = 0.0
    state.since = now
    state.limit = 1.0


@compiled
def _count_comm(tables: Tables, s: Scratch, comm: int, change: int) -> None:
    """Counts a comm at the devices it touches."""
    collective = comm - s.counts[_TRANSFERS]
    if collective < 0:
        s.devices[s.comms[comm].source].copies += change
        s.devices[s.comms[comm].target].copies += change
        return
    first = tables.collectives[collective].first_member
    for index in range(first, tables.collectives[collective + 1].first_member):
        s.devices[tables.members[index]].collectives += change


@compiled
def num_loads(tables: Tables, s: Scratch, comm: int) -> int:
    """Returns how many channels a comm uses."""
    collective = comm - s.counts[_TRANSFERS]
    if collective >= 0:
        first = tables.collectives[collective].first_load
        return int(tables.collectives[collective + 1].first_load - first)
    pair = route_of(tables, s, comm)
    return int(tables.pairs[pair + 1].first_hop - tables.pairs[pair].first_hop)


@compiled
def load_of(tables: Tables, s: Scratch, comm: int, index: int) -> tuple[int, int, float]:
    """Returns (channel, node, usage) of a comm's channel number `index`.

    A transfer's nodes are its out-engine, the channels, and its in-engine.
    """
    collective = comm - s.counts[_TRANSFERS]
    if collective >= 0:
        load = tables.loads[tables.collectives[collective].first_load + index]
        return load.channel, node_of(tables, s, comm, index), load.usage
    channel = tables.hops[tables.pairs[route_of(tables, s, comm)].first_hop + index]
    return channel, node_of(tables, s, comm, index + 1), 1.0


@compiled
def _change(s: Scratch, channel: int) -> None:
    if s.queues[channel].is_changed == 0:
        s.queues[channel].is_changed = 1
        s.queues[s.counts[_CHANGED]].changed = channel
        s.counts[_CHANGED] += 1


@compiled
def _join(tables: Tables, s: Scratch, comm: int) -> None:
    """Adds a flow to its channels."""
    for index in range(num_loads(tables, s, comm)):
        channel, node, _ = load_of(tables, s, comm, index)
        before = s.queues[channel].tail
        s.nodes[node].owner = comm
        s.nodes[node].prev = before
        s.nodes[node].next = NONE
        s.queues[channel].tail = node
        if before == NONE:
            s.queues[channel].head = node
        else:
            s.nodes[before].next = node
        _change(s, channel)


@compiled
def _unlink(s: Scratch, resource: int, node: int) -> None:
    before, after = s.nodes[node].prev, s.nodes[node].next
    if before == NONE:
        s.queues[resource].head = after
    else:
        s.nodes[before].next = after
    if after == NONE:
        s.queues[resource].tail = before
    else:
        s.nodes[after].prev = before


@compiled
def touch_channels(tables: Tables, s: Scratch, comm: int) -> None:
    """Marks the channels of a flow as changed."""
    for index in range(num_loads(tables, s, comm)):
        channel, _, _ = load_of(tables, s, comm, index)
        _change(s, channel)


@compiled
def begin_comm(tables: Tables, mode: Mode, s: Scratch, comm: int, now: float) -> bool:
    """Makes a comm a work whose rate is set at the end of the round; False if it has no volume."""
    collective = comm - s.counts[_TRANSFERS]
    if collective >= 0:
        left = tables.collectives[collective].volume
        if left > 0.0:
            limit = left / tables.collectives[collective].duration
    else:
        left = float(tables.tensors[s.comms[comm].tensor].num_bytes)
        limit = float(tables.pairs[route_of(tables, s, comm)].bandwidth)
    if left <= 0.0:
        return False
    work = tables.columns.shape[0] + comm
    s.comms[comm].start = now
    state = s.works[work]
    state.left = left
    state.rate = 0.0
    state.since = now
    state.limit = limit
    state.active_place = s.counts[_ACTIVE]
    s.works[s.counts[_ACTIVE]].active = comm
    s.counts[_ACTIVE] += 1
    if mode.slow == 1:
        _count_comm(tables, s, comm, 1)
    if mode.contention == _FAIR:
        _join(tables, s, comm)
        if num_loads(tables, s, comm) == 0:
            set_rate(s, work, limit, now)
    return True


@compiled
def finish_comm(tables: Tables, mode: Mode, s: Scratch, comm: int) -> None:
    """Forgets an ended comm that was a work."""
    num_devices = tables.columns.shape[0]
    place = s.works[num_devices + comm].active_place
    if place == NONE:
        return
    s.works[num_devices + comm].active_place = NONE
    s.counts[_ACTIVE] -= 1
    last = s.works[s.counts[_ACTIVE]].active
    s.works[place].active = last
    if last != comm:
        s.works[num_devices + last].active_place = place
    if mode.slow == 1:
        _count_comm(tables, s, comm, -1)
    if mode.contention == _FAIR:
        for index in range(num_loads(tables, s, comm)):
            channel, node, _ = load_of(tables, s, comm, index)
            _unlink(s, channel, node)
            _change(s, channel)


@compiled
def _enter_engine(tables: Tables, s: Scratch, transfer: int, node: int, pool: int) -> None:
    """Puts a transfer into the queue of a pool, of which the first `engines` are served."""
    num_channels, num_devices = tables.bandwidth.shape[0], tables.columns.shape[0]
    resource = num_channels + pool
    if pool < num_devices:
        engines = tables.limits[pool].out_engines
    else:
        engines = tables.limits[pool - num_devices].in_engines
    queue = s.queues[resource]
    s.nodes[node].owner = transfer
    before, after, passed_edge = queue.tail, NONE, False
    while before != NONE and not served_before(s, s.nodes[before].owner, transfer):
        passed_edge = passed_edge or before == queue.edge
        after = before
        before = s.nodes[before].prev
    s.nodes[node].prev = before
    s.nodes[node].next = after
    if after == NONE:
        queue.tail = node
    else:
        s.nodes[after].prev = node
    if before == NONE:
        queue.head = node
    else:
        s.nodes[before].next = node
    if queue.served < engines:  # then all in the queue are served
        queue.served += 1
        queue.edge = queue.tail
        s.comms[transfer].num_heads += 1
    elif passed_edge:
        s.comms[transfer].num_heads += 1
        s.comms[s.nodes[queue.edge].owner].num_heads -= 1
        queue.edge = s.nodes[queue.edge].prev


@compiled
def _leave_engine(s: Scratch, node: int, resource: int) -> None:
    """Takes an ended transfer out of a pool's queue; the next in line is served."""
    queue = s.queues[resource]
    following = s.nodes[queue.edge].next
    if following != NONE:
        queue.edge = following
        comm = s.nodes[following].owner
        s.comms[comm].num_heads += 1
        if s.comms[comm].latency_over == 1:
            offer(s, comm)
    else:
        queue.served -= 1
        if queue.edge == node:
            queue.edge = s.nodes[node].prev
    _unlink(s, resource, node)


@compiled
def enter_engines(tables: Tables, s: Scratch, transfer: int) -> None:
    """Queues a requested transfer at both its engines; an unlimited pool serves it at once."""
    source, target = s.comms[transfer].source, s.comms[transfer].target
    first = transfer * tables.max_resources
    if tables.limits[source].out_engines > 0:
        _enter_engine(tables, s, transfer, first, source)
    else:
        s.comms[transfer].num_heads += 1
    if tables.limits[target].in_engines > 0:
        last = first + tables.max_resources - 1
        _enter_engine(tables, s, transfer, last, tables.columns.shape[0] + target)
    else:
        s.comms[transfer].num_heads += 1


@compiled
def leave_engines(tables: Tables, s: Scratch, transfer: int) -> None:
    """Takes an ended transfer out of its engines' queues."""
    source, target = s.comms[transfer].source, s.comms[transfer].target
    first = transfer * tables.max_resources
    out_pools = tables.bandwidth.shape[0]
    if tables.limits[source].out_engines > 0:
        _leave_engine(s, first, out_pools + source)
    if tables.limits[target].in_engines > 0:
        last = first + tables.max_resources - 1
        _leave_engine(s, last, out_pools + tables.columns.shape[0] + target)


@compiled
def open_works(tables: Tables, s: Scratch) -> None:
    """Sets all works, counters and engine queues to the beginning of the step."""
    for counter in (_TIMED, _ACTIVE, _CHANGED):
        s.counts[counter] = 0
    num_devices = tables.columns.shape[0]
    for work in range(num_devices + s.counts[_COMMS]):
        s.works[work].limit = 0.0
        s.works[work].rate = 0.0
        s.works[work].end = np.inf
        s.works[work].place = NONE
        s.works[work].active_place = NONE
        s.works[work].stamp = NONE
    for device in range(num_devices):
        s.devices[device].copies = 0
        s.devices[device].collectives = 0
    for resource in range(s.queues.shape[0]):
        s.queues[resource].served = 0
        s.queues[resource].edge = NONE
        s.queues[resource].stamp = NONE
        s.queues[resource].is_changed = 0
