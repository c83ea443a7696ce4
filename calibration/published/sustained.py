"""Matrix products under a power limit: what a GPU keeps up for hours, beside short measurements.

Op measurements run for milliseconds at full clocks. A long run of large 16-bit products reaches the
board's power limit, and the clock falls until it does not: an A100 of 400 W and an H100 of 700 W
cannot keep what their tensor cores do at first. The rates are residual factors of llm-foundry's
runs, from the contrast of its MPT-7b with MPT-1b and MPT-760m: what the large products take more.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from simcore.cost import CostTable
from simcore.graph import OpClass, OpGraph
from simcore.units import TERA

MOST = {  # device kind -> FLOP/s of 16-bit products
    "A100-SXM4-40GB": 225 * TERA,
    "A100-SXM4-80GB": 225 * TERA,
    "H100-SXM5-80GB": 500 * TERA,
}


def with_power_limit(cost: CostTable, graph: OpGraph, batches: Sequence[int | None]) -> CostTable:
    """Returns costs in which no 16-bit product is faster than its device keeps up.

    Args:
        cost: of the ops of a graph.
        graph: the graph.
        batches: of its variants.
    """
    seconds = cost.seconds.copy()
    products = graph.op_class == OpClass.MATMUL
    short = np.array([each.dtype in ("fp16", "bf16") for each in graph.signatures] + [False])
    limited = np.flatnonzero(products & short[graph.signature])
    for variant, batch in enumerate(batches):
        flops = np.array([each.flops(batch or 1) for each in graph.signatures])
        work = flops[graph.signature[limited]]
        for kind, name in enumerate(cost.kinds):
            least = work / MOST[name] if name in MOST else 0.0
            seconds[limited, kind, variant] = np.maximum(seconds[limited, kind, variant], least)
    return replace(cost, seconds=seconds)
