"""Collectives of all groups of an axis at once: what they take where they share links.

The compiled simulator times a collective on an idle network. On a mesh over several servers the
groups of an axis use the same network at the same time (eight pairs of copies, one network card):
then the link that carries most decides. Durations are scaled by that, and never shortened.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.collectives import AUTO, make_collective
from simcore.kernel import Change
from simcore.kernel.shard_records import COPIES
from simcore.mesh import DATA_AXIS
from simcore.shard_batch import FoldedSpace
from simcore.shard_space import ShardSpace

_PROBE = 2**24  # bytes at which sharing is looked at
_PROBES = (2**16, 2**20, 2**24, 2**28)


def shared(folded: FoldedSpace) -> FoldedSpace:
    """Returns a space whose collectives take as long as all groups of an axis together."""
    timings = _timings(folded.spaces[0])
    spaces = tuple(
        replace(space, tables=space.tables._replace(timings=timings)) for space in folded.spaces
    )
    return replace(folded, spaces=spaces)


def link_rates(space: ShardSpace) -> NDArray[np.float64]:
    """Returns s for which a byte of a collective keeps the link busy that carries most, at least.

    That is less than the collective takes where messages are small, or where phases follow each
    other; for the rest of the time another collective may use the link.

    Returns:
        [axis, change] s per byte, where all groups of an axis do the same at the same time.
    """
    rates = np.zeros(space.tables.timings.shape[:2])
    for row, change, algorithm, groups in _used(space):
        kind = change.name.lower()
        rates[row, change] = busiest_rate(space.cluster, kind, groups, algorithm)
    return rates


def busiest_rate(
    cluster: Cluster, kind: str, groups: list[list[int]], algorithm: str = AUTO
) -> float:
    """Returns s per byte for which the link is busy that carries most, at least; see `link_rates`.

    Args:
        cluster: the cluster.
        kind: of the collective.
        groups: device indices of each group; all do the same at the same time.
        algorithm: how it is done.
    """
    return min(_loads(cluster, kind, groups, algorithm, size)[0] / size for size in _PROBES)


def alone_ratio(space: ShardSpace, axis: int) -> float:
    """Returns how busy one group of an axis keeps its busiest link, over all groups; at most 1.

    0 where there is no such axis: nothing is known of it then, and nothing needed.
    """
    found = []
    for row, change, algorithm, groups in _used(space):
        if row == axis:
            kind = change.name.lower()
            whole = busiest_rate(space.cluster, kind, groups, algorithm)
            alone = max(busiest_rate(space.cluster, kind, [g], algorithm) for g in groups)
            found.append(alone / whole if whole else 1.0)
    return min(1.0, *found) if found else 0.0


def _used(space: ShardSpace) -> Iterator[tuple[int, Change, str, list[list[int]]]]:
    """Yields row, kind and algorithm of each curve that plans may use, and its groups."""
    rows = [(COPIES, DATA_AXIS, Change.ALL_REDUCE, space.buckets.algorithm)]
    kinds = [change for change in Change if change != Change.SLICE]
    rows += [(axis, 1 + axis, kind, AUTO) for axis in range(len(space.axes)) for kind in kinds]
    places = [space.cluster.device_index(name) for name in space.devices]
    for row, mesh_axis, change, algorithm in rows:
        if space.mesh.sizes[mesh_axis] > 1:
            groups = space.mesh.members(mesh_axis).tolist()
            yield row, change, algorithm, [[places[k] for k in group] for group in groups]


def _timings(space: ShardSpace) -> NDArray[np.void]:
    timings: NDArray[np.void] = space.tables.timings.copy()
    for row, change, algorithm, groups in _used(space):
        timings["duration"][row, change] *= slow_down(
            space.cluster, change.name.lower(), groups, algorithm
        )
    return timings


def slow_down(cluster: Cluster, kind: str, groups: list[list[int]], algorithm: str = AUTO) -> float:
    """Returns how many times as long collectives of all groups at once take as the slowest alone.

    Args:
        cluster: the cluster.
        kind: of the collective.
        groups: device indices of each group.
        algorithm: how it is done.
    """
    carried, alone = _loads(cluster, kind, groups, algorithm, _PROBE)
    return max(1.0, carried / alone) if alone > 0 else 1.0


def _loads(
    cluster: Cluster, kind: str, groups: list[list[int]], algorithm: str, num_bytes: int
) -> tuple[float, float]:
    """Returns seconds of the busiest link for all groups at once, and the most of one alone."""
    made = [
        make_collective(kind, num_bytes, cluster, group, algorithm=algorithm) for group in groups
    ]
    carried = np.zeros(len(cluster.channels))
    for each in made:
        carried[each.channels] += each.usage * each.volume
    bandwidth = np.array([channel.bandwidth for channel in cluster.channels])
    return float((carried / bandwidth).max()), max(each.duration for each in made)
