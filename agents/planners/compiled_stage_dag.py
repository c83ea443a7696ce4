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
    barred: Ints  # [place, dev] nodes before a place that may not be on a device, in order


class Paces(NamedTuple):
    """What each stage takes for a microbatch, s; inf where it may not be or does not fit."""

    plain: Floats  # [way, place, place, seat]
    again: Floats  # [way, place, place, seat] where the forward runs again
    most: Floats  # [way, place, place, seat] microbatches that fit without that


@numba.njit(cache=True, nogil=True)
def stage_paces(program: Program, rounds: int) -> Paces:
    """Returns what all stages take; updates and sums of gradients are shared among the rounds.

    Args:
        program: what stages take.
        rounds: microbatches of a step.
    """
    ways, places = program.once.shape[:2]
    devices = len(program.kind)
    shape = (ways, places, places, devices)
    plain, again = np.full(shape, np.inf), np.full(shape, np.inf)
    most = np.zeros(shape)
    for way in range(ways):
        for begin in range(places - 1):
            for end in range(begin + 1, places):
                for seat in range(devices - program.copies[way] + 1):
                    found = _stage(program, (way, begin, end, seat), rounds)
                    plain[way, begin, end, seat] = found[0]
                    again[way, begin, end, seat] = found[1]
                    most[way, begin, end, seat] = found[2]
    return Paces(plain, again, most)


@numba.njit(cache=True, nogil=True)
def _stage(
    program: Program, stage: tuple[int, int, int, int], rounds: int
) -> tuple[float, float, float]:
    """Returns the pace, that with recomputation, and how many microbatches fit without it."""
    way, begin, end, seat = stage
    slowest = 0.0
    longer = 0.0
    room = np.inf
    for device in range(seat, seat + program.copies[way]):
        kind = program.kind[device]
        slowest = max(slowest, program.seconds[way, kind, begin, end])
        longer = max(longer, program.again[way, kind, begin, end])
        room = min(room, program.room[device])
        if program.barred[end, device] > program.barred[begin, device]:
            return np.inf, np.inf, 0.0
    free = room - program.held[way, begin, end]
    if free < 0.0 or not slowest < np.inf:
        return np.inf, np.inf, 0.0
    saved = program.saved[way, begin, end]
    once = program.once[way, begin, end] / rounds
    hop = 0.0
    if begin:
        hop = 2 * program.latency[seat] + program.moved[way, begin, end] / program.pace[seat]
    most = free / saved if saved > 0.0 else np.inf
    return max(slowest + once, hop), max(slowest + longer + once, hop), most


@numba.njit(cache=True, nogil=True)
def solve(
    program: Program, paces: Paces, rule: tuple[int, int, bool], cap: float
) -> tuple[Floats, Ints, Ints]:
    """Returns the best value from each place and seat on, and the first stage that gives it.

    Args:
        program: what stages take.
        paces: of it.
        rule: microbatches of a step; stages, at most; whether a stage holds all microbatches of a
            step (GPipe), or one more than it has stages behind it (1F1B).
        cap: inf: the value is the slowest stage's pace. Else the sum of all, none above the cap.

    Returns:
        Values, [after, place, seat], ways and ends of the first stage, likewise; -1 = none.
    """
    rounds, most, holds_all = rule
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
                    copies = program.copies[way]
                    for seat in range(devices - copies + 1):
                        rest = 0.0 if after == 0 else value[after - 1, end, seat + copies]
                        if rest >= value[after, begin, seat]:
                            continue
                        time = paces.plain[way, begin, end, seat]
                        if paces.most[way, begin, end, seat] < in_flight:
                            time = paces.again[way, begin, end, seat]
                        if time > cap or time == np.inf:
                            continue
                        found = max(time, rest) if cap == np.inf else time + rest
                        if found < value[after, begin, seat]:
                            value[after, begin, seat] = found
                            ways[after, begin, seat] = way
                            ends[after, begin, seat] = end
    return value, ways, ends
