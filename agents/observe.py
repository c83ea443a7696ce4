"""A placement task -> the numbers a policy sees: of ops, tensors, groups, devices and links.

Nothing depends on the ids of ops or on the number of devices, and all is relative to the task, so
that a policy can go from one graph and cluster to another: seconds to the step on one device, bytes
to the largest, memory to what devices have. Ops and devices are told apart by codes of their rank,
sines and cosines of several wavelengths: equal devices have equal features otherwise, and a policy
that cannot tell them apart could not spread a model over them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.planners.grouping import Grouping
from agents.planners.space import PlacementSpace
from simcore.graph import OpClass, OpGraph, Phase

FEATURES = ("work", "memory", "received", "sent", "units", "rank")


def group_features(grouping: Grouping) -> NDArray[np.float32]:
    """Returns features of every group, [group, feature], each 0 to 1; the names are `FEATURES`.

    Work (s on the best device), memory kept (bytes), bytes received from and sent to other groups
    and the number of units are told as square roots of their part of the greatest group's: small
    groups are then still told apart. The rank is the place in program order.
    """
    graph, space = grouping.space.problem.graph, grouping.space
    size = grouping.num_groups
    producer, consumer, tensor = graph.edges()
    source = grouping.group[graph.unit[producer]].astype(np.int64)
    target = grouping.group[graph.unit[consumer]].astype(np.int64)
    apart = np.flatnonzero(source != target)
    _, once = np.unique(tensor[apart].astype(np.int64) * size + target[apart], return_index=True)
    edge = apart[once]  # a tensor counts once for each group that reads it
    num_bytes = space.tensor_bytes[tensor[edge]].astype(np.float64)
    columns = (
        _total(grouping.group, space.work.min(axis=1), size),
        _total(grouping.group, space.memory, size),
        _total(target[edge], num_bytes, size),
        _total(source[edge], num_bytes, size),
        _total(grouping.group, np.ones(len(grouping.group)), size),
    )
    features = [np.sqrt(column / max(column.max(initial=0.0), 1e-300)) for column in columns]
    features.append(np.arange(size) / max(1, size - 1))
    return np.stack(features, axis=1).astype(np.float32)


def group_classes(grouping: Grouping) -> NDArray[np.float32]:
    """Returns how many ops of each class every group has, [group, class]."""
    graph = grouping.space.problem.graph
    counts = np.zeros((grouping.num_groups, len(OpClass)), np.float32)
    np.add.at(counts, (grouping.group[graph.unit], graph.op_class), 1.0)
    return counts


def _total(
    label: NDArray[np.integer], values: NDArray[np.float64], size: int
) -> NDArray[np.float64]:
    """Sums values by label, [label]."""
    return np.bincount(label, values, size).astype(np.float64)


_WAVES = 6  # of a rank code, each half as long as the one before
OP_FEATURES = len(OpClass) + len(Phase) + 8 + 2 * _WAVES
EDGE_FEATURES = 2
DEVICE_WAVES = 4
DEVICE_FEATURES = 5 + 2 * DEVICE_WAVES
PAIR_FEATURES = 4
CHOICE_FEATURES = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphObservation:
    """A graph as a policy sees it. Axes: op, edge (between ops, once for each pair)."""

    ops: NDArray[np.float32]  # [op, feature]
    source: NDArray[np.int64]  # [edge] op that makes a tensor
    target: NDArray[np.int64]  # [edge] op that reads it
    edges: NDArray[np.float32]  # [edge, feature] of the tensors between the two


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterObservation:
    """A cluster as a policy sees it. Axes: dev."""

    devices: NDArray[np.float32]  # [dev, feature]
    pairs: NDArray[np.float32]  # [dev, dev, feature] from the first to the second


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """A task as a policy sees it. Axes: op, group, dev."""

    graph: GraphObservation
    cluster: ClusterObservation
    group: NDArray[np.int64]  # [op] the group that decides it
    groups: NDArray[np.float32]  # [group, feature] of `group_features`, and the rank's code
    choices: NDArray[np.float32]  # [group, dev, feature] a group on a device
    allowed: NDArray[np.bool_]  # [group, dev]


GROUP_FEATURES = len(FEATURES) + 2 * _WAVES


def observe(grouping: Grouping) -> Observation:
    """Returns what a policy sees of groups that have to be placed."""
    space = grouping.space
    features = group_features(grouping)
    return Observation(
        graph=observe_graph(space),
        cluster=observe_cluster(space),
        group=grouping.group[space.problem.graph.unit].astype(np.int64),
        groups=np.concatenate([features, _code(features[:, -1], _WAVES)], axis=1),
        choices=_choices(grouping),
        allowed=grouping.allowed,
    )


def observe_graph(space: PlacementSpace) -> GraphObservation:
    """Returns what a policy sees of a graph on the cluster that it has to be placed on.

    Of each op: its class and phase, seconds on the fastest device (as a part of the step on one
    device and against the longest op), bytes read and written, memory that its unit keeps, degrees,
    top level (seconds on the longest way to it) and the code of its rank in program order. Of each
    edge: bytes, and the readers of the tensor.
    """
    graph = space.problem.graph
    seconds = np.where(np.isfinite(space.seconds), space.seconds, np.inf).min(axis=1)
    seconds = np.where(np.isfinite(seconds), seconds, 0.0)
    producer, consumer, tensor = graph.edges()
    num_bytes = space.tensor_bytes[tensor].astype(np.float64)
    size = graph.num_ops
    capacity = max(1.0, float(space.room[list(space.devices)].mean()))
    columns = [
        _share(seconds),
        np.log1p(1e3 * seconds / max(seconds.sum(), 1e-300)),
        _share(np.bincount(producer, num_bytes, size)),
        _share(np.bincount(consumer, num_bytes, size)),
        np.sqrt(np.minimum(1.0, space.memory[graph.unit] / capacity)),
        np.log1p(np.bincount(producer, minlength=size)) / 4.0,
        np.log1p(np.bincount(consumer, minlength=size)) / 4.0,
        _top_level(graph, seconds),
    ]
    rank = np.arange(size) / max(1, size - 1)
    parts = (
        np.eye(len(OpClass))[graph.op_class],
        np.eye(len(Phase))[graph.phase],
        np.stack(columns, axis=1),
        _code(rank, _WAVES),
    )
    pair, first = np.unique(producer.astype(np.int64) * size + consumer, return_index=True)
    readers = np.diff(graph.first_consumer)[tensor[first]]
    edges = np.stack([_share(num_bytes[first]), 1.0 / np.maximum(readers, 1)], axis=1)
    return GraphObservation(
        ops=np.concatenate(parts, axis=1).astype(np.float32),
        source=pair // max(1, size),
        target=pair % max(1, size),
        edges=edges.astype(np.float32),
    )


def observe_cluster(space: PlacementSpace) -> ClusterObservation:
    """Returns what a policy sees of a cluster on which it has to place a graph.

    Of each device: speed on the ops of the graph against the fastest, memory against the largest
    and against what the graph keeps, bandwidth to the others, whether strategies spread over it,
    and the code of its rank among these. Of each pair: bandwidth, latency against the mean op,
    whether there is a route, and whether it is the same device.
    """
    cluster, size = space.problem.cluster, space.num_devices
    finite = np.isfinite(space.seconds).all(axis=1)
    whole = np.maximum(space.seconds[finite].sum(axis=0), 1e-300)
    room = np.maximum(space.room, 1.0)
    off = ~np.eye(size, dtype=np.bool_)
    width = np.where(off & cluster.reachable, cluster.route_bandwidth, 0.0)
    width = np.where(np.isfinite(width), width, 0.0)
    usable = np.isin(np.arange(size), space.devices)
    rank = np.where(usable, np.cumsum(usable) - 1, -1) / max(1, len(space.devices))
    columns = (
        whole.min() / whole,
        room / room.max(),
        np.minimum(1.0, room / max(space.memory.sum(), 1.0)),
        _share(width.sum(axis=1)),
        usable,
    )
    mean = max(float(space.work.min(axis=1).mean()), 1e-9)
    latency = np.where(off & cluster.reachable, cluster.route_latency, 0.0)
    pairs = (
        np.sqrt(width / max(float(width.max()), 1e-300)),
        np.minimum(1.0, np.where(np.isfinite(latency), latency, 0.0) / mean),
        cluster.reachable,
        ~off,
    )
    code = _code(rank, DEVICE_WAVES)
    return ClusterObservation(
        devices=np.concatenate([np.stack(columns, axis=1), code], axis=1).astype(np.float32),
        pairs=np.stack(pairs, axis=2).astype(np.float32),
    )


def _choices(grouping: Grouping) -> NDArray[np.float32]:
    """Returns of each group on each device: slow-down, share of the memory, and the default."""
    space, size = grouping.space, grouping.num_groups
    work = np.zeros((size, space.num_devices))
    finite = np.where(np.isfinite(space.work), space.work, space.work.min(axis=1)[:, None])
    np.add.at(work, grouping.group, finite)
    slow = np.log(np.maximum(work, 1e-12) / np.maximum(work.min(axis=1, keepdims=True), 1e-12))
    memory = _total(grouping.group, space.memory, size)[:, None] / np.maximum(space.room, 1.0)
    usual = np.zeros((size, space.num_devices))
    usual[np.arange(size), grouping.summarise(space.default)] = 1.0
    columns = (np.minimum(slow, 5.0), np.sqrt(np.minimum(1.0, memory)), usual)
    return np.stack(columns, axis=2).astype(np.float32)


def _share(values: NDArray[Any]) -> NDArray[np.float64]:
    """Returns the square roots of parts of the greatest, so that small ones are told apart."""
    share: NDArray[np.float64] = np.sqrt(values / max(float(values.max(initial=0.0)), 1e-300))
    return share


def _code(rank: NDArray[np.floating], waves: int) -> NDArray[np.float32]:
    """Returns sines and cosines of ranks 0 to 1, [..., 2 waves] (Vaswani et al., 2017)."""
    angle = np.pi * rank[:, None] * 2.0 ** np.arange(waves)
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)


def _top_level(graph: OpGraph, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the seconds on the longest way to each op, as a part of the longest of all."""
    level = [0.0] * graph.num_ops
    own = seconds.tolist()
    producers, consumers, _ = graph.edges()
    order = np.argsort(consumers, kind="stable")  # program order is topological
    for source, target in zip(producers[order].tolist(), consumers[order].tolist(), strict=True):
        level[target] = max(level[target], level[source] + own[source])
    levels = np.array(level)
    part: NDArray[np.float64] = levels / max(float(levels.max(initial=0.0)), 1e-300)
    return part
