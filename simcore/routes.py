"""Routes: numbered nodes and channels -> the channels from every device to every other.

A route is the widest path, then the one of fewest channels, then the one whose channel ids come
first in lexicographic order. Only nodes that pass traffic on may lie inside it.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Hop(NamedTuple):
    """One channel, whose id is its position."""

    tail: int
    head: int
    bandwidth: float  # bytes/s
    latency: float  # s


class RouteArrays(NamedTuple):
    """The routes of all device pairs. Axes: dev, hop (channels of all routes)."""

    reachable: NDArray[np.bool_]  # [dev, dev] true on the diagonal
    route_latency: NDArray[np.float64]  # [dev, dev] s, sum over the route; inf = unreachable
    route_bandwidth: NDArray[np.float64]  # [dev, dev] bytes/s; 0 = unreachable, inf on i == j
    first_hop: NDArray[np.int64]  # [dev * dev + 1] offsets into hops by i * num_devices + j
    hops: NDArray[np.int32]  # [hop] channel ids


def widest_routes(
    channels: Sequence[Hop], passes: Sequence[bool], num_devices: int
) -> dict[tuple[int, int], list[int]]:
    """Returns channel ids of the route of every pair of distinct devices that has one.

    Widths are tried from the widest down; a pair is settled at the first width that joins it, by a
    search backwards from the target. Each node keeps its least channel towards the target, so
    following them gives the lexicographically first of the shortest paths.

    Args:
        channels: by id.
        passes: [node] whether routes may pass through it; nodes are devices, then switches.
        num_devices: number of devices.
    """
    missing = {target: set(range(num_devices)) - {target} for target in range(num_devices)}
    routes: dict[tuple[int, int], list[int]] = {}
    for width in sorted({channel.bandwidth for channel in channels}, reverse=True):
        incoming: list[list[tuple[int, int]]] = [[] for _ in passes]  # (channel id, its tail)
        for index, channel in enumerate(channels):
            if channel.bandwidth >= width:
                incoming[channel.head].append((index, channel.tail))
        for target, sources in missing.items():
            towards = _search(target, incoming, passes) if sources else {}
            for source in [source for source in sources if source in towards]:
                routes[source, target] = _follow(source, target, towards, channels)
                sources.discard(source)
    return routes


def route_arrays(
    routes: Mapping[tuple[int, int], Sequence[int]], channels: Sequence[Hop], num_devices: int
) -> RouteArrays:
    """Returns the routes as arrays, with the latency and bandwidth of each."""
    shape = (num_devices, num_devices)
    latency, bandwidth = np.full(shape, np.inf), np.zeros(shape)
    np.fill_diagonal(latency, 0.0)
    np.fill_diagonal(bandwidth, np.inf)
    counts = np.zeros(shape, np.int64)
    hops: list[int] = []
    for pair in sorted(routes):
        route = routes[pair]
        latency[pair] = sum(channels[channel].latency for channel in route)
        bandwidth[pair] = min(channels[channel].bandwidth for channel in route)
        counts[pair] = len(route)
        hops.extend(route)
    return RouteArrays(
        reachable=np.isfinite(latency),
        route_latency=latency,
        route_bandwidth=bandwidth,
        first_hop=np.concatenate([np.zeros(1, np.int64), np.cumsum(counts.ravel())]),
        hops=np.array(hops, np.int32),
    )


def _search(
    target: int, incoming: Sequence[Sequence[tuple[int, int]]], passes: Sequence[bool]
) -> dict[int, int]:
    """Returns the least channel on a shortest path to the target, by node that reaches it."""
    towards: dict[int, int] = {}
    depth = {target: 0}
    frontier = [target]
    while frontier:
        found = []
        for head in frontier:
            if head != target and not passes[head]:
                continue
            for channel, tail in incoming[head]:
                if tail not in depth:
                    depth[tail] = depth[head] + 1
                    towards[tail] = channel
                    found.append(tail)
                elif depth[tail] == depth[head] + 1:
                    towards[tail] = min(towards[tail], channel)
        frontier = found
    return towards


def _follow(
    source: int, target: int, towards: Mapping[int, int], channels: Sequence[Hop]
) -> list[int]:
    """Follows the least channels from a source to the target."""
    route: list[int] = []
    node = source
    while node != target:
        route.append(towards[node])
        node = channels[route[-1]].head
    return route
