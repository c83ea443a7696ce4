"""What is held where: which ops and placement units use each storage, as arrays for the kernel."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.graph import OpClass, OpGraph, Sized
from simcore.kernel import CASE, SPAN, TOUCH, Records, make_records
from simcore.reach import unit_leaders

MAX_RIVALS = 16  # units of a storage beyond which a look at each device is cheaper


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


class Cases(NamedTuple):
    """What an op allocates or frees of a shared storage if no rival is on its device.

    A unit allocates a storage on its device unless a unit that touches it earlier is there too, and
    frees it unless one that touches it later is.
    """

    uneven: NDArray[np.int64]  # [...] shared storages that are left out
    cases: Records  # CASE [case + 1], by op: first what it may allocate, then what it may free
    rivals: NDArray[np.int64]  # [...] ops
    first_start: NDArray[np.int64]  # [op + 1] offsets into cases; freeing begins at first_end
    first_end: NDArray[np.int64]  # [op + 1] offsets into cases
    allocate: NDArray[np.int64]  # [op] bytes without a rival
    release: NDArray[np.int64]  # [op] bytes without a rival


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


def storage_cases(graph: OpGraph, shared: SharedStorages) -> Cases:
    """Returns when ops allocate and free the storages of which all units use as many bytes."""
    allocate, release = shared.allocate.copy(), shared.release.copy()
    units = np.diff(shared.first)
    storage = np.repeat(np.arange(len(units)), units)
    uneven = units > MAX_RIVALS
    num_bytes = shared.spans["num_bytes"]
    uneven[storage[num_bytes != num_bytes[shared.first[storage]]]] = True
    parts: list[_CasePart] = []
    for count in np.unique(units[~uneven]).tolist():
        begin = shared.first[:-1][~uneven & (units == count)]
        spans = shared.spans[begin[:, None] + np.arange(count)]  # [storage, unit]
        firsts, sizes = spans["first"], spans["num_bytes"][:, 0]
        latest = np.argsort(-spans["last"], axis=1)
        lasts = np.take_along_axis(spans["last"], latest, axis=1)
        np.add.at(allocate, firsts[:, 0], sizes)
        np.add.at(release, lasts[:, 0], sizes)
        rivals = np.take_along_axis(firsts, latest, axis=1)
        for index in range(1, count):
            parts.append(_CasePart(firsts[:, index], 0, sizes, firsts[:, :index]))
            parts.append(_CasePart(lasts[:, index], 1, sizes, rivals[:, :index]))
    return _join_cases(graph.num_ops, np.flatnonzero(uneven), parts, (allocate, release))


class _CasePart(NamedTuple):
    """Cases that have as many rivals."""

    op: NDArray[np.int64]  # [case]
    kind: int  # 0 = may allocate, 1 = may free
    num_bytes: NDArray[np.int64]  # [case]
    rivals: NDArray[np.int64]  # [case, rival] ops


def _join_cases(
    num_ops: int,
    uneven: NDArray[np.int64],
    parts: list[_CasePart],
    sure: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Cases:
    """Puts cases into the order of their ops; `sure` are bytes allocated and freed in any case."""
    nothing = np.zeros(0, np.int64)
    key = np.concatenate([nothing, *(2 * part.op + part.kind for part in parts)])
    count = np.concatenate([nothing, *(np.full(len(p.op), p.rivals.shape[1]) for p in parts)])
    rivals = np.concatenate([nothing, *(part.rivals.ravel() for part in parts)])
    order = np.argsort(key, kind="stable")
    before = np.cumsum(count) - count  # where a case's rivals are, in the order of the parts
    after = np.cumsum(count[order])
    cases = make_records(len(key) + 1, CASE)
    cases["num_bytes"][:-1] = np.concatenate([nothing, *(part.num_bytes for part in parts)])[order]
    cases["first_rival"][1:] = after
    place = np.arange(len(rivals)) - np.repeat(after - count[order], count[order])
    ops = 2 * np.arange(num_ops + 1)
    return Cases(
        uneven=uneven.astype(np.int64),
        cases=cases,
        rivals=rivals[np.repeat(before[order], count[order]) + place],
        first_start=np.searchsorted(key[order], ops),
        first_end=np.searchsorted(key[order], ops + 1),
        allocate=sure[0],
        release=sure[1],
    )
