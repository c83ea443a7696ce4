"""Which choices keep a partial pipeline completable, for many partial pipelines at once; compiled.

Axes: row (a partial pipeline), node, stage, dev (a usable device).
"""

import numba
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@numba.njit(cache=True, nogil=True)
def stage_choices(
    node: int,
    floor: Ints,  # [row, node] largest stage before each node
    load: Floats,  # [row, stage] bytes that stages hold at least
    used: Bools,  # [row, stage] stages that have a node
    count: Ints,  # [row] stages that must come to have one
    task: tuple[Bools, Floats, Floats],  # reach [node, node], held [node], rooms [dev] falling
) -> Bools:
    """Returns the stages that a node may go to, [row, stage]; a stage for each is left.

    Exact for edges (no edge goes to a smaller number) and for stages that must not stay empty:
    those can be filled if and only if the k-th smallest of them is no smaller than the k-th
    smallest floor of the nodes that are left. Memory is a bound: what cannot fit is refused, unless
    that leaves nothing.
    """
    rows, stages = load.shape
    legal = np.zeros((rows, stages), np.bool_)
    for row in range(rows):
        for stage in range(floor[row, node], count[row]):
            legal[row, stage] = _can_fill(node, stage, floor[row], used[row], count[row], task[0])
        fitting = legal[row].copy()
        for stage in range(floor[row, node], count[row]):
            if legal[row, stage]:
                size = (stage, count[row])
                fitting[stage] = _can_fit(node, size, floor[row], load[row], task)
        if fitting.any():
            legal[row] = fitting
    return legal


@numba.njit(cache=True, nogil=True)
def _can_fill(node: int, stage: int, floor: Ints, used: Bools, count: int, reach: Bools) -> bool:
    left = floor[node + 1 :].copy()
    for other in range(len(left)):
        if reach[node, node + 1 + other]:
            left[other] = max(left[other], stage)
    left.sort()
    place = 0
    for number in range(count):
        if used[number] or number == stage:
            continue
        if place == len(left) or left[place] > number:
            return False
        place += 1
    return True


@numba.njit(cache=True, nogil=True)
def _can_fit(
    node: int,
    size: tuple[int, int],  # stage, number of stages
    floor: Ints,
    load: Floats,
    task: tuple[Bools, Floats, Floats],
) -> bool:
    stage, count = size
    reach, held, rooms = task
    now = load[:count].copy()
    now[stage] += held[node]
    falling = np.sort(now)[::-1]
    for place in range(count):
        if falling[place] > rooms[place]:
            return False
    later = np.zeros(count)  # by the least stage of the nodes that are left
    for other in range(node + 1, len(held)):
        least = max(floor[other], stage) if reach[node, other] else floor[other]
        later[least] += held[other]
    total = room = 0.0
    for place in range(count):
        total += now[count - 1 - place] + later[count - 1 - place]
        room += rooms[place]
        if total > room:
            return False
    return True


@numba.njit(cache=True, nogil=True)
def device_choices(
    device: int,
    copies: Ints,  # [row, stage] devices that stages have
    load: Floats,  # [row, stage] bytes that stages hold at least
    count: Ints,  # [row] stages
    next_copies: Ints,  # [row, copies] the next number of copies that divides a microbatch, or -1
    task: tuple[Bools, Floats],  # may be there [row, stage] on this device, rooms [dev]
) -> Bools:
    """Returns what a device may do, [row, 1 + stage]: nothing, or be a copy of a stage.

    Afterwards every stage can still come to a number of copies that divides a microbatch, each on a
    device with room for what the stage holds at least: stages by what they need and devices by what
    they have, each falling, go together one by one.
    """
    rows, stages = load.shape
    may, rooms = task
    legal = np.zeros((rows, stages + 1), np.bool_)
    left = np.sort(rooms[device + 1 :])[::-1]
    for row in range(rows):
        order = np.argsort(-load[row, : count[row]])
        for choice in range(count[row] + 1):
            stage = choice - 1
            if stage >= 0 and (not may[row, stage] or load[row, stage] > rooms[device]):
                continue
            legal[row, choice] = _can_copy(
                stage, copies[row], (load[row], order), next_copies[row], left
            )
        if not legal[row].any():
            legal[row, 0] = True
    return legal


@numba.njit(cache=True, nogil=True)
def _can_copy(
    chosen: int, copies: Ints, stages: tuple[Floats, Ints], next_copies: Ints, left: Floats
) -> bool:
    load, order = stages
    place = 0
    for stage in order:
        have = copies[stage] + (1 if stage == chosen else 0)
        if have >= len(next_copies) or next_copies[have] < 0:
            return False
        for _ in range(next_copies[have] - have):
            if place == len(left) or load[stage] > left[place]:
                return False
            place += 1
    return True
