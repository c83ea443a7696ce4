"""What a result says of a step: where the time of each device goes, and what made it long."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from simcore.describe import describe
from simcore.errors import DeadlockError
from simcore.result import PathStep, Result
from simcore.simulation import run_placement
from tests.reference_toys import random_toy
from tests.strategies import (
    ALL_SETTINGS,
    Case,
    build_cluster,
    build_cost,
    cases,
    compiled_problem,
    draw_busy_case,
    random_case,
    seeded,
    toy,
)

SEED, NUM_CASES = 21, 300
STAR = (("d0", "s0", 1.0, 0.0), ("d1", "s0", 1.0, 0.0), ("d2", "s0", 2.0, 0.0))


def result_of(case: Case) -> Result:
    problem = compiled_problem(case)
    return describe(problem, run_placement(problem, case.placement, case.priorities))


def uses(case: Case) -> list[tuple[float, float, float, float]]:
    """(busy, communication, launch, bubble) of each device."""
    return [(u.busy, u.communication, u.launch, u.bubble) for u in result_of(case).devices]


def path(case: Case) -> list[tuple[Any, ...]]:
    return [tuple(step) for step in result_of(case).critical_path]


# where the time goes, by hand


def test_waiting_for_a_transfer_is_communication_and_for_its_producer_a_bubble():
    case = toy([1, 2], [(0, 3, [1])], [0, 1], links=[("d0", "d1", 1.0, 0.5)])
    assert uses(case) == [(1.0, 0.0, 0.0, 5.5), (2.0, 3.5, 0.0, 1.0)]


def test_a_transfer_behind_compute_is_not_exposed():
    case = toy([1, 9, 1], [(0, 3, [2])], [0, 1, 1])
    assert uses(case) == [(1.0, 0.0, 0.0, 9.0), (10.0, 0.0, 0.0, 0.0)]


def test_only_the_exposed_part_of_a_transfer_counts():
    case = toy([1, 2, 1], [(0, 3, [2])], [0, 1, 1])  # there at 4, device 1 is busy until 2
    assert uses(case)[1] == (3.0, 2.0, 0.0, 0.0)


def test_waiting_in_a_queue_for_a_channel_is_communication():
    case = toy([1, 1], [(0, 3, [1]), (0, 2, [1])], [0, 1])
    assert uses(case)[1] == (1.0, 5.0, 0.0, 1.0)


def test_waiting_for_the_host_is_launch():
    case = toy([1, 1], [], [0, 0], launch_seconds=[1, 3])
    assert uses(case) == [(2.0, 0.0, 3.0, 0.0), (0.0, 0.0, 0.0, 5.0)]


def test_waiting_for_the_host_after_the_inputs_are_there_is_launch_too():
    case = toy([1, 1], [(0, 2, [1])], [0, 1], launch_seconds=[0, 5])  # there at 3, issued at 5
    assert uses(case)[1] == (1.0, 2.0, 2.0, 1.0)


def test_a_device_that_is_done_has_a_bubble():
    assert uses(toy([1, 4], [], [0, 1])) == [(1.0, 0.0, 0.0, 3.0), (4.0, 0.0, 0.0, 0.0)]


def test_an_inline_transfer_is_communication_of_both_devices():
    links = [("d0", "d1", 1.0, 0.5)]
    case = toy([1, 2], [(0, 3, [1])], [0, 1], links=links, p2p="inline")
    assert uses(case) == [(1.0, 3.5, 0.0, 2.0), (2.0, 3.5, 0.0, 1.0)]


def test_waiting_for_the_other_stream_before_an_inline_transfer_is_a_bubble():
    case = toy([1, 3, 1], [(0, 2, [2])], [0, 1, 1], p2p="inline")  # sent from 3 to 5
    assert uses(case) == [(1.0, 2.0, 0.0, 3.0), (4.0, 2.0, 0.0, 0.0)]


def test_waiting_for_the_host_before_an_inline_transfer_is_launch():
    case = toy([1, 1, 1], [(0, 2, [2])], [0, 0, 1], launch_seconds=[0, 3, 0], p2p="inline")
    assert uses(case) == [(2.0, 2.0, 2.0, 1.0), (1.0, 2.0, 3.0, 1.0)]  # o1 from 3, sent from 4


def test_a_transfer_that_waits_for_its_receive_is_a_bubble_until_then():
    case = toy([1, 3, 1], [(0, 2, [2])], [0, 1, 1], p2p="rendezvous")  # sent from 3 to 5
    assert uses(case) == [(1.0, 0.0, 0.0, 5.0), (4.0, 2.0, 0.0, 0.0)]


# where the time goes, on any problem


def assert_parts_add_up(result: Result, label: str) -> None:
    for use in result.devices:
        parts = (use.busy, use.communication, use.launch, use.bubble)
        assert min(parts) >= 0.0, f"{label}: {use}"
        assert sum(parts) == pytest.approx(result.step_time, rel=1e-9, abs=1e-15), f"{label}: {use}"


@pytest.mark.parametrize("options", ALL_SETTINGS, ids=lambda s: f"{s.order}-{s.contention}")
def test_the_parts_of_a_device_add_up_to_the_step_time(options):
    for index in range(NUM_CASES // len(ALL_SETTINGS) + 1):
        case = random_case(np.random.default_rng([SEED, index]))._replace(settings=options)
        assert_parts_add_up(result_of(case), f"case {index}")


@given(cases())
@settings(deadline=None, max_examples=60)
def test_the_parts_of_a_device_add_up_on_shrinking_problems(case):
    assert_parts_add_up(result_of(case), str(case.settings))


# what made it long, by hand


def test_the_path_leads_from_a_producer_over_its_transfer_to_the_reader():
    case = toy([1, 2], [(0, 3, [1])], [0, 1], links=[("d0", "d1", 1.0, 0.5)])
    assert path(case) == [
        ("compute", "o0", "d0", 0.0, 1.0),
        ("transfer", "o0:0", "d0 -> d1", 1.0, 4.5),
        ("compute", "o1", "d1", 4.5, 6.5),
    ]


def test_the_path_takes_the_input_that_came_last():
    wires = [(0, 4, [2]), (1, 1, [2])]
    case = toy([1, 2, 1], wires, [0, 1, 2], links=STAR, contention="none")
    assert [step[1] for step in path(case)] == ["o0", "o0:0", "o2"]
    slow = toy([1, 9, 1], wires, [0, 1, 2], links=STAR, contention="none")
    assert [step[1] for step in path(slow)] == ["o1", "o1:0", "o2"]


def test_a_transfer_on_the_path_includes_its_time_in_the_queue():
    wires = [(0, 4, [2]), (1, 1, [2])]
    case = toy([1, 2, 1], wires, [0, 1, 2], links=STAR, contention="fifo")
    assert path(case)[1] == ("transfer", "o1:0", "d1 -> d2", 2.0, 6.0)  # behind o0:0 until 5


def test_the_path_follows_the_device_where_an_op_waits_for_its_turn():
    case = toy([1, 9, 1], [(0, 3, [2])], [0, 1, 1])
    assert [step[1] for step in path(case)] == ["o1", "o2"]


def test_the_path_begins_with_the_host_where_an_op_waits_to_be_issued():
    assert path(toy([1, 1], [], [0, 0], launch_seconds=[1, 3])) == [
        ("launch", "o1", "host", 0.0, 4.0),
        ("compute", "o1", "d0", 4.0, 5.0),
    ]


def test_the_path_goes_through_the_op_that_the_host_waited_for():
    case = toy([5, 1, 1], [], [0, 1, 1], sync=[0], launch_seconds=[1, 1, 2])
    assert path(case) == [
        ("launch", "o0", "host", 0.0, 1.0),
        ("compute", "o0", "d0", 1.0, 6.0),
        ("launch", "o2", "host", 6.0, 9.0),
        ("compute", "o2", "d1", 9.0, 10.0),
    ]


def test_a_host_of_its_own_waits_for_no_op_of_another_device():
    case = toy([1, 1, 1], [], [0, 1, 1], sync=[0], launch_seconds=[1, 1, 8], host="per_rank")
    assert path(case) == [
        ("launch", "o2", "host", 0.0, 9.0),
        ("compute", "o2", "d1", 9.0, 10.0),
    ]


def test_the_path_goes_through_an_op_on_the_cpu():
    kinds = ("CPU-2x-Xeon-E5-2698v4", "V100-SXM2-16GB")
    case = toy([5, 1], [], [0, 1], launch_seconds=[1, 1])
    case = case._replace(
        cluster=build_cluster(case.network._replace(kinds=kinds)),
        cost=build_cost([[5, 5], [1, 1]], [[0, 0], [1, 1]], kinds, case.job),
    )
    assert path(case) == [
        ("compute", "o0", "d0", 0.0, 5.0),
        ("launch", "o1", "host", 5.0, 6.0),
        ("compute", "o1", "d1", 6.0, 7.0),
    ]


def test_an_op_of_no_time_does_not_bend_the_path_backwards():
    wires = [(0, 0, [2])]  # op 2 takes no time and runs before op 1, which starts at once after it
    case = toy([0, 5, 0], wires, [0, 0, 0], order="ready", priorities=[0, 1, 0])
    assert path(case) == [
        ("compute", "o0", "d0", 0.0, 0.0),
        ("compute", "o2", "d0", 0.0, 0.0),
        ("compute", "o1", "d0", 0.0, 5.0),
    ]


@pytest.mark.parametrize("p2p", ["inline", "rendezvous"])
def test_the_path_goes_through_the_stream_that_a_transfer_waited_for(p2p):
    case = toy([1, 3, 1], [(0, 2, [2])], [0, 1, 1], p2p=p2p)
    assert path(case) == [
        ("compute", "o1", "d1", 0.0, 3.0),
        ("transfer", "o0:0", "d0 -> d1", 3.0, 5.0),
        ("compute", "o2", "d1", 5.0, 6.0),
    ]


def test_the_path_goes_through_the_stream_of_the_sender_of_an_inline_transfer():
    case = toy([1, 3, 1], [(0, 2, [2])], [0, 0, 1], p2p="inline")
    assert [step[1] for step in path(case)] == ["o0", "o1", "o0:0", "o2"]


def test_the_path_goes_through_the_host_that_issued_a_transfer():
    wires, launches = [(0, 2, [2])], [0, 1, 0]
    case = toy(
        [1, 5, 1], wires, [0, 2, 1], links=STAR, sync=[1], launch_seconds=launches, p2p="rendezvous"
    )
    assert path(case) == [
        ("launch", "o1", "host", 0.0, 1.0),
        ("compute", "o1", "d2", 1.0, 6.0),
        ("transfer", "o0:0", "d0 -> d1", 6.0, 8.0),
        ("compute", "o2", "d1", 8.0, 9.0),
    ]


# what made it long, on any problem


def assert_path_is_whole(result: Result, label: str) -> None:
    steps = result.critical_path
    assert steps[0].start == 0.0, label
    assert steps[-1].end == result.step_time, label
    for before, after in itertools.pairwise(steps):
        assert before.end == after.start, label
    for step in steps:
        assert step.end >= step.start, label


@pytest.mark.parametrize("options", ALL_SETTINGS, ids=lambda s: f"{s.order}-{s.contention}")
def test_the_path_has_no_gap_from_the_beginning_to_the_end_of_the_step(options):
    for index in range(NUM_CASES // len(ALL_SETTINGS) + 1):
        case = random_case(np.random.default_rng([SEED, 1, index]))._replace(settings=options)
        assert_path_is_whole(result_of(case), f"case {index}")


def test_parts_add_up_and_the_path_has_no_gap_whatever_is_sent_and_summed():
    ran = 0
    for index in range(2 * NUM_CASES):
        rng = np.random.default_rng([SEED, 2, index])
        discipline = ("none", "port", "ordered", "fifo", "fair")[index % 5]
        case = random_toy(rng) if index % 2 else draw_busy_case(seeded(rng), discipline)
        try:
            result = result_of(case)
        except DeadlockError:
            continue
        ran += 1
        assert_parts_add_up(result, f"case {index}")
        assert_path_is_whole(result, f"case {index}")
    assert ran > NUM_CASES


@given(cases())
@settings(deadline=None, max_examples=60)
def test_the_path_has_no_gap_on_shrinking_problems(case):
    assert_path_is_whole(result_of(case), str(case.settings))


@given(cases())
@settings(deadline=None, max_examples=60)
def test_the_path_consists_of_tasks_that_ran_when_it_says(case):
    result, graph = result_of(case), case.graph
    run = result.run
    assert run is not None
    names = case.cluster.device_names
    computes = {
        PathStep("compute", name, names[run.placement[op]], run.start[op], run.end[op])
        for op, name in enumerate(graph.op_names)
    }
    transfers = {
        PathStep(
            "transfer", graph.tensor_names[t.tensor], f"{names[t.source]} -> {names[t.target]}",
            t.request, t.end,
        )
        for t in run.transfers()
    }  # fmt: skip
    for step in result.critical_path:
        assert step.kind == "launch" or step in computes | transfers


# the rest


def test_transfers_are_records_in_the_order_of_their_ids():
    case = toy([1, 1, 1], [(0, 2, [1, 2])], [0, 2, 1], links=STAR)
    run = result_of(case).run
    assert run is not None
    assert [tuple(transfer) for transfer in run.transfers()] == [
        (0, 2 * 10**9, 0, 1, 1.0, 1.0, 3.0),
        (0, 2 * 10**9, 0, 2, 1.0, 3.0, 5.0),
    ]


def test_throughput_is_samples_over_seconds_and_unknown_without_a_batch():
    result = result_of(toy([4], [], [0]))
    assert replace(result, samples=8).throughput == 2.0
    assert replace(result, samples=None).throughput is None
    assert replace(result, samples=8, step_time=0.0).throughput is None


def test_overflow_is_summed_over_the_devices_that_are_too_full():
    result = result_of(toy([1, 1], [], [0, 1]))
    small, large = result.devices
    devices = (
        replace(small, reserved=small.capacity + 5),
        replace(large, reserved=large.capacity + 7),
    )
    assert result.overflow == 0
    assert replace(result, devices=devices).overflow == 12
