import itertools
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from simcore.errors import PlanError
from simcore.schedule import Action, Schedule, chain, depths, max_in_flight, needs, to_arrays
from simcore.schedule_check import check
from simcore.schedule_messages import add_messages
from simcore.schedule_names import SCHEDULE_NAMES, accepts, make_schedule, refusal
from simcore.schedule_text import from_csv, to_csv
from simcore.signature import Phase

DIAMOND = ((0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5), (2, 5))
CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
MANY = [
    (name, ranks, per_rank)
    for name, ranks, per_rank in itertools.product(CLASSES, range(1, 6), range(1, 5))
    if per_rank
    in {"gpipe": (1,), "1f1b": (1,), "interleaved": (2, 3, 4), "zbv": (2,)}.get(name, (1, 2, 3, 4))
]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def torch_schedule(name: str, ranks: int, microbatches: int, per_rank: int) -> Any:
    """Returns torch's own schedule object, on stages that only know their numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.pipelining import schedules
    stage = mock.Mock(group_rank=0, group_size=ranks, num_stages=ranks * per_rank, submod=None)
    kind = getattr(schedules, CLASSES.get(name, name))
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    return kind(stage if single else [stage] * per_rank, microbatches)


def texts(rows: Any) -> list[list[str]]:
    return [[str(item) for item in row] for row in rows]


def torch_texts(order: dict[int, list[Any]], *, messages: bool = False) -> list[list[str]]:
    kinds = ("SEND", "RECV") if messages else ()
    return [
        [str(a) for a in order[rank] if a and (a.is_compute_op or a.computation_type[:4] in kinds)]
        for rank in sorted(order)
    ]


@pytest.mark.parametrize(("name", "ranks", "per_rank"), MANY)
def test_the_order_is_that_of_torch(name: str, ranks: int, per_rank: int) -> None:
    for microbatches in range(1, 14):
        if not accepts(name, "torch", ranks, microbatches):
            with pytest.raises(ValueError, match="microbatches"):
                torch_schedule(name, ranks, microbatches, per_rank)
            continue
        theirs = torch_schedule(name, ranks, microbatches, per_rank)
        ours = make_schedule(name, ranks, microbatches, stages_per_rank=per_rank)
        check(ours)
        expected = torch_texts(theirs.pipeline_order)
        if name == "1f1b":  # torch 2.13 prints the forwards of the last rank one too high
            counts = (f"F{number}" for number in range(microbatches))
            expected[-1] = [a if "B" in a else f"{ranks - 1}{next(counts)}" for a in expected[-1]]
        assert texts(ours.actions) == expected
        if name not in ("gpipe", "1f1b"):
            ranks_of_stages = dict(enumerate(ours.stage_rank))
            assert ranks_of_stages == theirs.stage_index_to_group_rank
            lowered = torch_texts(theirs.pipeline_order_with_comms, messages=True)
            assert texts(add_messages(ours)) == lowered


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 2), (4, 4), (4, 9), (5, 7)])
def test_the_order_is_the_one_torch_runs(name: str, ranks: int, microbatches: int) -> None:
    ours = make_schedule(name, ranks, microbatches)
    for rank in range(ranks):
        theirs = torch_schedule(name, ranks, microbatches, 1)
        ran: list[str] = []
        stage = theirs._stage
        stage.stage_index, stage.is_last = rank, False
        for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(stage, ops).return_value = []
        stage.forward_one_chunk.side_effect = lambda k, *_, ran=ran, rank=rank, **__: ran.append(
            f"{rank}F{k}"
        )
        stage.backward_one_chunk.side_effect = lambda k, ran=ran, rank=rank, **_: ran.append(
            f"{rank}B{k}"
        )
        theirs._initialize_stage = lambda *_: None
        theirs._has_backward = True
        theirs._step_microbatches([()] * microbatches, [{}] * microbatches)
        assert ran == texts(ours.actions)[rank]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_torch_loads_what_we_write(name: str, tmp_path: Path) -> None:
    per_rank = {"interleaved": 3, "zbv": 2}.get(name, 1)
    ours = make_schedule(name, 4, 8, stages_per_rank=per_rank)
    file = tmp_path / "schedule.csv"
    file.write_text(to_csv(ours))
    runtime = torch_schedule("_PipelineScheduleRuntime", 4, 8, per_rank)
    runtime._load_csv(str(file), "compute_only")
    assert torch_texts(runtime.pipeline_order) == texts(ours.actions)
    lowered = torch_texts(runtime.pipeline_order_with_comms, messages=True)
    assert texts(add_messages(ours)) == lowered


@pytest.mark.parametrize("kind", ["ScheduleLoopedBFS", "ScheduleDualPipeV"])
@pytest.mark.parametrize("written", ["compute_only", "compute_comms"])
def test_what_torch_writes_is_read(kind: str, written: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    torch_schedule(kind, 4, 9, 2)._dump_csv(str(file), written)
    schedule = from_csv(file.read_text())
    check(schedule)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (4, 8, 9)


def test_a_dag_of_stages_warms_up_by_its_longest_path() -> None:
    assert depths(6, DIAMOND) == [3, 2, 2, 1, 1, 0]
    schedule = make_schedule("1f1b", 6, 8, edges=DIAMOND)
    check(schedule)
    assert max_in_flight(schedule) == [4, 3, 3, 2, 2, 1]
    assert schedule.predecessors == [[], [0], [0], [1], [2], [2, 3, 4]]
    assert schedule.successors == [[1, 2], [3], [4, 5], [5], [5], []]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2", "pipedream"])
@pytest.mark.parametrize(
    "edges",
    [
        DIAMOND,
        ((5, 0), (5, 1), (0, 2), (1, 3), (2, 4), (3, 4)),  # stages numbered in no order
        ((0, 2), (1, 2), (2, 3), (3, 4), (3, 5)),  # two first and two last stages
        ((0, 1), (3, 4)),  # stages that nothing ties together
    ],
)
def test_schedules_run_over_dags_of_stages(name: str, edges: Any) -> None:
    for microbatches in (1, 2, 3, 7, 12):
        check(make_schedule(name, 6, microbatches, edges=edges))


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 16])
def test_1f1b_holds_as_many_microbatches_as_known(microbatches: int) -> None:
    held = [min(microbatches, 4 - stage) for stage in range(4)]
    assert max_in_flight(make_schedule("1f1b", 4, microbatches)) == held
    assert max_in_flight(make_schedule("pipedream", 4, microbatches)) == held  # weight versions
    assert max_in_flight(make_schedule("gpipe", 4, microbatches)) == [microbatches] * 4


def test_zero_bubble_holds_as_many_microbatches_as_the_paper_says() -> None:
    ranks = 5
    h1, h2 = (make_schedule(name, ranks, 20) for name in ("zb-h1", "zb-h2"))
    assert max_in_flight(h1, until=Phase.W) == [ranks] * ranks  # p, as the first rank of 1F1B
    assert max_in_flight(h2, until=Phase.W) == [2 * ranks - 1] * ranks
    assert max_in_flight(h1) == [5, 4, 3, 2, 1]
    assert max_in_flight(h2) == [9, 7, 5, 3, 1]


def test_pipedream_is_1f1b_without_a_flush() -> None:
    continuous, flushed = make_schedule("pipedream", 3, 6), make_schedule("1f1b", 3, 6)
    assert continuous.asynchronous
    assert not flushed.asynchronous
    assert continuous.actions == flushed.actions


def test_torch_takes_these_microbatch_counts() -> None:
    refused = [m for m in range(1, 17) if not accepts("interleaved", "torch", 4, m)]
    assert refused == [9, 11, 13, 14]
    assert [m for m in range(1, 17) if accepts("interleaved", "megatron", 4, m)] == [4, 8, 12, 16]
    assert [m for m in range(1, 9) if accepts("1f1b", "torch", 4, m)] == [4, 5, 6, 7, 8]
    assert all(accepts("1f1b", "megatron", 4, m) for m in range(1, 9))
    check(make_schedule("1f1b", 4, 3))  # legal here, whatever torch's class says
    assert not accepts("pipedream", "torch", 4, 8)


def test_a_refused_count_names_its_neighbours() -> None:
    words = refusal("interleaved", "megatron", 4, 10)
    assert words == (
        "megatron's interleaved on 4 ranks does not take 10 microbatches: they must be a multiple "
        "of the ranks; take 8 or 12"
    )
    assert refusal("1f1b", "torch", 4, 3).endswith("take 4")
    assert refusal("interleaved", "torch", 4, 8) == ""
    for name in ("interleaved", "zb-h1"):
        with pytest.raises(PlanError, match=r"does not take 13 microbatches: .*; take 12 or 15"):
            make_schedule(name, 4, 13, stages_per_rank=2)


@pytest.mark.parametrize(
    ("arguments", "options", "reason"),
    [
        (("dualpipe", 2, 2), {}, "no schedule 'dualpipe'; there are gpipe, 1f1b"),
        (("gpipe", 0, 2), {}, "0 ranks, 2 microbatches and 1 stages"),
        (("gpipe", 2, 0), {}, "each must be at least 1"),
        (("gpipe", 2, 2), {"stages_per_rank": 2}, "gpipe needs stages_per_rank 1, not 2"),
        (("interleaved", 2, 2), {}, "interleaved needs stages_per_rank at least 2, not 1"),
        (("zbv", 2, 2), {"stages_per_rank": 3}, "zbv needs stages_per_rank 2, not 3"),
        (("zb-h1", 2, 2), {"stages_per_rank": 2, "edges": ((0, 1),)}, "runs a chain, not a DAG"),
        (("1f1b", 2, 2), {"edges": ((0, 1), (1, 0))}, "stage 0: its edges lead round in a cycle"),
        (("1f1b", 2, 2), {"edges": ((0, 2),)}, "stage edge 0 -> 2: there are 2 stages"),
        (("1f1b", 2, 2), {"edges": ((0, 1), (0, 1))}, "stage edge 0 -> 1 is there twice"),
        (("1f1b", 1000, 10_000_000), {}, "more than 2"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: Any, options: Any, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        make_schedule(*arguments, **options)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_ranks": 3}, "2 action lists for 3 ranks"),
        ({"num_stages": 3}, "ranks of 2 stages for 3 stages"),
        ({"num_microbatches": 0}, "0 microbatches; each must be at least 1"),
        ({"stage_rank": (0, 2)}, "stage 1 is on rank 2"),
        ({"edges": ((0, 1), (1, 0))}, "in a cycle"),
    ],
)
def test_sizes_of_a_schedule_agree(change: dict[str, Any], reason: str) -> None:
    schedule = make_schedule("1f1b", 2, 2)
    fields = {name: getattr(schedule, name) for name in schedule.__dataclass_fields__}
    with pytest.raises(PlanError, match=reason):
        Schedule(**fields | change)


def test_arrays_hold_the_actions_rank_after_rank() -> None:
    schedule = make_schedule("zb-h1", 2, 3)
    arrays = to_arrays(schedule)
    rows = np.split(np.stack(arrays[:3], axis=1), arrays.first_action[1:-1])
    assert [[tuple(action) for action in row] for row in rows] == [
        list(r) for r in schedule.actions
    ]
    assert [array.dtype for array in arrays] == [np.int32] * 3 + [np.int64]
    assert list(arrays.first_action) == [0, 9, 18]


def test_an_action_needs_what_it_reads() -> None:
    schedule = make_schedule("1f1b", 6, 1, edges=DIAMOND)
    stages = schedule.predecessors, schedule.successors
    assert texts([needs(Action(5, Phase.F, 0), *stages)]) == [["2F0", "3F0", "4F0"]]
    assert texts([needs(Action(2, Phase.I, 0), *stages)]) == [["2F0", "4B0", "5B0"]]
    assert texts([needs(Action(2, Phase.W, 0), *stages)]) == [["2B0"]]
    assert chain(3) == ((0, 1), (1, 2))
