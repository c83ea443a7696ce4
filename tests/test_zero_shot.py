"""Zero-shot plans: recombination, polishing, and that budgets and what is allowed are kept."""

import dataclasses

import numpy as np
import pytest

from agents.mars import Config, Network
from agents.planners.recorder import Budget, Recorder
from agents.planners.trained import shipped
from agents.refine import Refinement, moved_border, stretch
from agents.task import TOY_OPTIMUM, toy
from agents.train import Trained
from agents.zero_shot import ZeroShot

SMALL = Config(width=8, segment=4)


def untrained() -> Trained:
    return Trained(system="mars", config=SMALL, network=Network(SMALL))


def test_a_stretch_lies_within_the_program():
    rng = np.random.default_rng(0)
    drawn = [stretch(11, rng) for _ in range(500)]
    assert all(0 <= begin < end <= 11 for begin, end in drawn)
    assert {1, 11} <= {end - begin for begin, end in drawn}


def test_a_moved_border_is_one_border_elsewhere():
    rng, plan = np.random.default_rng(0), np.array([0] * 8 + [1] * 8)
    firsts = set()
    for _ in range(50):
        moved = moved_border(plan, rng)
        border = int(np.argmax(moved == 1)) if (moved == 1).any() else 16
        assert moved.tolist() == [0] * border + [1] * (16 - border)
        firsts.add(border)
    assert 8 not in firsts
    assert min(firsts) < 8 < max(firsts)
    assert plan.tolist() == [0] * 8 + [1] * 8
    assert moved_border(np.zeros(4, np.int64), rng).tolist() == [0] * 4


def test_recombination_keeps_its_budget_and_never_loses_the_best_draw():
    task, made = toy(), []

    def score(plans):
        made.append(len(plans))
        return task.score(plans)

    rng = np.random.default_rng(1)
    draws = rng.integers(3, size=(16, task.num_groups))
    plans = Refinement().run(dataclasses.replace(task, score=score), draws, 100, seed=0)
    assert sum(made) == 100
    best = task.evaluate(plans[:1]).reward[0]
    assert best >= task.evaluate(draws).reward.max()
    assert (np.diff(task.evaluate(plans).reward) <= 0).all()


def test_recombination_finds_the_optimum_of_the_toy_from_random_draws():
    task, found = toy(), []
    for seed in range(5):
        draws = np.random.default_rng(seed).integers(3, size=(64, task.num_groups))
        plans = Refinement().run(task, draws, 3000, seed)
        found.append(task.evaluate(plans[:1]).step_time[0])
    assert sum(time < TOY_OPTIMUM * (1 + 1e-9) for time in found) >= 4


def test_only_what_is_allowed_is_tried():
    task = toy()
    allowed = task.allowed.copy()
    allowed[3:, 2] = False
    narrow = dataclasses.replace(task, grouping=dataclasses.replace(task.grouping, allowed=allowed))
    draws = np.zeros((4, task.num_groups), np.int64)
    plans = Refinement().run(narrow, draws, 500, seed=0)
    assert allowed[np.arange(task.num_groups), plans].all()


@pytest.mark.parametrize("budget", [5, 40, 200])
def test_zero_shot_is_decided_by_its_seed_and_keeps_its_budget(budget):
    trained, found = untrained(), []
    for _ in range(2):
        space = toy().grouping.space
        recorder, spent = Recorder(space=space), Budget(evaluations=budget)
        shot = ZeroShot(placements=16, recombined=32, polished=64)
        shot.search(trained, space, 3, spent, recorder)
        assert recorder.evaluations == spent.used <= min(budget, 16 + 32 + 64 + 16)
        assert recorder.best is not None
        found.append((recorder.best.step_time, recorder.best.evaluations))
    assert found[0] == found[1]


def test_without_simulation_of_more_there_are_the_draws_only():
    trained, space = untrained(), toy().grouping.space
    recorder = Recorder(space=space)
    shot = ZeroShot(placements=16, recombined=0, polished=0)
    task = shot.search(trained, space, 0, Budget(), recorder)
    assert task is not None
    assert recorder.evaluations == 16


def test_the_network_that_ships_is_small_and_acts_on_what_it_has_not_seen():
    planner, space = shipped(), toy().grouping.space
    assert planner is not None
    assert planner.checkpoint.stat().st_size < 4_000_000
    recorder, budget = Recorder(space=space), Budget(evaluations=2000)
    planner.search(space, np.random.default_rng(0), budget, recorder)
    assert budget.used == planner.placements + planner.recombined
    assert recorder.best is not None
    assert recorder.best.step_time < 29e-3  # of one GPU
