import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.errors import DeadlockError, PlanError
from simcore.schedule import Action, Schedule, max_in_flight, needs
from simcore.schedule_check import check, draw
from simcore.schedule_names import SCHEDULE_NAMES, make_schedule
from simcore.schedule_text import from_csv
from simcore.signature import Phase


def edited(schedule: Schedule, rank: int, row: Sequence[Action]) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return replace(schedule, actions=tuple(rows))


def with_row(rank: int, text: str) -> Schedule:
    """Returns 1F1B on two ranks with two microbatches, but one row."""
    rows = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]
    rows[rank] = text
    return replace(make_schedule("1f1b", 2, 2), actions=tuple(from_row(row) for row in rows))


def from_row(text: str) -> tuple[Action, ...]:
    return tuple(
        Action(int(stage), Phase[letter], int(microbatch))
        for stage, letter, microbatch in re.findall(r"(-?\d+)([FBIWU])(-?\d+)", text)
    )


@pytest.mark.parametrize(
    ("rank", "row", "reason"),
    [
        (0, "0F0,0B0,0F1", "rank 0: 0B1, or 0I1 and 0W1, is missing"),
        (0, "0F0,0B0", "rank 0: 0F1 is missing"),
        (1, "1F0,1B0,1F1,1I1", "rank 1: 1W1 is missing"),
        (1, "1F0,1B0,1B1,1F1", "rank 1: 1B1 comes before 1F1"),
        (1, "1B0,1F1,1B1", "rank 1: 1B0 has no 1F0"),
        (1, "1F0,1W0,1I0,1F1,1B1", "rank 1: 1W0 comes before 1I0"),
        (1, "1F0,1B0,1W0,1F1,1B1", "rank 1: 1W0 has no 1I0"),
        (1, "1F0,1B0,1I0,1W0,1F1,1B1", "rank 1: 1I0 repeats the work of 1B0"),
        (0, "0F0,0F1,0F0,0B0,0B1", "rank 0: 0F0 is there twice"),
        (0, "0F0,0F1,0B0,0B1,1F0", "rank 0: 1F0: stage 1 is on rank 1"),
        (0, "0F0,0F1,0B0,0B1,0F2", "rank 0: 0F2: there is no microbatch 2"),
        (0, "0F0,0F1,0B0,0B1,2F0", "rank 0: 2F0: there is no stage 2"),
        (0, "-1F0,0F0,0F1,0B0,0B1", "rank 0: -1F0: there is no stage -1"),
        (0, "0F0,0F1,0B0,0B1,0U0", "rank 0: 0U0 is no action of a schedule"),
    ],
)
def test_an_illegal_schedule_is_refused_with_the_culprit(rank: int, row: str, reason: str) -> None:
    with pytest.raises(PlanError, match=f"^schedule '1f1b': {re.escape(reason)}") as caught:
        check(with_row(rank, row))
    assert not isinstance(caught.value, DeadlockError)
    assert "\n" not in str(caught.value)
    assert sum(line.count(">") for line in caught.value.grid) == 1
    culprit = re.sub(r" .*|:", "", reason.removeprefix(f"rank {rank}: "))
    marked = next(line for line in caught.value.grid if ">" in line)
    assert f">{culprit}" in marked or marked.startswith(f"> rank {rank}")


def test_the_picture_of_an_error_goes_as_far_as_the_schedule_does() -> None:
    with pytest.raises(PlanError) as caught:
        check(with_row(1, "1F0,1B0,1B1,1F1"))
    assert caught.value.grid == (
        "time      0    1    2    3",
        "  rank 0  0F0  0F1  .    0B0",
        "  rank 1  .    1F0  1B0 >1B1",
    )


def test_ranks_that_wait_for_each_other_are_told_round_the_circle() -> None:
    rows = (from_row("0F0,0B0,0F1,0B1"), from_row("1F0,1F1,1B0,1B1"))
    schedule = replace(make_schedule("1f1b", 2, 2), actions=rows)
    with pytest.raises(DeadlockError) as caught:
        check(schedule)
    assert str(caught.value) == (
        "schedule '1f1b': deadlock, these wait: 0B0 (rank 0) for 1B0 behind 1F1 (rank 1); "
        "1F1 (rank 1) for 0F1 behind 0B0 (rank 0)"
    )
    assert caught.value.grid == (
        "time      0    1    2",
        "  rank 0  0F0 >0B0  .",
        "  rank 1  .    1F0 *1F1",
    )


def test_a_long_schedule_is_shown_near_the_culprit() -> None:
    schedule = make_schedule("1f1b", 2, 100)
    row = list(schedule.actions[1])
    row[100], row[101] = row[101], row[100]
    with pytest.raises(PlanError, match="1B50 comes before 1F50") as caught:
        check(edited(schedule, 1, row))
    assert ">1B50" in caught.value.grid[2]
    assert max(map(len, caught.value.grid)) < 160


def test_a_schedule_is_drawn_with_a_line_per_rank() -> None:
    drawn = draw(make_schedule("1f1b", 2, 3), {Phase.F: 1.0, Phase.B: 2.0})
    assert drawn.splitlines() == [
        "time    0    1    2    3    4    5    6    7    8    9    10   11",
        "rank 0  0F0  0F1  .    .    0B0  =    0F2  0B1  =    .    0B2  =",
        "rank 1  .    1F0  1B0  =    1F1  1B1  =    1F2  1B2  =    .    .",
    ]
    zero = draw(make_schedule("zb-h1", 2, 2)).splitlines()
    assert zero == [
        "time    0    1    2    3    4    5    6",
        "rank 0  0F0  0F1  .    0I0  0W0  0I1  0W1",
        "rank 1  .    1F0  1I0  1F1  1I1  1W0  1W1",
    ]


def test_a_drawing_keeps_its_size_whatever_the_durations() -> None:
    drawn = draw(make_schedule("1f1b", 2, 3), {Phase.F: 1e-9, Phase.B: 1.0})
    assert max(map(len, drawn.splitlines())) < 30_000
    assert draw(make_schedule("1f1b", 2, 3), {Phase.F: 0.0, Phase.B: 0.0}).count("F") == 6
    with pytest.raises(PlanError, match="no cost of phase B"):
        draw(make_schedule("1f1b", 2, 3), {Phase.F: 1.0})
    with pytest.raises(PlanError, match="comes before"):
        draw(with_row(1, "1F0,1B0,1B1,1F1"))


class Drawn(NamedTuple):
    schedule: Schedule
    permuted: Schedule


@st.composite
def schedules(draw_from: st.DrawFn) -> Drawn:
    """Returns a random legal schedule over a random stage DAG, and one row in another order."""
    stages = draw_from(st.integers(1, 5))
    ranks = draw_from(st.integers(1, stages))
    microbatches = draw_from(st.integers(1, 4))
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    edges = tuple(draw_from(st.lists(st.sampled_from(pairs), unique=True)) if pairs else ())
    stage_rank = tuple(draw_from(st.integers(0, ranks - 1)) for _ in range(stages))
    whole = draw_from(st.lists(st.booleans(), min_size=stages, max_size=stages))
    empty = Schedule(
        name="random",
        num_ranks=ranks,
        num_stages=stages,
        num_microbatches=microbatches,
        stage_rank=stage_rank,
        actions=((),) * ranks,
        edges=edges,
    )
    waits = nx.DiGraph()
    for stage in range(stages):
        phases = (Phase.F, Phase.B) if whole[stage] else (Phase.F, Phase.I, Phase.W)
        waits.add_nodes_from(Action(stage, p, k) for p in phases for k in range(microbatches))
    add_needs(waits, empty)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    left = waits.copy()
    while left:
        ready = sorted(action for action in left if not left.in_degree(action))
        action = draw_from(st.sampled_from(ready))
        rows[stage_rank[action.stage]].append(action)
        left.remove_node(action)
    schedule = replace(empty, actions=tuple(map(tuple, rows)))
    rank = draw_from(st.sampled_from([rank for rank in range(ranks) if rows[rank]]))
    return Drawn(schedule, edited(schedule, rank, draw_from(st.permutations(rows[rank]))))


def add_needs(waits: nx.DiGraph, schedule: Schedule) -> None:
    """Adds an edge from each action to those that wait for it."""
    stages = schedule.predecessors, schedule.successors
    for action in list(waits):
        for need in needs(action, *stages):
            split = need._replace(phase=Phase.I)
            waits.add_edge(split if need.phase == Phase.B and split in waits else need, action)


def waits_of(schedule: Schedule) -> nx.DiGraph:
    """Returns who waits for whom: by data, and by the order of each rank."""
    waits = nx.DiGraph()
    waits.add_nodes_from(action for row in schedule.actions for action in row)
    add_needs(waits, schedule)
    for row in schedule.actions:
        nx.add_path(waits, row)
    return waits


@given(schedules())
def test_any_legal_schedule_is_accepted(drawn: Drawn) -> None:
    check(drawn.schedule)
    assert draw(drawn.schedule).count("F") == (
        drawn.schedule.num_stages * drawn.schedule.num_microbatches
    )
    assert max(max_in_flight(drawn.schedule)) <= drawn.schedule.num_microbatches


@given(schedules())
def test_another_order_is_refused_exactly_when_it_waits_in_a_circle(drawn: Drawn) -> None:
    waits = waits_of(drawn.permuted)
    if nx.is_directed_acyclic_graph(waits):
        check(drawn.permuted)
        return
    with pytest.raises(PlanError) as caught:
        check(drawn.permuted)
    circles = [part for part in nx.strongly_connected_components(waits) if len(part) > 1]
    named = from_row(str(caught.value))
    marked = [cell for line in caught.value.grid for cell in re.findall(r">(\w+)", line)]
    assert len(marked) == 1
    assert from_row(marked[0])[0] == named[0]
    assert any(named[0] in circle for circle in circles)


@given(schedules(), st.data())
def test_a_missing_or_double_action_is_named(drawn: Drawn, data: st.DataObject) -> None:
    schedule = drawn.schedule
    rank = data.draw(st.sampled_from([r for r, row in enumerate(schedule.actions) if row]))
    row = list(schedule.actions[rank])
    position = data.draw(st.integers(0, len(row) - 1))
    culprit = row[position]
    with pytest.raises(PlanError, match=rf"\b{culprit.stage}[FBIW]{culprit.microbatch}\b"):
        check(edited(schedule, rank, row[:position] + row[position + 1 :]))
    with pytest.raises(PlanError, match=rf"{culprit} is there twice"):
        check(edited(schedule, rank, [*row, culprit]))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_schedule_by_name_is_legal(name: str) -> None:
    per_rank = {"interleaved": 2, "zbv": 2}.get(name, 1)
    for ranks in (1, 2, 3, 5):
        for microbatches in (1, ranks, 4 * ranks):
            check(make_schedule(name, ranks, microbatches, stages_per_rank=per_rank))


def test_a_csv_that_counts_to_a_billion_is_refused_at_once() -> None:
    with pytest.raises(PlanError, match="0F1 is missing"):
        check(from_csv("0F0,0F999999999,0B0"))
