"""The expert's rule: the model in program order is cut into one contiguous part per device.

Cuts balance time or memory, or are put where the least crosses while every part fits: what one
does by hand with a model that is too large for one device.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.planners.earliest import mean_route
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
        work = np.where(np.isfinite(space.work), space.work, 0.0).sum(axis=0)
        time = space.work.min(axis=1)[space.order]
        for order in device_orders(space):
            for count in range(1, len(order) + 1):
                chosen = list(order[:count])
                share = 1.0 / np.maximum(work[chosen], 1e-300)
                yield _placed(space, order, balanced(time, share))
                room = np.maximum(space.room[chosen], 1.0)
                yield _placed(space, order, balanced(space.memory[space.order], room))
            for margin in self.margins:
                for parts in least_crossing(space, order, crossing, margin):
                    yield _placed(space, order, parts)


def device_orders(space: PlacementSpace) -> list[tuple[int, ...]]:
    """Returns the orders in which GPUs are taken: by index, the fastest or the largest first."""
    work = np.where(np.isfinite(space.work), space.work, 0.0).sum(axis=0)
    orders = (
        space.devices,
        tuple(sorted(space.devices, key=lambda device: (work[device], device))),
        tuple(sorted(space.devices, key=lambda device: (-space.room[device], device))),
    )
    return list(dict.fromkeys(orders))


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
    graph = space.problem.graph
    rank = np.empty(space.num_units, np.int64)
    rank[space.order] = np.arange(space.num_units)
    source, target, tensor = graph.edges()
    a = rank[graph.unit[source]]
    b = rank[graph.unit[target]]
    furthest: dict[tuple[int, bool], int] = {}
    begin = dict(zip(tensor.tolist(), a.tolist(), strict=True))
    for item, x, y in zip(tensor.tolist(), a.tolist(), b.tolist(), strict=True):
        key = (item, y > x)
        furthest[key] = max(furthest.get(key, 0), abs(y - x))
    latency, per_byte = mean_route(space, space.devices)
    change = np.zeros(space.num_units + 1)
    for (item, forward), length in furthest.items():
        low = begin[item] if forward else begin[item] - length
        seconds = latency + space.tensor_bytes[item] * per_byte
        change[low] += seconds
        change[low + length] -= seconds
    return np.cumsum(change)[:-1]


def least_crossing(
    space: PlacementSpace,
    order: Sequence[int],
    crossing: NDArray[np.float64],
    margin: float,
) -> list[NDArray[np.int64]]:
    """Returns parts that fit and whose cuts take the least time, [item of the order] each.

    One for each number of devices for which there are such parts. Dynamic program over (devices
    used, units placed); every device gets at least one unit.

    Args:
        space: the space.
        order: devices; the first ones are used.
        crossing: seconds of a cut after each unit of the program order, [unit].
        margin: fraction of the room of a device that may be used.
    """
    num_items = space.num_units
    used = np.concatenate([[0.0], np.cumsum(space.memory[space.order])])
    work = np.where(np.isfinite(space.work), space.work, 0.0)[space.order]
    ahead = np.vstack([np.zeros(space.num_devices), np.cumsum(work, axis=0)])
    cost = np.full(num_items + 1, np.inf)
    cost[0] = 0.0
    cuts: list[NDArray[np.int64]] = []
    found = []
    for device in order[:num_items]:
        opening = cost - ahead[:, device]
        if cuts:
            opening[1:] += crossing
        first = np.searchsorted(used, used - space.room[device] * margin, side="left")
        cost, cut = _close(opening, first)
        cost += ahead[:, device]
        cuts.append(cut)
        if np.isfinite(cost[num_items]):
            found.append(_parts(cuts))
    return found


def _close(
    opening: NDArray[np.float64], first: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns the least of opening[first[end] : end] and where it is, for every end, [unit + 1].

    Neither end of that window moves back, so a queue of what may still be the least is enough.
    """
    values = opening.tolist()
    cut = np.zeros(len(opening), np.int64)
    is_open = first < np.arange(len(opening))
    queue: deque[int] = deque()  # positions; their values rise
    for end, begin in enumerate(first.tolist()):
        if end:
            while queue and values[queue[-1]] > values[end - 1]:
                queue.pop()
            queue.append(end - 1)
        while queue and queue[0] < begin:
            queue.popleft()
        if queue:
            cut[end] = queue[0]
    return np.where(is_open, opening[cut], np.inf), cut


def _parts(cuts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Follows the cuts back from the end and returns the part of each item, [item]."""
    parts = np.zeros(len(cuts[0]) - 1, np.int64)
    end = len(parts)
    for part in range(len(cuts) - 1, -1, -1):
        begin = int(cuts[part][end])
        parts[begin:end] = part
        end = begin
    return parts


def _placed(
    space: PlacementSpace, order: Sequence[int], parts: NDArray[np.int64]
) -> NDArray[np.int32]:
    placement = np.zeros(space.num_units, np.int32)
    placement[space.order] = np.array(order, np.int32)[parts]
    return space.repair(placement)
