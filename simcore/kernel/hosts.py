"""Hosts issue ops, and pay for launches and messages, in program order."""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.heap import line_up, push_ready
from simcore.kernel.records import NONE, P2P, Count, Host, Kind, Mode, Order, Scratch, Tables

_READY, _ONE = int(Order.READY), int(Host.ONE)
_INLINE = int(P2P.INLINE)
_ISSUE, _DIRTY = int(Kind.ISSUE), int(Count.DIRTY)


@compiled
def look_at(s: Scratch, device: int) -> None:
    """Notes that a device may be able to start something in this round."""
    if s.devices[device].is_dirty == 0:
        s.devices[device].is_dirty = 1
        s.devices[s.counts[_DIRTY]].listed = device
        s.counts[_DIRTY] += 1


@compiled
def arrive(tables: Tables, s: Scratch, op: int, now: float) -> None:
    """Lets an op arrive, under ready order, whose last input is there, once it is issued."""
    if s.ops[op].issue <= now:
        s.ops[op].arrival = now
        push_ready(tables, s, s.ops[op].place, op)
        look_at(s, s.ops[op].place)
    elif s.ops[op].issue != np.inf:
        line_up(s, s.ops[op].issue, op * 4 + _ISSUE)


@compiled
def _issue_inbound(tables: Tables, mode: Mode, s: Scratch, op: int, time: float) -> float:
    """Pays for the messages that come in just before an op; returns the time after."""
    device = s.ops[op].place
    if mode.p2p != _INLINE or mode.host == _ONE:
        transfer = s.posts[op].first_inbound
        while transfer != NONE:
            time = time + tables.limits[device].message_overhead
            if mode.p2p == _INLINE:
                s.messages[transfer].issue = time
                look_at(s, device)
            transfer = s.messages[transfer].next_inbound
    s.posts[op].time = time
    return time


@compiled
def _issue_inline(tables: Tables, s: Scratch, host: int, transfer: int, time: float) -> float:
    """Lets one of the two hosts issue a transfer at its place; returns the time after."""
    time = time + tables.limits[host].message_overhead
    s.messages[transfer].awaited -= 1
    if s.messages[transfer].awaited == 1:
        s.messages[transfer].first_issue = time
    else:
        s.messages[transfer].issue = max(s.messages[transfer].first_issue, time)
        look_at(s, s.comms[transfer].source)
        look_at(s, s.comms[transfer].target)
    return time


@compiled
def _following(tables: Tables, mode: Mode, s: Scratch, op: int) -> int:
    """Returns what a host issues after an op."""
    if mode.host != _ONE:
        return int(s.ops[op].next_op)
    op += 1
    while op < tables.cost.shape[0] and s.ops[op].place == NONE:
        op += 1
    return op if op < tables.cost.shape[0] else NONE


@compiled
def _issue(tables: Tables, mode: Mode, s: Scratch, op: int, now: float) -> None:
    """An op has got its issue time: it may start, or arrive, if all else is there."""
    device = s.ops[op].place
    if mode.order != _READY:
        if s.devices[device].head == op:
            look_at(s, device)
    elif s.ops[op].pending == 0:
        arrive(tables, s, op, now)


@compiled
def advance_host(tables: Tables, mode: Mode, s: Scratch, host: int, now: float) -> None:
    """Issues items from now on, until the host must wait for an op (a sync op) or is through."""
    num_ops = tables.cost.shape[0]
    time = max(now, s.devices[host].host_time)
    item = s.devices[host].host_op
    while item != NONE:
        if item >= num_ops:
            transfer = item - num_ops
            time = _issue_inline(tables, s, host, transfer, time)
            at_source = s.comms[transfer].source == host
            message = s.messages[transfer]
            item = message.next_at_source if at_source else message.next_at_target
            continue
        op = item
        device = s.ops[op].place
        if mode.messages == 1:
            time = _issue_inbound(tables, mode, s, op, time)
        cost = tables.cost[op, tables.columns[device]]
        time = time + cost.launch
        s.ops[op].issue = time
        _issue(tables, mode, s, op, now)
        time = time + cost.trail
        if mode.messages == 1 and mode.host != _ONE and mode.p2p != _INLINE:
            for _ in range(s.ops[op].first_transfer, s.ops[op + 1].first_transfer):
                time = time + tables.limits[device].message_overhead
        item = _following(tables, mode, s, op)
        if cost.sync == 1:
            s.devices[host].host_waits = op
            s.devices[host].host_op = item
            s.devices[host].host_time = time
            return
    s.devices[host].host_op = NONE


@compiled
def open_hosts(tables: Tables, mode: Mode, s: Scratch) -> None:
    """Lets every host issue from the beginning of its list."""
    num_devices = tables.columns.shape[0]
    for host in range(num_devices):
        s.devices[host].host_time = 0.0
        s.devices[host].host_op = s.devices[host].head if mode.host != _ONE else NONE
    if mode.host == _ONE and tables.cost.shape[0] > 0:
        s.devices[0].host_op = 0 if s.ops[0].place != NONE else _following(tables, mode, s, 0)
    for host in range(num_devices):
        advance_host(tables, mode, s, host, 0.0)
