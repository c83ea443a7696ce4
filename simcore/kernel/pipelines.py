"""Pipelines in batches: one program of tasks, of which costs, sizes and devices change by plan.

The program (which task waits for which, in which order) belongs to a schedule and the stages that
send to each other. A plan of a batch gives what each stage costs and holds, and its devices; it is
written into this thread's tables and played like any other.

Axes as in `records`; task = op; stage, phase (`Phase`), edge (stages that send to each other).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.kernel.batch import Plans, flow_one, play_one, sweep_one
from simcore.kernel.compiled import compiled, compiled_entry
from simcore.kernel.records import NONE, Mode, Records, Scratch, Tables

SIZES = (
    "none",
    "freed",
    "shared",
    "made",
    "gradient",
    "forward",
    "backward",
    "tie",
)  # what bytes follow
FREED, SHARED, MADE, GRADIENT, FORWARD, BACKWARD, TIE = range(1, 8)

TASK = np.dtype(
    [
        ("stage", np.int64),
        ("phase", np.int64),
        ("rank", np.int64),  # column of the devices; NONE = a collective
        ("adds", np.int64),  # 1 = adds gradients to those of earlier microbatches
        ("is_free", np.int64),  # 1 = it costs nothing
        ("is_first", np.int64),  # 1 = it holds what its stage holds for the whole step
    ]
)
RULE = np.dtype(
    [
        ("size_of", np.int64),  # in SIZES
        ("number", np.int64),  # of the stage, edge or tie
        ("share", np.float64),  # of the bytes
    ]
)
SPELL = np.dtype(  # a tensor is on a device from one task to another
    [
        ("tensor", np.int64),
        ("first", np.int64),  # task
        ("last", np.int64),  # task
        ("counts_first", np.int64),  # 1 = part of the extra bytes of the first task
        ("counts_last", np.int64),  # and of the last
    ]
)
STAGE_COST = np.dtype(
    [
        ("seconds", np.float64),  # s
        ("ahead", np.float64),  # s of the host before it can start
        ("trail", np.float64),  # s of the host after that
        ("sync", np.int64),  # 1 = the host waits for its end
    ]
)
STAGE_SIZE = np.dtype(  # bytes, as in `simcore.pipeline.Saved` and for the whole step
    [
        ("freed", np.int64),
        ("shared", np.int64),
        ("made", np.int64),
        ("gradient", np.int64),
        ("held", np.int64),
    ]
)


class Template(NamedTuple):
    """The program of a schedule."""

    tasks: Records  # TASK [task]
    rules: Records  # RULE [tensor]
    spells: Records  # SPELL [spell]


class StageBatch(NamedTuple):
    """What the stages of every plan cost and hold."""

    costs: Records  # STAGE_COST [plan, stage, phase, column]
    adding: NDArray[np.float64]  # [plan, stage, phase, column] s to add a microbatch's gradients
    sizes: Records  # STAGE_SIZE [plan, stage]
    extra: NDArray[np.int64]  # [plan, stage, phase] bytes above what is alive before
    added: NDArray[np.int64]  # [plan, stage, phase] bytes more where it adds gradients
    forward: NDArray[np.int64]  # [plan, edge] bytes a microbatch sends
    backward: NDArray[np.int64]  # [plan, edge] bytes
    ties: NDArray[np.int64]  # [plan, tie] bytes
    devices: NDArray[np.int32]  # [plan, rank]


@compiled
def _stage_size(sizes: Records, size_of: int) -> int:
    """Returns the bytes of a tensor that stays on its stage."""
    if size_of == FREED:
        return int(sizes.freed)
    if size_of == SHARED:
        return int(sizes.shared)
    return int(sizes.made if size_of == MADE else sizes.gradient)


@compiled
def _size(stages: StageBatch, plan: int, rule: Records) -> int:
    """Returns the bytes of a tensor."""
    number = rule.number
    if rule.size_of == 0:
        return 0
    if rule.size_of <= GRADIENT:
        return _stage_size(stages.sizes[plan, number], rule.size_of)
    if rule.size_of == FORWARD:
        return int(np.rint(stages.forward[plan, number] * rule.share))
    if rule.size_of == BACKWARD:
        return int(np.rint(stages.backward[plan, number] * rule.share))
    return int(stages.ties[plan, number])


@compiled
def _write_tasks(tables: Tables, template: Template, stages: StageBatch, plan: int) -> None:
    """Writes what the tasks cost, and what memory they need beside their tensors."""
    for task in range(template.tasks.shape[0]):
        what = template.tasks[task]
        if what.rank == NONE:
            continue
        op = tables.ops[task]
        op.allocate = 0
        op.release = 0
        op.workspace = stages.extra[plan, what.stage, what.phase]
        if what.adds == 1:
            op.workspace += stages.added[plan, what.stage, what.phase]
        op.resident = stages.sizes[plan, what.stage].held if what.is_first == 1 else 0
        for column in range(tables.cost.shape[1]):
            cost = stages.costs[plan, what.stage, what.phase, column]
            slot = tables.cost[task, column]
            if what.is_free == 1:
                slot.duration = 0.0
                slot.launch = 0.0
                slot.trail = 0.0
                slot.sync = 0
                continue
            slot.duration = cost.seconds
            if what.adds == 1:
                slot.duration += stages.adding[plan, what.stage, what.phase, column]
            slot.launch = cost.ahead
            slot.trail = cost.trail
            slot.sync = cost.sync


@compiled
def _write_tensors(tables: Tables, template: Template, stages: StageBatch, plan: int) -> None:
    """Writes the bytes of the tensors, and when each is allocated and freed."""
    for tensor in range(template.rules.shape[0]):
        tables.tensors[tensor].num_bytes = _size(stages, plan, template.rules[tensor])
    for index in range(template.spells.shape[0]):
        spell = template.spells[index]
        num_bytes = tables.tensors[spell.tensor].num_bytes
        first, last = tables.ops[spell.first], tables.ops[spell.last]
        first.allocate += num_bytes
        last.release += num_bytes
        if spell.counts_first == 1:
            first.workspace = max(0, first.workspace - num_bytes)
        if spell.counts_last == 1 and spell.last != spell.first:
            last.workspace = max(0, last.workspace - num_bytes)


@compiled
def _write_plan(
    tables: Tables, template: Template, stages: StageBatch, plans: Plans, plan: int
) -> None:
    _write_tasks(tables, template, stages, plan)
    _write_tensors(tables, template, stages, plan)
    for task in range(template.tasks.shape[0]):
        rank = template.tasks[task].rank
        plans.placements[0, task] = stages.devices[plan, rank] if rank != NONE else NONE


@compiled_entry
def sweep_pipelines(  # noqa: PLR0913, PLR0917 - a batch of another kind
    tables: Tables,
    mode: Mode,
    template: Template,
    stages: StageBatch,
    plans: Plans,
    s: Scratch,
    begin: int,
    end: int,
) -> None:
    """Sweeps the pipelines begin to end of a batch; `plans` has room for one placement."""
    for plan in range(begin, end):
        _write_plan(tables, template, stages, plans, plan)
        sweep_one(tables, mode, plans, s, 0, plan)


@compiled_entry
def play_pipelines(  # noqa: PLR0913, PLR0917 - a batch of another kind
    tables: Tables,
    mode: Mode,
    template: Template,
    stages: StageBatch,
    plans: Plans,
    s: Scratch,
    begin: int,
    end: int,
) -> None:
    """Plays them by events; `plans` has room for one placement."""
    for plan in range(begin, end):
        _write_plan(tables, template, stages, plans, plan)
        play_one(tables, mode, plans, s, 0, plan)


@compiled_entry
def flow_pipelines(  # noqa: PLR0913, PLR0917 - a batch of another kind
    tables: Tables,
    mode: Mode,
    template: Template,
    stages: StageBatch,
    plans: Plans,
    s: Scratch,
    begin: int,
    end: int,
) -> None:
    """Plays them by events where rates change."""
    for plan in range(begin, end):
        _write_plan(tables, template, stages, plans, plan)
        flow_one(tables, mode, plans, s, 0, plan)
