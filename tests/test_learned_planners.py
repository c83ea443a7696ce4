"""Planners beside the portfolio's: learned systems, METIS, MCMC; one interface, budgets kept."""

import numpy as np
import pytest

from agents.planners.cross_entropy import CrossEntropy
from agents.planners.learned import Learned, eagle, gdp, hierarchical, mars, placeto, reinforce
from agents.planners.m_sct import MSct, favourite_children
from agents.planners.mcmc import Mcmc
from agents.planners.metis import Metis
from agents.planners.post import post
from agents.planners.recorder import Budget, Recorder
from agents.planners.single_device import SingleDevice
from agents.task import TOY_OPTIMUM, toy


def small(planner: Learned) -> Learned:
    shape = {"width": 8, "placements": 8}
    if planner.system in ("hierarchical", "placeto"):
        shape.pop("placements")
    changes = {**planner.changes, **shape}
    return Learned(system=planner.system, name=planner.name, changes=changes)


PLANNERS = [
    small(eagle()),
    small(mars()),
    small(hierarchical()),
    small(reinforce()),
    small(placeto()),
    small(gdp()),
    Mcmc(),
    Metis(),
    MSct(),
    post(),
]


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
def test_a_planner_is_decided_by_its_seed_and_keeps_its_budget(planner):
    found = []
    for _ in range(2):
        space = toy().grouping.space
        recorder, budget = Recorder(space=space), Budget(evaluations=20)
        planner.search(space, np.random.default_rng(3), budget, recorder)
        assert recorder.best is not None
        assert recorder.evaluations == budget.used <= 20
        found.append((recorder.best.step_time, recorder.best.evaluations))
    assert found[0] == found[1]


def test_a_learner_begins_near_the_best_known():
    space = toy().grouping.space
    recorder = Recorder(space=space)
    SingleDevice().search(space, np.random.default_rng(0), Budget(), recorder)
    sampled = []
    recorder.listener = lambda *_: None
    plain = space.evaluate

    class Watched:
        evaluate = staticmethod(lambda plans: (sampled.append(plans), plain(plans))[1])
        complexity = staticmethod(space.complexity)

    recorder.space = Watched()
    small(mars()).search(space, np.random.default_rng(0), Budget(evaluations=8), recorder)
    assert (sampled[0] == 0).mean() > 0.7


def test_mcmc_finds_the_optimum_of_the_toy():
    space = toy().grouping.space
    recorder = Recorder(space=space)
    Mcmc(beta=20.0).search(space, np.random.default_rng(0), Budget(evaluations=6000), recorder)
    assert recorder.best is not None
    assert recorder.best.step_time == pytest.approx(TOY_OPTIMUM)


def test_metis_proposes_a_placement_for_every_number_of_devices():
    space = toy().grouping.space
    recorder = Recorder(space=space)
    Metis().search(space, np.random.default_rng(0), Budget(), recorder)
    assert recorder.evaluations == 2
    assert recorder.best is not None
    assert len(set(recorder.best.placement.tolist())) in (2, 3)


def test_favourite_children_spare_the_transfers_of_the_critical_path():
    # source 0, branches a 1-3, b 4-6, c 7-9 and join 10: c is the slow one
    favourite = favourite_children(toy().grouping.space)
    assert favourite[0] == 7
    assert favourite[7] == 8
    assert favourite[8] == 9
    assert favourite[9] == 10
    assert len(set(favourite.values())) == len(favourite)


def test_a_device_waits_for_the_favourite_child():
    space = toy().grouping.space
    recorder = Recorder(space=space)
    MSct().search(space, np.random.default_rng(0), Budget(), recorder)
    assert recorder.best is not None
    placement = recorder.best.placement
    assert len(set(placement[[0, 7, 8, 9, 10]].tolist())) == 1
    assert recorder.best.step_time <= 16e-3


@pytest.mark.parametrize("planner", [CrossEntropy(), post()], ids=lambda planner: planner.name)
def test_cross_entropy_and_post_solve_the_toy_in_nineteen_of_twenty_seeds(planner):
    solved = 0
    for seed in range(20):
        space = toy().grouping.space
        recorder, budget = Recorder(space=space), Budget(evaluations=16_384)
        recorder.listener = lambda found, spent: (
            spent.stop() if found.best and found.best.step_time < TOY_OPTIMUM * (1 + 1e-9) else None
        )
        planner.search(space, np.random.default_rng(seed), budget, recorder)
        assert recorder.best is not None
        solved += recorder.best.step_time < TOY_OPTIMUM * (1 + 1e-9)
    assert solved >= 19
