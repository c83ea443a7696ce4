"""Communication in full: the compiled simulator equals the reference, and what must hold does."""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from simcore.errors import DeadlockError, PlanError
from simcore.kernel import Engine, Status
from simcore.lower import choose_engine
from simcore.simulation import run_placement, simulate_batch
from simcore.units import GB
from tests import reference_toys
from tests.reference import ReferenceResult
from tests.strategies import (
    Case,
    compiled_problem,
    draw_busy_case,
    draw_placement,
    play_compiled,
    play_reference,
    seeded,
    toy,
)

BLOCKS = 4
DISCIPLINES = ("none", "port", "ordered", "fifo", "fair")


def busy_case(contention: str, index: int) -> Case:
    return draw_busy_case(seeded(np.random.default_rng([5, index])), contention)


def outcome(case: Case, *, compiled: bool) -> ReferenceResult | None:
    """Plays a case; None if it deadlocks."""
    try:
        return play_compiled(case) if compiled else play_reference(case)
    except DeadlockError:
        return None


def same(a: float, b: float, *, exact: bool) -> bool:
    return a == b if exact else math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15)


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("contention", DISCIPLINES)
def test_compiled_equals_reference_on_busy_problems(
    contention: str, block: int, num_cases: int
) -> None:
    exact = contention != "fair"
    for index in range(block, num_cases // 5, BLOCKS):
        case = busy_case(contention, index)
        expected, found = outcome(case, compiled=False), outcome(case, compiled=True)
        label = f"{contention}, case {index}: {case.settings}"
        assert (found is None) == (expected is None), label
        if found is None or expected is None:
            continue
        for field in ("start", "end"):
            pairs = zip(getattr(found, field), getattr(expected, field), strict=True)
            for op, (a, b) in enumerate(pairs):
                assert same(a, b, exact=exact), f"{label}: {field}[{op}] {a} {b}"
        assert same(found.step_time, expected.step_time, exact=exact), label
        assert found.allocated == expected.allocated, label


@pytest.mark.parametrize("contention", ["none", "port", "ordered"])
def test_the_sweep_of_collectives_gives_the_bits_of_the_event_loop(contention: str) -> None:
    swept = 0
    for index in range(300):
        rng = np.random.default_rng([6, index])
        case = draw_busy_case(seeded(rng), contention)
        static = msgspec.structs.replace(case.settings, order="program", p2p="copy")
        case = case._replace(settings=static, limits=None)
        problem = compiled_problem(case)
        if choose_engine(problem.mode, problem.tables) != Engine.SWEEP:
            continue
        swept += len(case.collectives) > 0
        draws, devices = seeded(rng), len(case.network.kinds)
        plans = np.stack([draw_placement(draws, case.graph, devices) for _ in range(5)])
        sweep, events = (
            simulate_batch(replace(problem, engine=engine), plans, threads=1)
            for engine in (Engine.SWEEP, Engine.EVENTS)
        )
        assert np.array_equal(sweep.step_time, events.step_time), index
        assert np.array_equal(sweep.allocated, events.allocated), index
    assert swept >= 10


def test_the_sweep_is_refused_where_a_collective_does_not_follow_its_last_producer() -> None:
    for behind, engine in ((1, Engine.SWEEP), (2, Engine.EVENTS)):
        placement = [0, 0, 0]
        placement.insert(behind, -1)
        wires = [(0, 1, [behind])]
        case = reference_toys.toy(
            [1] * 4, wires, placement, contention="none",
            collectives={behind: reference_toys.collective([0, 1], 1.0, GB)},
        )  # fmt: skip
        assert compiled_problem(case).engine == engine


# what goes wrong


def crossing(p2p: str, contention: str) -> Case:
    """The plan sends o0's tensor first, the stream of the receiver reads it last."""
    wires = [(0, 1, [3]), (1, 1, [2])]
    return toy([1, 1, 1, 1], wires, [0, 0, 1, 1], p2p=p2p, contention=contention)


@pytest.mark.parametrize("p2p", ["inline", "rendezvous"])
def test_a_deadlock_names_what_each_device_waits_for(p2p: str) -> None:
    case = crossing(p2p, "port")
    with pytest.raises(DeadlockError, match=r"the plan deadlocks: .*d1 waits at 'o2'"):
        run_placement(compiled_problem(case), case.placement)


@pytest.mark.parametrize("p2p", ["inline", "rendezvous"])
def test_a_batch_goes_on_behind_a_plan_that_deadlocks(p2p: str) -> None:
    problem = compiled_problem(crossing(p2p, "ordered"))
    plans = np.array([[0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    batch = simulate_batch(problem, plans)
    assert batch.status.tolist() == [Status.DEADLOCK, Status.OK] * 2
    assert batch.step_time.tolist() == [math.inf, 4.0] * 2
    assert not batch.allocated[batch.status == Status.DEADLOCK].any()


@pytest.mark.parametrize("p2p", ["inline", "rendezvous"])
def test_streams_need_program_order(p2p: str) -> None:
    with pytest.raises(PlanError, match=f"p2p '{p2p}' needs order 'program'"):
        compiled_problem(toy([1], [], [0], p2p=p2p, order="ready"))


def test_a_collective_op_and_its_collective_come_together_or_are_refused_by_name() -> None:
    case = reference_toys.toy(
        [1, 1], [(0, 1, [1])], [0, -1], collectives={1: reference_toys.collective([0], 1.0, GB)}
    )
    with pytest.raises(PlanError, match="toy: op 'o1' has no collective"):
        compiled_problem(case._replace(collectives={}))
    both = dict(case.collectives) | {0: case.collectives[1]}
    with pytest.raises(PlanError, match="toy: op 'o0' is not a collective op"):
        compiled_problem(case._replace(collectives=both))
