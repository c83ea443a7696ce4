"""How long ops take where the host that launches them is slower than the device."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.cost import CostTable
from simcore.graph import OpGraph
from simcore.shards import OneDevice
from simcore.signature import Phase


class Host(NamedTuple):
    """What launches ops.

    Attributes:
        floor: its seconds of an op, and of a collective.
        runs_ahead: whether it launches without waiting: then a layer, forward or backward, takes
            what the device or what the host needs for it; else that holds of each op.
        blocks: whether it launches an op only when the one before has ended.
        traces: whether what it launches was traced on one device without collectives, which come
            on top; else it runs on while they do.
        gap: s on the device from a kernel's end to the next one's start, beyond what ops show.
    """

    floor: float
    runs_ahead: bool = False
    blocks: bool = False
    traces: bool = False
    gap: float = 0.0


def with_host(
    cost: CostTable,
    device: OneDevice,
    host: Host,
    kernels: NDArray[np.int64],
    collectives: NDArray[np.float64],
) -> CostTable:
    """Returns costs in which nothing is faster than the host.

    Args:
        cost: of the ops of one device, without collectives.
        device: what it does.
        host: launches the ops.
        kernels: that each op launches, if it launches any, [op].
        collectives: s, of collectives on an idle network, [op, kind, batch].
    """
    if host.runs_ahead:
        return _ahead(cost, device, host, kernels, collectives)
    return _each(cost, device, host, kernels)


def _each(cost: CostTable, device: OneDevice, host: Host, kernels: NDArray[np.int64]) -> CostTable:
    """Returns costs in which no op of forward or backward takes less than the host's time for it.

    A host that blocks takes that time before each kernel. The host's time for a collective is in
    the op before it: the collective itself takes what its curve says.
    """
    update = device.graph.phase == Phase.U
    waits = (cost.launch > 0) & ~update[:, None]
    least = host.floor * kernels[:, None, None]
    slow = cost.seconds + least if host.blocks else np.maximum(cost.seconds, host.floor)
    seconds = np.where(waits[:, :, None], slow, cost.seconds)
    before = np.array([op - 1 for op in device.communication if not update[op]], np.int64)
    np.add.at(seconds, before, host.floor)
    return replace(cost, seconds=seconds)


def _ahead(
    cost: CostTable,
    device: OneDevice,
    host: Host,
    kernels: NDArray[np.int64],
    collectives: NDArray[np.float64],
) -> CostTable:
    """Returns costs in which what a layer's ops lack of the host's time is spread over them."""
    graph = device.graph
    group = _groups(graph)
    trains = graph.phase != Phase.U
    launches = (cost.launch > 0) & trains[:, None]  # [op, kind]
    calls = np.zeros(graph.num_ops, bool)
    if not host.traces:
        calls[list(device.communication)] = True
        calls &= trains
    shared = np.where(calls[:, None, None], collectives, 0.0)
    count = launches * kernels[:, None]
    seconds = cost.seconds + host.gap * count[:, :, None]
    shape = (int(group.max()) + 1, *seconds.shape[1:])
    busy, needed, ops = np.zeros(shape), np.zeros(shape[:2]), np.zeros(shape[:2])
    np.add.at(busy, group, seconds + shared)
    np.add.at(needed, group, host.floor * (count + calls[:, None]))
    np.add.at(ops, group, launches)
    share = np.maximum(needed[:, :, None] - busy, 0.0) / np.maximum(ops, 1)[:, :, None]
    return replace(cost, seconds=seconds + np.where(launches[:, :, None], share[group], 0.0))


def _groups(graph: OpGraph) -> NDArray[np.int64]:
    """Returns the group of each op, [op]: a layer or another module, in one phase."""
    numbers: dict[tuple[str, int], int] = {}
    found = []
    for name, phase in zip(graph.op_names, graph.phase.tolist(), strict=True):
        parts = name.split(".")
        module = (
            ".".join(parts[:2])
            if parts[0] == "layers"
            else "before"
            if (parts[0] in ("embedding", "input"))
            else "after"
        )
        found.append(numbers.setdefault((module, phase), len(numbers)))
    return np.array(found, np.int64)
