"""Which GPUs a model may be shared out over, and what no equal shares over them beat.

All GPUs that can run the whole model; where there are several kinds, those of each kind; those of
one server; and where a batch does not divide by the number of a set, the fastest 2, 4, 8 ... of it.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.automap.planner import device_sets
from simcore.bounds import ROUNDING
from simcore.cost import cost_table
from simcore.lower import Problem

_MOST = 1024  # parts of the samples


class ShardSet(NamedTuple):
    """Some GPUs.

    Attributes:
        names: in the order of the cluster.
        is_uniform: whether they are of one kind.
        floor: s that no plan of equal shares over them beats, if no part of an op is faster than
            its share of the op at the batch at which that is fastest.
    """

    names: tuple[str, ...]
    is_uniform: bool
    floor: float


def shard_sets(problem: Problem, devices: Sequence[int]) -> list[ShardSet]:
    """Returns the sets of at least two GPUs, that of the least floor first.

    Args:
        problem: the graph, the cluster and the job.
        devices: indices of devices that can run the whole model, in the order of the cluster.
    """
    cluster = problem.cluster
    kind = {cluster.devices[device].name: cluster.devices[device].kind for device in devices}
    work = {name: _least_work(problem, kind[name]) for name in kind}
    whole = device_sets(cluster, list(kind))
    gpus = whole[0] if whole else []
    kinds = dict.fromkeys(kind[name] for name in gpus)
    found = [*whole, *([name for name in gpus if kind[name] == each] for each in kinds)]
    found += [part for names in found for part in _divided(problem.job.batch, names, work)]
    unique = dict.fromkeys(tuple(names) for names in found if len(names) > 1)
    sets = [
        ShardSet(
            names=names,
            is_uniform=len({kind[name] for name in names}) == 1,
            floor=max(work[name] for name in names) / len(names) * (1.0 - ROUNDING),
        )
        for names in unique
    ]
    return sorted(sets, key=lambda each: each.floor)


def _divided(
    batch: int | None, names: Sequence[str], work: dict[str, float]
) -> Iterator[list[str]]:
    """Yields the fastest 2, 4, 8 ... of GPUs, most that there are, if a batch needs that."""
    if batch is not None and batch % max(1, len(names)):
        fastest = sorted(names, key=lambda name: work[name])[: 2 ** (len(names).bit_length() - 1)]
        yield [name for name in names if name in fastest]


@lru_cache(maxsize=32)
def _least_work(problem: Problem, kind: str) -> float:
    """Returns s that a device of a kind computes in a step, in the parts that are fastest."""
    graph, batch = problem.graph, problem.job.batch
    if graph.loops is None or batch is None:
        places = [k for k, each in enumerate(problem.cluster.devices) if each.kind == kind]
        return float(problem.seconds[:, places[0]].sum())
    parts = [n for n in range(1, min(batch, _MOST) + 1) if batch % n == 0]
    costs = cost_table(graph, problem.job, (kind,), tuple(batch // n for n in parts)).seconds[:, 0]
    least: NDArray[np.float64] = (costs * np.array(parts)).min(axis=1)
    return float(least.sum())
