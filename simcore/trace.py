"""A simulated step as a Chrome trace, one track per stream and per channel, for Perfetto."""

import os

import msgspec
import numpy as np

from simcore.atomic import write_whole
from simcore.cluster import Cluster
from simcore.errors import PlanError
from simcore.graph import OpGraph, Phase
from simcore.result import RawRun, Result, Transfer
from simcore.units import US

Event = dict[str, object]


def chrome_trace(cluster: Cluster, result: Result) -> list[Event]:
    """Returns trace events: process 0 holds the compute streams, process 1 the channels.

    Slices of one track never overlap: where concurrent transfers share a channel without
    contention, the channel gets further tracks. Arrows lead from a producer over the transfer to
    its first reader.
    """
    graph, run = result.graph, result.run
    events: list[Event] = [_name("process_name", 0, 0, "compute")]
    events.append(_name("process_name", 1, 0, "channels"))
    for device, spec in enumerate(cluster.devices):
        events.append(_name("thread_name", 0, device, f"{spec.name} ({spec.kind})"))
    for op in np.flatnonzero(run.placement >= 0).tolist():
        args: Event = {"module": graph.op_modules[op], "phase": Phase(graph.phase[op]).name}
        place = (0, int(run.placement[op]))
        events.append(
            _slice(graph.op_names[op], place, float(run.start[op]), float(run.end[op]), args)
        )
    events += _transfer_events(graph, cluster, run)
    events += _collective_events(graph, run)
    return events


def _collective_events(graph: OpGraph, run: RawRun) -> list[Event]:
    """Returns the collectives; those that overlap are on tracks of their own."""
    moves = np.flatnonzero(run.placement < 0)
    events: list[Event] = [_name("process_name", 2, 0, "collectives")] if len(moves) else []
    free: list[float] = []  # by track, when it is free again
    for op in moves[np.argsort(run.start[moves], kind="stable")].tolist():
        start, end = float(run.start[op]), float(run.end[op])
        track = next((i for i, time in enumerate(free) if time <= start), len(free))
        if track == len(free):
            events.append(_name("thread_name", 2, track, f"collectives ({track + 1})"))
        free[track : track + 1] = [end]
        args: Event = {"requested_us": float(run.request[op]) / US}
        events.append(_slice(graph.op_names[op], (2, track), start, end, args))
    return events


def _transfer_events(graph: OpGraph, cluster: Cluster, run: RawRun) -> list[Event]:
    transfers = run.transfers()
    events: list[Event] = []
    free: dict[int, list[float]] = {}  # channel -> when each of its tracks is free again
    tracks: dict[tuple[int, int], int] = {}  # (channel, lane) -> number of the track
    for number, transfer in sorted(enumerate(transfers), key=lambda pair: pair[1].start):
        name = graph.tensor_names[transfer.tensor]
        args: Event = {"bytes": transfer.num_bytes, "requested_us": transfer.request / US}
        places = []
        for channel in cluster.route(transfer.source, transfer.target):
            lanes = free.setdefault(channel, [])
            lane = next((i for i, end in enumerate(lanes) if end <= transfer.start), len(lanes))
            lanes[lane : lane + 1] = [transfer.end]
            places.append((1, tracks.setdefault((channel, lane), len(tracks))))
            events.append(_slice(name, places[-1], transfer.start, transfer.end, args))
        events += _arrow(graph, run, number, transfer, places[0])
    for order, ((channel, lane), track) in enumerate(sorted(tracks.items())):
        spec = cluster.channels[channel]
        label = f"{spec.src} -> {spec.dst}" + (f" ({lane + 1})" if lane else "")
        events.append(_name("thread_name", 1, track, label))
        events.append(_about("thread_sort_index", 1, track, {"sort_index": order}))
    return events


def _arrow(
    graph: OpGraph, run: RawRun, number: int, transfer: Transfer, place: tuple[int, int]
) -> list[Event]:
    """Returns a flow arrow: producer, transfer (on the first channel of its route), first reader.

    An arrow is tied to the slice that is open at its time, so it begins inside the producer's.
    """
    producer = int(graph.tensor_producer[transfer.tensor])
    first, last = graph.first_consumer[transfer.tensor : transfer.tensor + 2]
    readers = graph.consumers[first:last]
    readers = readers[run.placement[readers] == transfer.target]
    flow = {"cat": "transfer", "name": graph.tensor_names[transfer.tensor], "id": number}
    begin = float(run.start[producer] + run.end[producer]) / 2
    return [
        flow | {"ph": ph, "bp": "e", "pid": pid, "tid": tid, "ts": time / US}
        for ph, (pid, tid), time in (
            ("s", (0, transfer.source), begin),
            ("t", place, transfer.start),
            ("f", (0, transfer.target), float(run.start[readers].min())),
        )
    ]


def _slice(
    name: str, place: tuple[int, int], start: float, end: float, args: dict[str, object]
) -> Event:
    ts, duration = start / US, end / US - start / US
    pid, tid = place
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": duration,
            "args": args}  # fmt: skip


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return _about(what, pid, tid, {"name": name})


def _about(what: str, pid: int, tid: int, args: dict[str, object]) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def write_trace(path: str | os.PathLike[str], cluster: Cluster, result: Result) -> None:
    """Writes the trace file (JSON; control characters in names are escaped).

    Raises:
        PlanError: the file cannot be written.
    """
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"graph": result.graph.name, "cluster": cluster.name},
        "traceEvents": chrome_trace(cluster, result),
    }
    try:
        write_whole(path, msgspec.json.encode(document))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise PlanError(f"{path}: cannot write the trace: {reason}") from None
