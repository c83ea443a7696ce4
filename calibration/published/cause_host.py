"""How long ops take where the host that launches them is slower than the device."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simcore.cost import CostTable
from simcore.graph import OpGraph
from simcore.shards import OneDevice
from simcore.signature import Phase


def with_host(cost: CostTable, device: OneDevice, floor: float, *, runs_ahead: bool) -> CostTable:
    """Returns costs in which nothing is faster than the host.

    Args:
        cost: of the ops of one device, without collectives.
        device: what it does.
        floor: the host's seconds of an op, and of a collective.
        runs_ahead: whether the host launches without waiting: then a layer, forward or backward,
            takes what the device or what the host needs for it; else that holds of each op.
    """
    return _ahead(cost, device, floor) if runs_ahead else _each(cost, device, floor)


def _each(cost: CostTable, device: OneDevice, floor: float) -> CostTable:
    """Returns costs in which no op of forward or backward takes less than the host's time for it.

    The host's time for a collective is in the op before it: the collective itself takes what its
    curve says.
    """
    update = device.graph.phase == Phase.U
    waits = (cost.launch > 0) & ~update[:, None]
    seconds = np.where(waits[:, :, None], np.maximum(cost.seconds, floor), cost.seconds)
    before = np.array([op - 1 for op in device.communication if not update[op]], np.int64)
    np.add.at(seconds, before, floor)
    return replace(cost, seconds=seconds)


def _ahead(cost: CostTable, device: OneDevice, floor: float) -> CostTable:
    """Returns costs in which what a layer's ops lack of the host's time is spread over them."""
    graph = device.graph
    group = _groups(graph)
    launched = cost.launch > 0  # [op, kind]
    communicates = np.zeros(graph.num_ops, bool)
    communicates[list(device.communication)] = True
    shape = (int(group.max()) + 1, *cost.seconds.shape[1:])
    busy, ops, calls = np.zeros(shape), np.zeros(shape[:2]), np.zeros(shape[0])
    np.add.at(busy, group, cost.seconds)
    np.add.at(ops, group, launched)
    np.add.at(calls, group, communicates)
    lack = np.maximum(floor * (ops + calls[:, None])[:, :, None] - busy, 0.0)
    share = lack / np.maximum(ops, 1)[:, :, None]
    waits = launched & (graph.phase != Phase.U)[:, None]
    seconds = cost.seconds + np.where(waits[:, :, None], share[group], 0.0)
    return replace(cost, seconds=seconds)


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
