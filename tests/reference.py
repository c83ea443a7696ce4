"""The slow simulator: a graph, a cluster, a placement -> every start and end, and the memory peak.

It is written from the design page alone and defines right: the compiled kernel must give the same
bits. Nothing here is clever. Every task is looked at in every round, every queue is a list that is
sorted when it is read, and no case is treated apart because it would be faster.

What is told is in ``reference_problem``, what is played in ``reference_tasks``, the event loop in
``reference_play``, fair sharing and slow-down in ``reference_rates``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.reference_play import Playback
from tests.reference_problem import ReferenceProblem

__all__ = [
    "CollectiveTimes",
    "ReferenceProblem",
    "ReferenceResult",
    "TransferTimes",
    "reserved",
    "simulate_reference",
]


class TransferTimes(NamedTuple):
    """When one transfer happened."""

    tensor: int
    source: int  # device index
    target: int  # device index
    request: float  # s, the producer's end, or when the streams came to it
    start: float  # s
    end: float  # s


class CollectiveTimes(NamedTuple):
    """When one collective happened."""

    request: float  # s, the end of the last producer
    start: float  # s, when its volume starts to move
    end: float  # s


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    """What the reference says of one placement."""

    step_time: float  # s
    start: list[float]  # [op] s
    end: list[float]  # [op] s
    transfers: list[TransferTimes]  # [transfer] in transfer id order
    allocated: list[int]  # [dev] bytes
    collectives: list[CollectiveTimes] = field(default_factory=list)  # [collective] by op id


def simulate_reference(
    problem: ReferenceProblem,
    placement: Sequence[int],
    priorities: Sequence[int] | None = None,
) -> ReferenceResult:
    """Plays one placement.

    Args:
        problem: graph, cluster, costs and settings.
        placement: [op] device index, -1 for collectives.
        priorities: [op] the least goes first in ``ready`` order; all equal if None.

    Returns:
        Start and end of every task, the step time, and the memory peak of every device.

    Raises:
        DeadlockError: tasks wait for each other.
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
    times = [
        CollectiveTimes(
            play.request[index], play.communication_start[index], play.communication_end[index]
        )
        for index in range(len(play.communications))
    ]
    return ReferenceResult(
        step_time=max([*play.end.values(), *play.communication_end.values()], default=0.0),
        start=[play.start[op] for op in range(len(placement))],
        end=[play.end[op] for op in range(len(placement))],
        transfers=[
            TransferTimes(t.tensor, t.source, t.target, *time)
            for t, time in zip(play.transfers, times, strict=False)
        ],
        allocated=allocated,
        collectives=times[len(play.transfers) :],
    )


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
