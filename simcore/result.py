"""What a simulation says: step time, how each device spends it, memory, and the critical path."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.graph import OpGraph


class Transfer(NamedTuple):
    """One tensor sent to one device."""

    tensor: int
    num_bytes: int
    source: int  # device index
    target: int  # device index
    request: float  # s, the tensor is there
    start: float  # s, it holds its channels from here
    end: float  # s, it has arrived


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawRun:
    """Everything the kernel found out about one placement, as arrays."""

    step_time: float  # s
    placement: NDArray[np.int32]  # [op] device index
    start: NDArray[np.float64]  # [op] s
    end: NDArray[np.float64]  # [op] s
    issue: NDArray[np.float64]  # [op] s
    waited: NDArray[np.int64]  # [op] the op whose end the host last waited for before, -1 = none
    transfer_tensor: NDArray[np.int64]  # [transfer]
    transfer_bytes: NDArray[np.int64]  # [transfer]
    transfer_source: NDArray[np.int64]  # [transfer] device index
    transfer_target: NDArray[np.int64]  # [transfer] device index
    transfer_request: NDArray[np.float64]  # [transfer] s
    transfer_start: NDArray[np.float64]  # [transfer] s
    transfer_end: NDArray[np.float64]  # [transfer] s
    allocated: NDArray[np.int64]  # [dev] peak bytes

    def transfers(self) -> list[Transfer]:
        """Returns the transfers as records, in the order of their ids."""
        columns = (
            self.transfer_tensor,
            self.transfer_bytes,
            self.transfer_source,
            self.transfer_target,
            self.transfer_request,
            self.transfer_start,
            self.transfer_end,
        )
        return [
            Transfer(*row) for row in zip(*(column.tolist() for column in columns), strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """How one device spends the step; busy + communication + launch + bubble = step time."""

    name: str
    kind: str
    num_ops: int
    busy: float  # s computing
    communication: float  # s idle while an input is on its way or queued for a channel
    launch: float  # s idle while the host has not issued the next op
    bubble: float  # s idle for other reasons: waiting for another device, or done
    allocated: int  # bytes, peak of the allocator
    reserved: int  # bytes, with fragmentation and context: what decides whether it fits
    capacity: int  # bytes


class PathStep(NamedTuple):
    """One task on the critical path."""

    kind: str  # compute, transfer, launch or collective
    name: str
    place: str  # device, or "source -> target"
    start: float  # s
    end: float  # s


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The simulation of one plan."""

    feasible: bool
    step_time: float  # s
    samples: int | None  # per step
    devices: tuple[DeviceUse, ...]
    critical_path: tuple[PathStep, ...]
    run: RawRun | None  # the timeline; of one copy where the plan is data parallel
    batch_per_copy: int | None = None  # samples that one copy of the model sees
    collective_time: float = 0.0  # s of all-reduce after the backward, not overlapped

    @property
    def throughput(self) -> float | None:
        """Samples per second, None where the batch is unknown."""
        return None if self.samples is None or not self.step_time else self.samples / self.step_time

    @property
    def overflow(self) -> int:
        """Bytes over capacity, summed over devices; 0 where all fit."""
        return sum(max(0, use.reserved - use.capacity) for use in self.devices)


def device_order(run: RawRun, device: int) -> NDArray[np.int64]:
    """Returns the ops of a device in the order in which they ran: by (start, end, op)."""
    ops = np.flatnonzero(run.placement == device)
    return ops[np.lexsort((ops, run.end[ops], run.start[ops]))]


def idle_causes(
    run: RawRun, device: int, arrival: dict[int, tuple[float, float]]
) -> tuple[float, float]:
    """Returns (communication, launch): seconds a device idles for each cause.

    A gap before an op counts as communication while its last remote input is requested but not
    there, and as launch once its inputs are there but the host has not issued it.

    Args:
        run: the run.
        device: device index.
        arrival: see `remote_arrivals`.
    """
    communication = launch = previous = 0.0
    for op in device_order(run, device):
        start = float(run.start[op])
        if start > previous:
            ready = previous
            if op in arrival:
                request, there = arrival[op]
                communication += max(0.0, min(there, start) - max(request, previous))
                ready = max(previous, there)
            launch += max(0.0, min(float(run.issue[op]), start) - ready)
        previous = max(previous, float(run.end[op]))
    return communication, launch


def remote_arrivals(graph: OpGraph, run: RawRun) -> dict[int, tuple[float, float]]:
    """Returns op -> (request, end) of the last transfer that the op waits for."""
    last: dict[int, tuple[float, float]] = {}
    for transfer in run.transfers():
        first = graph.first_consumer[transfer.tensor]
        for op in graph.consumers[first : graph.first_consumer[transfer.tensor + 1]].tolist():
            on_target = run.placement[op] == transfer.target
            if on_target and transfer.end >= last.get(op, (0.0, -1.0))[1]:
                last[op] = (transfer.request, transfer.end)
    return last


def critical_path(graph: OpGraph, run: RawRun, names: tuple[str, ...]) -> tuple[PathStep, ...]:
    """Returns the chain of tasks, first to last, each of which made the next one wait.

    From the task that ends last, it steps to whatever ended when the task could start: an input's
    transfer or producer, the op before it on the device, or the host's issue, which goes back to
    the op that the host last waited for.
    """
    if not graph.num_ops:
        return ()
    incoming: dict[tuple[int, int], Transfer] = {}
    for transfer in run.transfers():
        incoming[transfer.tensor, transfer.target] = transfer
    before: dict[int, int] = {}
    for device in range(len(names)):
        order = device_order(run, device).tolist()
        before.update(zip(order[1:], order[:-1], strict=True))
    steps: list[PathStep] = []
    last = max(incoming.values(), key=lambda t: t.end, default=None)
    op = int(run.end.argmax())
    if last is not None and last.end > run.end[op]:
        steps.append(_transfer_step(graph, last, names))
        op = int(graph.tensor_producer[last.tensor])
    while True:
        steps.append(_compute_step(graph, run, op, names))
        cause = _binding(graph, run, op, incoming, before)
        if isinstance(cause, Transfer):
            steps.append(_transfer_step(graph, cause, names))
            op = int(graph.tensor_producer[cause.tensor])
        elif cause is not None:
            op = cause
        else:
            awaited, issue = int(run.waited[op]), float(run.issue[op])
            begin = float(run.end[awaited]) if awaited >= 0 else 0.0
            if issue > begin:
                steps.append(PathStep("launch", graph.op_names[op], "host", begin, issue))
            if awaited < 0:
                break
            op = awaited
    return tuple(reversed(steps))


def _binding(
    graph: OpGraph,
    run: RawRun,
    op: int,
    incoming: dict[tuple[int, int], Transfer],
    before: dict[int, int],
) -> Transfer | int | None:
    """Returns what an op waited for longest; None = the host's issue, or nothing."""
    device = int(run.placement[op])
    previous = before.get(op)
    best: Transfer | int | None = previous
    time = -1.0 if previous is None else float(run.end[previous])
    for tensor in graph.inputs[graph.first_input[op] : graph.first_input[op + 1]].tolist():
        producer = int(graph.tensor_producer[tensor])
        if producer < 0:
            continue
        transfer = incoming.get((tensor, device))
        end = float(run.end[producer]) if transfer is None else transfer.end
        if end > time:
            best, time = (producer if transfer is None else transfer), end
    return None if float(run.issue[op]) > time else best


def _compute_step(graph: OpGraph, run: RawRun, op: int, names: tuple[str, ...]) -> PathStep:
    device = names[run.placement[op]]
    return PathStep("compute", graph.op_names[op], device, float(run.start[op]), float(run.end[op]))


def _transfer_step(graph: OpGraph, transfer: Transfer, names: tuple[str, ...]) -> PathStep:
    place = f"{names[transfer.source]} -> {names[transfer.target]}"
    name = graph.tensor_names[transfer.tensor]
    return PathStep("transfer", name, place, transfer.request, transfer.end)
