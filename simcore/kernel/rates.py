"""Rates at the end of a round: what slows what, and max-min fair shares of channels.

Shares are found by progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2): the rates of
all flows rise together; a flow stops at its own limit, or when a channel that it uses is full. Only
the flows that are joined, over channels, with one that came, went or got another limit are looked
at.
"""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.fluid import load_of, num_loads, set_rate, touch_channels
from simcore.kernel.queues import route_of
from simcore.kernel.records import NONE, Contention, Count, Mode, Scratch, Tables

_FAIR = int(Contention.FAIR)
_TRANSFERS, _ACTIVE, _CHANGED = int(Count.TRANSFERS), int(Count.ACTIVE), int(Count.CHANGED)


@compiled
def _computes(s: Scratch, device: int) -> bool:
    return bool(s.works[device].limit > 0.0)


@compiled
def _settle_computes(tables: Tables, s: Scratch, now: float) -> None:
    """Sets the rate of every running op: the largest factor applies."""
    for device in range(tables.columns.shape[0]):
        if not _computes(s, device):
            continue
        slow = tables.slow[tables.ops[s.devices[device].running].op_class, device]
        factor = 1.0
        if s.devices[device].copies > 0:
            factor = max(factor, slow.beside_copy)
        if s.devices[device].collectives > 0:
            factor = max(factor, slow.beside_collective)
        set_rate(s, device, 1.0 / factor, now)


@compiled
def _limit(tables: Tables, s: Scratch, comm: int) -> float:
    """Returns the highest rate that a comm may have beside the computes of its devices."""
    collective = comm - s.counts[_TRANSFERS]
    factor = 1.0
    if collective < 0:
        for device in (s.comms[comm].source, s.comms[comm].target):
            if _computes(s, device):
                factor = max(factor, tables.limits[device].copy_beside_compute)
        return float(tables.pairs[route_of(tables, s, comm)].bandwidth / factor)
    state = tables.collectives[collective]
    last = tables.collectives[collective + 1].first_member
    for index in range(state.first_member, last):
        device = tables.members[index]
        if _computes(s, device):
            factor = max(factor, tables.limits[device].collective_beside_compute)
    return float(state.volume / state.duration / factor)


@compiled
def _settle_limits(tables: Tables, mode: Mode, s: Scratch, now: float) -> None:
    """Brings the limits of all comms under way up to date; without sharing they are the rates."""
    num_devices = tables.columns.shape[0]
    for index in range(s.counts[_ACTIVE]):
        comm = s.works[index].active
        work = num_devices + comm
        limit = _limit(tables, s, comm)
        if mode.contention != _FAIR or num_loads(tables, s, comm) == 0:
            set_rate(s, work, limit, now)
        elif limit != s.works[work].limit:
            touch_channels(tables, s, comm)
        s.works[work].limit = limit


@compiled
def _find_component(tables: Tables, s: Scratch, seed: int) -> tuple[int, int]:
    """Lists the channels and flows joined with a channel; returns how many there are."""
    num_devices = tables.columns.shape[0]
    s.queues[seed].stamp = seed
    s.queues[0].listed = seed
    num_channels, num_flows, at = 1, 0, 0
    while at < num_channels:
        channel = s.queues[at].listed
        at += 1
        weight, num_open = 0.0, 0
        node = s.queues[channel].head
        while node != NONE:
            comm = s.nodes[node].owner
            node = s.nodes[node].next
            num_open += 1
            if s.works[num_devices + comm].stamp == seed:
                continue
            s.works[num_devices + comm].stamp = seed
            s.flows[num_flows] = comm
            num_flows += 1
            for index in range(num_loads(tables, s, comm)):
                other, _, _ = load_of(tables, s, comm, index)
                if s.queues[other].stamp != seed:
                    s.queues[other].stamp = seed
                    s.queues[num_channels].listed = other
                    num_channels += 1
        s.queues[channel].weight = weight
        s.queues[channel].num_open = num_open
        s.queues[channel].spare = tables.bandwidth[channel]
    for index in range(num_flows):
        for position in range(num_loads(tables, s, s.flows[index])):
            channel, _, usage = load_of(tables, s, s.flows[index], position)
            s.queues[channel].weight += usage
    return num_channels, num_flows


@compiled
def _freeze(tables: Tables, s: Scratch, comm: int, rate: float, now: float) -> None:
    """Settles the rate of a flow and takes it off its channels."""
    for index in range(num_loads(tables, s, comm)):
        channel, _, usage = load_of(tables, s, comm, index)
        s.queues[channel].spare -= usage * rate
        s.queues[channel].weight -= usage
        s.queues[channel].num_open -= 1
    set_rate(s, tables.columns.shape[0] + comm, rate, now)


@compiled
def _first_full(s: Scratch, num_channels: int, floor: float) -> tuple[int, float]:
    """Returns the channel that is full first, ties by id, and the level; none is below `floor`."""
    first, lowest = NONE, np.inf
    for index in range(num_channels):
        channel = s.queues[index].listed
        if s.queues[channel].num_open > 0:
            full = max(floor, s.queues[channel].spare / s.queues[channel].weight)
            if full < lowest or (full == lowest and channel < first):
                first, lowest = channel, full
    return first, lowest


@compiled
def _uses(tables: Tables, s: Scratch, comm: int, channel: int) -> bool:
    for index in range(num_loads(tables, s, comm)):
        other, _, _ = load_of(tables, s, comm, index)
        if other == channel:
            return True
    return False


@compiled
def _fill(tables: Tables, s: Scratch, num_channels: int, num_flows: int, now: float) -> None:
    """Shares the channels of a component among its flows."""
    num_devices = tables.columns.shape[0]
    floor = 0.0
    while num_flows > 0:
        first, level = _first_full(s, num_channels, floor)
        kept, limited = 0, False
        for index in range(num_flows):
            comm = s.flows[index]
            limit = s.works[num_devices + comm].limit
            if limit <= level:
                limited = True
                _freeze(tables, s, comm, limit, now)
            else:
                s.flows[kept] = comm
                kept += 1
        num_flows = kept
        if limited:
            continue  # the channel may be full later now
        kept, floor = 0, level
        for index in range(num_flows):
            comm = s.flows[index]
            if _uses(tables, s, comm, first):
                _freeze(tables, s, comm, level, now)
            else:
                s.flows[kept] = comm
                kept += 1
        num_flows = kept


@compiled
def settle(tables: Tables, mode: Mode, s: Scratch, now: float) -> None:
    """Sets all rates that have changed in this round."""
    if mode.slow == 1:
        _settle_computes(tables, s, now)
        _settle_limits(tables, mode, s, now)
    if mode.contention != _FAIR:
        return
    for index in range(s.counts[_CHANGED]):
        seed = s.queues[index].changed
        if s.queues[seed].is_changed == 0:
            continue
        num_channels, num_flows = _find_component(tables, s, seed)
        for position in range(num_channels):
            channel = s.queues[position].listed
            s.queues[channel].is_changed = 0
            s.queues[channel].stamp = NONE
        for position in range(num_flows):
            s.works[tables.columns.shape[0] + s.flows[position]].stamp = NONE
        _fill(tables, s, num_channels, num_flows, now)
    s.counts[_CHANGED] = 0
