"""Orders in which stages are cut out: lines of nodes, and rows of devices, which a plan decides."""

from collections.abc import Iterator, Sequence
from itertools import islice, permutations
from math import factorial

import numpy as np
from numpy.typing import NDArray

from agents.pipelines.nodes import NodeGraph

MOST_ROWS = 24  # orders of devices that are tried
_MOST_TRIED = 720  # orders that are looked at to find those


def node_orders(nodes: NodeGraph) -> list[tuple[int, ...]]:
    """Returns lines of all nodes in which edges go forward.

    In the order of the program, branch after branch from either side, level by level, and as late
    as possible.
    """
    size = nodes.num_nodes
    weight = nodes.costs(nodes.space.problem.job.batch or 1).seconds.min(axis=1)
    early, late = np.zeros(size), np.zeros(size)
    for source, target in sorted(nodes.edges):
        early[target] = max(early[target], early[source] + weight[source])
    for source, target in sorted(nodes.edges, reverse=True):
        late[source] = max(late[source], late[target] + weight[target])
    orders = [tuple(range(size))]
    orders += [_depth_first(nodes, late, sign) for sign in (1.0, -1.0)]
    orders += [tuple(np.argsort(key, kind="stable").tolist()) for key in (early, -late - weight)]
    return [order for order in dict.fromkeys(orders) if _goes_forward(nodes, order)]


def _depth_first(nodes: NodeGraph, late: NDArray[np.float64], sign: float) -> tuple[int, ...]:
    """Returns a line that finishes a branch before it begins the next."""
    waiting = np.zeros(nodes.num_nodes, np.int64)
    after: list[list[int]] = [[] for _ in waiting]
    for source, target in nodes.edges:
        waiting[target] += 1
        after[source].append(target)
    stack = sorted(np.flatnonzero(waiting == 0).tolist(), key=lambda node: sign * late[node])
    line = []
    while stack:
        node = stack.pop()
        line.append(node)
        for target in sorted(after[node], key=lambda node: sign * late[node]):
            waiting[target] -= 1
            if not waiting[target]:
                stack.append(target)
    return tuple(line)


def _goes_forward(nodes: NodeGraph, order: Sequence[int]) -> bool:
    place = {node: k for k, node in enumerate(order)}
    return all(place[source] < place[target] for source, target in nodes.edges)


def device_orders(nodes: NodeGraph) -> list[tuple[int, ...]]:
    """Returns rows of the usable devices, `MOST_ROWS` at most.

    By index, fastest first and last, each next to its nearest. Then all others that can be told
    apart by kinds, memory, routes and what may run where, if there are few devices; else kinds of
    each server in all orders, and devices with work of their own (pins) at other seats.
    """
    space = nodes.space
    work = np.where(np.isfinite(space.work), space.work, 0.0).sum(axis=0)
    devices = sorted(space.devices)
    fast = sorted(devices, key=lambda device: (work[device], device))
    slow = sorted(devices, key=lambda device: (-work[device], device))
    usual = [tuple(devices), tuple(fast), tuple(slow), _nearest(nodes, devices)]
    if factorial(min(len(devices), 12)) <= _MOST_TRIED:
        others: Iterator[tuple[int, ...]] = permutations(devices)
    else:
        others = _blockwise(nodes, devices)
    told = _Told(nodes, devices)
    found: dict[bytes, tuple[int, ...]] = {}
    for order in (*usual, *islice(others, _MOST_TRIED)):
        found.setdefault(told.mark(order), order)
    return list(found.values())[:MOST_ROWS]


def _nearest(nodes: NodeGraph, devices: Sequence[int]) -> tuple[int, ...]:
    bandwidth = nodes.space.problem.cluster.route_bandwidth
    left = list(devices)
    near = [left.pop(0)]
    while left:
        near.append(min(left, key=lambda device: (-bandwidth[near[-1], device], device)))
        left.remove(near[-1])
    return tuple(near)


def _blockwise(nodes: NodeGraph, devices: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields orders of the kinds of each server, then devices that are special at each seat."""
    blocks: dict[tuple[str, str], list[int]] = {}
    for device in devices:
        spec = nodes.space.problem.cluster.devices[device]
        blocks.setdefault((spec.node, spec.kind), []).append(device)
    for order in islice(permutations(blocks.values()), MOST_ROWS):
        yield tuple(device for block in order for device in block)
    usual = nodes.allowed[:, list(devices)].sum(axis=0).max()
    for device in devices:
        if nodes.allowed[:, device].sum() < usual or not _all_may(nodes, device):
            rest = [other for other in devices if other != device]
            for seat in range(len(devices)):
                yield (*rest[:seat], device, *rest[seat:])


def _all_may(nodes: NodeGraph, device: int) -> bool:
    """Whether no node has to be on this device."""
    return not (nodes.allowed[:, device] & (nodes.allowed.sum(axis=1) == 1)).any()


class _Told:
    """What tells orders of devices apart."""

    def __init__(self, nodes: NodeGraph, devices: Sequence[int]) -> None:
        cluster, size = nodes.space.problem.cluster, nodes.space.num_devices
        numbers: dict[object, int] = {}
        self.kind = np.zeros(size, np.int64)
        self.pair = np.zeros((size, size), np.int64)
        for a in devices:
            spec, allowed = cluster.devices[a], nodes.allowed[:, a].tobytes()
            self.kind[a] = numbers.setdefault((spec.kind, spec.memory, allowed), len(numbers))
            for b in devices:
                if a != b:
                    speed = cluster.route_latency[a, b], cluster.route_bandwidth[a, b]
                    hops = len(cluster.route(a, b))
                    self.pair[a, b] = numbers.setdefault((*speed, hops), len(numbers))

    def mark(self, order: Sequence[int]) -> bytes:
        """Returns the same bytes for orders that are alike."""
        row = list(order)
        return self.kind[row].tobytes() + self.pair[np.ix_(row, row)].tobytes()
