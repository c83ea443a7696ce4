"""Schedules as text: torch.distributed.pipelining's CSV, one rank a row, and time x rank grids."""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence

from simcore.errors import PlanError
from simcore.schedule import Action, Edges, Schedule
from simcore.signature import Phase

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_NOT_COMPUTE = re.compile(
    r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*"
)  # what torch lowers a schedule to, beside its actions
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")  # torch runs the actions inside in their order


def parse_action(text: str) -> Action:
    """Reads ``2F0``: stage, phase letter, microbatch.

    Raises:
        PlanError: it is something else.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise PlanError(f"action {text.strip()[:40]!r} is not stage, F, B, I or W, microbatch")
    return Action(int(match[1]), Phase[match[2]], int(match[3]))


def to_csv(schedule: Schedule) -> str:
    """Returns the action lists as torch's ``_load_csv`` reads them (compute only).

    The edges, the name and whether it is asynchronous are not in it.
    """
    return "".join((",".join(map(str, row)) or '""') + "\n" for row in schedule.actions)


def from_csv(text: str, *, name: str = "csv", edges: Edges = ()) -> Schedule:
    """Reads action lists from torch's CSV, with or without communication.

    Empty cells are idle steps. Sends, receives and what shards parameters are passed over. Whether
    the lists can run is asked of `simcore.schedule_check.check`.

    Args:
        text: the file's text.
        name: of the schedule.
        edges: the DAG of the stages, a chain where none is given.

    Raises:
        PlanError: a cell is no action, or a stage has none or is on two ranks.
    """
    rows = _rows(text, name)
    stage_rank: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if stage_rank.setdefault(action.stage, rank) != rank:
                raise PlanError(
                    f"schedule {name!r}: {action} is on rank {rank}, but stage {action.stage} is "
                    f"on rank {stage_rank[action.stage]}"
                )
    if not stage_rank:
        raise PlanError(f"schedule {name!r}: there is no action in it")
    stages = range(len(stage_rank))
    missing = next((stage for stage in stages if stage not in stage_rank), None)
    if missing is not None:
        raise PlanError(f"schedule {name!r}: stage {missing} has no action")
    return Schedule(
        name=name,
        num_ranks=len(rows),
        num_stages=len(stages),
        num_microbatches=1 + max(action.microbatch for row in rows for action in row),
        stage_rank=tuple(stage_rank[stage] for stage in stages),
        actions=tuple(rows),
        edges=edges,
    )


def _rows(text: str, name: str) -> list[tuple[Action, ...]]:
    rows: list[tuple[Action, ...]] = []
    try:
        rows.extend(
            tuple(action for cell in cells for action in _actions(cell))
            for cells in csv.reader(io.StringIO(text.rstrip()))
        )
    except (csv.Error, PlanError) as error:
        raise PlanError(f"schedule {name!r}: row {len(rows)}: {error}") from None
    return rows


def _actions(cell: str) -> Iterator[Action]:
    text = cell.strip()
    if text and not _NOT_COMPUTE.fullmatch(text):
        together = _TOGETHER.fullmatch(text)
        yield from map(parse_action, together[1].split(";") if together else [text])


def grid(
    cells: Sequence[Mapping[int, str]],
    marks: Mapping[tuple[int, int], str],
    labels: Sequence[str],
    columns: range,
) -> tuple[str, ...]:
    """Returns a picture: a line of times, then a line per rank; ``.`` is an idle step.

    Args:
        cells: what each rank runs, column -> text.
        marks: (rank, column) -> the sign before a cell.
        labels: what stands before each rank's line.
        columns: the time steps to show.
    """
    texts = [text for row in cells for text in row.values()]
    wide = max(map(len, [str(columns.stop), *texts]))
    margin = max(map(len, labels))
    lines = ["time".ljust(margin) + "".join(f"  {column:<{wide}}" for column in columns)]
    for rank, row in enumerate(cells):
        steps = (
            f" {marks.get((rank, column), ' ')}{row.get(column, '.'):<{wide}}" for column in columns
        )
        lines.append(labels[rank].ljust(margin) + "".join(steps))
    return tuple(line.rstrip() for line in lines)
