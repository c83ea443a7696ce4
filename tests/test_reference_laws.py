"""What must hold of any problem with collectives, shared channels, slow-down and streams."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from simcore.errors import PlanError
from simcore.graph import OpClass
from simcore.profile import Limits
from simcore.units import GB
from tests.reference import ReferenceResult
from tests.reference_play import EventKind, Playback
from tests.reference_toys import STAR, by_class, collective, random_toy, toy
from tests.strategies import WAYS, Case, Play, play_reference, reference_problem, twice_as_fast

NUM_CASES = 150


@pytest.fixture(params=sorted(WAYS))
def play(request: pytest.FixtureRequest) -> Play:
    """Reference and compiled."""
    return WAYS[request.param]


def random_cases(seed: int, **settings: Any) -> Iterator[Case]:
    """Problems that do not deadlock."""
    for index in range(NUM_CASES):
        case = random_toy(np.random.default_rng([seed, index]), **settings)
        if case.settings.p2p == "copy" or case.settings.contention not in {"port", "ordered"}:
            yield case


def with_settings(case: Case, **changes: Any) -> Case:
    return case._replace(settings=msgspec.structs.replace(case.settings, **changes))


def played(case: Case) -> Playback:
    """Plays a case on the slow simulator, and returns all that it noted down."""
    play = Playback(reference_problem(case), case.placement.tolist(), [0] * case.graph.num_ops)
    play.run()
    return play


def assert_close(found: ReferenceResult, expected: ReferenceResult) -> None:
    assert found.start == pytest.approx(expected.start, rel=1e-9, abs=1e-15)
    assert found.end == pytest.approx(expected.end, rel=1e-9, abs=1e-15)


# what moves


def test_what_a_task_does_at_all_its_rates_is_its_work():
    for case in random_cases(1):
        play = played(case)
        done: dict[Any, float] = {}
        for key, start, end, rate in play.pieces:
            assert rate > 0
            done[key] = done.get(key, 0.0) + rate * (end - start)
        for index, communication in enumerate(play.communications):
            moved = done.get(play.end_of(index), 0.0)
            assert moved == pytest.approx(communication.work, rel=1e-9, abs=1e-6)
        for op, device in enumerate(case.placement.tolist()):
            if device >= 0:
                seconds = play.problem.seconds[op][device]
                moved = done.get((EventKind.COMPUTE_END, op), 0.0)
                assert moved == pytest.approx(seconds, rel=1e-9, abs=1e-15)


def test_no_channel_ever_carries_more_than_it_can():
    for case in random_cases(2, contention="fair"):
        play = played(case)
        moments = {piece.start for piece in play.pieces}
        for now in moments:
            load = [0.0] * len(play.problem.channel_bandwidth)
            for (kind, index), start, end, rate in play.pieces:
                if kind != EventKind.COMPUTE_END and start <= now < end:
                    for channel, share in play.communications[index].usage.items():
                        load[channel] += share * rate
            for used, width in zip(load, play.problem.channel_bandwidth, strict=True):
                assert used <= width * (1 + 1e-9)


def test_no_device_uses_more_engines_than_it_has():
    for case in random_cases(3, contention="fair"):
        transfers = [t for t in play_reference(case).transfers if t.end > t.start]
        for one in transfers:
            under_way = [t for t in transfers if t.start <= one.start < t.end]
            sent = sum(t.source == one.source for t in under_way)
            received = sum(t.target == one.target for t in under_way)
            assert sent <= (case.limits[one.source].out_engines or sent)
            assert received <= (case.limits[one.target].in_engines or received)


# what takes how long


def test_nothing_is_faster_than_alone(play):
    for case in random_cases(4):
        result, problem = play(case), reference_problem(case)
        for op, device in enumerate(case.placement.tolist()):
            alone = problem.seconds[op][device]
            if device < 0:
                group = case.collectives[op]
                alone = group.duration if group.volume else 0.0
            took = result.end[op] - result.start[op]
            assert took >= alone * (1 - 1e-9) - 1e-15
            if device >= 0 and not case.settings.slow_down:
                assert result.end[op] == result.start[op] + alone
        for t in result.transfers:
            alone = problem.tensor_bytes[t.tensor] / problem.bandwidth[t.source][t.target]
            assert t.end - t.start >= alone * (1 - 1e-9) - 1e-15


def test_work_with_nothing_beside_it_takes_its_time_to_the_last_bit(play):
    for case in random_cases(5, slow_down=False):
        if case.settings.contention == "fair":
            continue
        result, problem = play(case), reference_problem(case)
        for op, group in case.collectives.items():
            duration = group.duration if group.volume else 0.0
            assert result.end[op] == result.start[op] + duration
        for t in result.transfers:
            size, bandwidth = problem.tensor_bytes[t.tensor], problem.bandwidth[t.source][t.target]
            assert t.end == t.start + (size / bandwidth if size else 0.0)


def test_factors_of_one_change_nothing_to_the_last_bit(play):
    for case in random_cases(6):
        even = tuple(
            Limits(limit.out_engines, limit.in_engines, limit.message_overhead)
            for limit in case.limits
        )
        slowed = play(with_settings(case._replace(limits=even), slow_down=True))
        assert slowed == play(with_settings(case._replace(limits=even), slow_down=False))


def test_twice_the_rates_and_half_the_latencies_halve_every_time_exactly(play):
    for case in random_cases(7):
        fast_case = twice_as_fast(case)._replace(
            limits=tuple(
                limit._replace(message_overhead=limit.message_overhead / 2) for limit in case.limits
            ),
            collectives={
                op: replace(group, latency=group.latency / 2, duration=group.duration / 2)
                for op, group in case.collectives.items()
            },
        )
        slow, fast = play(case), play(fast_case)
        assert fast.start == [time / 2 for time in slow.start]
        assert fast.end == [time / 2 for time in slow.end]
        assert [t[3:] for t in fast.transfers] == [
            (t.request / 2, t.start / 2, t.end / 2) for t in slow.transfers
        ]


def test_one_flow_at_a_time_is_as_fast_shared_as_held(play):
    for case in random_cases(8, slow_down=False, p2p="copy"):
        fifo = play(with_settings(case, contention="fifo"))
        moves = [(t.request, t.end) for t in fifo.transfers]
        groups = [(fifo.start[op] - c.latency, fifo.end[op]) for op, c in case.collectives.items()]
        spans = sorted(moves + groups)
        if all(one[1] < other[0] for one, other in itertools.pairwise(spans)):
            assert_close(play(with_settings(case, contention="fair")), fifo)


# streams


def test_an_inline_transfer_has_both_devices_to_itself(play):
    for case in random_cases(9, p2p="inline", order="program"):
        result = play(case)
        for t in result.transfers:
            for op, device in enumerate(case.placement.tolist()):
                if device in (t.source, t.target) and result.end[op] > result.start[op]:
                    assert result.end[op] <= t.request or result.start[op] >= t.end
            for other in result.transfers:
                if {t.source, t.target} & {other.source, other.target} and other is not t:
                    assert other.end <= t.request or t.end <= other.request


def test_a_rendezvous_is_requested_when_all_earlier_ops_of_its_target_have_ended(play):
    for case in random_cases(10, p2p="rendezvous", order="program"):
        result, problem = play(case), reference_problem(case)
        for t in result.transfers:
            where = case.placement.tolist()
            reader = min(op for op in problem.consumers[t.tensor] if where[op] == t.target)
            before = [result.end[op] for op in range(reader) if where[op] == t.target]
            assert t.request >= max(before, default=0.0)
            assert t.request >= result.end[problem.producer[t.tensor]]
            assert result.start[reader] >= t.end


def test_only_plan_order_can_deadlock_and_only_where_streams_are_held_up():
    found = 0
    for index in range(NUM_CASES):
        case = random_toy(np.random.default_rng([11, index]))
        try:
            play_reference(case)
        except PlanError:
            found += 1
            assert case.settings.p2p != "copy"
            assert case.settings.contention in {"port", "ordered"}
    assert found


# every input matters


def rich_case(**changes: Any) -> Case:
    """A problem in which everything matters, with some of it changed."""
    settings = {"contention": "fair", "launch_seconds": [0.1] * 9, "links": STAR} | changes
    limits = Limits(
        out_engines=1,
        in_engines=2,
        message_overhead=1.0,
        copy_beside_compute=1.5,
        collective_beside_compute=1.25,
        compute_beside_copy=by_class({OpClass.MATMUL: 2.0}),
        compute_beside_collective=by_class({OpClass.MATMUL: 3.0}),
    )
    wires = [(0, 1, [3, 7]), (0, 1, [5]), (1, 1, [3]), (1, 2, [7]), (2, 1, [7]), (3, 1, [4])]
    wires += [(4, 2, [8])]
    rest: dict[str, Any] = {
        "collectives": {3: collective([0, 1], 3.0, 2 * GB, {0: 1.0, 2: 0.5}, latency=0.2)},
        "limits": dict.fromkeys(range(3), limits),
        "classes": dict.fromkeys((0, 1, 2, 4, 5, 6, 7, 8), OpClass.MATMUL),
    }
    placement = [0, 1, 0, -1, 0, 1, 2, 2, 1]
    return toy([1, 2, 3, 9, 2, 4, 5, 1, 1], wires, placement, **(rest | settings))


def with_limits(**changes: Any) -> Case:
    case = rich_case()
    return case._replace(limits=tuple(limit._replace(**changes) for limit in case.limits))


def with_collective(**changes: Any) -> Case:
    case = rich_case()
    return case._replace(collectives={3: replace(case.collectives[3], **changes)})


CHANGES = {
    "fifo": lambda: rich_case(contention="fifo"),
    "none": lambda: rich_case(contention="none"),
    "inline": lambda: rich_case(p2p="inline"),
    "rendezvous": lambda: rich_case(p2p="rendezvous"),
    "no slow-down": lambda: rich_case(slow_down=False),
    "wider links": lambda: rich_case(links=[(a, b, 2.0, latency) for a, b, _, latency in STAR]),
    "classes": lambda: rich_case(classes={}),
    "out-engines": lambda: with_limits(out_engines=2),
    "in-engines": lambda: with_limits(in_engines=1),
    "message overhead": lambda: with_limits(message_overhead=1.5),
    "copy beside compute": lambda: with_limits(copy_beside_compute=2.0),
    "collective beside compute": lambda: with_limits(collective_beside_compute=2.0),
    "compute beside copy": lambda: with_limits(compute_beside_copy=by_class({})),
    "compute beside collective": lambda: with_limits(compute_beside_collective=by_class({})),
    "latency": lambda: with_collective(latency=0.3),
    "duration": lambda: with_collective(duration=4.0),
    "volume": lambda: with_collective(volume=2.5 * GB),
    "channels": lambda: with_collective(channels=np.array([1, 3])),
    "usage": lambda: with_collective(usage=np.array([1.0, 1.0])),
    "members": lambda: with_collective(members=(0, 1, 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_input_changes_the_result(play, change):
    before, after = play(rich_case()), play(CHANGES[change]())
    assert (before.start, before.end) != (after.start, after.end)


def test_equal_input_gives_an_equal_result(play):
    assert play(rich_case()) == play(rich_case())
