"""A plan spelled out: every op of every copy on its device, and the collectives between them.

What runs is again an `OpGraph`, so that whatever is known of one (memory, traces, critical path)
holds for the other. Axes: op, dev as in `OpGraph`; base (an op of the plan's graph).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from simcore.buckets import fill_buckets
from simcore.cluster import Cluster
from simcore.collectives import Collective, make_collective
from simcore.cost import CostTable
from simcore.errors import PlanError
from simcore.graph import FixedCosts, OpClass, OpGraph, Phase, Role
from simcore.mesh import ALONE, DATA, DATA_AXIS, Mesh
from simcore.op_curves import CostSource
from simcore.plan import DEFAULT_BUCKETS, Buckets

NOWHERE = -1  # the device of a collective, and the base op of what has none
_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """What a plan runs."""

    graph: OpGraph
    placement: NDArray[np.int32]  # [op] device, NOWHERE = a collective
    base: NDArray[np.int32]  # [op] op of the plan's graph, NOWHERE = a sum of gradients
    collectives: Mapping[int, Collective]  # by op
    cost: CostTable
    # class -> bytes that ops hold for the whole step, where the graph does not say
    held: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)  # [op] bytes

    def priorities(self, of_base: Sequence[int]) -> list[int]:
        """Returns the priority of every op, given those of the plan's graph; none if none are."""
        if not len(of_base):
            return []
        return [0 if base == NOWHERE else of_base[base] for base in self.base.tolist()]


class Sharded(NamedTuple):
    """How the copies of a model are shared out themselves.

    Attributes:
        mesh: of the devices; copies are its axis ``dp``.
        communication: of the COLLECTIVE ops of the graph: (kind, axis of the mesh, bytes).
    """

    mesh: Mesh
    communication: Mapping[int, tuple[str, int, int]]


def copy_program(
    graph: OpGraph,
    cluster: Cluster,
    devices: Sequence[int],
    cost: CostTable,
    buckets: Buckets = DEFAULT_BUCKETS,
    sharded: Sharded | None = None,
) -> Program:
    """Returns copies of a training step, one a device, whose gradients are summed on the way.

    Bucket after bucket is summed by an all-reduce, each after the one before it (they share one
    communicator), while the backward goes on; an update waits for the bucket of its gradient. Where
    several devices share a copy, each does the ops of one shard, and the sums of gradients are
    between the same shards of all copies.

    Args:
        graph: one copy, or what one device does of a shared one.
        cluster: the cluster.
        devices: device indices, in the order of the mesh.
        cost: what the ops of one device cost, at the batch of a copy.
        buckets: how gradients are put together.
        sharded: how copies are shared out; None = each copy is on one device.

    Raises:
        PlanError: no parameter is trained, a device comes twice, or two devices have no route.
    """
    if graph.num_ops and not (graph.op_class == OpClass.UPDATE).any():
        raise PlanError(
            f"{graph.name}: data parallel needs parameters that are trained; the graph updates none"
        )
    if sharded is None:
        sharded = Sharded(Mesh.of({DATA: len(devices)}), {})
    sizes = graph.at_batch(cost.batches[0]).tensor_bytes
    filled = fill_buckets(graph, sizes, buckets) if sharded.mesh.copies > 1 else []
    layout = _Layout(graph, sharded, filled)
    spelled = _spell_out(layout)
    held = {} if buckets.as_views else {"buckets": _bucket_bytes(layout, sizes)}
    for extra in held.values():
        spelled = replace(spelled, resident=spelled.resident + np.outer(extra, (1, 0)))
    placement = np.full(spelled.num_ops, NOWHERE, np.int32)
    computes = layout.copy != NOWHERE
    placement[computes] = np.array(devices, np.int32)[layout.copy[computes]]
    return Program(
        graph=spelled,
        placement=placement,
        base=layout.base,
        collectives=_collectives(layout, cluster, devices, sizes, buckets),
        cost=_costs(cost, layout),
        held=held,
    )


def _collectives(
    layout: "_Layout",
    cluster: Cluster,
    devices: Sequence[int],
    sizes: NDArray[np.int64],
    buckets: Buckets,
) -> dict[int, Collective]:
    """Returns the collectives of a program, by op, ascending."""
    mesh, found = layout.mesh, {}
    groups = {axis: mesh.members(axis).tolist() for axis in range(len(mesh.sizes))}
    for base, (kind, axis, num_bytes) in layout.communication.items():
        first = int(layout.op[base].min())
        for number, group in enumerate(groups[axis]):
            members = [devices[copy] for copy in group]
            found[first + number] = make_collective(kind, num_bytes, cluster, members)
    for bucket, reduces in zip(layout.buckets, layout.reduces.tolist(), strict=True):
        num_bytes = int(sizes[bucket].sum())
        for group, op in zip(groups[DATA_AXIS], reduces, strict=True):
            members = [devices[copy] for copy in group]
            found[op] = make_collective(
                "all_reduce", num_bytes, cluster, members, algorithm=buckets.algorithm
            )
    return dict(sorted(found.items()))


class _Layout:
    """Where the copies of ops and tensors are in the new graph.

    Ops stand by base op, then copy (a device of the mesh); a collective of the base graph stands
    there once for each group of its axis, and has the outputs of all members. The all-reduces of a
    bucket, one for each shard, stand behind the last op that makes a gradient of it. Their outputs
    are a token for the next one, and every copy of every gradient.
    """

    def __init__(self, graph: OpGraph, sharded: Sharded, buckets: list[NDArray[np.int64]]) -> None:
        self.graph, self.mesh, self.buckets = graph, sharded.mesh, buckets
        self.communication = sharded.communication
        mesh = sharded.mesh
        self.copies = mesh.num_devices
        self.axis = np.full(graph.num_ops, ALONE)  # [base]
        for base, (_, axis, _) in self.communication.items():
            self.axis[base] = axis
        axes = (ALONE, *range(len(mesh.sizes)))
        sizes, groups, ranks = (
            np.array([of(axis) for axis in axes]) for of in (mesh.size, mesh.group, mesh.rank)
        )
        members = sizes[self.axis + 1]  # [base]
        last = np.array([graph.tensor_producer[b].max() for b in buckets], np.int64)
        last = np.maximum.accumulate(last)
        number = np.arange(len(buckets))
        end = np.cumsum(self.copies // members)  # [base] ops up to and with a base op
        begin = end - self.copies // members
        self.reduces = (end[last] + number * mesh.shards)[:, None] + np.arange(mesh.shards)
        before = np.searchsorted(last, np.arange(graph.num_ops))  # buckets ahead of a base op
        first = begin + before * mesh.shards
        self.op = first[:, None] + groups[self.axis + 1]  # [base, copy] op
        num_ops = int(end[-1] if len(end) else 0) + self.reduces.size
        self.base = np.full(num_ops, NOWHERE, np.int32)
        self.base[self.op] = np.arange(graph.num_ops)[:, None]
        self.copy = np.full(num_ops, NOWHERE, np.int64)  # [op] NOWHERE = a collective
        alone = self.axis == ALONE
        self.copy[self.op[alone]] = np.arange(self.copies)
        outputs = np.zeros(num_ops, np.int64)
        outputs[self.op] = (np.diff(graph.first_output) * members)[:, None]
        outputs[self.reduces] = np.array([1 + len(b) * mesh.copies for b in buckets])[:, None]
        held = int(graph.first_output[0]) if graph.num_ops else graph.num_tensors
        self.first_output = held + np.concatenate([[0], np.cumsum(outputs)])
        self.num_held = held
        self._place_tensors(members, ranks)

    def _place_tensors(self, members: NDArray[np.int64], ranks: NDArray[np.int64]) -> None:
        """Numbers the tensors, given members of every base op and ranks by axis + 1 and copy."""
        graph, mesh, held = self.graph, self.mesh, self.num_held
        # [tensor, copy] tensor; parameters and buffers are one tensor for all copies
        self.tensor = np.repeat(np.arange(graph.num_tensors)[:, None], self.copies, axis=1)
        producer = graph.tensor_producer[held:]
        offset = np.arange(held, graph.num_tensors) - graph.first_output[producer]
        place = (offset * members[producer])[:, None] + ranks[self.axis[producer] + 1]
        self.tensor[held:] = self.first_output[self.op[producer]] + place
        self.reduced: NDArray[np.int64] = self.tensor.copy()  # [tensor, copy] after the sum
        shard, rank = mesh.group(DATA_AXIS), mesh.rank(DATA_AXIS)
        for bucket, reduces in zip(self.buckets, self.reduces, strict=True):
            places = np.arange(len(bucket))[:, None] * mesh.copies + rank
            self.reduced[bucket] = self.first_output[reduces[shard]] + 1 + places

    @property
    def num_tensors(self) -> int:
        """Number of tensors of the new graph."""
        return int(self.first_output[-1])


def _spell_out(layout: _Layout) -> OpGraph:
    """Returns the new graph."""
    graph, copies = layout.graph, layout.copies
    shared = layout.copy == NOWHERE
    unit = np.where(shared, graph.num_units * copies + np.arange(len(shared)), 0)
    unit[~shared] = graph.unit[layout.base[~shared]] * copies + layout.copy[~shared]
    first_input, inputs = _inputs(layout)
    tensors = _Tensors(layout)
    return OpGraph(
        name=f"{graph.name} x{copies}",
        op_names=_names(layout),
        op_modules=_texts(layout, graph.op_modules, ""),
        op_targets=_texts(layout, graph.op_targets, "all_reduce"),
        phase=_per_op(layout, graph.phase, Phase.B),
        op_class=_per_op(layout, graph.op_class, OpClass.COLLECTIVE),
        signature=_per_op(layout, graph.signature, NOWHERE),
        signatures=graph.signatures,
        unit=_numbered(unit),
        kernels=_per_op(layout, graph.kernels),
        sync=_per_op(layout, graph.sync),
        workspace=_per_op(layout, graph.workspace),
        resident=_per_op(layout, graph.resident),
        elements=_per_op(layout, graph.elements),
        first_input=first_input,
        inputs=inputs,
        first_output=layout.first_output,
        tensor_names=tensors.names,
        tensor_producer=tensors.producer,
        tensor_bytes=tensors.num_bytes,
        tensor_storage=tensors.storage,
        tensor_role=tensors.role,
        batch=graph.batch,
        fixed=_fixed(layout),
    )


def _per_op(layout: _Layout, values: NDArray[_T], of_reduce: int = 0) -> NDArray[_T]:
    """Returns what each op of the new graph has of its base op; a collective has its own value."""
    new = values[np.maximum(layout.base, 0)]
    new[layout.base == NOWHERE] = of_reduce
    return new


def _texts(layout: _Layout, texts: Sequence[str], of_reduce: str) -> tuple[str, ...]:
    return tuple(of_reduce if base == NOWHERE else texts[base] for base in layout.base.tolist())


def _fixed(layout: _Layout) -> FixedCosts | None:
    """Returns the measured seconds of the new graph."""
    fixed = layout.graph.fixed
    if fixed is None:
        return None
    on_cpu = fixed.cpu_seconds
    return replace(
        fixed,
        seconds=_per_op(layout, fixed.seconds),
        cpu_seconds=None if on_cpu is None else _per_op(layout, on_cpu),
    )


def _names(layout: _Layout) -> tuple[str, ...]:
    several = layout.mesh.shards > 1
    names = [""] * len(layout.base)
    for number, reduces in enumerate(layout.reduces.tolist()):
        for shard, op in enumerate(reduces):
            names[op] = f"all-reduce of bucket {number}" + f" (shard {shard})" * several
    of_base, copies = layout.graph.op_names, layout.copy.tolist()
    group = dict.fromkeys(layout.communication, 0)
    for op, base in enumerate(layout.base.tolist()):
        if copies[op] != NOWHERE:
            names[op] = f"{of_base[base]} (copy {copies[op]})"
        elif base != NOWHERE:
            names[op] = f"{of_base[base]} (group {group[base]})"
            group[base] += 1
    return tuple(names)


def _inputs(layout: _Layout) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Returns what every op reads: (offsets by op, tensors, ascending within an op)."""
    graph = layout.graph
    base = np.repeat(np.arange(graph.num_ops), np.diff(graph.first_input))
    updates = (graph.op_class[base] == OpClass.UPDATE)[:, None]
    tensor = np.where(updates, layout.reduced[graph.inputs], layout.tensor[graph.inputs])
    op = layout.op[base]
    ops, tensors = [op.ravel()], [tensor.ravel()]
    members = layout.mesh.members(DATA_AXIS)
    for number, (bucket, reduces) in enumerate(zip(layout.buckets, layout.reduces, strict=True)):
        for shard, reduce in enumerate(reduces):
            read = layout.tensor[bucket][:, members[shard]].ravel()
            if number:
                read = np.append(read, layout.first_output[layout.reduces[number - 1, shard]])
            ops.append(np.full(len(read), reduce))
            tensors.append(read)
    op, tensor = np.concatenate(ops), np.concatenate(tensors)
    pairs = np.unique(op.astype(np.int64) * (layout.num_tensors + 1) + tensor)
    op, tensor = np.divmod(pairs, layout.num_tensors + 1)
    first = np.searchsorted(op, np.arange(len(layout.base) + 1)).astype(np.int64)
    return first, tensor.astype(np.int32)


class _Tensors:
    """The tensors of the new graph, as arrays of `OpGraph`."""

    def __init__(self, layout: _Layout) -> None:
        graph, copies, held = layout.graph, layout.copies, layout.num_held
        count = layout.num_tensors
        base = np.zeros(count, np.int64)  # tensor of one copy
        copy = np.zeros(count, np.int64)
        is_token = np.zeros(count, np.bool_)
        is_token[layout.first_output[layout.reduces.ravel()]] = True
        for table in (layout.tensor, layout.reduced):
            base[table.ravel()] = np.repeat(np.arange(graph.num_tensors), copies)
            copy[table.ravel()] = np.tile(np.arange(copies), graph.num_tensors)
        copy[:held] = 0
        producer = np.repeat(np.arange(len(layout.base)), np.diff(layout.first_output))
        self.producer = np.concatenate([np.full(held, NOWHERE), producer]).astype(np.int32)
        self.num_bytes = np.where(is_token[:, None], 0, graph.tensor_bytes[base])
        self.role = np.where(is_token, np.uint8(Role.ACTIVATION), graph.tensor_role[base])
        of_base = graph.tensor_storage[base].astype(np.int64)
        shared = graph.persistent_storage[of_base]
        storage = of_base * copies + np.where(shared, 0, copy)
        tokens = graph.num_storages * copies + np.arange(count)
        self.storage = _numbered(np.where(is_token, tokens, storage))
        reduced = np.zeros(count, np.bool_)
        reduced[layout.reduced[np.concatenate([np.zeros(0, np.int64), *layout.buckets])]] = True
        names = graph.tensor_names
        self.names = tuple(
            f"token {tensor}" if is_token[tensor]
            else names[base[tensor]] if tensor < held
            else f"{names[base[tensor]]} (copy {copy[tensor]}{', summed' * bool(reduced[tensor])})"
            for tensor in range(count)
        )  # fmt: skip


def _numbered(labels: NDArray[np.int64]) -> NDArray[np.int32]:
    """Numbers labels by where each comes first."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def _bucket_bytes(layout: _Layout, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the bytes of buckets beside the op that makes the first gradient of each, [op]."""
    held = np.zeros(len(layout.base), np.int64)
    for bucket in layout.buckets:
        maker = int(layout.graph.tensor_producer[bucket[0]])
        while layout.axis[maker] != ALONE:  # a collective holds nothing; what it reads is made
            maker = int(
                layout.graph.tensor_producer[layout.graph.inputs[layout.graph.first_input[maker]]]
            )
        held[layout.op[maker]] += int(sizes[bucket].sum())
    return held


def _costs(cost: CostTable, layout: _Layout) -> CostTable:
    is_free = layout.copy == NOWHERE
    seconds, launch = _per_op(layout, cost.seconds), _per_op(layout, cost.launch)
    seconds[is_free], launch[is_free] = 0.0, 0.0
    return replace(
        cost,
        seconds=seconds,
        launch=launch,
        source=_per_op(layout, cost.source, CostSource.ZERO),
        relative_error=_per_op(layout, cost.relative_error),
        trail=None if cost.trail is None else _per_op(layout, cost.trail),
    )
