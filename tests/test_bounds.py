"""Lower bounds: no plan beats them, and on toys they are the optimum."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from numpy.typing import NDArray
from scipy.optimize import linprog

from simcore.bounds import critical_path_bound, placement_bound, work_bound
from simcore.graph import GraphBuilder, OpGraph, Out
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
    cases,
    compiled_problem,
    draw_placement,
    random_case,
    seeded,
)

SEED, NUM_CASES, PLANS = 41, 500, 4
SLACK = 1.02  # the work bound is this close to its linear program
JOB = Job(batch=1)


def mesh_problem(
    graph: OpGraph,
    kinds: Sequence[str],
    seconds: Sequence[Sequence[float]],
    launch: Sequence[Sequence[float]] | None = None,
    options: Settings | None = None,
) -> Problem:
    """A problem on devices joined pairwise without latency; seconds and launch are [op][kind]."""
    pairs = itertools.combinations(range(len(kinds)), 2)
    links = tuple((f"d{a}", f"d{b}", 1.0, 0.0) for a, b in pairs)
    cluster = build_cluster(Network(tuple(kinds), False, 0, links))
    distinct = tuple(dict.fromkeys(kinds))
    launch = launch or [[0.0] * len(distinct)] * len(seconds)
    cost = build_cost(seconds, launch, distinct, JOB)
    return Problem.build(graph, cluster, JOB, options or Settings(), cost=cost)


def chain(num_ops: int) -> OpGraph:
    builder = GraphBuilder("chain")
    inputs: tuple[int, ...] = ()
    for op in range(num_ops):
        handle = builder.op(f"o{op}", inputs=inputs, outputs=[Out(0)])
        inputs = builder.outputs(handle)
    return builder.build()


def independent(num_ops: int) -> OpGraph:
    builder = GraphBuilder("independent")
    for op in range(num_ops):
        builder.op(f"o{op}")
    return builder.build()


def best_of_all(problem: Problem) -> float:
    """The least step time of all placements, s."""
    devices = range(len(problem.cluster.devices))
    plans = np.array(list(itertools.product(devices, repeat=problem.graph.num_units)))
    return float(simulate_batch(problem, problem.expand(plans)).step_time.min())


# the optimum on toys


def test_on_one_device_the_bound_is_the_step():
    problem = mesh_problem(chain(3), KINDS[:1], [[1], [2], [4]])
    assert placement_bound(problem) == pytest.approx(7.0)
    assert best_of_all(problem) == 7.0


def test_a_chain_cannot_beat_its_path_on_any_number_of_devices():
    problem = mesh_problem(chain(3), KINDS[:1] * 3, [[1], [2], [4]])
    assert placement_bound(problem) == best_of_all(problem) == 7.0


def test_a_chain_takes_the_fastest_device_for_each_op():
    problem = mesh_problem(chain(3), KINDS[:2], [[1, 5], [9, 2], [4, 4]])
    assert placement_bound(problem) == best_of_all(problem) == 1.0 + 2.0 + 4.0


def test_independent_ops_are_shared_by_equal_devices():
    problem = mesh_problem(independent(4), KINDS[:1] * 2, [[3], [1], [2], [2]])
    assert placement_bound(problem) == pytest.approx(4.0)
    assert best_of_all(problem) == 4.0


def test_independent_ops_are_shared_by_unequal_devices_in_proportion():
    problem = mesh_problem(independent(3), KINDS[:2], [[2, 4]] * 3)
    assert work_bound(problem, problem.supported) == pytest.approx(4.0, rel=0.02)
    assert best_of_all(problem) == 4.0


def test_one_host_must_issue_every_op():
    launch = [[2.0], [3.0], [5.0]]
    for options, bound in (
        (Settings(), 11.0),  # the last is issued, then runs
        (Settings(host="per_rank"), 1.5),
        (Settings(launch="graph"), 1.5),
    ):
        problem = mesh_problem(independent(3), KINDS[:1] * 2, [[1]] * 3, launch, options)
        assert placement_bound(problem) == pytest.approx(bound)
        assert bound <= best_of_all(problem)


def test_ops_of_no_time_have_a_bound_of_none():
    seconds = [[0.0, 0.0], [0.0, np.inf]]
    assert placement_bound(mesh_problem(chain(2), KINDS[:2], seconds)) == 0.0


def test_pins_raise_the_bound():
    problem = mesh_problem(independent(2), KINDS[:1] * 2, [[3], [3]])
    pinned = np.array([[True, False], [True, False]])
    assert placement_bound(problem) == pytest.approx(3.0)
    assert placement_bound(problem, pinned) == pytest.approx(6.0)


def test_a_unit_without_a_device_has_no_plan():
    problem = mesh_problem(independent(2), KINDS[:2], [[1, 1], [1, np.inf]])
    assert placement_bound(problem, np.array([[True, True], [False, True]])) == np.inf


# no plan beats the bound


def with_gaps(case: Case, draws: Draws) -> Case:
    """Makes some ops impossible on kinds that their placement does not use."""
    seconds = case.cost.seconds.copy()
    kinds = [case.cost.kinds.index(device.kind) for device in case.cluster.devices]
    for op in range(case.graph.num_ops):
        for kind in range(len(case.cost.kinds)):
            if kind != kinds[case.placement[op]] and draws.chance(25):
                seconds[op, kind] = np.inf
    return case._replace(cost=replace(case.cost, seconds=seconds))


def drawn_matrix(problem: Problem, plans: NDArray[np.int32], draws: Draws) -> NDArray[np.bool_]:
    """Which devices each unit may use, [unit, dev]: those of the plans, and some others."""
    num_units, num_devices = problem.supported.shape
    allowed = np.array([[draws.chance(30) for _ in range(num_devices)] for _ in range(num_units)])
    for plan in plans:
        allowed[problem.graph.unit, plan] = True
    return allowed


@pytest.mark.parametrize("block", range(5))
def test_no_random_placement_beats_the_bound(block):
    for index in range(block, NUM_CASES, 5):
        rng = np.random.default_rng([SEED, index])
        draws = seeded(rng)
        case = with_gaps(random_case(rng), draws)
        problem, num_devices = compiled_problem(case), len(case.network.kinds)
        others = [draw_placement(draws, case.graph, num_devices) for _ in range(PLANS - 1)]
        plans = np.stack([case.placement, *others])
        answer = simulate_batch(problem, plans)
        times = np.where(answer.overflow == 0, answer.step_time, np.inf)
        assert placement_bound(problem) <= times.min(), f"case {index}"
        legal = plans[np.isfinite(times)]
        allowed = drawn_matrix(problem, legal, draws)
        assert placement_bound(problem) <= placement_bound(problem, allowed) * SLACK
        assert placement_bound(problem, allowed) <= times.min(), f"case {index}, pinned"


@given(cases())
@settings(deadline=None, max_examples=60)
def test_no_placement_beats_the_bound_on_shrinking_problems(case):
    problem = compiled_problem(case)
    answer = simulate_batch(problem, case.placement[None])
    assume(answer.overflow[0] == 0)
    step_time = answer.step_time[0]
    assert placement_bound(problem) <= step_time
    only = np.zeros_like(problem.supported)
    only[case.graph.unit, case.placement] = True
    assert placement_bound(problem) <= placement_bound(problem, only) * SLACK
    assert placement_bound(problem, only) <= step_time


# the work bound against its linear program


def fractional_optimum(work: NDArray[np.float64]) -> float:
    """The least makespan of units that may be divided over devices; work is [unit, dev] s."""
    num_units, num_devices = work.shape
    finite = np.isfinite(work)
    cost = np.zeros(work.size + 1)
    cost[-1] = 1.0
    shares = np.kron(np.eye(num_units), np.ones(num_devices))
    loads = np.tile(np.eye(num_devices), num_units) * np.where(finite, work, 0.0).ravel()
    solution = linprog(
        cost,
        A_ub=np.hstack([loads, -np.ones((num_devices, 1))]),
        b_ub=np.zeros(num_devices),
        A_eq=np.hstack([shares, np.zeros((num_units, 1))]),
        b_eq=np.ones(num_units),
        bounds=[(0.0, None if here else 0.0) for here in finite.ravel()] + [(0.0, None)],
    )
    assert solution.success
    return float(solution.fun)


@pytest.mark.parametrize("num_kinds", [1, 2, 3])
@pytest.mark.parametrize("with_pins", [False, True])
def test_the_work_bound_is_within_two_percent_of_its_linear_program(num_kinds, with_pins):
    rng = np.random.default_rng([SEED, num_kinds, with_pins])
    for _ in range(20):
        kinds = KINDS[:num_kinds] + tuple(rng.choice(KINDS[:num_kinds], rng.integers(0, 4)))
        num_ops = int(rng.integers(1, 15))
        speed = rng.uniform(0.1, 1.0, num_kinds)
        seconds = rng.uniform(0.0, 1.0, (num_ops, 1)) / speed
        seconds *= rng.uniform(0.5, 2.0, seconds.shape)
        problem = mesh_problem(independent(num_ops), kinds, seconds)
        allowed = problem.supported
        if with_pins:  # for a kind at a time: so that there are not many different devices
            may = rng.random((num_ops, num_kinds)) < 0.7
            may[may.sum(axis=1) == 0, 0] = True
            allowed = may[:, [KINDS.index(kind) for kind in kinds]]
        work = np.where(allowed, problem.seconds, np.inf)
        optimum = fractional_optimum(work)
        bound = work_bound(problem, allowed)
        assert bound <= optimum * (1 + 1e-9)
        assert optimum <= bound * SLACK


def test_the_path_bound_is_the_longest_path_of_the_fastest_times():
    builder = GraphBuilder("diamond")
    (a,) = builder.outputs(builder.op("a", outputs=[Out(10**9)]))
    (b,) = builder.outputs(builder.op("b", inputs=[a], outputs=[Out(0)]))
    (c,) = builder.outputs(builder.op("c", inputs=[a], outputs=[Out(0)]))
    builder.op("d", inputs=[b, c])
    problem = mesh_problem(builder.build(), KINDS[:2], [[1, 2], [5, 4], [3, 9], [1, 1]])
    assert critical_path_bound(problem, problem.supported) == 1.0 + 4.0 + 1.0
