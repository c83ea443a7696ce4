"""The sweep in lanes: one pass over the ops, forwards. See `simcore.kernel.lanes`."""

import numpy as np

from simcore.kernel.compiled import compiled, lowest_bit, no_alias
from simcore.kernel.lane_memory import open_memory, walk_op
from simcore.kernel.lane_tables import Index, LaneTables
from simcore.kernel.lanes import ONE, LaneScratch, at, bit_of
from simcore.kernel.records import Contention, Mode

_FREE = int(Contention.NONE)


@compiled
def _run_op(tables: LaneTables, mode: Mode, s: LaneScratch, op: Index) -> None:
    """Runs one op in every lane; its end is left in the scratch."""
    no_alias()
    for lane in range(len(s.lanes)):
        device = np.uint64(s.place[at(s, op, lane)])
        cost = tables.cost[op, tables.columns[device]]
        cell = at(s, device, lane)
        host = at(s, device * np.uint64(mode.host), lane)  # Host.ONE is 0, Host.PER_RANK 1
        issue = s.host[host] + cost.launch
        free, arrival, latest = s.free[cell], s.arrival[at(s, op, lane)], s.latest[lane]
        start = free if free > arrival else arrival
        end = (start if start > issue else issue) + cost.duration
        s.free[cell] = end
        issued = issue + cost.trail
        waited = end if end > issued else issued
        s.host[host] = waited if cost.sync == 1 else issued
        s.end[lane] = end
        s.latest[lane] = end if end > latest else latest


@compiled
def _await(tables: LaneTables, s: LaneScratch, op: Index) -> None:
    """Lets an op wait for what it reads from elsewhere, sent by transfers that hold nothing."""
    no_alias()
    num_devices = np.uint64(tables.columns.shape[0])
    for lane in range(len(s.lanes)):
        s.arrival[at(s, op, lane)] = 0.0
    for read in range(tables.steps[op].first_read, tables.steps[op + ONE].first_read):
        tensor = tables.reads[read]
        sent = tables.tensors[tensor]
        for lane in range(len(s.lanes)):
            source = np.uint64(s.place[at(s, sent.producer, lane)])
            target = np.uint64(s.place[at(s, op, lane)])
            route = tables.routes[source * num_devices + target]
            there = s.made[at(s, tensor, lane)] + route.latency + sent.num_bytes / route.bandwidth
            before = s.arrival[at(s, op, lane)]
            is_later = (source != target) & (there > before)
            s.arrival[at(s, op, lane)] = there if is_later else before


@compiled
def _keep(s: LaneScratch, tensor: Index) -> None:
    """Notes when a tensor was made."""
    no_alias()
    for lane in range(len(s.lanes)):
        s.made[at(s, tensor, lane)] = s.end[lane]


@compiled
def _want(s: LaneScratch, op: Index, tensor: Index) -> np.uint64:
    """Leaves the devices that lack a tensor in `wanted`; returns those of all lanes together."""
    no_alias()
    every = np.uint64(0)
    for lane in range(len(s.lanes)):
        lacking = s.wanted[at(s, tensor, lane)] & ~bit_of(s, op, lane)
        s.wanted[at(s, tensor, lane)] = lacking
        every |= lacking
    return every


@compiled
def _send_to(tables: LaneTables, s: LaneScratch, op: Index, tensor: Index, target: Index) -> None:
    """Sends a tensor to one device through the sender's port, in the lanes where it lacks it."""
    no_alias()
    num_devices = np.uint64(tables.columns.shape[0])
    num_bytes = tables.tensors[tensor].num_bytes
    for lane in range(len(s.lanes)):
        route = tables.routes[np.uint64(s.place[at(s, op, lane)]) * num_devices + target]
        ready, before = s.end[lane] + route.latency, s.sender[lane]
        end = (ready if ready > before else before) + num_bytes / route.bandwidth
        s.landed[at(s, target, lane)] = end
        lacks = (s.wanted[at(s, tensor, lane)] >> target) & ONE == ONE
        s.sender[lane] = end if lacks else before


@compiled
def _send_through_ports(tables: LaneTables, s: LaneScratch, op: Index, tensor: Index) -> None:
    """Sends a tensor to where it lacks, and lets its readers wait for it."""
    no_alias()
    every = _want(s, op, tensor)
    if every == 0:
        return
    for lane in range(len(s.lanes)):
        s.sender[lane] = s.port[at(s, s.place[at(s, op, lane)], lane)]
    for target in range(np.uint64(tables.columns.shape[0])):
        if (every >> target) & ONE == ONE:
            _send_to(tables, s, op, tensor, target)
    for lane in range(len(s.lanes)):
        source = at(s, s.place[at(s, op, lane)], lane)
        s.port[source] = s.sender[lane]
        s.landed[source] = 0.0
    first, last = tables.tensors[tensor].first_reader, tables.tensors[tensor + ONE].first_reader
    for use in range(first, last):
        reader = tables.readers[use]
        for lane in range(len(s.lanes)):
            landed = s.landed[at(s, s.place[at(s, reader, lane)], lane)]
            before = s.arrival[at(s, reader, lane)]
            s.arrival[at(s, reader, lane)] = landed if landed > before else before


@compiled
def _send_alone(tables: LaneTables, s: LaneScratch, op: Index, tensor: Index) -> None:
    """Does the same for one lane, where only the devices that lack it are looked at.

    Arrivals are kept by tensor and device: an op looking up its inputs costs less than a tensor
    telling its readers, of which there may be any number.
    """
    no_alias()
    source, num_devices = np.uint64(s.place[op]), np.uint64(tables.columns.shape[0])
    num_bytes, row = tables.tensors[tensor].num_bytes, tensor * num_devices
    left, now, end = s.wanted[tensor] & ~(ONE << source), s.end[0], s.port[source]
    while left != 0:
        target = np.uint64(lowest_bit(left))
        left &= left - ONE
        route = tables.routes[source * num_devices + target]
        ready = now + route.latency
        end = (ready if ready > end else end) + num_bytes / route.bandwidth
        s.landed[row + target] = end
    s.landed[row + source] = 0.0
    s.port[source] = end


@compiled
def _await_alone(tables: LaneTables, s: LaneScratch, op: Index) -> None:
    """Lets the op of one lane wait for what it reads from elsewhere."""
    no_alias()
    device, num_devices = np.uint64(s.place[op]), np.uint64(tables.columns.shape[0])
    arrival = 0.0
    for read in range(tables.steps[op].first_read, tables.steps[op + ONE].first_read):
        landed = s.landed[tables.reads[read] * num_devices + device]
        arrival = landed if landed > arrival else arrival
    s.arrival[op] = arrival


@compiled
def sweep_lanes(tables: LaneTables, mode: Mode, s: LaneScratch) -> None:
    """Leaves the step time of each lane in `latest`, and peak bytes per device in `peak`.

    Every transfer has a reader that ends after it, so ops alone decide the step time. Where there
    is no route the latency is infinite, and so is the step time.
    """
    s.free[:] = 0.0
    s.host[:] = 0.0
    s.port[:] = 0.0
    s.latest[:] = 0.0
    s.arrival[:] = 0.0
    is_free, is_alone = mode.contention == _FREE, len(s.lanes) == 1
    open_memory(tables, s)
    for op in range(np.uint64(tables.steps.shape[0] - 1)):
        if is_free:
            _await(tables, s, op)
        elif is_alone:
            _await_alone(tables, s, op)
        _run_op(tables, mode, s, op)
        walk_op(tables, s, op)
        for tensor in range(tables.steps[op].first_output, tables.steps[op + ONE].first_output):
            if is_free:
                _keep(s, tensor)
            elif is_alone:
                _send_alone(tables, s, op, tensor)
            else:
                _send_through_ports(tables, s, op, tensor)
