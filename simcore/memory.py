"""What is held where: which ops and placement units use each storage, as arrays for the kernel."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.graph import OpClass, OpGraph, Sized
from simcore.kernel import SPAN, TOUCH, Records, make_records
from simcore.reach import unit_leaders


class StorageUses(NamedTuple):
    """Ops that read or write each storage that is not persistent, in program order."""

    first: NDArray[np.int64]  # [storage + 1] offsets into touches
    touches: Records  # TOUCH [touch]
    storage: NDArray[np.int64]  # [touch]


class SharedStorages(NamedTuple):
    """Storages that several units use; those that one unit has to itself are on its ops."""

    first: NDArray[np.int64]  # [shared + 1] offsets into spans
    spans: Records  # SPAN [span] by storage, then first op
    allocate: NDArray[np.int64]  # [op] bytes allocated just before it, wherever it runs
    release: NDArray[np.int64]  # [op] bytes freed just after it, wherever it runs


class HeldParameters(NamedTuple):
    """Parameters and buffers that several units use; the others are resident bytes of a unit."""

    first: NDArray[np.int64]  # [held + 1] offsets into ops
    ops: NDArray[np.int64]  # [...] leaders of the units that use it
    num_bytes: NDArray[np.int64]  # [held]
    resident: NDArray[np.int64]  # [op] bytes, at the leader of the only unit that uses them


def storage_uses(graph: OpGraph, sized: Sized) -> StorageUses:
    """Returns which ops use each storage, with the bytes of the tensor they use.

    Collectives use none: they run on no device, and what they need is held by others.
    """
    reads = np.repeat(np.arange(graph.num_tensors), np.diff(graph.first_consumer))
    written = np.flatnonzero(graph.tensor_producer >= 0)
    tensor = np.concatenate([reads, written])
    op = np.concatenate([graph.consumers, graph.tensor_producer[written]])
    storage = graph.tensor_storage[tensor].astype(np.int64)
    kept = ~graph.persistent_storage[storage] & (graph.op_class[op] != OpClass.COLLECTIVE)
    tensor, op, storage = tensor[kept], op[kept], storage[kept]
    order = np.lexsort((op, storage))
    touches = make_records(len(order), TOUCH)
    touches["op"] = op[order]
    touches["num_bytes"] = sized.tensor_bytes[tensor[order]]
    first = np.searchsorted(storage[order], np.arange(graph.num_storages + 1)).astype(np.int64)
    return StorageUses(first, touches, storage[order])


def share_storages(graph: OpGraph, uses: StorageUses) -> SharedStorages:
    """Puts the uses of each storage together by unit, and sets apart those of one unit only."""
    op, num_bytes = uses.touches["op"], uses.touches["num_bytes"]
    pair = uses.storage * graph.num_units + graph.unit[op]
    found, start, inverse = np.unique(pair, return_index=True, return_inverse=True)
    spans = make_records(len(found), SPAN)
    spans["first"] = op[start]  # touches of a storage are in program order
    np.maximum.at(spans["last"], inverse, op)
    np.maximum.at(spans["num_bytes"], inverse, num_bytes)
    storage = found // max(graph.num_units, 1)
    order = np.lexsort((spans["first"], storage))
    spans, storage = spans[order], storage[order]
    units = np.bincount(storage, minlength=graph.num_storages)
    alone = units[storage] == 1
    allocate, release = np.zeros((2, graph.num_ops), np.int64)
    np.add.at(allocate, spans["first"][alone], spans["num_bytes"][alone])
    np.add.at(release, spans["last"][alone], spans["num_bytes"][alone])
    first = np.concatenate([[0], np.cumsum(units[units > 1])]).astype(np.int64)
    return SharedStorages(first, np.ascontiguousarray(spans[~alone]), allocate, release)


def hold_parameters(graph: OpGraph, sized: Sized) -> HeldParameters:
    """Returns the units that need each parameter or buffer on their device."""
    tensor = np.repeat(np.arange(graph.num_tensors), np.diff(graph.first_consumer))
    kept = graph.tensor_producer[tensor] < 0
    leader = unit_leaders(graph)[graph.unit[graph.consumers[kept]]]
    storage = graph.tensor_storage[tensor[kept]].astype(np.int64)
    found = np.unique(storage * max(graph.num_ops, 1) + leader)
    storage, leader = np.divmod(found, max(graph.num_ops, 1))
    units = np.bincount(storage, minlength=graph.num_storages)
    alone = units[storage] == 1
    resident = np.zeros(graph.num_ops, np.int64)
    np.add.at(resident, leader[alone], sized.storage_bytes[storage[alone]])
    first = np.concatenate([[0], np.cumsum(units[units > 1])]).astype(np.int64)
    return HeldParameters(
        first, leader[~alone], sized.storage_bytes[np.flatnonzero(units > 1)], resident
    )
