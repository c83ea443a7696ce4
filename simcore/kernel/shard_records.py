"""The records of sharded plans: tables that all plans of a space share, and one thread's scratch.

Axes: op, tensor, storage, group (linkage group), loop (a loop that an op may split, best first),
read (a tensor as an op reads it), axis (0 and 1 of the mesh; 2 = the copies), sample (which axis
splits the samples: 0 = none, else 1 + axis), mask (bit a = split along axis a), local (an op of one
device). A state is a factor of the storage, or one of the negative numbers below.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.kernel.records import NONE, Records, make_records

WHOLE, PARTIAL, ANY = -1, -2, -3  # as in `simcore.sharding.states`
MANY, UNSET = -8, -9  # readers want several states; nothing is known yet
AXES = 2  # axes that split ops
COPIES = 2  # the axis of copies, in tables of collectives
STEPS = 16  # points of a collective's curve in each doubling of the bytes
POINTS = 48 * STEPS + 1


class Rule(IntEnum):
    """How an op decides what it needs."""

    LOOPS = 0
    VIEW = 1  # is as what it reads is
    UNKNOWN = 2  # needs everything whole


class Change(IntEnum):
    """What changes the state of a tensor; the small ones come first."""

    SLICE = 0
    REDUCE_SCATTER = 1
    ALL_REDUCE = 2
    ALL_TO_ALL = 3
    ALL_GATHER = 4


SHARD_OP = np.dtype(
    [
        ("first_loop", np.int64),
        ("first_read", np.int64),
        ("first_tensor", np.int64),  # of those that it writes
        ("first_variant", np.int64),
        ("rule", np.int64),
        ("is_linear", np.int64),
        ("epoch", np.int64),  # 1 = not of the forward: what was gathered there is gathered again
        ("is_update", np.int64),
        ("sync", np.int64),
        ("launch", np.float64),  # s
    ]
)
SHARD_LOOP = np.dtype(
    [
        ("group", np.int64),
        ("divides", np.int64),  # mask of axes whose devices divide it
        ("begins", np.int64),  # 1 = an op may split it though nothing that it reads is split so
        ("cost", np.int64),  # less = better, where a loop goes on: collectives inside, then sums
        ("first_effect", np.int64),  # state of each access if it is split
        ("inner", np.int64),  # Change of the collective inside the op, NONE = none
    ]
)
SHARD_READ = np.dtype([("tensor", np.int64), ("place", np.int64)])  # of its access, or a state
SHARD_TENSOR = np.dtype(
    [
        ("storage", np.int64),
        ("producer", np.int64),  # op, NONE = a parameter or buffer
        ("place", np.int64),  # of its access in the op that writes it, NONE = has none
        ("is_held", np.int64),  # 1 = role of a parameter or buffer
        ("is_gradient", np.int64),
    ]
)
VARIANT = np.dtype(
    [("seconds", np.float64), ("workspace", np.int64), ("resident", np.int64)]
)  # s, bytes, bytes
TIMING = np.dtype([("latency", np.float64), ("duration", np.float64)])  # s
HANDLE = np.dtype(  # a tensor in one state
    [
        ("key", np.int64),
        ("next", np.int64),  # handle of the same tensor
        ("store", np.int64),
        ("num_bytes", np.int64),
        ("producer", np.int64),  # local op
        ("bucket", np.int64),  # NONE = not read by an update
        ("ready", np.float64),  # s
    ]
)
LOCAL_OP = np.dtype(
    [
        ("change", np.int64),  # NONE = an op of the graph
        ("axis", np.int64),
        ("num_bytes", np.int64),  # of a collective
        ("op", np.int64),  # of the graph
        ("variant", np.int64),
        ("first_input", np.int64),
        ("first_handle", np.int64),
        ("behind", np.int64),  # first collective whose last producer it is
        ("next", np.int64),  # collective with the same last producer
        ("played", np.int64),  # local op behind which it is played: itself, or its last producer
        ("allocate", np.int64),  # bytes
        ("release", np.int64),  # bytes
    ]
)
STORE = np.dtype(
    [
        ("first", np.int64),  # local op, NONE = touched by none
        ("last", np.int64),
        ("num_bytes", np.int64),  # largest that is touched
        ("largest", np.int64),  # largest of all
        ("is_held", np.int64),  # 1 = a parameter or buffer
        ("is_used", np.int64),  # 1 = and an op reads it
    ]
)
BUCKET = np.dtype(
    [
        ("last", np.int64),  # twice the local op behind which it is full; 1 more = and collectives
        ("num_bytes", np.int64),
        ("arrival", np.float64),  # s; of the last gradient, then of the sum
    ]
)


class Count(IntEnum):
    """Places of the counters in a scratch."""

    HANDLES = 0
    LOCALS = 1
    INPUTS = 2
    STORES = 3
    BUCKETS = 4


class ShardTables(NamedTuple):
    """What all plans of a space share."""

    ops: Records  # SHARD_OP [op + 1]
    loops: Records  # SHARD_LOOP [loop]
    effects: NDArray[np.int8]  # [...] states of accesses
    reads: Records  # SHARD_READ [read]
    tensors: Records  # SHARD_TENSOR [tensor]
    home: NDArray[np.int64]  # [storage] the parameter or buffer in it, NONE = none
    variants: Records  # VARIANT [sample, variant]
    num_bytes: NDArray[np.int64]  # [sample, tensor, mask]
    inner: NDArray[np.int64]  # [sample, loop, axis, mask] bytes of the collective inside the op
    timings: Records  # TIMING [axis, Change, point]
    decision: NDArray[np.int64]  # [group] column of the plan
    batch_group: int  # NONE = no samples are split
    divides: NDArray[np.int64]  # [sample] 1 = the batch divides by the devices that share it
    copies: int
    in_order: int  # 1 = the collectives of a device run one after the other
    first_bucket: int  # bytes; 0 = one bucket
    bucket: int  # bytes
    holds_buckets: int  # 1 = buckets are copies of the gradients


class ShardScratch(NamedTuple):
    """Room for one plan."""

    axis_of: NDArray[np.int8]  # [group]
    made: NDArray[np.int8]  # [tensor, axis] as its producer leaves it
    settled: NDArray[np.int8]  # [tensor, axis] after sums, as readers want them
    wanted: NDArray[np.int8]  # [tensor, axis]
    adds_parts: NDArray[np.int8]  # [tensor] 1 = some op reads it as a partial sum
    need: NDArray[np.int8]  # [read, axis]
    choice: NDArray[np.int64]  # [op, axis] loop, WHOLE or PARTIAL
    first_handle: NDArray[np.int64]  # [tensor]
    newest: NDArray[np.int64]  # [storage] handle of its last content
    read_by: NDArray[np.int64]  # [storage] op that last read it
    read_as: NDArray[np.int64]  # [storage] handle that it read
    fetched: NDArray[np.int64]  # [...] handles that the op at hand waits for
    handles: Records  # HANDLE
    locals: Records  # LOCAL_OP
    inputs: NDArray[np.int64]  # [...] handles
    stores: Records  # STORE
    buckets: Records  # BUCKET
    counts: NDArray[np.int64]  # [Count]


class ShardOutcome(NamedTuple):
    """The results of a batch."""

    step_time: NDArray[np.float64]  # [plan] s, inf = illegal
    allocated: NDArray[np.int64]  # [plan] peak bytes of each device's allocator
    num_ops: NDArray[np.int64]  # [plan] ops and collectives of one device


def make_shard_scratch(tables: ShardTables) -> ShardScratch:
    """Allocates room for any plan of a space."""
    num_ops, num_reads = len(tables.ops) - 1, len(tables.reads)
    num_tensors, num_storages = len(tables.tensors), len(tables.home)
    changes = 2 * AXES * num_reads + AXES * num_tensors
    handles = num_tensors + changes + AXES * num_ops
    local = num_ops + changes + AXES * num_ops + 1

    def states(count: int) -> NDArray[np.int8]:
        return np.zeros((count, AXES), np.int8)

    def numbers(count: int) -> NDArray[np.int64]:
        return np.full(count, NONE, np.int64)

    return ShardScratch(
        axis_of=np.zeros(len(tables.decision), np.int8),
        made=states(num_tensors),
        settled=states(num_tensors),
        wanted=states(num_tensors),
        adds_parts=np.zeros(num_tensors, np.int8),
        need=states(num_reads),
        choice=np.zeros((num_ops, AXES), np.int64),
        first_handle=numbers(num_tensors),
        newest=numbers(num_storages),
        read_by=numbers(num_storages),
        read_as=numbers(num_storages),
        fetched=numbers(int(np.diff(tables.ops["first_read"]).max(initial=0)) + AXES),
        handles=make_records(handles, HANDLE),
        locals=make_records(local, LOCAL_OP),
        inputs=numbers((AXES + 1) * num_reads + changes + AXES * num_ops),
        stores=make_records(handles, STORE),
        buckets=make_records(num_tensors + 1, BUCKET),
        counts=np.zeros(len(Count), np.int64),
    )
