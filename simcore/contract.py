"""Contraction: a graph and a group for each unit -> the graph with one op per group and phase."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from simcore.graph import GraphBuilder, OpGraph, Out
from simcore.signature import Affine, OpClass, Phase, Role

__all__ = ["acyclic_parts", "contract"]


def contract(
    graph: OpGraph, group: NDArray[np.int64], names: Sequence[str]
) -> tuple[OpGraph, NDArray[np.int32]]:
    """Returns the coarse graph, and the coarse op of each fine op, [op].

    Args:
        graph: the fine graph.
        group: of each unit, [unit].
        names: of each group, [group].
    """
    op_group = _group_ops(graph, group)
    by_group = np.argsort(op_group, kind="stable")
    members = np.split(by_group, np.cumsum(np.bincount(op_group))[:-1])  # [coarse op] fine ops
    groups = [int(group[graph.unit[ops[0]]]) for ops in members]  # [coarse op]
    op_names = _op_names(graph, [names[number] for number in groups], members)
    tensors, dies = _plan_tensors(graph, op_group, groups, op_names)
    workspace = _workspace(graph, op_group, dies)
    builder = GraphBuilder(graph.name, batch=graph.batch)
    handles = _Handles(builder, tensors)
    first_of_group: dict[int, int] = {}
    for op, fine in enumerate(members):
        alone = int(fine[0]) if len(fine) == 1 else None
        signed = alone is not None and graph.signature[alone] >= 0
        handle = builder.op(
            op_names[op],
            module=_common_module([graph.op_modules[member] for member in fine]),
            target="group" if alone is None else graph.op_targets[alone],
            phase=Phase(graph.phase[fine[0]]),
            op_class=OpClass.GROUP if alone is None else OpClass(graph.op_class[alone]),
            signature=graph.signatures[graph.signature[fine[0]]] if signed else None,
            inputs=handles.inputs(op),
            outputs=handles.outputs(op),
            unit_of=first_of_group.get(groups[op]),
            kernels=int(graph.kernels[fine].sum()),
            sync=bool(graph.sync[fine].any()),
            workspace=_pair(workspace[op]),
            resident=_pair(graph.resident[fine].sum(axis=0)),
            elements=int(graph.elements[fine].sum()),
            **_seconds(graph, fine),
        )
        first_of_group.setdefault(groups[op], handle)
    measured_on = graph.fixed.measured_on if graph.fixed else None
    return builder.build(measured_on=measured_on), op_group


def acyclic_parts(
    label: NDArray[np.int64],
    source: NDArray[np.integer[Any]],
    target: NDArray[np.integer[Any]],
) -> NDArray[np.int64]:
    """Cuts labels that wait for each other both ways, so that (label, part) is acyclic.

    Within such a knot of labels, ordered by first item, a part goes on as long as edges lead
    forward in that order; an edge that leads back starts the next part.

    Args:
        label: of each item, [item]; items are numbered topologically.
        source: item of each edge, [edge].
        target: item of each edge, [edge], above its source.
    """
    _, first, dense = np.unique(label, return_index=True, return_inverse=True)
    digraph = nx.DiGraph()
    digraph.add_nodes_from(range(len(first)))
    digraph.add_edges_from(set(zip(dense[source].tolist(), dense[target].tolist(), strict=True)))
    knot = np.zeros(len(first), np.int64)
    for number, members in enumerate(nx.strongly_connected_components(digraph), start=1):
        if len(members) > 1:
            knot[list(members)] = number
    part = [0] * len(label)
    inside = (knot[dense[source]] == knot[dense[target]]) & (knot[dense[source]] > 0)
    back = first[dense[source]] > first[dense[target]]
    for edge in np.flatnonzero(inside)[np.argsort(target[inside], kind="stable")].tolist():
        start, end = source[edge], target[edge]
        part[end] = max(part[end], part[start] + int(back[edge]))
    return np.array(part)


class _Tensor(NamedTuple):
    """A tensor of the coarse graph."""

    producer: int  # coarse op, -1 = none
    consumers: frozenset[int]  # coarse ops
    bytes: Affine
    storage: int  # tensors of one number share a storage
    role: Role
    name: str


class _Handles:
    """What a builder calls the planned tensors: its handles count up as tensors are added."""

    def __init__(self, builder: GraphBuilder, tensors: Sequence[_Tensor]) -> None:
        self._first_of_storage: dict[int, int] = {}
        self._inputs: dict[int, list[int]] = {}  # coarse op -> handles
        self._outputs: dict[int, list[Out]] = {}  # coarse op -> its outputs
        for handle, tensor in enumerate(sorted(tensors, key=lambda tensor: tensor.producer)):
            base = self._first_of_storage.setdefault(tensor.storage, handle)
            for op in tensor.consumers:
                self._inputs.setdefault(op, []).append(handle)
            if tensor.producer < 0:
                add = builder.parameter if tensor.role == Role.PARAMETER else builder.buffer
                add(tensor.name, tensor.bytes)
                continue
            out = Out(tensor.bytes, None if base == handle else base, tensor.role, tensor.name)
            self._outputs.setdefault(tensor.producer, []).append(out)

    def inputs(self, op: int) -> list[int]:
        """Returns the handles of what a coarse op reads."""
        return self._inputs.get(op, [])

    def outputs(self, op: int) -> list[Out]:
        """Returns what a coarse op writes."""
        return self._outputs.get(op, [])


def _group_ops(graph: OpGraph, group: NDArray[np.int64]) -> NDArray[np.int32]:
    """Returns the coarse op of each op, [op]; coarse ops are in topological order, by first op."""
    producer, consumer, _ = graph.edges()
    label = group[graph.unit] * len(Phase) + graph.phase
    part = acyclic_parts(label, producer, consumer)
    key = label * (int(part.max()) + 1) + part
    _, first, node = np.unique(key, return_index=True, return_inverse=True)
    digraph = nx.DiGraph()
    digraph.add_nodes_from(range(len(first)))
    pairs = set(zip(node[producer].tolist(), node[consumer].tolist(), strict=True))
    digraph.add_edges_from((source, target) for source, target in pairs if source != target)
    order = list(nx.lexicographical_topological_sort(digraph, key=first.tolist().__getitem__))
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order))
    return rank[node]


def _op_names(
    graph: OpGraph, groups: Sequence[str], members: Sequence[NDArray[np.int64]]
) -> list[str]:
    """Returns "<group>/<phase>" for each coarse op, numbered where that comes twice."""
    names: dict[str, None] = {}
    for group, fine in zip(groups, members, strict=True):
        name = base = f"{group}/{Phase(graph.phase[fine[0]]).name}"
        number = 1
        while name in names:
            number += 1
            name = f"{base}.{number}"
        names[name] = None
    return list(names)


class _Uses(NamedTuple):
    """Who reads and writes what, in coarse ops."""

    producer: list[int]  # [tensor] -1 = none
    readers: list[frozenset[int]]  # [tensor] without its producer
    tensors: list[list[int]]  # [storage]
    touched: list[set[int]]  # [storage] ops that read or write it
    writers: list[set[int]]  # [storage]

    @classmethod
    def of(cls, graph: OpGraph, op_group: NDArray[np.int32]) -> "_Uses":
        """Collects the uses of a graph."""
        ops, consumers = op_group.tolist(), op_group[graph.consumers].tolist()
        first = graph.first_consumer.tolist()
        empty: list[set[int]] = [set() for _ in range(graph.num_storages)]
        uses = cls([], [], [[] for _ in empty], empty, [set() for _ in empty])
        for tensor, storage in enumerate(graph.tensor_storage.tolist()):
            fine = int(graph.tensor_producer[tensor])
            producer = ops[fine] if fine >= 0 else -1
            readers = frozenset(consumers[first[tensor] : first[tensor + 1]])
            uses.producer.append(producer)
            uses.readers.append(readers - {producer})
            uses.tensors[storage].append(tensor)
            uses.touched[storage] |= readers
            if producer >= 0:
                uses.touched[storage].add(producer)
                uses.writers[storage].add(producer)
        return uses


def _plan_tensors(
    graph: OpGraph, op_group: NDArray[np.int32], groups: Sequence[int], op_names: Sequence[str]
) -> tuple[list[_Tensor], NDArray[np.bool_]]:
    """Returns the tensors of the coarse graph, and which storages die within one op, [storage]."""
    uses = _Uses.of(graph, op_group)
    persistent = graph.persistent_storage
    dies = np.zeros(graph.num_storages, np.bool_)
    tensors: list[_Tensor] = []
    bundles: dict[tuple[tuple[int, ...], Role], list[int]] = {}
    for storage, touched in enumerate(uses.touched):
        if persistent[storage]:
            tensors += _keep(graph, uses, storage, persistent=True)
        elif len(touched) == 1:
            dies[storage] = True
        elif len(uses.writers[storage]) == 1 and len({groups[op] for op in touched}) == 1:
            role = Role(graph.tensor_role[uses.tensors[storage][0]])
            bundles.setdefault((tuple(sorted(touched)), role), []).append(storage)
        else:
            tensors += _keep(graph, uses, storage, persistent=False)
    size = _storage_size(graph)
    for number, ((ops, role), storages) in enumerate(bundles.items()):
        name = f"{op_names[ops[0]]}:{role.name.lower()}"
        total = _pair(size[storages].sum(axis=0))
        key = graph.num_storages + number
        tensors.append(_Tensor(ops[0], frozenset(ops[1:]), total, key, role, name))
    return tensors, dies


def _keep(graph: OpGraph, uses: _Uses, storage: int, *, persistent: bool) -> list[_Tensor]:
    """Returns the tensors of a storage that keep their identity.

    They are those that another op reads, and those without which an op would be seen to touch
    less of the storage than it does (the base of a view that travels).
    """
    tensors = uses.tensors[storage]
    kept = [t for t in tensors if uses.producer[t] < 0 or uses.readers[t]]
    for tensor in () if persistent else [t for t in tensors if t not in kept]:
        op = uses.producer[tensor]
        seen = [t for t in kept if uses.producer[t] == op or op in uses.readers[t]]
        if not any((graph.tensor_bytes[t] >= graph.tensor_bytes[tensor]).all() for t in seen):
            kept.append(tensor)
    return [
        _Tensor(
            producer=uses.producer[tensor],
            consumers=uses.readers[tensor],
            bytes=_pair(graph.tensor_bytes[tensor]),
            storage=storage,
            role=Role(graph.tensor_role[tensor]),
            name=graph.tensor_names[tensor],
        )
        for tensor in sorted(kept)
    ]


def _storage_size(graph: OpGraph) -> NDArray[np.int64]:
    """Returns bytes of each storage, [storage, 2]: the largest of each coefficient."""
    size = np.full((graph.num_storages, 2), np.iinfo(np.int64).min)
    np.maximum.at(size, graph.tensor_storage, graph.tensor_bytes)
    return size


def _workspace(
    graph: OpGraph, op_group: NDArray[np.int32], dies: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Returns bytes of each coarse op, [coarse op, 2]: the peak of what lives only within it."""
    read = np.repeat(np.arange(graph.num_ops), np.diff(graph.first_input))
    written = np.flatnonzero(graph.tensor_producer >= 0)
    op = np.concatenate([read, graph.tensor_producer[written]])
    storage = graph.tensor_storage[np.concatenate([graph.inputs, written])]
    op, storage = op[dies[storage]], storage[dies[storage]]
    first = np.full(graph.num_storages, graph.num_ops)
    last = np.full(graph.num_storages, -1)
    np.minimum.at(first, storage, op)
    np.maximum.at(last, storage, op)
    size = _storage_size(graph)[dies]
    allocated = np.zeros((graph.num_ops, 2), np.int64)
    freed = np.zeros((graph.num_ops, 2), np.int64)
    np.add.at(allocated, first[dies], size)
    np.add.at(freed, last[dies], size)
    walk = np.argsort(op_group, kind="stable")  # group after group: each ends with nothing left
    alive = np.cumsum(allocated[walk] - freed[walk], axis=0) + freed[walk]
    peak = np.zeros((int(op_group.max()) + 1, 2), np.int64)
    np.maximum.at(peak, op_group[walk], alive + graph.workspace[walk])
    return peak


def _seconds(graph: OpGraph, fine: NDArray[np.int64]) -> dict[str, Any]:
    """Returns measured seconds of a coarse op; NaN unless every member has them."""
    if graph.fixed is None:
        return {}
    cpu_seconds = graph.fixed.cpu_seconds
    return {
        "seconds": float(graph.fixed.seconds[fine].sum()),
        "cpu_seconds": np.nan if cpu_seconds is None else float(cpu_seconds[fine].sum()),
    }


def _common_module(modules: Sequence[str]) -> str:
    """Returns the longest module path that contains all of them."""
    paths = [module.split(".") for module in modules]
    depth = 0
    while depth < len(paths[0]) and all(
        path[: depth + 1] == paths[0][: depth + 1] for path in paths
    ):
        depth += 1
    return ".".join(paths[0][:depth])


def _pair(values: NDArray[np.int64]) -> Affine:
    return int(values[0]), int(values[1])
