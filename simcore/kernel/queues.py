"""Queues of transfers at channels and out-engines; the first in all its queues may start.

A transfer has one node per resource it holds: node = transfer * max_resources + position. Resources
are numbered channels first, then one out-engine (the port) per device. A started transfer stays
first until it ends, so a resource is never held twice.
"""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.records import NONE, Contention, Count, Mode, Scratch, Tables

_PORT, _ORDERED = int(Contention.PORT), int(Contention.ORDERED)
_OFFERS, _TRANSFERS = int(Count.OFFERS), int(Count.TRANSFERS)


@compiled
def route_of(tables: Tables, s: Scratch, transfer: int) -> int:
    """Returns the pair (source, target) of a transfer."""
    state = s.transfers[transfer]
    return int(state.source * tables.cost.shape[1] + state.target)


@compiled
def num_resources(tables: Tables, mode: Mode, s: Scratch, transfer: int) -> int:
    """Returns how many resources a transfer holds: its route and one engine, or one port."""
    if mode.contention == _PORT:
        return 1
    pair = route_of(tables, s, transfer)
    return int(tables.pairs[pair + 1].first_hop - tables.pairs[pair].first_hop + 1)


@compiled
def _resource(tables: Tables, s: Scratch, transfer: int, position: int) -> int:
    """Returns the resource of a node: position 0 is the source's engine, then the route."""
    source = s.transfers[transfer].source
    if position == 0:
        return tables.num_channels + source
    pair = route_of(tables, s, transfer)
    return tables.hops[tables.pairs[pair].first_hop + position - 1]


@compiled
def offer(s: Scratch, transfer: int) -> None:
    """Notes that a transfer may be able to start in this round."""
    s.offers[s.counts[_OFFERS]] = transfer
    s.counts[_OFFERS] += 1


@compiled
def _before(s: Scratch, a: int, b: int) -> bool:
    """Whether transfer a is served before b: one that holds is, then by (request, id)."""
    if s.transfers[a].start != np.inf:
        return True
    if s.transfers[a].request != s.transfers[b].request:
        return s.transfers[a].request < s.transfers[b].request
    return a < b


@compiled
def _insert(tables: Tables, s: Scratch, transfer: int, position: int) -> None:
    resource = _resource(tables, s, transfer, position)
    node = transfer * tables.max_resources + position
    before = s.queues[resource].tail
    after = NONE
    while before != NONE and not _before(s, before // tables.max_resources, transfer):
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
    s.transfers[transfer].num_heads += 1
    if after != NONE:
        s.transfers[after // tables.max_resources].num_heads -= 1


@compiled
def enter(tables: Tables, mode: Mode, s: Scratch, transfer: int) -> None:
    """Puts a transfer into the queues of all resources it will hold."""
    for position in range(num_resources(tables, mode, s, transfer)):
        _insert(tables, s, transfer, position)


@compiled
def leave(tables: Tables, mode: Mode, s: Scratch, transfer: int) -> None:
    """Takes an ended transfer, which is first everywhere, out of its queues."""
    for position in range(num_resources(tables, mode, s, transfer)):
        resource = _resource(tables, s, transfer, position)
        node = s.nodes[transfer * tables.max_resources + position].next
        s.queues[resource].head = node
        if node == NONE:
            s.queues[resource].tail = NONE
            continue
        s.nodes[node].prev = NONE
        following = node // tables.max_resources
        s.transfers[following].num_heads += 1
        if s.transfers[following].latency_over == 1:
            offer(s, following)


@compiled
def open_queues(tables: Tables, mode: Mode, s: Scratch) -> None:
    """Empties the queues; those served in plan order (which is id order) get all transfers now."""
    for resource in range(s.queues.shape[0]):
        s.queues[resource].head = NONE
        s.queues[resource].tail = NONE
    num_transfers = s.counts[_TRANSFERS]
    for transfer in range(num_transfers):
        s.transfers[transfer].num_heads = 0
        s.transfers[transfer].latency_over = 0
        s.transfers[transfer].start = np.inf
        s.transfers[transfer].request = 0.0
        if mode.contention in (_PORT, _ORDERED):
            enter(tables, mode, s, transfer)
