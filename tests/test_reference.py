"""The slow simulator against problems worked by hand: links carry 1 GB/s, tensors are whole GB."""

import pytest

from simcore.graph import GraphBuilder, OpClass, Out, Phase
from tests.reference import ReferenceResult
from tests.strategies import WAYS, Play, build_cluster, build_cost, timed, toy

STAR = (("d0", "s0", 1.0, 0.0), ("d1", "s0", 1.0, 0.0), ("d2", "s0", 1.0, 0.0))
MESH = (("d0", "d1", 1.0, 0.0), ("d0", "d2", 1.0, 0.0), ("d1", "d2", 1.0, 0.0))


@pytest.fixture(params=sorted(WAYS))
def play(request: pytest.FixtureRequest) -> Play:
    """Reference and compiled: both must give the numbers worked by hand."""
    return WAYS[request.param]


def windows(result: ReferenceResult) -> list[tuple[float, float]]:
    """The start and end of each transfer."""
    return [(transfer.start, transfer.end) for transfer in result.transfers]


# transfers


def test_a_transfer_waits_its_latency_and_then_takes_bytes_over_bandwidth(play):
    case = toy([1, 2], [(0, 3, [1])], [0, 1], links=[("d0", "d1", 1.0, 0.5)])
    result = play(case)
    assert result.transfers == [(0, 0, 1, 1.0, 1.5, 4.5)]
    assert result.start == [0.0, 4.5]
    assert result.end == [1.0, 6.5]
    assert result.step_time == 6.5


def test_nothing_travels_between_ops_of_one_device(play):
    result = play(toy([1, 2], [(0, 3, [1])], [1, 1]))
    assert result.transfers == []
    assert result.start == [0.0, 1.0]


def test_a_tensor_is_sent_once_to_a_device_with_two_consumers(play):
    result = play(toy([1, 1, 1], [(0, 2, [1, 2])], [0, 1, 1]))
    assert windows(result) == [(1.0, 3.0)]
    assert result.start == [0.0, 3.0, 4.0]


def test_a_tensor_is_sent_to_each_device_that_needs_it_one_after_the_other(play):
    result = play(toy([1, 1, 1], [(0, 2, [1, 2])], [0, 2, 1], links=MESH))
    assert [transfer.target for transfer in result.transfers] == [1, 2]
    assert windows(result) == [(1.0, 3.0), (3.0, 5.0)]
    assert result.start == [0.0, 5.0, 3.0]


def test_a_control_edge_takes_only_the_latency(play):
    result = play(toy([1, 1], [(0, 0, [1])], [0, 1], links=[("d0", "d1", 1.0, 0.5)]))
    assert result.transfers == [(0, 0, 1, 1.0, 1.5, 1.5)]
    assert result.start == [0.0, 1.5]


def test_latencies_of_a_route_add_and_the_narrowest_link_sets_the_pace(play):
    links = [("d0", "s0", 2.0, 0.5), ("d1", "s0", 1.0, 0.25)]
    assert windows(play(toy([1, 1], [(0, 2, [1])], [0, 1], links=links))) == [(1.75, 3.75)]


# contention


@pytest.mark.parametrize(
    ("contention", "expected"),
    [
        ("none", [(1.0, 3.0), (1.0, 3.0)]),
        ("port", [(1.0, 3.0), (1.0, 3.0)]),
        ("fifo", [(1.0, 3.0), (3.0, 5.0)]),
    ],
)
def test_only_fifo_makes_two_sources_share_the_channel_into_their_target(
    play, contention, expected
):
    wires = [(0, 2, [2]), (1, 2, [2])]
    result = play(toy([1, 1, 1], wires, [0, 1, 2], links=STAR, contention=contention))
    assert windows(result) == expected
    assert result.start[2] == expected[1][1]


@pytest.mark.parametrize(
    ("contention", "expected"),
    [
        ("none", [(1.0, 3.0), (1.0, 3.0)]),
        ("port", [(1.0, 3.0), (3.0, 5.0)]),
        ("fifo", [(1.0, 3.0), (3.0, 5.0)]),
    ],
)
def test_a_device_sends_one_tensor_at_a_time_unless_nothing_is_held(play, contention, expected):
    wires = [(0, 2, [1]), (0, 2, [2])]
    result = play(toy([1, 1, 1], wires, [0, 1, 2], links=MESH, contention=contention))
    assert windows(result) == expected


def test_the_two_directions_of_a_link_do_not_disturb_each_other(play):
    wires = [(0, 2, [3]), (1, 2, [2])]
    assert windows(play(toy([1, 1, 1, 1], wires, [0, 1, 0, 1]))) == [(1.0, 3.0), (1.0, 3.0)]


@pytest.mark.parametrize(
    ("contention", "second"), [("none", (2.0, 3.0)), ("port", (7.0, 8.0)), ("fifo", (7.0, 8.0))]
)
def test_a_transfer_in_its_latency_blocks_those_behind_it(play, contention, second):
    links = [("d0", "d1", 1.0, 5.0), ("d0", "d2", 1.0, 0.0)]
    wires = [(0, 1, [2]), (1, 1, [3])]
    result = play(toy([1, 1, 1, 1], wires, [0, 0, 1, 2], links=links, contention=contention))
    assert windows(result) == [(6.0, 7.0), second]


def test_a_waiting_transfer_blocks_an_engine_that_it_does_not_hold_yet(play):
    links = [(f"d{device}", "s0", 1.0, 0.0) for device in range(4)]
    wires = [(0, 4, [2]), (1, 1, [2]), (1, 1, [3])]  # 1 -> 2 waits for 0 -> 2, and 1 -> 3 behind it
    result = play(toy([1, 2, 1, 1], wires, [0, 1, 2, 3], links=links, contention="fifo"))
    assert windows(result) == [(1.0, 5.0), (5.0, 6.0), (6.0, 7.0)]


def test_a_port_serves_in_plan_order_and_fifo_in_order_of_request(play):
    wires = [(0, 1, [2]), (1, 1, [3])]
    hurry = {"order": "ready", "priorities": [1, 0, 0, 0]}  # op 1 runs before op 0
    port = play(toy([1, 1, 1, 1], wires, [0, 0, 1, 1], contention="port", **hurry))
    assert windows(port) == [(2.0, 3.0), (3.0, 4.0)]
    fifo = play(toy([1, 1, 1, 1], wires, [0, 0, 1, 1], contention="fifo", **hurry))
    assert windows(fifo) == [(2.0, 3.0), (1.0, 2.0)]


def test_fifo_serves_the_earlier_request_first_even_if_its_id_is_greater(play):
    wires = [(0, 1, [2]), (1, 10, [2]), (1, 1, [2])]
    result = play(toy([5, 1, 1], wires, [0, 1, 2], links=STAR, contention="fifo"))
    assert windows(result) == [(12.0, 13.0), (1.0, 11.0), (11.0, 12.0)]


def test_equal_requests_are_served_by_transfer_id(play):
    wires = [(0, 3, [2]), (1, 1, [2])]
    result = play(toy([1, 1, 1], wires, [0, 1, 2], links=STAR, contention="fifo"))
    assert windows(result) == [(1.0, 4.0), (4.0, 5.0)]


# order of computes


def test_zero_length_ops_follow_each_other_at_one_time(play):
    result = play(toy([0, 0, 0, 1], [(0, 1, [1]), (1, 1, [2]), (2, 1, [3])], [0, 0, 0, 0]))
    assert result.start == [0.0, 0.0, 0.0, 0.0]
    assert result.end == [0.0, 0.0, 0.0, 1.0]


def test_what_a_zero_length_op_sends_arrives_in_a_later_round_of_the_same_time(play):
    wires = [(0, 0, [1])]  # op 1 is more urgent than op 2, but op 2 is there a round earlier
    result = play(toy([0, 1, 2], wires, [0, 1, 1], order="ready", priorities=[0, 0, 1]))
    assert result.start == [0.0, 2.0, 0.0]


@pytest.mark.parametrize(("order", "start"), [("program", [0, 5, 6]), ("ready", [0, 5, 0])])
def test_ready_order_runs_what_is_there_and_program_order_waits(play, order, start):
    assert play(toy([5, 1, 1], [(0, 0, [1])], [1, 0, 0], order=order)).start == start


def test_ready_order_takes_priority_then_arrival_then_program_order(play):
    wires = [(1, 0, [3])]  # op 3 arrives at 1, after ops 2 and 4 of equal priority
    case = toy([3, 1, 1, 1, 1, 1], wires, [0, 1, 0, 0, 0, 0], order="ready")
    assert play(case).start == [0, 0, 3, 6, 4, 5]
    urgent = case._replace(priorities=[0, 0, 1, 0, 1, 1])
    assert play(urgent).start == [0, 0, 4, 3, 5, 6]


# hosts


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"host": "one"}, [3, 4]),
        ({"host": "per_rank"}, [3, 1]),
        ({"launch": "graph"}, [0, 0]),
    ],
)
def test_one_host_issues_to_all_devices_in_turn(play, settings, start):
    assert play(toy([1, 1], [], [0, 1], launch_seconds=[3, 1], **settings)).start == start


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"host": "one"}, [1, 7]),
        ({"host": "per_rank"}, [1, 1]),
        ({"launch": "graph"}, [0, 5]),
    ],
)
def test_a_sync_op_blocks_its_host_until_it_has_ended(play, settings, start):
    assert play(toy([5, 1], [], [0, 1], sync=[0], launch_seconds=[1, 1], **settings)).start == start


def test_a_cpu_runs_its_ops_on_the_host_which_so_issues_nothing_else(play):
    kinds = ("CPU-2x-Xeon-E5-2698v4", "V100-SXM2-16GB")
    case = toy([5, 1], [], [0, 1], launch_seconds=[1, 1])
    case = case._replace(
        cluster=build_cluster(case.network._replace(kinds=kinds)),
        cost=build_cost([[5, 5], [1, 1]], [[0, 0], [1, 1]], kinds, case.job),
    )
    assert play(case).start == [0, 6]


def test_issue_runs_ahead_of_a_busy_device(play):
    assert play(toy([10, 1, 1], [], [0, 0, 0], launch_seconds=[1, 1, 1])).start == [1, 11, 12]


# memory


def test_a_tensor_is_held_from_its_producer_to_its_last_local_use(play):
    wires = [(0, 3, [1]), (1, 2, [2]), (2, 1, [3])]
    assert play(toy([1, 1, 1, 1], wires, [0, 0, 0, 0])).allocated == [5 * 10**9, 0]
    assert play(toy([1, 1, 1, 1], wires, [0, 0, 1, 1])).allocated == [5 * 10**9, 3 * 10**9]


def test_a_received_tensor_is_held_from_its_first_consumer_only(play):
    wires = [(0, 4, [3]), (1, 3, [2])]  # both reach device 1; the first is used last
    assert play(toy([1, 1, 1, 1], wires, [0, 0, 1, 1])).allocated == [4 * 10**9, 4 * 10**9]


def test_a_tensor_that_nobody_reads_counts_while_its_producer_runs(play):
    assert play(toy([1, 1], [(0, 3, []), (1, 2, [])], [0, 0])).allocated == [3 * 10**9, 0]


def test_ready_order_walks_memory_in_order_of_start(play):
    case = toy([1, 1, 1, 1], [(0, 4, [2]), (1, 4, [3])], [0, 0, 0, 0])
    assert play(case).allocated == [8 * 10**9, 0]
    in_pairs = {"order": "ready", "priorities": [0, 1, 0, 1]}
    case = toy([1, 1, 1, 1], [(0, 4, [2]), (1, 4, [3])], [0, 0, 0, 0], **in_pairs)
    assert play(case).allocated == [4 * 10**9, 0]


def test_an_in_place_op_needs_no_second_storage(play):
    def allocated(in_place: bool) -> list[int]:
        builder = GraphBuilder("g")
        (x,) = builder.outputs(builder.op("make", outputs=[Out(400)]))
        changed = Out(400, storage_of=x if in_place else None)
        (y,) = builder.outputs(builder.op("relu", inputs=[x], outputs=[changed]))
        builder.op("use", inputs=[y])
        return play(timed(builder, [1, 1, 1], [0, 0, 0])).allocated

    assert allocated(in_place=True) == [400, 0]
    assert allocated(in_place=False) == [800, 0]


def test_a_view_keeps_its_base_alive_and_travels_as_its_own_bytes(play):
    builder = GraphBuilder("g")
    (base,) = builder.outputs(builder.op("make", outputs=[Out(400)]))
    slice_op = builder.op(
        "slice", op_class=OpClass.VIEW, inputs=[base], outputs=[Out(100, storage_of=base)]
    )
    (view,) = builder.outputs(slice_op)
    builder.op("other", outputs=[Out(50)])
    builder.op("use", inputs=[view])
    assert play(timed(builder, [1, 0, 1, 1], [0, 0, 0, 0])).allocated == [450, 0]
    assert play(timed(builder, [1, 0, 1, 1], [0, 0, 0, 1])).allocated == [400, 100]


def test_a_parameter_is_held_once_on_each_device_that_reads_it(play):
    builder = GraphBuilder("g")
    weight = builder.parameter("w", 1000)
    builder.parameter("unused", 5000)
    for op in range(3):
        builder.op(f"o{op}", inputs=[weight])
    assert play(timed(builder, [1, 1, 1], [0, 0, 1])).allocated == [1000, 1000]
    assert play(timed(builder, [1, 1, 1], [0, 0, 0])).allocated == [1000, 0]


def test_an_update_holds_optimizer_state_and_its_output_is_the_parameter(play):
    builder = GraphBuilder("g")
    weight = builder.parameter("w", 1000)
    (grad,) = builder.outputs(builder.op("backward", inputs=[weight], outputs=[Out(1000)]))
    builder.op(
        "update",
        phase=Phase.U,
        op_class=OpClass.UPDATE,
        inputs=[weight, grad],
        outputs=[Out(1000, storage_of=weight)],
        elements=250,
    )
    assert play(timed(builder, [1, 1], [0, 0])).allocated == [1000 + 250 * 8 + 1000, 0]


def test_workspace_counts_while_its_op_runs_and_resident_bytes_all_the_time(play):
    builder = GraphBuilder("g")
    builder.op("a", workspace=300, resident=7)
    builder.op("b", workspace=200, outputs=[Out(50)])
    builder.op("c", resident=70)
    assert play(timed(builder, [1, 1, 1], [0, 0, 0])).allocated == [377, 0]
    assert play(timed(builder, [1, 1, 1], [0, 0, 1])).allocated == [307, 70]


def test_equal_input_gives_an_equal_result(play):
    case = toy([1, 2, 3], [(0, 3, [1, 2])], [0, 1, 0], links=[("d0", "d1", 3.0, 0.1)])
    assert play(case) == play(case)
