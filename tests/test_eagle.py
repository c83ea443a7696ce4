"""EAGLE: its decisions by hand, its arms, gradients to the grouper, resumption, the optimum."""

import dataclasses

import numpy as np
import pytest
import torch

from agents import ppo
from agents.eagle import Config, Network, Policy, effective, train
from agents.families import family, tasks_of
from agents.planners.partition import Ties, fluid, metis, partition, refined
from agents.policy import drawing, likeliest, repeating
from agents.task import PlacementTask, toy
from simcore import Cluster
from tests.learning import EVALUATIONS, meets_optimum, raising, same_curve

SMALL = Config(
    evaluations=6 * 8, placements=8, width=8, parts=4, grouper_width=8, checkpoint_every=2
)
ARMS = [
    {"grouper": "learned"},
    {"grouper": "coarse"},
    {"grouper": "metis"},
    {"grouper": "fluid"},
    {"placer": "graph"},
    {"attention": "before"},
    {"mode": "sequential"},
    {"mode": "sequential", "attention": "before", "grouper": "metis"},
    {"algorithm": "reinforce"},
    {"algorithm": "ppo+ce"},
]


def policy(task: PlacementTask, config: Config = SMALL) -> Policy:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Policy(config, Network(config), task)


def some_task() -> PlacementTask:
    return tasks_of(family(["generated:1"]), [Cluster.preset("4xV100-NVLink")], num_groups=24)[0]


def test_a_unit_goes_where_its_group_goes():
    actor = policy(toy())
    groups = [0, 0, 1, 1, 2, 2, 3, 3, 0, 1, 2]
    actions = torch.tensor([[*groups, 2, 0, 1, 0]])
    assert actor.place(actions).tolist() == [[2, 2, 0, 0, 1, 1, 0, 0, 2, 0, 1]]


def test_with_fixed_groups_only_devices_are_decided():
    actor = policy(toy(), dataclasses.replace(SMALL, grouper="coarse"))
    decided = actor.decide(drawing(5, torch.Generator().manual_seed(0)))
    assert decided.actions.shape == (5, 4)
    placed = actor.place(decided.actions)
    assert torch.equal(placed, decided.actions[:, actor.first])


def test_the_placer_changes_the_grouper():
    actor = policy(some_task())
    decided = actor.decide(drawing(4, torch.Generator().manual_seed(0)))
    decided.tables[1].gather(1, decided.actions[:1, -actor.parts :].T).sum().backward()
    gradient = actor.network.grouper.leave.weight.grad
    assert gradient is not None
    assert float(gradient.abs().sum()) > 0


def test_units_stray_from_their_first_groups_as_often_as_is_asked_for():
    actor = policy(some_task(), dataclasses.replace(SMALL, strays=2.0))
    drawn = actor.decide(drawing(2000, torch.Generator().manual_seed(0))).actions
    strays = (drawn[:, : -actor.parts] != actor.first).sum(1).to(torch.float64).mean()
    assert 1.6 < float(strays) < 2.1


def test_a_start_is_the_likeliest_placement():
    task = some_task()
    actor = policy(task, dataclasses.replace(SMALL, parts=12))
    start = np.minimum(np.arange(task.num_groups) // 9, 2)
    actor.lean(torch.from_numpy(start), 0.9)
    assert actor.place(actor.decide(likeliest).actions).tolist() == [start.tolist()]


def test_reinforce_is_one_step_and_cross_entropy_fits_to_the_best():
    assert effective(dataclasses.replace(SMALL, algorithm="reinforce")).epochs == 1
    assert effective(dataclasses.replace(SMALL, algorithm="ppo+ce")).elite_every > 0
    assert effective(SMALL) == SMALL


@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_every_arm_learns_and_judges_what_it_drew(arm):
    config = dataclasses.replace(SMALL, evaluations=16, **arm)
    result = train(config, some_task())
    assert result.evaluations == 16
    drawn = result.policy.decide(drawing(3, torch.Generator().manual_seed(0)))
    again = result.policy.decide(repeating(drawn.actions))
    assert torch.equal(drawn.actions, again.actions)
    assert all(torch.allclose(a, b) for a, b in zip(drawn.tables, again.tables, strict=True))


def test_a_resumed_run_has_the_curve_of_one_run(tmp_path):
    whole = train(SMALL, toy())
    half = train(SMALL, toy(), folder=tmp_path, listener=raising(5))
    assert half.interrupted
    rest = train(SMALL, toy(), folder=tmp_path, resume=True)
    assert rest.finalists == whole.finalists
    assert repr(rest.history[-1].mean_reward) == repr(whole.history[-1].mean_reward)
    assert same_curve(whole, train(SMALL, toy()))


def test_metis_and_its_stand_in_keep_parts_balanced_and_what_is_tied_together():
    # two cliques of four, joined by one weak tie
    pairs = [(a, b, 1.0) for half in (0, 4) for a in range(half, half + 4)
             for b in range(half, half + 4) if a != b]  # fmt: skip
    pairs += [(3, 4, 0.01), (4, 3, 0.01)]
    pairs.sort()
    first = np.searchsorted([a for a, _, _ in pairs], np.arange(9))
    others, strength = (np.array([pair[column] for pair in pairs]) for column in (1, 2))
    ties = Ties(first, others, strength, np.ones(8))
    for member in (metis(ties, 2), fluid(ties, 2)):
        assert len(set(member[:4].tolist())) == len(set(member[4:].tolist())) == 1
        assert member[0] != member[7]
    mixed = refined(ties, np.array([0, 0, 0, 1, 1, 1, 1, 0]), 2)
    assert sorted(np.bincount(mixed, minlength=2).tolist()) == [4, 4]


@pytest.mark.parametrize("method", ["coarse", "metis", "fluid"])
def test_a_partition_has_at_most_so_many_parts(method):
    grouping = some_task().grouping
    for parts in (1, 3, 7):
        member = partition(grouping, parts, method)
        assert member.shape == (grouping.num_groups,)
        assert 0 <= member.min() <= member.max() < parts


def solved(seeds: range, **arm: str) -> int:
    config = dataclasses.replace(Config(evaluations=EVALUATIONS), **arm)
    return sum(meets_optimum(train, dataclasses.replace(config, seed=seed)) for seed in seeds)


def test_the_toy_is_solved_in_three_seeds():
    assert solved(range(3)) == 3


@pytest.mark.slow
def test_the_toy_is_solved_in_nineteen_of_twenty_seeds():
    assert solved(range(20)) >= 19


@pytest.mark.slow
@pytest.mark.parametrize("arm", [{"placer": "graph"}, {"attention": "before"}], ids=str)
def test_the_toy_is_solved_by_other_placers(arm):
    assert solved(range(5), **arm) == 5


def test_what_is_learned_is_better_than_chance():
    rewards = [row.mean_reward for row in train(Config(evaluations=4096), toy()).history]
    assert np.mean(rewards[-8:]) > np.mean(rewards[:8]) + 0.15


def test_a_configuration_is_one_of_the_learner():
    assert issubclass(Config, ppo.Config)
    with pytest.raises(ValueError, match="placer must be one of"):
        Config(placer="none")
