"""Rewards: worked numbers of each form, the order of what does not fit, batch and single alike."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from agents.reward import Reward, negative_log_time, negative_sqrt_time, negative_time
from simcore import Cluster, GraphBuilder, Job, Plan, Problem, Status, simulate, simulate_batch
from simcore.graph import Out
from simcore.units import GiB

FORMS = (negative_log_time, negative_sqrt_time, negative_time)
every_form = pytest.mark.parametrize("form", FORMS)


class Outcome(NamedTuple):
    step_time: NDArray[np.float64]
    overflow: NDArray[np.int64]
    status: NDArray[np.uint8]


def outcome(*plans: tuple[float, int, Status]) -> Outcome:
    step_time, overflow, status = zip(*plans, strict=True)
    return Outcome(np.array(step_time), np.array(overflow), np.array(status, np.uint8))


def fits(step_time: float) -> tuple[float, int, Status]:
    return step_time, 0, Status.OK


def over(step_time: float, num_bytes: int) -> tuple[float, int, Status]:
    return step_time, num_bytes, Status.OUT_OF_MEMORY


def illegal(status: Status) -> tuple[float, int, Status]:
    return math.inf, 0, status


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (negative_log_time, [math.log(2), 0.0, -math.log(4)]),
        (negative_sqrt_time, [-math.sqrt(0.02), -0.2, -0.4]),
        (negative_time, [-0.02, -0.04, -0.16]),
    ],
)
def test_forms_have_the_numbers_worked_by_hand(form, expected):
    reward = Reward(baseline=0.04, capacity=1, form=form)
    found = reward.of(outcome(fits(0.02), fits(0.04), fits(0.16)))
    assert_allclose(found.value, expected, rtol=1e-15)
    assert found.fits.all()


@every_form
def test_what_does_not_fit_is_worse_than_all_that_fits_and_graded(form):
    reward = Reward(baseline=0.04, capacity=100, form=form)
    found = reward.of(
        outcome(
            fits(0.01),
            fits(3.9),
            over(0.001, 1),
            over(0.001, 50),
            over(0.001, 10_000),
            illegal(Status.UNREACHABLE),
        )
    )
    assert (np.diff(found.value) < 0).all()
    assert found.fits.tolist() == [True, True, False, False, False, False]


def test_penalties_have_the_numbers_worked_by_hand():
    reward = Reward(baseline=2.0, capacity=100, form=negative_time, slowest=10.0)
    found = reward.of(
        outcome(fits(50.0), over(1.0, 100), over(1.0, 300), illegal(Status.SPLIT_UNIT))
    )
    # the slowest counts 20 s; over by one capacity 2 + 1/2 of it, by three 2 + 3/4; illegal 4
    assert found.value.tolist() == [-20.0, -50.0, -55.0, -80.0]


@every_form
def test_a_plan_slower_than_the_slowest_is_still_better_than_one_that_does_not_fit(form):
    reward = Reward(baseline=1e-3, capacity=1, form=form)
    slow, none = reward.of(outcome(fits(1e6), over(1e-6, 1))).value
    assert slow > none


@every_form
def test_every_illegal_plan_has_one_finite_reward(form):
    statuses = [Status.ILLEGAL_DEVICE, Status.SPLIT_UNIT, Status.UNREACHABLE]
    found = Reward(baseline=1.0, capacity=1, form=form).of(outcome(*map(illegal, statuses)))
    assert len(set(found.value.tolist())) == 1
    assert np.isfinite(found.value).all()
    assert not found.fits.any()


@every_form
def test_a_step_of_no_time_has_a_finite_reward(form):
    assert np.isfinite(Reward(baseline=1.0, capacity=1, form=form).of(outcome(fits(0.0))).value)


@pytest.mark.parametrize("field", ["baseline", "capacity", "slowest"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_reward_that_compares_with_nothing_is_refused(field, value):
    with pytest.raises(ValueError, match=field):
        Reward(**({"baseline": 1.0, "capacity": 1.0} | {field: value}))


@pytest.mark.parametrize("gib", [1, 40])
def test_a_result_has_the_reward_of_its_plan_in_a_batch(gib):
    builder = GraphBuilder("held")
    tensor = builder.parameter("weight", gib * GiB)
    builder.op("use", inputs=(tensor,), outputs=(Out(10),), seconds=1.0)
    graph, cluster, job = builder.build(), Cluster.preset("4xV100-NVLink"), Job()
    reward = Reward(baseline=2.0, capacity=16 * GiB)
    result = simulate(graph, cluster, job, Plan.from_placement(graph, cluster, job, [1]))
    batch = reward.of(simulate_batch(Problem.build(graph, cluster, job), np.array([[1]])))
    assert result.feasible == (gib == 1) == batch.fits[0]
    assert reward.of_result(result) == batch.value[0]
