"""The bound that counts transfers, shared devices and memory: brute force, and toys by hand."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from simcore.bounds import critical_path_bound, placement_bound, work_bound
from simcore.graph import GraphBuilder, OpClass, OpGraph, Out
from simcore.job import Job
from simcore.lower import Problem
from simcore.plan import Settings
from simcore.simulation import simulate_batch
from tests.strategies import (
    KINDS,
    Case,
    Draws,
    Network,
    build_cluster,
    build_cost,
    compiled_problem,
    draw_busy_case,
    draw_case,
    seeded,
)

SEED = 47
MOST_PLACEMENTS = 3000
GB = 10**9
JOB = Job(batch=1)
CLOSE = 2e-3  # relative; the bound is bisected


def problem_of(
    graph: OpGraph, seconds: Sequence[float], devices: int = 2, options: Settings | None = None
) -> Problem:
    """A problem on equal devices joined pairwise at 1 GB/s, without latency or launches."""
    links = tuple(
        (f"d{a}", f"d{b}", 1.0, 0.0) for a, b in itertools.combinations(range(devices), 2)
    )
    cluster = build_cluster(Network(KINDS[:1] * devices, False, 0, links))
    cost = build_cost([[s] for s in seconds], [[0.0]] * len(seconds), KINDS[:1], JOB)
    return Problem.build(graph, cluster, JOB, options or Settings(slow_down=False), cost=cost)


def all_placements(problem: Problem) -> NDArray[np.int32]:
    """Every device for every unit that computes, [placement, op]; -1 for collectives."""
    graph = problem.graph
    is_collective = graph.op_class == OpClass.COLLECTIVE
    units = np.unique(graph.unit[~is_collective])
    chosen = list(itertools.product(range(len(problem.cluster.devices)), repeat=len(units)))
    placements = np.zeros((len(chosen), graph.num_units), np.int32)
    placements[:, units] = np.array(chosen, np.int32).reshape(len(chosen), len(units))
    ops = problem.expand(placements)
    ops[:, is_collective] = -1
    return ops


def best_of_all(problem: Problem) -> float:
    """The least step time of all placements that fit the memory, s; inf if none does."""
    answer = simulate_batch(problem, all_placements(problem))
    return float(np.where(answer.overflow == 0, answer.step_time, np.inf).min())


def small_case(draws: Draws) -> Case:
    """Draws up to nine ops on few devices, with all that a simulation can have."""
    if draws.chance(40):
        return draw_case(draws, 9, 3)
    contention = draws.pick(("fair", "fifo", "ordered", "port", "none"))
    return draw_busy_case(draws, contention, draws.integer(2, 9))


def check_cases(first: int, count: int) -> tuple[float, float]:
    """Compares with brute force; returns how often the old bounds and this are the optimum."""
    reached = []
    for index in range(first, first + count):
        problem = compiled_problem(small_case(seeded(np.random.default_rng([SEED, index]))))
        graph = problem.graph
        computing = len(np.unique(graph.unit[graph.op_class != OpClass.COLLECTIVE]))
        if len(problem.cluster.devices) ** computing > MOST_PLACEMENTS:
            continue
        best, bound = best_of_all(problem), placement_bound(problem)
        assert bound <= best, f"case {index}: {bound} {best}"
        allowed = problem.supported
        simple = max(critical_path_bound(problem, allowed), work_bound(problem, allowed))
        assert simple <= bound, f"case {index}"
        if 0 < best < np.inf:
            reached.append((best <= simple * (1 + CLOSE), best <= bound * (1 + CLOSE)))
    before, now = np.mean(reached, axis=0)
    return float(before), float(now)


def test_no_placement_at_all_beats_the_bound_on_small_problems() -> None:
    before, now = check_cases(0, 60)
    assert now > before


@pytest.mark.slow
def test_no_placement_at_all_beats_the_bound_on_thousands_of_small_problems() -> None:
    before, now = check_cases(1000, 4000)
    assert now > before + 0.1


def fork(num_bytes: int) -> OpGraph:
    """One op, two that read it, and one that reads both."""
    builder = GraphBuilder("fork")
    (a,) = builder.outputs(builder.op("a", outputs=[Out(num_bytes)]))
    (b,) = builder.outputs(builder.op("b", inputs=[a], outputs=[Out(num_bytes)]))
    (c,) = builder.outputs(builder.op("c", inputs=[a], outputs=[Out(num_bytes)]))
    builder.op("d", inputs=[b, c])
    return builder.build()


@pytest.mark.parametrize(
    ("num_bytes", "step"),
    [
        (0, 1 + 4 + 1),  # both branches at once
        (GB, 1 + 1 + 4 + 1),  # a second there; the last op stays there
        (4 * GB, 1 + 4 + 4 + 1),  # sending takes longer than computing here
    ],
)
def test_a_branch_elsewhere_pays_its_way(num_bytes: int, step: float) -> None:
    problem = problem_of(fork(num_bytes), [1, 4, 4, 1])
    assert best_of_all(problem) == pytest.approx(step)
    assert placement_bound(problem) == pytest.approx(step, rel=CLOSE)
    assert critical_path_bound(problem, problem.supported) == 6.0


def test_ops_that_share_a_device_run_one_after_another() -> None:
    builder = GraphBuilder("tied")
    one = builder.op("one", outputs=[Out(0)])
    (a,) = builder.outputs(one)
    builder.op("two", inputs=[a], unit_of=one)
    builder.op("three", inputs=[a], unit_of=one)
    problem = problem_of(builder.build(), [1, 2, 3])
    assert best_of_all(problem) == 6.0
    assert placement_bound(problem) == pytest.approx(6.0)
    assert critical_path_bound(problem, problem.supported) == 4.0


def test_a_device_without_a_link_is_no_help() -> None:
    cluster = build_cluster(Network(KINDS[:1] * 2, False, 0, ()))
    cost = build_cost([[s] for s in (1, 4, 4, 1)], [[0.0]] * 4, KINDS[:1], JOB)
    problem = Problem.build(fork(0), cluster, JOB, Settings(), cost=cost)
    assert placement_bound(problem) == pytest.approx(10.0, rel=CLOSE)


def holders(gigabytes: Sequence[int]) -> OpGraph:
    """Independent ops with a parameter of so many gigabytes each."""
    builder = GraphBuilder("holders")
    for index, size in enumerate(gigabytes):
        builder.op(f"o{index}", inputs=[builder.parameter(f"p{index}", size * GB)])
    return builder.build()


def memory_problem(graph: OpGraph, kinds: Sequence[str], seconds: Sequence[float]) -> Problem:
    """A problem on a fast and a slow kind of device; seconds is [kind]."""
    links = tuple((f"d{a}", f"d{b}", 1.0, 0.0) for a, b in itertools.combinations(range(2), 2))
    cluster = build_cluster(Network(tuple(kinds), False, 0, links))
    cost = build_cost([seconds] * graph.num_ops, [[0.0] * 2] * graph.num_ops, kinds, JOB)
    return Problem.build(graph, cluster, JOB, Settings(), cost=cost)


def test_what_does_not_fit_the_fast_device_runs_on_the_slow_one() -> None:
    kinds = (KINDS[0], KINDS[3])  # 16 GB, and a host with much more
    problem = memory_problem(holders([9, 9, 9]), kinds, (1.0, 20.0))
    assert best_of_all(problem) == 40.0  # one fits the GPU
    bound = work_bound(problem, problem.supported)
    assert 20.0 < bound <= placement_bound(problem) <= 40.0


def test_short_memory_and_a_device_that_is_not_allowed_go_together() -> None:
    problem = memory_problem(holders([9, 9]), (KINDS[0], KINDS[3]), (1.0, 20.0))
    allowed = problem.supported.copy()
    allowed[0, 0] = False  # the first runs on the host, the other fits the GPU
    assert placement_bound(problem, allowed) == pytest.approx(20.0)


def test_what_fits_no_device_has_no_plan() -> None:
    problem = memory_problem(holders([40]), KINDS[:2], (1.0, 1.0))
    assert best_of_all(problem) == np.inf
    assert placement_bound(problem) == np.inf


def test_ready_devices_take_their_ops_in_any_order() -> None:
    for order in ("program", "ready"):
        problem = problem_of(fork(GB), [1, 4, 4, 1], options=Settings(order=order))
        assert placement_bound(problem) <= best_of_all(problem)
