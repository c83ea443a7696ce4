"""The Hierarchical Planner and Placeto: constants, features and updates by hand, and learning."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from agents import hierarchical, placeto
from agents.networks.hierarchical import Squash
from agents.networks.placeto import Relations
from agents.task import Evaluation, toy
from simcore.errors import UsageError
from tests.learning import EVALUATIONS, curve, meets_optimum, raising

PAPER = hierarchical.Config(evaluations=24, width=8, hidden=4, constants="paper")
SMALL = {
    hierarchical: hierarchical.Config(evaluations=48, width=8, hidden=4),
    placeto: placeto.Config(evaluations=3 * 89, width=4, rounds=2),
}


def found(*seconds: float) -> Evaluation:
    times = np.array(seconds)
    fits = times < 1.0
    return Evaluation(-np.log(times), fits, times, np.where(fits, 0, 1), np.zeros(len(times)))


@pytest.mark.parametrize("system", SMALL, ids=lambda system: system.Config.NAME)
def test_the_same_seed_has_the_same_curve_and_keeps_its_budget(system):
    curves = []
    for _ in range(2):
        rows = list[placeto.Diagnostics]()
        result = system.train(SMALL[system], toy(), listener=rows.append)
        assert result.evaluations == SMALL[system].evaluations
        assert result.finalists[0].fits
        curves.append(curve(rows))
    assert curves[0] == curves[1]
    assert len(curves[0]) >= 3


@pytest.mark.parametrize("system", SMALL, ids=lambda system: system.Config.NAME)
def test_an_interruption_keeps_what_was_found(system):
    result = system.train(SMALL[system], toy(), listener=raising(2))
    assert result.interrupted
    assert result.iterations == 2
    assert result.finalists


@pytest.mark.parametrize("system", SMALL, ids=lambda system: system.Config.NAME)
def test_a_folder_is_refused_because_there_are_no_checkpoints(system, tmp_path):
    with pytest.raises(UsageError, match=f"{system.Config.NAME} keeps no checkpoints"):
        system.train(SMALL[system], toy(), folder=tmp_path)


# the Hierarchical Planner


def test_paper_and_code_have_constants_of_their_own():
    paper, code = (hierarchical.Config(constants=kind) for kind in ("paper", "code"))
    assert (paper.samples, paper.squash) == (4, Squash(5.0, 10.0))
    assert (code.samples, code.squash) == (1, Squash(1.0, 1.0))


def test_there_are_twenty_groups_for_each_device():
    planner = hierarchical.Planner.new(PAPER, toy())
    assert planner.groups == 60
    assert planner.draw().placements.shape == (4, 11)


def test_a_unit_is_seen_with_its_sizes_and_all_of_its_neighbours():
    features = hierarchical.unit_features(toy().grouping)
    assert features.shape == (11, 1 + hierarchical.OUTPUTS + 2 * hierarchical.NEIGHBOURS)
    source, join = features[0, 6:].reshape(-1, 2), features[10, 6:].reshape(-1, 2)
    assert source[:3, 1].tolist() == [1.0, 1.0, 1.0]  # sends to three branches
    assert np.allclose(source[:3, 0] * 11, [1, 4, 7])
    assert np.allclose(join[:3, 0] * 11, [3, 6, 9])
    assert (join[:3, 1] == -1.0).all()
    assert (features[0, 4:6] == -1.0).all()  # a fourth and a fifth output do not exist


def test_the_baseline_begins_at_a_failure_and_follows_rewards():
    planner = hierarchical.Planner.new(PAPER, toy())
    assert planner.baseline == -10.0
    planner.learn(planner.draw(), found(0.04, 0.04, 0.04, 0.04))
    assert planner.baseline == pytest.approx(0.9 * -10.0 + 0.1 * -0.2)


def test_failures_count_as_a_hundred_seconds_until_they_are_left_out():
    config = dataclasses.replace(PAPER, forgiving=1)
    planner = hierarchical.Planner.new(config, toy())
    planner.learn(planner.draw(), found(0.04, 2.0, 2.0, 2.0))
    first = planner.baseline
    assert first == pytest.approx(0.9 * -10.0 + 0.1 * -(0.2 + 30.0) / 4)
    planner.steps = 1
    planner.learn(planner.draw(), found(0.04, 2.0, 2.0, 2.0))
    assert planner.baseline == pytest.approx(0.9 * first + 0.1 * -0.2)
    loss, _ = planner.learn(planner.draw(), found(2.0, 2.0, 2.0, 2.0))
    assert math.isnan(loss)


def test_the_rate_falls_from_step_four_hundred_on():
    planner = hierarchical.Planner.new(PAPER, toy())
    for steps, rate in ((0, 0.1), (449, 0.1), (450, 0.095), (500, 0.1 * 0.95**2)):
        planner.steps = steps
        planner.learn(planner.draw(), found(0.04, 0.04, 0.04, 0.03))
        assert planner.optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_our_constants_compare_with_the_mean_of_a_step_in_deviations():
    planner = hierarchical.Planner.new(SMALL[hierarchical], toy())
    drawn = planner.draw()
    assert drawn.placements.shape == (16, 11)
    planner.learn(drawn, found(*[0.04] * 8, *[0.02] * 8))
    mean = -math.log(math.sqrt(0.04 * 0.02))
    assert planner.baseline == pytest.approx(mean)
    planner.steps = 1
    assert planner._tuned_gain(found(0.04, 0.04)).tolist() == [-5.0, -5.0]  # at most five
    assert planner.optimizer.param_groups[0]["lr"] == pytest.approx(0.003)


def test_with_our_constants_a_policy_is_still_open_where_the_published_are_certain():
    open_, certain = (
        hierarchical.Config(evaluations=20 * samples, width=8, hidden=4, constants=kind)
        for kind, samples in (("tuned", 16), ("paper", 4))
    )
    ends = []
    for config in (open_, certain):
        rows = list[placeto.Diagnostics]()
        hierarchical.train(config, toy(), listener=rows.append)
        ends.append(rows[-1].entropy)
    assert ends[0] > 1.0
    assert ends[1] < 0.8


# Placeto


def test_relations_of_a_diamond():
    sends = torch.zeros(4, 4, dtype=torch.bool)
    for a, b in ((0, 1), (0, 2), (1, 3), (2, 3), (3, 0)):  # the last is a gradient
        sends[a, b] = True
    relations = Relations.of(sends)
    assert relations.parents[3].tolist() == [0.0, 0.5, 0.5, 0.0]
    assert relations.children[0].tolist() == [0.0, 0.5, 0.5, 0.0]
    assert relations.before[3].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])
    assert relations.after[3].tolist() == [0.0] * 4
    assert relations.beside[1].tolist() == [0.0, 0.0, 1.0, 0.0]


def test_gains_of_a_pass_sum_to_what_it_changed():
    improver = placeto.Improver.new(SMALL[placeto], toy(), None)
    start = float(improver.task.evaluate(improver.best[None]).reward[0])
    done = improver.go_over()
    assert done is not None
    assert improver.evaluations == 1 + 8 * 11
    last = improver.task.reward.form(done.step_time[-1], improver.task.reward.baseline)
    assert done.gain.sum(axis=0) == pytest.approx(last - start)


def test_a_group_mostly_stays_at_first():
    improver = placeto.Improver.new(SMALL[placeto], toy(), None)
    now = np.tile([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1], (8, 1))
    for group in range(11):
        likely = improver.logits(now, group).softmax(1)[:, now[0, group]]
        assert (likely > 0.45).all()


def test_the_next_pass_begins_at_the_best_met():
    improver = placeto.Improver.new(SMALL[placeto], toy(), None)
    improver.iterate()
    best = improver.finalists.best
    assert best is not None
    assert improver.best.tolist() == list(best.actions)


def test_a_life_that_finds_nothing_better_ends_and_what_was_found_is_kept():
    config = dataclasses.replace(SMALL[placeto], evaluations=2000, patience=2)
    rows = list[placeto.Diagnostics]()
    placeto.train(config, toy(), listener=rows.append)
    assert rows[-1].life > 1
    best = [row.best_step_time for row in rows]
    assert best == sorted(best, reverse=True)
    again = placeto.Improver.new(config, toy(), None)
    again.iterate()
    again.begin_again()
    assert again.best.tolist() == again.start.tolist()
    assert again.finalists.best is not None


# the optimum


@pytest.mark.slow
def test_placeto_solves_the_toy_in_nineteen_of_twenty_seeds():
    config = placeto.Config(evaluations=EVALUATIONS)
    found = [meets_optimum(placeto.train, dataclasses.replace(config, seed=s)) for s in range(20)]
    assert sum(found) >= 19
