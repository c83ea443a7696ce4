"""Placements in, times and memory out: batches on all cores, or one with its whole timeline."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from simcore.errors import DeadlockError, PlanError
from simcore.kernel import (
    LANES,
    NONE,
    Contention,
    Engine,
    Outcome,
    Plans,
    Scratch,
    Status,
    make_lanes,
    make_outcome,
    make_scratch,
    run_events,
    run_fluid,
    run_lanes,
    run_sweep,
)
from simcore.lower import Problem
from simcore.result import RawRun

MIN_OPS_PER_THREAD = 100_000  # ops of all its plans; less work is not worth a thread
MIN_LANES = 4  # plans; fewer are faster one by one
MAX_PORTS = 16  # devices; the same


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchResult:
    """The outcome of every plan of a batch."""

    step_time: NDArray[np.float64]  # [plan] s, inf if illegal
    allocated: NDArray[np.int64]  # [plan, dev] peak bytes of the allocator
    reserved: NDArray[np.int64]  # [plan, dev] with fragmentation and context; decides what fits
    status: NDArray[np.uint8]  # [plan] Status
    culprit: NDArray[np.int32]  # [plan] op that broke a rule, -1 = none
    overflow: NDArray[np.int64]  # [plan] bytes over capacity, summed over devices


def simulate_batch(
    problem: Problem, placements: NDArray[np.integer], *, threads: int | None = None
) -> BatchResult:
    """Simulates many placements on all cores.

    Args:
        problem: the lowered problem.
        placements: device index of each op, [plan, op].
        threads: number of threads, None = one per core. The result does not depend on it.

    Returns:
        Times, memory and a status for every plan; an illegal plan raises nothing.

    Raises:
        PlanError: the array does not have one column per op, or is not of integers.
    """
    plans = _as_plans(placements)
    if plans.ndim != 2 or plans.shape[1] != problem.graph.num_ops:
        raise PlanError(
            f"placements must be [plan, {problem.graph.num_ops} ops], not {plans.shape}"
        )
    out = make_outcome(len(plans), len(problem.cluster.devices))
    batch = Plans(plans, out)
    share_out(partial(_run, problem, batch), len(plans), plans.size, threads)
    return with_memory(problem, out)


def share_out(
    work: Callable[[int, int], None], num_plans: int, num_ops: int, threads: int | None
) -> None:
    """Runs ``work(begin, end)`` for ranges of plans, one a thread.

    Args:
        work: does the plans from begin to end.
        num_plans: how many there are.
        num_ops: ops of all plans together; few are not worth a thread.
        threads: number of threads, None = one per core.
    """
    most = max(1, min(num_plans, num_ops // MIN_OPS_PER_THREAD))
    workers = min(max(1, threads or os.cpu_count() or 1), most)
    bounds = np.linspace(0, num_plans, workers + 1).astype(int).tolist()
    if workers == 1:
        work(0, num_plans)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, bounds[:-1], bounds[1:]))


def _as_plans(placements: NDArray[np.integer]) -> NDArray[np.int32]:
    """Returns device indices as the kernel takes them; none wraps round to a legal one."""
    given = np.asarray(placements)
    if given.size and given.dtype.kind not in "iu":
        raise PlanError(f"placements must be integers, not {given.dtype}")
    if given.size and not np.can_cast(given.dtype, np.int32):
        given = np.where((given >= 0) & (given < 2**31), given, NONE)
    return np.require(given, np.int32, ["C", "W"])


def _run(problem: Problem, batch: Plans, begin: int, end: int) -> None:
    """Runs one thread's share of a batch on the problem's engine."""
    tables, mode, scratch = problem.tables, problem.mode, make_scratch(problem.tables)
    if problem.lane_tables is not None and problem.engine in {Engine.LANES, Engine.SWEEP}:
        lanes = make_lanes(problem.lane_tables, _num_lanes(problem, end - begin))
        run_lanes(tables, problem.lane_tables, mode, batch, scratch, lanes, begin, end)
    elif problem.engine == Engine.SWEEP:
        run_sweep(tables, mode, batch, scratch, begin, end)
    elif problem.engine == Engine.FLUID:
        run_fluid(tables, mode, batch, scratch, begin, end)
    else:
        run_events(tables, mode, batch, scratch, begin, end)


def _num_lanes(problem: Problem, num_plans: int) -> int:
    """Returns how many plans go in lock-step: one where there are few of them, or many devices.

    Lanes look at every device that any of them sends to, a plan alone only at its own.
    """
    is_port = problem.mode.contention == Contention.PORT
    are_many = is_port and len(problem.tables.columns) > MAX_PORTS
    is_single = problem.engine == Engine.SWEEP or num_plans < MIN_LANES or are_many
    return 1 if is_single else LANES


def with_memory(problem: Problem, out: Outcome) -> BatchResult:
    """Returns the outcome of a batch with what it reserves, and whether that fits."""
    reserved = problem.reserved(out.allocated, out.used)
    overflow = np.maximum(reserved - problem.capacity, 0).sum(axis=1)
    too_big = (overflow > 0) & (out.status == Status.OK)
    return BatchResult(
        step_time=out.step_time,
        allocated=out.allocated,
        reserved=reserved,
        status=np.where(too_big, np.uint8(Status.OUT_OF_MEMORY), out.status),
        culprit=out.culprit,
        overflow=overflow,
    )


def run_placement(
    problem: Problem, placement: NDArray[np.integer], priorities: Sequence[int] | None = None
) -> RawRun:
    """Simulates one placement and returns its whole timeline.

    Args:
        problem: the lowered problem.
        placement: device index of each op, [op].
        priorities: one number per op, least first; None = the problem's.

    Raises:
        PlanError: an op is on a device that cannot run it, a unit is split, a route is missing.
    """
    tables = problem.tables
    if priorities is not None:
        tables = tables._replace(ops=tables.ops.copy())
        tables.ops["priority"][:-1] = priorities
    plans = _as_plans(placement).reshape(1, -1)
    if plans.shape[1] != problem.graph.num_ops:
        raise PlanError(f"placement of {plans.shape[1]} ops, expected {problem.graph.num_ops}")
    out, scratch = make_outcome(1, len(problem.cluster.devices)), make_scratch(tables)
    play = run_fluid if problem.mode.fluid else run_events
    play(tables, problem.mode, Plans(plans, out), scratch, 0, 1)
    if out.status[0] == Status.DEADLOCK:
        raise DeadlockError(_deadlock(problem, scratch))
    if out.status[0] != Status.OK:
        raise PlanError(_explain(problem, plans[0], Status(out.status[0]), int(out.culprit[0])))
    num_transfers = int(scratch.ops["first_transfer"][-1])
    transfers = scratch.comms[:num_transfers]
    waited = _waited(problem, plans[0])
    issue, transfer_waited = _transfer_hosts(problem, scratch, num_transfers, waited)
    return RawRun(
        step_time=float(out.step_time[0]),
        placement=plans[0],
        request=_requests(problem, scratch, num_transfers),
        start=scratch.ops["start"][:-1],
        end=scratch.ops["end"][:-1],
        issue=scratch.ops["issue"][:-1],
        waited=waited,
        transfer_tensor=transfers["tensor"],
        transfer_bytes=tables.tensors["num_bytes"][transfers["tensor"]],
        transfer_source=transfers["source"],
        transfer_target=transfers["target"],
        transfer_request=transfers["request"],
        transfer_start=transfers["start"],
        transfer_end=transfers["end"],
        transfer_issue=issue,
        transfer_waited=transfer_waited,
        p2p=problem.settings.p2p,
        allocated=out.allocated[0],
    )


def _requests(problem: Problem, scratch: Scratch, num_transfers: int) -> NDArray[np.float64]:
    """Returns when all members had reached each collective, [op] s; 0 for what computes."""
    requests = np.zeros(problem.graph.num_ops)
    ops = problem.tables.collectives["op"][:-1]
    requests[ops] = scratch.comms["request"][num_transfers : num_transfers + len(ops)]
    return requests


def _deadlock(problem: Problem, scratch: Scratch) -> str:
    """Names the first op of each device's stream that never ran."""
    graph, devices = problem.graph, problem.cluster.devices
    waiting = []
    for device, head in zip(devices, scratch.devices["head"], strict=False):
        if head == NONE:
            continue
        is_op = head < graph.num_ops
        tensor = 0 if is_op else int(scratch.comms["tensor"][head - graph.num_ops])
        name = graph.op_names[head] if is_op else f"the transfer of {graph.tensor_names[tensor]}"
        waiting.append(f"{device.name} waits at {name!r}")
    return f"the plan deadlocks: {'; '.join(waiting) or 'a collective is never reached'}"


def _waited(problem: Problem, placement: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns the op whose end the host last waited for before it issued an op, [op], or NONE."""
    num_ops = problem.graph.num_ops
    op = np.arange(num_ops)
    sync = problem.tables.cost["sync"][op, problem.tables.columns[placement]] == 1
    sync &= placement != NONE
    host = placement if problem.settings.host == "per_rank" else np.zeros(num_ops, np.int32)
    waited = np.full(num_ops, NONE)
    for number in np.unique(host[sync]):
        mine = np.flatnonzero(host == number)
        last = np.maximum.accumulate(np.where(sync[mine], mine, NONE))
        waited[mine[1:]] = last[:-1]
    return waited


def _transfer_hosts(
    problem: Problem, scratch: Scratch, num_transfers: int, waited: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Returns when its hosts came to each transfer, and the op one of them last waited for.

    Of two hosts the one that waited longer. Copies take no place in a host's list: 0 and NONE.
    """
    issue, awaited = np.zeros(num_transfers), np.full(num_transfers, NONE)
    if problem.settings.p2p == "copy":
        return issue, awaited
    place, end = scratch.ops["place"][:-1], np.append(scratch.ops["end"][:-1], -1.0)
    for reader, first in enumerate(scratch.posts["first_inbound"].tolist()):
        transfer = first
        while transfer != NONE:
            hosts = [waited[reader]]
            issue[transfer] = scratch.posts["time"][reader]
            if problem.settings.p2p == "inline":
                issue[transfer] = scratch.messages["issue"][transfer]
                here = np.flatnonzero(place[reader:] == scratch.comms["source"][transfer])
                if len(here) and problem.settings.host == "per_rank":
                    hosts.append(waited[reader + here[0]])
            awaited[transfer] = max(hosts, key=lambda op: end[op])
            transfer = int(scratch.messages["next_inbound"][transfer])
    return issue, awaited


def _explain(problem: Problem, placement: NDArray[np.int32], status: Status, culprit: int) -> str:
    """Puts a status into words that name the op and the device."""
    devices = problem.cluster.devices
    name, number = problem.graph.op_names[culprit], int(placement[culprit])
    known = 0 <= number < len(devices)
    device = devices[number].name if known else f"number {number}"
    if status == Status.ILLEGAL_DEVICE:
        reason = "it has no time there" if known else "no such device"
        return f"op {name!r} cannot run on device {device!r}: {reason}"
    if status == Status.SPLIT_UNIT:
        unit = problem.graph.unit_names[problem.graph.unit[culprit]]
        return f"op {name!r} is on {device!r}, apart from its placement unit {unit!r}"
    return f"op {name!r} on {device!r}: a reader is on a device that no route leads to"
