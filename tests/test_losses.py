"""Formulas of the learners, each against numbers worked by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from agents import losses

LN2 = math.log(2)


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log()


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float64)[:, None]


def flags(*values: int) -> np.ndarray:
    return np.array(values, np.bool_)[:, None]


# policies


def test_masked_choices_have_no_probability_and_no_gradient():
    logits = torch.tensor([[0.0, 5.0, 0.0], [1.0, 1.0, 1.0]], requires_grad=True)
    allowed = torch.tensor([[True, False, True], [True, True, True]])
    log_probabilities = losses.masked_log_softmax(logits, allowed)
    assert_allclose(log_probabilities.exp().detach(), [[0.5, 0, 0.5], [1 / 3] * 3], rtol=1e-6)
    log_probabilities[:, 0].sum().backward()
    assert_allclose(logits.grad, [[0.5, 0, -0.5], [2 / 3, -1 / 3, -1 / 3]], rtol=1e-6)


@pytest.mark.parametrize(
    ("probabilities", "nats"),
    [((0.5, 0.5, 0.0), LN2), ((1.0, 0.0, 0.0), 0.0), ((0.25,) * 4, 2 * LN2), ((1.0,), 0.0)],
)
def test_entropy_is_that_of_the_choices_allowed(probabilities, nats):
    found = losses.categorical_entropy(tensor(*probabilities).log())
    assert float(found) == pytest.approx(nats, abs=1e-12)


def test_the_gradient_of_the_entropy_is_finite_where_choices_are_masked():
    logits = torch.zeros(1, 3, requires_grad=True)
    allowed = torch.tensor([[True, False, True]])
    losses.categorical_entropy(losses.masked_log_softmax(logits, allowed)).sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6  # uniform: a maximum


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.4),  # clipped at 1.2
        (0.5, 2.0, -1.0),  # worse than before: not clipped
        (0.5, -1.0, 0.8),  # clipped at 0.8
        (1.5, -1.0, 1.5),
    ],
)
def test_the_surrogate_is_clipped_on_the_side_that_gains(ratio, advantage, loss):
    found = losses.clipped_surrogate(logs(ratio), tensor(advantage), clip=0.2)
    assert float(found) == pytest.approx(loss)


def test_a_clipped_ratio_has_no_gradient():
    log_ratio = logs(1.5, 1.1).requires_grad_()
    losses.clipped_surrogate(log_ratio, tensor(1.0, 1.0), clip=0.2).backward()
    assert log_ratio.grad is not None
    assert_allclose(log_ratio.grad, [0.0, -0.55])  # -1.1 / 2


def test_the_clip_fraction_counts_both_sides():
    assert float(losses.clip_fraction(logs(1.0, 1.3, 0.7, 1.1), clip=0.2)) == 0.5
    assert float(losses.clip_fraction(logs(1.0), clip=0.2)) == 0.0


def test_the_approximate_kl_has_the_numbers_worked_by_hand():
    assert float(losses.approximate_kl(logs(2.0))) == pytest.approx(1 - LN2)
    assert float(losses.approximate_kl(logs(2.0, 0.5))) == pytest.approx(0.25)
    assert float(losses.approximate_kl(logs(1.0))) == 0.0


def test_the_approximate_kl_has_the_mean_of_the_kl_divergence():
    old, new = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    expected = float((old * np.log(old / new)).sum())
    draws = np.repeat(np.arange(3), (old * 10).astype(int))  # as often as they are probable
    found = losses.approximate_kl(torch.from_numpy(np.log(new / old)[draws]))
    assert float(found) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("counts", "loss"), [((1, 1), 1.25), ((1, 0), 0.5), ((0, 1), 2.0), ((0, 0), 0.0)]
)
def test_the_value_loss_is_over_what_counts(counts, loss):
    counted = torch.tensor(counts, dtype=torch.bool)
    assert float(losses.value_loss(tensor(1.0, 3.0), tensor(2.0, 1.0), counted)) == loss


# advantages


def test_advantages_add_up_discounted_errors():
    found = losses.gae(
        column(1, 2, 3), column(10, 20, 30), column(20, 30, 40),
        flags(0, 0, 1), flags(0, 0, 0), discount=0.5, lambda_=0.5,
    )  # fmt: skip
    # errors: 1 + 10 - 10 = 1; 2 + 15 - 20 = -3; 3 + 0 - 30 = -27; a quarter of the next is added
    assert_allclose(found[:, 0], [1 + 0.25 * -9.75, -3 + 0.25 * -27, -27])


def test_truncation_bootstraps_and_termination_does_not():
    given = column(1.0), column(5.0), column(8.0)
    ended = losses.gae(*given, flags(1), flags(0), discount=0.5, lambda_=1.0)
    cut = losses.gae(*given, flags(0), flags(1), discount=0.5, lambda_=1.0)
    assert ended[0, 0] == 1.0 - 5.0
    assert cut[0, 0] == 1.0 + 0.5 * 8.0 - 5.0


@pytest.mark.parametrize(("terminated", "truncated"), [(1, 0), (0, 1), (1, 1)])
def test_no_advantage_looks_into_the_next_episode(terminated, truncated):
    found = losses.gae(
        column(1, 100), column(0, 0), column(2, 0),
        flags(terminated, 0), flags(truncated, 0), discount=1.0, lambda_=1.0,
    )  # fmt: skip
    assert found[0, 0] == (1.0 if terminated else 3.0)


def test_with_lambda_one_advantages_are_returns_less_values():
    rng = np.random.default_rng(0)
    r_t, v = rng.normal(size=(6, 2)), rng.normal(size=(7, 2))
    ends = np.zeros((6, 2), np.bool_)
    ends[-1] = True
    found = losses.gae(r_t, v[:-1], v[1:], ends, np.zeros_like(ends), discount=1.0, lambda_=1.0)
    assert_allclose(found, r_t[::-1].cumsum(axis=0)[::-1] - v[:-1])


def test_the_moving_average_has_the_numbers_worked_by_hand():
    assert losses.ema(10.0, np.array([20.0, 40.0]), decay=0.9) == pytest.approx(12.0)
    assert losses.ema(10.0, np.array([20.0]), decay=0.0) == 20.0
    assert losses.ema(10.0, np.array([]), decay=0.9) == 10.0


def test_the_explained_variance_has_the_numbers_worked_by_hand():
    target = np.array([1.0, 3.0])
    assert losses.explained_variance(target, target) == 1.0
    assert losses.explained_variance(np.array([2.0, 2.0]), target) == 0.0
    assert losses.explained_variance(np.array([1.5, 2.5]), target) == 0.75
    assert losses.explained_variance(np.array([3.0, 1.0]), target) == -3.0
    assert math.isnan(losses.explained_variance(target, np.full(2, 0.1)))


# cross-entropy


def test_the_fit_counts_the_choices_of_the_elites():
    actions = np.array([[0, 1], [0, 2], [1, 0], [2, 2]])
    allowed = np.ones((2, 3), np.bool_)
    fit = losses.elite_fit(actions, np.array([4.0, 3.0, 1.0, 2.0]), allowed, elites=2, uniform=0.0)
    assert fit.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]


def test_the_fit_is_mixed_with_what_is_allowed_only():
    actions = np.array([[0, 1], [2, 1]])
    allowed = np.array([[True, False, True], [True, True, True]])
    fit = losses.elite_fit(actions, np.array([1.0, 0.0]), allowed, elites=1, uniform=0.3)
    assert_allclose(fit, [[0.85, 0.0, 0.15], [0.1, 0.8, 0.1]])


def test_of_equal_samples_the_first_are_elites():
    actions = np.array([[0], [1], [2]])
    fit = losses.elite_fit(actions, np.zeros(3), np.ones((1, 3), np.bool_), elites=1, uniform=0.0)
    assert fit.tolist() == [[1.0, 0.0, 0.0]]


def test_the_fit_has_the_least_cross_entropy_of_all_on_a_grid():
    actions = np.array([[0], [0], [1], [2]])
    fit = losses.elite_fit(actions, np.ones(4), np.ones((1, 3), np.bool_), elites=4, uniform=0.0)

    def cross_entropy(probabilities: np.ndarray) -> float:
        return float(-np.log(probabilities[actions[:, 0]]).sum())

    grid = [np.array([a, b, 20 - a - b]) / 20 for a, b in itertools.product(range(1, 19), repeat=2)]
    best = min((p for p in grid if p.min() > 0), key=cross_entropy)
    assert_allclose(best, fit[0])


# shapes


def test_arrays_of_different_shapes_are_refused():
    two, three = tensor(1, 2), tensor(1, 2, 3)
    with pytest.raises(ValueError, match=r"log_ratio \[2\], advantage \[3\]"):
        losses.clipped_surrogate(two, three, clip=0.2)
    with pytest.raises(ValueError, match="shapes differ"):
        losses.value_loss(two, three, three.bool())
    with pytest.raises(ValueError, match="shapes differ"):
        losses.masked_log_softmax(two, three.bool())
    with pytest.raises(ValueError, match="shapes differ"):
        losses.explained_variance(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="shapes differ"):
        losses.elite_fit(np.zeros((2, 3), int), np.zeros(2), np.ones((2, 2), bool), elites=1,
                         uniform=0.0)  # fmt: skip
    with pytest.raises(ValueError, match=r"r_t \[2, 1\]"):
        losses.gae(column(1, 2), column(1), column(1), flags(0), flags(0), discount=1, lambda_=1)
    with pytest.raises(ValueError, match="axes"):
        losses.ema(0.0, np.float64(1.0), decay=0.5)
