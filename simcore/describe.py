"""A simulated run -> what it says of every device and of the step."""

import numpy as np

from simcore.breakdown import NOTHING, Held, memory_breakdown
from simcore.causes import Timeline, critical_path, idle_causes, make_timeline, remote_arrivals
from simcore.lower import Problem
from simcore.result import DeviceUse, RawRun, Result


def describe(problem: Problem, run: RawRun, held: Held = NOTHING) -> Result:
    """Turns the arrays of a run into a result.

    Args:
        problem: what was played.
        run: how it went.
        held: what the bytes are that ops hold for the whole step, where the graph does not say.
    """
    memory = memory_breakdown(problem, run, held)
    names = problem.cluster.device_names
    timeline = make_timeline(problem.graph, run, len(names))
    arrival = remote_arrivals(timeline)
    used = np.isin(np.arange(len(names)), run.placement)
    reserved = problem.reserved(run.allocated, used)
    uses = tuple(
        _use(problem, timeline, device, arrival, (memory[device], int(reserved[device])))
        for device in range(len(names))
    )
    return Result(
        feasible=all(use.reserved <= use.capacity for use in uses),
        step_time=run.step_time,
        samples=problem.job.batch,
        devices=uses,
        critical_path=critical_path(timeline, names),
        graph=problem.graph,
        run=run,
        batch_per_copy=problem.batch,
    )


def _use(
    problem: Problem,
    timeline: Timeline,
    device: int,
    arrival: dict[int, tuple[float, float]],
    memory: tuple[dict[str, int], int],
) -> DeviceUse:
    """Returns the use of one device, given its memory by class and the bytes reserved."""
    run = timeline.run
    here = run.placement == device
    busy = float((run.end[here] - run.start[here]).sum())
    communication, launch = idle_causes(timeline, device, arrival)
    spec = problem.cluster.devices[device]
    return DeviceUse(
        name=spec.name,
        kind=spec.kind,
        num_ops=int(here.sum()),
        busy=busy,
        communication=communication,
        launch=launch,
        bubble=max(0.0, run.step_time - busy - communication - launch),
        allocated=int(run.allocated[device]),
        memory=memory[0],
        reserved=memory[1],
        capacity=int(problem.capacity[device]),
    )
