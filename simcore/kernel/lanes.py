"""The sweep for several placements in lock-step, one lane each.

Under a static order all placements visit the ops in the same sequence, so the tables are read once
for all lanes and nothing branches on a placement. A lane whose placement breaks a rule is only
marked: the caller runs it alone to learn which rule.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.kernel.compiled import compiled
from simcore.kernel.records import Contention, Mode, Tables

LANES = 8
MAX_LANE_DEVICES = 63  # a lane notes the devices that need a tensor as bits

_FREE = int(Contention.NONE)


class LaneScratch(NamedTuple):
    """Working memory of one thread. Axes as in `records`, and lane."""

    place: NDArray[np.int64]  # [op, lane] device
    arrival: NDArray[np.float64]  # [op, lane] s, its last remote input is there
    allocate: NDArray[np.int64]  # [op, lane] bytes allocated just before it
    release: NDArray[np.int64]  # [op, lane] bytes freed just after it
    free: NDArray[np.float64]  # [dev, lane] s, its last op ends
    host: NDArray[np.float64]  # [dev, lane] s, its host has issued up to here
    landed: NDArray[np.float64]  # [dev, lane] s, the tensor at hand has arrived
    used: NDArray[np.int64]  # [dev, lane] 1 = it runs an op
    current: NDArray[np.int64]  # [dev, lane] bytes
    peak: NDArray[np.int64]  # [dev, lane] bytes
    port: NDArray[np.float64]  # [dev, lane] s, the last transfer out of it ends
    stamp: NDArray[np.int64]  # [dev, lane] storage at hand
    first: NDArray[np.int64]  # [dev, lane] op that touches it first
    last: NDArray[np.int64]  # [dev, lane] op that touches it last
    largest: NDArray[np.int64]  # [dev, lane] bytes of it
    change: NDArray[np.int64]  # [lane] bytes that the op at hand allocates or frees
    end: NDArray[np.float64]  # [lane] s, the op at hand ends
    latest: NDArray[np.float64]  # [lane] s
    wanted: NDArray[np.int64]  # [lane] bits: devices that lack the tensor at hand
    broken: NDArray[np.int64]  # [lane] 1 = a rule is broken


def make_lanes(tables: Tables) -> LaneScratch:
    """Allocates working memory for one thread."""
    num_ops, num_devices = len(tables.cost), len(tables.columns)
    shapes = {"op": (num_ops, LANES), "dev": (num_devices, LANES), "lane": (LANES,)}
    return LaneScratch(**{
        name: np.zeros(shapes[axis], dtype) for name, (axis, dtype) in _FIELDS.items()
    })  # fmt: skip


_F, _I = np.float64, np.int64
_FIELDS: dict[str, tuple[str, type]] = {
    "place": ("op", _I), "arrival": ("op", _F), "allocate": ("op", _I), "release": ("op", _I),
    "free": ("dev", _F), "host": ("dev", _F), "landed": ("dev", _F), "port": ("dev", _F),
    "used": ("dev", _I), "current": ("dev", _I), "peak": ("dev", _I), "stamp": ("dev", _I),
    "first": ("dev", _I), "last": ("dev", _I), "largest": ("dev", _I), "change": ("lane", _I),
    "end": ("lane", _F), "latest": ("lane", _F), "wanted": ("lane", _I), "broken": ("lane", _I),
}  # fmt: skip


@compiled
def load_lanes(tables: Tables, placements: np.ndarray, begin: int, s: LaneScratch) -> None:
    """Copies placements[begin : begin + LANES] into lanes and marks those that break a rule."""
    num_devices = tables.columns.shape[0]
    s.used[:] = 0
    s.broken[:] = 0
    for op in range(tables.cost.shape[0]):
        leader = tables.ops[op].leader
        for lane in range(LANES):
            given = int(placements[begin + lane, op])
            device = given if 0 <= given < num_devices else 0
            s.place[op, lane] = device
            s.used[device, lane] = 1
            runs = tables.cost[op, tables.columns[device]].duration < np.inf
            legal = runs and device == given and s.place[leader, lane] == device
            s.broken[lane] |= 0 if legal else 1


@compiled
def _want(tables: Tables, s: LaneScratch, tensor: int, op: int) -> int:
    """Notes per lane which devices lack a tensor; returns the bits of all lanes together."""
    for lane in range(LANES):
        s.wanted[lane] = 0
    for use in range(tables.tensors[tensor].first_reader, tables.tensors[tensor + 1].first_reader):
        reader = tables.readers[use]
        for lane in range(LANES):
            s.wanted[lane] |= 1 << s.place[reader, lane]
    every = 0
    for lane in range(LANES):
        s.wanted[lane] &= ~(1 << s.place[op, lane])
        every |= s.wanted[lane]
    return every


@compiled
def _send_freely(tables: Tables, s: LaneScratch, tensor: int, op: int) -> None:
    """Lets the readers of a tensor wait for a transfer that holds nothing."""
    num_devices = tables.columns.shape[0]
    num_bytes = tables.tensors[tensor].num_bytes
    for use in range(tables.tensors[tensor].first_reader, tables.tensors[tensor + 1].first_reader):
        reader = tables.readers[use]
        for lane in range(LANES):
            source, target = s.place[op, lane], s.place[reader, lane]
            route = tables.pairs[source * num_devices + target]
            there = s.end[lane] + route.latency + num_bytes / route.bandwidth
            before = s.arrival[reader, lane]
            is_later = (target != source) & (there > before)
            s.arrival[reader, lane] = there if is_later else before


@compiled
def _send_through_port(tables: Tables, s: LaneScratch, tensor: int, op: int, target: int) -> None:
    """Sends a tensor to one device through the sender's port, in the lanes where it lacks it."""
    num_devices = tables.columns.shape[0]
    num_bytes = tables.tensors[tensor].num_bytes
    for lane in range(LANES):
        source = s.place[op, lane]
        route = tables.pairs[source * num_devices + target]
        before = s.port[source, lane]
        ready = s.end[lane] + route.latency
        end = (ready if ready > before else before) + num_bytes / route.bandwidth
        s.landed[target, lane] = end
        s.port[source, lane] = end if (s.wanted[lane] >> target) & 1 == 1 else before


@compiled
def _deliver(tables: Tables, s: LaneScratch, tensor: int, op: int) -> None:
    """Lets the readers of a tensor wait for it where it had to travel."""
    for use in range(tables.tensors[tensor].first_reader, tables.tensors[tensor + 1].first_reader):
        reader = tables.readers[use]
        for lane in range(LANES):
            target = s.place[reader, lane]
            landed, before = s.landed[target, lane], s.arrival[reader, lane]
            is_later = (target != s.place[op, lane]) & (landed > before)
            s.arrival[reader, lane] = landed if is_later else before


@compiled
def _run_op(tables: Tables, mode: Mode, s: LaneScratch, op: int) -> None:
    """Runs one op in every lane; its end is left in the scratch."""
    for lane in range(LANES):
        device = s.place[op, lane]
        cost = tables.cost[op, tables.columns[device]]
        host = device * mode.host  # Host.ONE is 0, Host.PER_RANK 1
        issue = s.host[host, lane] + cost.launch
        free, arrival, latest = s.free[device, lane], s.arrival[op, lane], s.latest[lane]
        start = free if free > arrival else arrival
        end = (start if start > issue else issue) + cost.duration
        s.free[device, lane] = end
        issued = issue + cost.trail
        waited = end if end > issued else issued
        s.host[host, lane] = waited if cost.sync == 1 else issued
        s.end[lane] = end
        s.latest[lane] = end if end > latest else latest


@compiled
def sweep_lanes(tables: Tables, mode: Mode, s: LaneScratch) -> None:
    """Leaves the step time of each lane in `latest`.

    Every transfer has a reader that ends after it, so ops alone decide the step time. Where there
    is no route the latency is infinite, and so is the step time.
    """
    s.arrival[:] = 0.0
    s.free[:] = 0.0
    s.host[:] = 0.0
    s.port[:] = 0.0
    s.latest[:] = 0.0
    for op in range(tables.cost.shape[0]):
        _run_op(tables, mode, s, op)
        for tensor in range(tables.ops[op].first_output, tables.ops[op + 1].first_output):
            if mode.contention == _FREE:
                _send_freely(tables, s, tensor, op)
                continue
            every = _want(tables, s, tensor, op)
            if every == 0:
                continue
            for target in range(tables.columns.shape[0]):
                if (every >> target) & 1 == 1:
                    _send_through_port(tables, s, tensor, op, target)
            _deliver(tables, s, tensor, op)
