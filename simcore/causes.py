"""Why devices idle, and the chain of tasks that made a step long.

Axes: task (ops, that is computes and collectives, then transfers), dev. A collective or a transfer
begins when it is requested: what it waits for of the network is part of it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simcore.graph import OpGraph
from simcore.result import PathStep, RawRun, Transfer

HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """A run as tasks, and what occupied each device one after the other. Plain lists: it is walked.

    Attributes:
        graph: what ran.
        run: its arrays.
        transfers: as records.
        place: device of each op, -1 = a collective.
        begin: of each task, s.
        end: of each task, s.
        inputs: tensors of each op.
        producer: op of each tensor, -1 = none.
        readers: ops that read what each transfer brings, ascending.
        streams: tasks of each device in their order.
    """

    graph: OpGraph
    run: RawRun
    transfers: list[Transfer]
    place: list[int]
    begin: list[float]
    end: list[float]
    inputs: list[list[int]]
    producer: list[int]
    readers: list[list[int]]
    streams: list[list[int]]


def make_timeline(graph: OpGraph, run: RawRun, num_devices: int) -> Timeline:
    """Returns the timeline of a run; under ``inline`` transfers occupy both of their devices."""
    begin = np.where(run.placement < 0, run.request, run.start)
    inputs, first = graph.inputs.tolist(), graph.first_input.tolist()
    transfers, readers = run.transfers(), _readers(graph, run, num_devices)
    streams = _op_streams(run, num_devices)
    if run.p2p == "inline":
        streams = _with_transfers(streams, transfers, readers, graph.num_ops)
    return Timeline(
        graph=graph,
        run=run,
        transfers=transfers,
        place=run.placement.tolist(),
        begin=begin.tolist() + run.transfer_request.tolist(),
        end=run.end.tolist() + run.transfer_end.tolist(),
        inputs=[inputs[a:b] for a, b in itertools.pairwise(first)],
        producer=graph.tensor_producer.tolist(),
        readers=readers,
        streams=streams,
    )


def _readers(graph: OpGraph, run: RawRun, num_devices: int) -> list[list[int]]:
    """Returns the ops that read what each transfer brings."""
    tensor = np.repeat(np.arange(graph.num_tensors), np.diff(graph.first_consumer))
    key = tensor * num_devices + run.placement[graph.consumers]
    order = np.argsort(key, kind="stable")
    wanted = run.transfer_tensor * num_devices + run.transfer_target
    first = np.searchsorted(key[order], wanted, "left").tolist()
    last = np.searchsorted(key[order], wanted, "right").tolist()
    ops = graph.consumers[order].tolist()
    return [ops[a:b] for a, b in zip(first, last, strict=True)]


def _op_streams(run: RawRun, num_devices: int) -> list[list[int]]:
    """Returns the ops of each device in the order in which they ran: by (start, end, op)."""
    ops = np.flatnonzero(run.placement >= 0)
    place = run.placement[ops]
    order = ops[np.lexsort((ops, run.end[ops], run.start[ops], place))]
    first = np.searchsorted(np.sort(place), np.arange(num_devices + 1)).tolist()
    return [order[a:b].tolist() for a, b in itertools.pairwise(first)]


def _with_transfers(
    streams: list[list[int]], transfers: list[Transfer], readers: list[list[int]], num_ops: int
) -> list[list[int]]:
    """Puts transfers into the streams of both their devices, before their first readers."""
    places = [[(op, 1, op) for op in stream] for stream in streams]
    for number, transfer in enumerate(transfers):
        for device in (transfer.source, transfer.target):
            places[device].append((readers[number][0], 0, num_ops + number))
    return [[task for *_, task in sorted(stream)] for stream in places]


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
    num_ops = timeline.graph.num_ops
    communication = launch = previous = 0.0
    for task in timeline.streams[device]:
        begin, end = timeline.begin[task], timeline.end[task]
        if begin > previous:
            ready = previous
            if task in arrival:
                request, there = arrival[task]
                communication += max(0.0, min(there, begin) - max(request, previous))
                ready = max(previous, there)
            launch += max(0.0, min(_issue(timeline, task)[0], begin) - ready)
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
    for number, transfer in enumerate(timeline.transfers):
        note(timeline.readers[number], transfer.request, transfer.end)
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
    task = timeline.end.index(max(timeline.end))
    while True:
        steps.append(_step(timeline, task, names))
        causes = list(_causes(timeline, task, before, incoming))
        cause = max(causes, key=timeline.end.__getitem__, default=None)
        issue, awaited = _issue(timeline, task)
        if cause is None or issue > timeline.end[cause]:
            begin = timeline.end[awaited] if awaited >= 0 else 0.0
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
    num_ops = timeline.graph.num_ops
    yield from before.get(task, ())
    if task >= num_ops:
        if timeline.run.p2p == "rendezvous":
            yield from before.get(timeline.readers[task - num_ops][0], ())
        yield timeline.producer[timeline.transfers[task - num_ops].tensor]
        return
    device = timeline.place[task]
    for tensor in timeline.inputs[task]:
        producer = timeline.producer[tensor]
        if producer >= 0:
            yield incoming.get((tensor, device), producer)


def _issue(timeline: Timeline, task: int) -> tuple[float, int]:
    """Returns when a task was issued, and the op that its host last waited for before that."""
    run, num_ops = timeline.run, timeline.graph.num_ops
    if task >= num_ops:
        number = task - num_ops
        return float(run.transfer_issue[number]), int(run.transfer_waited[number])
    if timeline.place[task] < 0:
        return 0.0, -1
    return float(run.issue[task]), int(run.waited[task])


def _step(timeline: Timeline, task: int, names: tuple[str, ...]) -> PathStep:
    graph, begin, end = timeline.graph, timeline.begin[task], timeline.end[task]
    if task >= graph.num_ops:
        transfer = timeline.transfers[task - graph.num_ops]
        place = f"{names[transfer.source]} -> {names[transfer.target]}"
        return PathStep("transfer", graph.tensor_names[transfer.tensor], place, begin, end)
    if timeline.place[task] < 0:
        return PathStep("collective", graph.op_names[task], graph.op_targets[task], begin, end)
    return PathStep("compute", graph.op_names[task], names[timeline.place[task]], begin, end)
