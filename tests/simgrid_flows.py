"""Plays sets of flows on SimGrid's fluid network model: ``simgrid_flows.py SETS.json TIMES.json``.

A process of its own, since SimGrid has one engine per process. All sets are played at once on links
of their own. Sizes are in GB and rates in GB/s, because SimGrid's precision is absolute. Platforms
are written otherwise in SimGrid 4: the exit status is OTHER_VERSION there.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone, simgrid_version

OPTIONS = [
    "network/model:CM02",
    "network/TCP-gamma:0",  # no window bounds a flow
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "network/weight-S:0",
    "network/crosstraffic:0",  # no acknowledgements on the way back
]
GB = 1e9
OTHER_VERSION = 3
numbers = itertools.count()  # of flows


def main() -> None:
    if not simgrid_version.startswith("3."):
        sys.exit(OTHER_VERSION)
    sets = json.loads(Path(sys.argv[1]).read_text())
    engine = Engine([sys.argv[0], "--log=root.thres:error", *(f"--cfg={o}" for o in OPTIONS)])
    zone = NetZone.create_full_zone("zone")
    ends = [
        [add_flow(zone, flow, links) for flow in one["flows"]] for one, links in wired(zone, sets)
    ]
    zone.seal()
    times: list[list[float]] = []

    def drive() -> None:
        comms: list[list[Any]] = []
        for pairs, one in zip(ends, sets, strict=True):
            comms.append([])
            for (source, target), flow in zip(pairs, one["flows"], strict=True):
                comm = Comm.sendto_init(source, target)
                comm.set_payload_size(round(flow["size"] * GB))
                comm.start()
                comms[-1].append(comm)
        for group in comms:
            for comm in group:
                comm.wait()
            times.append([comm.finish_time for comm in group])

    Actor.create("drive", ends[0][0][0], drive)
    engine.run()
    Path(sys.argv[2]).write_text(json.dumps(times))


def wired(zone: Any, sets: list[Any]) -> list[tuple[Any, list[Any]]]:
    """Pairs each set with its links."""
    return [
        (one, [add_link(zone, f"{index}:{c}", width) for c, width in enumerate(one["bandwidth"])])
        for index, one in enumerate(sets)
    ]


def add_link(zone: Any, name: str, width: float) -> Any:
    return zone.create_link(name, [width * GB]).set_latency(0).seal()


def add_flow(zone: Any, flow: dict[str, Any], links: list[Any]) -> tuple[Any, Any]:
    """Adds two hosts and a route between them; the flow's cap is a link of its own."""
    number = next(numbers)
    source, target = (zone.create_host(f"{number}{end}", [1e9]).seal() for end in "ab")
    route = [links[c] for c in flow["channels"]] + [add_link(zone, f"cap{number}", flow["cap"])]
    steps = [LinkInRoute(link) for link in route]
    zone.add_route(source.netpoint, target.netpoint, None, None, steps, False)
    return source, target


if __name__ == "__main__":
    main()
