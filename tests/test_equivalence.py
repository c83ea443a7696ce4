"""The compiled simulator equals the reference to the last bit, and both obey what must hold."""

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from simcore.cost import cost_table
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan import Plan
from simcore.simulation import simulate, simulate_batch
from tests.reference import ReferenceProblem, ReferenceResult, reserved, simulate_reference
from tests.strategies import (
    KINDS,
    WAYS,
    Case,
    Play,
    cases,
    compiled_problem,
    draw_placement,
    play_compiled,
    play_reference,
    random_case,
    reference_problem,
    renamed,
    seeded,
    twice_as_fast,
)

SEED = 7
BLOCKS = 8
both_ways = pytest.mark.parametrize("play", WAYS.values(), ids=WAYS.keys())
quick = settings(deadline=None, max_examples=60)


# compiled equals reference


@pytest.mark.parametrize("block", range(BLOCKS))
def test_compiled_equals_reference_on_seeded_problems(block: int, num_cases: int) -> None:
    for index in range(block, num_cases, BLOCKS):
        rng = np.random.default_rng([SEED, index])
        case = random_case(rng)
        assert_same(play_compiled(case), play_reference(case), f"case {index}: {case.settings}")
        assert_batch_equals_reference(case, rng, f"case {index}: {case.settings}")


@given(cases())
@settings(deadline=None, max_examples=200)
def test_compiled_equals_reference_on_shrinking_problems(case: Case) -> None:
    assert_same(play_compiled(case), play_reference(case), str(case.settings))


def assert_same(found: ReferenceResult, expected: ReferenceResult, label: str) -> None:
    """Names the first difference; a diff of two whole results takes pytest a minute."""
    for field in ("start", "end", "transfers", "allocated"):
        pairs = zip(getattr(found, field), getattr(expected, field), strict=True)
        for index, (a, b) in enumerate(pairs):
            assert a == b, f"{label}: {field}[{index}]"
    assert found.step_time == expected.step_time, label


def assert_batch_equals_reference(case: Case, rng: np.random.Generator, label: str) -> None:
    others = [draw_placement(seeded(rng), case.graph, len(case.network.kinds)) for _ in range(2)]
    placements = np.stack([case.placement, *others])
    many = np.concatenate([placements] * 3)  # enough to be played in lock-step where that applies
    batch = simulate_batch(compiled_problem(case), many, threads=1)
    problem = reference_problem(case)
    for plan, placement in enumerate(placements):
        expected = simulate_reference(problem, placement)
        assert batch.step_time[plan] == expected.step_time, label
        assert batch.allocated[plan].tolist() == expected.allocated, label
        assert batch.reserved[plan].tolist() == reserved(
            problem, placement.tolist(), expected.allocated
        ), label


def test_a_batch_gives_the_same_bits_on_one_thread_and_on_two() -> None:
    rng = np.random.default_rng(SEED)
    for case in (random_case(rng) for _ in range(20)):
        draws = seeded(rng)
        placements = np.stack(
            [draw_placement(draws, case.graph, len(case.network.kinds)) for _ in range(33)]
        )
        one, two = (
            simulate_batch(compiled_problem(case), placements, threads=threads)
            for threads in (1, 2)
        )
        assert np.array_equal(one.step_time, two.step_time)
        assert np.array_equal(one.allocated, two.allocated)


def test_simulate_of_a_plan_equals_the_reference() -> None:
    rng = np.random.default_rng(SEED)
    for _ in range(50):
        case = random_case(rng)
        cluster, options = case.cluster, case.settings
        kinds = tuple(dict.fromkeys(device.kind for device in cluster.devices))
        names = [f"o{op}" for op in range(8)]
        edges = [
            (a, b, int(rng.integers(0, 10**6)))
            for a, b in itertools.combinations(names, 2)
            if rng.random() < 0.3
        ]
        graph = OpGraph.from_edges(
            [(name, float(rng.random()) * 1e-3) for name in names], edges, measured_on=KINDS[0]
        )
        gpus = [dev for dev, device in enumerate(cluster.devices) if device.kind == KINDS[0]]
        if not gpus:
            continue
        job = Job(assume_linear=True)
        placement = rng.choice(gpus, graph.num_ops).astype(np.int32)
        plan = Plan.from_placement(graph, cluster, job, placement)
        problem = ReferenceProblem.build(
            graph, cluster, job, options, cost=cost_table(graph, job, kinds, [job.batch])
        )
        result = simulate(graph, cluster, job, plan, settings=options)
        assert result.step_time == simulate_reference(problem, placement).step_time


# what must hold of any result


def assert_one_at_a_time(windows: list[tuple[float, float]]) -> None:
    for (_, end), (start, _) in itertools.pairwise(sorted(windows)):
        assert end <= start


def device_of_ops(case: Case) -> list[int]:
    return [int(device) for device in case.placement]


def op_seconds(case: Case) -> list[float]:
    table = reference_problem(case).seconds
    return [table[op][device] for op, device in enumerate(device_of_ops(case))]


def arrival(case: Case, result: ReferenceResult, tensor: int, device: int) -> float:
    """When a tensor is on a device, s."""
    for transfer in result.transfers:
        if (transfer.tensor, transfer.target) == (tensor, device):
            return transfer.end
    return result.end[int(case.graph.tensor_producer[tensor])]


@both_ways
@given(cases())
@quick
def test_each_op_starts_after_its_inputs_arrive_and_takes_its_seconds(
    play: Play, case: Case
) -> None:
    result, device = play(case), device_of_ops(case)
    for producer, consumer, tensor in zip(*case.graph.edges(), strict=True):
        assert result.start[consumer] >= arrival(case, result, int(tensor), device[consumer])
        assert result.start[consumer] >= result.end[producer]
    for op, seconds in enumerate(op_seconds(case)):
        assert result.end[op] == result.start[op] + seconds


@both_ways
@given(cases())
@quick
def test_no_device_runs_two_ops_at_once(play: Play, case: Case) -> None:
    result, device = play(case), device_of_ops(case)
    for dev in set(device):
        ops = [op for op, where in enumerate(device) if where == dev]
        assert_one_at_a_time([(result.start[op], result.end[op]) for op in ops])


@both_ways
@given(cases())
@quick
def test_no_channel_and_no_engine_carries_two_transfers_at_once(play: Play, case: Case) -> None:
    case = with_settings(case, contention="fifo")
    carried: dict[object, list[tuple[float, float]]] = {}
    for transfer in play(case).transfers:
        route = case.cluster.route(transfer.source, transfer.target)
        for resource in [*route, f"engine of {transfer.source}"]:
            carried.setdefault(resource, []).append((transfer.start, transfer.end))
    for windows in carried.values():
        assert_one_at_a_time(windows)


@both_ways
@given(cases())
@quick
def test_a_step_is_at_least_its_critical_path_and_its_busiest_device(
    play: Play, case: Case
) -> None:
    problem, device, seconds = reference_problem(case), device_of_ops(case), op_seconds(case)
    finish: list[float] = []
    for op, target in enumerate(device):
        ready = 0.0
        for tensor in problem.inputs[op]:
            if (producer := problem.producer[tensor]) >= 0:
                source, at = device[producer], finish[producer]
                if source != target:
                    at += problem.latency[source][target]
                    at += problem.tensor_bytes[tensor] / problem.bandwidth[source][target]
                ready = max(ready, at)
        finish.append(ready + seconds[op])
    step_time = play(case).step_time
    assert step_time >= max(finish)
    for dev in set(device):
        busy = sum(s for where, s in zip(device, seconds, strict=True) if where == dev)
        assert step_time >= busy * (1 - 1e-12)


@both_ways
@given(cases())
@quick
def test_twice_the_rates_and_half_the_latencies_halve_every_time_exactly(
    play: Play, case: Case
) -> None:
    slow, fast = play(case), play(twice_as_fast(case))
    assert fast.step_time == slow.step_time / 2
    assert fast.start == [time / 2 for time in slow.start]
    assert fast.end == [time / 2 for time in slow.end]
    assert [t[3:] for t in fast.transfers] == [
        (t.request / 2, t.start / 2, t.end / 2) for t in slow.transfers
    ]
    assert fast.allocated == slow.allocated


@both_ways
@given(cases())
@quick
def test_other_names_in_the_same_order_change_nothing(play: Play, case: Case) -> None:
    assert play(renamed(case, "z")) == play(case)


@both_ways
@given(cases())
@quick
def test_a_faster_op_never_slows_a_fixed_order_without_contention(play: Play, case: Case) -> None:
    case = with_settings(case, order="program", contention="none")
    seconds = case.cost.seconds.copy()
    seconds[0] /= 2
    faster = case._replace(cost=replace(case.cost, seconds=seconds))
    assert play(faster).step_time <= play(case).step_time


def with_settings(case: Case, **changes: str) -> Case:
    return case._replace(settings=msgspec.structs.replace(case.settings, **changes))
