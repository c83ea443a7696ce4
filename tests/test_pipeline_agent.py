"""The pipeline agent: its decisions are legal, repeatable, and get better."""

import copy
import functools
import json

import numpy as np
import pytest
import torch

from agents import pipeline_agent, ppo
from agents.pipelines.env import Freedom, PipelineTask
from agents.pipelines.estimate import Estimator
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import Simulator
from agents.pipelines.teachers import copies_plans, taught_plans
from agents.planners.data_parallel import data_parallel
from agents.planners.recorder import Budget
from agents.policy import drawing, repeating
from tests.test_pipeline_planners import FREE, layers, space_of
from tests.test_planners import GPU, OTHER, mesh

SMALL = {"width": 16, "layers": 1, "placements": 8}


def task_of(*gpus: str, **freedom: object) -> PipelineTask:
    space = space_of(layers([1.0, 2.0, 3.0, 1.0, 2.0]), mesh(*gpus, **FREE))
    return PipelineTask.build(Simulator(nodes=NodeGraph.build(space)), Freedom(**freedom))


def policy_of(task: PipelineTask, **config: object) -> pipeline_agent.Policy:
    how = pipeline_agent.Config(**SMALL | config)
    torch.manual_seed(0)
    return pipeline_agent.Policy(how, pipeline_agent.Network(how), task)


@pytest.mark.parametrize("direction", ["directed", "symmetrised"])
def test_every_decision_is_legal(direction: str) -> None:
    task = task_of(GPU, GPU, OTHER)
    decided = policy_of(task, direction=direction).decide(
        drawing(16, torch.Generator().manual_seed(0))
    )
    assert decided.actions.shape == (16, len(task.widths))
    assert np.isfinite(task.evaluate(decided.actions.numpy()).step_time).all()


def test_what_was_sampled_is_judged_alike() -> None:
    task = task_of(GPU, GPU, GPU)
    policy = policy_of(task)
    drawn = policy.decide(drawing(6, torch.Generator().manual_seed(1)))
    again = policy.decide(repeating(drawn.actions))
    assert torch.equal(drawn.actions, again.actions)
    assert drawn.sequence is not None
    assert again.sequence is not None
    torch.testing.assert_close(drawn.sequence, again.sequence)


def test_the_symmetrised_encoder_does_not_see_which_way_edges_go() -> None:
    seen = policy_of(task_of(GPU, GPU)).seen
    turned = copy.copy(seen)
    object.__setattr__(turned, "source", seen.target)
    object.__setattr__(turned, "target", seen.source)
    config = pipeline_agent.Config(**SMALL)
    torch.manual_seed(0)
    encoder = pipeline_agent.Network(config).encoder
    nodes = torch.from_numpy(seen.nodes)
    for direction, alike in (("symmetrised", True), ("directed", False)):
        one, other = (
            encoder(nodes, pipeline_agent.edges_of(each, direction)) for each in (seen, turned)
        )
        assert torch.allclose(one, other, atol=1e-5) == alike


def test_a_policy_leans_to_a_start() -> None:
    task = task_of(GPU, GPU, GPU)
    policy = policy_of(task)
    generator = torch.Generator().manual_seed(2)
    start = policy.decide(drawing(1, generator)).actions[0]
    policy.lean(start, 0.99)
    drawn = policy.decide(drawing(32, generator)).actions
    assert (drawn == start).float().mean() > 0.9


def test_a_network_goes_to_another_cluster() -> None:
    config = pipeline_agent.Config(**SMALL)
    network = pipeline_agent.Network(config)
    for gpus in ((GPU, GPU), (OTHER, GPU, GPU, GPU)):
        task = task_of(*gpus)
        decided = pipeline_agent.Policy(config, network, task).decide(
            drawing(4, torch.Generator().manual_seed(0))
        )
        assert np.isfinite(task.evaluate(decided.actions.numpy()).step_time).all()


def test_training_makes_plans_better_and_repeats_bit_for_bit() -> None:
    config = pipeline_agent.Config(**SMALL | {"placements": 16, "evaluations": 192})
    task = task_of(GPU, GPU, GPU)
    first, second = (pipeline_agent.train(config, task) for _ in range(2))
    assert first.finalists == second.finalists
    early, late = first.history[0], first.history[-1]
    assert late.mean_step_time < early.mean_step_time
    assert first.finalists[0].fits


def test_one_stage_is_copies_of_the_model_to_the_simulator() -> None:
    task = task_of(GPU, GPU, least=1)
    space = task.simulator.nodes.space
    plans = [plan for plan in copies_plans(task) if len(plan.devices[0]) == 2]
    assert len(plans) == 2  # summed bucket by bucket, or at once
    copies = data_parallel(space).best
    assert copies is not None
    best = min(score.step_time for score in task.score(plans))
    assert best == pytest.approx(copies.result.step_time, rel=1e-12)
    drawn = policy_of(task).decide(drawing(64, torch.Generator().manual_seed(0))).actions
    assert {task.plan(row).num_stages for row in drawn.numpy()} == {1, 2}


@pytest.mark.parametrize("arm", [{}, {"policy": False}, {"refining": 0.0}, {"stages": 2}])
def test_no_teacher_is_better_than_what_is_found(arm: dict[str, object]) -> None:
    config = pipeline_agent.Config(**SMALL | arm)
    freedom = pipeline_agent.freedom_of(config)
    task = task_of(GPU, OTHER, GPU, stages=freedom.stages, least=freedom.least)
    found = pipeline_agent.solve(config, task, Budget(evaluations=90))
    assert found.best is not None
    assert found.taught is not None
    assert found.evaluations <= 90
    scores = task.score(taught_plans(task))
    assert found.taught.score.rank == min(score.rank for score in scores)
    assert found.best.score.rank <= found.taught.score.rank
    assert task.simulator.scores([found.best.plan]) == [found.best.score]


def test_the_same_seed_finds_the_same_plan() -> None:
    config = pipeline_agent.Config(**SMALL | {"teachers": False})
    task = task_of(GPU, GPU, least=1)
    one, other = (pipeline_agent.solve(config, task, Budget(evaluations=40)) for _ in range(2))
    assert one == other


def test_without_teachers_it_begins_from_nothing() -> None:
    config = pipeline_agent.Config(**SMALL | {"teachers": False})
    found = pipeline_agent.solve(config, task_of(GPU, GPU, least=1), Budget(evaluations=40))
    assert found.taught is None
    assert found.best is not None
    assert found.best.score.fits


def test_of_many_plans_drawn_the_likeliest_new_ones_are_kept() -> None:
    task = task_of(GPU, GPU, GPU)
    policy, generator = policy_of(task, wide=8), torch.Generator().manual_seed(0)
    with torch.no_grad():
        kept = [policy.decide(drawing(6, generator)).actions for _ in range(3)]
        every = policy_of(task, wide=1).decide(drawing(48, generator)).actions
    marks = [tuple(row) for actions in kept for row in actions.tolist()]
    assert len(set(marks)) == len(marks) == 18
    estimate = Estimator(task)

    def mean(actions: torch.Tensor) -> float:
        return float(np.mean([estimate(task.plan(row)) for row in actions.numpy()]))

    assert mean(kept[0]) < mean(every)
    other = policy_of(task, wide=8)
    other.load_state_dict(policy.state_dict())
    assert other.met == policy.met


def test_arms_decide_what_they_say() -> None:
    config = pipeline_agent.Config(**SMALL | {"stages": 3, "copies": False, "evaluations": 16})
    task = task_of(GPU, GPU, GPU, GPU, stages=3, copies=False)
    assert pipeline_agent.freedom_of(config) == Freedom(stages=3, least=1, copies=False)
    best = pipeline_agent.train(config, task).finalists[0]
    plan = task.plan(np.array(best.actions))
    assert [len(devices) for devices in plan.devices] == [1, 1, 1]


def test_a_run_is_resumed_where_it_stopped(tmp_path) -> None:  # type: ignore[no-untyped-def]
    task = task_of(GPU, GPU)
    known = taught_plans(task)
    whole, half = (
        pipeline_agent.Config(
            **SMALL | {"evaluations": len(known) + 8 * iterations, "checkpoint_every": 1}
        )
        for iterations in (5, 2)
    )
    train = functools.partial(pipeline_agent.train, task=task, known=known)
    assert train(half, folder=tmp_path).iterations == 2
    resumed = train(whole, folder=tmp_path, resume=True)
    assert resumed.iterations == 5
    assert resumed.finalists == train(whole).finalists


def test_the_config_is_checked() -> None:
    with pytest.raises(ValueError, match="direction"):
        pipeline_agent.Config(direction="sideways")
    assert issubclass(pipeline_agent.Config, ppo.Config)


@pytest.mark.slow
def test_the_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--json", "--set", "evaluations=8", "--set", "placements=8"]
    status = pipeline_agent.main(["two-tower", "--cluster", "4xP100-PCIe", *options])
    record = json.loads(capsys.readouterr().out)
    assert status == 0
    assert record["feasible"] is True
    assert record["evaluations"] == 8


def test_the_command_refuses_what_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["two-tower", "--cluster", "4xP100-PCIe", "--set", "size=3"]
    assert pipeline_agent.main(argv) == 2
    assert "no 'size'" in capsys.readouterr().err
