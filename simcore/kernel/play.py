"""One placement from the first event to the last."""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.fluid import open_works, pop_end
from simcore.kernel.heap import next_time, push_event
from simcore.kernel.hosts import open_hosts
from simcore.kernel.loop import apply_events, start, want_collectives
from simcore.kernel.queues import open_queues
from simcore.kernel.rates import settle
from simcore.kernel.records import NONE, Count, Kind, Mode, Scratch, Tables

_HEAP, _DIRTY, _TIMED = int(Count.HEAP), int(Count.DIRTY), int(Count.TIMED)
_OFFERS, _FINISHED = int(Count.OFFERS), int(Count.FINISHED)
_WANTED, _FRONT, _BACK = int(Count.WANTED), int(Count.FRONT), int(Count.BACK)
_COMPUTE_END, _COMM_END = int(Kind.COMPUTE_END), int(Kind.COMM_END)


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
    for counter in (_HEAP, _FRONT, _BACK, _DIRTY, _OFFERS, _FINISHED, _WANTED):
        s.counts[counter] = 0
    open_queues(tables, mode, s)
    open_hosts(tables, mode, s)
    want_collectives(tables, s)


@compiled
def play(tables: Tables, mode: Mode, s: Scratch) -> float:
    """Runs the step and returns its time; transfers and op lists are already in the scratch."""
    _open(tables, mode, s)
    now = 0.0
    while True:
        start(tables, mode, s, now)
        following = next_time(s)
        if following == np.inf:
            return now
        now = following
        apply_events(tables, mode, s, now)


@compiled
def _push_ends(tables: Tables, s: Scratch, now: float) -> None:
    """Makes the works whose time has come events of this time."""
    num_devices = tables.columns.shape[0]
    while s.counts[_TIMED] > 0 and s.works[s.works[0].listed].end <= now:
        work = pop_end(s)
        if work < num_devices:
            s.works[work].limit = 0.0
            push_event(s, now, s.devices[work].running * 4 + _COMPUTE_END)
        else:
            push_event(s, now, (work - num_devices) * 4 + _COMM_END)


@compiled
def play_fluid(tables: Tables, mode: Mode, s: Scratch) -> float:
    """Runs a step in which rates change and returns its time."""
    open_works(tables, s)
    _open(tables, mode, s)
    now = 0.0
    while True:
        start(tables, mode, s, now)
        settle(tables, mode, s, now)
        following = next_time(s)
        if s.counts[_TIMED] > 0:
            following = min(following, s.works[s.works[0].listed].end)
        if following == np.inf:
            return now
        now = following
        _push_ends(tables, s, now)
        apply_events(tables, mode, s, now)
