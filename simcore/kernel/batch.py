"""A range of a batch of placements: lowered, played and measured without leaving compiled code."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.kernel.compiled import compiled
from simcore.kernel.lane_memory import walk_lanes
from simcore.kernel.lanes import LANES, LaneScratch, load_lanes, sweep_lanes
from simcore.kernel.loop import play
from simcore.kernel.lowering import check_placement, list_ops, make_transfers
from simcore.kernel.memory import walk_memory
from simcore.kernel.records import NONE, Count, Engine, Mode, Outcome, Scratch, Status, Tables
from simcore.kernel.sweep import sweep

_OK, _DEADLOCK = int(Status.OK), int(Status.DEADLOCK)
_FINISHED = int(Count.FINISHED)
_EVENTS, _LANES = int(Engine.EVENTS), int(Engine.LANES)


class Plans(NamedTuple):
    """A batch and its results."""

    placements: NDArray[np.int32]  # [plan, op] device
    outcome: Outcome


@compiled
def _play_events(tables: Tables, mode: Mode, s: Scratch) -> tuple[int, int, float]:
    status, culprit = make_transfers(tables, mode, s)
    if status != _OK:
        return status, culprit, np.inf
    step_time = play(tables, mode, s)
    if s.counts[_FINISHED] < tables.cost.shape[0]:
        return _DEADLOCK, NONE, np.inf
    return _OK, NONE, step_time


@compiled
def _run_one(tables: Tables, mode: Mode, plans: Plans, s: Scratch, plan: int) -> None:
    """Runs one placement and writes its outcome."""
    placement, out = plans.placements[plan], plans.outcome
    status, culprit = check_placement(tables, placement, s)
    step_time = np.inf
    if status == _OK:
        list_ops(tables, placement, s)
        if mode.engine == _EVENTS:
            status, culprit, step_time = _play_events(tables, mode, s)
        else:
            status, culprit, step_time = sweep(tables, mode, s)
    if status == _OK:
        walk_memory(tables, mode, s)
    out.status[plan] = status
    out.culprit[plan] = culprit
    out.step_time[plan] = step_time
    for device in range(tables.cost.shape[1]):
        legal = status == _OK
        out.allocated[plan, device] = s.devices[device].peak if legal else 0
        out.used[plan, device] = legal and s.devices[device + 1].slot > s.devices[device].slot


@compiled
def _run_lanes(
    tables: Tables, mode: Mode, plans: Plans, s: Scratch, lanes: LaneScratch, first: int
) -> None:
    """Runs LANES placements in lock-step; those that break a rule once more on their own."""
    out = plans.outcome
    load_lanes(tables, plans.placements, first, lanes)
    sweep_lanes(tables, mode, lanes)
    walk_lanes(tables, lanes)
    for lane in range(LANES):
        plan = first + lane
        if lanes.broken[lane] == 1 or lanes.latest[lane] == np.inf:
            _run_one(tables, mode, plans, s, plan)
            continue
        out.status[plan] = _OK
        out.culprit[plan] = NONE
        out.step_time[plan] = lanes.latest[lane]
        for device in range(tables.cost.shape[1]):
            out.allocated[plan, device] = lanes.peak[device, lane]
            out.used[plan, device] = lanes.used[device, lane] == 1


@compiled
def run_batch(  # noqa: PLR0913, PLR0917 - a thread's share of a batch
    tables: Tables,
    mode: Mode,
    plans: Plans,
    s: Scratch,
    lanes: LaneScratch,
    begin: int,
    end: int,
) -> None:
    """Runs the placements begin to end of a batch and writes their outcome."""
    plan = begin
    if mode.engine == _LANES:
        while plan + LANES <= end:
            _run_lanes(tables, mode, plans, s, lanes, plan)
            plan += LANES
    for rest in range(plan, end):
        _run_one(tables, mode, plans, s, rest)
