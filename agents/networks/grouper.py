"""The grouper: features of units -> probabilities of groups -> a sequence of groups."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Flow(NamedTuple):
    """What units send to each other."""

    source: Tensor  # int64 [edge] unit
    target: Tensor  # int64 [edge] unit
    weight: Tensor  # [edge]


class FeedForwardGrouper(nn.Module):
    """Two layers over the features of a unit, as in the Hierarchical Planner, with a bend between.

    Its last layer begins at 0, so that the first groups are those of the prior.
    """

    def __init__(self, features: int, hidden: int, groups: int) -> None:
        super().__init__()
        self.enter = nn.Linear(features, hidden)
        self.activation = nn.PReLU()
        self.leave = nn.Linear(hidden, groups)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, features: Tensor, prior: Tensor) -> Tensor:
        """Returns log probabilities, [unit, group], from features and the logits of a prior."""
        logits = self.leave(self.activation(self.enter(features)))[:, : prior.shape[1]] + prior
        table: Tensor = logits.log_softmax(1)
        return table


class BridgeRnn(nn.Module):
    """Groups -> a sequence for the placer, through a recurrent network.

    A group is the mean of its units, weighted by how probable it is that they are in it, beside
    what its neighbours are: all smooth in these probabilities, so the gradients of the placer reach
    the grouper.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.GRU(3 * width + 1, width, batch_first=True)

    def forward(self, units: Tensor, member: Tensor, flow: Flow) -> tuple[Tensor, Tensor]:
        """Goes from units to groups.

        Args:
            units: [unit, width].
            member: probabilities, [unit, group].
            flow: between units.

        Returns:
            Vectors of groups, [group, width], and what flows between groups, [group, group].
        """
        size = member.sum(0)[:, None]  # [group, 1]
        own = member.T @ units / size.clamp_min(1e-6)
        sent = torch.zeros_like(member).index_add(
            0, flow.source, member[flow.target] * flow.weight[:, None]
        )  # [unit, group] what a unit sends into each group
        between = member.T @ sent  # [group, group] from, to
        ahead = between / between.sum(1, keepdim=True).clamp_min(1e-6) @ own
        behind = between.T / between.T.sum(1, keepdim=True).clamp_min(1e-6) @ own
        share = size / len(units)
        groups = self.network(torch.cat([own, ahead, behind, share], 1)[None])[0][0]
        return groups, between
