"""Several placements in lock-step, one lane each: their memory, and the pass that prepares them.

Under a static order all placements visit the ops in the same sequence, so the tables are read once
for all lanes and nothing branches on a placement. A lane whose placement breaks a rule is only
marked: the caller looks up which rule.

How loops over lanes become vector instructions: LLVM's loop vectoriser takes them if it knows that
no two arrays overlap (`no_alias`) and if they have not been unrolled before, which happens where it
knows their length. So `lanes` is an array, whose length it does not know; of one lane it is a
tuple, whose length is part of its type, and then the loops vanish. Both run the same lines.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.kernel.compiled import compiled, no_alias
from simcore.kernel.lane_tables import Index, LaneTables

LANES = 8
ONE = np.uint64(1)
LAST_BIT = np.uint64(63)


class LaneScratch(NamedTuple):
    """Working memory of one thread. Every array is flat, [axis * lane]; axes as in `records`."""

    lanes: NDArray[np.int64] | tuple[int]  # [lane] the plan of each; a tuple if there is only one
    plan: NDArray[np.int64]  # [lane] plan that it runs
    place: NDArray[np.uint8]  # [op] device
    arrival: NDArray[np.float64]  # [op] s, its last remote input is there
    allocate: NDArray[np.int64]  # [op] bytes allocated just before it, of uneven storages
    release: NDArray[np.int64]  # [op] bytes freed just after it
    wanted: NDArray[np.uint64]  # [tensor] bits: devices that read it
    holds: NDArray[np.uint64]  # [shared] bits: devices that use the storage from here on
    landed: NDArray[np.float64]  # [dev] or, of one lane, [tensor, dev] s, a tensor has arrived
    made: NDArray[np.float64]  # [tensor] s
    free: NDArray[np.float64]  # [dev] s, its last op ends
    host: NDArray[np.float64]  # [dev] s, its host has issued up to here
    port: NDArray[np.float64]  # [dev] s, the last transfer out of it ends
    current: NDArray[np.int64]  # [dev] bytes
    peak: NDArray[np.int64]  # [dev] bytes
    stamp: NDArray[np.int64]  # [dev] storage at hand
    first: NDArray[np.uint64]  # [dev] op that touches it first
    last: NDArray[np.uint64]  # [dev] op that touches it last
    largest: NDArray[np.int64]  # [dev] bytes of it
    change: NDArray[np.int64]  # [] bytes that the op at hand allocates
    end: NDArray[np.float64]  # [] s, the op at hand ends
    sender: NDArray[np.float64]  # [] s, its device's port is free
    latest: NDArray[np.float64]  # [] s
    used: NDArray[np.uint64]  # [] bits: devices that run an op
    broken: NDArray[np.int64]  # [] 1 = a rule is broken


def make_lanes(tables: LaneTables, count: int = LANES) -> LaneScratch:
    """Allocates working memory for one thread."""
    num_ops, num_devices = len(tables.steps) - 1, len(tables.columns)
    num_tensors = len(tables.tensors)
    sizes = {
        "op": num_ops,
        "tensor": num_tensors,
        "shared": len(tables.starts),
        "dev": num_devices,
        "landed": num_devices * (num_tensors if count == 1 else 1),
        "lane": 1,
    }
    arrays: dict[str, Any] = {
        name: np.zeros(sizes[axis] * count, dtype) for name, (axis, dtype) in _FIELDS.items()
    }
    return LaneScratch(lanes=(0,) if count == 1 else np.arange(count), **arrays)


_F, _I, _U = np.float64, np.int64, np.uint64
_FIELDS: dict[str, tuple[str, type]] = {
    "plan": ("lane", _I), "place": ("op", np.uint8), "arrival": ("op", _F), "allocate": ("op", _I),
    "release": ("op", _I), "wanted": ("tensor", _U), "holds": ("shared", _U),
    "landed": ("landed", _F), "made": ("tensor", _F), "free": ("dev", _F), "host": ("dev", _F),
    "port": ("dev", _F), "current": ("dev", _I), "peak": ("dev", _I), "stamp": ("dev", _I),
    "first": ("dev", _U), "last": ("dev", _U), "largest": ("dev", _I), "change": ("lane", _I),
    "end": ("lane", _F), "sender": ("lane", _F), "latest": ("lane", _F), "used": ("lane", _U),
    "broken": ("lane", _I),
}  # fmt: skip


@compiled
def at(s: LaneScratch, row: Index, lane: int) -> np.uint64:
    """Returns where a lane's cell of a row is in the flat arrays."""
    return np.uint64(row) * np.uint64(len(s.lanes)) + np.uint64(lane)


@compiled
def bit_of(s: LaneScratch, op: Index, lane: int) -> np.uint64:
    """Returns the device of an op as a set."""
    return np.uint64(ONE << np.uint64(s.place[at(s, op, lane)]))


@compiled
def spread(devices: np.uint64, device: Index) -> np.int64:
    """Returns 64 ones if a device is in a set and 64 zeros if not.

    It stands in for a branch that would be mispredicted every other time.
    """
    return np.int64(devices << (LAST_BIT - np.uint64(device))) >> 63


@compiled
def _load_op(tables: LaneTables, placements: np.ndarray, s: LaneScratch, op: Index) -> None:
    """Copies an op's devices into lanes and marks those that break a rule."""
    no_alias()
    step = tables.steps[op]
    num_devices = tables.columns.shape[0]
    for lane in range(len(s.lanes)):
        given = int(placements[s.plan[lane], op])
        device = np.uint64(given if 0 <= given < num_devices else 0)
        runs = (step.allowed >> device) & ONE
        s.broken[lane] |= 0 if given == int(device) and runs == ONE else 1
        s.place[at(s, op, lane)] = device
        s.used[lane] |= ONE << device
        s.release[at(s, op, lane)] = step.release
    if step.leader != op:
        for lane in range(len(s.lanes)):
            plan = s.plan[lane]
            together = placements[plan, step.leader] == placements[plan, op]
            s.broken[lane] |= 0 if together else 1
    if step.resident > 0:
        for lane in range(len(s.lanes)):
            s.current[at(s, s.place[at(s, op, lane)], lane)] += step.resident


@compiled
def _note_uses(tables: LaneTables, s: LaneScratch, op: Index) -> None:
    """Notes what an op's devices read, and what they free as they do not use it later."""
    no_alias()
    for read in range(tables.steps[op].first_read, tables.steps[op + ONE].first_read):
        tensor = tables.reads[read]
        for lane in range(len(s.lanes)):
            s.wanted[at(s, tensor, lane)] |= bit_of(s, op, lane)
    for index in range(tables.steps[op].first_end, tables.steps[op + ONE].first_end):
        use = tables.ends[index]
        for lane in range(len(s.lanes)):
            device, holds = s.place[at(s, op, lane)], s.holds[at(s, use.storage, lane)]
            s.release[at(s, op, lane)] += use.num_bytes & spread(~holds, device)
            s.holds[at(s, use.storage, lane)] = holds | ONE << np.uint64(device)


@compiled
def load_lanes(
    tables: LaneTables, placements: np.ndarray, begin: int, end: int, s: LaneScratch
) -> None:
    """Prepares the lanes for the plans from begin on; those beyond the end repeat the last.

    Ops are visited from the last to the first: a device that uses a storage for the first time on
    this way is the one that frees it, and after it all its readers are known.
    """
    s.wanted[:] = np.uint64(0)
    s.holds[:] = np.uint64(0)
    s.used[:] = np.uint64(0)
    s.broken[:] = 0
    s.current[:] = 0
    for lane in range(len(s.lanes)):
        s.plan[lane] = min(begin + lane, end - 1)
    num_ops = tables.steps.shape[0] - 1
    for index in range(num_ops):
        op = np.uint64(num_ops - 1 - index)
        _load_op(tables, placements, s, op)
        _note_uses(tables, s, op)
