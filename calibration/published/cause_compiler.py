"""Code that a compiler fused (XLA, TorchInductor): what lies between products moves less.

The costs of a graph are those of one kernel an op. A compiler puts ops that are no products, and
that follow one another, into one kernel: what only passes between them is neither written nor read,
what several of them read is read once, and one launch does. All else is as before; products,
convolutions, attention and batch norm stay calls of their libraries. Nothing here is fitted.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.cost import CostTable
from simcore.graph import OpClass, OpGraph

_FUSED = (
    OpClass.POINTWISE,
    OpClass.NORMALISATION,
    OpClass.SOFTMAX,
    OpClass.REDUCTION,
    OpClass.COPY,
)
_LIBRARY = "batch_norm"
NONE = -1


class Uses(NamedTuple):
    """Who reads what, views left out: a view stands for the tensor that it shows."""

    op: NDArray[np.int64]  # [use] no view
    tensor: NDArray[np.int64]  # [use] as it is read
    shown: NDArray[np.int64]  # [use] the tensor whose values these are


def with_compiler(cost: CostTable, graph: OpGraph, batches: Sequence[int | None]) -> CostTable:
    """Returns costs of fused code.

    Args:
        cost: of the ops of a graph.
        graph: the graph.
        batches: of its variants.
    """
    uses = uses_of(graph)
    group = fused_groups(graph, uses)
    seconds, launch = cost.seconds.copy(), cost.launch.copy()
    for variant, batch in enumerate(batches):
        share = shares(graph, uses, group, batch)
        seconds[:, :, variant] *= share[:, None]
    starts = np.unique(group, return_index=True)[1]
    later = (group != NONE) & ~np.isin(np.arange(graph.num_ops), starts)
    launch[later] = 0.0
    return replace(cost, seconds=seconds, launch=launch)


def uses_of(graph: OpGraph) -> Uses:
    """Returns who reads what."""
    shown = np.arange(graph.num_tensors)
    is_view = graph.op_class == OpClass.VIEW
    reader = np.repeat(np.arange(graph.num_ops), np.diff(graph.first_input))
    for op in np.flatnonzero(is_view):
        read = graph.inputs[graph.first_input[op] : graph.first_input[op + 1]]
        for made in range(graph.first_output[op], graph.first_output[op + 1]):
            same = read[graph.tensor_storage[read] == graph.tensor_storage[made]]
            if same.size:
                shown[made] = shown[same[0]]
    kept = ~is_view[reader]
    tensor = graph.inputs[kept].astype(np.int64)
    return Uses(reader[kept].astype(np.int64), tensor, shown[tensor])


def fused_groups(graph: OpGraph, uses: Uses) -> NDArray[np.int64]:
    """Returns the kernel that each op is part of, by its first op, [op]; NONE = one of its own.

    Ops are put together that follow one another in one phase, with no product on any way between
    them: then as many kernels come before both.
    """
    fused = np.isin(graph.op_class, _FUSED)
    fused &= np.array([_LIBRARY not in target for target in graph.op_targets])
    depth = np.zeros(graph.num_ops, np.int64)
    group = np.arange(graph.num_ops)
    producer = graph.tensor_producer[uses.shown].astype(np.int64)
    for op, maker in zip(uses.op.tolist(), producer.tolist(), strict=True):
        if maker >= 0:
            depth[op] = max(depth[op], depth[maker] + (not fused[maker]))
    for op, maker in zip(uses.op.tolist(), producer.tolist(), strict=True):
        both = maker >= 0 and fused[op] and fused[maker]
        if both and depth[op] == depth[maker] and graph.phase[op] == graph.phase[maker]:
            _unite(group, op, maker)
    group = np.array([_first(group, op) for op in range(graph.num_ops)], np.int64)
    return np.where(fused, group, NONE)


def shares(
    graph: OpGraph, uses: Uses, group: NDArray[np.int64], batch: int | None
) -> NDArray[np.float64]:
    """Returns the bytes that each op moves in fused code over those it moves alone, [op]."""
    sizes = graph.at_batch(batch).tensor_bytes
    producer = graph.tensor_producer.astype(np.int64)
    alone, together = np.zeros(graph.num_ops), np.zeros(graph.num_ops)
    entering: dict[tuple[int, int], int] = defaultdict(int)
    leaving = np.ones(graph.num_tensors, np.bool_)
    outside = np.zeros(graph.num_tensors, np.bool_)
    for op, tensor, shown in zip(*(part.tolist() for part in uses), strict=True):
        inside = producer[shown] >= 0 and group[producer[shown]] == group[op] != NONE
        outside[shown] |= not inside
        leaving[shown] = outside[shown]
        if group[op] != NONE:
            alone[group[op]] += sizes[tensor]
            if not inside:
                place = (int(group[op]), shown)
                entering[place] = max(entering[place], int(sizes[tensor]))
    for (first, _), size in entering.items():
        together[first] += size
    made = np.flatnonzero((producer >= 0) & (group[producer] != NONE))
    np.add.at(alone, group[producer[made]], sizes[made])
    np.add.at(together, group[producer[made]], np.where(leaving[made], sizes[made], 0))
    share = np.divide(together, alone, out=np.ones(graph.num_ops), where=alone > 0)
    return np.where(group != NONE, share[group], 1.0)


def _unite(group: NDArray[np.int64], a: int, b: int) -> None:
    first, second = _first(group, a), _first(group, b)
    group[max(first, second)] = min(first, second)


def _first(group: NDArray[np.int64], op: int) -> int:
    while group[op] != op:
        op = int(group[op])
    return op
