"""Device limits, slow-down factors and collectives, as arrays for the kernel."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.errors import PlanError
from simcore.graph import OpClass, OpGraph
from simcore.kernel import COLLECTIVE, LIMIT, LOAD, NONE, SLOW, Records, make_records
from simcore.profile import Limits

if TYPE_CHECKING:
    from simcore.collectives import Collective


class NetworkTables(NamedTuple):
    """The part of the kernel's tables that is about communication."""

    bandwidth: NDArray[np.float64]  # [channel] B/s
    limits: Records  # LIMIT [dev]
    slow: Records  # SLOW [class, dev]
    collectives: Records  # COLLECTIVE [collective + 1], by op
    loads: Records  # LOAD [load], by channel within a collective
    members: NDArray[np.int64]  # [...] devices of collectives
    plan_order: NDArray[np.int64]  # [collective] collectives by last producer, then op
    last_producer: NDArray[np.int64]  # [collective] op, NONE = it waits for nothing


def network_tables(
    graph: OpGraph,
    cluster: Cluster,
    limits: Sequence[Limits],
    collectives: "Mapping[int, Collective]",
) -> NetworkTables:
    """Returns the arrays.

    Args:
        graph: the graph.
        cluster: the cluster.
        limits: what each device does at once, [dev].
        collectives: what each op of class ``COLLECTIVE`` does, by op.

    Raises:
        PlanError: an op of that class without a collective, or a collective for another op.
    """
    ops = np.flatnonzero(graph.op_class == OpClass.COLLECTIVE)
    if set(ops.tolist()) != set(collectives):
        odd = min(set(ops.tolist()) ^ set(collectives))
        name = graph.op_names[odd] if 0 <= odd < graph.num_ops else f"number {odd}"
        lacks = "has no collective" if odd in ops else "is not a collective op"
        raise PlanError(f"{graph.name}: op {name!r} {lacks}")
    given = [collectives[op] for op in ops.tolist()]
    last = np.array([_last_producer(graph, op) for op in ops.tolist()], np.int64)
    records = make_records(len(ops) + 1, COLLECTIVE)
    records["op"][:-1] = ops
    for key in ("latency", "duration", "volume"):
        records[key][:-1] = [getattr(collective, key) for collective in given]
    records["duration"][records["volume"] == 0.0] = 0.0  # nothing moves
    records["first_load"] = np.cumsum([0, *(len(c.channels) for c in given)])
    records["first_member"] = np.cumsum([0, *(len(c.members) for c in given)])
    loads = make_records(int(records["first_load"][-1]), LOAD)
    loads["channel"] = np.concatenate([np.zeros(0, np.int64), *(c.channels for c in given)])
    loads["usage"] = np.concatenate([np.zeros(0), *(c.usage for c in given)])
    return NetworkTables(
        bandwidth=np.array([channel.bandwidth for channel in cluster.channels], np.float64),
        limits=_limits(limits),
        slow=_slow(limits),
        collectives=records,
        loads=loads,
        members=np.array([device for c in given for device in c.members], np.int64),
        plan_order=np.lexsort((ops, last)).astype(np.int64),
        last_producer=last,
    )


def _last_producer(graph: OpGraph, op: int) -> int:
    tensors = graph.inputs[graph.first_input[op] : graph.first_input[op + 1]]
    return int(graph.tensor_producer[tensors].max(initial=NONE))


def _limits(limits: Sequence[Limits]) -> Records:
    records = make_records(len(limits), LIMIT)
    for key in LIMIT.names or ():
        records[key] = [getattr(limit, key) for limit in limits]
    return records


def _slow(limits: Sequence[Limits]) -> Records:
    """Returns how many times longer the ops of a class take beside communication, [class, dev]."""
    records = make_records((len(OpClass), len(limits)), SLOW)
    for device, limit in enumerate(limits):
        records["beside_copy"][:, device] = limit.compute_beside_copy
        records["beside_collective"][:, device] = limit.compute_beside_collective
    return records
