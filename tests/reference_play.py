"""The event loop of the slow simulator.

A tensor is *present* on a device once its producer ended there or a communication brought it; an op
*arrives* when all it reads is present and its host has issued it. A round takes the earliest time,
applies all events of that time, and only then lets things start: computes, then what waits for the
streams to come to it, then communications. Last, the speed of everything that runs is set anew.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from simcore.errors import DeadlockError
from tests.reference_problem import ReferenceProblem
from tests.reference_rates import communication_factor, compute_factor, fair_rates
from tests.reference_tasks import (
    Communication,
    Place,
    Step,
    hosts,
    launch_of,
    list_communications,
    list_transfers,
    streams,
)


class EventKind(IntEnum):
    """What happened; events of one time are applied in this order."""

    COMPUTE_END = 0
    TRANSFER_END = 1
    COLLECTIVE_END = 2
    LATENCY_OVER = 3
    ISSUE = 4


Key: TypeAlias = tuple[EventKind, int]
"""An event, and the task of which it is the end: op, communication id, or host for ISSUE."""


@dataclass
class Work:
    """What is left of a running task."""

    remaining: float  # s of compute, or the communication's work
    since: float  # s, when the rest was last counted
    rate: float = 0.0  # per s


class Piece(NamedTuple):
    """A time in which a task went at one rate."""

    key: Key
    start: float  # s
    end: float  # s
    rate: float


class Playback:
    """One run of the event loop. Everything that happened is in dictionaries by task id."""

    def __init__(
        self, problem: ReferenceProblem, placement: list[int], priorities: list[int]
    ) -> None:
        self.problem = problem
        self.settings = problem.settings
        self.placement = placement
        self.priorities = priorities
        self.pending: dict[Key, float] = {}  # when what is to happen happens, as things stand
        self.work: dict[Key, Work] = {}  # of all that runs and takes time
        self.pieces: list[Piece] = []
        self.transfers = list_transfers(problem, placement)
        # computes; a collective is an op that starts and ends, too
        self.issued: set[int] = set()
        self.present: set[tuple[int, int]] = set()  # (tensor, device)
        self.arrival: dict[int, float] = {}
        self.start: dict[int, float] = {}
        self.end: dict[int, float] = {}
        # what hosts have not issued and what devices have not started, in program order
        self.to_issue = hosts(problem, placement, self.transfers)
        self.to_start = streams(problem, placement, self.transfers)
        # communications by id: transfers, then collectives
        self.communications = list_communications(problem, self.transfers)
        self.needs = [self.resources(index) for index in range(len(self.communications))]
        self.rivals = [self.who_needs(needs) for needs in self.needs]
        self.called = {  # by the streams; a copy needs no call
            index
            for index, communication in enumerate(self.communications)
            if communication.transfer is None or self.settings.p2p == "copy"
        }
        self.request: dict[int, float] = {}
        self.latency_is_over: set[int] = set()
        self.communication_start: dict[int, float] = {}
        self.communication_end: dict[int, float] = {}

    def run(self) -> None:
        """Plays rounds until nothing is left to happen.

        Raises:
            DeadlockError: something never happened, because it waits for itself.
        """
        for host in self.to_issue:
            self.advance(host, 0.0)
        self.request_communications(0.0)
        while self.pending:
            now = min(self.pending.values())
            while due := [key for key, time in self.pending.items() if time == now]:
                self.apply(min(due), now)
            self.note_arrivals(now)
            self.start_computes(now)
            self.call_transfers(now)
            self.start_communications(now)
            self.set_rates(now)
        stuck = [op for op in range(len(self.placement)) if op not in self.end]
        waiting = len(self.communications) - len(self.communication_end)
        if stuck or waiting:
            raise DeadlockError(
                f"deadlock: {len(stuck)} ops (the first is op {min(stuck, default=-1)}) and "
                f"{waiting} communications wait for each other"
            )

    # what an event does

    def apply(self, key: Key, now: float) -> None:
        del self.pending[key]
        kind, task = key
        if kind == EventKind.LATENCY_OVER:
            self.latency_is_over.add(task)
        elif kind == EventKind.ISSUE:
            place = self.to_issue[task].pop(0)
            if place.step == Step.LAUNCH:
                self.issued.add(place.op)
            self.advance(task, now)
        else:
            if key in self.work:
                self.count(key, now)
                del self.work[key]
            self.apply_end(kind, task, now)
            self.request_communications(now)

    def apply_end(self, kind: EventKind, task: int, now: float) -> None:
        if kind == EventKind.COMPUTE_END:
            self.end[task] = now
            self.present |= {(t, self.placement[task]) for t in self.problem.outputs[task]}
            for host, places in self.to_issue.items():
                if places and places[0] == Place(task, Step.WAIT, task):
                    self.advance(host, now)
        else:
            self.communication_end[task] = now
            self.present |= set(self.communications[task].brings)
            if kind == EventKind.COLLECTIVE_END:
                self.end[self.communications[task].op] = now

    def advance(self, host: int, now: float) -> None:
        """The host, free at ``now``, turns to the first place of its list that takes its time."""
        places = self.to_issue[host]
        while places and places[0].step == Step.WAIT and places[0].op in self.end:
            places.pop(0)
        if places and places[0].step != Step.WAIT:
            self.pending[EventKind.ISSUE, host] = now + self.host_seconds(host, places[0])

    def host_seconds(self, host: int, place: Place) -> float:
        """What a launch or a message takes of a host's time; one host pays as the target would."""
        if self.settings.launch == "graph":
            return 0.0
        if place.step == Step.LAUNCH:
            return self.problem.launch[place.op][self.placement[place.op]]
        payer = self.transfers[place.task].target if self.settings.host == "one" else host
        return self.problem.limits[payer].message_overhead

    def request_communications(self, now: float) -> None:
        """Requests each that is called and of which all producers have ended."""
        for index in sorted(self.called - self.request.keys()):
            communication = self.communications[index]
            if all(op in self.end for op in communication.producers):
                self.request[index] = now
                self.pending[EventKind.LATENCY_OVER, index] = now + communication.latency

    def note_arrivals(self, now: float) -> None:
        for op in self.issued - self.arrival.keys():
            inputs = self.problem.inputs[op]
            needed = [tensor for tensor in inputs if self.problem.producer[tensor] >= 0]
            if all((tensor, self.placement[op]) in self.present for tensor in needed):
                self.arrival[op] = now

    # what the streams come to

    def head(self, device: int) -> Place | None:
        """The first place of a device's stream that has neither started nor been requested."""
        for place in self.to_start[device]:
            gone = self.start if place.step == Step.LAUNCH else self.request
            if place.task not in gone:
                return place
        return None

    def is_idle(self, device: int) -> bool:
        """Whether no op runs on the device and no inline transfer occupies it."""
        for place in self.to_start[device]:
            begun, ended = self.start, self.end
            if place.step != Step.LAUNCH:
                begun, ended = self.request, self.communication_end
            if place.task in begun and place.task not in ended:
                return False
        return True

    def start_computes(self, now: float) -> None:
        for device, places in enumerate(self.to_start):
            if not self.is_idle(device):
                continue
            if self.settings.order == "program":
                head = self.head(device)
                waiting = [head.op] if head and head.step == Step.LAUNCH else []
            else:
                waiting = [place.op for place in places if place.op not in self.start]
            arrived = [op for op in waiting if op in self.arrival]
            if arrived:
                op = min(arrived, key=lambda op: (self.priorities[op], self.arrival[op], op))
                self.start[op] = now
                self.begin((EventKind.COMPUTE_END, op), self.problem.seconds[op][device], now)

    def call_transfers(self, now: float) -> None:
        """Inline: those that are reached. Rendezvous: those whose receive is posted."""
        reached = self.is_at_head if self.settings.p2p == "inline" else self.is_posted
        for index in range(len(self.transfers)):
            if index not in self.called and reached(index):
                self.called.add(index)
        self.request_communications(now)

    def is_at_head(self, index: int) -> bool:
        """Whether an inline transfer is issued and next on both devices, which are idle."""
        source, target = self.transfers[index].source, self.transfers[index].target
        place = Place(self.transfers[index].reader, Step.MESSAGE_BEFORE, index)
        return (
            self.head(source) == self.head(target) == place
            and self.is_idle(source)
            and self.is_idle(target)
            and not any(place in places for places in self.to_issue.values())
        )

    def is_posted(self, index: int) -> bool:
        """Whether the reader is next on the idle target, and its host has come to its launch."""
        target, reader = self.transfers[index].target, launch_of(self.transfers[index].reader)
        places = self.to_issue[0 if self.settings.host == "one" else target]
        return (
            self.head(target) == reader
            and self.is_idle(target)
            and (not places or places[0] >= reader)
        )

    # what communications need

    def start_communications(self, now: float) -> None:
        waiting = [index for index in self.request if index not in self.communication_start]
        for index in sorted(waiting, key=self.place_in_queue):
            if index in self.latency_is_over and self.is_served(index):
                communication = self.communications[index]
                self.communication_start[index] = now
                if communication.transfer is None:
                    self.start[communication.op] = now
                self.begin(self.end_of(index), communication.work, now)

    def end_of(self, index: int) -> Key:
        is_transfer = index < len(self.transfers)
        return (EventKind.TRANSFER_END if is_transfer else EventKind.COLLECTIVE_END, index)

    def place_in_queue(self, index: int) -> tuple[float, int]:
        return (self.request[index], index)

    def resources(self, index: int) -> dict[tuple[str, int], int]:
        """What a communication holds, and how many can hold it at once."""
        communication, limits = self.communications[index], self.problem.limits
        transfer, contention = communication.transfer, self.settings.contention
        needs: dict[tuple[str, int], int] = {}
        if transfer is not None and contention in {"port", "ordered", "fifo"}:
            needs["out", transfer.source] = 1
        if contention in {"ordered", "fifo"}:
            needs.update({("channel", channel): 1 for channel in communication.usage})
        if transfer is not None and contention == "fair":
            needs["out", transfer.source] = limits[transfer.source].out_engines
            needs["in", transfer.target] = limits[transfer.target].in_engines
        return {resource: number for resource, number in needs.items() if number > 0}

    def who_needs(self, needs: dict[tuple[str, int], int]) -> list[int]:
        """The communications that hold any of these, too."""
        return [index for index, theirs in enumerate(self.needs) if theirs.keys() & needs.keys()]

    def is_served(self, index: int) -> bool:
        """Whether everything the communication needs is free and it is its turn."""
        in_plan_order = self.settings.contention in {"port", "ordered"}
        is_ahead = self.is_planned_ahead if in_plan_order else self.is_queued_ahead
        ahead = [
            other
            for other in self.rivals[index]
            if other != index and other not in self.communication_end and is_ahead(other, index)
        ]
        return all(
            sum(resource in self.needs[other] for other in ahead) < number
            for resource, number in self.needs[index].items()
        )

    def is_planned_ahead(self, other: int, index: int) -> bool:
        return self.communications[other].plan_order < self.communications[index].plan_order

    def is_queued_ahead(self, other: int, index: int) -> bool:
        if other in self.communication_start:
            return True
        return other in self.request and self.place_in_queue(other) < self.place_in_queue(index)

    # how fast things go

    def begin(self, key: Key, amount: float, now: float) -> None:
        """Starts a task; one without work ends in a later round of the same time."""
        if amount == 0:
            self.pending[key] = now
        else:
            self.work[key] = Work(amount, now)

    def set_rates(self, now: float) -> None:
        """Gives everything that runs its rate."""
        ops = {task for kind, task in self.work if kind == EventKind.COMPUTE_END}
        active = sorted(task for kind, task in self.work if kind != EventKind.COMPUTE_END)
        running: list[Communication] = [self.communications[index] for index in active]
        for op in sorted(ops):
            factor = compute_factor(self.problem, op, self.placement[op], running)
            self.set_rate((EventKind.COMPUTE_END, op), 1 / factor, now)
        computing = {self.placement[op] for op in ops}
        rates = [c.pace / communication_factor(self.problem, c, computing) for c in running]
        if self.settings.contention == "fair":
            flows = [(c.usage, cap) for c, cap in zip(running, rates, strict=True)]
            rates = fair_rates(flows, self.problem.channel_bandwidth)
        for index, rate in zip(active, rates, strict=True):
            self.set_rate(self.end_of(index), rate, now)

    def set_rate(self, key: Key, rate: float, now: float) -> None:
        """Gives a task another rate; while its rate stays, so does its end."""
        if rate != self.work[key].rate:
            self.count(key, now)
            self.work[key].rate = rate
            self.pending[key] = now + self.work[key].remaining / rate

    def count(self, key: Key, now: float) -> None:
        """Takes what was done since the last count off the rest."""
        work = self.work[key]
        if now > work.since:
            self.pieces.append(Piece(key, work.since, now, work.rate))
        work.remaining = max(0.0, work.remaining - work.rate * (now - work.since))
        work.since = now
