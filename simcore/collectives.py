"""Collectives: a kind, a size, a group of devices -> latency, duration and load of every channel.

What n members with S bytes each (see `Collective.num_bytes`) put on the network, and how many hops
of latency they wait; a hop is a route, of the slowest of its level:

- *ring*: each hop carries 2 (n - 1) / n S for an all-reduce (Patarasuk and Yuan 2009), half of that
  for a reduce-scatter or an all-gather, S for a broadcast, which does not enter its root; 2 (n - 1)
  hops of latency, n - 1 for the others. The data is split over the rings of `simcore.rings`.
- *tree*: two trees (`simcore.trees`) carry S / 2 each, up and down for an all-reduce, down for a
  broadcast: no member sends or receives more than 2 S; 2 ceil(log2 n) hops, half for a broadcast.
- *hierarchical*: rings inside the nodes, then rings over the members of equal place, one of each
  node, with 1/m of the data where nodes have m members, then rings inside again; a reduce-scatter
  and an all-gather have two such phases. Phases follow each other.
- *pairwise*: an all-to-all sends S / n from each member to each other one, one partner at a time:
  n - 1 hops (Thakur, Rabenseifner and Gropp 2005). The steps run into each other, so the channel
  with most to carry sets the time; libraries that start all pairs at once wait for fewer latencies.

On an idle network a phase lasts as long as the channel with most to carry for its bandwidth: data
is cut finely enough for pipelines to be full, and members do not wait for memory or arithmetic.
A calibrated curve takes the place of latency and duration where there is one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster, Link
from simcore.curves import Curve, CurveKey, as_table, shipped_curves
from simcore.errors import PlanError
from simcore.profile import suggestion
from simcore.profile_store import link_kinds
from simcore.rings import CACHED_GROUPS, Ring, Routes, by_node, find_rings, routes_of
from simcore.trees import find_double_tree
from simcore.units import GB

# kind -> algorithms; the first of equally fast ones is taken
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("ring", "tree", "hierarchical"),
    "reduce_scatter": ("ring", "hierarchical"),
    "all_gather": ("ring", "hierarchical"),
    "broadcast": ("ring", "tree"),
    "all_to_all": ("pairwise",),
}
AUTO = "auto"
_TINY = 1e-9  # relative; channels that take as long but for this are equally slow


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collective:
    """One collective, as one fluid task. Axes: use (a channel that carries part of it).

    Attributes:
        kind: one of `ALGORITHMS`.
        algorithm: how it is done.
        members: device indices in rank order; a broadcast comes from the first.
        num_bytes: of the full buffer: what each member holds before an all-reduce, reduce-scatter,
            all-to-all or broadcast (of an all-to-all, 1/n stays), and after an all-gather.
        latency: before any data moves, s.
        duration: after the latency, on an idle network, s.
        volume: bytes on the channel that takes longest.
    """

    kind: str
    algorithm: str
    members: tuple[int, ...]
    num_bytes: int
    latency: float
    duration: float
    volume: float
    channels: NDArray[np.int64]  # [use] ascending channel ids
    usage: NDArray[np.float64]  # [use] bytes on the channel per byte of volume

    @property
    def idle_time(self) -> float:
        """Latency and duration on an idle network, s."""
        return self.latency + self.duration


class _Load(NamedTuple):
    """What one byte of the buffer puts on the network."""

    channels: NDArray[np.int64]  # [use] ascending channel ids
    usage: NDArray[np.float64]  # [use] bytes per byte on the channel that takes longest
    volume: float  # bytes on that channel
    latency: float  # s, whatever the bytes
    duration: float  # s


class _Phase(NamedTuple):
    """One part of an algorithm, for one byte of the buffer."""

    carried: NDArray[np.float64]  # [channel] bytes; all channels of the cluster
    latency: float  # s


def make_collective(
    kind: str,
    num_bytes: int,
    cluster: Cluster,
    members: Sequence[int],
    *,
    algorithm: str = AUTO,
    curves: Mapping[CurveKey, Curve] | None = None,
) -> Collective:
    """Returns a collective as it goes on an idle network.

    Args:
        kind: one of `ALGORITHMS`.
        num_bytes: of the full buffer, see `Collective`.
        cluster: the cluster.
        members: device indices in rank order.
        algorithm: one of the kind's, or ``auto``: the one of least latency + duration, among those
            that have a curve if any has one.
        curves: calibrated times; None = those that ship with the program.

    Raises:
        PlanError: an unknown kind or algorithm, an algorithm that the group cannot use, negative
            bytes, a member that comes twice or is no device, two members without a route.
    """
    group = tuple(int(member) for member in members)
    _check(kind, algorithm, num_bytes)
    _check_members(kind, cluster, group)
    names = _usable(kind, algorithm, cluster, group)
    if len(group) < 2 or num_bytes == 0:
        return _nothing(kind, names[0], group, num_bytes)
    given = shipped_curves() if curves is None else as_table(curves)
    label = topology(cluster, group) if given else ""
    known = {name: given.find(CurveKey(kind, name, len(group), label)) for name in (*names, AUTO)}
    options = [_closed_form(kind, name, num_bytes, cluster, group) for name in names]
    chosen = known[AUTO] if algorithm == AUTO else None
    if chosen is not None:
        return _timed(_quickest(options), chosen, cluster)
    pairs = ((option, known[option.algorithm]) for option in options)
    timed = [_timed(option, curve, cluster) for option, curve in pairs if curve is not None]
    return _quickest(timed or options)


def topology(cluster: Cluster, members: Sequence[int]) -> str:
    """Returns what a group looks like to a curve: ``1 node, V100-SXM2-16GB, NVLink2-1+NVLink2-2``.

    That is the number of nodes, the kinds of the devices, and the kinds of the links that the
    group's rings go over; a link without a kind, or with other numbers than its kind has, is its
    bandwidth.

    Args:
        cluster: the cluster.
        members: two or more device indices, all joined by routes.
    """
    return _topology(cluster, tuple(sorted(members)))


@functools.lru_cache(maxsize=CACHED_GROUPS)
def _topology(cluster: Cluster, members: tuple[int, ...]) -> str:
    routes = routes_of(cluster)
    hops = [_hops(routes, ring) for ring in find_rings(cluster, members)]
    crossed = np.unique(routes.crossed(np.concatenate(hops))[1])
    links = [cluster.links[channel // 2] for channel in crossed]
    kinds = {cluster.devices[member].kind for member in members}
    names = {_link_name(link) for link in links}
    nodes = len(by_node(cluster, members))
    return f"{nodes} node{'s' * (nodes > 1)}, {'+'.join(sorted(kinds))}, {'+'.join(sorted(names))}"


def _link_name(link: Link) -> str:
    changed = link.kind in link_kinds() and link != Link.of_kind(link.a, link.b, link.kind)
    return f"{link.bandwidth / GB:g}GBps" if changed or not link.kind else link.kind


def _quickest(options: Sequence[Collective]) -> Collective:
    return min(options, key=lambda option: option.idle_time)


def _timed(option: Collective, curve: Curve, cluster: Cluster) -> Collective:
    """Returns the collective with the time of a curve.

    A curve may be faster than the cluster's channels (multicast in a switch, a bandwidth that is
    too low); then the volume is what the channels can carry in that time.
    """
    latency = curve.latency
    duration = max(0.0, curve.time(option.num_bytes) - latency)
    rate = (routes_of(cluster).bandwidth[option.channels] / option.usage).min()
    volume = min(option.volume, duration * float(rate))
    return replace(option, latency=latency, duration=duration, volume=volume)


def _nothing(kind: str, algorithm: str, members: tuple[int, ...], num_bytes: int) -> Collective:
    return Collective(
        kind=kind,
        algorithm=algorithm,
        members=members,
        num_bytes=num_bytes,
        latency=0.0,
        duration=0.0,
        volume=0.0,
        channels=np.zeros(0, np.int64),
        usage=np.zeros(0, np.float64),
    )


def _closed_form(
    kind: str, algorithm: str, num_bytes: int, cluster: Cluster, members: tuple[int, ...]
) -> Collective:
    # rank order matters to a broadcast only, and there only its root
    root = members[:1] if kind == "broadcast" else ()
    load = _load(kind, algorithm, cluster, (*root, *sorted(set(members) - set(root))))
    return Collective(
        kind=kind,
        algorithm=algorithm,
        members=members,
        num_bytes=num_bytes,
        latency=load.latency,
        duration=load.duration * num_bytes,
        volume=load.volume * num_bytes,
        channels=load.channels,
        usage=load.usage,
    )


@functools.lru_cache(maxsize=CACHED_GROUPS)
def _load(kind: str, algorithm: str, cluster: Cluster, members: tuple[int, ...]) -> _Load:
    """Returns the load of one byte; the root of a broadcast is the first member."""
    phases = _PHASES[algorithm](kind, cluster, members)
    bandwidth = routes_of(cluster).bandwidth
    carried = np.sum([phase.carried for phase in phases], axis=0)
    channels = np.flatnonzero(carried)
    seconds = carried[channels] / bandwidth[channels]
    slowest = channels[np.flatnonzero(seconds >= seconds.max() * (1 - _TINY))[0]]
    load = _Load(
        channels=channels,
        usage=carried[channels] / carried[slowest],
        volume=float(carried[slowest]),
        latency=sum(phase.latency for phase in phases),
        duration=sum(float((phase.carried / bandwidth).max()) for phase in phases),
    )
    load.channels.flags.writeable = load.usage.flags.writeable = False
    return load


def _ring(kind: str, cluster: Cluster, members: tuple[int, ...]) -> list[_Phase]:
    return [_ring_phase(kind, cluster, [members], 1.0)]


def _ring_phase(
    kind: str, cluster: Cluster, groups: Sequence[tuple[int, ...]], share: float
) -> _Phase:
    """Returns one phase in which several groups go around their rings at once.

    Args:
        kind: what each group does.
        cluster: the cluster.
        groups: members; of a broadcast, the root first.
        share: of the buffer, what each group works on.
    """
    routes = routes_of(cluster)
    carried, latency = np.zeros(len(cluster.channels)), 0.0
    for group in groups:
        size = len(group)
        amount = {"all_reduce": 2 * (size - 1) / size, "broadcast": 1.0}.get(
            kind, (size - 1) / size
        )
        steps = 2 * (size - 1) if kind == "all_reduce" else size - 1
        for ring in find_rings(cluster, tuple(sorted(group))):
            pairs = _hops(routes, ring, group[0] if kind == "broadcast" else None)
            crossed = routes.crossed(pairs)[1]
            carried += np.bincount(crossed, minlength=len(carried)) * (amount * ring.share * share)
            latency = max(latency, steps * float(routes.latency[pairs].max()))
    return _Phase(carried, latency)


def _hops(routes: Routes, ring: Ring, root: int | None = None) -> NDArray[np.int64]:
    """Returns [hop] the pairs of a ring; with a root, the ring ends before it."""
    order = np.array(ring.order, np.int64)
    after: NDArray[np.int64] = np.roll(order, -1)
    hops: NDArray[np.int64] = order * routes.size + after
    return hops if root is None else hops[after != root]


def _tree(kind: str, cluster: Cluster, members: tuple[int, ...]) -> list[_Phase]:
    root = members[0] if kind == "broadcast" else None
    trees = find_double_tree(cluster, tuple(sorted(members)), root)
    routes = routes_of(cluster)
    parent, child = trees.parent.ravel(), trees.child.ravel()
    down, up = parent * routes.size + child, child * routes.size + parent
    both_ways = kind == "all_reduce"
    crossed = routes.crossed(np.concatenate([down, up]) if both_ways else down)[1]
    carried = np.bincount(crossed, minlength=len(cluster.channels)) / 2
    return [_Phase(carried, trees.latency * (1 + both_ways))]


def _hierarchical(kind: str, cluster: Cluster, members: tuple[int, ...]) -> list[_Phase]:
    nodes = by_node(cluster, members)
    rails = list(zip(*nodes, strict=True))
    inside = [_ring_phase("reduce_scatter", cluster, nodes, 1.0)]
    across = [_ring_phase(kind, cluster, rails, 1 / len(rails))]
    return inside + across + (inside if kind == "all_reduce" else [])


def _pairwise(kind: str, cluster: Cluster, members: tuple[int, ...]) -> list[_Phase]:
    routes = routes_of(cluster)
    targets = np.array(members, np.int64)
    carried, latency = np.zeros(len(cluster.channels)), 0.0
    for source in members:
        pairs = source * routes.size + targets[targets != source]
        carried += np.bincount(routes.crossed(pairs)[1], minlength=len(carried))
        latency = max(latency, float(routes.latency[pairs].max()))
    return [_Phase(carried / len(members), (len(members) - 1) * latency)]


_PHASES: dict[str, Callable[[str, Cluster, tuple[int, ...]], list[_Phase]]] = {
    "ring": _ring,
    "tree": _tree,
    "hierarchical": _hierarchical,
    "pairwise": _pairwise,
}


def _usable(
    kind: str, algorithm: str, cluster: Cluster, members: tuple[int, ...]
) -> tuple[str, ...]:
    """Returns the algorithm that is fixed, or those that the group can use.

    Raises:
        PlanError: the one that is fixed cannot be used.
    """
    nodes = by_node(cluster, members)
    counts = {len(node) for node in nodes}
    levels = len(nodes) > 1 and len(counts) == 1 and counts != {1}
    if algorithm == "hierarchical" and len(members) > 1 and not levels:
        here = ", ".join(f"{len(node)} in {cluster.devices[node[0]].node}" for node in nodes)
        raise PlanError(
            f"{kind}: hierarchical needs two or more members in each of several nodes, as many in "
            f"each; there are {here}"
        )
    if algorithm != AUTO:
        return (algorithm,)
    return tuple(name for name in ALGORITHMS[kind] if levels or name != "hierarchical")


def _check(kind: str, algorithm: str, num_bytes: int) -> None:
    """Refuses kinds and algorithms that there are not, and negative sizes."""
    if kind not in ALGORITHMS:
        known = list(ALGORITHMS)
        raise PlanError(
            f"unknown collective {kind!r}{suggestion(kind, known)}; known: {', '.join(known)}"
        )
    names = (*ALGORITHMS[kind], AUTO)
    if algorithm not in names:
        raise PlanError(f"{kind}: unknown algorithm {algorithm!r}; known: {', '.join(names)}")
    if num_bytes < 0:
        raise PlanError(f"{kind}: bytes must not be negative, but are {num_bytes}")


def _check_members(kind: str, cluster: Cluster, members: tuple[int, ...]) -> None:
    """Refuses members that are no devices, that come twice, or that no route joins."""
    names = cluster.device_names
    for member in members:
        if not 0 <= member < len(names):
            raise PlanError(f"{kind}: cluster {cluster.name!r} has no device number {member}")
    if len(set(members)) < len(members):
        twice = next(member for member in members if members.count(member) > 1)
        raise PlanError(f"{kind}: device {names[twice]!r} is a member twice")
    apart = _first_apart(cluster, tuple(sorted(members)))
    if apart is not None:
        raise PlanError(f"{kind}: no route from {names[apart[0]]!r} to {names[apart[1]]!r}")


@functools.lru_cache(maxsize=CACHED_GROUPS)
def _first_apart(cluster: Cluster, members: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns the first two members that no route joins."""
    apart = np.argwhere(~cluster.reachable[np.ix_(members, members)])
    return (members[apart[0, 0]], members[apart[0, 1]]) if len(apart) else None
