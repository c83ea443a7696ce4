"""What a simulation says: step time, how each device spends it, memory, and the critical path."""

from collections.abc import Mapping
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
    """Everything the kernel found out about one placement, as arrays.

    A collective is an op without a device; it starts when its latency is over and it has got what
    it needs of the network.
    """

    step_time: float  # s
    placement: NDArray[np.int32]  # [op] device index, -1 = a collective
    request: NDArray[np.float64]  # [op] s, all members have reached the collective; 0 = computes
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
    transfer_issue: NDArray[np.float64]  # [transfer] s, its hosts have come to it; 0 for a copy
    transfer_waited: NDArray[np.int64]  # [transfer] as `waited`
    p2p: str  # as in `Settings`
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
    memory: Mapping[str, int]  # class (parameters, activations, ...) -> bytes at that peak
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
    graph: OpGraph  # what ran: the plan's graph, or copies of it with collectives between them
    run: RawRun  # the timeline
    batch_per_copy: int | None = None  # samples that one copy of the model sees

    @property
    def collective_time(self) -> float:
        """Seconds of the step in which at least one collective is requested or under way."""
        moves = self.run.placement < 0
        begin, end = self.run.request[moves], self.run.end[moves]
        order = np.argsort(begin, kind="stable")
        begin, reach = begin[order], np.maximum.accumulate(end[order])
        before = np.concatenate([[0.0], reach[:-1]]) if len(reach) else reach
        return float(np.maximum(reach - np.maximum(begin, before), 0.0).sum())

    @property
    def throughput(self) -> float | None:
        """Samples per second, None where the batch is unknown."""
        return None if self.samples is None or not self.step_time else self.samples / self.step_time

    @property
    def overflow(self) -> int:
        """Bytes over capacity, summed over devices; 0 where all fit."""
        return sum(max(0, use.reserved - use.capacity) for use in self.devices)
