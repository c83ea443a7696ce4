"""A range of a batch of placements: lowered, played and measured without leaving compiled code."""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.loop import play
from simcore.kernel.lowering import check_placement, list_ops, make_transfers
from simcore.kernel.memory import walk_memory
from simcore.kernel.records import NONE, Count, Mode, Outcome, Scratch, Status, Tables
from simcore.kernel.sweep import sweep

_OK, _DEADLOCK = int(Status.OK), int(Status.DEADLOCK)
_FINISHED = int(Count.FINISHED)


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
def _run(tables: Tables, mode: Mode, placement: np.ndarray, s: Scratch) -> tuple[int, int, float]:
    """Returns (status, culprit op, step time) of one placement."""
    status, culprit = check_placement(tables, placement, s)
    if status != _OK:
        return status, culprit, np.inf
    list_ops(tables, placement, s)
    if mode.sweep == 1:
        status, culprit, step_time = sweep(tables, mode, s)
    else:
        status, culprit, step_time = _play_events(tables, mode, s)
    if status == _OK:
        walk_memory(tables, mode, s)
    return status, culprit, step_time


@compiled
def run_batch(  # noqa: PLR0913, PLR0917 - a thread's share of a batch
    tables: Tables,
    mode: Mode,
    placements: np.ndarray,
    out: Outcome,
    s: Scratch,
    begin: int,
    end: int,
) -> None:
    """Runs placements[begin:end] (int32 [plan, op]) and writes their outcome."""
    for plan in range(begin, end):
        placement = placements[plan]
        status, culprit, step_time = _run(tables, mode, placement, s)
        out.status[plan] = status
        out.culprit[plan] = culprit
        out.step_time[plan] = step_time
        for device in range(tables.cost.shape[1]):
            legal = status == _OK
            out.allocated[plan, device] = s.devices[device].peak if legal else 0
            out.used[plan, device] = legal and s.devices[device + 1].slot > s.devices[device].slot
