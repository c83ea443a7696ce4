"""Closed forms of collectives on an idle network."""

from collections import Counter
from collections.abc import Sequence

from simcore.cluster import Cluster
from simcore.errors import PlanError


def ring_all_reduce(num_bytes: float, cluster: Cluster, devices: Sequence[int]) -> float:
    """Returns the seconds of a ring all-reduce over the devices in the order given.

    Each of 2 (n - 1) steps passes 1/n of the data to the next device, all at once: 2 (n - 1) / n *
    bytes at the rate of the channel with the most to carry for its bandwidth, and the longest
    latency per step (Patarasuk and Yuan 2009).

    Args:
        num_bytes: bytes that each device holds.
        cluster: the cluster.
        devices: device indices around the ring.

    Raises:
        PlanError: two neighbours of the ring have no route.
    """
    count = len(devices)
    if count < 2:
        return 0.0
    pairs = [(devices[i], devices[(i + 1) % count]) for i in range(count)]
    for source, target in pairs:
        if not cluster.reachable[source, target]:
            names = (cluster.devices[source].name, cluster.devices[target].name)
            raise PlanError(f"data parallel: no route from {names[0]!r} to {names[1]!r}")
    crossing = Counter(channel for pair in pairs for channel in cluster.route(*pair))
    bandwidth = min(cluster.channels[channel].bandwidth / n for channel, n in crossing.items())
    latency = max(float(cluster.route_latency[pair]) for pair in pairs)
    return 2 * (count - 1) * (num_bytes / count / bandwidth + latency)
