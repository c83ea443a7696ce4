"""Whether a schedule can run: if not, which action is at fault, in words and in a picture."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from simcore.errors import DeadlockError, PlanError
from simcore.schedule import Action, Schedule, made
from simcore.schedule_run import UNIT_COST, Cost, Execution
from simcore.schedule_text import grid
from simcore.signature import Phase

STEPS_BEFORE, STEPS_AFTER = 16, 4  # of the culprit, in an error's picture
MAX_STEPS = 2000  # of a picture
_BEFORE = {Phase.B: Phase.F, Phase.I: Phase.F, Phase.W: Phase.I}  # of one stage and microbatch
_OTHER_BACKWARD = {Phase.B: Phase.I, Phase.I: Phase.B}


class _Mark(NamedTuple):
    """A sign in a picture."""

    sign: str
    rank: int
    position: int | None  # of the action; None where it is not there


def check(schedule: Schedule) -> None:
    """Accepts a schedule that runs to its end.

    Each stage has one forward and one backward of each microbatch, whole or split, on its rank and
    in order, and no ranks wait for each other. The error's `grid` is the picture of the schedule
    run as far as it gets, every action a time step long, with ``>`` before the culprit and ``*``
    before what it is entangled with.

    Raises:
        PlanError: an action is missing, double, out of range, misplaced or before what it needs.
        DeadlockError: ranks wait for each other.
    """
    run = Execution(schedule)
    run.go(schedule.actions)
    fault = next(_faults(schedule), None)
    if fault is not None:
        words, mark = fault
        raise PlanError(
            f"schedule {schedule.name!r}: {words}", grid=_picture(schedule, run, [mark])
        )
    heads = run.stopped()
    if heads:
        raise _deadlock(schedule, run, heads)


def draw(schedule: Schedule, durations: Cost | None = None) -> str:
    """Returns a picture of a schedule: a line per rank, a column per time step.

    Args:
        schedule: one that `check` accepts.
        durations: of the phases, in any unit, without hops; each one step where None. A step is
            the shortest of them; times are rounded to steps.

    Raises:
        PlanError: it cannot run, or a duration is missing or is none.
    """
    run = Execution(schedule, UNIT_COST if durations is None else durations)
    run.go(schedule.actions)
    if run.stopped():
        check(schedule)  # says why
    spans = [
        end - start
        for starts, ends in zip(run.start, run.end, strict=True)
        for start, end in zip(starts, ends, strict=True)
    ]
    last = max(end for row in run.end for end in row)
    step = max(min((span for span in spans if span > 0), default=1.0), last / MAX_STEPS)
    cells = [_cells(schedule, run, rank, step) for rank in range(schedule.num_ranks)]
    labels = [f"rank {rank}" for rank in range(schedule.num_ranks)]
    columns = range(1 + max(column for row in cells for column in row))
    return "\n".join(grid(cells, {}, labels, columns))


def _faults(schedule: Schedule) -> Iterator[tuple[str, _Mark]]:
    """Yields what can be seen without running: words and where."""
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.actions):
        for position, action in enumerate(row):
            words = _unknown(schedule, rank, action) or _misplaced(action, row, seen)
            if words:
                yield f"rank {rank}: {words}", _Mark(">", rank, position)
            seen.add(action)
    for stage, rank in enumerate(schedule.stage_rank):
        for microbatch in range(schedule.num_microbatches):
            forward, whole, first, second = (
                Action(stage, phase, microbatch) for phase in (Phase.F, Phase.B, Phase.I, Phase.W)
            )
            words = ""
            if forward not in seen:
                words = f"{forward} is missing"
            elif whole not in seen and first not in seen:
                words = f"{whole}, or {first} and {second}, is missing"
            elif first in seen and second not in seen:
                words = f"{second} is missing"
            if words:
                yield f"rank {rank}: {words}", _Mark(">", rank, None)


def _unknown(schedule: Schedule, rank: int, action: Action) -> str:
    stage, phase, microbatch = action
    if phase not in (Phase.F, *_BEFORE):
        return f"{action} is no action of a schedule; updates follow by themselves"
    if not 0 <= stage < schedule.num_stages:
        return f"{action}: there is no stage {stage}"
    if not 0 <= microbatch < schedule.num_microbatches:
        return f"{action}: there is no microbatch {microbatch}"
    if schedule.stage_rank[stage] != rank:
        return f"{action}: stage {stage} is on rank {schedule.stage_rank[stage]}"
    return ""


def _misplaced(action: Action, row: tuple[Action, ...], seen: set[Action]) -> str:
    if action in seen:
        return f"{action} is there twice"
    if action.phase == Phase.F:
        return ""
    if action.phase in _OTHER_BACKWARD:
        other = action._replace(phase=_OTHER_BACKWARD[action.phase])
        if other in seen:
            return f"{action} repeats the work of {other}"
    need = action._replace(phase=_BEFORE[action.phase])
    if need in seen:
        return ""
    return f"{action} comes before {need}" if need in row else f"{action} has no {need}"


def _deadlock(schedule: Schedule, run: Execution, heads: Mapping[int, Action]) -> DeadlockError:
    """Returns who waits for whom, round the circle that the lowest waiting rank leads into."""
    needs = {rank: run.missing(action) for rank, action in heads.items()}
    path: list[int] = []
    rank = min(heads)
    while rank not in path:
        path.append(rank)
        rank = schedule.stage_rank[needs[rank].stage]
    circle = path[path.index(rank) :]
    words = []
    for waiting, other in zip(circle, [*circle[1:], circle[0]], strict=True):
        need = next(a for a in schedule.actions[other] if made(a) == needs[waiting])
        behind = "" if need == heads[other] else f" behind {heads[other]}"
        words.append(f"{heads[waiting]} (rank {waiting}) for {need}{behind} (rank {other})")
    marks = [
        _Mark(">" if waiting == circle[0] else "*", waiting, len(run.end[waiting]))
        for waiting in circle
    ]
    return DeadlockError(
        f"schedule {schedule.name!r}: deadlock, these wait: {'; '.join(words)}",
        grid=_picture(schedule, run, marks),
    )


def _picture(schedule: Schedule, run: Execution, marks: list[_Mark]) -> tuple[str, ...]:
    """Returns the run, every action a step long, near the first mark."""
    cells = [_cells(schedule, run, rank, 1.0) for rank in range(schedule.num_ranks)]
    labels = [f"  rank {rank}" for rank in range(schedule.num_ranks)]
    signs: dict[tuple[int, int], str] = {}
    columns = []
    for sign, rank, position in marks:
        ran, ends = len(run.end[rank]), run.end[rank]
        if position is None:
            labels[rank] = f"{sign} rank {rank}"
            columns.append(int(ends[-1]) if ends else 0)
            continue
        after = (int(ends[-1]) if ends else 0) + position - ran  # where it would follow
        columns.append(int(run.start[rank][position]) if position < ran else after)
        cells[rank][columns[-1]] = str(schedule.actions[rank][position])
        signs[rank, columns[-1]] = sign
    used = max(column for row in cells for column in (*row, 0))
    first = max(0, columns[0] - STEPS_BEFORE)
    return grid(cells, signs, labels, range(first, min(used, columns[0] + STEPS_AFTER) + 1))


def _cells(schedule: Schedule, run: Execution, rank: int, step: float) -> dict[int, str]:
    """Returns what a rank runs, column -> action; ``=`` where it goes on."""
    cells: dict[int, str] = {}
    column = 0
    times = zip(schedule.actions[rank], run.start[rank], run.end[rank], strict=False)
    for action, start, end in times:
        column = max(column, round(start / step))
        cells[column] = str(action)
        stop = max(column + 1, round(end / step))
        cells.update((later, "=") for later in range(column + 1, stop))
        column = stop
    return cells
