"""Replay: the last transitions of a learner, drawn alike or by how little they were expected.

Schaul et al., Prioritized experience replay, 2016.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agents.compiled_sum_tree import draw_items, set_priorities

_LEAST_PRIORITY = 1e-6


class Drawing(Protocol):
    """What decides how transitions are drawn; `agents.dqn.Config` is one."""

    @property
    def capacity(self) -> int:
        """Transitions, a power of two."""

    @property
    def batch_size(self) -> int:
        """Transitions of a draw."""

    @property
    def prioritized(self) -> bool:
        """Whether priorities count."""

    @property
    def alpha(self) -> float:
        """Exponent of priorities."""


class Batch(NamedTuple):
    """Transitions that were drawn. Axes: B, feature, action."""

    seen: Tensor  # [B, feature]
    action: Tensor  # int64 [B]
    reward: Tensor  # [B] of n steps
    discount: Tensor  # [B] of the value that follows, 0 = none
    after: Tensor  # [B, feature] what was seen then
    mask: Tensor  # bool [B, action] what was allowed then
    weight: Tensor  # [B] against the bias of priorities, at most 1
    items: NDArray[np.int64]  # [B]


class Replay:
    """The last transitions, in a ring, with priorities in a sum tree."""

    def __init__(self, config: Drawing, features: int, actions: int) -> None:
        size = config.capacity
        self.seen = np.zeros((size, features), np.float32)
        self.after = np.zeros((size, features), np.float32)
        self.mask = np.zeros((size, actions), np.bool_)
        self.action = np.zeros(size, np.int64)
        self.reward, self.discount = np.zeros(size), np.zeros(size)
        self.tree = np.zeros(2 * size)
        self.count, self.largest = 0, 1.0  # transitions ever noted; the largest priority

    def __len__(self) -> int:
        return min(self.count, len(self.action))

    def add(self, **rows: NDArray[Any]) -> None:
        """Notes transitions, each array [transition, ...], as likely as the least expected."""
        number = len(rows["action"])
        items = (self.count + np.arange(number)) % len(self.action)
        for name, values in rows.items():
            getattr(self, name)[items] = values
        set_priorities(self.tree, items, np.full(number, self.largest))
        self.count += number

    def draw(self, config: Drawing, beta: float, rng: np.random.Generator) -> Batch:
        """Draws transitions by priority, or all alike."""
        size = config.batch_size
        if config.prioritized:
            items = draw_items(self.tree, rng.random(size))
            chance = self.tree[len(self.action) + items] / self.tree[1]
            weight = (len(self) * chance) ** -beta
            weight = weight / weight.max()
        else:
            items, weight = rng.integers(len(self), size=size), np.ones(size)
        rows = (self.reward, self.discount)
        reward, discount = (torch.from_numpy(each[items].astype(np.float32)) for each in rows)
        seen, after, mask = (
            torch.from_numpy(each[items]) for each in (self.seen, self.after, self.mask)
        )
        scale = torch.from_numpy(weight.astype(np.float32))
        action = torch.from_numpy(self.action[items])
        return Batch(seen, action, reward, discount, after, mask, scale, items)

    def expect(
        self, config: Drawing, items: NDArray[np.int64], errors: NDArray[np.float64]
    ) -> None:
        """Sets priorities by how far the network was off, [item]."""
        priorities = (np.abs(errors) + _LEAST_PRIORITY) ** config.alpha
        self.largest = max(self.largest, float(priorities.max()))
        set_priorities(self.tree, items, priorities)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: what is filled only."""
        used = len(self)
        names = ("seen", "after", "mask", "action", "reward", "discount")
        kept: dict[str, Any] = {n: torch.from_numpy(getattr(self, n)[:used].copy()) for n in names}
        size = len(self.action)
        kept["priority"] = torch.from_numpy(self.tree[size : size + used].copy())
        return kept | {"count": self.count, "largest": self.largest}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes up what a checkpoint kept."""
        self.count, self.largest = state["count"], state["largest"]
        for name in ("seen", "after", "mask", "action", "reward", "discount"):
            getattr(self, name)[: len(self)] = state[name].numpy()
        set_priorities(self.tree, np.arange(len(self)), state["priority"].numpy())
