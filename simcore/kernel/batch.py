"""A range of a batch of placements: lowered, played and measured without leaving compiled code."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.kernel.compiled import compiled, compiled_apart, compiled_entry
from simcore.kernel.lane_sweep import sweep_lanes
from simcore.kernel.lane_tables import LaneTables
from simcore.kernel.lanes import ONE, LaneScratch, at, load_lanes
from simcore.kernel.lowering import list_ops, make_transfers, note_messages
from simcore.kernel.memory import walk_by_program, walk_by_start
from simcore.kernel.play import play, play_fluid
from simcore.kernel.records import NONE, Count, Mode, Order, Outcome, Scratch, Status, Tables
from simcore.kernel.sweep import sweep

_OK, _DEADLOCK, _UNREACHABLE = int(Status.OK), int(Status.DEADLOCK), int(Status.UNREACHABLE)
_FINISHED = int(Count.FINISHED)
_READY = int(Order.READY)


class Plans(NamedTuple):
    """A batch and its results."""

    placements: NDArray[np.int32]  # [plan, op] device
    outcome: Outcome


@compiled
def _write(tables: Tables, plans: Plans, s: Scratch, plan: int, step_time: float) -> None:
    """Writes the outcome of a plan that ran."""
    out = plans.outcome
    out.status[plan] = _OK
    out.culprit[plan] = NONE
    out.step_time[plan] = step_time
    for device in range(tables.columns.shape[0]):
        out.allocated[plan, device] = s.devices[device].peak
        out.used[plan, device] = s.devices[device + 1].slot > s.devices[device].slot


@compiled
def _refuse(tables: Tables, plans: Plans, plan: int, status: int, culprit: int) -> None:
    """Writes the outcome of a plan that breaks a rule."""
    out = plans.outcome
    out.status[plan] = status
    out.culprit[plan] = culprit
    out.step_time[plan] = np.inf
    for device in range(tables.columns.shape[0]):
        out.allocated[plan, device] = 0
        out.used[plan, device] = False


@compiled_apart
def sweep_one(tables: Tables, mode: Mode, plans: Plans, s: Scratch, row: int, plan: int) -> None:
    """Sweeps the placement of a row and writes the outcome of a plan."""
    status, culprit = list_ops(tables, plans.placements[row], s)
    step_time = np.inf
    if status == _OK:
        status, culprit, step_time = sweep(tables, mode, s)
    if status != _OK:
        _refuse(tables, plans, plan, status, culprit)
        return
    walk_by_program(tables, s)
    _write(tables, plans, s, plan, step_time)


@compiled
def _first_unreachable(tables: Tables, s: Scratch) -> int:
    """Returns the first op whose output is read where no route leads; NONE if there is none."""
    num_devices = tables.columns.shape[0]
    for op in range(tables.cost.shape[0]):
        source = s.ops[op].place
        first = tables.tensors[tables.ops[op].first_output].first_reader
        last = tables.tensors[tables.ops[op + 1].first_output].first_reader
        for use in range(first, last):
            target = s.ops[tables.readers[use]].place
            if target != source and tables.pairs[source * num_devices + target].reachable == 0:
                return op
    return NONE


@compiled_apart
def _explain(tables: Tables, plans: Plans, s: Scratch, plan: int) -> None:
    """Writes which rule a plan breaks, without collectives."""
    status, culprit = list_ops(tables, plans.placements[plan], s)
    if status == _OK:
        status, culprit = _UNREACHABLE, _first_unreachable(tables, s)
    _refuse(tables, plans, plan, status, culprit)


@compiled
def _write_lanes(tables: Tables, plans: Plans, s: Scratch, lanes: LaneScratch) -> None:
    """Writes the outcome of the plans in lanes; those beyond the end repeat the last."""
    out = plans.outcome
    for lane in range(len(lanes.lanes)):
        plan = lanes.plan[lane]
        if lanes.broken[lane] == 1 or lanes.latest[lane] == np.inf:
            _explain(tables, plans, s, plan)
            continue
        out.status[plan] = _OK
        out.culprit[plan] = NONE
        out.step_time[plan] = lanes.latest[lane]
        for device in range(tables.columns.shape[0]):
            out.allocated[plan, device] = lanes.peak[at(lanes, device, lane)]
            out.used[plan, device] = (lanes.used[lane] >> np.uint64(device)) & ONE == ONE


# one entry an engine, so that only what is used is compiled


@compiled
def _lower(tables: Tables, mode: Mode, plans: Plans, s: Scratch, row: int, plan: int) -> bool:
    """Lowers a placement for the event loop; False if it breaks a rule."""
    status, culprit = list_ops(tables, plans.placements[row], s)
    if status == _OK:
        status, culprit = make_transfers(tables, mode, s)
    if status != _OK:
        _refuse(tables, plans, plan, status, culprit)
        return False
    if mode.messages == 1:
        note_messages(tables, mode, s)
    return True


@compiled
def _measure(
    tables: Tables, mode: Mode, plans: Plans, s: Scratch, plan: int, step_time: float
) -> None:
    """Walks the memory of a placement that was played and writes its outcome."""
    if s.counts[_FINISHED] < tables.cost.shape[0]:
        _refuse(tables, plans, plan, _DEADLOCK, NONE)
        return
    if mode.order == _READY:
        walk_by_start(tables, s)
    else:
        walk_by_program(tables, s)
    _write(tables, plans, s, plan, step_time)


@compiled_apart
def play_one(tables: Tables, mode: Mode, plans: Plans, s: Scratch, row: int, plan: int) -> None:
    """Plays the placement of a row by events and writes the outcome of a plan."""
    if _lower(tables, mode, plans, s, row, plan):
        _measure(tables, mode, plans, s, plan, play(tables, mode, s))


@compiled_apart
def flow_one(tables: Tables, mode: Mode, plans: Plans, s: Scratch, row: int, plan: int) -> None:
    """Plays it where rates change."""
    if _lower(tables, mode, plans, s, row, plan):
        _measure(tables, mode, plans, s, plan, play_fluid(tables, mode, s))


@compiled_entry
def run_events(tables: Tables, mode: Mode, plans: Plans, s: Scratch, begin: int, end: int) -> None:
    """Plays the placements begin to end of a batch by events and writes their outcome."""
    for plan in range(begin, end):
        play_one(tables, mode, plans, s, plan, plan)


@compiled_entry
def run_fluid(tables: Tables, mode: Mode, plans: Plans, s: Scratch, begin: int, end: int) -> None:
    """Plays them by events where rates change."""
    for plan in range(begin, end):
        flow_one(tables, mode, plans, s, plan, plan)


@compiled_entry
def run_sweep(tables: Tables, mode: Mode, plans: Plans, s: Scratch, begin: int, end: int) -> None:
    """Sweeps the placements begin to end of a batch one by one and writes their outcome."""
    for plan in range(begin, end):
        sweep_one(tables, mode, plans, s, plan, plan)


@compiled_entry
def run_lanes(  # noqa: PLR0913, PLR0917 - one more kind of scratch and its tables
    tables: Tables,
    lane_tables: LaneTables,
    mode: Mode,
    plans: Plans,
    s: Scratch,
    lanes: LaneScratch,
    begin: int,
    end: int,
) -> None:
    """Sweeps the placements begin to end of a batch in lanes and writes their outcome."""
    for plan in range(begin, end, len(lanes.lanes)):
        load_lanes(lane_tables, plans.placements, plan, end, lanes)
        sweep_lanes(lane_tables, mode, lanes)
        _write_lanes(tables, plans, s, lanes)
