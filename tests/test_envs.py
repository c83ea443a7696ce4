"""Environments and their task: contracts, masks, ends of episodes, the toy by brute force."""

import dataclasses
import itertools
import subprocess
import sys

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import TimeLimit
from numpy.testing import assert_allclose

from agents.envs import OneShotPlacement, StepwisePlacement
from agents.observe import FEATURES, group_features
from agents.planners.grouping import Grouping
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace
from agents.reward import negative_log_time
from agents.task import TOY_OPTIMUM, PlacementTask, toy
from simcore import Cluster, GraphBuilder, Job, OpGraph, Problem, Status
from simcore.graph import Out
from simcore.units import GiB

CLUSTER = Cluster.preset("4xV100-NVLink")  # gpu0 to gpu3, and cpu0
ENVS = {
    "one_shot": OneShotPlacement,
    "sparse": StepwisePlacement,
    "dense": lambda task: StepwisePlacement(task, dense=True),
}
OPTIMAL = [0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0]  # of the toy
every_env = pytest.mark.parametrize("make", ENVS.values(), ids=ENVS.keys())


def chain_space(length: int = 12, **limits) -> PlacementSpace:
    names = [f"op{number}" for number in range(length)]
    graph = OpGraph.from_edges(
        [(name, 1e-3 * (1 + number % 3)) for number, name in enumerate(names)],
        [(a, b, 1_000_000) for a, b in itertools.pairwise(names)],
    )
    return PlacementSpace.build(Problem.build(graph, CLUSTER, Job()), **limits)


def pinned() -> PlacementTask:
    """A chain with its first unit on gpu3 and gpu2 out of use."""
    return PlacementTask.build(chain_space(pins={0: 3}, exclude=[2]), num_groups=6)


def crowded() -> PlacementTask:
    """Four units that hold 6 GiB each, so that two fit on a 16 GiB GPU and three do not."""
    builder = GraphBuilder("crowded")
    tensors = ()
    for number in range(4):
        held = builder.parameter(f"w{number}", 6 * GiB)
        op = builder.op(f"op{number}", inputs=(held, *tensors), outputs=(Out(10),), seconds=1e-3)
        tensors = builder.outputs(op)
    graph = builder.build(measured_on="V100-SXM2-16GB")
    return PlacementTask.build(PlacementSpace.build(Problem.build(graph, CLUSTER, Job())))


# the toy


def test_brute_force_finds_nothing_better_than_the_optimum_of_the_toy():
    task = toy()
    free = task.num_groups - 1  # the GPUs are alike: the first group may stay on gpu0
    digits = np.stack(np.unravel_index(np.arange(3**free), (3,) * free), axis=1)
    found = task.evaluate(np.pad(digits, ((0, 0), (1, 0))))
    assert found.step_time.min() == pytest.approx(TOY_OPTIMUM, rel=1e-12)
    assert (found.step_time < TOY_OPTIMUM * 1.0001).sum() == 2  # times three for gpu0
    assert task.reward.baseline == pytest.approx(29e-3)
    assert found.fits.all()


def test_the_toy_has_the_reward_worked_by_hand():
    found = toy().evaluate(np.array([[0] * 11, OPTIMAL]))
    assert_allclose(found.reward, [0.0, np.log(29 / 14)], atol=1e-12)


# the task


def test_groups_are_numbered_in_program_order_and_cover_all_units():
    space = chain_space()
    grouping = Grouping.of(space, 5)
    assert 1 < grouping.num_groups <= 5
    assert (np.diff(grouping.group[space.order]) >= 0).all()
    assert set(grouping.group.tolist()) == set(range(grouping.num_groups))


def test_masks_are_where_units_of_a_group_may_go():
    task = pinned()
    grouping, space = task.grouping, task.grouping.space
    for group, device in itertools.product(range(task.num_groups), range(task.num_devices)):
        may = space.allowed[grouping.group == group, device].any()
        assert task.allowed[group, device] == (may and device in space.devices)
    assert not task.allowed[:, 2].any()  # excluded
    assert not task.allowed[:, 4].any()  # a CPU beside GPUs


def test_units_that_may_not_go_with_their_group_stay_where_they_may_be():
    task = pinned()
    placements = task.grouping.expand(np.array([[0] * task.num_groups, [1] * task.num_groups]))
    assert placements[:, 0].tolist() == [3, 3]
    assert (placements[0, 1:] == 0).all()
    assert (placements[1, 1:] == 1).all()


def test_a_placement_of_groups_is_summarised_as_itself():
    grouping = Grouping.of(chain_space(), 5)
    actions = np.arange(grouping.num_groups) % 4
    assert grouping.summarise(grouping.expand(actions)).tolist() == actions.tolist()


def test_rewards_of_a_batch_are_those_of_its_simulations():
    task = pinned()
    rng = np.random.default_rng(0)
    actions = rng.choice([0, 1], size=(20, task.num_groups))
    found = task.evaluate(actions)
    scores = task.grouping.space.evaluate(task.grouping.expand(actions))
    assert found.step_time.tolist() == scores.step_time.tolist()
    assert found.reward.tolist() == (-np.log(scores.step_time / task.reward.baseline)).tolist()


@pytest.mark.parametrize("wrong", [2, 4, 5, -1])
def test_an_action_that_the_mask_forbids_is_illegal_and_not_simulated(wrong):
    task = pinned()
    simulated = []

    def score(placements):
        simulated.extend(placements)
        return task.score(placements)

    watched = dataclasses.replace(task, score=score)
    actions = np.zeros((3, task.num_groups), int)
    actions[1, 2] = wrong
    found = watched.evaluate(actions)
    assert found.status.tolist() == [Status.OK, Status.ILLEGAL_DEVICE, Status.OK]
    assert found.fits.tolist() == [True, False, True]
    assert np.isinf(found.step_time[1])
    assert found.reward[1] == pytest.approx(-np.log(400))
    assert len(simulated) == 2
    assert len(watched.evaluate(actions[1:2]).reward) == 1
    assert len(simulated) == 2


def test_plans_over_the_memory_get_less_the_more_they_are_over():
    task = crowded()
    found = task.evaluate(np.array([[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]))
    assert found.fits.tolist() == [True, False, False]
    assert found.reward[0] > found.reward[1] > found.reward[2] > -np.log(400)


def test_where_a_budget_ends_only_what_was_paid_for_comes_back():
    task = toy()
    recorder, budget = Recorder(space=task.grouping.space), Budget(evaluations=5)
    recorded = task.recorded("me", recorder, budget)
    actions = np.zeros((4, 11), int)
    actions[1, 0] = -1  # illegal: costs nothing
    assert len(recorded.evaluate(actions).reward) == 4
    assert recorder.evaluations == 3
    assert len(recorded.evaluate(actions).reward) == 3  # two paid for, with the illegal one between
    assert len(recorded.evaluate(actions).reward) == 0
    assert recorder.best is not None
    assert recorder.best.finder == "me"


def test_a_budget_of_seconds_ends_too():
    task = toy()
    recorded = task.recorded("me", Recorder(space=task.grouping.space), Budget(seconds=0.0))
    assert len(recorded.evaluate(np.zeros((4, 11), int)).reward) == 0


def test_actions_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\[plan, 11\]"):
        toy().evaluate(np.zeros((2, 10), int))


def test_the_hash_of_a_task_changes_with_what_decides_its_rewards():
    space = chain_space()
    tasks = [
        PlacementTask.build(space, num_groups=6),
        PlacementTask.build(space, num_groups=5),
        PlacementTask.build(chain_space(exclude=[1]), num_groups=6),
        PlacementTask.build(chain_space(13), num_groups=6),
        toy(),
    ]
    assert len({task.content_hash() for task in tasks}) == len(tasks)
    again = PlacementTask.build(chain_space(), num_groups=6)
    assert tasks[0].content_hash() == again.content_hash()


# observations


def test_features_have_the_numbers_worked_by_hand():
    features = dict(zip(FEATURES, group_features(toy().grouping).T, strict=True))
    assert_allclose(features["work"][[0, 1, 10]], np.sqrt([1 / 4, 2 / 4, 1 / 4]), rtol=1e-6)
    # the source sends 1 MB to each of three groups, an inner unit 2 MB to one
    assert_allclose(features["sent"][[0, 1, 10]], np.sqrt([3 / 3, 2 / 3, 0]), rtol=1e-6)
    assert_allclose(features["received"][[0, 1, 2, 10]], np.sqrt([0, 1 / 3, 2 / 3, 1]), rtol=1e-6)
    assert_allclose(features["rank"], np.arange(11) / 10, rtol=1e-6)
    assert (features["units"] == 1).all()


# the environments


@every_env
@pytest.mark.parametrize("task", [toy, pinned, crowded])
def test_environments_pass_the_check_of_gymnasium(make, task):
    check_env(make(task()), skip_render_check=True)


def test_a_one_shot_episode_terminates_after_one_step():
    env = OneShotPlacement(toy())
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step(np.array(OPTIMAL))
    assert (terminated, truncated) == (True, False)
    assert reward == pytest.approx(np.log(29 / 14))
    assert info["step_time"] == pytest.approx(TOY_OPTIMUM)
    assert (info["fits"], info["status"], info["overflow"]) == (True, "OK", 0)


def play(env, actions):
    """Plays until the episode ends; returns rewards, the last flags and what came with the end."""
    env.reset(seed=0)
    rewards = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        rewards.append(reward)
        if terminated or truncated:
            break
    return rewards, (terminated, truncated), observation, info


def test_sparse_steps_are_rewarded_at_the_end_as_in_one_shot():
    task, actions = crowded(), [0, 1, 1, 2]
    rewards, ended, observation, info = play(StepwisePlacement(task), actions)
    assert rewards[:-1] == [0.0, 0.0, 0.0]
    assert rewards[-1] == task.evaluate(np.array([actions])).reward[0]
    assert ended == (True, False)
    assert observation["group"] == 4
    assert observation["placement"].tolist() == actions
    assert info["fits"]


def test_dense_steps_add_up_to_the_sparse_reward_less_that_of_the_default():
    task, actions = toy(), [0, 0, 1, 2, 1, 1, 1, 2, 2, 2, 2]
    rewards, ended, _, _ = play(StepwisePlacement(task, dense=True), actions)
    placements = np.array([actions, [0] * 11])
    final, default = task.evaluate(placements).reward
    assert sum(rewards) == pytest.approx(final - default)
    assert ended == (True, False)
    partial = np.array([[*actions[:count], *[0] * (11 - count)] for count in range(12)])
    assert_allclose(rewards, np.diff(task.evaluate(partial).reward), atol=1e-12)


@pytest.mark.parametrize("dense", [False, True])
def test_a_forbidden_step_terminates_with_the_reward_of_an_illegal_plan(dense):
    task = pinned()
    rewards, ended, _, info = play(StepwisePlacement(task, dense=dense), [3, 2, 0])
    assert len(rewards) == 2
    assert sum(rewards) == pytest.approx(-np.log(400))  # dense: less 0, the default is the baseline
    assert ended == (True, False)
    assert info["status"] == "ILLEGAL_DEVICE"


def test_masks_of_steps_are_exactly_the_steps_that_are_legal():
    task = pinned()
    env = StepwisePlacement(task)
    observation, _ = env.reset()
    for _ in range(task.num_groups):
        mask = observation["action_mask"].copy()
        before = env._placement.copy(), env._group
        for device in range(task.num_devices):
            env._placement, env._group = before[0].copy(), before[1]
            observation, _, _, _, info = env.step(np.int64(device))
            assert (info.get("status") == "ILLEGAL_DEVICE") != mask[device]
        env._placement, env._group = before[0].copy(), before[1]
        observation, *_ = env.step(np.int64(mask.argmax()))


def test_a_limit_on_steps_truncates_and_does_not_terminate():
    env = TimeLimit(StepwisePlacement(toy()), max_episode_steps=4)
    rewards, ended, observation, _ = play(env, [0] * 11)
    assert ended == (False, True)
    assert rewards == [0.0] * 4
    assert observation["group"] == 4  # a learner bootstraps from what is not decided yet


@every_env
def test_a_step_after_the_end_or_before_the_beginning_is_refused(make):
    env = make(toy())
    action = env.action_space.sample()
    with pytest.raises(ResetNeeded, match="reset"):
        env.step(action)


def test_a_step_that_is_no_device_is_refused():
    env = StepwisePlacement(toy())
    env.reset()
    with pytest.raises(ValueError, match="is not in Discrete"):
        env.step(3)


@every_env
def test_a_random_legal_episode_has_only_values_of_its_spaces(make):
    env = make(pinned())
    observation, _ = env.reset(seed=0)
    ended, rng = False, np.random.default_rng(0)
    while not ended:
        assert env.observation_space.contains(observation)
        mask = observation["action_mask"].astype(bool)
        draws = [rng.choice(np.flatnonzero(row)) for row in np.atleast_2d(mask)]
        action = np.array(draws) if mask.ndim == 2 else draws[0]
        observation, reward, ended, truncated, _ = env.step(action)
        assert np.isfinite(reward)
        assert not truncated
    assert env.observation_space.contains(observation)
    assert reward > negative_log_time(np.array([100.0]), 1.0)[0]


def test_the_task_and_its_planners_load_neither_torch_nor_gymnasium():
    code = (
        "import sys, agents.task, agents.observe, agents.losses, agents.planners.cross_entropy, "
        "agents.planners.policy_gradient; print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"torch", "gymnasium"}.intersection(loaded)
