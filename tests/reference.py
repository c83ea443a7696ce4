"""The slow simulator: a graph, a cluster, a placement -> every start and end, and the memory peak.

It is written from the design page alone and defines right: the compiled kernel must give the same
bits. Nothing here is clever. Every task is looked at in every round, every queue is a list that is
sorted when it is read, and no case is treated apart because it would be faster.

A tensor is *present* on a device once its producer ended there or a transfer brought it; an op
*arrives* when all it reads is present and its host has issued it. A round takes the earliest time,
applies all events of that time, and only then lets idle devices, engines and channels start tasks.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from simcore.cluster import Cluster
from simcore.cost import CostTable
from simcore.graph import OpClass, OpGraph, Role
from simcore.job import Job
from simcore.plan import Settings
from simcore.profile import load_profile


class EventKind(IntEnum):
    """What happened; events of one time are applied in this order."""

    COMPUTE_END = 0
    TRANSFER_END = 1
    LATENCY_OVER = 3
    ISSUE = 4


class Event(NamedTuple):
    """One entry of the event list; the list is kept sorted."""

    time: float  # s
    kind: EventKind
    task: int  # op id, or transfer id for transfer events


class Transfer(NamedTuple):
    """One tensor on its way to one device. Its id is its place in (producer, tensor, target)."""

    producer: int  # op id
    tensor: int
    target: int  # device index
    source: int  # device index


class TransferTimes(NamedTuple):
    """When one transfer happened."""

    tensor: int
    source: int  # device index
    target: int  # device index
    request: float  # s, the producer's end
    start: float  # s
    end: float  # s


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    """What the reference says of one placement."""

    step_time: float  # s
    start: list[float]  # [op] s
    end: list[float]  # [op] s
    transfers: list[TransferTimes]  # [transfer] in transfer id order
    allocated: list[int]  # [dev] bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceProblem:
    """Everything about a problem but the placement, as plain lists."""

    settings: Settings
    num_devices: int
    # ops
    seconds: list[list[float]]  # [op][dev] s
    launch: list[list[float]]  # [op][dev] s
    sync: list[list[bool]]  # [op][dev] the host waits for the op's end
    inputs: list[list[int]]  # [op] tensor ids
    outputs: list[list[int]]  # [op] tensor ids
    workspace: list[int]  # [op] bytes
    resident: list[int]  # [op] bytes
    optimizer_state: list[int]  # [op] bytes
    # tensors
    producer: list[int]  # [tensor] op id, -1 for a parameter or a buffer
    consumers: list[list[int]]  # [tensor] op ids
    tensor_bytes: list[int]  # [tensor] bytes
    storage: list[int]  # [tensor] storage id
    storage_bytes: list[int]  # [storage] bytes
    persistent: set[int]  # storages of parameters and buffers
    # devices
    route: list[list[list[int]]]  # [dev][dev] channel ids
    latency: list[list[float]]  # [dev][dev] s
    bandwidth: list[list[float]]  # [dev][dev] B/s
    fragmentation: list[float]  # [dev] fraction of allocated
    context: list[int]  # [dev] bytes

    @classmethod
    def build(
        cls, graph: OpGraph, cluster: Cluster, job: Job, settings: Settings, *, cost: CostTable
    ) -> "ReferenceProblem":
        """Reads the arrays of a graph, a cluster and a cost table into lists."""
        ops, tensors = range(graph.num_ops), range(graph.num_tensors)
        devices = range(len(cluster.devices))
        sized = graph.at_batch(job.batch)
        profiles = [load_profile(device.kind) for device in cluster.devices]
        kind = [cost.kinds.index(device.kind) for device in cluster.devices]
        producer, storage = graph.tensor_producer.tolist(), graph.tensor_storage.tolist()
        inputs = [
            graph.inputs[graph.first_input[op] : graph.first_input[op + 1]].tolist() for op in ops
        ]
        return cls(
            settings=settings,
            num_devices=len(cluster.devices),
            seconds=[[float(cost.seconds[op, kind[dev], 0]) for dev in devices] for op in ops],
            launch=[[float(cost.launch[op, kind[dev]]) for dev in devices] for op in ops],
            sync=[
                [bool(graph.sync[op]) or profiles[dev].synchronous for dev in devices] for op in ops
            ],
            inputs=inputs,
            outputs=[[tensor for tensor in tensors if producer[tensor] == op] for op in ops],
            workspace=sized.workspace.tolist(),
            resident=sized.resident.tolist(),
            optimizer_state=[
                int(graph.elements[op]) * job.state_bytes_per_element()
                if graph.op_class[op] == OpClass.UPDATE
                else 0
                for op in ops
            ],
            producer=producer,
            consumers=[[op for op in ops if tensor in inputs[op]] for tensor in tensors],
            tensor_bytes=sized.tensor_bytes.tolist(),
            storage=storage,
            storage_bytes=sized.storage_bytes.tolist(),
            persistent={
                storage[tensor]
                for tensor in tensors
                if graph.tensor_role[tensor] in (Role.PARAMETER, Role.BUFFER)
            },
            route=[[list(cluster.route(i, j)) for j in devices] for i in devices],
            latency=cluster.route_latency.tolist(),
            bandwidth=cluster.route_bandwidth.tolist(),
            fragmentation=[profile.fragmentation for profile in profiles],
            context=[profile.context for profile in profiles],
        )


def simulate_reference(
    problem: ReferenceProblem,
    placement: Sequence[int],
    priorities: Sequence[int] | None = None,
) -> ReferenceResult:
    """Plays one placement.

    Args:
        problem: graph, cluster, costs and settings.
        placement: [op] device index.
        priorities: [op] the least goes first in ``ready`` order; all equal if None.

    Returns:
        Start and end of every task, the step time, and the memory peak of every device.
    """
    placement = [int(device) for device in placement]
    play = Playback(
        problem, placement, [0] * len(placement) if priorities is None else list(priorities)
    )
    play.run()
    walk = list(range(len(placement)))
    if problem.settings.order == "ready":
        walk.sort(key=lambda op: (play.start[op], op))
    allocated = [
        peak_allocated(problem, [op for op in walk if placement[op] == dev])
        for dev in range(problem.num_devices)
    ]
    times = [play.request, play.transfer_start, play.transfer_end]
    return ReferenceResult(
        step_time=max([*play.end.values(), *play.transfer_end.values()], default=0.0),
        start=[play.start[op] for op in range(len(placement))],
        end=[play.end[op] for op in range(len(placement))],
        transfers=[
            TransferTimes(t.tensor, t.source, t.target, *(time[index] for time in times))
            for index, t in enumerate(play.transfers)
        ],
        allocated=allocated,
    )


def list_transfers(problem: ReferenceProblem, placement: list[int]) -> list[Transfer]:
    """Lists each (tensor, device that consumes it but did not produce it) once, in id order."""
    wanted = set()
    for tensor, producer in enumerate(problem.producer):
        if producer >= 0:
            for consumer in problem.consumers[tensor]:
                source, target = placement[producer], placement[consumer]
                if source != target:
                    wanted.add(Transfer(producer, tensor, target, source))
    return sorted(wanted)


class Playback:
    """One run of the event loop. Everything that happened is in dictionaries by task id."""

    def __init__(
        self, problem: ReferenceProblem, placement: list[int], priorities: list[int]
    ) -> None:
        self.problem = problem
        self.placement = placement
        self.priorities = priorities
        self.events: list[Event] = []
        # hosts: each walks its list of ops in program order
        self.host_of = [0 if problem.settings.host == "one" else dev for dev in placement]
        self.to_issue = {
            host: [op for op in range(len(placement)) if self.host_of[op] == host]
            for host in sorted(set(self.host_of))
        }
        # computes
        self.issued: set[int] = set()
        self.present: set[tuple[int, int]] = set()  # (tensor, device)
        self.arrival: dict[int, float] = {}
        self.start: dict[int, float] = {}
        self.end: dict[int, float] = {}
        # transfers
        self.transfers = list_transfers(problem, placement)
        self.request: dict[int, float] = {}
        self.latency_is_over: set[int] = set()
        self.transfer_start: dict[int, float] = {}
        self.transfer_end: dict[int, float] = {}

    def run(self) -> None:
        """Plays rounds until nothing is left to happen."""
        for host in self.to_issue:
            self.issue_next(host, 0.0)
        while self.events:
            now = self.events[0].time
            while self.events and self.events[0].time == now:
                self.apply(self.events.pop(0))
            self.note_arrivals(now)
            self.start_computes(now)
            self.start_transfers(now)
        assert len(self.end) == len(self.placement), "an op never ran"
        assert len(self.transfer_end) == len(self.transfers), "a transfer never ran"

    def push(self, time: float, kind: EventKind, task: int) -> None:
        bisect.insort(self.events, Event(time, kind, task))

    # what an event does

    def apply(self, event: Event) -> None:
        if event.kind == EventKind.COMPUTE_END:
            self.apply_compute_end(event.task, event.time)
        elif event.kind == EventKind.TRANSFER_END:
            self.transfer_end[event.task] = event.time
            transfer = self.transfers[event.task]
            self.present.add((transfer.tensor, transfer.target))
        elif event.kind == EventKind.LATENCY_OVER:
            self.latency_is_over.add(event.task)
        elif event.kind == EventKind.ISSUE:
            self.issued.add(event.task)
            if not self.host_waits_for(event.task):
                self.issue_next(self.host_of[event.task], event.time)

    def apply_compute_end(self, op: int, now: float) -> None:
        self.end[op] = now
        for tensor in self.problem.outputs[op]:
            self.present.add((tensor, self.placement[op]))
        for index, transfer in enumerate(self.transfers):
            if transfer.producer == op:
                self.request[index] = now
                latency = self.problem.latency[transfer.source][transfer.target]
                self.push(now + latency, EventKind.LATENCY_OVER, index)
        if self.host_waits_for(op):
            self.issue_next(self.host_of[op], now)

    def host_waits_for(self, op: int) -> bool:
        return self.problem.sync[op][self.placement[op]]

    def issue_next(self, host: int, now: float) -> None:
        """The host, free at ``now``, spends the launch time of its next op and has issued it."""
        if self.to_issue[host]:
            op = self.to_issue[host].pop(0)
            launch = self.problem.launch[op][self.placement[op]]
            if self.problem.settings.launch == "graph":
                launch = 0.0
            self.push(now + launch, EventKind.ISSUE, op)

    def note_arrivals(self, now: float) -> None:
        for op, device in enumerate(self.placement):
            inputs = self.problem.inputs[op]
            needed = [tensor for tensor in inputs if self.problem.producer[tensor] >= 0]
            if (
                op not in self.arrival
                and op in self.issued
                and all((tensor, device) in self.present for tensor in needed)
            ):
                self.arrival[op] = now

    # what may start

    def start_computes(self, now: float) -> None:
        for device in range(self.problem.num_devices):
            mine = [op for op, where in enumerate(self.placement) if where == device]
            if any(op in self.start and op not in self.end for op in mine):
                continue  # busy
            waiting = [op for op in mine if op not in self.start]
            if self.problem.settings.order == "program":
                waiting = waiting[:1]
            arrived = [op for op in waiting if op in self.arrival]
            if arrived:
                op = min(arrived, key=lambda op: (self.priorities[op], self.arrival[op], op))
                self.start[op] = now
                self.push(now + self.problem.seconds[op][device], EventKind.COMPUTE_END, op)

    def start_transfers(self, now: float) -> None:
        waiting = [index for index in self.request if index not in self.transfer_start]
        for index in sorted(waiting, key=self.place_in_queue):
            if index in self.latency_is_over and self.is_served(index):
                transfer = self.transfers[index]
                size = self.problem.tensor_bytes[transfer.tensor]
                bandwidth = self.problem.bandwidth[transfer.source][transfer.target]
                self.transfer_start[index] = now
                self.push(now + (size / bandwidth if size else 0.0), EventKind.TRANSFER_END, index)

    def place_in_queue(self, index: int) -> tuple[float, int]:
        return (self.request[index], index)

    def is_served(self, index: int) -> bool:
        """Whether everything the transfer needs is free and it is this transfer's turn."""
        if self.problem.settings.contention == "none":
            return True
        needed = self.resources(index)
        if self.problem.settings.contention in {"port", "ordered"}:
            return all(
                other in self.transfer_end
                for other in range(index)
                if needed & self.resources(other)
            )
        for other in self.request:
            if other != index and needed & self.resources(other):
                holds = other in self.transfer_start and other not in self.transfer_end
                waits = other not in self.transfer_start
                if holds or (waits and self.place_in_queue(other) < self.place_in_queue(index)):
                    return False
        return True

    def resources(self, index: int) -> set[tuple[str, int]]:
        """The one out-engine of the source and, but under ``port``, every channel of the route."""
        transfer = self.transfers[index]
        if self.problem.settings.contention == "port":
            return {("engine", transfer.source)}
        channels = self.problem.route[transfer.source][transfer.target]
        return {("engine", transfer.source)} | {("channel", channel) for channel in channels}


def peak_allocated(problem: ReferenceProblem, ops: list[int]) -> int:
    """Bytes at the peak of a device that runs these ops in this order.

    What is held for the whole step: parameters and buffers read here (each storage once), what the
    ops keep resident, the optimizer state of updates. The rest comes with the first op here that
    reads or writes a tensor of its storage and goes after the last one; it is as large as the
    largest of those tensors. A received tensor so comes with its first consumer; a sent one goes
    with its last local use.
    """
    held = {
        problem.storage[tensor]
        for op in ops
        for tensor in problem.inputs[op]
        if problem.producer[tensor] < 0
    }
    current = sum(problem.storage_bytes[storage] for storage in held)
    current += sum(problem.resident[op] + problem.optimizer_state[op] for op in ops)
    touches: dict[int, list[int]] = {}  # storage -> positions in ops
    size: dict[int, int] = {}  # storage -> bytes
    for position, op in enumerate(ops):
        for tensor in problem.inputs[op] + problem.outputs[op]:
            storage = problem.storage[tensor]
            if storage not in problem.persistent:
                touches.setdefault(storage, []).append(position)
                size[storage] = max(size.get(storage, 0), problem.tensor_bytes[tensor])
    peak = current
    for position, op in enumerate(ops):
        current += sum(size[s] for s in touches if touches[s][0] == position)
        peak = max(peak, current + problem.workspace[op])
        current -= sum(size[s] for s in touches if touches[s][-1] == position)
    return peak


def reserved(problem: ReferenceProblem, placement: list[int], allocated: list[int]) -> list[int]:
    """[dev] bytes that the allocator and the process take; none on a device without ops."""
    return [
        math.ceil(peak * (1 + problem.fragmentation[dev])) + problem.context[dev]
        if dev in placement
        else 0
        for dev, peak in enumerate(allocated)
    ]
