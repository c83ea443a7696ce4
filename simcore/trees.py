"""Trees: a group of devices -> two trees over which halves of the data go up and down.

The double binary tree (Sanders, Speck and Träff 2009), which NCCL uses since 2.4: a root has one
child, and any other member has children, two at most, in one of the trees only; so no member sends
or receives more than twice the data, and none is more than ceil(log2 n) hops below a root.

A group of several nodes has two trees over one head per node and tree, and two trees inside each
node below its heads. A level of at most `SEARCHED` places compares all pairs of trees: the latency
of the slowest hop comes first, then the channel with most to carry, for one tree and then for both.
A larger level goes by nearest places.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.rings import (
    CACHED_GROUPS,
    SEARCHED,
    Routes,
    RoutesKey,
    by_node,
    nearest_order,
    routes_of,
)

_TINY = 1e-9  # relative; below it, latencies are equal


class DoubleTree(NamedTuple):
    """Two trees over the same members, each of which carries half of the data."""

    parent: NDArray[np.int64]  # [tree, edge] device index
    child: NDArray[np.int64]  # [tree, edge] device index
    latency: float  # s from root to deepest leaf, each hop as slow as the slowest of its level


@functools.lru_cache(maxsize=CACHED_GROUPS)
def find_double_tree(
    cluster: Cluster, members: tuple[int, ...], root: int | None = None
) -> DoubleTree:
    """Returns the trees of a group.

    Args:
        cluster: the cluster.
        members: two or more device indices, ascending, all joined by routes.
        root: the member that the data comes from, the root of both trees; None = any two.
    """
    routes, nodes = routes_of(cluster), by_node(cluster, members)
    if len(nodes) in (1, len(members)):
        edges, latency = _edges(routes, _orders(routes, members, root))
        return DoubleTree(edges[0], edges[1], latency)
    below = [_orders(routes, node, root if root in node else None) for node in nodes]
    heads = np.array([orders[:, 0] for orders in below], np.int64).T
    number = {head: node for node, head in enumerate(heads[0].tolist())}
    first, second = _orders(routes, list(number), root)
    chain = np.array([[number[head] for head in order.tolist()] for order in (first, second)])
    levels = [_edges(routes, np.take_along_axis(heads, chain, axis=1))]
    levels += [_edges(routes, orders) for orders in below]
    edges = np.concatenate([edges for edges, _ in levels], axis=2)
    latency = levels[0][1] + max(latency for _, latency in levels[1:])
    return DoubleTree(edges[0], edges[1], latency)


@functools.cache
def binary_tree(size: int) -> NDArray[np.int64]:
    """Returns [2, edge] parents and children of a tree over places 0 to size - 1.

    It is in order: the children of a place stand half of its lowest bit before and after it, or
    nearer where the places end, so odd places are leaves. The root is 0 and has one child.
    """
    place = np.arange(1, size)
    low = place & -place
    above = (place - low) | (2 * low)
    return np.array([np.where(above < size, above, place - low), place], np.int64)


def _edges(routes: Routes, orders: NDArray[np.int64]) -> tuple[NDArray[np.int64], float]:
    """Returns [2, tree, edge] parents and children, and the latency.

    Args:
        routes: of the cluster.
        orders: [tree, place] device indices.
    """
    edges = np.swapaxes(orders[:, binary_tree(orders.shape[1])], 0, 1)
    hops = np.stack([edges[0] * routes.size + edges[1], edges[1] * routes.size + edges[0]])
    slowest = float(routes.latency[hops].max(initial=0.0))
    return edges, math.ceil(math.log2(orders.shape[1])) * slowest


def _orders(routes: Routes, places: Sequence[int], root: int | None) -> NDArray[np.int64]:
    """Returns [tree, place] the orders in which two trees go over some places, roots first."""
    first = [place for place in places if place == root]
    ordered = first + [place for place in places if place != root]
    if len(ordered) == 1:
        return np.array([ordered, ordered], np.int64)
    if len(ordered) <= SEARCHED:
        found = _search(routes.among(ordered).key(), is_rooted=bool(first))
        return np.take(np.array(ordered, np.int64), np.array(found))
    near = nearest_order(routes, ordered)
    fixed, free = near[: len(first)], near[len(first) :]
    # mirrored, or moved on by one, the places with children become leaves
    moved = free[-1:] + free[:-1] if len(free) % 2 else free[::-1]
    return np.array([near, fixed + moved], np.int64)


@functools.lru_cache(maxsize=CACHED_GROUPS)
def _search(key: RoutesKey, *, is_rooted: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns two orders; by value, so that nodes which are alike are searched once."""
    routes = Routes.from_key(key)
    orders, inner, pairs = _all_orders(routes.size, is_rooted=is_rooted)
    latency = routes.latency[pairs].max(axis=1)
    # two trees go together if no place below the roots has children in both
    kinds, kind = np.unique(inner, return_inverse=True)
    fits = (kinds[:, None] & kinds) == 0
    best = np.full(len(kinds), np.inf)
    np.minimum.at(best, kind, latency)
    bound = np.where(fits, np.maximum(best[:, None], best), np.inf).min() * (1 + _TINY)
    fits &= best <= bound
    load, bandwidth = routes.loads(pairs)
    seconds = load / bandwidth[:, None]
    usable = (latency <= bound) & fits.any(axis=1)[kind]
    one = np.where(usable, seconds.max(axis=0), np.inf).argmin()
    usable = (latency <= bound) & fits[kind[one]][kind]
    both = np.where(usable, (seconds + seconds[:, [one]]).max(axis=0), np.inf)
    # of equals, one with another root: two heads of a node have more ports than one
    other = np.lexsort((orders[:, 0] == orders[one, 0], both))[0]
    return tuple(orders[one].tolist()), tuple(orders[other].tolist())


@functools.cache
def _all_orders(
    size: int, *, is_rooted: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns all orders that make different trees, if rooted those that begin with 0.

    Returns:
        [order, place]; [order] the places below the root that have children, as bits;
        [order, hop] pairs (source * size + target) of the edges, down and up.
    """
    rest = itertools.permutations(range(1, size))
    every = ((0, *order) for order in rest) if is_rooted else itertools.permutations(range(size))
    orders = np.array(list(every), np.int64)
    parent, child = binary_tree(size)
    weight = np.ones(size, np.int64)
    for place in sorted(range(1, size), key=lambda place: place & -place):
        weight[parent[place - 1]] += weight[place]
    for place in np.unique(parent):
        below = child[parent == place]
        if len(below) == 2 and weight[below[0]] == weight[below[1]]:
            # these two can change places, with what hangs from them
            orders = orders[orders[:, below[0]] < orders[:, below[1]]]
    inner = np.bitwise_or.reduce(1 << orders[:, np.unique(parent[parent > 0])], axis=1)
    up, down = orders[:, parent], orders[:, child]
    return orders, inner, np.hstack([up * size + down, down * size + up])
