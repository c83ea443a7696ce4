"""The command ``placewright clusters``: the clusters known by name, and what is in one."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from simcore.cli import Answer, Subparsers, show_table
from simcore.units import GB, US, GiB

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from simcore.cluster import Cluster

Row = dict[str, Any]
_MOST_COLUMNS = 16  # of a table with a column for each device


def add_clusters(subparsers: Subparsers) -> None:
    """Adds ``placewright clusters``."""
    parser = subparsers.add_parser(
        "clusters",
        help="list the clusters known by name, or show one",
        description="Lists the clusters that ship with placewright; with NAME, shows devices, "
        "links and the bandwidth between each pair of devices.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a preset, or a .toml file")
    parser.set_defaults(run=_clusters)


def _clusters(args: argparse.Namespace) -> Answer:
    from simcore import cluster

    if args.name is not None:
        found = _cluster_data(cluster.resolve(args.name))
        return Answer(data=found, show=lambda: _show_cluster(found))
    rows = [_cluster_row(cluster.Cluster.preset(name)) for name in cluster.presets()]
    return Answer(data={"clusters": rows}, show=lambda: _show_clusters(rows))


def _cluster_row(cluster: Cluster) -> Row:
    kinds = Counter(device.kind for device in cluster.devices)
    return {"name": cluster.name, "devices": dict(kinds), "description": cluster.description}


def _show_clusters(rows: list[Row]) -> None:
    show_table(
        ["cluster", "devices", "description"],
        [
            [
                row["name"],
                ", ".join(f"{count} x {kind}" for kind, count in row["devices"].items()),
                row["description"],
            ]
            for row in rows
        ],
        right=(),
    )


def _cluster_data(cluster: Cluster) -> Row:
    names = cluster.device_names
    return {
        "name": cluster.name,
        "description": cluster.description,
        "hash": cluster.content_hash(),
        "devices": [
            {
                "name": device.name,
                "kind": device.kind,
                "node": device.node,
                "memory_GiB": device.memory / GiB,
                "forwards": device.forwards,
            }
            for device in cluster.devices
        ],
        "switches": list(cluster.switches),
        "links": [
            {
                "a": link.a,
                "b": link.b,
                "kind": link.kind,
                "bandwidth_GBps": link.bandwidth / GB,
                "latency_us": link.latency / US,
            }
            for link in cluster.links
        ],
        "route_bandwidth_GBps": _pairs(names, cluster.route_bandwidth / GB),
        "route_latency_us": _pairs(names, cluster.route_latency / US),
    }


def _pairs(names: tuple[str, ...], values: NDArray[np.float64]) -> dict[str, dict[str, float]]:
    """Returns from -> to -> value, [dev, dev], without the diagonal and what is unreachable."""
    return {
        a: {b: values[i, j] for j, b in enumerate(names) if i != j and 0 <= values[i, j] < math.inf}
        for i, a in enumerate(names)
    }


def _show_cluster(data: Row) -> None:
    print(f"{data['name']}: {data['description']}".removesuffix(": "))
    show_table(
        ["device", "kind", "node", "memory"],
        [[d["name"], d["kind"], d["node"], f"{d['memory_GiB']:g} GiB"] for d in data["devices"]],
        right=(3,),
    )
    print()
    show_table(
        ["link", "kind", "GB/s each way", "latency"],
        [
            [
                f"{link['a']} - {link['b']}",
                link["kind"],
                f"{link['bandwidth_GBps']:g}",
                f"{link['latency_us']:g} us",
            ]
            for link in data["links"]
        ],
        right=(2, 3),
    )
    routes = data["route_bandwidth_GBps"]
    if len(routes) > _MOST_COLUMNS:
        print("\nGB/s over the whole route, and how many pairs have it:")
        show_table(["from", "to", "GB/s", "pairs"], _kinds_of_pairs(data), right=(2, 3))
        return
    print("\nGB/s from row to column, over the whole route:")
    rows = [[a, *(f"{routes[a][b]:g}" if b in routes[a] else "-" for b in routes)] for a in routes]
    show_table(["", *routes], rows)


def _kinds_of_pairs(data: Row) -> list[list[str]]:
    """Returns kinds of devices, whether they share a server, bandwidth, and how many pairs."""
    device = {each["name"]: each for each in data["devices"]}
    counts: Counter[tuple[str, str, float]] = Counter()
    for a, others in data["route_bandwidth_GBps"].items():
        for b, bandwidth in others.items():
            same = device[a]["node"] == device[b]["node"]
            target = f"{device[b]['kind']}, {'same' if same else 'another'} server"
            counts[device[a]["kind"], target, bandwidth] += 1
    return [[a, b, f"{rate:g}", f"{count:,}"] for (a, b, rate), count in sorted(counts.items())]
