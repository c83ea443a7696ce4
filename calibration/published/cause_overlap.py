"""Collectives of tensor and sequence parallelism beside products, as in Megatron since 3.0.

Korthikanti et al. (2022, arXiv:2205.05198, 4.2.2): what the backward of a product gathers again is
gathered beside the gradient of its input. Megatron-LM's linear layers do likewise with the sum of
that gradient, beside the gradient of the weights, and sum the gradients of what tensor-parallel
devices share (norms, biases after a sum) once a step, not once a microbatch. The simulator runs the
ops of one device one after the other, so what is hidden is taken off the product.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simcore.cost import CostTable
from simcore.shards import OneDevice
from simcore.signature import Phase

_INPUT = ".addmm.backward.mm"  # the gradient of a product's input; that of its weights has ".1"
_GATHER = " all-gather"
_SHARED = (
    ".addmm.backward.sum:0 all-reduce",
    ".native_layer_norm.backward:1 all-reduce",
    ".native_layer_norm.backward:2 all-reduce",
)  # of parameters that tensor-parallel devices share


def with_overlap(cost: CostTable, device: OneDevice, collectives: NDArray[np.float64]) -> CostTable:
    """Returns costs in which products hide the collectives that run beside them.

    Args:
        cost: of the ops of one device, without collectives.
        device: what it does, of `simcore.models.megatron`.
        collectives: s, of collectives on an idle network, [op, kind, batch].
    """
    graph = device.graph
    seconds = cost.seconds.copy()
    place = {name: op for op, name in enumerate(graph.op_names)}
    inputs = weight = -1
    for op, name in enumerate(graph.op_names):
        if name.endswith(_INPUT):
            inputs, weight = op, place[f"{name}.1"]
        if op not in device.communication or graph.phase[op] != Phase.B or inputs < 0:
            continue
        if inputs < op < weight:
            beside = inputs if _GATHER in name else weight
        elif name.endswith(_SHARED):
            beside = weight
        else:
            continue
        seconds[beside] -= np.minimum(collectives[op], seconds[beside])
    return replace(cost, seconds=seconds)
