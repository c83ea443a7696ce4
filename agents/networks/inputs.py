"""Observations as tensors."""

from typing import NamedTuple

import torch
from torch import Tensor

from agents.observe import GraphObservation, Observation


class Edges(NamedTuple):
    """Directed edges and the weights of a graph convolution, 1 / sqrt(out-degree in-degree)."""

    source: Tensor  # int64 [edge]
    target: Tensor  # int64 [edge]
    weight: Tensor  # [edge]
    features: Tensor  # [edge, feature]

    @classmethod
    def of(cls, graph: GraphObservation) -> "Edges":
        """Returns the edges of a graph."""
        source, target = torch.from_numpy(graph.source), torch.from_numpy(graph.target)
        size = len(graph.ops)
        leaving = source.bincount(minlength=size).clamp_min(1)[source]
        arriving = target.bincount(minlength=size).clamp_min(1)[target]
        weight = (leaving * arriving).to(torch.float32).rsqrt()
        return cls(source, target, weight, torch.from_numpy(graph.edges))


class Inputs(NamedTuple):
    """A task as networks read it. Axes: op, edge, group, dev."""

    ops: Tensor  # [op, feature]
    edges: Edges
    devices: Tensor  # [dev, feature]
    pairs: Tensor  # [dev, dev, feature]
    group: Tensor  # int64 [op]
    groups: Tensor  # [group, feature]
    choices: Tensor  # [group, dev, feature]
    allowed: Tensor  # bool [group, dev]

    @classmethod
    def of(cls, seen: Observation) -> "Inputs":
        """Returns an observation as tensors."""
        return cls(
            torch.from_numpy(seen.graph.ops),
            Edges.of(seen.graph),
            torch.from_numpy(seen.cluster.devices),
            torch.from_numpy(seen.cluster.pairs),
            torch.from_numpy(seen.group),
            torch.from_numpy(seen.groups),
            torch.from_numpy(seen.choices),
            torch.from_numpy(seen.allowed.copy()),
        )


def mean_by(label: Tensor, values: Tensor, size: int) -> Tensor:
    """Returns the mean of the rows, [row, width], of each label, [size, width]; 0 where none."""
    total = values.new_zeros(size, values.shape[1]).index_add(0, label, values)
    count = label.bincount(minlength=size).clamp_min(1).to(values.dtype)
    return total / count[:, None]
