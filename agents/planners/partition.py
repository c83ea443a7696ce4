"""Partitions of a task's groups into fewer, larger ones: coarse, METIS, fluid communities.

METIS (Karypis and Kumar, 1998) runs where the extra ``metis`` is installed. Its stand-in is the
refinement of its k-way scheme without the levels: cuts of equal work along the program order, then
units move to the part they are tied to most, as long as the parts stay balanced. Fluid communities
(Parés et al., 2017) are networkx's.
"""

import importlib
import importlib.util
from typing import Literal, NamedTuple, TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from agents.planners.grouping import Grouping

Method: TypeAlias = Literal["coarse", "metis", "fluid"]

_PASSES = 8  # of refinement, at most
_IMBALANCE = 1.1  # of a part's weight over the mean, at most
_SCALE = 1000  # METIS counts in whole numbers


class Ties(NamedTuple):
    """An undirected graph of weighted nodes and ties, each tie once in either direction."""

    first: NDArray[np.int64]  # [node + 1] offsets into others
    others: NDArray[np.int64]  # [tie]
    strength: NDArray[np.float64]  # [tie] bytes, 0 to 1
    weight: NDArray[np.float64]  # [node] s


def partition(grouping: Grouping, parts: int, method: Method) -> NDArray[np.int64]:
    """Returns the part of each group of a task, [group], 0 to parts - 1; some may be empty."""
    if grouping.num_groups <= parts:
        return np.arange(grouping.num_groups)
    if method == "coarse":
        return _coarse(grouping, parts)
    ties = ties_of(grouping)
    return metis(ties, parts) if method == "metis" else fluid(ties, parts)


def ties_of(grouping: Grouping) -> Ties:
    """Returns what groups exchange, as an undirected graph."""
    space, size = grouping.space, grouping.num_groups
    graph = space.problem.graph
    producer, consumer, tensor = graph.edges()
    a = grouping.group[graph.unit[producer]].astype(np.int64)
    b = grouping.group[graph.unit[consumer]].astype(np.int64)
    apart = a != b
    pair = np.concatenate([a * size + b, b * size + a])[np.concatenate([apart, apart])]
    num_bytes = np.tile(space.tensor_bytes[tensor[apart]].astype(np.float64), 2)
    distinct, inverse = np.unique(pair, return_inverse=True)
    strength = np.bincount(inverse, num_bytes + 1.0, len(distinct))
    first = np.searchsorted(distinct, np.arange(size + 1) * size)
    weight = np.bincount(grouping.group, grouping.weight, size).astype(np.float64)
    return Ties(first, distinct % size, strength / max(strength.max(initial=0.0), 1e-300), weight)


def flow_between(grouping: Grouping) -> NDArray[np.float64]:
    """Returns bytes that groups send to each other, [group, group] from, to."""
    graph, size = grouping.space.problem.graph, grouping.num_groups
    producer, consumer, tensor = graph.edges()
    flow = np.zeros((size, size))
    ends = (grouping.group[graph.unit[producer]], grouping.group[graph.unit[consumer]])
    np.add.at(flow, ends, grouping.space.tensor_bytes[tensor] + 1.0)
    np.fill_diagonal(flow, 0.0)
    return flow


def _coarse(grouping: Grouping, parts: int) -> NDArray[np.int64]:
    """Returns the groups that coarsening makes of the units; each group goes with most of its."""
    coarse = Grouping.of(grouping.space, parts)
    share = np.zeros((grouping.num_groups, parts))
    np.add.at(share, (grouping.group, coarse.group), grouping.weight)
    most: NDArray[np.intp] = share.argmax(axis=1)
    return most.astype(np.int64)


def metis(ties: Ties, parts: int) -> NDArray[np.int64]:
    """Returns parts of about equal weight with few bytes between them, [node]."""
    if importlib.util.find_spec("pymetis") is None:
        return refined(ties, _cuts(ties.weight, parts), parts)
    whole = np.maximum(1, _SCALE * ties.weight / ties.weight.max()).astype(int)
    _, member = importlib.import_module("pymetis").part_graph(
        parts,
        xadj=ties.first.tolist(),
        adjncy=ties.others.tolist(),
        vweights=whole.tolist(),
        eweights=np.maximum(1, _SCALE * ties.strength).astype(int).tolist(),
    )
    return np.asarray(member, np.int64)


def _cuts(weight: NDArray[np.float64], parts: int) -> NDArray[np.int64]:
    """Returns runs of about equal weight, [node]."""
    middle = np.cumsum(weight) - 0.5 * weight
    runs: NDArray[np.int64] = (middle / weight.sum() * parts).astype(np.int64)
    return np.minimum(runs, parts - 1)


def refined(ties: Ties, member: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Returns a partition whose nodes have moved to where they are tied to most."""
    member, load = member.copy(), np.bincount(member, ties.weight, parts)
    limit = _IMBALANCE * ties.weight.sum() / parts
    for _ in range(_PASSES):
        moved = 0
        for node in range(len(member)):
            at = slice(ties.first[node], ties.first[node + 1])
            pull = np.bincount(member[ties.others[at]], ties.strength[at], parts)
            pull[load + ties.weight[node] > limit] = -1.0
            own, best = int(member[node]), int(pull.argmax())
            stays = float(ties.strength[at][member[ties.others[at]] == own].sum())
            if best != own and pull[best] > stays:
                load[own] -= ties.weight[node]
                load[best] += ties.weight[node]
                member[node] = best
                moved += 1
        if not moved:
            break
    return member


def fluid(ties: Ties, parts: int, seed: int = 0) -> NDArray[np.int64]:
    """Returns communities, [node], numbered by their first node.

    Components are shared out first, since the method needs a connected graph: each gets parts by
    its number of nodes, at least one; where there are more components than parts, they share.
    """
    graph = nx.Graph()
    graph.add_nodes_from(range(len(ties.weight)))
    source = np.repeat(np.arange(len(ties.weight)), np.diff(ties.first))
    graph.add_edges_from(zip(source.tolist(), ties.others.tolist(), strict=True))
    components = sorted((sorted(nodes) for nodes in nx.connected_components(graph)), key=len)
    member, number, left = np.zeros(len(ties.weight), np.int64), 0, len(ties.weight)
    for nodes in components:
        share = min(len(nodes), max(1, (parts - number) * len(nodes) // left))
        left -= len(nodes)
        for community in nx.community.asyn_fluidc(graph.subgraph(nodes), share, seed=seed):
            member[sorted(community)] = min(number, parts - 1)
            number += 1
    _, first, inverse = np.unique(member, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))
    return rank[inverse].astype(np.int64)
