"""What list schedulers share: when the inputs of an op are on a device, and what memory is left.

Transfers are taken to be free of each other: no channel is ever busy.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agents.planners.space import PlacementSpace


class PartialSchedule:
    """Ops placed and timed so far. All numbers are plain lists, which small steps need."""

    def __init__(self, space: PlacementSpace, *, margin: float = 1.0) -> None:
        """Starts with nothing placed.

        Args:
            space: the space.
            margin: fraction of each device's room that may be used.
        """
        graph, cluster = space.problem.graph, space.problem.cluster
        self.num_devices = space.num_devices
        self.preferred = frozenset(space.devices)
        self.duration: list[list[float]] = space.seconds.tolist()  # [op][dev] s
        self.unit: list[int] = graph.unit.tolist()  # [op]
        self.device_of_unit: list[int] = [-1] * space.num_units
        self.end: list[float] = [0.0] * graph.num_ops  # s
        self.memory: list[float] = space.memory.tolist()  # [unit] bytes
        self.left: list[float] = (space.room * margin).tolist()  # [dev] bytes
        self.inputs = producers(space)
        self._latency: list[list[float]] = cluster.route_latency.tolist()
        bandwidth = np.where(cluster.reachable, cluster.route_bandwidth, np.inf)
        self._per_byte: list[list[float]] = (1.0 / bandwidth).tolist()

    def options(self, op: int) -> list[int]:
        """Returns devices the op may go to: its unit's, else those with memory left for the unit.

        These are GPUs; CPUs where no GPU has memory left, and what has most left where none has.
        """
        placed = self.device_of_unit[self.unit[op]]
        if placed >= 0:
            return [placed]
        need = self.memory[self.unit[op]]
        able = [d for d in range(self.num_devices) if self.duration[op][d] < math.inf]
        roomy = [d for d in able if self.left[d] >= need]
        return (
            [d for d in roomy if d in self.preferred]
            or roomy
            or [max(able, key=lambda device: self.left[device])]
        )

    def ready(self, op: int, device: int) -> float:
        """Returns when the last input of an op is on a device, in s; inf where no route leads."""
        latest = 0.0
        for producer, num_bytes in self.inputs[op]:
            source = self.device_of_unit[self.unit[producer]]
            time = self.end[producer]
            if source != device:
                time += self._latency[source][device] + num_bytes * self._per_byte[source][device]
            latest = max(latest, time)
        return latest

    def place(self, op: int, device: int, start: float) -> float:
        """Puts an op on a device, its unit with it, and returns its end in s."""
        unit = self.unit[op]
        if self.device_of_unit[unit] < 0:
            self.device_of_unit[unit] = device
            self.left[device] -= self.memory[unit]
        self.end[op] = start + self.duration[op][device]
        return self.end[op]

    def placement(self) -> NDArray[np.int32]:
        """Returns the device of each unit, [unit]."""
        return np.array(self.device_of_unit, np.int32)


def producers(space: PlacementSpace) -> list[list[tuple[int, int]]]:
    """Returns (producer op, bytes) of every input that an op reads, [op]."""
    graph = space.problem.graph
    inputs: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_ops)]
    source, target, tensor = graph.edges()
    columns = (source.tolist(), target.tolist(), space.tensor_bytes[tensor].tolist())
    for producer, consumer, num_bytes in zip(*columns, strict=True):
        inputs[consumer].append((producer, num_bytes))
    return inputs


def mean_route(space: PlacementSpace, devices: Sequence[int]) -> tuple[float, float]:
    """Returns mean latency in s and mean s per byte between two different ones of the devices."""
    cluster, pairs = space.problem.cluster, np.ix_(list(devices), list(devices))
    apart = cluster.reachable[pairs] & ~np.eye(len(devices), dtype=np.bool_)
    if not apart.any():
        return 0.0, 0.0
    latency, bandwidth = cluster.route_latency[pairs][apart], cluster.route_bandwidth[pairs][apart]
    return float(latency.mean()), float((1.0 / bandwidth).mean())


def upward_ranks(space: PlacementSpace, devices: Sequence[int]) -> NDArray[np.float64]:
    """Returns the longest path from each op to the end with mean costs, [op] s.

    Means are over the devices, and over the pairs of different devices (Topcuoglu et al. 2002).
    """
    columns = space.seconds[:, list(devices)]
    finite = np.isfinite(columns)
    mean = np.where(finite, columns, 0.0).sum(axis=1) / np.maximum(finite.sum(axis=1), 1)
    latency, per_byte = mean_route(space, devices)
    ranks: list[float] = mean.tolist()
    below = [0.0] * len(ranks)
    inputs = producers(space)
    for op in range(len(ranks) - 1, -1, -1):
        ranks[op] += below[op]
        for producer, num_bytes in inputs[op]:
            path = ranks[op] + latency + num_bytes * per_byte
            below[producer] = max(below[producer], path)
    return np.array(ranks)
