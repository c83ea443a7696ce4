"""Allocated bytes per device and lane, in program order."""

import numpy as np

from simcore.kernel.compiled import compiled, no_alias
from simcore.kernel.lane_tables import Index, LaneTables
from simcore.kernel.lanes import ONE, LaneScratch, at, bit_of, spread


@compiled
def _hold(tables: LaneTables, s: LaneScratch, held: int) -> None:
    """Counts a parameter that several units need once on each of their devices."""
    no_alias()
    for lane in range(len(s.lanes)):
        seen = np.uint64(0)
        for use in range(tables.first_holder[held], tables.first_holder[held + 1]):
            holder = tables.holders[use]
            bit = bit_of(s, holder, lane)
            new_bytes = tables.held_bytes[held] if seen & bit == 0 else 0
            s.current[at(s, s.place[at(s, holder, lane)], lane)] += new_bytes
            seen |= bit


@compiled
def _note_uneven(tables: LaneTables, s: LaneScratch, storage: int) -> None:
    """Finds where a storage is allocated and freed on each device: its most bytes there count."""
    begin, end = tables.first_uneven[storage], tables.first_uneven[storage + 1]
    for lane in range(len(s.lanes)):
        for index in range(begin, end):
            span = tables.uneven[index]
            cell = at(s, s.place[at(s, span.first, lane)], lane)
            if s.stamp[cell] != storage:
                s.stamp[cell] = storage
                s.first[cell] = np.uint64(span.first)
                s.last[cell] = np.uint64(span.last)
                s.largest[cell] = span.num_bytes
                continue
            s.last[cell] = max(s.last[cell], np.uint64(span.last))
            s.largest[cell] = max(s.largest[cell], span.num_bytes)
        for index in range(begin, end):
            first = np.uint64(tables.uneven[index].first)
            cell = at(s, s.place[at(s, first, lane)], lane)
            if s.first[cell] == first:
                s.allocate[at(s, first, lane)] += s.largest[cell]
                s.release[at(s, s.last[cell], lane)] += s.largest[cell]


@compiled
def open_memory(tables: LaneTables, s: LaneScratch) -> None:
    """Counts what each device holds for the whole step, and lifetimes that need a closer look."""
    for held in range(tables.held_bytes.shape[0]):
        _hold(tables, s, held)
    for cell in range(s.peak.shape[0]):
        s.peak[cell] = s.current[cell]
    num_uneven = tables.first_uneven.shape[0] - 1
    if num_uneven > 0:
        s.allocate[:] = 0
        s.stamp[:] = -1
    for storage in range(num_uneven):
        _note_uneven(tables, s, storage)


@compiled
def walk_op(tables: LaneTables, s: LaneScratch, op: Index) -> None:
    """Allocates what an op needs and frees what is not used after it; peaks are left in `peak`."""
    no_alias()
    step = tables.steps[op]
    has_uneven = tables.uneven.shape[0] > 0
    for lane in range(len(s.lanes)):
        s.change[lane] = step.allocate + (s.allocate[at(s, op, lane)] if has_uneven else 0)
    for index in range(step.first_start, tables.steps[op + ONE].first_start):
        use = tables.starts[index]
        for lane in range(len(s.lanes)):
            device, holds = s.place[at(s, op, lane)], s.holds[at(s, use.storage, lane)]
            s.change[lane] += use.num_bytes & spread(holds, device)
            s.holds[at(s, use.storage, lane)] = holds & ~bit_of(s, op, lane)  # it is there now
    for lane in range(len(s.lanes)):
        cell = at(s, s.place[at(s, op, lane)], lane)
        current, peak = s.current[cell] + s.change[lane], s.peak[cell]
        top = current + step.workspace
        s.peak[cell] = top if top > peak else peak
        s.current[cell] = current - s.release[at(s, op, lane)]
