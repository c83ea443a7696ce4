"""What the lanes read, in the order in which they read it: one record an op, offsets unsigned.

Everything here follows from `Tables`. An unsigned index cannot be negative, so compiled code does
not look whether it has to count from the end; what an op needs lies side by side.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from simcore.kernel.records import Records, Tables, make_records

Index: TypeAlias = Any  # np.uint64; of a loop that is not compiled, int

MAX_LANE_DEVICES = 63  # sets of devices are the bits of one number

STEP = np.dtype(
    [
        ("allowed", np.uint64),  # bits: devices that can run the op
        ("leader", np.uint64),  # first op of its unit
        ("resident", np.int64),  # bytes held for the whole step
        ("workspace", np.int64),  # bytes
        ("allocate", np.int64),  # bytes, of storages that one unit has to itself
        ("release", np.int64),  # bytes, likewise
        ("first_output", np.uint64),  # tensor
        ("first_read", np.uint64),  # offset into reads
        ("first_start", np.uint64),  # offset into starts
        ("first_end", np.uint64),  # offset into ends
    ]
)
USE = np.dtype([("storage", np.uint64), ("num_bytes", np.int64)])  # by a unit, of a shared storage
SENT = np.dtype(
    [
        ("num_bytes", np.float64),
        ("producer", np.uint64),  # op; 0 if the tensor is there from the beginning
        ("first_reader", np.uint64),  # offset into readers
    ]
)
ROUTE = np.dtype([("latency", np.float64), ("bandwidth", np.float64)])  # s, B/s


class LaneTables(NamedTuple):
    """One lowered problem as the lanes read it. Axes as in `records`."""

    steps: Records  # STEP [op + 1]
    cost: Records  # COST [op, column]
    columns: NDArray[np.uint64]  # [dev] column of its costs
    reads: NDArray[np.uint64]  # [...] tensors of other units, by the first op of a unit to read it
    tensors: Records  # SENT [tensor + 1]
    readers: NDArray[np.uint64]  # [...] first op of each other unit that reads a tensor
    routes: Records  # ROUTE [pair]
    starts: Records  # USE [span] by the first op of the unit that uses it
    ends: Records  # USE [span] by the last
    first_uneven: NDArray[np.uint64]  # [uneven + 1] offsets into uneven, per storage
    uneven: Records  # SPAN [...] of storages of which units use unlike bytes
    first_holder: NDArray[np.uint64]  # [held + 1] offsets into holders, per shared parameter
    holders: NDArray[np.uint64]  # [...] leaders of the units that need it on their device
    held_bytes: NDArray[np.int64]  # [held] bytes


def make_lane_tables(tables: Tables) -> LaneTables:
    """Returns the tables of a problem without collectives, of at most 63 devices."""
    num_ops, num_devices = tables.cost.shape[0], len(tables.columns)
    tensors = make_records(len(tables.tensors), SENT)
    tensors["num_bytes"] = tables.tensors["num_bytes"]
    tensors["first_reader"] = tables.tensors["first_reader"]
    first_output = tables.ops["first_output"]
    tensors["producer"][first_output[0] : -1] = np.repeat(np.arange(num_ops), np.diff(first_output))
    steps = make_records(num_ops + 1, STEP)
    for name in ("leader", "resident", "workspace", "allocate", "release", "first_output"):
        steps[name] = tables.ops[name]
    runs = np.isfinite(tables.cost["duration"][:, tables.columns])
    steps["allowed"][:-1] = (runs.astype(np.uint64) << np.arange(num_devices, dtype=np.uint64)).sum(
        1
    )
    reads, steps["first_read"] = _reads(tables, num_ops)
    storage, uneven = _storages(tables)
    even = ~uneven[storage]
    spans, number = tables.spans[even], (np.cumsum(~uneven) - 1)[storage[even]]
    starts, steps["first_start"] = _uses(spans, "first", number, num_ops)
    ends, steps["first_end"] = _uses(spans, "last", number, num_ops)
    counts = np.bincount(storage[~even], minlength=len(uneven))[uneven]
    routes = make_records(len(tables.pairs) - 1, ROUTE)
    routes["latency"], routes["bandwidth"] = (
        tables.pairs[name][:-1] for name in ("latency", "bandwidth")
    )
    return LaneTables(
        steps=steps,
        cost=tables.cost,
        columns=tables.columns.astype(np.uint64),
        reads=reads,
        tensors=tensors,
        readers=tables.readers.astype(np.uint64),
        routes=routes,
        starts=starts,
        ends=ends,
        first_uneven=np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64),
        uneven=np.ascontiguousarray(tables.spans[~even]),
        first_holder=tables.first_holder.astype(np.uint64),
        holders=tables.holders.astype(np.uint64),
        held_bytes=tables.held_bytes,
    )


def _reads(tables: Tables, num_ops: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Returns the tensors of other units that each op reads, and offsets, [op + 1]."""
    first_reader = tables.tensors["first_reader"]
    tensor = np.repeat(np.arange(len(first_reader) - 1), np.diff(first_reader))
    made = tensor >= tables.ops["first_output"][0]
    tensor, reader = tensor[made], tables.readers[made]
    order = np.argsort(reader, kind="stable")
    return tensor[order].astype(np.uint64), np.searchsorted(reader[order], np.arange(num_ops + 1))


def _storages(tables: Tables) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns each span's shared storage, and whether units use unlike bytes of it, [shared]."""
    first = tables.first_span
    storage = np.repeat(np.arange(len(first) - 1), np.diff(first))
    num_bytes = tables.spans["num_bytes"]
    uneven = np.zeros(len(first) - 1, np.bool_)
    uneven[storage[num_bytes != num_bytes[first[storage]]]] = True
    return storage, uneven


def _uses(
    spans: Records, name: str, storage: NDArray[np.int64], num_ops: int
) -> tuple[Records, NDArray[np.int64]]:
    """Returns spans by their first or last op, and the offsets of the ops, [op + 1]."""
    order = np.argsort(spans[name], kind="stable")
    uses = make_records(len(order), USE)
    uses["storage"], uses["num_bytes"] = storage[order], spans["num_bytes"][order]
    return uses, np.searchsorted(spans[name][order], np.arange(num_ops + 1))
