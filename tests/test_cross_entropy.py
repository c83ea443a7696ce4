"""Cross-entropy: samples, fits, refinement and ascent by hand; it finds the toy's optimum."""

import dataclasses

import numpy as np
import pytest
from numpy.testing import assert_allclose

from agents.planners.cross_entropy import (
    CrossEntropy,
    ascend,
    distinct,
    refined,
    sample,
    standardised,
    uniform,
)
from agents.planners.grouping import Grouping
from agents.planners.random_placement import RandomPlacement
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace
from agents.task import TOY_OPTIMUM, toy
from bench.graphs import layered_dag
from simcore import Cluster, Job, Problem

CLUSTER = Cluster.preset("4xV100-NVLink")
EVALUATIONS = 4096  # random placements find the toy's optimum within as many 13 times in 100


def layered(num_ops: int = 200, **limits) -> PlacementSpace:
    return PlacementSpace.build(Problem.build(layered_dag(num_ops), CLUSTER, Job()), **limits)


def search(planner, space, seed=0, evaluations=EVALUATIONS) -> Recorder:
    recorder, budget = Recorder(space=space), Budget(evaluations=evaluations)
    planner.search(space, np.random.default_rng(seed), budget, recorder)
    assert budget.used == recorder.evaluations <= evaluations
    return recorder


@dataclasses.dataclass(slots=True, kw_only=True)
class Watched(Recorder):
    """A recorder that keeps all placements."""

    seen: list[list[int]] = dataclasses.field(default_factory=list)

    def evaluate(self, finder, unit_placements, budget):
        self.seen += unit_placements.tolist()
        return Recorder.evaluate(self, finder, unit_placements, budget)


# its parts


def test_samples_are_as_frequent_as_they_are_probable_and_never_masked():
    allowed = np.array([[False, True, True, False], [True, True, True, True]])
    probabilities = np.array([[0.0, 0.25, 0.75, 0.0], [0.1, 0.2, 0.3, 0.4]])
    drawn = sample(probabilities, allowed, 20_000, np.random.default_rng(0))
    frequent = [np.bincount(column, minlength=4) / 20_000 for column in drawn.T]
    assert_allclose(frequent, probabilities, atol=0.01)
    assert set(drawn[:, 0].tolist()) == {1, 2}


def test_a_sum_below_one_by_rounding_draws_the_last_choice_allowed():
    allowed = np.array([[True, True, False]])
    drawn = sample(np.array([[0.5, 0.1, 0.0]]), allowed, 100, np.random.default_rng(0))
    assert set(drawn.ravel().tolist()) == {0, 1}


def test_a_finer_distribution_is_the_mean_over_the_units_of_each_group():
    task = toy()
    task = dataclasses.replace(task, grouping=Grouping.of(task.grouping.space, 11))
    before = np.tile([[0.6, 0.4, 0.0]], (11, 1))
    assert_allclose(refined(task.grouping, before, 0.0), before, atol=1e-9)
    expected = 0.8 * before + 0.2 / 3
    assert_allclose(refined(task.grouping, before, 0.2), expected, atol=1e-9)


def test_groups_that_lose_all_they_were_allowed_begin_uniformly():
    grouping = Grouping.of(layered(20, exclude=[0]), 20)
    before = np.zeros((20, 5))
    before[:, 0] = 1.0
    assert_allclose(refined(grouping, before, 0.0), uniform(grouping.allowed))


def test_rewards_are_standardised_and_equal_ones_are_all_zero():
    assert standardised(np.array([1.0, 3.0])).tolist() == [-1.0, 1.0]
    assert standardised(np.array([2.0, 2.0])).tolist() == [0.0, 0.0]


def test_one_step_of_ascent_has_the_numbers_worked_by_hand():
    start = np.array([[0.5, 0.5]])
    # gradient of the logits: A (1 - p) = 0.5 and -0.5
    found = ascend(start, np.array([[0]]), np.array([1.0]), steps=1, rate=0.2)
    assert_allclose(found, [[1 / (1 + np.exp(-0.2)), 1 / (1 + np.exp(0.2))]])


def test_ascent_stops_where_the_ratio_is_clipped():
    start = np.array([[0.5, 0.5]])
    found = ascend(start, np.array([[0]]), np.array([1.0]), steps=1000, rate=0.01, clip=0.2)
    assert found[0, 0] == pytest.approx(0.6, abs=0.005)
    found = ascend(start, np.array([[0]]), np.array([-1.0]), steps=1000, rate=0.01, clip=0.2)
    assert found[0, 0] == pytest.approx(0.4, abs=0.005)


def test_levels_of_equally_many_groups_are_one():
    assert [g.num_groups for g in distinct(toy().grouping.space, (4, 16, 64))] == [4, 11]


# the search


@pytest.mark.parametrize("planner", [CrossEntropy(lives=9), CrossEntropy(lives=9, ascents=1)])
def test_it_finds_the_optimum_of_the_toy_in_nine_of_ten_seeds(planner):
    space = toy().grouping.space
    found = [search(planner, space, seed).best for seed in range(10)]
    optimal = [best.step_time == pytest.approx(TOY_OPTIMUM, rel=1e-9) for best in found]
    assert sum(optimal) >= 9


def test_it_beats_random_placements_at_equal_evaluations():
    space = layered()
    learned = search(CrossEntropy(), space, evaluations=2000).best
    drawn = search(RandomPlacement(draws=2000), space, evaluations=2000).best
    assert learned.step_time < 0.9 * drawn.step_time


def test_the_same_seed_finds_the_same_placements():
    space = layered(60)
    first, again = (search(CrossEntropy(lives=2), space, 5) for _ in range(2))
    other = search(CrossEntropy(lives=2), space, 6)
    curve = [(found.step_time, found.evaluations) for found in first.curve]
    assert curve == [(found.step_time, found.evaluations) for found in again.curve]
    assert first.best.placement.tolist() == again.best.placement.tolist()
    assert curve != [(found.step_time, found.evaluations) for found in other.curve]


def test_it_begins_at_the_best_placement_known():
    space = toy().grouping.space
    recorder = Watched(space=space)
    recorder.evaluate("other", np.full((1, 11), 1), Budget())
    planner = CrossEntropy(levels=(6, 16), start_weight=1.0, noise=0.0, renewal=0.0)
    planner.search(space, np.random.default_rng(0), Budget(evaluations=2000), recorder)
    assert {tuple(placement) for placement in recorder.seen} == {(1,) * 11}


def test_it_stops_when_nothing_better_comes():
    assert search(CrossEntropy(), toy().grouping.space, evaluations=100_000).evaluations < 10_000


@pytest.mark.parametrize("evaluations", [0, 1, 31, 33])
def test_a_budget_that_ends_within_a_round_is_kept(evaluations):
    recorder = search(CrossEntropy(), layered(20), evaluations=evaluations)
    assert recorder.evaluations == evaluations


def test_pins_and_exclusions_are_kept():
    space = layered(60, pins={3: 2, 40: 3}, exclude=[1])
    best = search(CrossEntropy(), space, evaluations=500).best
    assert (best.placement[3], best.placement[40]) == (2, 3)
    assert not (best.placement == 1).any()
