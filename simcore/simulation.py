"""The ways into the simulator: one plan (raises), or a batch of placements (a status per plan)."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.collectives import ring_all_reduce
from simcore.errors import PlanError
from simcore.graph import OpClass, OpGraph, Role
from simcore.job import Job
from simcore.kernel import (
    NONE,
    Engine,
    Outcome,
    Plans,
    Status,
    make_lanes,
    make_outcome,
    make_scratch,
    run_events,
    run_lanes,
    run_sweep,
)
from simcore.lower import Problem
from simcore.plan import Plan, Settings
from simcore.result import (
    DeviceUse,
    PathStep,
    RawRun,
    Result,
    critical_path,
    idle_causes,
    remote_arrivals,
)

MIN_OPS_PER_THREAD = 100_000  # ops of all its plans; less work is not worth a thread


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
    most = max(1, min(len(plans), plans.size // MIN_OPS_PER_THREAD))
    workers = min(max(1, threads or os.cpu_count() or 1), most)
    bounds = np.linspace(0, len(plans), workers + 1).astype(int)

    def share(worker: int) -> None:
        _run(problem, batch, int(bounds[worker]), int(bounds[worker + 1]))

    if workers == 1:
        share(0)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(share, range(workers)))
    return _with_memory(problem, out)


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
    if problem.engine == Engine.LANES:
        run_lanes(tables, mode, batch, scratch, make_lanes(tables), begin, end)
    elif problem.engine == Engine.SWEEP:
        run_sweep(tables, mode, batch, scratch, begin, end)
    else:
        run_events(tables, mode, batch, scratch, begin, end)


def _with_memory(problem: Problem, out: Outcome) -> BatchResult:
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
    run_events(tables, problem.mode, Plans(plans, out), scratch, 0, 1)
    if out.status[0] != Status.OK:
        raise PlanError(_explain(problem, plans[0], Status(out.status[0]), int(out.culprit[0])))
    num_transfers = int(scratch.ops["first_transfer"][-1])
    transfers = scratch.transfers[:num_transfers]
    return RawRun(
        step_time=float(out.step_time[0]),
        placement=plans[0],
        start=scratch.ops["start"][:-1],
        end=scratch.ops["end"][:-1],
        issue=scratch.ops["issue"][:-1],
        waited=_waited(problem, plans[0]),
        transfer_tensor=transfers["tensor"],
        transfer_bytes=tables.tensors["num_bytes"][transfers["tensor"]],
        transfer_source=transfers["source"],
        transfer_target=transfers["target"],
        transfer_request=transfers["request"],
        transfer_start=transfers["start"],
        transfer_end=transfers["end"],
        allocated=out.allocated[0],
    )


def _waited(problem: Problem, placement: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns the op whose end the host last waited for before it issued an op, [op], or NONE."""
    num_ops = problem.graph.num_ops
    op = np.arange(num_ops)
    sync = problem.tables.cost["sync"][op, placement] == 1
    host = placement if problem.settings.host == "per_rank" else np.zeros(num_ops, np.int32)
    waited = np.full(num_ops, NONE)
    for number in np.unique(host[sync]):
        mine = np.flatnonzero(host == number)
        last = np.maximum.accumulate(np.where(sync[mine], mine, NONE))
        waited[mine[1:]] = last[:-1]
    return waited


def _explain(problem: Problem, placement: NDArray[np.int32], status: Status, culprit: int) -> str:
    """Puts a status into words that name the op and the device."""
    devices = problem.cluster.devices
    if culprit == NONE:
        return "the plan deadlocks"
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


def simulate(
    graph: OpGraph, cluster: Cluster, job: Job, plan: Plan, *, settings: Settings | None = None
) -> Result:
    """Simulates one plan.

    Args:
        graph: the graph the plan is for.
        cluster: the cluster it is for.
        job: the job it is for.
        plan: the plan.
        settings: how to simulate; None = as the plan says.

    Returns:
        Step time, use of each device, memory and timeline; a plan that does not fit the memory is a
        result with ``feasible`` false, not an error.

    Raises:
        PlanError: the plan is for something else or breaks a rule; the first violation is named.
    """
    if violations := plan.validate(graph, cluster, job):
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise PlanError(violations[0] + more)
    problem = Problem.build(
        graph,
        cluster,
        job,
        settings or plan.settings,
        copies=plan.data_parallel_degree,
        reserve_memory=plan.constraints.reserve_memory_bytes,
        priorities=plan.priorities,
    )
    if plan.stages[0].mesh is not None:
        names = [device.name for device in cluster.devices]
        return run_data_parallel(problem, [names.index(d) for d in plan.stages[0].devices])
    unit_devices = plan.unit_devices(graph, cluster)
    run = run_placement(problem, problem.expand(unit_devices))
    return describe(problem, run)


def describe(problem: Problem, run: RawRun) -> Result:
    """Turns the arrays of a run into a result."""
    arrival = remote_arrivals(problem.graph, run)
    devices = range(len(problem.cluster.devices))
    uses = tuple(_use(problem, run, device, arrival) for device in devices)
    names = tuple(device.name for device in problem.cluster.devices)
    return Result(
        feasible=all(use.reserved <= use.capacity for use in uses),
        step_time=run.step_time,
        samples=problem.job.batch,
        devices=uses,
        critical_path=critical_path(problem.graph, run, names),
        run=run,
        batch_per_copy=problem.batch,
    )


def _use(
    problem: Problem,
    run: RawRun,
    device: int,
    arrival: dict[int, tuple[float, float]],
    extra: float = 0.0,
) -> DeviceUse:
    """Returns the use of one device in a step that lasts `extra` seconds longer than the run."""
    here = run.placement == device
    busy = float((run.end[here] - run.start[here]).sum())
    communication, launch = idle_causes(run, device, arrival)
    used = np.bincount(run.placement, minlength=len(run.allocated)) > 0
    spec = problem.cluster.devices[device]
    return DeviceUse(
        name=spec.name,
        kind=spec.kind,
        num_ops=int(here.sum()),
        busy=busy,
        communication=communication + extra,
        launch=launch,
        bubble=max(0.0, run.step_time - busy - communication - launch),
        allocated=int(run.allocated[device]),
        reserved=int(problem.reserved(run.allocated, used)[device]),
        capacity=int(problem.capacity[device]),
    )


def gradient_bytes(graph: OpGraph, batch: int | None) -> int:
    """Returns the bytes of parameter gradients that copies of the model must sum."""
    update = np.flatnonzero(graph.op_class == OpClass.UPDATE)
    read = np.concatenate(
        [graph.inputs[graph.first_input[op] : graph.first_input[op + 1]] for op in update]
        or [np.zeros(0, np.int32)]
    )
    gradients = read[graph.tensor_role[read] == Role.GRADIENT]
    return int(graph.at_batch(batch).tensor_bytes[gradients].sum())


def run_data_parallel(problem: Problem, devices: Sequence[int]) -> Result:
    """Simulates copies of the model on the devices, each with its slice of the batch.

    Every copy runs on its own; the gradients are then summed by a ring all-reduce in closed form,
    which is not overlapped with the backward.

    Args:
        problem: the problem at the batch of one copy, with one host per rank.
        devices: device indices, in ring order.

    Raises:
        PlanError: no parameter of the graph is trained, so copies of it would have nothing to sum.
    """
    if problem.graph.num_ops and not (problem.graph.op_class == OpClass.UPDATE).any():
        raise PlanError(
            f"{problem.graph.name}: data parallel needs parameters that are trained; the graph "
            "updates none"
        )
    runs = [run_placement(problem, np.full(problem.graph.num_ops, device)) for device in devices]
    total = gradient_bytes(problem.graph, problem.batch)
    reduce_time = ring_all_reduce(total, problem.cluster, devices)
    slowest = max(runs, key=lambda run: run.step_time)
    uses = []
    for number in range(len(problem.cluster.devices)):
        run = runs[devices.index(number)] if number in devices else slowest
        use = _use(problem, run, number, {}, reduce_time if number in devices else 0.0)
        missing = slowest.step_time + reduce_time - use.busy - use.communication - use.launch
        uses.append(replace(use, bubble=max(0.0, missing)))
    names = tuple(device.name for device in problem.cluster.devices)
    step_time = slowest.step_time + reduce_time
    path = critical_path(problem.graph, slowest, names)
    ring = PathStep("collective", "gradient all-reduce", "ring", slowest.step_time, step_time)
    return Result(
        feasible=all(use.reserved <= use.capacity for use in uses),
        step_time=step_time,
        samples=problem.job.batch,
        devices=tuple(uses),
        critical_path=(*path, ring),
        run=slowest,
        batch_per_copy=problem.batch,
        collective_time=reduce_time,
    )
