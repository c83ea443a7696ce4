"""Sharded plans played: buckets of gradients, the timeline of one device, its memory.

All devices of a mesh do the same at the same time, so one of them stands for all. It has one
compute stream and one host, in program order. A collective starts when what it reads is there, or
also behind the one before it; a bucket of gradients is summed behind the last of them.
"""

import math

import numpy as np

from simcore.kernel.compiled import compiled, compiled_entry
from simcore.kernel.records import NONE
from simcore.kernel.shard_records import (
    COPIES,
    POINTS,
    STEPS,
    Change,
    Count,
    ShardOutcome,
    ShardScratch,
    ShardTables,
)
from simcore.kernel.shard_states import find_states
from simcore.kernel.shards import lower_shards

_HANDLES, _LOCALS, _STORES = int(Count.HANDLES), int(Count.LOCALS), int(Count.STORES)
_BUCKETS = int(Count.BUCKETS)
_SLICE, _ALL_REDUCE = int(Change.SLICE), int(Change.ALL_REDUCE)


@compiled
def _fill_buckets(t: ShardTables, s: ShardScratch) -> int:
    """Puts the gradients that updates read into buckets; returns their bytes."""
    bucket, filled, total, is_open = 0, 0, 0, False
    limit, last = t.first_bucket, NONE
    for handle in range(s.counts[_HANDLES]):
        row = s.handles[handle]
        if row.bucket == NONE:
            continue
        row.bucket = bucket
        played = s.locals[row.producer].played
        last = max(last, 2 * played + (1 if played != row.producer else 0))
        filled += row.num_bytes
        total += row.num_bytes
        s.buckets[bucket].last = last
        s.buckets[bucket].num_bytes = filled
        s.buckets[bucket].arrival = 0.0
        is_open = True
        if limit > 0 and filled >= limit:
            bucket, filled, limit, is_open = bucket + 1, 0, t.bucket, False
    s.counts[_BUCKETS] = bucket + (1 if is_open else 0)
    return total


@compiled
def _place_collectives(s: ShardScratch) -> int:
    """Puts each collective behind its last producer; returns the first of those that have none."""
    unbound = NONE
    for local in range(s.counts[_LOCALS] - 1, -1, -1):
        row = s.locals[local]
        row.played = local
        if row.change == NONE or row.change == _SLICE:
            continue
        last = NONE
        for index in range(row.first_input, s.locals[local + 1].first_input):
            last = max(last, s.handles[s.inputs[index]].producer)
        if last == NONE:
            row.next = unbound
            unbound = local
        else:
            row.next = s.locals[last].behind
            s.locals[last].behind = local
            row.played = last
    return unbound


@compiled
def collective_time(t: ShardTables, axis: int, change: int, num_bytes: int) -> tuple[float, float]:
    """Returns latency and duration of a collective."""
    if num_bytes <= 0:
        return 0.0, 0.0
    mantissa, exponent = math.frexp(float(num_bytes))
    place = (exponent - 1 + 2.0 * mantissa - 1.0) * STEPS
    point = min(int(place), POINTS - 2)
    part = place - point
    a, b = t.timings[axis, change, point], t.timings[axis, change, point + 1]
    latency = a.latency + (b.latency - a.latency) * part
    return latency, a.duration + (b.duration - a.duration) * part


@compiled
def _set_ready(s: ShardScratch, local: int, end: float) -> None:
    """Notes when the outputs of a local op are there."""
    for handle in range(s.locals[local].first_handle, s.locals[local + 1].first_handle):
        s.handles[handle].ready = end
        bucket = s.handles[handle].bucket
        if bucket != NONE:
            s.buckets[bucket].arrival = max(s.buckets[bucket].arrival, end)


@compiled
def _run_collectives(
    t: ShardTables, s: ShardScratch, local: int, stream: float
) -> tuple[float, float]:
    """Runs a chain of collectives; returns when the stream is free, and the latest end."""
    latest = 0.0
    while local != NONE:
        row = s.locals[local]
        start = 0.0
        for index in range(row.first_input, s.locals[local + 1].first_input):
            start = max(start, s.handles[s.inputs[index]].ready)
        latency, duration = collective_time(t, row.axis, row.change, row.num_bytes)
        start += latency
        if t.in_order == 1:
            start = max(start, stream)
        stream = start + duration
        latest = max(latest, stream)
        _set_ready(s, local, stream)
        local = row.next
    return stream, latest


@compiled
def _run_bucket(t: ShardTables, s: ShardScratch, bucket: int, stream: float) -> float:
    """Sums one bucket over the copies; returns its end."""
    row = s.buckets[bucket]
    start = row.arrival if bucket == 0 else max(row.arrival, s.buckets[bucket - 1].arrival)
    latency, duration = collective_time(t, COPIES, _ALL_REDUCE, row.num_bytes)
    start += latency
    if t.in_order == 1:
        start = max(start, stream)
    row.arrival = start + duration
    return float(row.arrival)


@compiled
def _arrival(t: ShardTables, s: ShardScratch, local: int, summed: int) -> float:
    """Returns when all that an op reads is there; an update reads sums.

    Never, where a sum waits for something behind the update: only `summed` buckets are through.
    """
    row, arrival = s.locals[local], 0.0
    sums = t.copies > 1 and row.change == NONE and t.ops[row.op].is_update == 1
    for index in range(row.first_input, s.locals[local + 1].first_input):
        handle = s.handles[s.inputs[index]]
        if sums and handle.bucket != NONE:
            if handle.bucket >= summed:
                return np.inf
            arrival = max(arrival, s.buckets[handle.bucket].arrival)
        else:
            arrival = max(arrival, handle.ready)
    return arrival


@compiled
def play_shards(t: ShardTables, s: ShardScratch, sample: int, chain: int) -> float:
    """Plays the local ops; returns the step time, inf = a deadlock.

    `chain` is the first collective that waits for nothing.
    """
    bucket = 0
    stream, step_time = _run_collectives(t, s, chain, 0.0)
    free, host = 0.0, 0.0
    for local in range(s.counts[_LOCALS]):
        row = s.locals[local]
        if row.change == NONE:
            op = t.ops[row.op]
            issue = host + op.launch
            free = max(free, _arrival(t, s, local, bucket), issue)
            free += t.variants[sample, row.variant].seconds
            host = max(free, issue) if op.sync == 1 else issue
            _set_ready(s, local, free)
        elif row.change == _SLICE:
            free = max(free, _arrival(t, s, local, bucket), host)
            _set_ready(s, local, free)
        step_time = max(step_time, free)
        if bucket < s.counts[_BUCKETS] and s.buckets[bucket].last == 2 * local:
            stream = _run_bucket(t, s, bucket, stream)
            step_time = max(step_time, stream)
            bucket += 1
        stream, latest = _run_collectives(t, s, row.behind, stream)
        step_time = max(step_time, latest)
        while bucket < s.counts[_BUCKETS] and s.buckets[bucket].last <= 2 * local + 1:
            stream = _run_bucket(t, s, bucket, stream)
            step_time = max(step_time, stream)
            bucket += 1
    return step_time


@compiled
def walk_shards(t: ShardTables, s: ShardScratch, sample: int, current: int) -> int:
    """Returns the peak bytes of a device's allocator, walked in program order."""
    for store in range(s.counts[_STORES]):
        row = s.stores[store]
        if row.is_held == 1:
            current += row.largest if row.is_used == 1 else 0
        elif row.first != NONE:
            s.locals[row.first].allocate += row.num_bytes
            s.locals[row.last].release += row.num_bytes
    for local in range(s.counts[_LOCALS]):
        if s.locals[local].change == NONE:
            current += t.variants[sample, s.locals[local].variant].resident
    peak = current
    for local in range(s.counts[_LOCALS]):
        row = s.locals[local]
        workspace = t.variants[sample, row.variant].workspace if row.change == NONE else 0
        current += row.allocate
        peak = max(peak, current + workspace)
        current -= row.release
    return int(peak)


@compiled_entry
def run_shards(
    t: ShardTables,
    plans: np.ndarray,
    out: ShardOutcome,
    s: ShardScratch,
    begin: int,
    end: int,
) -> None:
    """Lowers, plays and walks the plans begin to end of a batch, [plan, decision]."""
    for plan in range(begin, end):
        for group in range(t.decision.shape[0]):
            s.axis_of[group] = plans[plan, t.decision[group]]
        sample = 0
        if t.batch_group != NONE and s.axis_of[t.batch_group] >= 0:
            sample = 1 + s.axis_of[t.batch_group]
        if t.divides[sample] == 0:
            out.step_time[plan] = np.inf
            continue
        find_states(t, s)
        lower_shards(t, s, sample)
        chain, total = _place_collectives(s), 0
        s.counts[_BUCKETS] = 0
        if t.copies > 1:
            total = _fill_buckets(t, s) * t.holds_buckets
        out.num_ops[plan] = s.counts[_LOCALS] + s.counts[_BUCKETS]
        out.step_time[plan] = play_shards(t, s, sample, chain)
        out.allocated[plan] = walk_shards(t, s, sample, total)
