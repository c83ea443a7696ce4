"""Collectives of all groups of an axis at once: what they take where they share links.

The compiled simulator times a collective on an idle network. On a mesh over several servers the
groups of an axis use the same network at the same time (eight pairs of copies, one network card):
then the link that carries most decides. Durations are scaled by that, and never shortened.
"""

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


def shared(folded: FoldedSpace) -> FoldedSpace:
    """Returns a space whose collectives take as long as all groups of an axis together."""
    timings = _timings(folded.spaces[0])
    spaces = tuple(
        replace(space, tables=space.tables._replace(timings=timings)) for space in folded.spaces
    )
    return replace(folded, spaces=spaces)


def _timings(space: ShardSpace) -> NDArray[np.void]:
    timings: NDArray[np.void] = space.tables.timings.copy()
    rows = [(COPIES, DATA_AXIS, Change.ALL_REDUCE, space.buckets.algorithm)]
    kinds = [change for change in Change if change != Change.SLICE]
    rows += [(axis, 1 + axis, kind, AUTO) for axis in range(len(space.axes)) for kind in kinds]
    for row, mesh_axis, change, algorithm in rows:
        if space.mesh.sizes[mesh_axis] > 1:
            groups = space.mesh.members(mesh_axis).tolist()
            places = [[space.cluster.device_index(space.devices[k]) for k in g] for g in groups]
            factor = slow_down(space.cluster, change.name.lower(), places, algorithm)
            timings["duration"][row, change] *= factor
    return timings


def slow_down(cluster: Cluster, kind: str, groups: list[list[int]], algorithm: str = AUTO) -> float:
    """Returns how many times as long collectives of all groups at once take as the slowest alone.

    Args:
        cluster: the cluster.
        kind: of the collective.
        groups: device indices of each group.
        algorithm: how it is done.
    """
    made = [make_collective(kind, _PROBE, cluster, group, algorithm=algorithm) for group in groups]
    carried = np.zeros(len(cluster.channels))
    for each in made:
        carried[each.channels] += each.usage * each.volume
    bandwidth = np.array([channel.bandwidth for channel in cluster.channels])
    alone = max(each.duration for each in made)
    return max(1.0, float((carried / bandwidth).max()) / alone) if alone > 0 else 1.0
