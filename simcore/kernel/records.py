"""What the kernel reads and writes: a few arrays of records, and the enums in them.

Axes: op, dev, column (device kind), tensor, use (op reads tensor), touch (op reads or writes a
storage), pair (source * num_dev + target), hop (a channel of a route), load (what a collective puts
on a channel), comm (transfers of one tensor to one device, then collectives), resource (channels,
then out-engines, then in-engines, one pool per device), node (a comm's place in one resource's
queue), work (what has a rate: one compute per device, then comms), plan.

The records are few and wide on purpose: every array passed to a compiled function costs compile
time and reference counting, a field of a record costs neither. No field may be named as something
that numpy's scalars already have (`size`, `item`, `device`): plain Python would read that instead.
"""

from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Records: TypeAlias = Any  # an array of records; their fields have no static type

NONE = -1


class Order(IntEnum):
    """Which arrived op an idle device starts."""

    PROGRAM = 0
    READY = 1


class Host(IntEnum):
    """Who issues the ops."""

    ONE = 0
    PER_RANK = 1


class Contention(IntEnum):
    """What a transfer holds while it runs."""

    NONE = 0
    PORT = 1
    ORDERED = 2
    FIFO = 3
    FAIR = 4  # channels are shared, max-min fair


class P2P(IntEnum):
    """When a transfer is requested, and what else it occupies."""

    COPY = 0
    INLINE = 1
    RENDEZVOUS = 2


class Engine(IntEnum):
    """How placements are played; all give the same bits where they apply."""

    EVENTS = 0
    SWEEP = 1  # static orders: one pass over the ops
    LANES = 2  # the sweep for several placements in lock-step
    FLUID = 3  # events, of work whose rate changes: fair sharing and slow-down


class Status(IntEnum):
    """What became of a plan."""

    OK = 0
    OUT_OF_MEMORY = 1
    ILLEGAL_DEVICE = 2
    SPLIT_UNIT = 3
    UNREACHABLE = 4
    DEADLOCK = 5


class Kind(IntEnum):
    """Kinds of events; the low bits of an event's payload."""

    COMPUTE_END = 0
    COMM_END = 1
    LATENCY_OVER = 2
    ISSUE = 3


class Count(IntEnum):
    """Cells of Scratch.counts."""

    HEAP = 0
    DIRTY = 1
    OFFERS = 2
    TRANSFERS = 3
    FINISHED = 4
    COMMS = 5  # transfers and collectives
    TIMED = 6  # works in the heap of ends
    ACTIVE = 7  # comms under way
    CHANGED = 8  # channels whose flows have changed in this round
    WANTED = 9  # comms that are to be requested in this round
    FRONT = 10  # where the line of events begins
    BACK = 11  # and where it ends
    SIZE = 12


class Mode(NamedTuple):
    """How plans are simulated."""

    order: int  # Order
    host: int  # Host
    contention: int  # Contention
    p2p: int  # P2P
    messages: (
        int  # 1 = transfers are noted at their first reader: a message costs host time, or p2p
    )
    fluid: int  # 1 = ends move as rates change
    slow: int  # 1 = compute and communication slow each other


COST = np.dtype(
    [
        ("duration", np.float64),  # s, inf = cannot run there
        ("launch", np.float64),  # s of host time to issue it
        ("trail", np.float64),  # s of host time after that, before the next op
        ("sync", np.int64),  # 1 = the host waits for its end
    ]
)
OP = np.dtype(
    [
        ("first_output", np.int64),  # tensor id; outputs end where the next op's begin
        ("workspace", np.int64),  # bytes
        ("resident", np.int64),  # bytes held for the whole step, optimizer state included
        ("priority", np.int64),  # least first
        ("leader", np.int64),  # first op of its unit
        ("allocate", np.int64),  # bytes, in program order, of storages that one unit has to itself
        ("release", np.int64),  # bytes, likewise
        ("op_class", np.int64),  # row of slow
        ("collective", np.int64),  # which collective it is, NONE = it computes
    ]
)
SLOW = np.dtype(  # how many times longer an op takes
    [("beside_copy", np.float64), ("beside_collective", np.float64)]
)
COLLECTIVE = np.dtype(
    [
        ("op", np.int64),
        ("latency", np.float64),  # s before its volume moves
        ("duration", np.float64),  # s of its volume on an idle network
        ("volume", np.float64),  # bytes
        ("first_load", np.int64),  # offset into loads
        ("first_member", np.int64),  # offset into members
    ]
)
LOAD = np.dtype([("channel", np.int64), ("usage", np.float64)])  # bytes per byte of volume
LIMIT = np.dtype(
    [
        ("out_engines", np.int64),  # 0 = any number
        ("in_engines", np.int64),  # likewise
        ("message_overhead", np.float64),  # s of the host per message
        ("copy_beside_compute", np.float64),  # times longer
        ("collective_beside_compute", np.float64),  # times longer
    ]
)
TENSOR = np.dtype(
    [
        ("num_bytes", np.int64),  # bytes
        ("first_consumer", np.int64),  # offset into consumers
        ("first_reader", np.int64),  # offset into readers
    ]
)
TOUCH = np.dtype([("op", np.int64), ("num_bytes", np.int64)])
SPAN = np.dtype([("first", np.int64), ("last", np.int64), ("num_bytes", np.int64)])  # ops
PAIR = np.dtype(
    [
        ("bandwidth", np.float64),  # B/s of the route's narrowest channel
        ("latency", np.float64),  # s, summed over the route
        ("first_hop", np.int64),  # offset into hops
        ("reachable", np.int64),  # 1 = there is a route
    ]
)


class Tables(NamedTuple):
    """One lowered problem: everything that does not depend on the placement."""

    cost: Records  # COST [op, column]
    columns: NDArray[np.int64]  # [dev] column of its costs
    slow: Records  # SLOW [class, dev]
    ops: Records  # OP [op + 1]
    tensors: Records  # TENSOR [tensor + 1]
    consumers: NDArray[np.int64]  # [use] ops, ascending within a tensor
    first_touch: NDArray[np.int64]  # [storage + 1] offsets into touches; none if persistent
    touches: Records  # TOUCH [touch] ops ascending within a storage, bytes of the tensor touched
    readers: NDArray[np.int64]  # [...] first op of each other unit that reads a tensor
    first_span: NDArray[np.int64]  # [shared + 1] offsets into spans, per storage of several units
    spans: Records  # SPAN [span] what a unit does to a storage, by first op
    first_holder: NDArray[np.int64]  # [held + 1] offsets into holders, per shared parameter
    holders: NDArray[np.int64]  # [...] leaders of the units that need it on their device
    held_bytes: NDArray[np.int64]  # [held] bytes
    pairs: Records  # PAIR [pair + 1]
    hops: NDArray[np.int64]  # [hop] channel ids
    bandwidth: NDArray[np.float64]  # [channel] B/s
    limits: Records  # LIMIT [dev]
    collectives: Records  # COLLECTIVE [collective + 1], by op
    loads: Records  # LOAD [load], by channel within a collective
    members: NDArray[np.int64]  # [...] devices of collectives
    plan_order: NDArray[np.int64]  # [collective] collectives by last producer, then op
    last_producer: NDArray[np.int64]  # [collective] op, NONE = it waits for nothing
    max_resources: int  # longest route + 2


OP_STATE = np.dtype(  # 64 bytes: what the event loop touches of an op is one cache line
    [
        ("start", np.float64),  # s
        ("end", np.float64),  # s
        ("issue", np.float64),  # s, inf = not known yet
        ("arrival", np.float64),  # s, its last input is there
        ("first_transfer", np.int64),  # transfer ids by producer
        ("place", np.int64),  # its device
        ("pending", np.int64),  # inputs that are still awaited
        ("next_op", np.int64),  # next item of its device's stream: op, or num_ops + transfer
    ]
)
SLOT = np.dtype(
    [
        ("allocate", np.int64),  # bytes allocated just before the op
        ("release", np.int64),  # bytes freed just after the op
        ("executed", np.int64),  # ops per device in the order of their start
        ("ready", np.int64),  # one heap of arrived ops per device
    ]
)
DEVICE_STATE = np.dtype(
    [
        ("slot", np.int64),  # where its part of the slots begins; its ops end at the next one's
        ("current", np.int64),  # bytes
        ("peak", np.int64),  # bytes
        ("largest", np.int64),  # bytes of the storage at hand
        ("free", np.float64),  # s, its last op ends
        ("host_time", np.float64),  # s, its host has issued up to here
        ("arrival", np.float64),  # s, of the tensor at hand
        ("stamp", np.int64),  # last tensor or storage seen here
        ("first_touch", np.int64),  # op
        ("last_touch", np.int64),  # op
        ("head", np.int64),  # next item of its stream
        ("running", np.int64),  # item or NONE
        ("woken", np.int64),  # item that a wake-up is scheduled for
        ("num_executed", np.int64),
        ("num_ready", np.int64),
        ("host_op", np.int64),  # next item its host issues
        ("host_waits", np.int64),  # sync op its host waits for
        ("listed", np.int64),  # stack of devices to look at in this round
        ("is_dirty", np.int64),  # 1 = it is on the stack
        ("copies", np.int64),  # transfers under way from or to it
        ("collectives", np.int64),  # collectives under way that it is a member of
    ]
)
POST = np.dtype(
    [
        ("first_inbound", np.int64),  # transfer; those of which the op is the first reader
        ("time", np.float64),  # s, its host has issued all before it; inf = not yet
        ("is_posted", np.int64),  # 1 = the receives are posted
    ]
)
COMM_STATE = np.dtype(
    [
        ("request", np.float64),  # s
        ("start", np.float64),  # s, inf = not started
        ("end", np.float64),  # s
        ("tensor", np.int64),  # of a transfer, as are source and target
        ("source", np.int64),
        ("target", np.int64),
        ("num_heads", np.int64),  # resources in whose queue it is served
        ("latency_over", np.int64),  # 1 = it has waited its latency
    ]
)
MESSAGE = np.dtype(  # what a transfer needs where mode.messages is 1
    [
        ("next_inbound", np.int64),  # next transfer with the same first reader
        ("next_at_source", np.int64),  # next item of the source's stream
        ("next_at_target", np.int64),  # next item of the target's stream
        ("first_issue", np.float64),  # s, by the first of two hosts
        ("issue", np.float64),  # s, by all, inf = not known yet
        ("awaited", np.int64),  # things that must happen before it is requested
    ]
)
WORK = np.dtype(
    [
        ("left", np.float64),  # s of compute, bytes of communication
        ("rate", np.float64),  # of that, per s
        ("since", np.float64),  # s, the rate holds from here
        ("limit", np.float64),  # highest rate it may have
        ("end", np.float64),  # s
        ("place", np.int64),  # in the heap of ends, NONE = not there
        ("stamp", np.int64),  # last component it was found in
        ("listed", np.int64),  # stack: works in the heap, by heap position
        ("active", np.int64),  # stack: comms under way
        ("active_place", np.int64),  # where it is on that stack
    ]
)
NODE = np.dtype([("next", np.int64), ("prev", np.int64), ("owner", np.int64)])  # owner: a comm
QUEUE = np.dtype(
    [
        ("free", np.float64),  # s, its last transfer ends
        ("head", np.int64),  # node
        ("tail", np.int64),  # node
        ("edge", np.int64),  # last node that is served, where several are
        ("served", np.int64),  # how many are served
        ("spare", np.float64),  # B/s not taken by flows whose rate is settled
        ("weight", np.float64),  # usage of the flows whose rate is not
        ("num_open", np.int64),  # how many these are
        ("listed", np.int64),  # stack: channels of the component at hand
        ("stamp", np.int64),  # last component it was found in
        ("changed", np.int64),  # stack: channels to settle
        ("is_changed", np.int64),  # 1 = it is on that stack
    ]
)
EVENT = np.dtype([("time", np.float64), ("payload", np.int64)])  # payload = id * 4 + Kind


class Scratch(NamedTuple):
    """Working memory of one thread, reused for every plan; after a run, the trace of the last."""

    ops: Records  # OP_STATE [op + 1]
    slots: Records  # SLOT [op] by op, and by the device's part of them
    devices: Records  # DEVICE_STATE [dev + 1]
    comms: Records  # COMM_STATE [comm]
    messages: Records  # MESSAGE [transfer]
    posts: Records  # POST [op]
    works: Records  # WORK [work]
    flows: NDArray[np.int64]  # [comm] stack: flows of the component at hand
    first_node: NDArray[np.int64]  # [collective + 1] where its nodes begin; transfers' come first
    nodes: Records  # NODE [node]
    queues: Records  # QUEUE [resource]
    heap: Records  # EVENT [event]
    line: Records  # EVENT [event] in the order of their time
    offers: NDArray[np.int64]  # [offer] stack of transfers that may start in this round
    wanted: NDArray[np.int64]  # [comm] stack of comms to be requested in this round
    counts: NDArray[np.int64]  # [Count]


class Outcome(NamedTuple):
    """Results of a batch of plans."""

    step_time: NDArray[np.float64]  # [plan] s, inf if illegal
    allocated: NDArray[np.int64]  # [plan, dev] peak bytes
    used: NDArray[np.bool_]  # [plan, dev] whether it runs any op
    status: NDArray[np.uint8]  # [plan] Status
    culprit: NDArray[np.int32]  # [plan] the op that broke a rule, NONE


def make_records(shape: int | tuple[int, ...], dtype: np.dtype[np.void]) -> Records:
    """Allocates an array of records, all zero, whose fields are attributes in plain Python too."""
    return np.zeros(shape, dtype).view(np.recarray)


def make_outcome(num_plans: int, num_devices: int) -> Outcome:
    """Allocates the results of a batch."""
    return Outcome(
        step_time=np.full(num_plans, np.inf),
        allocated=np.zeros((num_plans, num_devices), np.int64),
        used=np.zeros((num_plans, num_devices), np.bool_),
        status=np.zeros(num_plans, np.uint8),
        culprit=np.full(num_plans, NONE, np.int32),
    )


def make_scratch(tables: Tables) -> Scratch:
    """Allocates working memory for one thread."""
    num_ops, num_devices = len(tables.cost), len(tables.columns)
    produced = tables.tensors["first_consumer"][tables.ops["first_output"][0] :]
    transfers = int(np.minimum(np.diff(produced), num_devices - 1).sum()) + 1
    comms = transfers + len(tables.last_producer)
    first_node = transfers * tables.max_resources + tables.collectives["first_load"]
    return Scratch(
        ops=make_records(num_ops + 1, OP_STATE),
        slots=make_records(num_ops, SLOT),
        devices=make_records(num_devices + 1, DEVICE_STATE),
        comms=make_records(comms, COMM_STATE),
        messages=make_records(transfers, MESSAGE),
        posts=make_records(num_ops, POST),
        works=make_records(num_devices + comms, WORK),
        flows=np.zeros(comms, np.int64),
        first_node=first_node,
        nodes=make_records(int(first_node[-1]), NODE),
        queues=make_records(len(tables.bandwidth) + 2 * num_devices, QUEUE),
        heap=make_records(2 * num_ops + 2 * comms + 2 * num_devices, EVENT),
        line=make_records(num_ops + comms + 1, EVENT),
        offers=np.zeros(int(first_node[-1]) + comms, np.int64),
        wanted=np.zeros(comms, np.int64),
        counts=np.zeros(int(Count.SIZE), np.int64),
    )
