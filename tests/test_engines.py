"""Event loop, sweep and lanes give the same bits wherever more than one of them applies."""

from dataclasses import replace

import numpy as np
import pytest
from numba.core.runtime import _nrt_python, rtsys

from simcore.kernel import Engine, Status
from simcore.lower import Problem, choose_engine
from simcore.plan import Settings
from simcore.simulation import BatchResult, simulate_batch
from tests.strategies import Case, compiled_problem, draw_placement, random_case, seeded

NUM_PLANS = 19  # two groups of lanes and some left over
STATIC = [
    (host, launch, contention)
    for host in ("one", "per_rank")
    for launch in ("eager", "graph")
    for contention in ("none", "port", "ordered")
]


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
    assert choose_engine(Settings(contention="port"), 4) == Engine.LANES
    assert choose_engine(Settings(contention="none"), 64) == Engine.SWEEP
    assert choose_engine(Settings(contention="ordered"), 4) == Engine.SWEEP
    assert choose_engine(Settings(contention="fifo"), 4) == Engine.EVENTS
    assert choose_engine(Settings(contention="none", order="ready"), 4) == Engine.EVENTS


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
    assert allocations == [0] * 6
