"""Compute beside communication and the reverse, worked by hand: links carry 1 GB/s.

In most problems op 0 on d0 ends at 1, what it sends is under way from then on, and op 1 computes on
d1 from 0.
"""

import pytest

from simcore.graph import OpClass
from simcore.profile import Limits
from simcore.units import GB
from tests.reference import ReferenceResult
from tests.reference_toys import STAR, by_class, collective, toy
from tests.strategies import WAYS, Play

CONTENTIONS = ("none", "port", "ordered", "fifo", "fair")
COPY_2 = Limits(compute_beside_copy=by_class({OpClass.MATMUL: 2.0}))
MATMULS = dict.fromkeys(range(8), OpClass.MATMUL)


@pytest.fixture(params=sorted(WAYS))
def play(request: pytest.FixtureRequest) -> Play:
    """Reference and compiled: both must give the numbers worked by hand."""
    return WAYS[request.param]


def windows(result: ReferenceResult) -> list[tuple[float, float]]:
    """The start and end of each transfer."""
    return [(transfer.start, transfer.end) for transfer in result.transfers]


# compute beside communication


@pytest.mark.parametrize("contention", CONTENTIONS)
def test_an_op_is_slowed_while_a_copy_arrives_and_then_goes_on_at_full_speed(play, contention):
    case = toy(
        [1, 4, 1], [(0, 1, [2])], [0, 1, 1], limits={1: COPY_2}, classes=MATMULS,
        contention=contention,
    )  # fmt: skip
    result = play(case)
    assert windows(result) == [(1.0, 2.0)]
    assert result.end[1] == 4.5  # one second at half speed
    assert result.end[2] == 5.5  # nothing else is under way


def test_an_op_is_slowed_while_a_copy_leaves(play):
    case = toy([1, 4, 1], [(0, 1, [2])], [0, 0, 1], limits={0: COPY_2}, classes=MATMULS)
    assert play(case).end == [1.0, 5.5, 3.0]


def test_other_classes_other_devices_and_the_setting_off_are_not_slowed(play):
    wires, where = [(0, 1, [2])], [0, 1, 1]
    assert play(toy([1, 4, 1], wires, where, limits={1: COPY_2})).end[1] == 4.0
    assert play(toy([1, 4, 1], wires, where, limits={0: COPY_2}, classes=MATMULS)).end[1] == 4.0
    off = toy([1, 4, 1], wires, where, limits={1: COPY_2}, classes=MATMULS, slow_down=False)
    assert play(off).end[1] == 4.0


def test_a_copy_that_passes_between_two_others_slows_nobody_else(play):
    case = toy([1, 4, 1], [(0, 1, [2])], [0, 2, 1], limits={2: COPY_2}, classes=MATMULS, links=STAR)
    assert play(case).end[1] == 4.0


def test_latency_slows_nothing(play):
    case = toy(
        [1, 4, 1], [(0, 1, [2])], [0, 1, 1], limits={1: COPY_2}, classes=MATMULS,
        links=[("d0", "d1", 1.0, 2.5)],
    )  # fmt: skip
    result = play(case)
    assert windows(result) == [(3.5, 4.5)]
    assert result.end[1] == 4.5  # half a second at half speed


def test_a_waiting_copy_slows_nothing(play):
    wires = [(0, 4, [3]), (1, 1, [3])]  # both into d1, one after the other; op 2 runs until 4
    rest = {"limits": {2: COPY_2}, "classes": MATMULS, "links": STAR, "contention": "fifo"}
    result = play(toy([1, 1, 3, 1], wires, [0, 2, 2, 1], **rest))
    assert windows(result) == [(1.0, 5.0), (5.0, 6.0)]
    assert result.end[2] == 4.0


@pytest.mark.parametrize("contention", CONTENTIONS)
def test_an_op_is_slowed_beside_a_collective_once_that_has_started(play, contention):
    limits = {1: Limits(compute_beside_collective=by_class({OpClass.MATMUL: 4.0}))}
    both = {1: collective([0, 1], 2.0, 2 * GB, {0: 1.0}, latency=0.5)}
    case = toy(
        [1, 9, 4], [(0, 1, [1])], [0, -1, 1], limits=limits, classes=MATMULS, collectives=both,
        contention=contention,
    )  # fmt: skip
    result = play(case)
    assert (result.start[1], result.end[1]) == (1.5, 3.5)
    assert result.end[2] == 5.5  # two seconds at a quarter


def test_a_collective_slows_its_members_only(play):
    limits = {2: Limits(compute_beside_collective=by_class({OpClass.MATMUL: 4.0}))}
    both = {1: collective([0, 1], 2.0, 2 * GB)}
    case = toy(
        [1, 9, 4], [(0, 1, [1])], [0, -1, 2], limits=limits, classes=MATMULS, collectives=both,
        links=STAR,
    )  # fmt: skip
    assert play(case).end[2] == 4.0


@pytest.mark.parametrize(("by_copy", "by_collective"), [(2.0, 4.0), (4.0, 2.0)])
def test_the_largest_factor_applies(play, by_copy, by_collective):
    limits = {
        1: Limits(
            compute_beside_copy=by_class({OpClass.MATMUL: by_copy}),
            compute_beside_collective=by_class({OpClass.MATMUL: by_collective}),
        )
    }
    both = {1: collective([0, 1], 2.0, 2 * GB)}
    wires = [(0, 2, [1, 3])]  # the copy and the collective are both under way from 1 to 3
    case = toy(
        [1, 9, 4, 1], wires, [0, -1, 1, 1], limits=limits, classes=MATMULS, collectives=both,
        contention="none",
    )  # fmt: skip
    assert play(case).end[2] == 5.5


def test_an_op_that_starts_beside_a_copy_is_slowed_from_its_start(play):
    case = toy(
        [1, 2, 2, 1], [(0, 3, [3])], [0, 1, 1, 1], limits={1: COPY_2}, classes={2: OpClass.MATMUL}
    )  # the copy is under way from 1 to 4
    assert play(case).end == [1.0, 2.0, 5.0, 6.0]


# communication beside compute


@pytest.mark.parametrize("contention", CONTENTIONS)
@pytest.mark.parametrize(("device", "end"), [(0, 2.75), (1, 2.25)])
def test_a_copy_is_slowed_while_either_end_computes(play, contention, device, end):
    limits = {device: Limits(copy_beside_compute=2.0)}  # which computes 1 to 2.5, or until 1.5
    case = toy([1, 1.5, 1], [(0, 1, [2])], [0, device, 1], limits=limits, contention=contention)
    assert windows(play(case)) == [(1.0, end)]


def test_of_two_computing_ends_the_larger_factor_applies(play):
    limits = {0: Limits(copy_beside_compute=2.0), 1: Limits(copy_beside_compute=4.0)}
    case = toy([1, 9, 9, 1], [(0, 1, [3])], [0, 0, 1, 1], limits=limits)
    assert windows(play(case)) == [(1.0, 5.0)]


@pytest.mark.parametrize("contention", CONTENTIONS)
def test_a_collective_is_slowed_while_a_member_computes(play, contention):
    limits = {1: Limits(collective_beside_compute=2.0)}
    both = {1: collective([0, 1], 2.0, 2 * GB, {0: 1.0}, latency=0.5)}
    case = toy(
        [1, 9, 2.5, 1], [(0, 1, [1])], [0, -1, 1, 0], limits=limits, collectives=both,
        contention=contention,
    )  # fmt: skip
    result = play(case)
    assert (result.start[1], result.end[1]) == (1.5, 4.0)  # half speed until 2.5


def test_each_slows_the_other(play):
    limits = {1: COPY_2._replace(copy_beside_compute=2.0)}
    case = toy([1, 4, 1], [(0, 1, [2])], [0, 1, 1], limits=limits, classes=MATMULS)
    result = play(case)
    assert windows(result) == [(1.0, 3.0)]
    assert result.end[1] == 5.0


def test_what_a_slowed_copy_leaves_of_a_channel_goes_to_the_others(play):
    limits = {0: Limits(copy_beside_compute=4.0)}
    wires = [(0, 1, [3]), (1, 3, [3])]  # both into d2, at 1/4 and 3/4 GB/s while op 2 computes
    case = toy([1, 1, 9, 1], wires, [0, 1, 0, 2], limits=limits, links=STAR, contention="fair")
    assert windows(play(case)) == [(1.0, 5.0), (1.0, 5.0)]


# what takes no time


def test_an_empty_transfer_and_an_empty_collective_slow_nothing(play):
    limits = {
        1: COPY_2._replace(compute_beside_collective=by_class({OpClass.MATMUL: 4.0})),
    }
    both = {1: collective([0, 1], 0.0, 0.0)}
    wires = [(0, 0, [1, 3])]
    case = toy([1, 9, 4, 1], wires, [0, -1, 1, 1], limits=limits, classes=MATMULS, collectives=both)
    assert play(case).end[2] == 4.0


def test_an_op_of_no_length_slows_nothing(play):
    limits = {0: Limits(copy_beside_compute=4.0)}
    case = toy([1, 0, 1], [(0, 1, [2])], [0, 0, 1], limits=limits)
    assert windows(play(case)) == [(1.0, 2.0)]


def test_an_inline_transfer_is_no_compute_of_its_devices(play):
    limits = dict.fromkeys(range(2), COPY_2._replace(copy_beside_compute=4.0))
    case = toy([1, 4, 1], [(0, 1, [2])], [0, 1, 1], limits=limits, classes=MATMULS, p2p="inline")
    result = play(case)
    assert windows(result) == [(4.0, 5.0)]
    assert result.end == [1.0, 4.0, 6.0]
