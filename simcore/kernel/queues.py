"""Queues of communication at channels and out-engines; the first in all its queues may start.

A comm has one node per resource it holds, and nodes know their owner. Resources are numbered
channels first, then the out-engines (the ports) and then the in-engines of every device. A started
comm stays first until it ends, so a resource is never held twice.
"""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.records import NONE, Contention, Count, Mode, Scratch, Tables

_PORT, _ORDERED = int(Contention.PORT), int(Contention.ORDERED)
_FIFO = int(Contention.FIFO)
_OFFERS, _TRANSFERS, _COMMS = int(Count.OFFERS), int(Count.TRANSFERS), int(Count.COMMS)


@compiled
def route_of(tables: Tables, s: Scratch, transfer: int) -> int:
    """Returns the pair (source, target) of a transfer."""
    state = s.comms[transfer]
    return int(state.source * tables.columns.shape[0] + state.target)


@compiled
def num_resources(tables: Tables, mode: Mode, s: Scratch, comm: int) -> int:
    """Returns how many resources a comm holds: its channels, and a transfer one engine."""
    collective = comm - s.counts[_TRANSFERS]
    if mode.contention == _PORT:
        return 1 if collective < 0 else 0
    if collective >= 0:
        first = tables.collectives[collective].first_load
        return int(tables.collectives[collective + 1].first_load - first)
    pair = route_of(tables, s, comm)
    return int(tables.pairs[pair + 1].first_hop - tables.pairs[pair].first_hop + 1)


@compiled
def node_of(tables: Tables, s: Scratch, comm: int, position: int) -> int:
    """Returns the node of a comm for its resource at a position."""
    collective = comm - s.counts[_TRANSFERS]
    if collective >= 0:
        return int(s.first_node[collective] + position)
    return int(comm * tables.max_resources + position)


@compiled
def _resource(tables: Tables, s: Scratch, comm: int, position: int) -> int:
    """Returns the resource at a position: of a transfer 0 is the source's engine."""
    collective = comm - s.counts[_TRANSFERS]
    if collective >= 0:
        return int(tables.loads[tables.collectives[collective].first_load + position].channel)
    if position == 0:
        return int(tables.bandwidth.shape[0] + s.comms[comm].source)
    pair = route_of(tables, s, comm)
    return int(tables.hops[tables.pairs[pair].first_hop + position - 1])


@compiled
def offer(s: Scratch, comm: int) -> None:
    """Notes that a comm may be able to start in this round."""
    s.offers[s.counts[_OFFERS]] = comm
    s.counts[_OFFERS] += 1


@compiled
def served_before(s: Scratch, a: int, b: int) -> bool:
    """Whether comm a is served before b: one that holds is, then by (request, id)."""
    if s.comms[a].start != np.inf:
        return True
    if s.comms[a].request != s.comms[b].request:
        return s.comms[a].request < s.comms[b].request
    return a < b


@compiled
def _insert(tables: Tables, mode: Mode, s: Scratch, comm: int, position: int) -> None:
    resource = _resource(tables, s, comm, position)
    node = node_of(tables, s, comm, position)
    s.nodes[node].owner = comm
    before = s.queues[resource].tail
    after = NONE
    if mode.contention == _FIFO:  # otherwise they come in the order of the plan
        while before != NONE and not served_before(s, s.nodes[before].owner, comm):
            after = before
            before = s.nodes[before].prev
    s.nodes[node].prev = before
    s.nodes[node].next = after
    if after == NONE:
        s.queues[resource].tail = node
    else:
        s.nodes[after].prev = node
    if before != NONE:
        s.nodes[before].next = node
        return
    s.queues[resource].head = node
    s.comms[comm].num_heads += 1
    if after != NONE:
        s.comms[s.nodes[after].owner].num_heads -= 1


@compiled
def enter(tables: Tables, mode: Mode, s: Scratch, comm: int) -> None:
    """Puts a comm into the queues of all resources it will hold."""
    for position in range(num_resources(tables, mode, s, comm)):
        _insert(tables, mode, s, comm, position)


@compiled
def leave(tables: Tables, mode: Mode, s: Scratch, comm: int) -> None:
    """Takes an ended comm, which is first everywhere, out of its queues."""
    for position in range(num_resources(tables, mode, s, comm)):
        resource = _resource(tables, s, comm, position)
        node = s.nodes[node_of(tables, s, comm, position)].next
        s.queues[resource].head = node
        if node == NONE:
            s.queues[resource].tail = NONE
            continue
        s.nodes[node].prev = NONE
        following = s.nodes[node].owner
        s.comms[following].num_heads += 1
        if s.comms[following].latency_over == 1:
            offer(s, following)


@compiled
def open_queues(tables: Tables, mode: Mode, s: Scratch) -> None:
    """Empties the queues; those served in plan order get everything now."""
    for resource in range(s.queues.shape[0]):
        s.queues[resource].head = NONE
        s.queues[resource].tail = NONE
    num_transfers, at = s.counts[_TRANSFERS], 0
    for comm in range(s.counts[_COMMS]):
        s.comms[comm].num_heads = 0
        s.comms[comm].latency_over = 0
        s.comms[comm].start = np.inf
        s.comms[comm].request = 0.0
    if mode.contention != _PORT and mode.contention != _ORDERED:
        return
    for index in range(tables.plan_order.shape[0]):
        collective = tables.plan_order[index]
        behind = s.ops[tables.last_producer[collective] + 1].first_transfer
        while at < behind:
            enter(tables, mode, s, at)
            at += 1
        enter(tables, mode, s, num_transfers + collective)
    while at < num_transfers:
        enter(tables, mode, s, at)
        at += 1
