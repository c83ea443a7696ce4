"""A simulated step as a Chrome trace, one track per stream and per channel, for Perfetto."""

import os
from pathlib import Path

import msgspec

from simcore.cluster import Cluster
from simcore.errors import PlanError
from simcore.graph import OpGraph, Phase
from simcore.result import Result, Transfer
from simcore.units import US

Event = dict[str, object]

LANES = 1000  # tracks that one channel may have
RING = 10**9  # track of the collective


def chrome_trace(graph: OpGraph, cluster: Cluster, result: Result) -> list[Event]:
    """Returns trace events: process 0 holds the compute streams, process 1 the channels.

    Slices of one track never overlap: where concurrent transfers share a channel without
    contention, the channel gets further tracks. Arrows lead from a producer over the transfer to
    its first reader.
    """
    run = result.run
    events: list[Event] = [_name("process_name", 0, 0, "compute")]
    events.append(_name("process_name", 1, 0, "channels"))
    if run is None:
        return events
    for device, spec in enumerate(cluster.devices):
        events.append(_name("thread_name", 0, device, f"{spec.name} ({spec.kind})"))
    for op in range(graph.num_ops):
        args: Event = {"module": graph.op_modules[op], "phase": Phase(graph.phase[op]).name}
        place = (0, int(run.placement[op]))
        events.append(
            _slice(graph.op_names[op], place, float(run.start[op]), float(run.end[op]), args)
        )
    events += _transfer_events(graph, cluster, result)
    if result.collective_time:
        events.append(_name("thread_name", 1, RING, "ring"))
        begin = result.step_time - result.collective_time
        events.append(_slice("gradient all-reduce", (1, RING), begin, result.step_time, {}))
    return events


def _transfer_events(graph: OpGraph, cluster: Cluster, result: Result) -> list[Event]:
    transfers = [] if result.run is None else result.run.transfers()
    size = graph.at_batch(result.batch_per_copy).tensor_bytes
    events: list[Event] = []
    free: dict[int, list[float]] = {}  # channel -> when each of its tracks is free again
    for number, transfer in sorted(enumerate(transfers), key=lambda pair: pair[1].start):
        name = graph.tensor_names[transfer.tensor]
        args: Event = {"bytes": int(size[transfer.tensor]), "requested_us": transfer.request / US}
        for channel in cluster.route(transfer.source, transfer.target):
            lanes = free.setdefault(channel, [])
            lane = next((i for i, end in enumerate(lanes) if end <= transfer.start), len(lanes))
            lanes[lane : lane + 1] = [transfer.end]
            place = (1, channel * LANES + lane)
            events.append(_slice(name, place, transfer.start, transfer.end, args))
            events += _arrow(graph, number, transfer, place)
    for channel, lanes in sorted(free.items()):
        spec = cluster.channels[channel]
        for lane in range(len(lanes)):
            label = f"{spec.src} -> {spec.dst}" + (f" ({lane + 1})" if lane else "")
            events.append(_name("thread_name", 1, channel * LANES + lane, label))
    return events


def _arrow(graph: OpGraph, number: int, transfer: Transfer, place: tuple[int, int]) -> list[Event]:
    """Returns a flow arrow from the end of the producer to the beginning of the transfer."""
    flow = {"cat": "transfer", "name": graph.tensor_names[transfer.tensor], "id": number}
    begin = {"ph": "s", "pid": 0, "tid": transfer.source, "ts": transfer.request / US}
    end = {"ph": "f", "bp": "e", "pid": place[0], "tid": place[1], "ts": transfer.start / US}
    return [flow | begin, flow | end]


def _slice(
    name: str, place: tuple[int, int], start: float, end: float, args: dict[str, object]
) -> Event:
    ts, duration = start / US, (end - start) / US
    pid, tid = place
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": duration,
            "args": args}  # fmt: skip


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def write_trace(
    path: str | os.PathLike[str], graph: OpGraph, cluster: Cluster, result: Result
) -> None:
    """Writes the trace file (JSON; control characters in names are escaped).

    Raises:
        PlanError: the file cannot be written.
    """
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"graph": graph.name, "cluster": cluster.name},
        "traceEvents": chrome_trace(graph, cluster, result),
    }
    try:
        Path(path).write_bytes(msgspec.json.encode(document))
    except OSError as error:
        raise PlanError(f"{path}: cannot write the trace: {error.strerror}") from None
