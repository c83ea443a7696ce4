"""The mathematics of the learners: pure functions; time is in the names, v_tp1 follows v_t.

What needs no gradient takes numpy arrays, the rest torch tensors. Torch is named in types only, so
that a planner may use a formula without loading it. The caller detaches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


def _check_equal(**shapes: tuple[int, ...]) -> None:
    """Refuses arrays whose shapes differ."""
    if len(set(shapes.values())) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{k} {list(s)}" for k, s in shapes.items()))


def masked_log_softmax(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Returns log probabilities of categoricals, [..., choice], -inf where a choice is not allowed.

    Huang and Ontañón, A closer look at invalid action masking, FLAIRS 2022: a masked choice has no
    gradient.

    Args:
        logits: [..., choice].
        allowed: bool [..., choice]; at least one in each row.
    """
    _check_equal(logits=tuple(logits.shape), allowed=tuple(allowed.shape))
    return logits.masked_fill(~allowed, -np.inf).log_softmax(-1)


def mix_uniform(log_probabilities: torch.Tensor, weight: float) -> torch.Tensor:
    """Returns log((1 - weight) p + weight / D), [..., choice], over the D choices of each row.

    The mixture of Post (Gao, Chen and Li, 2018), with which no choice is ever given up.

    Args:
        log_probabilities: log p, [..., choice], -inf where a choice does not exist.
        weight: of the uniform distribution, 0 to below 1.
    """
    if not weight:
        return log_probabilities
    exists = log_probabilities > -np.inf
    flat = exists.to(log_probabilities.dtype) / exists.sum(-1, keepdim=True)
    mixed = (1.0 - weight) * log_probabilities.exp() + weight * flat
    return mixed.masked_fill(~exists, 1.0).log().masked_fill(~exists, -np.inf)


def categorical_entropy(log_probabilities: torch.Tensor) -> torch.Tensor:
    """Returns the entropy of categoricals, [...], in nats, from log probabilities [..., choice]."""
    _check_rank(log_probabilities.ndim, least=1)
    finite = log_probabilities.clamp_min(-1e30)  # 0 log 0 is 0, and so is its gradient
    return -(log_probabilities.exp() * finite).sum(-1)


def _check_rank(rank: int, *, least: int) -> None:
    if rank < least:
        raise ValueError(f"expected at least {least} axes, got {rank}")


def clipped_surrogate(
    log_ratio: torch.Tensor, advantage: torch.Tensor, *, clip: float
) -> torch.Tensor:
    """Returns the loss of PPO, -mean(min(r A, clip(r, 1 - clip, 1 + clip) A)).

    Schulman et al., Proximal policy optimization algorithms, 2017, equation 7.

    Args:
        log_ratio: log of new over old probability of what was done, [...].
        advantage: A, [...].
        clip: how far r may go from 1 before the gradient stops.
    """
    _check_equal(log_ratio=tuple(log_ratio.shape), advantage=tuple(advantage.shape))
    ratio = log_ratio.exp()
    limited = ratio.clamp(1.0 - clip, 1.0 + clip)
    return -(ratio * advantage).minimum(limited * advantage).mean()


def clip_fraction(log_ratio: torch.Tensor, *, clip: float) -> torch.Tensor:
    """Returns the fraction of ratios, [...], that are further than clip from 1."""
    _check_rank(log_ratio.ndim, least=1)
    return ((log_ratio.exp() - 1.0).abs() > clip).to(log_ratio.dtype).mean()


def approximate_kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """Returns the estimate of KL(old, new) from samples of old: mean(r - 1 - log r), at least 0.

    Schulman, Approximating KL divergence, 2020 (joschu.net/blog/kl-approx.html), estimator k3.

    Args:
        log_ratio: log r, r = new over old probability, [...].
    """
    _check_rank(log_ratio.ndim, least=1)
    return (log_ratio.exp() - 1.0 - log_ratio).mean()


class Tally(NamedTuple):
    """How often each choice of a decision was made, and what it was worth, [decision, choice]."""

    times: torch.Tensor  # chosen
    up: torch.Tensor  # sum of the advantages above 0
    down: torch.Tensor  # sum of those below


class Surrogate(NamedTuple):
    """The loss of PPO over some decisions, and how far they moved; means over them."""

    loss: torch.Tensor  # as `clipped_surrogate`
    approx_kl: torch.Tensor  # as `approximate_kl`
    clip_fraction: torch.Tensor  # as `clip_fraction`
    size: int  # decisions times samples


def tally(actions: torch.Tensor, advantage: torch.Tensor, num_choices: int) -> Tally:
    """Sums advantages by what was chosen.

    Args:
        actions: int64 [sample, decision].
        advantage: [sample, decision].
        num_choices: choices of each decision.
    """
    _check_equal(actions=tuple(actions.shape), advantage=tuple(advantage.shape))
    size = actions.shape[1] * num_choices
    cell = (actions + num_choices * actions.new_tensor(range(actions.shape[1]))).reshape(-1)
    worth = advantage.reshape(-1)
    shape = (actions.shape[1], num_choices)
    return Tally(
        cell.bincount(minlength=size).to(advantage.dtype).reshape(shape),
        cell.bincount(worth.clamp_min(0.0), minlength=size).reshape(shape),
        cell.bincount(worth.clamp_max(0.0), minlength=size).reshape(shape),
    )


def tallied_surrogate(
    now: torch.Tensor, old: torch.Tensor, counted: Tally, *, clip: float
) -> Surrogate:
    """Returns the loss of PPO where all samples share their log probabilities.

    The same as `clipped_surrogate` over all samples, in a time that does not grow with them: where
    the ratio r is shared, sum_k min(r A_k, clip(r) A_k) is min(r, 1 + clip) times the sum of the
    positive A_k, plus max(r, 1 - clip) times that of the negative ones.

    Args:
        now: log probabilities, [decision, choice].
        old: when the actions were sampled, [decision, choice].
        counted: of the samples.
        clip: how far a ratio may go from 1.
    """
    _check_equal(now=tuple(now.shape), old=tuple(old.shape), counted=tuple(counted.times.shape))
    log_ratio = (now - old).masked_fill(counted.times == 0, 0.0)
    ratio, total = log_ratio.exp(), counted.times.sum()
    gain = ratio.clamp_max(1.0 + clip) * counted.up + ratio.clamp_min(1.0 - clip) * counted.down
    is_far = ((ratio - 1.0).abs() > clip).to(ratio.dtype)
    return Surrogate(
        -gain.sum() / total,
        (counted.times * (ratio - 1.0 - log_ratio)).sum() / total,
        (counted.times * is_far).sum() / total,
        int(total),
    )


def value_loss(v: torch.Tensor, target: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns half the mean square error of values over those that count, 0 where none does.

    Args:
        v: values, [...].
        target: what they should be, [...].
        counts: bool, [...].
    """
    _check_equal(v=tuple(v.shape), target=tuple(target.shape), counts=tuple(counts.shape))
    error = (v - target).square() * counts
    return 0.5 * error.sum() / counts.sum().clamp_min(1)


def gae(  # noqa: PLR0913 - what an episode consists of
    r_t: Floats, v_t: Floats, v_tp1: Floats, terminated_t: Bools, truncated_t: Bools, *,
    discount: float, lambda_: float,
) -> NDArray[np.float64]:  # fmt: skip
    """Returns generalised advantages, [step, env].

    Schulman et al., High-dimensional continuous control using generalized advantage estimation,
    2016, equation 16. An end by termination is worth nothing more; one by truncation is worth what
    the value says of the state that the episode was cut at. Neither looks into the next episode.

    Args:
        r_t: rewards of the steps, [step, env].
        v_t: values of the states they were made in, [step, env].
        v_tp1: values of the states they led to, before any reset, [step, env].
        terminated_t: whether the step ended the episode, [step, env].
        truncated_t: whether the episode was cut after it, [step, env].
        discount: gamma.
        lambda_: 1 trusts the rewards only, 0 the values of the next states.
    """
    _check_equal(r_t=r_t.shape, v_t=v_t.shape, v_tp1=v_tp1.shape,
                 terminated_t=terminated_t.shape, truncated_t=truncated_t.shape)  # fmt: skip
    delta_t = r_t + discount * np.where(terminated_t, 0.0, v_tp1) - v_t
    carry_t = discount * lambda_ * ~(terminated_t | truncated_t)
    advantage = np.zeros(r_t.shape)
    following = np.zeros(r_t.shape[1:])
    for t in reversed(range(len(r_t))):
        following = delta_t[t] + carry_t[t] * following
        advantage[t] = following
    return advantage


def ema(previous: float, values: Floats, *, decay: float) -> float:
    """Returns an exponential moving average after one more batch, whose mean has weight 1 - decay.

    The baseline that the code of the Hierarchical Planner (Mirhoseini et al., 2018) subtracts from
    its rewards, with decay 0.9. What should not count is left out by the caller.

    Args:
        previous: the average so far.
        values: the batch, [sample]; where it is empty nothing changes.
        decay: weight of the past.
    """
    _check_rank(values.ndim, least=1)
    return decay * previous + (1.0 - decay) * float(values.mean()) if values.size else previous


def explained_variance(v: Floats, target: Floats) -> float:
    """Returns the part of the variance of targets that values explain: 1 all, 0 as a constant.

    Args:
        v: values, [...].
        target: what they should have been, [...]; NaN comes out where they are all equal.
    """
    _check_equal(v=v.shape, target=target.shape)
    spread, rounding = float(np.std(target)), 1e-9 * float(np.abs(target).max(initial=0.0))
    if spread <= rounding:
        return float("nan")
    return 1.0 - float(np.var(target - v)) / spread**2


def elite_fit(
    actions: NDArray[np.integer], reward: Floats, allowed: Bools, *, elites: int, uniform: float
) -> NDArray[np.float64]:
    """Returns the categoricals, [group, choice], that are closest to the best samples.

    Gao, Chen and Li, Post: device placement with cross-entropy minimization and proximal policy
    optimization, NeurIPS 2018. Least cross-entropy has a closed form: how often each choice is
    among the elites; it is then mixed with the uniform one, f <- (1 - uniform) f + uniform / D.

    Args:
        actions: samples, [sample, group].
        reward: what they are worth, [sample]; of equal ones the first.
        allowed: the choices there are, [group, choice].
        elites: how many samples are taken.
        uniform: weight of the uniform distribution over the choices allowed.
    """
    _check_equal(actions=actions.shape, expected=(len(reward), len(allowed)))
    best = actions[np.argsort(-reward, kind="stable")[:elites]]
    group = np.broadcast_to(np.arange(len(allowed)), best.shape)
    counts = np.zeros(allowed.shape)
    np.add.at(counts, (group, best), 1.0)
    flat: NDArray[np.float64] = allowed / allowed.sum(axis=1, keepdims=True)
    return (1.0 - uniform) * counts / len(best) + uniform * flat
