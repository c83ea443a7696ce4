import re

import pytest

from simcore.errors import PlanError
from simcore.schedule import Action, Schedule
from simcore.schedule_check import check
from simcore.schedule_messages import add_messages
from simcore.schedule_names import SCHEDULE_NAMES, make_schedule
from simcore.schedule_text import from_csv, parse_action, to_csv
from simcore.signature import Phase


@pytest.mark.parametrize("text", ["2F0", "0B11", "7I3", "12W345"])
def test_an_action_survives_its_text(text: str) -> None:
    assert str(parse_action(text)) == text
    assert parse_action("2F0") == Action(2, Phase.F, 0)


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2U0", "2f0", "-1F0", "2F0x", "2F0 1F0", "2SEND_F0"]
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(
        PlanError, match=f"^action {text!r} is not stage, F, B, I or W, microbatch$"
    ):
        parse_action(text)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_schedule_survives_its_csv(name: str) -> None:
    schedule = make_schedule(name, 3, 6, stages_per_rank={"interleaved": 2, "zbv": 2}.get(name, 1))
    again = from_csv(to_csv(schedule), name=name)
    assert again.actions == schedule.actions
    assert again.stage_rank == schedule.stage_rank
    assert (again.num_ranks, again.num_microbatches) == (3, 6)


def test_the_csv_has_one_rank_a_row() -> None:
    assert to_csv(make_schedule("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_idle_steps_and_communication_are_passed_over() -> None:
    written = "\n".join(
        [
            "0UNSHARD,0F0,,0SEND_F0,0F1,0SEND_F1,0RECV_B0,,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD",
            ",1RECV_F0, 1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1",
            "",
        ]
    )
    schedule = from_csv(written)
    assert schedule.actions == make_schedule("1f1b", 2, 2).actions
    check(schedule)


def test_a_lowered_schedule_reads_back_as_its_actions() -> None:
    schedule = make_schedule("interleaved", 3, 6, stages_per_rank=2)
    rows = [",".join(map(str, row)) for row in add_messages(schedule)]
    assert from_csv("\r\n".join(rows)).actions == schedule.actions


def test_actions_that_torch_runs_together_stand_in_their_order() -> None:
    schedule = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert list(map(str, schedule.actions[0])) == ["0F0", "0F1", "0B0", "0B1"]


def test_a_rank_without_stages_keeps_its_row() -> None:
    schedule = Schedule(
        name="idle rank",
        num_ranks=2,
        num_stages=1,
        num_microbatches=1,
        stage_rank=(0,),
        actions=((Action(0, Phase.F, 0), Action(0, Phase.B, 0)), ()),
    )
    assert from_csv(to_csv(schedule)).actions == schedule.actions
    check(schedule)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("", "there is no action in it"),
        (",,\n", "there is no action in it"),
        ("0F0,0B0\n1F0,1X0", "row 1: action '1X0' is not stage"),
        ("0F0,(0F1;0B0", r"row 0: action '(0F1;0B0' is not stage"),
        ("0F0,0B0\n0F1,0B1", "0F1 is on rank 1, but stage 0 is on rank 0"),
        ("0F0,0B0,999999999F0", "stage 1 has no action"),
        ("0F0,0B0,9999999999F0", "action '9999999999F0' is not stage"),
        ('0F0,"' + "0" * 200_000 + '"', "field larger than field limit"),
    ],
)
def test_a_bad_csv_is_refused_with_the_reason(written: str, reason: str) -> None:
    with pytest.raises(PlanError, match=f"^schedule 'csv': .*{re.escape(reason)}"):
        from_csv(written)


def test_a_csv_of_a_dag_is_read_with_its_edges() -> None:
    edges = ((0, 2), (1, 2))
    schedule = make_schedule("1f1b", 3, 4, edges=edges)
    check(from_csv(to_csv(schedule), edges=edges))
    assert from_csv(to_csv(schedule), edges=edges).edges == edges
