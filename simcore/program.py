"""A plan spelled out: every op of every copy on its device, and the collectives between them.

What runs is again an `OpGraph`, so that whatever is known of one (memory, traces, critical path)
holds for the other. Axes: op, dev as in `OpGraph`; base (an op of the plan's graph).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.collectives import Collective, make_collective
from simcore.cost import CostSource, CostTable
from simcore.errors import PlanError
from simcore.graph import FixedCosts, OpClass, OpGraph, Phase, Role
from simcore.plan import DEFAULT_BUCKETS, Buckets

FIRST_BUCKET = 2**20  # bytes; torch's DistributedDataParallel closes the first bucket early
NOWHERE = -1  # the device of a collective, and the base op of what has none
_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """What a plan runs."""

    graph: OpGraph
    placement: NDArray[np.int32]  # [op] device, NOWHERE = a collective
    base: NDArray[np.int32]  # [op] op of the plan's graph, NOWHERE = a collective
    collectives: Mapping[int, Collective]  # by op
    cost: CostTable
    # class -> bytes that ops hold for the whole step, where the graph does not say
    held: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)  # [op] bytes

    def priorities(self, of_base: Sequence[int]) -> list[int]:
        """Returns the priority of every op, given those of the plan's graph; none if none are."""
        if not len(of_base):
            return []
        return [0 if base == NOWHERE else of_base[base] for base in self.base.tolist()]


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


def copy_program(
    graph: OpGraph,
    cluster: Cluster,
    devices: Sequence[int],
    cost: CostTable,
    buckets: Buckets = DEFAULT_BUCKETS,
) -> Program:
    """Returns copies of a training step, one a device, whose gradients are summed on the way.

    Bucket after bucket is summed by an all-reduce, each after the one before it (they share one
    communicator), while the backward goes on; an update waits for the bucket of its gradient.

    Args:
        graph: one copy.
        cluster: the cluster.
        devices: device indices, one a copy.
        cost: what the ops of one copy cost, at its batch.
        buckets: how gradients are put together.

    Raises:
        PlanError: no parameter is trained, a device comes twice, or two devices have no route.
    """
    if graph.num_ops and not (graph.op_class == OpClass.UPDATE).any():
        raise PlanError(
            f"{graph.name}: data parallel needs parameters that are trained; the graph updates none"
        )
    sizes = graph.at_batch(cost.batches[0]).tensor_bytes
    filled = fill_buckets(graph, sizes, buckets) if len(devices) > 1 else []
    layout = _Layout(graph, len(devices), filled)
    made = [
        make_collective(
            "all_reduce", int(sizes[b].sum()), cluster, devices, algorithm=buckets.algorithm
        )
        for b in filled
    ]
    spelled = _spell_out(layout)
    held = {} if buckets.as_views else {"buckets": _bucket_bytes(layout, sizes)}
    for extra in held.values():
        spelled = replace(spelled, resident=spelled.resident + np.outer(extra, (1, 0)))
    placement = np.full(spelled.num_ops, NOWHERE, np.int32)
    placement[layout.computes] = np.tile(np.array(devices, np.int32), graph.num_ops)
    return Program(
        graph=spelled,
        placement=placement,
        base=layout.base,
        collectives=dict(zip(layout.reduces.tolist(), made, strict=True)),
        cost=_costs(cost, layout),
        held=held,
    )


class _Layout:
    """Where the copies of ops and tensors are in the new graph.

    Ops stand by base op, then copy; the all-reduce of a bucket stands behind the last op that makes
    a gradient of it. Its outputs are a token for the next one, and every copy of every gradient.
    """

    def __init__(self, graph: OpGraph, copies: int, buckets: list[NDArray[np.int64]]) -> None:
        self.graph, self.copies, self.buckets = graph, copies, buckets
        last = np.array([graph.tensor_producer[b].max() for b in buckets], np.int64)
        last = np.maximum.accumulate(last)
        number = np.arange(len(buckets))
        self.reduces = (last + 1) * copies + number  # [bucket] op
        before = np.searchsorted(last, np.arange(graph.num_ops))  # collectives ahead of a base op
        first = np.arange(graph.num_ops) * copies + before
        self.op = first[:, None] + np.arange(copies)  # [base, copy] op
        self.computes = self.op.ravel()
        num_ops = graph.num_ops * copies + len(buckets)
        self.base = np.full(num_ops, NOWHERE, np.int32)
        self.base[self.computes] = np.repeat(np.arange(graph.num_ops), copies)
        self.copy = np.zeros(num_ops, np.int64)
        self.copy[self.computes] = np.tile(np.arange(copies), graph.num_ops)
        made = np.diff(graph.first_output)
        outputs = np.zeros(num_ops, np.int64)
        outputs[self.computes] = np.repeat(made, copies)
        outputs[self.reduces] = [1 + len(b) * copies for b in buckets]
        held = int(graph.first_output[0]) if graph.num_ops else graph.num_tensors
        self.first_output = held + np.concatenate([[0], np.cumsum(outputs)])
        self.num_held = held
        # [tensor, copy] tensor; parameters and buffers are one tensor for all copies
        self.tensor = np.repeat(np.arange(graph.num_tensors)[:, None], copies, axis=1)
        producer = graph.tensor_producer[held:]
        offset = np.arange(held, graph.num_tensors) - graph.first_output[producer]
        self.tensor[held:] = self.first_output[self.op[producer]] + offset[:, None]
        self.reduced: NDArray[np.int64] = self.tensor.copy()  # [tensor, copy] after the sum
        for bucket, reduce in zip(buckets, self.reduces, strict=True):
            places = np.arange(len(bucket) * copies).reshape(len(bucket), copies)
            self.reduced[bucket] = self.first_output[reduce] + 1 + places

    @property
    def num_tensors(self) -> int:
        """Number of tensors of the new graph."""
        return int(self.first_output[-1])


def _spell_out(layout: _Layout) -> OpGraph:
    """Returns the new graph."""
    graph, copies = layout.graph, layout.copies
    is_reduce = layout.base == NOWHERE
    unit = np.where(is_reduce, graph.num_units * copies + np.arange(len(is_reduce)), 0)
    unit[~is_reduce] = graph.unit[layout.base[~is_reduce]] * copies + layout.copy[~is_reduce]
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
    bucket = {int(op): number for number, op in enumerate(layout.reduces)}
    return tuple(
        f"all-reduce of bucket {bucket[op]}" if base == NOWHERE
        else f"{layout.graph.op_names[base]} (copy {layout.copy[op]})"
        for op, base in enumerate(layout.base.tolist())
    )  # fmt: skip


def _inputs(layout: _Layout) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Returns what every op reads: (offsets by op, tensors, ascending within an op)."""
    graph, copies = layout.graph, layout.copies
    base = np.repeat(np.arange(graph.num_ops), np.diff(graph.first_input))
    updates = (graph.op_class[base] == OpClass.UPDATE)[:, None]
    tensor = np.where(updates, layout.reduced[graph.inputs], layout.tensor[graph.inputs])
    op = layout.op[base]
    ops, tensors = [op.ravel()], [tensor.ravel()]
    for number, (bucket, reduce) in enumerate(zip(layout.buckets, layout.reduces, strict=True)):
        read = layout.tensor[bucket].ravel()
        if number:
            read = np.append(read, layout.first_output[layout.reduces[number - 1]])
        ops.append(np.full(len(read), reduce))
        tensors.append(read)
    op, tensor = np.concatenate(ops), np.concatenate(tensors)
    order = np.lexsort((tensor, op))
    num_ops = graph.num_ops * copies + len(layout.buckets)
    first = np.searchsorted(op[order], np.arange(num_ops + 1)).astype(np.int64)
    return first, tensor[order].astype(np.int32)


class _Tensors:
    """The tensors of the new graph, as arrays of `OpGraph`."""

    def __init__(self, layout: _Layout) -> None:
        graph, copies, held = layout.graph, layout.copies, layout.num_held
        count = layout.num_tensors
        base = np.zeros(count, np.int64)  # tensor of one copy
        copy = np.zeros(count, np.int64)
        is_token = np.zeros(count, np.bool_)
        is_token[layout.first_output[layout.reduces]] = True
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
        held[layout.op[layout.graph.tensor_producer[bucket[0]]]] += int(sizes[bucket].sum())
    return held


def _costs(cost: CostTable, layout: _Layout) -> CostTable:
    return replace(
        cost,
        seconds=_per_op(layout, cost.seconds),
        launch=_per_op(layout, cost.launch),
        source=_per_op(layout, cost.source, CostSource.ZERO),
        relative_error=_per_op(layout, cost.relative_error),
        trail=None if cost.trail is None else _per_op(layout, cost.trail),
    )
