"""Alpa's and Piper's programs on nodes: brute force, and the simulator on their stages."""

import itertools
from typing import Any

import numpy as np
import pytest

from agents.exact.piper import RECOMPUTE, piper_seconds
from agents.exact.piper_planner import plan_piper
from agents.pipelines.alpa import alpa_best, alpa_plan
from agents.pipelines.bound import dag_bound
from agents.pipelines.env import Freedom, PipelineTask
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import Simulator
from agents.pipelines.published import pipedream_best, piper_best, piper_problem
from agents.pipelines.teachers import equal_plans, is_in, taught_plans
from agents.planners.compiled_stage_dag import stage_paces
from agents.planners.recorder import Budget
from agents.planners.stage_dag import make_program
from simcore.errors import InfeasibleError
from simcore.units import GiB
from tests.test_pipeline_planners import FREE, layers, space_of
from tests.test_planners import GPU, OTHER, mesh
from tests.test_stage_dag import branches


def task_of(seconds: list[float], *gpus: str, kept: int = 0, **freedom: Any) -> PipelineTask:
    graph = layers(seconds, kept=kept, activation=800_000_000)
    space = space_of(graph, mesh(*gpus, bandwidth=1e10))
    return PipelineTask.build(Simulator(nodes=NodeGraph.build(space)), Freedom(**freedom))


def brute_force(task: PipelineTask, microbatches: int) -> float:
    """Returns Alpa's least latency over all chains of stages and sizes of submeshes."""
    size, devices = task.num_nodes, task.num_devices
    program = make_program(task, microbatches, range(size), range(devices))
    assert program is not None
    paces = stage_paces(program, microbatches)
    best = np.inf
    for count in range(2, min(size, devices) + 1):
        for cuts in itertools.combinations(range(1, size), count - 1):
            bounds = (0, *cuts, size)
            for ways in itertools.product(range(len(program.copies)), repeat=count):
                copies = program.copies[list(ways)]
                if copies.sum() > devices or any(c & (c - 1) for c in copies.tolist()):
                    continue
                seats = np.concatenate([[0], np.cumsum(copies)[:-1]])
                times = []
                for k in range(count):
                    stage = ways[k], bounds[k], bounds[k + 1], int(seats[k])
                    in_flight = min(microbatches, count - k)
                    fits = paces.most[stage] >= in_flight
                    times.append((paces.plain if fits else paces.again)[stage])
                best = min(best, sum(times) + (microbatches - 1) * max(times))
    return float(best)


@pytest.mark.parametrize("kinds", [(GPU,) * 3, (GPU, OTHER, GPU), (OTHER, GPU, GPU, GPU)])
@pytest.mark.parametrize("kept", [0, 8 * GiB])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_alpa_agrees_with_brute_force(kinds: tuple[str, ...], kept: int, microbatches: int) -> None:
    task = task_of([1.0, 3.0, 2.0, 1.0, 2.5], *kinds, kept=kept)
    least = brute_force(task, microbatches)
    found = alpa_plan(task, microbatches, gap=1e-12)
    assert found is not None
    assert found.seconds == pytest.approx(least, rel=1e-9)
    rough = alpa_plan(task, microbatches)
    assert rough is not None
    assert least * (1 - 1e-9) <= rough.seconds <= least * 1.002


def test_alpas_stages_take_submeshes_and_are_simulated() -> None:
    task = task_of([1.0, 2.0, 4.0, 1.0], *[GPU] * 4)
    best = alpa_best(task)
    assert best is not None
    assert all(len(devices) in {1, 2, 4} for devices in best.plan.devices)
    assert best.score == task.score([best.plan])[0]
    assert best.score.step_time >= dag_bound(task)


@pytest.mark.parametrize("kept", [0, 12 * GiB])
def test_pipers_plan_is_best_by_its_own_objective(kept: int) -> None:
    """Against all chains of stages with replicas, all running their forward again or none."""
    task = task_of([1.0, 3.0, 2.0, 1.0], *[GPU] * 3, kept=kept)
    problem = piper_problem(task, 4)
    plan = plan_piper(problem)
    assert plan.seconds_per_sample == pytest.approx(piper_seconds(problem, plan.stages))
    stage = type(plan.stages[0])
    names = [way.id for way in problem.nodes[0].configs["1"]]
    for count in range(1, 4):
        for cuts in itertools.combinations(range(1, 4), count - 1):
            bounds = (0, *cuts, 4)
            for copies in itertools.product((1, 2), repeat=count):
                for name in names:
                    stages = tuple(
                        stage(tuple(range(a, b)), d, 1, (name,) * (b - a))
                        for (a, b), d in zip(itertools.pairwise(bounds), copies, strict=True)
                    )
                    seconds = piper_seconds(problem, stages)
                    assert plan.seconds_per_sample <= seconds * (1 + 1e-9)


def test_pipers_stages_are_simulated_with_what_it_runs_again() -> None:
    """Two microbatches of twice the size fit in no way by its count; four do, recomputed."""
    task = task_of([1.0] * 4, *[GPU] * 2, kept=12 * GiB)
    plan = plan_piper(piper_problem(task, 4))
    assert any(RECOMPUTE in stage.configs for stage in plan.stages)
    with pytest.raises(InfeasibleError):
        plan_piper(piper_problem(task, 2))
    best = piper_best(task)
    assert best is not None
    assert best.score.fits
    assert best.score.step_time >= dag_bound(task)
    with pytest.raises(InfeasibleError, match="no pipeline on 2 devices fits"):
        piper_best(task_of([1.0] * 4, *[GPU] * 2, kept=900 * GiB))


def test_piper_puts_branches_side_by_side() -> None:
    space = space_of(branches(((4.0,), (4.0,))), mesh(*[GPU] * 3, **FREE))
    task = PipelineTask.build(Simulator(nodes=NodeGraph.build(space)), Freedom(microbatches=4))
    best = piper_best(task)
    assert best is not None
    first, second = best.plan.stage[0], best.plan.stage[1]
    assert first != second


# teachers


def test_teachers_plans_are_in_the_space_and_none_beats_the_bound() -> None:
    task = task_of([1.0, 3.0, 2.0, 1.0, 2.0], *[GPU] * 3)
    plans = taught_plans(task)
    assert len(plans) == len(set(plans)) > 2
    for plan in plans:
        assert task.plan(task.actions(plan)) == plan
    pipedream = pipedream_best(task)
    assert pipedream is None or pipedream.plan in plans
    scores = task.score(plans)
    assert min(score.step_time for score in scores) >= dag_bound(task)


def test_teachers_keep_to_what_is_asked() -> None:
    task = task_of([1.0, 3.0, 2.0, 1.0], *[GPU] * 4, stages=3, copies=False, recompute=False)
    plans = taught_plans(task)
    assert plans
    for plan in plans:
        assert plan.num_stages == 3
        assert {len(devices) for devices in plan.devices} == {1}
        assert set(plan.recompute) == {"none"}
    other = next(equal_plans(task_of([1.0, 3.0, 2.0, 1.0], *[GPU] * 4)))
    assert not is_in(task, other)


def test_copies_of_the_model_and_equal_copied_stages_are_taught() -> None:
    task = task_of([1.0, 3.0, 2.0, 1.0], *[GPU] * 4, least=1)
    plans = taught_plans(task)
    sizes = {tuple(len(devices) for devices in plan.devices) for plan in plans}
    assert {(4,), (1,), (2, 2), (1, 1, 1, 1)} <= sizes
    assert taught_plans(task, Budget(evaluations=0)) == plans[:1]
