"""What every op costs for each pair of loops that it may split along the axes of a mesh.

Ops of one signature that split alike cost alike: they are costed once, through `cost_table`.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.cost import cost_table
from simcore.graph import GraphBuilder, OpClass, OpGraph, Phase
from simcore.job import Job
from simcore.kernel import VARIANT, Records, make_records
from simcore.kernel.shard_records import AXES
from simcore.mesh import DATA, Mesh
from simcore.plan import Buckets, Settings
from simcore.sharding.affine import at
from simcore.sharding.groups import BATCH, Linkage
from simcore.sharding.shares import Split, local_signature, scaled, traffic_ratio
from simcore.sizes import sizes_at

_Key = tuple[object, ...]


class Lowering(NamedTuple):
    """What is lowered: as in `simcore.shard_space.ShardSpace`."""

    graph: OpGraph
    cluster: Cluster
    job: Job
    places: tuple[int, ...]  # device indices, in the order of the mesh
    mesh: Mesh
    settings: Settings
    buckets: Buckets
    batch: int  # samples of one copy

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along axes 0 and 1; 1 where there is none."""
        sizes = tuple(
            size
            for name, size in zip(self.mesh.names, self.mesh.sizes, strict=True)
            if name != DATA
        )
        return (*sizes, *(1,) * (AXES - len(sizes)))

    @property
    def samples(self) -> tuple[int, ...]:
        """Devices that share the samples of a copy, [sample]."""
        return (1, *self.sizes)


def variant_costs(
    space: Lowering, linkage: Linkage, order: Sequence[Sequence[int]]
) -> tuple[Records, NDArray[np.int64]]:
    """Returns the costs and where those of each op begin.

    Args:
        space: what is lowered.
        linkage: the groups of the graph.
        order: atomic loops that an op may split, [op].

    Returns:
        (VARIANT [sample, variant], [op + 1]): with n loops an op has (n + 1) ** 2 variants, by the
        loop along axis 0, then along axis 1, 0 = none.
    """
    graph = space.graph
    known: dict[_Key, int] = {}
    of_op = np.array([
        known.setdefault(_class_key(graph, linkage, op, order[op]), op)
        for op in range(graph.num_ops)
    ], np.int64)  # fmt: skip
    counts = np.array([(len(numbers) + 1) ** 2 for numbers in order], np.int64)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    variants = make_records((len(space.samples), int(first[-1])), VARIANT)
    leaders = sorted(set(of_op.tolist()))
    for sample, devices in enumerate(space.samples):
        if space.batch % devices == 0 and (sample == 0 or devices > 1):
            _cost_sample(space, linkage, order, leaders, (sample, first, variants))
    for op, leader in enumerate(of_op.tolist()):
        if leader != op:
            begin, end = first[leader], first[leader + 1]
            variants[:, first[op] : first[op + 1]] = variants[:, begin:end]
    return variants, first


def _class_key(graph: OpGraph, linkage: Linkage, op: int, numbers: Sequence[int]) -> _Key:
    """Returns what ops have in common whose variants cost the same."""
    known = graph.loops_of(op)
    accesses = known.accesses if known is not None else ()
    batch = [linkage.groups[linkage.loop_group[op][number]].name == BATCH for number in numbers]
    loops = [linkage.factors.loops[op][number] for number in numbers]
    return (
        int(graph.signature[op]),
        graph.op_targets[op],
        int(graph.phase[op]),
        int(graph.op_class[op]),
        int(graph.elements[op]),
        tuple(graph.workspace[op].tolist()),
        tuple(graph.resident[op].tolist()),
        tuple((loop.dim, loop.factor, at(loop.most, graph.batch or 1)) for loop in loops),
        tuple(batch),
        tuple((access.itemsize, access.is_output, access.dims) for access in accesses),
    )


def _cost_sample(
    space: Lowering,
    linkage: Linkage,
    order: Sequence[Sequence[int]],
    leaders: Sequence[int],
    into: tuple[int, NDArray[np.int64], Records],
) -> None:
    """Writes the costs of all variants of some ops, where an axis splits the samples."""
    sample, first, variants = into
    graph, devices = space.graph, space.samples[sample]
    batch = space.batch // devices
    builder = GraphBuilder(graph.name, batch=batch)
    rows: list[int] = []
    for op in leaders:
        is_batch = _splits_batch(linkage, op, order[op])
        choices = [None, *range(len(order[op]))]
        for place in range(len(choices) ** 2):
            pair = [choices[index] for index in divmod(place, len(choices))]
            if not _possible(space, linkage, op, (order[op], is_batch), (sample, pair)):
                continue
            splits = [
                (order[op][index], size)
                for index, size in zip(pair, space.sizes, strict=True)
                if index is not None
            ]
            _add_variant(builder, graph, linkage, op, splits, devices)
            rows.append(int(first[op]) + place)
    if not rows:
        return
    local = builder.build()
    kind = space.cluster.devices[space.places[0]].kind
    cost, sized = cost_table(local, space.job, (kind,), (batch,)), sizes_at(local, space.job, batch)
    variants["seconds"][sample, rows] = cost.seconds[:, 0, 0]
    variants["workspace"][sample, rows] = sized.workspace
    state = local.elements * space.job.state_bytes_per_element()
    variants["resident"][sample, rows] = sized.resident + state


def _splits_batch(linkage: Linkage, op: int, numbers: Sequence[int]) -> list[bool]:
    return [linkage.groups[linkage.loop_group[op][number]].name == BATCH for number in numbers]


def _possible(
    space: Lowering,
    linkage: Linkage,
    op: int,
    loops: tuple[Sequence[int], Sequence[bool]],
    choice: tuple[int, Sequence[int | None]],
) -> bool:
    """Whether an op can split two loops so, where the samples are split as `choice` says."""
    (numbers, is_batch), (sample, pair) = loops, choice
    if pair[0] is not None and pair[0] == pair[1]:
        return False
    for axis, index in enumerate(pair):
        if index is None:
            continue
        most = at(linkage.factors.loops[op][numbers[index]].most, space.graph.batch or 1)
        if space.sizes[axis] == 1 or most % space.sizes[axis]:
            return False
        if is_batch[index] and sample != 1 + axis:
            return False
    return True


def _add_variant(
    builder: GraphBuilder,
    graph: OpGraph,
    linkage: Linkage,
    op: int,
    splits: Sequence[Split],
    devices: int,
) -> None:
    """Adds one op as one device does it, as `simcore.sharding.local` writes it."""
    known = graph.loops_of(op)
    loops, number = linkage.factors.loops[op], int(graph.signature[op])
    gathers = bool(graph.op_class[op] == OpClass.EMBEDDING)
    ratio = traffic_ratio(known, loops, splits, graph.batch or 1, gathers=gathers)
    signature = graph.signatures[number] if number >= 0 else None
    local = None if signature is None else local_signature(signature, loops, splits, ratio, devices)
    builder.op(
        f"{builder.num_ops}",
        target=graph.op_targets[op],
        phase=Phase(int(graph.phase[op])),
        op_class=OpClass(int(graph.op_class[op])),
        signature=local,
        workspace=_share(graph.workspace[op], ratio, devices),
        resident=_share(graph.resident[op], ratio, devices),
        elements=-(-int(graph.elements[op]) // prod(size for _, size in splits)),
    )


def _share(pair: NDArray[np.int64], ratio: Fraction, devices: int) -> tuple[int, int]:
    constant, slope = pair.tolist()
    return scaled((constant, slope), ratio, devices)
