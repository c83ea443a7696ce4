"""Why devices idle, and the chain of tasks that made a step long.

Axes: task (ops, that is computes and collectives, then transfers), dev. A collective or a transfer
begins when it is requested: what it waits for of the network is part of it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simcore.graph import OpGraph
from simcore.result import PathStep, RawRun, Transfer

HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """A run as tasks, and what occupied each device one after the other."""

    graph: OpGraph
    run: RawRun
    transfers: list[Transfer]
    readers: list[int]  # first op that reads what each transfer brings
    begin: NDArray[np.float64]  # [task] s
    end: NDArray[np.float64]  # [task] s
    streams: list[list[int]]  # tasks of each device in their order


def make_timeline(graph: OpGraph, run: RawRun, num_devices: int) -> Timeline:
    """Returns the timeline of a run; under ``inline`` transfers occupy both of their devices."""
    transfers = run.transfers()
    readers = [_readers(graph, run, transfer)[0] for transfer in transfers]
    begin = np.where(run.placement < 0, run.request, run.start)
    moves: list[list[int]] = [[] for _ in range(num_devices)]
    if run.p2p == "inline":
        for number, transfer in enumerate(transfers):
            for device in (transfer.source, transfer.target):
                moves[device].append(graph.num_ops + number)
    streams = []
    for device in range(num_devices):
        ops = np.flatnonzero(run.placement == device)
        tasks = ops[np.lexsort((ops, run.end[ops], run.start[ops]))].tolist()
        if moves[device]:  # their places in the program are known; they come before their readers
            places = [(op, 1, op) for op in tasks]
            places += [(readers[task - graph.num_ops], 0, task) for task in moves[device]]
            tasks = [task for *_, task in sorted(places)]
        streams.append(tasks)
    return Timeline(
        graph=graph,
        run=run,
        transfers=transfers,
        readers=readers,
        begin=np.concatenate([begin, run.transfer_request]),
        end=np.concatenate([run.end, run.transfer_end]),
        streams=streams,
    )


def _readers(graph: OpGraph, run: RawRun, transfer: Transfer) -> list[int]:
    """Returns the ops on the target that read what a transfer brings."""
    begin, end = graph.first_consumer[transfer.tensor : transfer.tensor + 2]
    readers = graph.consumers[begin:end]
    ops: list[int] = readers[run.placement[readers] == transfer.target].tolist()
    return ops


def idle_causes(
    timeline: Timeline, device: int, arrival: dict[int, tuple[float, float]]
) -> tuple[float, float]:
    """Returns (communication, launch): seconds a device idles for each cause.

    A gap before an op counts as communication while its last remote input is requested but not
    there, and as launch once its inputs are there but the host has not issued it. A transfer that
    occupies the device is communication.

    Args:
        timeline: the run.
        device: device index.
        arrival: see `remote_arrivals`.
    """
    num_ops, run = timeline.graph.num_ops, timeline.run
    communication = launch = previous = 0.0
    for task in timeline.streams[device]:
        begin, end = float(timeline.begin[task]), float(timeline.end[task])
        if begin > previous:
            ready = previous
            if task in arrival:
                request, there = arrival[task]
                communication += max(0.0, min(there, begin) - max(request, previous))
                ready = max(previous, there)
            issue = run.issue[task] if task < num_ops else run.transfer_issue[task - num_ops]
            launch += max(0.0, min(float(issue), begin) - ready)
        if task >= num_ops:
            communication += end - begin
        previous = max(previous, end)
    return communication, launch


def remote_arrivals(timeline: Timeline) -> dict[int, tuple[float, float]]:
    """Returns op -> (request, end) of the last transfer or collective that the op waits for.

    A collective that stands behind another one counts as requested once its own members are there.
    """
    graph, run = timeline.graph, timeline.run
    last: dict[int, tuple[float, float]] = {}

    def note(ops: list[int], request: float, end: float) -> None:
        for op in ops:
            if end >= last.get(op, (0.0, -1.0))[1]:
                last[op] = (request, end)

    for collective in np.flatnonzero(run.placement < 0).tolist():
        first, behind = graph.first_consumer[graph.first_output[collective : collective + 2]]
        ops = np.unique(graph.consumers[first:behind]).tolist()
        note(ops, _reached(graph, run, collective), float(run.end[collective]))
    for transfer in timeline.transfers:
        note(_readers(graph, run, transfer), transfer.request, transfer.end)
    return last


def _reached(graph: OpGraph, run: RawRun, collective: int) -> float:
    """Returns when the computes that a collective waits for were through, s."""
    inputs = graph.inputs[graph.first_input[collective] : graph.first_input[collective + 1]]
    producers = graph.tensor_producer[inputs]
    producers = producers[producers >= 0]
    computes = producers[run.placement[producers] >= 0]
    return float(run.end[computes].max(initial=0.0))


def critical_path(timeline: Timeline, names: tuple[str, ...]) -> tuple[PathStep, ...]:
    """Returns the chain of tasks, first to last, each of which made the next one wait.

    From the task that ends last, it steps to whatever ended when the task could begin: an input's
    transfer or producer, the task before it on the device, or the host's issue, which goes back to
    the op that the host last waited for.

    Args:
        timeline: the run.
        names: of the devices.
    """
    if not timeline.graph.num_ops:
        return ()
    before = _tasks_before(timeline)
    incoming = {
        (transfer.tensor, transfer.target): timeline.graph.num_ops + number
        for number, transfer in enumerate(timeline.transfers)
    }
    steps: list[PathStep] = []
    task = int(timeline.end.argmax())
    while True:
        steps.append(_step(timeline, task, names))
        causes = list(_causes(timeline, task, before, incoming))
        cause = max(causes, key=lambda one: float(timeline.end[one]), default=None)
        issue, awaited = _issue(timeline, task)
        if cause is None or issue > timeline.end[cause]:
            begin = float(timeline.end[awaited]) if awaited >= 0 else 0.0
            if issue > begin:
                steps.append(PathStep("launch", steps[-1].name, HOST, begin, issue))
            if awaited < 0:
                return tuple(reversed(steps))
            cause = awaited
        task = cause


def _tasks_before(timeline: Timeline) -> dict[int, list[int]]:
    """Returns task -> the tasks before it on its devices."""
    before: dict[int, list[int]] = {}
    for stream in timeline.streams:
        for task, following in itertools.pairwise(stream):
            before.setdefault(following, []).append(task)
    return before


def _causes(
    timeline: Timeline,
    task: int,
    before: dict[int, list[int]],
    incoming: dict[tuple[int, int], int],
) -> Iterator[int]:
    """Yields the tasks that a task had to wait for."""
    graph, run = timeline.graph, timeline.run
    yield from before.get(task, ())
    if task >= graph.num_ops:
        transfer = timeline.transfers[task - graph.num_ops]
        if run.p2p == "rendezvous":
            yield from before.get(timeline.readers[task - graph.num_ops], ())
        yield int(graph.tensor_producer[transfer.tensor])
        return
    for tensor in graph.inputs[graph.first_input[task] : graph.first_input[task + 1]].tolist():
        producer = int(graph.tensor_producer[tensor])
        if producer >= 0:
            yield incoming.get((tensor, int(run.placement[task])), producer)


def _issue(timeline: Timeline, task: int) -> tuple[float, int]:
    """Returns when a task was issued, and the op that its host last waited for before that."""
    run, num_ops = timeline.run, timeline.graph.num_ops
    if task >= num_ops:
        number = task - num_ops
        return float(run.transfer_issue[number]), int(run.transfer_waited[number])
    if run.placement[task] < 0:
        return 0.0, -1
    return float(run.issue[task]), int(run.waited[task])


def _step(timeline: Timeline, task: int, names: tuple[str, ...]) -> PathStep:
    graph, run = timeline.graph, timeline.run
    begin, end = float(timeline.begin[task]), float(timeline.end[task])
    if task >= graph.num_ops:
        transfer = timeline.transfers[task - graph.num_ops]
        place = f"{names[transfer.source]} -> {names[transfer.target]}"
        return PathStep("transfer", graph.tensor_names[transfer.tensor], place, begin, end)
    if run.placement[task] < 0:
        return PathStep("collective", graph.op_names[task], graph.op_targets[task], begin, end)
    return PathStep("compute", graph.op_names[task], names[run.placement[task]], begin, end)
