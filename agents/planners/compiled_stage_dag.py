"""The best stages along an order of nodes and an order of devices, by dynamic programs; compiled.

A stage is an interval of nodes on an interval of devices, its copies. Axes: place (before a node,
or after the last), seat (before a device, or after the last), way (number of copies), after (number
of stages behind).
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Program(NamedTuple):
    """What stages take."""

    copies: Ints  # [way]
    seconds: Floats  # [way, kind, place, place] s of a microbatch; inf = may not be
    again: Floats  # [way, kind, place, place] s more where the forward runs again
    once: Floats  # [way, place, place] s once a step: sums of gradients and the update
    held: Floats  # [way, place, place] bytes at all times
    saved: Floats  # [way, place, place] bytes of a microbatch in flight
    moved: Floats  # [way, place, place] bytes into a stage and back, of a microbatch
    kind: Ints  # [dev] in order
    room: Floats  # [dev] bytes, in order
    pace: Floats  # [dev] bytes/s from the device before, in order
    latency: Floats  # [dev] s, likewise


@numba.njit(cache=True, nogil=True)
def stage_seconds(
    program: Program, stage: tuple[int, int, int, int], rounds: int, in_flight: int
) -> tuple[float, bool]:
    """Returns the pace of a stage, s, inf where it does not fit, and whether it recomputes.

    Args:
        program: what stages take.
        stage: way, first place, last place, seat of the first device.
        rounds: microbatches of a step.
        in_flight: microbatches that the stage holds.
    """
    way, begin, end, seat = stage
    copies = program.copies[way]
    slowest = 0.0
    longer = 0.0
    room = np.inf
    for device in range(seat, seat + copies):
        kind = program.kind[device]
        slowest = max(slowest, program.seconds[way, kind, begin, end])
        longer = max(longer, program.again[way, kind, begin, end])
        room = min(room, program.room[device])
    held = program.held[way, begin, end]
    recomputes = held + program.saved[way, begin, end] * in_flight > room
    if held > room or not slowest < np.inf:
        return np.inf, recomputes
    time = slowest + (longer if recomputes else 0.0) + program.once[way, begin, end] / rounds
    if begin:
        hop = 2 * program.latency[seat] + program.moved[way, begin, end] / program.pace[seat]
        time = max(time, hop)
    return time, recomputes


@numba.njit(cache=True, nogil=True)
def solve(
    program: Program, rounds: int, most: int, holds_all: bool, cap: float
) -> tuple[Floats, Ints, Ints]:
    """Returns the best value from each place and seat on, and the first stage that gives it.

    Args:
        program: what stages take.
        rounds: microbatches of a step.
        most: stages, at most.
        holds_all: whether a stage holds all microbatches of a step (GPipe), or one more than it has
            stages behind it (1F1B).
        cap: inf: the value is the slowest stage's pace. Else the sum of all, none above the cap.

    Returns:
        Values, [after, place, seat], ways and ends of the first stage, likewise; -1 = none.
    """
    places, devices = program.seconds.shape[2], len(program.kind)
    value = np.full((most, places, devices + 1), np.inf)
    ways = np.full(value.shape, -1, np.int64)
    ends = np.full(value.shape, -1, np.int64)
    last = places - 1
    for after in range(most):
        in_flight = rounds if holds_all else min(rounds, after + 1)
        for begin in range(last):
            for end in range(begin + 1, places):
                if (end == last) != (after == 0):
                    continue
                for way in range(len(program.copies)):
                    for seat in range(devices - program.copies[way] + 1):
                        behind = seat + program.copies[way]
                        rest = 0.0 if after == 0 else value[after - 1, end, behind]
                        if rest >= value[after, begin, seat]:
                            continue
                        time, _ = stage_seconds(program, (way, begin, end, seat), rounds, in_flight)
                        if time > cap or time == np.inf:
                            continue
                        found = max(time, rest) if cap == np.inf else time + rest
                        if found < value[after, begin, seat]:
                            value[after, begin, seat] = found
                            ways[after, begin, seat] = way
                            ends[after, begin, seat] = end
    return value, ways, ends
