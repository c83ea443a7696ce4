"""One placement from the first event to the last."""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.fluid import open_works, pop_end
from simcore.kernel.hosts import open_hosts
from simcore.kernel.loop import apply_events, end_comm, end_compute, request_collectives, start
from simcore.kernel.queues import open_queues
from simcore.kernel.rates import settle
from simcore.kernel.records import NONE, Count, Mode, Scratch, Tables

_HEAP, _DIRTY, _TIMED = int(Count.HEAP), int(Count.DIRTY), int(Count.TIMED)
_OFFERS, _FINISHED = int(Count.OFFERS), int(Count.FINISHED)


@compiled
def _open(tables: Tables, mode: Mode, s: Scratch) -> None:
    """Sets everything to the beginning of the step and lets the hosts issue."""
    for op in range(tables.cost.shape[0]):
        s.ops[op].issue = np.inf
    for device in range(tables.columns.shape[0]):
        state = s.devices[device]
        state.running = NONE
        state.woken = NONE
        state.host_waits = NONE
        state.num_executed = 0
        state.num_ready = 0
        state.is_dirty = 0
    for counter in (_HEAP, _DIRTY, _OFFERS, _FINISHED):
        s.counts[counter] = 0
    open_queues(tables, mode, s)
    open_hosts(tables, mode, s)
    request_collectives(tables, mode, s)


@compiled
def play(tables: Tables, mode: Mode, s: Scratch) -> float:
    """Runs the step and returns its time; transfers and op lists are already in the scratch."""
    _open(tables, mode, s)
    now = 0.0
    start(tables, mode, s, now)
    while s.counts[_HEAP] > 0:
        now = s.heap[0].time
        apply_events(tables, mode, s, now)
        start(tables, mode, s, now)
    return now


@compiled
def _apply_ends(tables: Tables, mode: Mode, s: Scratch, now: float) -> None:
    """Ends the works whose time has come."""
    num_devices = tables.columns.shape[0]
    while s.counts[_TIMED] > 0 and s.works[s.works[0].listed].end <= now:
        work = pop_end(s)
        if work < num_devices:
            s.works[work].limit = 0.0
            end_compute(tables, mode, s, s.devices[work].running, now)
        else:
            end_comm(tables, mode, s, work - num_devices, now)


@compiled
def play_fluid(tables: Tables, mode: Mode, s: Scratch) -> float:
    """Runs a step in which rates change and returns its time."""
    open_works(tables, s)
    _open(tables, mode, s)
    now = 0.0
    start(tables, mode, s, now)
    settle(tables, mode, s, now)
    while s.counts[_HEAP] > 0 or s.counts[_TIMED] > 0:
        now = s.works[s.works[0].listed].end if s.counts[_TIMED] > 0 else np.inf
        if s.counts[_HEAP] > 0:
            now = min(now, s.heap[0].time)
        _apply_ends(tables, mode, s, now)
        apply_events(tables, mode, s, now)
        start(tables, mode, s, now)
        settle(tables, mode, s, now)
    return now
