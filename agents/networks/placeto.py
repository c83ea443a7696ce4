"""The network of Placeto: messages along and against the edges, then means around the visited."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from agents.observe import FEATURES

NODE_FEATURES = len(FEATURES) + 3  # done, visited now, distance to the visited group


class Relations(NamedTuple):
    """How groups lie to each other. Rows are weights of means, 0 where there is nothing."""

    parents: Tensor  # [group, group] of those that send to the row's group
    children: Tensor  # [group, group] of those that it sends to
    before: Tensor  # [group, group] of all that lead to it
    after: Tensor  # [group, group] of all that it leads to
    beside: Tensor  # [group, group] of the others

    @classmethod
    def of(cls, sends: Tensor) -> "Relations":
        """Returns the relations of groups.

        Args:
            sends: bool [group, group], whether the first sends to the second; only what goes
                forward in program order counts, since groups also receive gradients.
        """
        forward = sends.triu(1)
        reach = forward.clone()  # from, to
        for group in range(len(reach) - 1, -1, -1):  # those that it sends to are complete
            reach[group] |= reach[forward[group]].any(0)
        beside = ~(reach | reach.T | torch.eye(len(reach), dtype=torch.bool))
        return cls(*(_mean(rows) for rows in (forward.T, forward, reach.T, reach, beside)))


def _mean(rows: Tensor) -> Tensor:
    weight = rows.to(torch.float32)
    return weight / weight.sum(1, keepdim=True).clamp_min(1.0)


class Visitor(nn.Module):
    """Features of all groups -> logits of devices for the one that is visited."""

    def __init__(self, num_devices: int, width: int, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.enter = _bend(NODE_FEATURES + num_devices, width, width)
        self.ahead = _bend(width, width, width)
        self.behind = _bend(width, width, width)
        self.leave = _bend(8 * width, 2 * width, width)
        self.last = nn.Sequential(nn.ReLU(), nn.Linear(width, num_devices))

    def forward(self, features: Tensor, relations: Relations, group: int) -> Tensor:
        """Returns logits, [worker, dev], from features, [worker, group, feature]."""
        own = self.enter(features)
        ahead = behind = own
        for _ in range(self.rounds):
            ahead = own + relations.parents @ self.ahead(ahead)
            behind = own + relations.children @ self.behind(behind)
        both = torch.cat([ahead, behind], 2)  # [worker, group, 2 width]
        around = (relations.before, relations.after, relations.beside)
        parts = [both[:, group], *(rows[group] @ both for rows in around)]
        logits: Tensor = self.last(self.leave(torch.cat(parts, 1)))
        return logits


def _bend(entering: int, hidden: int, leaving: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(entering, hidden), nn.ReLU(), nn.Linear(hidden, leaving))
