"""Shared channels, engines and collectives, worked by hand: links carry 1 GB/s."""

import pytest

from simcore.profile import Limits
from simcore.units import GB
from tests.reference import ReferenceResult
from tests.reference_toys import MESH, STAR, collective, toy
from tests.strategies import WAYS, Play, play_reference

CONTENTIONS = ("none", "port", "ordered", "fifo", "fair")


@pytest.fixture(params=sorted(WAYS))
def play(request: pytest.FixtureRequest) -> Play:
    """Reference and compiled: both must give the numbers worked by hand."""
    return WAYS[request.param]


def windows(result: ReferenceResult) -> list[tuple[float, float]]:
    """The start and end of each transfer."""
    return [(transfer.start, transfer.end) for transfer in result.transfers]


def window(result: ReferenceResult, op: int) -> tuple[float, float]:
    """The start and end of an op."""
    return (result.start[op], result.end[op])


# shared channels


def test_two_flows_halve_a_channel_and_the_longer_one_then_has_it_alone(play):
    wires = [(0, 2, [2]), (1, 1, [2])]
    result = play(toy([1, 1, 1], wires, [0, 1, 2], links=STAR, contention="fair"))
    assert windows(result) == [(1.0, 4.0), (1.0, 3.0)]
    assert result.start[2] == 4.0


def test_a_flow_that_comes_later_takes_its_half_from_then_on(play):
    wires = [(0, 2, [2]), (1, 2, [2])]  # alone until 2, then halves until 4, then alone
    result = play(toy([1, 2, 1], wires, [0, 1, 2], links=STAR, contention="fair"))
    assert windows(result) == [(1.0, 4.0), (2.0, 5.0)]


def test_a_flow_over_two_links_gets_half_of_the_narrow_one_and_leaves_the_rest(play):
    ports = [("d0", "s0"), ("d1", "s0"), ("d2", "s1"), ("d3", "s1"), ("d4", "s2"), ("d5", "s2")]
    links = [(device, switch, 10.0, 0.0) for device, switch in ports]
    links += [("s0", "s1", 1.0, 0.0), ("s1", "s2", 2.0, 0.0)]
    wires = [(0, 2, [5]), (1, 1, [3]), (2, 3, [4])]  # over both links, over one, over the other
    case = toy([1] * 6, wires, [0, 1, 3, 2, 5, 4], links=links, contention="fair")
    assert windows(play(case)) == [(1.0, 4.0), (1.0, 3.0), (1.0, 3.0)]  # at 0.5, 0.5 and 1.5 GB/s


def test_a_flow_held_back_by_its_own_narrow_link_leaves_the_rest_to_the_others(play):
    links = [("d0", "s0", 0.25, 0.0), ("d1", "s0", 1.0, 0.0), ("d2", "s0", 1.0, 0.0)]
    wires = [(0, 1, [2]), (1, 3, [2])]  # at 0.25 and 0.75 GB/s
    result = play(toy([1, 1, 1], wires, [0, 1, 2], links=links, contention="fair"))
    assert windows(result) == [(1.0, 5.0), (1.0, 5.0)]


def test_flows_in_opposite_directions_do_not_disturb_each_other(play):
    wires = [(0, 2, [3]), (1, 2, [2])]
    case = toy([1, 1, 1, 1], wires, [0, 1, 0, 1], contention="fair")
    assert windows(play(case)) == [(1.0, 3.0), (1.0, 3.0)]


def test_an_empty_tensor_takes_only_the_latency_of_a_shared_channel(play):
    links = [("d0", "s0", 1.0, 0.0), ("d1", "s0", 1.0, 0.5), ("d2", "s0", 1.0, 0.0)]
    wires = [(0, 2, [2]), (1, 0, [2])]
    result = play(toy([1, 1, 1], wires, [0, 1, 2], links=links, contention="fair"))
    assert windows(result) == [(1.0, 3.0), (1.5, 1.5)]


def test_a_flow_shares_from_its_start_not_from_its_request(play):
    links = [("d0", "s0", 1.0, 0.0), ("d1", "s0", 1.0, 1.0), ("d2", "s0", 1.0, 0.0)]
    wires = [(0, 2, [2]), (1, 1, [2])]  # the second starts at 2, halves until 4
    result = play(toy([1, 1, 1], wires, [0, 1, 2], links=links, contention="fair"))
    assert windows(result) == [(1.0, 4.0), (2.0, 4.0)]


# engines


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        (1, [(1.0, 3.0), (3.0, 5.0), (5.0, 7.0)]),
        (2, [(1.0, 3.0), (1.0, 3.0), (3.0, 5.0)]),
        (3, [(1.0, 3.0), (1.0, 3.0), (1.0, 3.0)]),
        (0, [(1.0, 3.0), (1.0, 3.0), (1.0, 3.0)]),
    ],
)
def test_a_device_sends_as_much_at_once_as_it_has_engines(play, engines, expected):
    links = [("d0", "d1", 1.0, 0.0), ("d0", "d2", 1.0, 0.0), ("d0", "d3", 1.0, 0.0)]
    wires = [(0, 2, [1]), (0, 2, [2]), (0, 2, [3])]
    limits = {0: Limits(out_engines=engines)}
    case = toy([1] * 4, wires, [0, 1, 2, 3], links=links, contention="fair", limits=limits)
    assert windows(play(case)) == expected


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        (1, [(1.0, 3.0), (3.0, 4.0)]),
        (2, [(1.0, 4.0), (1.0, 3.0)]),
        (0, [(1.0, 4.0), (1.0, 3.0)]),
    ],
)
def test_a_device_receives_as_much_at_once_as_it_has_engines(play, engines, expected):
    wires = [(0, 2, [2]), (1, 1, [2])]
    limits = {2: Limits(in_engines=engines)}
    case = toy([1, 1, 1], wires, [0, 1, 2], links=STAR, contention="fair", limits=limits)
    assert windows(play(case)) == expected


def test_an_engine_limit_of_one_device_does_not_bind_another(play):
    wires = [(0, 2, [2]), (1, 1, [2])]
    limits = {0: Limits(in_engines=1), 1: Limits(in_engines=1)}
    case = toy([1, 1, 1], wires, [0, 1, 2], links=STAR, contention="fair", limits=limits)
    assert windows(play(case)) == [(1.0, 4.0), (1.0, 3.0)]


@pytest.mark.parametrize(("engines", "second"), [(1, (7.0, 8.0)), (2, (2.0, 3.0))])
def test_a_transfer_in_its_latency_keeps_its_engine_from_those_behind_it(play, engines, second):
    links = [("d0", "d1", 1.0, 5.0), ("d0", "d2", 1.0, 0.0)]
    wires = [(0, 1, [2]), (1, 1, [3])]
    limits = {0: Limits(out_engines=engines)}
    case = toy([1] * 4, wires, [0, 0, 1, 2], links=links, contention="fair", limits=limits)
    assert windows(play(case)) == [(6.0, 7.0), second]


def test_one_that_waits_for_a_receiver_keeps_its_place_at_the_sender(play):
    links = [(f"d{device}", "s0", 1.0, 0.0) for device in range(4)]
    wires = [(0, 4, [2]), (1, 1, [2]), (1, 1, [3])]  # 1 -> 2 waits for 0 -> 2, and 1 -> 3 behind it
    limits = {2: Limits(in_engines=1)}
    case = toy([1, 2, 1, 1], wires, [0, 1, 2, 3], links=links, contention="fair", limits=limits)
    assert windows(play(case)) == [(1.0, 5.0), (5.0, 6.0), (6.0, 7.0)]


def test_one_that_has_started_keeps_its_engine_from_an_equal_request_of_lower_id(play):
    wires = [(0, 1, [2]), (1, 1, [3])]  # op 1 ends at 1; op 0 runs after it and takes no time
    hurry = {"order": "ready", "priorities": [1, 0, 0, 0]}
    case = toy([0, 1, 1, 1], wires, [0, 0, 1, 2], links=MESH, contention="fair", **hurry)
    assert windows(play(case)) == [(2.0, 3.0), (1.0, 2.0)]


def test_more_engines_are_known_to_fair_only(play):
    limits = {0: Limits(out_engines=2)}
    wires = [(0, 2, [1]), (0, 2, [2])]
    for contention in ("port", "ordered", "fifo"):
        case = toy([1] * 3, wires, [0, 1, 2], links=MESH, contention=contention, limits=limits)
        assert windows(play(case)) == [(1.0, 3.0), (3.0, 5.0)]


# collectives: op 2 of these reads a tensor of op 0 on d0 and one of op 1 on d1

BOTH_WAYS = {0: 1.0, 1: 1.0}
SUMMED = [(0, 1, [2]), (1, 1, [2]), (2, 1, [3, 4])]


@pytest.mark.parametrize("contention", CONTENTIONS)
def test_a_collective_waits_for_all_and_takes_latency_and_duration(play, contention):
    both = {2: collective([0, 1], 2.0, 2 * GB, BOTH_WAYS, latency=0.5)}
    case = toy([1, 2, 9, 1, 3], SUMMED, [0, 1, -1, 0, 1], collectives=both, contention=contention)
    result = play(case)
    assert result.transfers == []
    assert result.start == [0.0, 0.0, 2.5, 4.5, 4.5]
    assert result.end == [1.0, 2.0, 4.5, 5.5, 7.5]
    assert result.step_time == 7.5


def test_the_request_of_a_collective_is_the_end_of_its_last_producer():
    both = {2: collective([0, 1], 2.0, 2 * GB, BOTH_WAYS, latency=0.5)}
    result = play_reference(toy([1, 2, 9, 1, 3], SUMMED, [0, 1, -1, 0, 1], collectives=both))
    assert result.collectives == [(2.0, 2.5, 4.5)]
    assert play_reference(toy([1, 1], [(0, 1, [1])], [0, 1])).collectives == []


@pytest.mark.parametrize("contention", CONTENTIONS)
def test_a_collective_that_reads_nothing_begins_at_once(play, contention):
    alone = {0: collective([0, 1], 2.0, 2 * GB, BOTH_WAYS, latency=0.5)}
    case = toy([9, 1], [(0, 1, [1])], [-1, 1], collectives=alone, contention=contention)
    assert play(case).start == [0.5, 2.5]


@pytest.mark.parametrize("contention", CONTENTIONS)
def test_a_collective_is_no_work_of_a_device_or_a_host(play, contention):
    both = {1: collective([0, 1], 4.0, GB, BOTH_WAYS)}
    wires = [(0, 1, [1])]
    issue = {"launch_seconds": [1, 100, 1, 1], "contention": contention}
    case = toy([1, 9, 1, 1], wires, [0, -1, 0, 1], collectives=both, **issue)
    assert play(case).start == [1.0, 2.0, 2.0, 3.0]


@pytest.mark.parametrize("contention", CONTENTIONS)
@pytest.mark.parametrize(("duration", "volume"), [(0.0, GB), (3.0, 0.0), (0.0, 0.0)])
def test_a_collective_without_volume_or_duration_takes_its_latency(
    play, contention, duration, volume
):
    both = {2: collective([0, 1], duration, volume, latency=0.5)}
    case = toy([1, 2, 9, 1, 1], SUMMED, [0, 1, -1, 0, 1], collectives=both, contention=contention)
    result = play(case)
    assert window(result, 2) == (2.5, 2.5)
    assert result.start[3:] == [2.5, 2.5]


def test_a_collective_follows_a_collective(play):
    both = {1: collective([0, 1], 2.0, GB), 2: collective([0, 1], 3.0, GB, latency=0.5)}
    wires = [(0, 1, [1]), (1, 1, [2]), (2, 1, [3])]
    assert play(toy([1, 9, 9, 1], wires, [0, -1, -1, 1], collectives=both)).start == [
        0,
        1,
        3.5,
        6.5,
    ]


def test_a_tensor_goes_to_a_collective_and_to_another_device(play):
    both = {1: collective([0, 1], 2.0, 2 * GB, {1: 1.0})}
    result = play(toy([1, 9, 1], [(0, 1, [1, 2])], [0, -1, 1], collectives=both))
    assert window(result, 1) == (1.0, 3.0)
    assert windows(result) == [(1.0, 2.0)]


def test_collectives_touch_no_memory(play):
    both = {2: collective([0, 1], 2.0, 2 * GB, BOTH_WAYS)}
    wires = [(0, 5, [2]), (1, 2, [2]), (2, 3, [4, 5])]
    case = toy([1, 1, 9, 1, 1, 1], wires, [0, 1, -1, 0, 0, 1], collectives=both)
    assert play(case).allocated == [5 * 10**9, 3 * 10**9]  # not 8 where d0 reads what came back


# collectives beside copies


@pytest.mark.parametrize(
    ("usage", "duration", "end", "copied"),
    [
        (1.0, 2.0, 4.0, 3.0),  # half each until 3, the rest of 1 GB at full rate
        (0.5, 1.0, 3.0, 2.5),  # 2/3 GB/s each until 2.5, the rest of 1 GB at 2 GB/s
        (1.0, 8.0, 9.0, 1 + 4 / 3),  # never more than 1/4 GB/s: 3/4 are left to the copy
    ],
)
def test_a_collective_shares_channels_with_a_copy_by_rate(play, usage, duration, end, copied):
    both = {1: collective([0, 1], duration, 2 * GB, {0: usage})}
    wires = [(0, 1, [1]), (0, 1, [2])]
    result = play(toy([1, 9, 1], wires, [0, -1, 1], collectives=both, contention="fair"))
    assert window(result, 1) == pytest.approx((1.0, end))
    assert windows(result) == [pytest.approx((1.0, copied))]


def test_two_collectives_share_channels(play):
    both = {1: collective([0, 1], 2.0, 2 * GB, {0: 1.0}), 2: collective([0, 1], 1.0, GB, {0: 1.0})}
    wires = [(0, 1, [1]), (0, 1, [2])]
    result = play(toy([1, 9, 9], wires, [0, -1, -1], collectives=both, contention="fair"))
    assert (window(result, 1), window(result, 2)) == ((1.0, 4.0), (1.0, 3.0))


@pytest.mark.parametrize("contention", ["none", "port"])
def test_a_collective_disturbs_no_copy_where_channels_are_not_held(play, contention):
    both = {1: collective([0, 1], 2.0, 2 * GB, {0: 1.0})}
    wires = [(0, 1, [1]), (0, 1, [2])]
    result = play(toy([1, 9, 1], wires, [0, -1, 1], collectives=both, contention=contention))
    assert window(result, 1) == (1.0, 3.0)
    assert windows(result) == [(1.0, 2.0)]


@pytest.mark.parametrize("contention", ["ordered", "fifo"])
def test_a_transfer_goes_before_a_collective_of_the_same_producer(play, contention):
    both = {1: collective([0, 1], 2.0, 2 * GB, {0: 1.0})}
    wires = [(0, 1, [1]), (0, 1, [2])]
    result = play(toy([1, 9, 1], wires, [0, -1, 1], collectives=both, contention=contention))
    assert windows(result) == [(1.0, 2.0)]
    assert window(result, 1) == (2.0, 4.0)


@pytest.mark.parametrize("contention", ["ordered", "fifo"])
def test_a_transfer_waits_for_a_collective_that_holds_its_channel(play, contention):
    both = {1: collective([0, 1], 2.0, 2 * GB, {0: 1.0}, latency=0.5)}
    wires = [(0, 1, [1]), (2, 1, [3])]
    result = play(toy([1, 9, 1, 1], wires, [0, -1, 0, 1], collectives=both, contention=contention))
    assert window(result, 1) == (1.5, 3.5)
    assert windows(result) == [(3.5, 4.5)]


@pytest.mark.parametrize("contention", ["ordered", "fifo"])
def test_a_collective_holds_all_its_channels_or_none(play, contention):
    both = {2: collective([0, 1, 2], 2.0, 2 * GB, {0: 1.0, 2: 1.0})}  # out of d0 and out of d1
    wires = [(0, 4, [4]), (0, 0, [2]), (1, 1, [2]), (3, 1, [5])]
    placement = [0, 1, -1, 1, 2, 0]  # 0 -> 2 is under way until 5
    rest = {"collectives": both, "links": STAR, "contention": contention}
    result = play(toy([1, 1, 9, 1, 1, 1], wires, placement, **rest))
    assert window(result, 2) == (5.0, 7.0)
    assert windows(result) == [(1.0, 5.0), (7.0, 8.0)]  # 1 -> 0 came after the collective


def test_plan_order_lets_a_late_collective_block_an_early_transfer(play):
    both = {1: collective([0, 1], 2.0, 2 * GB, {1: 1.0})}  # the way from d1 to d0
    wires = [(0, 1, [1]), (2, 1, [3])]
    ready = {"order": "ready", "collectives": both}
    ordered = play(toy([5, 9, 1, 1], wires, [0, -1, 1, 0], contention="ordered", **ready))
    assert windows(ordered) == [(7.0, 8.0)]
    assert window(ordered, 1) == (5.0, 7.0)
    fifo = play(toy([5, 9, 1, 1], wires, [0, -1, 1, 0], contention="fifo", **ready))
    assert windows(fifo) == [(1.0, 2.0)]
    assert window(fifo, 1) == (5.0, 7.0)


def test_a_collective_is_planned_by_its_last_producer(play):
    both = {3: collective([0, 1], 2.0, 2 * GB, {0: 1.0})}
    wires = [(0, 1, [3]), (1, 1, [4]), (2, 1, [3])]  # the transfer's producer is before the last
    case = toy([1, 5, 1, 9, 1], wires, [0, 0, 1, -1, 1], collectives=both, contention="ordered")
    result = play(case)
    assert windows(result) == [(6.0, 7.0)]
    assert window(result, 3) == (7.0, 9.0)
