"""Clusters of published runs whose nodes differ, or share one network port among their GPUs.

The GPUs of a plan are given in its order, each with the node it is in. In a node they meet at a
switch, which has one port to a network; nodes with bridges have them between neighbours.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from calibration.published.rows import Run
from simcore.cluster import Cluster, Device, Link
from simcore.profile_store import load_link
from simcore.units import GB, US

NETWORK = "network"
SOCKET_LATENCY = 20 * US  # of each of the two hops between nodes over TCP


class NodeKind(NamedTuple):
    """What a node is."""

    device: str  # kind of its devices
    link: str  # kind of the links to its switch; "; source" after it leads to measured curves
    port: float  # of the node to the network, bytes/s
    latency: float = SOCKET_LATENCY  # s of that port
    per_node: int = 8
    bridge: str = ""  # kind of the links between the two GPUs of a replica of two
    inside: float = 0.0  # of a GPU to the switch, bytes/s; 0 = what its kind of link carries
    pair: float = 0.0  # most that one node sends to another, bytes/s; 0 = as much as the port


class Place(NamedTuple):
    """Where a GPU of a plan is."""

    kind: NodeKind
    node: int
    pair: int = -1  # number of the bridge that it is on; -1 = none


# Without a direct path between GPUs, what they send passes through their node's memory: 4.5 GB/s a
# GPU, as Gavel's rows of ResNet-18 on one server of P100 or K80 say; two K80 share a slot.
THROUGH_HOST = 4.5 * GB
# Nodes of Amazon's g4dn.12xlarge have four T4. What TCP carries out of one of them, and between two
# of them, are residual factors of Pollux: fitted on its rows of BERT on three or four nodes and on
# two; its other three models have no part in them.
_G4DN = NodeKind(
    "T4-16GB", "PCIe3x16", port=0.59 * GB, per_node=4, inside=THROUGH_HOST, pair=0.365 * GB
)
# Gavel's V100 are Amazon p3 instances, its K80 p2's, its P100 Google's: 10 Gb/s a node.
_P3 = NodeKind("V100-SXM2-16GB", "PCIe3x16", port=1.25 * GB)
_P2 = NodeKind("K80-12GB", "PCIe3x16", port=1.25 * GB, inside=THROUGH_HOST / 2)
_GCP = NodeKind("P100-PCIe-16GB", "PCIe3x16", port=1.25 * GB, per_node=4, inside=THROUGH_HOST)
_ONE_BY_ONE = {
    ("petuum/adaptdl", "T4"): _G4DN,
    ("stanford-futuredata/gavel", "V100"): _P3,
    ("stanford-futuredata/gavel", "P100"): _GCP,
    ("stanford-futuredata/gavel", "K80"): _P2,
    ("kakaobrain/torchgpipe", "Tesla P40"): NodeKind("P40-24GB", "PCIe3x16", port=1.25 * GB),
}
# Sailor's machine at MIT: what `network_coeffs_all_homo.json` of its profiles measured between two
# nodes of each kind.
_MIT = {
    "RTX-2080": NodeKind("RTX-2080Ti-11GB", "PCIe3x16; sailor", port=2.857 * GB),  # has 11 GB
    "Titan-RTX": NodeKind("Titan-RTX-24GB", "PCIe3x16; sailor", port=2.857 * GB),
    "RTX-3090": NodeKind(
        "RTX-3090-24GB", "PCIe4x16; sailor", port=0.1157 * GB, bridge="NVLink3-bridge-4; sailor"
    ),
}


class _Replica(msgspec.Struct):
    gpus: list[tuple[str, int]]


class _Stage(msgspec.Struct):
    replicas: list[_Replica]


def node_cluster(run: Run) -> Cluster | None:
    """Returns the cluster of a run, its devices in the order of the plan; None = unknown."""
    places = _mixed(run) if "+" in run.gpu else _alike(run)
    return None if places is None or len(places) != run.num_gpus else _cluster(tuple(places))


def _alike(run: Run) -> list[Place] | None:
    """Returns the places of GPUs of one kind: as many on each node as the row says."""
    kind = _ONE_BY_ONE.get((run.source, run.gpu))
    if kind is None:
        return None
    stated = re.search(r"each node: ([\d+]+)$", run.placement)
    if stated:
        counts = [int(count) for count in stated[1].split("+") if count]
    elif run.placement.startswith("unconsolidated"):
        counts = [1] * run.num_gpus
    else:
        counts = [kind.per_node] * (run.num_gpus // kind.per_node)
        counts += [rest] if (rest := run.num_gpus % kind.per_node) else []
    return [Place(kind, node) for node, count in enumerate(counts) for _ in range(count)]


def _mixed(run: Run) -> list[Place] | None:
    """Returns the places of the GPUs that a row of Sailor lists, stage after stage."""
    try:
        stages = msgspec.json.decode(run.placement, type=list[_Stage])
    except msgspec.DecodeError:
        return None
    seen: Counter[str] = Counter()
    places = []
    gpus = (gpu for stage in stages for each in stage.replicas for gpu in each.gpus)
    for number, (name, count) in enumerate(gpus):
        if name not in _MIT:
            return None
        kind = _MIT[name]
        for _ in range(count):
            node = list(_MIT).index(name) * 1000 + seen[name] // kind.per_node
            places.append(Place(kind, node, number if count == 2 and kind.bridge else -1))
            seen[name] += 1
    return places


@functools.lru_cache(maxsize=512)
def _cluster(places: tuple[Place, ...]) -> Cluster:
    nodes = list(dict.fromkeys(place.node for place in places))
    count: Counter[int] = Counter()
    devices, links = [], []
    bridged: dict[int, str] = {}
    for place in places:
        name = f"n{nodes.index(place.node)}.gpu{count[place.node]}"
        count[place.node] += 1
        node = f"node{nodes.index(place.node)}"
        devices.append(Device.of_kind(name, place.kind.device, node=node))
        links.append(_to_switch(name, f"{node}.switch", place.kind))
        if place.pair >= 0 and place.pair in bridged:
            links.append(_link(bridged[place.pair], name, place.kind.bridge))
        bridged[place.pair] = name
    kinds = {place.node: place.kind for place in places}
    switches = [f"node{number}.switch" for number in range(len(nodes))]
    names, between = _between(switches, [kinds[node] for node in nodes])
    return Cluster(
        name=f"{len(places)} GPUs on {len(nodes)} nodes",
        devices=tuple(devices),
        switches=(*switches, *names),
        links=(*links, *between),
    )


def _between(switches: Sequence[str], kinds: Sequence[NodeKind]) -> tuple[list[str], list[Link]]:
    """Returns the switches and links between nodes: one network, or a path for each pair."""
    if len(switches) == 1:
        return [], []
    pairs = list(zip(switches, kinds, strict=True))
    if not kinds[0].pair:
        ports = [Link(switch, NETWORK, "", kind.port, kind.latency) for switch, kind in pairs]
        return [NETWORK], ports
    names = [f"{switch}.port" for switch in switches]
    ports = [Link(a, b, "", kind.port, 0.0) for (a, kind), b in zip(pairs, names, strict=True)]
    paths = itertools.combinations(names, 2)
    return names, ports + [Link(a, b, "", kinds[0].pair, kinds[0].latency) for a, b in paths]


def _to_switch(name: str, switch: str, kind: NodeKind) -> Link:
    """Returns the link of a GPU; one that carries other than its kind does has no curves."""
    link = _link(name, switch, kind.link)
    return Link(name, switch, "", kind.inside, link.latency) if kind.inside else link


def _link(a: str, b: str, kind: str) -> Link:
    known = load_link(kind.partition(";")[0])
    return Link(a, b, kind, known.bandwidth, known.latency)
