"""The expert's rule: the model in program order is cut into one contiguous part per device.

Cuts balance time or memory, or are put where the least crosses while every part fits: what one
does by hand with a model that is too large for one device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace


@dataclass(frozen=True, slots=True)
class ChainSplit:
    """Cuts for 1, 2, ... all GPUs, with several margins for what the estimate of memory misses."""

    margins: tuple[float, ...] = (1.0, 0.9, 0.75)
    batch: int = 16
    name: str = "chain_split"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Scores all distinct cuts."""
        distinct = {placement.tobytes(): placement for placement in self._proposals(space)}
        placements = list(distinct.values())
        for begin in range(0, len(placements), self.batch):
            if budget.left():
                rows = np.stack(placements[begin : begin + self.batch])
                recorder.evaluate(self.name, rows, budget)

    def _proposals(self, space: PlacementSpace) -> Iterator[NDArray[np.int32]]:
        crossing = crossing_time(space)
        for devices in device_lists(space):
            chosen = list(devices)
            speed = 1.0 / np.where(np.isfinite(space.work), space.work, 0.0)[:, chosen].sum(axis=0)
            room = np.maximum(space.room[chosen], 1.0)
            time = space.work.min(axis=1, initial=np.inf)
            for weight, share in ((time, speed), (space.memory, room)):
                parts = balanced(weight[space.order], share)
                yield _placed(space, chosen, parts)
            for margin in self.margins:
                fitting = least_crossing(space, chosen, crossing, margin)
                if fitting is not None:
                    yield _placed(space, chosen, fitting)


def device_lists(space: PlacementSpace) -> list[tuple[int, ...]]:
    """Returns the device orders that are tried: prefixes by index, by speed and by room."""
    total = np.where(np.isfinite(space.work), space.work, 0.0).sum(axis=0)
    orders = (
        space.devices,
        sorted(space.devices, key=lambda device: (total[device], device)),
        sorted(space.devices, key=lambda device: (-space.room[device], device)),
    )
    prefixes = (tuple(order[:count]) for order in orders for count in range(1, len(order) + 1))
    return list(dict.fromkeys(sorted(prefixes, key=len)))


def balanced(weight: NDArray[np.float64], share: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the part of each item, [item], such that part k has about share[k] of the weight."""
    middle = np.cumsum(weight) - weight / 2
    total = weight.sum()
    bounds = np.cumsum(share) / share.sum() * (total if total else 1.0)
    return np.minimum(np.searchsorted(bounds, middle), len(share) - 1)


def crossing_time(space: PlacementSpace) -> NDArray[np.float64]:
    """Returns seconds of transfers over a cut after each unit of the order, [unit] s.

    Both directions count (activations forward, gradients back), at the mean bandwidth and latency.
    """
    problem, devices = space.problem, list(space.devices)
    rank = np.empty(space.num_units, np.int64)
    rank[space.order] = np.arange(space.num_units)
    source, target, tensor = problem.graph.edges()
    a = rank[problem.graph.unit[source]]
    b = rank[problem.graph.unit[target]]
    furthest: dict[tuple[int, bool], int] = {}
    begin = dict(zip(tensor.tolist(), a.tolist(), strict=True))
    for item, x, y in zip(tensor.tolist(), a.tolist(), b.tolist(), strict=True):
        key = (item, y > x)
        furthest[key] = max(furthest.get(key, 0), abs(y - x))
    grid = np.ix_(devices, devices)
    apart = ~np.eye(len(devices), dtype=bool) & problem.cluster.reachable[grid]
    latency = problem.cluster.route_latency[grid][apart]
    per_byte = 1.0 / problem.cluster.route_bandwidth[grid][apart]
    fixed = float(latency.mean()) if len(latency) else 0.0
    slope = float(per_byte.mean()) if len(per_byte) else 0.0
    change = np.zeros(space.num_units + 1)
    for (item, forward), length in furthest.items():
        low = begin[item] if forward else begin[item] - length
        seconds = fixed + space.tensor_bytes[item] * slope
        change[low] += seconds
        change[low + length] -= seconds
    return np.cumsum(change)[:-1]


def least_crossing(
    space: PlacementSpace,
    devices: Sequence[int],
    crossing: NDArray[np.float64],
    margin: float,
) -> NDArray[np.int64] | None:
    """Returns parts that fit and whose cuts take the least time, [item of the order], or None.

    Dynamic program over (devices used, units placed); every device gets at least one unit.
    """
    count, num_items = len(devices), space.num_units
    if count > num_items:
        return None
    used = np.concatenate([[0.0], np.cumsum(space.memory[space.order])])
    work = np.where(np.isfinite(space.work), space.work, 0.0)[space.order]
    ahead = np.vstack([np.zeros(space.num_devices), np.cumsum(work, axis=0)])
    cost = np.full((count + 1, num_items + 1), np.inf)
    cost[0, 0] = 0.0
    cut = np.zeros((count + 1, num_items + 1), np.int64)
    for part in range(1, count + 1):
        device = devices[part - 1]
        opening = cost[part - 1] - ahead[:, device]
        if part > 1:
            opening[1:] += crossing
        first = np.searchsorted(used, used - space.room[device] * margin, side="left")
        for end in range(part, num_items + 1):
            if first[end] < end:
                begin = int(first[end]) + int(opening[first[end] : end].argmin())
                cost[part, end] = opening[begin] + ahead[end, device]
                cut[part, end] = begin
    if not np.isfinite(cost[count, num_items]):
        return None
    parts = np.zeros(num_items, np.int64)
    end = num_items
    for part in range(count, 0, -1):
        begin = int(cut[part, end])
        parts[begin:end] = part - 1
        end = begin
    return parts


def _placed(
    space: PlacementSpace, devices: Sequence[int], parts: NDArray[np.int64]
) -> NDArray[np.int32]:
    placement = np.zeros(space.num_units, np.int32)
    placement[space.order] = np.array(devices, np.int32)[parts]
    return space.repair(placement)
