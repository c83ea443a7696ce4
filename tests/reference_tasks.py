"""What is played: the communications of a placement, the streams of devices, the lists of hosts."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from tests.reference_problem import ReferenceProblem


class Transfer(NamedTuple):
    """One tensor on its way to one device. Its id is its place in (producer, tensor, target)."""

    producer: int  # op id
    tensor: int
    target: int  # device index
    source: int  # device index
    reader: int  # the first op on the target that reads the tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """A transfer or a collective. Its id is its place: transfers first, then collectives by op.

    Its work is in bytes. Only a collective that no other can slow by taking bandwidth counts it in
    seconds (at a pace of one), so that it lasts its duration to the last bit.
    """

    transfer: Transfer | None  # None for a collective
    op: int  # the collective's op id, -1 for a transfer
    producers: list[int]  # ops that must have ended before it is requested
    devices: list[int]  # source and target, or the members
    brings: list[tuple[int, int]]  # (tensor, device) that are present once it ends
    usage: dict[int, float]  # channel -> bytes on it per byte
    latency: float  # s
    work: float  # bytes (or s)
    pace: float  # work per s on an idle network
    plan_order: tuple[int, int, int]  # last producer, transfers before collectives, id or op


def list_transfers(problem: ReferenceProblem, placement: list[int]) -> list[Transfer]:
    """Lists each (tensor, device that consumes it but did not produce it) once, in id order.

    Collectives read and write where their members are: nothing is sent to or from one.
    """
    readers: dict[tuple[int, int, int, int], list[int]] = {}
    for tensor, producer in enumerate(problem.producer):
        for consumer in problem.consumers[tensor]:
            if producer >= 0 and not {producer, consumer} & problem.exchanges.keys():
                source, target = placement[producer], placement[consumer]
                if source != target:
                    readers.setdefault((producer, tensor, target, source), []).append(consumer)
    return [Transfer(*key, reader=min(readers[key])) for key in sorted(readers)]


def list_communications(
    problem: ReferenceProblem, transfers: list[Transfer]
) -> list[Communication]:
    """Says of every transfer and every collective what it needs and does, by id."""
    found = []
    for index, transfer in enumerate(transfers):
        source, target = transfer.source, transfer.target
        found.append(
            Communication(
                transfer=transfer,
                op=-1,
                producers=[transfer.producer],
                devices=[source, target],
                brings=[(transfer.tensor, target)],
                usage=dict.fromkeys(problem.route[source][target], 1.0),
                latency=problem.latency[source][target],
                work=float(problem.tensor_bytes[transfer.tensor]),
                pace=problem.bandwidth[source][target],
                plan_order=(transfer.producer, 0, index),
            )
        )
    for op, exchange in problem.exchanges.items():
        producers = {problem.producer[tensor] for tensor in problem.inputs[op]} - {-1}
        work, pace = exchange.duration, 1.0
        if exchange.volume == 0 or exchange.duration == 0:
            work = 0.0
        elif problem.settings.contention == "fair":
            work, pace = exchange.volume, exchange.volume / exchange.duration
        found.append(
            Communication(
                transfer=None,
                op=op,
                producers=sorted(producers),
                devices=exchange.members,
                brings=[(t, dev) for t in problem.outputs[op] for dev in exchange.members],
                usage=exchange.usage,
                latency=exchange.latency,
                work=work,
                pace=pace,
                plan_order=(max(producers, default=-1), 1, op),
            )
        )
    return found


class Step(IntEnum):
    """Where something stands relative to the launch of an op."""

    MESSAGE_BEFORE = 0
    LAUNCH = 1
    MESSAGE_AFTER = 2
    WAIT = 3  # of a host, for the op's end


class Place(NamedTuple):
    """One entry of a host's list or of a device's stream; both are sorted."""

    op: int
    step: Step
    task: int  # the op itself, or a transfer id


def launch_of(op: int) -> Place:
    return Place(op, Step.LAUNCH, op)


def hosts(
    problem: ReferenceProblem, placement: list[int], transfers: list[Transfer]
) -> dict[int, list[Place]]:
    """Lists what each host does: launches, messages, waits. ``per_rank`` hosts are devices.

    A message is issued just before its first reader. Where sender and receiver have hosts of their
    own the sender issues it too: just after the producer or, inline, at the same place.
    """
    settings = problem.settings
    lists: dict[int, list[Place]] = {}

    def add(device: int, *places: Place) -> None:
        lists.setdefault(0 if settings.host == "one" else device, []).extend(places)

    for op, device in enumerate(placement):
        if op not in problem.exchanges:
            add(device, launch_of(op))
            if problem.sync[op][device]:
                add(device, Place(op, Step.WAIT, op))
    for index, transfer in enumerate(transfers):
        before_reader = Place(transfer.reader, Step.MESSAGE_BEFORE, index)
        add(transfer.target, before_reader)
        if settings.host == "per_rank":
            after_producer = Place(transfer.producer, Step.MESSAGE_AFTER, index)
            add(transfer.source, before_reader if settings.p2p == "inline" else after_producer)
    return {host: sorted(lists[host]) for host in sorted(lists)}


def streams(
    problem: ReferenceProblem, placement: list[int], transfers: list[Transfer]
) -> list[list[Place]]:
    """Lists what occupies each device in program order: its ops and, inline, its transfers."""
    lists: list[list[Place]] = [[] for _ in range(problem.num_devices)]
    for op, device in enumerate(placement):
        if op not in problem.exchanges:
            lists[device].append(launch_of(op))
    if problem.settings.p2p == "inline":
        for index, transfer in enumerate(transfers):
            for device in (transfer.source, transfer.target):
                lists[device].append(Place(transfer.reader, Step.MESSAGE_BEFORE, index))
    return [sorted(places) for places in lists]
