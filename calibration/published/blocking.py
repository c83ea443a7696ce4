"""Messages between pipeline stages for which both devices stop.

DeepSpeed's pipeline sends with `torch.distributed.send` and receives with `recv`: what is computed
next on either device waits for the end of the message, so that none is hidden beside work.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simcore.cluster import Cluster
from simcore.signature import Phase
from simcore.stages import StageTables


class _Way(NamedTuple):
    """Messages of a phase from one stage to another."""

    phase: Phase
    sender: int
    receiver: int
    num_bytes: int  # of each device


def with_stops(
    tables: Sequence[StageTables], cluster: Cluster, stages: Sequence[Sequence[int]]
) -> tuple[StageTables, ...]:
    """Returns tables in which a message is in the phases of both stages, and on no way.

    Args:
        tables: of each stage, [stage]; the first has the bytes of messages.
        cluster: of the devices.
        stages: devices of each stage, each of which sends to the one in the same place.
    """
    seconds = [table.seconds.copy() for table in tables]
    for way in _ways(tables[0]):
        flows = list(zip(stages[way.sender], stages[way.receiver], strict=True))
        times = message_times(cluster, flows, way.num_bytes)
        for stage, devices in zip(
            (way.sender, way.receiver), zip(*flows, strict=True), strict=True
        ):
            names = [cluster.devices[device].kind for device in devices]
            for kind, name in enumerate(tables[stage].kinds):
                mine = [time for time, its in zip(times, names, strict=True) if its == name]
                seconds[stage][stage, way.phase, kind] += max(mine, default=0.0)
    none = np.zeros_like(tables[0].forward_bytes)
    return tuple(
        replace(table, seconds=mine, forward_bytes=none, backward_bytes=none)
        for table, mine in zip(tables, seconds, strict=True)
    )


def message_times(
    cluster: Cluster, flows: Sequence[tuple[int, int]], num_bytes: int
) -> list[float]:
    """Returns what messages of equal size take that are sent at once, s.

    Args:
        cluster: of the devices.
        flows: who sends to whom.
        num_bytes: of each message.
    """
    routes = [cluster.route(*flow) for flow in flows]
    load = Counter(channel for route in routes for channel in route)
    return [
        float(cluster.route_latency[flow])
        + num_bytes * max(load[each] / cluster.channels[each].bandwidth for each in route)
        for flow, route in zip(flows, routes, strict=True)
    ]


def _ways(table: StageTables) -> Iterator[_Way]:
    for edge, (before, after) in enumerate(table.edges):
        yield _Way(Phase.F, before, after, int(table.forward_bytes[edge].sum()))
        yield _Way(Phase.B, after, before, int(table.backward_bytes[edge].sum()))
