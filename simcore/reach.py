"""Which placement units a tensor has to reach, as arrays for the kernel."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.graph import OpGraph


class Readers(NamedTuple):
    """For each tensor, the first op of every other unit that reads it."""

    first: NDArray[np.int64]  # [tensor + 1] offsets into ops
    ops: NDArray[np.int64]  # [...] ascending within a tensor


def unit_leaders(graph: OpGraph) -> NDArray[np.int64]:
    """Returns the first op of each unit, [unit]."""
    return np.unique(graph.unit, return_index=True)[1].astype(np.int64)


def other_units_readers(graph: OpGraph) -> Readers:
    """Returns who waits for a tensor that has to travel.

    In program order only the first reader of a unit does: the others follow it on its device.
    """
    tensor = np.repeat(np.arange(graph.num_tensors), np.diff(graph.first_consumer))
    op = graph.consumers.astype(np.int64)
    producer = graph.tensor_producer[tensor]
    kept = (producer >= 0) & (graph.unit[producer] != graph.unit[op])
    tensor, op = tensor[kept], op[kept]
    _, start = np.unique(tensor * max(graph.num_units, 1) + graph.unit[op], return_index=True)
    start.sort()  # uses are by tensor, then op
    first = np.searchsorted(tensor[start], np.arange(graph.num_tensors + 1)).astype(np.int64)
    return Readers(first, op[start])
