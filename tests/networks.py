"""Small clusters whose collectives can be worked out by hand: links of 1 GB/s where not said."""

import itertools
from collections.abc import Callable, Sequence

from simcore.cluster import Cluster, Device, Link

KIND = "V100-SXM2-16GB"
GB = 1e9


def cluster(
    nodes: Sequence[str],
    wires: Sequence[tuple[str, str, float, float]],
    *,
    forwards: bool = False,
) -> Cluster:
    """Devices d0, d1, ... joined by wires of (a, b, GB/s, s); other names are switches."""
    devices = [Device(f"d{i}", KIND, node, 2**30, forwards) for i, node in enumerate(nodes)]
    names = {device.name for device in devices}
    switches = sorted({end for wire in wires for end in wire[:2]} - names)
    links = [Link(a, b, "", rate * GB, latency) for a, b, rate, latency in wires]
    return Cluster(name="toy", devices=devices, switches=switches, links=links)


def mesh(
    size: int, *, rate: Callable[[int, int], float] = lambda a, b: 1.0, latency: float = 0.0
) -> Cluster:
    """Each pair has a wire of its own."""
    pairs = itertools.combinations(range(size), 2)
    wires = [(f"d{a}", f"d{b}", rate(a, b), latency) for a, b in pairs]
    return cluster(["n0"] * size, wires)


def star(size: int, *, latency: float = 0.0) -> Cluster:
    """Each device has a wire to one switch."""
    return cluster(["n0"] * size, [(f"d{i}", "hub", 1.0, latency) for i in range(size)])


def cycle(size: int, *, latency: float = 0.0) -> Cluster:
    """Each device has wires to the next and the one before, and passes traffic on."""
    wires = [(f"d{i}", f"d{(i + 1) % size}", 1.0, latency) for i in range(size)]
    return cluster(["n0"] * size, wires, forwards=True)


def servers(
    count: int,
    size: int,
    *,
    inside: tuple[float, float] = (4.0, 0.0),
    port: tuple[float, float] = (1.0, 0.0),
) -> Cluster:
    """Servers of devices on a switch each; each device has a port to the network of all.

    Args:
        count: of servers.
        size: devices of a server.
        inside: GB/s and s of the wires to the switch.
        port: the same of the wires to the network.
    """
    wires = []
    for device in range(count * size):
        wires += [(f"d{device}", f"s{device // size}", *inside), (f"d{device}", "net", *port)]
    return cluster([f"n{device // size}" for device in range(count * size)], wires)


def two_sides(size: int, neck: float = 1.0) -> Cluster:
    """Two nodes of devices, each with a switch, and one wire between the switches."""
    wires = [("s0", "s1", neck, 0.0)]
    wires += [(f"d{i}", f"s{i // size}", 1.0, 0.0) for i in range(2 * size)]
    return cluster([f"n{i // size}" for i in range(2 * size)], wires)


def reordered(original: Cluster, order: Sequence[int]) -> Cluster:
    """The same devices and links, devices in another order."""
    return Cluster(
        name=original.name,
        devices=[original.devices[i] for i in order],
        switches=original.switches,
        links=original.links,
    )
