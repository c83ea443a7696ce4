"""Inline and rendezvous transfers and what messages cost hosts, worked by hand: links carry 1 GB/s.

In most problems op 0 on d0 takes 1 s and sends what it makes to d1.
"""

import pytest

from simcore.errors import PlanError
from simcore.profile import Limits
from tests.reference import ReferenceResult
from tests.reference_toys import STAR, toy
from tests.strategies import WAYS, Play

SLOW_HOSTS = {0: Limits(message_overhead=1.0), 1: Limits(message_overhead=0.25)}


@pytest.fixture(params=sorted(WAYS))
def play(request: pytest.FixtureRequest) -> Play:
    """Reference and compiled: both must give the numbers worked by hand."""
    return WAYS[request.param]


def windows(result: ReferenceResult) -> list[tuple[float, float]]:
    """The start and end of each transfer."""
    return [(transfer.start, transfer.end) for transfer in result.transfers]


def requests(result: ReferenceResult) -> list[float]:
    """When each transfer was requested."""
    return [transfer.request for transfer in result.transfers]


# inline


def test_an_inline_transfer_occupies_both_streams_just_before_its_reader(play):
    wires, where = [(0, 2, [3])], [0, 0, 1, 1, 0, 1]
    case = toy([1, 1, 0.5, 1, 1, 1], wires, where, p2p="inline")
    result = play(case)
    assert result.transfers == [(0, 0, 1, 2.0, 2.0, 4.0)]  # once op 1 has ended as well
    assert result.start == [0.0, 1.0, 0.0, 4.0, 4.0, 5.0]  # op 4 on d0 waits, too
    beside = play(toy([1, 1, 0.5, 1, 1, 1], wires, where, p2p="copy"))
    assert beside.start == [0.0, 1.0, 0.0, 3.0, 2.0, 4.0]


def test_the_latency_of_an_inline_transfer_occupies_both_streams(play):
    links = [("d0", "d1", 1.0, 0.5)]
    result = play(toy([1, 1, 1], [(0, 2, [1])], [0, 1, 0], links=links, p2p="inline"))
    assert result.transfers == [(0, 0, 1, 1.0, 1.5, 3.5)]
    assert result.start == [0.0, 3.5, 3.5]


def test_inline_transfers_come_in_order_of_their_readers(play):
    wires = [(0, 1, [3]), (1, 1, [2])]
    result = play(toy([1, 1, 1, 1], wires, [0, 0, 1, 1], p2p="inline"))
    assert windows(result) == [(4.0, 5.0), (2.0, 3.0)]
    assert result.start == [0.0, 1.0, 3.0, 5.0]


def test_inline_transfers_of_one_reader_come_by_id(play):
    wires = [(0, 1, [2]), (1, 2, [2])]
    result = play(toy([1, 1, 1], wires, [0, 0, 1], p2p="inline"))
    assert windows(result) == [(2.0, 3.0), (3.0, 5.0)]
    assert result.start[2] == 5.0


def test_an_inline_transfer_comes_before_the_first_of_its_readers(play):
    result = play(toy([1, 1, 1, 1], [(0, 1, [1, 3])], [0, 1, 1, 1], p2p="inline"))
    assert windows(result) == [(1.0, 2.0)]
    assert result.start == [0.0, 2.0, 3.0, 4.0]


def test_inline_transfers_in_both_directions_wait_for_each_other(play):
    wires = [(0, 1, [3]), (1, 1, [2])]  # d0 reads first
    result = play(toy([1, 1, 1, 1], wires, [0, 1, 0, 1], p2p="inline"))
    assert windows(result) == [(3.0, 4.0), (1.0, 2.0)]
    assert result.start == [0.0, 0.0, 2.0, 4.0]


def test_a_third_device_is_not_occupied(play):
    case = toy([1, 1, 1], [(0, 2, [1])], [0, 1, 2], links=STAR, p2p="inline")
    assert play(case).start == [0.0, 3.0, 0.0]


@pytest.mark.parametrize(
    ("contention", "expected"),
    [
        ("none", [(1.0, 3.0), (1.0, 2.0)]),
        ("port", [(1.0, 3.0), (1.0, 2.0)]),
        ("ordered", [(1.0, 3.0), (3.0, 4.0)]),
        ("fifo", [(1.0, 3.0), (3.0, 4.0)]),
        ("fair", [(1.0, 4.0), (1.0, 3.0)]),
    ],
)
def test_inline_transfers_contend_for_channels_as_others_do(play, contention, expected):
    links = [("d0", "s0", 1.0, 0.0), ("d1", "s0", 1.0, 0.0), ("s0", "s1", 1.0, 0.0)]
    links += [("d2", "s1", 1.0, 0.0), ("d3", "s1", 1.0, 0.0)]
    wires = [(0, 2, [2]), (1, 1, [3])]  # of two pairs of devices, over one neck
    case = toy([1] * 4, wires, [0, 1, 2, 3], links=links, p2p="inline", contention=contention)
    assert windows(play(case)) == expected


def test_an_empty_inline_transfer_waits_for_both_streams(play):
    result = play(toy([1, 3, 1], [(0, 0, [2])], [0, 1, 1], p2p="inline"))
    assert result.transfers == [(0, 0, 1, 3.0, 3.0, 3.0)]
    assert result.start[2] == 3.0


# rendezvous


def test_a_rendezvous_waits_until_the_stream_of_its_reader_has_come_there(play):
    result = play(toy([1, 3, 1, 1], [(0, 2, [2])], [0, 1, 1, 0], p2p="rendezvous"))
    assert result.transfers == [(0, 0, 1, 3.0, 3.0, 5.0)]
    assert result.start == [0.0, 0.0, 5.0, 1.0]  # the sender's stream goes on


def test_a_rendezvous_whose_receive_is_posted_early_is_a_copy(play):
    links = [("d0", "d1", 1.0, 0.5)]
    result = play(toy([2, 1, 1], [(0, 2, [2])], [0, 1, 1], links=links, p2p="rendezvous"))
    assert result.transfers == [(0, 0, 1, 2.0, 2.5, 4.5)]
    assert result == play(toy([2, 1, 1], [(0, 2, [2])], [0, 1, 1], links=links))


def test_a_receive_is_posted_before_the_launch_of_the_reader(play):
    launch = {"launch_seconds": [0, 4, 1], "links": STAR}  # the host is busy with op 1 on d2
    result = play(toy([1, 1, 1], [(0, 1, [2])], [0, 2, 1], p2p="rendezvous", **launch))
    assert requests(result) == [4.0]
    assert result.start == [0.0, 4.0, 5.0]
    ranks = toy([1, 1, 1], [(0, 1, [2])], [0, 2, 1], p2p="rendezvous", host="per_rank", **launch)
    assert requests(play(ranks)) == [1.0]


def test_a_host_that_waits_for_an_op_posts_no_receive(play):
    case = toy([1, 3, 1], [(0, 1, [2])], [0, 2, 1], sync=[1], p2p="rendezvous", links=STAR)
    assert requests(play(case)) == [3.0]


def test_receives_are_posted_reader_by_reader(play):
    wires = [(0, 1, [3]), (1, 1, [2])]
    result = play(toy([1, 1, 1, 1], wires, [0, 0, 1, 1], p2p="rendezvous"))
    assert requests(result) == [4.0, 2.0]
    assert windows(result) == [(4.0, 5.0), (2.0, 3.0)]


# messages cost their hosts time: 1 s on d0, 1/4 s on d1


def test_one_host_pays_for_a_copy_before_the_reader_as_the_target_would(play):
    case = toy([1, 1, 1], [(0, 1, [1])], [0, 1, 2], limits=SLOW_HOSTS, links=STAR)
    result = play(case)
    assert windows(result) == [(1.0, 2.0)]  # the copy itself is not delayed
    assert result.start == [0.0, 2.0, 0.25]


def test_one_host_pays_for_each_message(play):
    wires = [(0, 0, [3]), (1, 0, [3]), (2, 0, [3])]
    case = toy([0, 0, 0, 1, 1], wires, [0, 0, 0, 1, 2], limits=SLOW_HOSTS, links=STAR)
    assert play(case).start == [0.0, 0.0, 0.0, 0.75, 0.75]


def test_a_message_is_paid_once_before_the_first_of_its_readers(play):
    case = toy([0, 0, 0, 0], [(0, 0, [2, 3])], [0, 1, 1, 1], limits=SLOW_HOSTS)
    assert play(case).start == [0.0, 0.0, 0.25, 0.25]


def test_each_rank_pays_for_what_it_sends_and_what_it_receives(play):
    case = toy([0, 1, 1], [(0, 0, [1])], [0, 1, 0], limits=SLOW_HOSTS, host="per_rank")
    result = play(case)
    assert windows(result) == [(0.0, 0.0)]
    assert result.start == [0.0, 0.25, 1.0]


def test_a_rank_pays_for_a_message_to_each_device(play):
    wires = [(0, 0, [1, 2])]
    case = toy([0, 1, 1, 1], wires, [0, 1, 2, 0], limits=SLOW_HOSTS, links=STAR, host="per_rank")
    assert play(case).start == [0.0, 0.25, 0.0, 2.0]


@pytest.mark.parametrize(("overhead", "next_start"), [(1.0, 5.0), (7.0, 7.0)])
def test_a_host_pays_for_the_messages_of_an_op_before_it_waits_for_it(play, overhead, next_start):
    limits = {0: Limits(message_overhead=overhead)}
    case = toy([5, 1, 1], [(0, 0, [1])], [0, 1, 0], limits=limits, sync=[0], host="per_rank")
    assert play(case).start == [0.0, 5.0, next_start]


def test_captured_graphs_send_for_nothing(play):
    for host in ("one", "per_rank"):
        case = toy([0, 1, 1], [(0, 0, [1])], [0, 1, 0], limits=SLOW_HOSTS, host=host)
        assert play(case).start != [0.0, 0.0, 0.0]
        graph = toy(
            [0, 1, 1], [(0, 0, [1])], [0, 1, 0], limits=SLOW_HOSTS, host=host, launch="graph"
        )
        assert play(graph).start == [0.0, 0.0, 0.0]


def test_an_inline_transfer_is_issued_by_the_one_host(play):
    case = toy([0, 1, 1], [(0, 1, [1])], [0, 1, 2], limits=SLOW_HOSTS, links=STAR, p2p="inline")
    result = play(case)
    assert result.transfers == [(0, 0, 1, 0.25, 0.25, 1.25)]
    assert result.start == [0.0, 1.25, 0.25]


def test_an_inline_transfer_is_issued_once_both_ranks_have_done_so(play):
    ranks = {"limits": SLOW_HOSTS, "p2p": "inline", "host": "per_rank"}
    result = play(toy([0, 0, 1, 1, 1], [(0, 1, [2])], [0, 0, 1, 0, 1], **ranks))
    assert result.transfers == [(0, 0, 1, 1.0, 1.0, 2.0)]
    assert result.start == [0.0, 0.0, 2.0, 2.0, 3.0]  # op 1 stands before the transfer


def test_a_rank_issues_an_inline_message_at_its_place_in_the_stream(play):
    ranks = {"limits": SLOW_HOSTS, "p2p": "inline", "host": "per_rank"}
    launch = {"launch_seconds": [0, 3, 0, 0]}  # op 1 on d0, launched before the message
    result = play(toy([0, 0, 1, 1], [(0, 1, [2])], [0, 0, 1, 0], **ranks, **launch))
    assert requests(result) == [4.0]


def test_the_overhead_of_a_rendezvous_comes_before_its_receive_is_posted(play):
    case = toy([0, 1, 1], [(0, 1, [1])], [0, 1, 2], limits=SLOW_HOSTS, links=STAR, p2p="rendezvous")
    result = play(case)
    assert requests(result) == [0.25]
    assert result.start == [0.0, 1.25, 0.25]


def test_each_rank_pays_for_a_rendezvous(play):
    ranks = {"limits": SLOW_HOSTS, "p2p": "rendezvous", "host": "per_rank"}
    result = play(toy([0, 1, 1], [(0, 1, [1])], [0, 1, 0], **ranks))
    assert requests(result) == [0.25]
    assert result.start == [0.0, 1.25, 1.0]


def test_receives_of_one_reader_are_posted_together(play):
    wires = [(0, 1, [2]), (1, 1, [2])]
    limits = {2: Limits(message_overhead=0.25)}
    case = toy([0, 0, 1], wires, [0, 1, 2], limits=limits, links=STAR, p2p="rendezvous")
    assert requests(play(case)) == [0.5, 0.5]


# deadlock


@pytest.mark.parametrize("p2p", ["inline", "rendezvous"])
@pytest.mark.parametrize("contention", ["port", "ordered"])
def test_plan_order_against_the_order_of_readers_deadlocks(play, p2p, contention):
    wires = [(0, 1, [3]), (1, 1, [2])]  # sent in one order, read in the other
    case = toy([1, 1, 1, 1], wires, [0, 0, 1, 1], p2p=p2p, contention=contention)
    with pytest.raises(PlanError, match="deadlock"):
        play(case)


@pytest.mark.parametrize("p2p", ["copy", "inline", "rendezvous"])
@pytest.mark.parametrize("contention", ["none", "fifo", "fair"])
def test_queues_by_request_do_not_deadlock(play, p2p, contention):
    wires = [(0, 1, [3]), (1, 1, [2])]
    play(toy([1, 1, 1, 1], wires, [0, 0, 1, 1], p2p=p2p, contention=contention))
    for order in ("port", "ordered"):
        play(toy([1, 1, 1, 1], wires, [0, 0, 1, 1], p2p="copy", contention=order))
