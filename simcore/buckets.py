"""Gradients put together for the sums between copies of a model, as torch's DDP does."""

import numpy as np
from numpy.typing import NDArray

from simcore.graph import OpClass, OpGraph, Role
from simcore.plan import DEFAULT_BUCKETS, Buckets

FIRST_BUCKET = 2**20  # bytes; torch's DistributedDataParallel closes the first bucket early


def fill_buckets(
    graph: OpGraph, sizes: NDArray[np.int64], buckets: Buckets
) -> list[NDArray[np.int64]]:
    """Returns the gradients of each bucket, tensor ids in the order in which they are made.

    Args:
        graph: the graph.
        sizes: bytes of each tensor, [tensor].
        buckets: how large they are.
    """
    return close_buckets(gradients_of(graph), sizes, buckets)


def gradients_of(graph: OpGraph) -> NDArray[np.int64]:
    """Returns the gradients that updates read, tensor ids in the order in which they are made."""
    update = np.flatnonzero(graph.op_class == OpClass.UPDATE)
    read = [graph.inputs[graph.first_input[op] : graph.first_input[op + 1]] for op in update]
    tensors = np.unique(np.concatenate([np.zeros(0, np.int32), *read]))
    gradients = tensors[graph.tensor_role[tensors] == Role.GRADIENT]
    order = np.argsort(graph.tensor_producer[gradients], kind="stable")
    ready: NDArray[np.int64] = gradients[order].astype(np.int64)
    return ready


def close_buckets(
    ready: NDArray[np.int64], sizes: NDArray[np.int64], buckets: Buckets
) -> list[NDArray[np.int64]]:
    """Divides gradients into buckets as torch's DistributedDataParallel does after its first step.

    A bucket is closed by the gradient that fills it, the first at 1 MiB unless a size is given.

    Args:
        ready: tensor ids in the order in which they are made.
        sizes: bytes of each tensor, [tensor].
        buckets: how large they are.
    """
    found: list[NDArray[np.int64]] = []
    limit = FIRST_BUCKET if buckets.num_bytes == DEFAULT_BUCKETS.num_bytes else buckets.num_bytes
    begin, filled = 0, 0
    for end, gradient in enumerate(ready.tolist(), start=1):
        filled += int(sizes[gradient])
        if end == len(ready) or (limit and filled >= limit):
            found.append(ready[begin:end])
            begin, filled, limit = end, 0, buckets.num_bytes
    return found
