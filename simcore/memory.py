"""What is held where: which ops and placement units use each storage, as arrays for the kernel."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.graph import OpGraph, Sized
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
    """Returns which ops use each storage, with the bytes of the tensor they use."""
    reads = np.repeat(np.arange(graph.num_tensors), np.diff(graph.first_consumer))
    written = np.flatnonzero(graph.tensor_producer >= 0)
    tensor = np.concatenate([reads, written])
    op = np.concatenate([graph.consumers, graph.tensor_producer[written]])
    storage = graph.tensor_storage[tensor].astype(np.int64)
    kept = ~graph.persistent_storage[storage]
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
    uneven: list[int] = []
    found: list[tuple[int, int, int, list[int]]] = []  # (op, 0 start or 1 end, bytes, rivals)
    spans = [shared.spans[key].tolist() for key in ("first", "last", "num_bytes")]
    for storage in range(len(shared.first) - 1):
        part = slice(int(shared.first[storage]), int(shared.first[storage + 1]))
        firsts, lasts, sizes = (column[part] for column in spans)
        if len(set(sizes)) > 1 or len(firsts) > MAX_RIVALS:
            uneven.append(storage)
            continue
        by_last = sorted(range(len(lasts)), key=lasts.__getitem__, reverse=True)
        allocate[firsts[0]] += sizes[0]
        release[lasts[by_last[0]]] += sizes[0]
        found += [(firsts[i], 0, sizes[0], firsts[:i]) for i in range(1, len(firsts))]
        found += [
            (lasts[i], 1, sizes[0], [firsts[j] for j in by_last[:place]])
            for place, i in enumerate(by_last)
            if place
        ]
    found.sort(key=lambda case: case[:2])
    cases = make_records(len(found) + 1, CASE)
    cases["num_bytes"][:-1] = [case[2] for case in found]
    cases["first_rival"][1:] = np.cumsum([len(case[3]) for case in found])
    key = np.array([case[0] * 2 + case[1] for case in found], np.int64)
    ops = np.arange(graph.num_ops + 1)
    return Cases(
        np.array(uneven, np.int64),
        cases,
        np.array([op for case in found for op in case[3]], np.int64),
        np.searchsorted(key, 2 * ops),
        np.searchsorted(key, 2 * ops + 1),
        allocate,
        release,
    )
