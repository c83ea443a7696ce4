"""The short cut for static orders: one pass over the ops instead of events.

Under program order, and with transfers that are served in plan order (or hold nothing), no decision
depends on event timing: every start is the latest of a few times that are known when the op or
transfer is reached in program order. The additions are those of the event loop, in its order, so
the answer is the same to the last bit.
"""

import numpy as np

from simcore.kernel.compiled import compiled
from simcore.kernel.records import (
    NONE,
    Contention,
    Host,
    Mode,
    Scratch,
    Status,
    Tables,
)

_OK, _UNREACHABLE = int(Status.OK), int(Status.UNREACHABLE)
_ONE = int(Host.ONE)
_FREE, _PORT = int(Contention.NONE), int(Contention.PORT)


@compiled
def _list_targets(tables: Tables, s: Scratch, tensor: int, source: int, now: float) -> int:
    """Lists the devices that lack a tensor, ascending; returns how many there are.

    Collectives that read it need no transfer: they only wait for it.
    """
    count = 0
    for use in range(tables.tensors[tensor].first_reader, tables.tensors[tensor + 1].first_reader):
        reader = tables.readers[use]
        target = s.ops[reader].place
        if target == NONE:
            s.ops[reader].arrival = max(s.ops[reader].arrival, now)
            continue
        if target == source or s.devices[target].stamp == tensor:
            continue
        s.devices[target].stamp = tensor
        at = count
        while at > 0 and s.devices[at - 1].listed > target:
            s.devices[at].listed = s.devices[at - 1].listed
            at -= 1
        s.devices[at].listed = target
        count += 1
    return count


@compiled
def _send(tables: Tables, mode: Mode, s: Scratch, pair: int, num_bytes: int, now: float) -> float:
    """Returns when a tensor that is there now has arrived; holds what the discipline holds."""
    route = tables.pairs[pair]
    start = now + route.latency
    if mode.contention == _FREE:
        return float(start + num_bytes / route.bandwidth)
    engine = tables.bandwidth.shape[0] + pair // tables.columns.shape[0]
    start = max(start, s.queues[engine].free)
    if mode.contention == _PORT:
        s.queues[engine].free = start + num_bytes / route.bandwidth
        return float(s.queues[engine].free)
    first, last = route.first_hop, tables.pairs[pair + 1].first_hop
    for hop in range(first, last):
        start = max(start, s.queues[tables.hops[hop]].free)
    end = start + num_bytes / route.bandwidth
    s.queues[engine].free = end
    for hop in range(first, last):
        s.queues[tables.hops[hop]].free = end
    return float(end)


@compiled
def _send_outputs(tables: Tables, mode: Mode, s: Scratch, op: int, now: float) -> int:
    """Sends what an op wrote to where it is read; returns the status."""
    source = s.ops[op].place
    row = source * tables.columns.shape[0]
    for tensor in range(tables.ops[op].first_output, tables.ops[op + 1].first_output):
        count = _list_targets(tables, s, tensor, source, now)
        if count == 0:
            continue
        for index in range(count):
            target = s.devices[index].listed
            if tables.pairs[row + target].reachable == 0:
                return _UNREACHABLE
            num_bytes = tables.tensors[tensor].num_bytes
            s.devices[target].arrival = _send(tables, mode, s, row + target, num_bytes, now)
        for use in range(
            tables.tensors[tensor].first_reader, tables.tensors[tensor + 1].first_reader
        ):
            reader = tables.readers[use]
            target = s.ops[reader].place
            if target != source and target != NONE:
                s.ops[reader].arrival = max(s.ops[reader].arrival, s.devices[target].arrival)
    return _OK


@compiled
def _run_collective(tables: Tables, mode: Mode, s: Scratch, op: int) -> float:
    """Runs a collective, which is at its place in plan order; returns its end."""
    index = tables.ops[op].collective
    first, last = tables.collectives[index].first_load, tables.collectives[index + 1].first_load
    start = s.ops[op].arrival + tables.collectives[index].latency
    if mode.contention != _FREE and mode.contention != _PORT:
        for load in range(first, last):
            start = max(start, s.queues[tables.loads[load].channel].free)
    end = start + tables.collectives[index].duration
    if mode.contention != _FREE and mode.contention != _PORT:
        for load in range(first, last):
            s.queues[tables.loads[load].channel].free = end
    for tensor in range(tables.ops[op].first_output, tables.ops[op + 1].first_output):
        for use in range(
            tables.tensors[tensor].first_reader, tables.tensors[tensor + 1].first_reader
        ):
            reader = tables.readers[use]
            s.ops[reader].arrival = max(s.ops[reader].arrival, end)
    return float(end)


@compiled
def _open(tables: Tables, s: Scratch) -> None:
    for op in range(tables.cost.shape[0]):
        s.ops[op].arrival = 0.0
    for device in range(tables.columns.shape[0]):
        s.devices[device].free = 0.0
        s.devices[device].host_time = 0.0
        s.devices[device].stamp = NONE
    for resource in range(s.queues.shape[0]):
        s.queues[resource].free = 0.0


@compiled
def sweep(tables: Tables, mode: Mode, s: Scratch) -> tuple[int, int, float]:
    """Returns (status, culprit op, step time) of the placement whose ops are listed in scratch.

    Every transfer has a reader that ends after it, so ops and collectives decide the step time.
    """
    _open(tables, s)
    step_time = 0.0
    for op in range(tables.cost.shape[0]):
        device = s.ops[op].place
        if device == NONE:
            step_time = max(step_time, _run_collective(tables, mode, s, op))
            continue
        cost = tables.cost[op, tables.columns[device]]
        host = 0 if mode.host == _ONE else device
        issue = s.devices[host].host_time + cost.launch
        start = max(s.devices[device].free, s.ops[op].arrival, issue)
        end = start + cost.duration
        s.devices[device].free = end
        issued = issue + cost.trail
        s.devices[host].host_time = max(end, issued) if cost.sync == 1 else issued
        step_time = max(step_time, end)
        status = _send_outputs(tables, mode, s, op, end)
        if status != _OK:
            return status, op, np.inf
    return _OK, NONE, step_time
