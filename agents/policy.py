"""What every policy over placements is: decisions in a fixed order, sampled or judged alike.

A policy says how probable each choice of its decisions is and asks a `Choose` what was chosen. To
sample, that draws; to judge, it repeats what was done. Decisions that hang on no other one have one
table of log probabilities for all K placements (the factorised mode): one encode gives hundreds of
placements. The rest follows one part after another, each part at once, with log probabilities per
placement.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from agents import losses

Choose: TypeAlias = Callable[[Tensor], Tensor]
"""log probabilities [decision, choice] or [K, decision, choice] -> actions int64 [K, decision]."""


class Decided(NamedTuple):
    """Decisions that were made, and how probable they were."""

    actions: Tensor  # int64 [K, decision]
    tables: tuple[Tensor, ...]  # log probabilities [decision, choice] of the first decisions
    sequence: Tensor | None  # [K, decision] log probability of each of the others; None = no others
    entropy: Tensor  # nats per device that is chosen


class Actor(nn.Module, ABC):
    """A policy of one task."""

    @abstractmethod
    def decide(self, choose: Choose) -> Decided:
        """Goes through the decisions in their order."""

    @abstractmethod
    def lean(self, actions: Tensor, probability: float) -> None:
        """Begins near a placement, [group]: the rest of the probability is uniform."""

    def place(self, actions: Tensor) -> Tensor:
        """Returns the devices of the task's groups, [K, group], that decisions amount to."""
        return actions

    def values(self, actions: Tensor) -> Tensor:
        """Returns the value before each decision, [K, decision]; 0 where there are no values."""
        return torch.zeros(actions.shape)


def drawing(num: int, generator: torch.Generator) -> Choose:
    """Returns what draws so many placements."""

    def choose(log_probabilities: Tensor) -> Tensor:
        allowed = torch.isfinite(log_probabilities)
        return sample(log_probabilities.detach(), allowed, num, generator)

    return choose


def repeating(actions: Tensor) -> Choose:
    """Returns what repeats decisions, [K, decision]."""
    at = 0

    def choose(log_probabilities: Tensor) -> Tensor:
        nonlocal at
        begin, at = at, at + log_probabilities.shape[-2]
        return actions[:, begin:at]

    return choose


def likeliest(log_probabilities: Tensor) -> Tensor:
    """Is the `Choose` that takes the most probable choice, of one placement."""
    best = log_probabilities.argmax(-1)
    return best if best.ndim == 2 else best[None]


def sample(
    log_probabilities: Tensor, allowed: Tensor, num: int, generator: torch.Generator
) -> Tensor:
    """Draws actions, int64 [K, decision]; never a masked one.

    Args:
        log_probabilities: [decision, choice] or [K, decision, choice].
        allowed: bool, likewise.
        num: K.
        generator: what decides.
    """
    cumulative = log_probabilities.exp().cumsum(-1)  # [..., decision, choice]
    drawn = torch.rand(num, cumulative.shape[-2], 1, generator=generator)  # [K, decision, 1]
    choice = (drawn >= cumulative).sum(-1)  # [K, decision]
    last = allowed.shape[-1] - 1 - allowed.flip(-1).to(torch.uint8).argmax(-1)  # [..., decision]
    return choice.minimum(last)  # where rounding left the sum below 1


class Compared(NamedTuple):
    """A policy against the one that sampled, over all decisions of all placements."""

    loss: Tensor  # of the clipped surrogate
    approx_kl: float  # per decision
    clip_fraction: float  # of ratios


class Worth(NamedTuple):
    """What decisions were worth, in the form that a comparison needs."""

    tallies: tuple[losses.Tally, ...]  # of each table
    sequence: Tensor  # [K, decision] advantages of the decisions that follow one another

    @classmethod
    def of(cls, decided: Decided, advantage: Tensor) -> "Worth":
        """Returns the worth of decisions from their advantages, [K, decision]."""
        parts, at = list[losses.Tally](), 0
        for table in decided.tables:
            columns = slice(at, at + len(table))
            actions = decided.actions[:, columns]
            parts.append(losses.tally(actions, advantage[:, columns], table.shape[1]))
            at += len(table)
        return cls(tuple(parts), advantage[:, at:])


def compare(now: Decided, old: Decided, worth: Worth, *, clip: float) -> Compared:
    """Compares two judgements of the same actions.

    Args:
        now: with gradients.
        old: by the policy that sampled.
        worth: of the actions.
        clip: how far a ratio of probabilities may go from 1.
    """
    parts = [
        losses.tallied_surrogate(table, before.detach(), tally, clip=clip)
        for table, before, tally in zip(now.tables, old.tables, worth.tallies, strict=True)
    ]
    if now.sequence is not None and old.sequence is not None:
        log_ratio = now.sequence - old.sequence.detach()
        parts.append(losses.Surrogate(
            losses.clipped_surrogate(log_ratio, worth.sequence, clip=clip),
            losses.approximate_kl(log_ratio),
            losses.clip_fraction(log_ratio, clip=clip),
            log_ratio.numel(),
        ))  # fmt: skip
    total = max(1, sum(part.size for part in parts))
    weights = [part.size / total for part in parts]
    share = parts[-1].size / total
    zero = torch.zeros(())
    loss = sum((part.loss * (w / share) for part, w in zip(parts, weights, strict=True)), zero)
    kl = sum(float(part.approx_kl.detach()) * w for part, w in zip(parts, weights, strict=True))
    far = sum(
        float(part.clip_fraction.detach()) * w for part, w in zip(parts, weights, strict=True)
    )
    return Compared(loss, kl, far)


def negative_log_likelihood(now: Decided, weight: Tensor | None = None) -> Tensor:
    """Returns -log p of the actions, per decision, averaged over placements with weights, [K]."""
    size = now.actions.shape
    weight = torch.ones(size[0]) if weight is None else weight
    share = (weight / weight.sum())[:, None]  # [K, 1]
    total, at = torch.zeros(()), 0
    for table in now.tables:
        actions = now.actions[:, at : at + len(table)]
        counts = losses.tally(actions, share.expand(actions.shape), table.shape[1]).up
        total = total - (counts * table.masked_fill(counts == 0, 0.0)).sum()
        at += len(table)
    if now.sequence is not None:
        total = total - (share * now.sequence).sum()
    return total / max(1, size[1])
