"""fp32 matrix products on TF32 tensor cores, where a source's software turns them on.

PyTorch leaves them off for products (``cuda.matmul.allow_tf32``), and so do the profiles; NVIDIA's
PyTorch containers turn them on (``TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1``, their release notes). The
profiles have curves for them: fitted where such products were measured, else those of 16 bits at
half the peak and twice the bytes.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from simcore.cost import CostTable, cost_table
from simcore.graph import OpClass, OpGraph
from simcore.job import Job

_PRODUCTS = (OpClass.MATMUL, OpClass.BATCHED_MATMUL)


def with_tf32(
    cost: CostTable, graph: OpGraph, job: Job, batches: Sequence[int | None]
) -> CostTable:
    """Returns costs in which fp32 products run on TF32 tensor cores, where a GPU has them.

    Args:
        cost: of the ops of a graph.
        graph: the graph.
        job: as for `cost_table`.
        batches: likewise.
    """
    short = replace(
        graph,
        signatures=tuple(
            msgspec.structs.replace(each, dtype="tf32") if each.dtype == "fp32" else each
            for each in graph.signatures
        ),
    )
    faster = cost_table(short, job, cost.kinds, batches).seconds
    products = np.isin(graph.op_class, _PRODUCTS)[:, None, None]
    return replace(cost, seconds=np.where(products, np.minimum(faster, cost.seconds), cost.seconds))
