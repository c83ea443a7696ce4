"""DQN: its formulas by hand, the sum tree, masks in targets, resuming, and known optima."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from agents.automap.episodes import Episodes, observation_size, observe
from agents.automap.problem import DEAD_END, Toy, Worth, all_plans
from agents.automap.search import exhaustive
from agents.compiled_sum_tree import draw_items, set_priorities
from agents.dqn import (
    Config,
    Learner,
    _errors,
    masked_argmax,
    n_step,
    policy_plan,
    project,
    rollout,
    train,
)
from agents.networks.q_values import Network, Noisy
from agents.replay import Batch
from simcore.errors import PlacewrightError

SMALL: dict[str, Any] = {"evaluations": 96, "episodes": 8, "updates": 2, "batch_size": 16}
SWITCHES: tuple[dict[str, Any], ...] = (
    {"double": False, "dueling": False, "prioritized": False, "n_step": 1},
    {"n_step": 5},
    {"noisy": True},
    {"distributional": True, "noisy": True},
)


class Trap(Toy):
    """After a first action of 0 the second slot has nothing that it may hold."""

    def mask(self, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """As a toy, but for the trap."""
        allowed = super().mask(chosen)
        if chosen.shape[1] == 1:
            allowed[chosen[:, 0] == 0] = False
        return allowed


# formulas


def test_returns_of_two_steps_are_sums_with_what_is_left_to_ask() -> None:
    reward = np.array([[1.0, 2.0, 4.0]])
    ends = np.array([[False, False, True]])
    total, left, after = n_step(reward, ends, 2, 0.5)
    assert total.tolist() == [[2.0, 4.0, 4.0]]
    assert left.tolist() == [[0.25, 0.0, 0.0]]
    assert after.tolist() == [[2, 3, 3]]


def test_a_dead_end_cuts_a_return() -> None:
    total, left, _ = n_step(np.array([[0.0, -5.0, 0.0]]), np.array([[False, True, False]]), 3, 1.0)
    assert total[0, 0] == -5.0
    assert left[0, 0] == 0.0


def test_a_projected_distribution_splits_between_its_neighbours() -> None:
    support = torch.linspace(0.0, 4.0, 5)
    p_t = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]])  # surely 2
    moved = project(p_t, torch.tensor([0.5]), torch.tensor([0.5]), support)  # surely 1.5
    assert moved.tolist() == [[0.0, 0.5, 0.5, 0.0, 0.0]]


@given(st.integers(0, 2**31), st.floats(-9, 9), st.floats(0, 1))
@settings(deadline=None, max_examples=30)
def test_a_projection_keeps_probability_and_the_clipped_mean(
    seed: int, reward: float, discount: float
) -> None:
    support = torch.linspace(-6.0, 4.0, 51)
    p_t = torch.rand(1, 51, generator=torch.Generator().manual_seed(seed)).softmax(-1)
    moved = project(p_t, torch.tensor([reward]), torch.tensor([discount]), support)
    expected = (p_t * (reward + discount * support).clamp(-6.0, 4.0)).sum()
    assert moved.sum().item() == pytest.approx(1.0, abs=1e-4)
    assert (moved * support).sum().item() == pytest.approx(expected.item(), abs=1e-3)


def test_the_best_action_is_an_allowed_one() -> None:
    q = torch.tensor([[3.0, 1.0, 2.0]])
    assert masked_argmax(q, torch.tensor([[False, True, True]])).tolist() == [2]


@pytest.mark.parametrize("double", [False, True])
def test_a_target_never_looks_at_a_masked_action(double: bool) -> None:
    config = Config(double=double, prioritized=False, dueling=False, expectile=0.75)
    toy = Toy(3, 3)
    learner = Learner.new(config, toy)
    size = observation_size(toy)
    with torch.no_grad():
        for network in (learner.online, learner.target):
            for weight in network.parameters():
                weight.zero_()
            bias: Any = network.advantage.bias
            bias.copy_(torch.tensor([7.0, 2.0, 1.0]))
    batch = Batch(
        seen=torch.zeros(2, size),
        action=torch.tensor([1, 1]),
        reward=torch.tensor([0.5, 0.5]),
        discount=torch.tensor([1.0, 1.0]),
        after=torch.zeros(2, size),
        mask=torch.tensor([[False, True, True], [False, False, False]]),
        weight=torch.ones(2),
        items=np.arange(2),
    )
    # 0.5 + 2, not 0.5 + 7; where nothing is allowed the episode is over; what is above weighs more
    expected = [1.5 * abs(2.5 - 2.0) ** 2 / 2, 0.5 * (abs(0.5 - 2.0) - 0.5)]
    assert _errors(config, learner, batch).tolist() == pytest.approx(expected)


def test_a_dueling_head_s_advantages_have_no_mean() -> None:
    network = Network(Config(dueling=True), 4, 3)
    raw = network.raw(torch.ones(2, 4))
    head: Any = network.value
    value = head(network.body(torch.ones(2, 4)))
    assert torch.allclose(raw[..., 0].mean(1), value[:, 0], atol=1e-6)


def test_noise_changes_outputs_until_it_is_taken_away() -> None:
    layer, seen = Noisy(4, 3), torch.ones(1, 4)
    still = layer(seen)
    layer.draw(torch.Generator().manual_seed(1))
    assert not torch.equal(layer(seen), still)
    layer.noise = None
    assert torch.equal(layer(seen), still)


# the sum tree


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=40), st.integers(0, 2**31))
@settings(deadline=None, max_examples=30)
def test_a_sum_tree_draws_what_a_cumulative_sum_does(values: list[float], seed: int) -> None:
    tree, items = np.zeros(128), np.arange(len(values))
    set_priorities(tree, items, np.array(values))
    uniform = np.random.default_rng(seed).random(16)
    at = (np.arange(16) + uniform) / 16 * tree[1]
    expected = np.searchsorted(np.cumsum(values), at, side="right")
    assert tree[1] == pytest.approx(sum(values))
    drawn = draw_items(tree, uniform)
    assert np.abs(drawn - expected).max() <= 1  # sums in another order
    assert (drawn == expected).mean() > 0.9


def test_items_without_priority_are_never_drawn() -> None:
    tree = np.zeros(16)
    set_priorities(tree, np.arange(8), np.array([0, 1, 0, 0, 2, 0, 0, 0], float))
    drawn = draw_items(tree, np.random.default_rng(0).random(300))
    assert set(drawn.tolist()) == {1, 4}
    assert 170 < (drawn == 4).sum() < 230


# episodes


def test_episodes_see_the_slot_and_what_is_filled() -> None:
    toy = Toy(3, 2)
    seen = observe(toy, np.array([[1]]))
    known, here, held = seen[0, :1], seen[0, 1:4], seen[0, 4:].reshape(3, 3)
    assert known.tolist() == [0.0]
    assert here.tolist() == [0.0, 1.0, 0.0]
    assert held.tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 1]]


def test_a_dead_end_is_rewarded_once_and_not_evaluated() -> None:
    episodes = Episodes(Trap(3, 3), 2)
    done = episodes.step(np.array([0, 1]))
    assert done.reward.tolist() == [DEAD_END, 0.0]
    assert done.is_over.tolist() == [True, False]
    episodes.step(np.array([0, 2]))
    done = episodes.step(np.array([0, 1]))
    assert done.is_over.tolist() == [False, True]
    assert done.reward[0] == 0.0
    assert isinstance(episodes.worth, Worth)
    assert len(episodes.worth.reward) == 1


def test_a_replay_holds_no_step_behind_a_dead_end() -> None:
    config, trap = Config(**SMALL), Trap(4, 3)
    learner = Learner.new(config, trap)
    rollout(config, learner, trap, 64, 1.0)
    used = len(learner.replay)
    assert (learner.replay.reward[:used] <= 1.0).all()
    dead = learner.replay.reward[:used] == DEAD_END
    assert dead.any()
    assert (learner.replay.discount[:used][dead] == 0.0).all()
    assert used < 64 * 4


# learning


def test_a_problem_without_slots_has_one_plan() -> None:
    class Empty(Toy):
        def __init__(self) -> None:
            super().__init__(1, 2)
            self.num_slots, self.features = 0, np.zeros((0, 1), np.float32)

        def evaluate(self, chosen: NDArray[np.int64]) -> Worth:
            return Worth(np.ones(len(chosen)), np.ones(len(chosen)), np.zeros(len(chosen), int))

    found = train(Config(**SMALL), Empty()).found
    assert found.chosen is not None
    assert found.chosen.shape == (0,)
    assert (found.step_time, found.evaluations) == (1.0, 1)


def test_there_are_as_many_toy_plans_as_masks_allow() -> None:
    plans = all_plans(Toy(4, 3), most=1000)
    assert plans is not None
    assert len(plans) == 3 * 2**3
    assert exhaustive(Toy(4, 3)).reward == 1.0


@pytest.mark.parametrize("changes", SWITCHES)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    config, toy = Config(**SMALL | changes, checkpoint_every=1), Toy(5, 3)
    whole = train(config, toy)

    def stop(evaluations: int, step_time: float) -> None:
        if evaluations >= 48:
            raise KeyboardInterrupt

    first = train(config, toy, folder=tmp_path, listener=stop)
    assert first.interrupted
    again = train(config, toy, folder=tmp_path, resume=True)
    assert again.found.evaluations == 96
    for name, values in whole.learner.online.state_dict().items():
        assert torch.equal(values, again.learner.online.state_dict()[name])
    assert np.array_equal(again.learner.replay.tree, whole.learner.replay.tree)


def test_a_checkpoint_of_another_problem_is_refused(tmp_path: Path) -> None:
    config = Config(**SMALL, checkpoint_every=1)
    train(config, Toy(5, 3), folder=tmp_path)
    with pytest.raises(PlacewrightError, match="its task is not that of this run"):
        train(config, Toy(5, 3, seed=1), folder=tmp_path, resume=True)


def test_a_capacity_is_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="capacity must be a power of two, not 100"):
        Config(capacity=100)


def reaches(seed: int, **changes: Any) -> bool:
    """Whether the greedy policy at the end is the optimum of a toy of 8,748 plans."""
    toy = Toy(8, 4, seed=seed)
    trained = train(Config(evaluations=1200, seed=seed, **changes), toy)
    plan = policy_plan(trained.learner, toy)
    return plan is not None and bool((plan == toy.pattern).all()) and trained.found.reward == 1.0


def test_the_optimum_of_toys_is_reached_by_three_seeds() -> None:
    assert all(reaches(seed, updates=8) for seed in range(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"double": False, "dueling": False, "prioritized": False, "n_step": 1},
        {"distributional": True, "least": -1.0, "most": 2.0},
        {"noisy": True, "epsilon": 0.3},
    ],
)
def test_the_optimum_of_toys_is_reached_by_19_of_20_seeds(changes: dict[str, Any]) -> None:
    assert sum(reaches(seed, **changes) for seed in range(20)) >= 19
