"""Rings: a group of devices -> the orders in which they pass data around, and each one's share.

As NCCL does, a group passes its data around several rings at once where one ring leaves links idle.
They are found in three steps, each of which depends on the topology only:

1. *Candidates.* Up to `SEARCHED` members in one node (or one member per node): all orders. More:
   the ring that always goes on to the nearest member, and its strides. Several nodes: each node is
   crossed along its own rings, entered at every place and in both directions, nodes in nearest
   order, with the next node entered on the rail that the last one was left on or the one after.
2. *Kind of path.* The widest ring (by its narrowest hop) says how many channels a hop may have;
   candidates with longer hops are dropped. So NVLink is not mixed with PCIe, which NCCL does not
   do either, but single and double NVLinks are mixed.
3. *Shares.* A packing linear program gives each candidate, in both directions at once, as much of
   the data as makes the whole fastest while no channel is above its bandwidth; among the fastest
   answers, the one with the least latency of a hop.

A hop is a route of the cluster, so it passes through a device only where the cluster file says that
the device forwards.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster

SEARCHED = 8  # members; all (n - 1)! / 2 rings are tried up to here
_STRIDES = 8  # rings made of one order, at most
_CHOICES = 4  # rings of a node that rings of several nodes follow, at most
_TINY = 1e-9  # relative; below it, times and rates are equal
_GREEDY_PIVOTS = 300  # it takes tens; then Bland's rule
_MAX_PIVOTS = 10_000  # every answer on the way is feasible
CACHED_GROUPS = 1024  # results kept, least recently used go first


class Ring(NamedTuple):
    """One way around.

    Attributes:
        order: device indices; each sends to the next, the last to the first.
        share: of the data; the shares of a group's rings sum to 1.
    """

    order: tuple[int, ...]
    share: float


class Routes(NamedTuple):
    """Routes between numbered places. Axes: pair (source * size + target), hop, channel."""

    size: int
    first_hop: NDArray[np.int64]  # [pair + 1] offsets into hops
    hops: NDArray[np.int64]  # [hop] positions on the axis channel
    bandwidth: NDArray[np.float64]  # [channel] bytes/s
    width: NDArray[np.float64]  # [pair] bytes/s of the narrowest channel
    latency: NDArray[np.float64]  # [pair] s

    def crossed(self, pairs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the positions in `pairs` and the channels of every channel crossed."""
        count = self.first_hop[pairs + 1] - self.first_hop[pairs]
        owner = np.repeat(np.arange(len(pairs)), count)
        offset = np.arange(len(owner)) - np.repeat(np.cumsum(count) - count, count)
        return owner, self.hops[self.first_hop[pairs][owner] + offset]

    def among(self, places: Sequence[int]) -> "Routes":
        """Returns the routes between some places, places and channels numbered from 0."""
        chosen = np.array(places, np.int64)
        pairs = (chosen[:, None] * self.size + chosen).ravel()
        owner, crossed = self.crossed(pairs)
        channels, hops = np.unique(crossed, return_inverse=True)
        first_hop = np.searchsorted(owner, np.arange(len(pairs) + 1))
        return Routes(
            len(chosen),
            first_hop,
            hops.astype(np.int64),
            self.bandwidth[channels],
            self.width[pairs],
            self.latency[pairs],
        )

    def key(self) -> "RoutesKey":
        """Returns the routes by value: what is alike has equal keys."""
        first_hop, hops, bandwidth, width, latency = (array.tobytes() for array in self[1:])
        return self.size, first_hop, hops, bandwidth, width, latency

    @classmethod
    def from_key(cls, key: "RoutesKey") -> "Routes":
        """Returns the routes that have a key."""
        first_hop, hops = (np.frombuffer(text, np.int64) for text in key[1:3])
        bandwidth, width, latency = (np.frombuffer(text, np.float64) for text in key[3:])
        return cls(key[0], first_hop, hops, bandwidth, width, latency)

    def loads(self, pairs: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns how often choices of hops cross channels, and the bandwidths of these.

        Args:
            pairs: [choice, hop] the pairs that each choice uses.

        Returns:
            [channel, choice] crossings; [channel] bytes/s; of the channels that are used at all.
        """
        owner, crossed = self.crossed(pairs.ravel())
        channels, position = np.unique(crossed, return_inverse=True)
        shape = (len(channels), len(pairs))
        cells = position * len(pairs) + owner // pairs.shape[1]
        load = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
        return load.astype(np.float64), self.bandwidth[channels]


RoutesKey = tuple[int, bytes, bytes, bytes, bytes, bytes]


@functools.lru_cache(maxsize=16)
def routes_of(cluster: Cluster) -> Routes:
    """Returns the routes of a cluster; places are devices, channels have the cluster's ids."""
    return Routes(
        cluster.num_devices,
        cluster.first_hop,
        cluster.hops.astype(np.int64),
        np.array([channel.bandwidth for channel in cluster.channels], np.float64),
        cluster.route_bandwidth.ravel(),
        cluster.route_latency.ravel(),
    )


def by_node(cluster: Cluster, members: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the members of each node, nodes in the order of their first member."""
    nodes: dict[str, list[int]] = {}
    for member in members:
        nodes.setdefault(cluster.devices[member].node, []).append(member)
    return [tuple(node) for node in nodes.values()]


@functools.lru_cache(maxsize=CACHED_GROUPS)
def find_rings(cluster: Cluster, members: tuple[int, ...]) -> tuple[Ring, ...]:
    """Returns the rings of a group.

    Args:
        cluster: the cluster.
        members: two or more device indices, all joined by routes; their order does not matter.
    """
    members = tuple(sorted(members))
    nodes = by_node(cluster, members)
    if len(nodes) == 1 or len(nodes) == len(members):
        chosen = _rings_within(cluster, members)
    else:
        routes = routes_of(cluster)
        orders = np.array(_crossings(cluster, nodes), np.int64)
        chosen = [(tuple(orders[ring].tolist()), share) for ring, share in _share(routes, orders)]
    if len(members) == 2:
        return (Ring(members, 1.0),)
    return tuple(
        Ring(way, share / 2)
        for order, share in chosen
        for way in (order, (order[0], *order[:0:-1]))
    )


def nearest_order(routes: Routes, places: Sequence[int]) -> list[int]:
    """Returns the places so that each is followed by the nearest of those that are left.

    Nearest: over the widest route, then the fewest channels, the least latency, the first given.
    """
    left = np.array(places, np.int64)
    order = [int(left[0])]
    for _ in range(len(places) - 1):
        left = left[left != order[-1]]
        pairs = order[-1] * routes.size + left
        near = pairs[routes.width[pairs] == routes.width[pairs].max()]
        length = routes.first_hop[near + 1] - routes.first_hop[near]
        near = near[length == length.min()]
        order.append(int(near[routes.latency[near].argmin()]) % routes.size)
    return order


def _rings_within(
    cluster: Cluster, members: tuple[int, ...]
) -> list[tuple[tuple[int, ...], float]]:
    """Returns orders and shares of a group without a second level."""
    routes = routes_of(cluster)
    if len(members) <= SEARCHED:
        found = _search(routes.among(members).key())
        return [(tuple(members[place] for place in order), share) for order, share in found]
    orders = _strides(nearest_order(routes, members))
    return [(tuple(orders[ring].tolist()), share) for ring, share in _share(routes, orders)]


@functools.lru_cache(maxsize=CACHED_GROUPS)
def _search(key: RoutesKey) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Tries all rings; by value, so that nodes which are alike are searched once."""
    orders = _all_rings(key[0])
    return tuple(
        (tuple(orders[ring].tolist()), share)
        for ring, share in _share(Routes.from_key(key), orders)
    )


@functools.cache
def _all_rings(size: int) -> NDArray[np.int64]:
    """Returns [ring, place]: every ring once, either way around being the same ring."""
    rest = itertools.permutations(range(1, size))
    orders = np.array([(0, *order) for order in rest], np.int64)
    return orders[orders[:, 1] <= orders[:, -1]]


def _strides(order: Sequence[int]) -> NDArray[np.int64]:
    """Returns [ring, place]: rings that go on by 1, or by another stride that meets every place."""
    size = len(order)
    strides = [stride for stride in range(1, size // 2 + 1) if math.gcd(stride, size) == 1]
    steps: NDArray[np.int64] = np.outer(strides[:_STRIDES], np.arange(size)) % size
    return np.take(np.array(order, np.int64), steps)


def _main_rings(cluster: Cluster, node: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the rings of one node that get most of the data, as orders."""
    if len(node) == 1:
        return [node]
    rings = sorted(_rings_within(cluster, node), key=lambda ring: -ring[1])
    return [order for order, _ in rings[:_CHOICES]]


def _crossings(cluster: Cluster, nodes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Returns candidates for a group of several nodes."""
    inside = {node[0]: _main_rings(cluster, node) for node in nodes}
    heads = nearest_order(routes_of(cluster), [node[0] for node in nodes])
    choices = range(max(len(rings) for rings in inside.values()))
    entries = range(max(map(len, nodes)))
    candidates = []
    for choice, entry, back, turns in itertools.product(choices, entries, (False, True), (0, 1)):
        order: list[int] = []
        for number, head in enumerate(heads):
            ring = inside[head][choice % len(inside[head])]
            place = entry % len(ring)
            path = ring[place:] + ring[:place]
            order += path[::-1] if back != bool(turns * number % 2) else path
        candidates.append(order)
    return candidates


def _share(routes: Routes, orders: NDArray[np.int64]) -> list[tuple[int, float]]:
    """Returns the rings to use and their shares, which sum to 1.

    Args:
        routes: between the places.
        orders: [ring, place] candidates; each is used in both directions.
    """
    after = np.roll(orders, -1, axis=1)
    pairs = np.hstack([orders * routes.size + after, after * routes.size + orders])
    width, latency = routes.width[pairs].min(axis=1), routes.latency[pairs].max(axis=1)
    length = (routes.first_hop[pairs + 1] - routes.first_hop[pairs]).max(axis=1)
    widest = width >= width.max() * (1 - _TINY)
    kept = np.flatnonzero(length <= length[widest].min())
    kept = kept[np.lexsort((kept, -width[kept], latency[kept]))]
    load = routes.loads(pairs[kept])
    best = pack(*load).sum()
    for bound in np.unique(latency[kept]):
        quick = np.flatnonzero(latency[kept] <= bound)
        rate = pack(load[0][:, quick], load[1])
        if rate.sum() >= best * (1 - _TINY):
            break
    used = np.flatnonzero(rate > rate.sum() * _TINY)
    shares = rate[used] / rate[used].sum()
    return list(zip(kept[quick[used]].tolist(), shares.tolist(), strict=True))


def pack(load: NDArray[np.float64], capacity: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the x >= 0 of greatest sum with load @ x <= capacity.

    The simplex method on a dense tableau, by largest gain and then by Bland's rule, which cannot
    cycle; of equal rows or columns only the first takes part.

    Args:
        load: [row, column] not negative, every column has a positive number.
        capacity: [row] positive.
    """
    scale = capacity.max()
    rows = load * (scale / capacity)[:, None]
    rows = rows[_first_of_equal(rows)]
    columns = _first_of_equal(np.ascontiguousarray(rows.T))
    answer = np.zeros(load.shape[1])
    answer[columns] = _simplex(rows[:, columns]) * scale
    return answer


def _first_of_equal(rows: NDArray[np.float64]) -> NDArray[np.int64]:
    whole = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize * rows.shape[1])))
    return np.sort(np.unique(whole.ravel(), return_index=True)[1])


def _simplex(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the x >= 0 of greatest sum with rows @ x <= 1."""
    height, width = rows.shape
    table = np.zeros((height + 1, width + 1))
    table[:-1, :-1], table[:-1, -1], table[-1, :-1] = rows, 1.0, -1.0
    free, basic = np.arange(width), np.arange(width, width + height)
    for turn in range(_MAX_PIVOTS):
        gains = np.flatnonzero(table[-1, :-1] < -_TINY)
        if not gains.size:
            break
        largest = table[-1, :-1].argmin()
        column = largest if turn < _GREEDY_PIVOTS else gains[free[gains].argmin()]
        limits = np.flatnonzero(table[:-1, column] > _TINY)
        steps = table[limits, -1] / table[limits, column]
        ties = limits[steps <= steps.min() + 1e-12]
        row = ties[basic[ties].argmin()]
        _pivot(table, row, column)
        free[column], basic[row] = basic[row], free[column]
    answer = np.zeros(width + height)
    answer[basic] = np.maximum(table[:-1, -1], 0.0)
    return answer[:width]


def _pivot(table: NDArray[np.float64], row: np.int64, column: np.int64) -> None:
    """Exchanges a basic and a free variable."""
    pivot = table[row, column]
    line, factors = table[row] / pivot, table[:, column].copy()
    table -= np.outer(factors, line)
    table[row] = line
    table[:, column] = -factors / pivot
    table[row, column] = 1 / pivot
