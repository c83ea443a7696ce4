"""The environment of pipelined placement: masks, legality, memory, bound, brute force."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.pipelines.anneal import Best, anneal, every_plan, exhaustive
from agents.pipelines.bound import dag_bound
from agents.pipelines.compiled_masks import stage_choices
from agents.pipelines.draws import drawn_change
from agents.pipelines.env import Freedom, PipelineTask, random_actions
from agents.pipelines.moves import neighbours, random_neighbour, units_moved
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import Simulator
from agents.pipelines.published import pipedream_best
from agents.pipelines.refine import refined
from agents.planners.recorder import Budget
from agents.planners.space import PlacementSpace
from simcore import OpGraph, Problem, Settings, simulate
from simcore.cluster import resolve
from simcore.errors import PlanError
from simcore.plan import SEMANTICS_BATCH_NORM
from simcore.sources import load_graph
from simcore.units import GiB
from tests.test_pipeline_planners import FREE, layers, space_of
from tests.test_planners import GPU, OTHER, mesh


def task_of(graph: OpGraph, gpus: int = 3, *, batch: int = 4, **freedom: object) -> PipelineTask:
    space = space_of(graph, mesh(*[GPU] * gpus, **FREE), batch=batch)
    return PipelineTask.build(Simulator(nodes=NodeGraph.build(space)), Freedom(**freedom))


@pytest.fixture(scope="module")
def towers() -> PipelineTask:
    graph, job, _ = load_graph("two-tower")
    problem = Problem.build(graph, resolve("4xP100-PCIe"), job, Settings())
    simulator = Simulator(nodes=NodeGraph.build(PlacementSpace.build(problem), most=24))
    return PipelineTask.build(simulator)


def test_nodes_hold_every_unit_and_edges_go_forward(towers: PipelineTask) -> None:
    nodes = towers.simulator.nodes
    assert nodes.num_nodes == 24
    assert sorted(set(nodes.node.tolist())) == list(range(24))
    assert all(source < target for source, target in nodes.edges)
    assert not nodes.is_line


def test_every_plan_that_is_drawn_can_be_run(towers: PipelineTask) -> None:
    actions = random_actions(towers, np.random.default_rng(0), 48)
    found = towers.evaluate(actions)
    assert np.isfinite(found.step_time).all()
    batch = towers.simulator.nodes.space.problem.job.batch or 0
    for row in actions:
        plan = towers.plan(row)
        assert sorted(set(plan.stage)) == list(range(plan.num_stages))
        edges = towers.simulator.nodes.edges
        assert all(plan.stage[a] <= plan.stage[b] for a, b in edges)
        assert all(batch // plan.microbatches % len(devices) == 0 for devices in plan.devices)
        used = [device for devices in plan.devices for device in devices]
        assert len(set(used)) == len(used)
        assert towers.actions(plan).tolist() == row.tolist()


def test_the_reward_is_of_the_simulator_that_plan_files_meet(towers: PipelineTask) -> None:
    problem = towers.simulator.nodes.space.problem
    actions = random_actions(towers, np.random.default_rng(1), 6)
    found = towers.evaluate(actions)
    for row, step_time, fits in zip(actions, found.step_time, found.fits, strict=True):
        plan = towers.simulator.plan(towers.plan(row))
        result = simulate(problem.graph, problem.cluster, problem.job, plan)
        assert (result.step_time, result.feasible) == (step_time, fits)


def test_a_batch_of_plans_of_one_schedule_is_what_each_is_alone() -> None:
    task = task_of(
        layers([1.0, 2.0, 3.0, 1.0]), copies=False, microbatches=4, schedule="1f1b", recompute=False
    )
    plans = [plan for plan in every_plan(task) if plan.num_stages == 2]
    together = task.score(plans)
    assert task.simulator.lowered
    alone = [Simulator(nodes=task.simulator.nodes).scores([plan])[0] for plan in plans[:12]]
    assert together[:12] == alone


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_node_may_go_to_a_stage_if_and_only_if_the_rest_can_be_completed(
    data: st.DataObject,
) -> None:
    """Against all completions, of random DAGs of six nodes on three stages."""
    size, count = 6, 3
    reach = np.zeros((size, size), np.bool_)
    edges = data.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
    for a, b in sorted(((a, b) for a, b in edges if a < b), reverse=True):
        reach[a, b] = True
        reach[a] |= reach[b]
    every = [
        labels
        for labels in np.ndindex(*[count] * size)
        if set(labels) == set(range(count))
        and all(labels[a] <= labels[b] for a, b in zip(*np.nonzero(reach), strict=True))
    ]
    at = data.draw(st.integers(0, size - 1))
    prefix = data.draw(st.sampled_from(every))[:at]
    floor, used = np.zeros((1, size), np.int64), np.zeros((1, count), np.bool_)
    for node, stage in enumerate(prefix):
        used[0, stage] = True
        floor[0, reach[node]] = np.maximum(floor[0, reach[node]], stage)
    ground = (reach, np.zeros(size), np.ones(count))
    legal = stage_choices(at, floor, np.zeros((1, count)), used, np.array([count]), ground)[0]
    possible = {labels[at] for labels in every if labels[:at] == prefix}
    assert set(np.flatnonzero(legal).tolist()) == possible


def test_what_cannot_fit_is_masked() -> None:
    """Two layers of 6 GiB with gradients and state need a GPU of 16 GiB each."""
    task = task_of(layers([1.0] * 3, parameters=3 * GiB), gpus=3, microbatches=2, recompute=False)
    for plan in every_plan(task):
        held = np.bincount(plan.stage, task.held)
        assert held.max() <= task.rooms.max()


def test_the_enumeration_agrees_with_a_search_that_may_try_all() -> None:
    task = task_of(
        layers([1.0, 2.0, 3.0, 1.0]), gpus=2, microbatches=4, schedule="1f1b", recompute=False
    )
    best = exhaustive(task)
    found = anneal(task, Budget(evaluations=200), seed=1)
    assert best is not None
    assert found is not None
    assert found.score.step_time >= best.score.step_time * (1 - 1e-9) or found.plan.apart
    assert found.score.step_time == pytest.approx(best.score.step_time, rel=0.05)


def test_no_plan_beats_the_bound(towers: PipelineTask) -> None:
    bound = dag_bound(towers)
    found = towers.evaluate(random_actions(towers, np.random.default_rng(2), 32))
    assert 0.0 < bound <= found.step_time[found.fits].min()


def test_the_bound_of_small_tasks_holds_for_all_plans_and_is_not_far() -> None:
    task = task_of(layers([2.0] * 4), gpus=2, microbatches=4, recompute=False)
    best = exhaustive(task)
    assert best is not None
    assert 0.5 * best.score.step_time < dag_bound(task) <= best.score.step_time


def test_the_bound_sees_the_memory() -> None:
    """What a small fast GPU cannot hold has to be on a slow one."""
    slow = mesh(GPU, OTHER, **FREE)
    graph = layers([1.0] * 4, parameters=1433 * 2**20)
    free = PipelineTask.build(Simulator(nodes=NodeGraph.build(space_of(layers([1.0] * 4), slow))))
    tight = PipelineTask.build(Simulator(nodes=NodeGraph.build(space_of(graph, slow))))
    assert dag_bound(tight) >= dag_bound(free)


def test_a_model_too_large_for_all_memory_has_no_bound() -> None:
    task = task_of(layers([1.0] * 2, parameters=9 * GiB), gpus=2)
    assert dag_bound(task) == np.inf


def test_changes_stay_in_the_space(towers: PipelineTask) -> None:
    rng = np.random.default_rng(3)
    plan = towers.plan(random_actions(towers, rng, 1)[0])
    others = neighbours(towers, plan)
    assert plan not in others
    assert len(set(others)) == len(others)
    scores = towers.score(others[:40])
    assert all(np.isfinite(score.step_time) for score in scores)
    assert random_neighbour(towers, plan, rng) != plan
    for other in units_moved(towers, plan)[:5]:
        names = [name for stage in towers.simulator.plan(other).stages for name in stage.ops]
        assert len(set(names)) == len(names) == len(towers.simulator.nodes.node)


def test_drawn_changes_stay_in_the_space(towers: PipelineTask) -> None:
    rng = np.random.default_rng(5)
    here = towers.plan(random_actions(towers, rng, 1)[0])
    walked = []
    for _ in range(400):
        other = drawn_change(towers, here, rng)
        here = here if other.apart else other
        walked.append(here)
    assert len(set(walked)) > 100
    for plan in walked[::8]:
        assert towers.plan(towers.actions(plan)) == replace(
            plan, devices=tuple(tuple(sorted(group)) for group in plan.devices)
        )
    assert len({len(plan.devices) for plan in walked}) > 1
    assert all(np.isfinite(score.step_time) for score in towers.score(walked[::40]))


def test_refined_plans_are_no_worse_and_paid_for(towers: PipelineTask) -> None:
    plans = [towers.plan(row) for row in random_actions(towers, np.random.default_rng(6), 3)]
    found = [Best(*pair) for pair in zip(towers.score(plans), plans, strict=True)]
    budget = Budget(evaluations=40)
    better = refined(towers, found, budget, seed=0)
    assert budget.used <= 40
    assert better[0].score.rank < min(best.score.rank for best in found)
    assert [best.score.rank for best in better] == sorted(best.score.rank for best in better)
    assert refined(towers, [], Budget(evaluations=9), seed=0) == []


def test_fixed_stages_and_single_devices_are_kept() -> None:
    task = task_of(layers([1.0] * 5), gpus=4, stages=3, copies=False)
    for row in random_actions(task, np.random.default_rng(0), 16):
        assert [len(devices) for devices in task.plan(row).devices] == [1, 1, 1]


def test_microbatches_of_batch_norm_need_leave() -> None:
    graph = layers([1.0] * 3, target="aten.batch_norm")
    space = space_of(graph, mesh(GPU, GPU))
    nodes = NodeGraph.build(space)
    task = PipelineTask.build(Simulator(nodes=nodes))
    assert {rhythm.microbatches for rhythm in task.rhythms} == {1}
    allowed = Simulator(nodes=nodes, allow=frozenset({SEMANTICS_BATCH_NORM}))
    assert {r.microbatches for r in PipelineTask.build(allowed).rhythms} == {1, 2, 4, 8}


def test_pipedreams_stages_are_rated_on_the_same_ground(towers: PipelineTask) -> None:
    found = pipedream_best(towers)
    assert found is None or found.score.step_time >= dag_bound(towers)


def test_a_task_without_pipelines_is_refused() -> None:
    with pytest.raises(PlanError, match="no pipeline"):
        task_of(layers([1.0] * 3), gpus=2, stages=3)
