"""Encoders: a vector for each op of a graph, and for each device of a cluster.

The graph encoder is a graph convolution (Kipf and Welling, 2017) that keeps the direction of edges:
what comes from producers and what comes from consumers have their own weights, so that a graph and
its reverse are not the same. Each message is scaled by a gate that the tensor's features decide.
Sums over edges are `index_add`, so that memory grows with edges and not with pairs of ops.
"""

import torch
from torch import Tensor, nn

from agents.networks.inputs import Edges


class DirectedConvolution(nn.Module):
    """One round of messages along the edges and against them, added to what was known."""

    def __init__(self, width: int, edge_features: int) -> None:
        super().__init__()
        self.gate = nn.Linear(edge_features, 2)
        self.own = nn.Linear(width, width)
        self.ahead = nn.Linear(width, width, bias=False)
        self.behind = nn.Linear(width, width, bias=False)
        self.activation = nn.PReLU()
        self.norm = nn.LayerNorm(width)

    def forward(self, nodes: Tensor, edges: Edges) -> Tensor:
        """Returns vectors of nodes, [node, width], from the same."""
        scale = edges.weight[:, None] * self.gate(edges.features).sigmoid() * 2.0  # [edge, 2]
        ahead = gather(nodes, edges.source, edges.target, scale[:, :1])
        behind = gather(nodes, edges.target, edges.source, scale[:, 1:])
        new = self.own(nodes) + self.ahead(ahead) + self.behind(behind)
        changed: Tensor = self.norm(self.activation(new))
        return nodes + changed


def gather(nodes: Tensor, source: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """Returns sums at targets of the vectors of sources, [node, width], each scaled, [edge, 1]."""
    return torch.zeros_like(nodes).index_add(0, target, nodes[source] * scale)


class GraphEncoder(nn.Module):
    """Features of ops -> a vector for each, that knows its surroundings."""

    def __init__(self, features: int, edge_features: int, width: int, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(features, width)
        rounds = (DirectedConvolution(width, edge_features) for _ in range(layers))
        self.rounds = nn.ModuleList(rounds)

    def forward(self, features: Tensor, edges: Edges) -> Tensor:
        """Returns vectors, [op, width], from features, [op, feature]."""
        nodes: Tensor = self.enter(features)
        for convolution in self.rounds:
            nodes = convolution(nodes, edges)
        return nodes


class DeviceEncoder(nn.Module):
    """Features of devices and of the routes between them -> a vector for each device.

    Works for any number of devices: a device hears the mean of what the others say over the routes.
    """

    def __init__(self, features: int, pair_features: int, width: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(features, width), nn.PReLU(), nn.Linear(width, width))
        self.message = nn.Sequential(nn.Linear(width + pair_features, width), nn.PReLU())
        self.leave = nn.Linear(2 * width, width)

    def forward(self, features: Tensor, pairs: Tensor) -> Tensor:
        """Returns vectors, [dev, width], from features, [dev, feature] and [dev, dev, feature]."""
        own = self.enter(features)
        others = own[None].expand(len(own), -1, -1)
        heard = self.message(torch.cat([others, pairs], dim=2)).mean(dim=1)
        leave: Tensor = self.leave(torch.cat([own, heard], dim=1))
        return leave
