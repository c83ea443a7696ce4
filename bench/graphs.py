"""Graphs to measure with."""

import numpy as np

from simcore import OpGraph


def layered_dag(num_ops: int, seed: int = 0) -> OpGraph:
    """Returns the random DAG that public placement simulators were measured on.

    Op i reads 2 distinct outputs among those of the 8 ops before it; an op takes 10 to 500 us, its
    output has 1 kB to 4 MB (both uniform).
    """
    rng = np.random.default_rng(seed)
    seconds = [(f"op{op}", float(rng.uniform(10e-6, 500e-6))) for op in range(num_ops)]
    num_bytes = rng.integers(1_000, 4_000_000, num_ops)
    edges = []
    for op in range(1, num_ops):
        before = np.arange(max(0, op - 8), op)
        sources = rng.choice(before, size=min(2, len(before)), replace=False)
        edges += [(f"op{source}", f"op{op}", int(num_bytes[source])) for source in sources]
    return OpGraph.from_edges(seconds, edges, name=f"layered-{num_ops}")


def random_placements(num_plans: int, num_ops: int, devices: np.ndarray, seed: int) -> np.ndarray:
    """Returns uniformly random placements, int32 [plan, op], over the given device indices."""
    rng = np.random.default_rng(seed)
    return rng.choice(devices, size=(num_plans, num_ops)).astype(np.int32)


def count_events(graph: OpGraph, placements: np.ndarray) -> float:
    """Returns the mean number of compute ends and transfer ends of a placement."""
    producers, consumers, tensors = graph.edges()
    total = 0
    for placement in placements:
        remote = placement[producers] != placement[consumers]
        pairs = tensors[remote].astype(np.int64) * 4096 + placement[consumers[remote]]
        total += graph.num_ops + len(np.unique(pairs))
    return total / len(placements)
