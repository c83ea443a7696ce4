"""Event loop, sweep and lanes give the same bits wherever more than one of them applies."""

from dataclasses import replace

import numpy as np
import pytest
from numba.core.runtime import _nrt_python, rtsys

from simcore.kernel import Engine, Status
from simcore.lower import Problem
from simcore.plan import Settings
from simcore.profile import Limits
from simcore.simulation import BatchResult, simulate_batch
from tests.strategies import Case, compiled_problem, draw_placement, random_case, seeded, toy

NUM_PLANS = 19  # two groups of lanes and some left over
STATIC = [
    (host, launch, contention)
    for host in ("one", "per_rank")
    for launch in ("eager", "graph")
    for contention in ("none", "port", "ordered")
]

FREE = Limits()


def static_case(rng: np.random.Generator, index: int) -> Case:
    host, launch, contention = STATIC[index % len(STATIC)]
    settings = Settings(order="program", host=host, launch=launch, contention=contention)
    return random_case(rng)._replace(settings=settings)


def draw_plans(rng: np.random.Generator, case: Case) -> np.ndarray:
    """Draws placements, one in four of them broken at one op."""
    num_devices = len(case.network.kinds)
    draws = seeded(rng)
    plans = np.stack([draw_placement(draws, case.graph, num_devices) for _ in range(NUM_PLANS)])
    for plan in rng.choice(NUM_PLANS, size=NUM_PLANS // 4, replace=False):
        plans[plan, rng.integers(case.graph.num_ops)] = rng.integers(-1, num_devices + 1)
    return plans


def play(problem: Problem, engine: Engine, plans: np.ndarray) -> BatchResult:
    return simulate_batch(replace(problem, engine=engine), plans, threads=1)


def assert_equal(found: BatchResult, expected: BatchResult, label: str) -> None:
    for field in ("status", "culprit", "step_time", "allocated", "reserved", "overflow"):
        assert np.array_equal(getattr(found, field), getattr(expected, field)), (field, label)


@pytest.mark.parametrize("block", range(4))
def test_engines_agree_on_every_static_problem(block: int, num_cases: int) -> None:
    seen = set()
    for index in range(block, num_cases // 4, 4):
        rng = np.random.default_rng([11, index])
        case = static_case(rng, index)
        problem, plans = compiled_problem(case), draw_plans(rng, case)
        expected = play(problem, Engine.EVENTS, plans)
        seen |= set(expected.status.tolist())
        assert_equal(play(problem, Engine.SWEEP, plans), expected, f"sweep, case {index}")
        if case.settings.contention != "ordered":
            assert_equal(play(problem, Engine.LANES, plans), expected, f"lanes, case {index}")
    if num_cases >= 1600:
        assert {Status.OK, Status.ILLEGAL_DEVICE, Status.SPLIT_UNIT} <= seen


def test_the_engine_is_chosen_by_what_the_settings_allow() -> None:
    def engine(num_devices: int, limits: Limits = FREE, **settings: str) -> Engine:
        links = [(f"d{device}", "s0", 1.0, 0.0) for device in range(num_devices)]
        case = toy([1, 1], [(0, 1, [1])], [0, 1], links=links, **settings)
        return compiled_problem(case._replace(limits=(limits,) * num_devices)).engine

    assert engine(4, contention="port") == Engine.LANES
    assert engine(64, contention="none") == Engine.SWEEP
    assert engine(4, contention="ordered") == Engine.SWEEP
    assert engine(4, contention="fifo") == Engine.EVENTS
    assert engine(4, contention="none", order="ready") == Engine.EVENTS
    assert engine(4, contention="none", p2p="inline") == Engine.EVENTS
    assert engine(4, Limits(message_overhead=1e-6), contention="port") == Engine.EVENTS
    assert engine(4, contention="fair") == Engine.FLUID
    slow = Limits(copy_beside_compute=2.0)
    assert engine(4, slow, contention="none") == Engine.FLUID
    assert engine(4, slow, contention="none", slow_down=False) == Engine.LANES


def test_a_batch_of_any_size_gives_the_same_results() -> None:
    for index in (0, 1, 3, 4):  # none and port
        rng = np.random.default_rng([19, index])
        case = static_case(rng, index)
        problem, plans = compiled_problem(case), draw_plans(rng, case)
        expected = play(problem, Engine.EVENTS, plans)
        for count in range(1, NUM_PLANS):
            found = play(problem, Engine.LANES, plans[:count])
            for field in ("status", "culprit", "step_time", "allocated"):
                assert np.array_equal(getattr(found, field), getattr(expected, field)[:count])


@pytest.mark.parametrize("num_devices", [16, 17, 63])
def test_lanes_agree_on_many_devices(num_devices: int) -> None:
    links = [(f"d{device}", "s0", 1.0, 0.5) for device in range(num_devices)]
    wires = [(op, 1.0, range(op + 1, 9)) for op in range(8)]
    case = toy([1] * 9, wires, list(range(9)), links=links, contention="port")
    problem = compiled_problem(case)
    plans = np.random.default_rng(2).integers(num_devices, size=(40, 9)).astype(np.int32)
    assert problem.engine == Engine.LANES
    assert_equal(
        play(problem, Engine.LANES, plans), play(problem, Engine.EVENTS, plans), "many devices"
    )


def test_lane_tables_list_what_each_op_reads_starts_and_ends() -> None:
    links = [(f"d{device}", "s0", 1.0, 0.0) for device in range(3)]
    case = toy([1] * 3, [(0, 8.0, [1, 2])], [0, 1, 2], links=links, contention="port")
    tables = compiled_problem(case).lane_tables
    assert tables is not None
    steps = tables.steps
    assert tables.reads.tolist() == [0, 0]
    assert steps["first_read"].tolist() == [0, 0, 1, 2]
    assert steps["allowed"].tolist() == [0b111] * 3 + [0]
    assert steps["first_start"].tolist() == [0, 1, 2, 3]
    assert steps["first_end"].tolist() == [0, 1, 2, 3]
    assert tables.starts["storage"].tolist() == [0] * 3
    assert tables.ends["num_bytes"].tolist() == [8_000_000_000] * 3
    assert len(tables.uneven) == 0


def test_a_batch_allocates_the_same_whatever_its_size() -> None:
    rng = np.random.default_rng(3)
    case = static_case(rng, 0)
    problem, plans = compiled_problem(case), draw_plans(rng, case)[:10]
    _nrt_python.memsys_enable_stats()
    allocations = []
    for engine in Engine:
        for count in (1, 1000):
            before = rtsys.get_allocation_stats().alloc
            play(problem, engine, np.concatenate([plans] * count))
            allocations.append(rtsys.get_allocation_stats().alloc - before)
    assert allocations == [0] * 2 * len(Engine)
