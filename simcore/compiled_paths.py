"""Compiled: how early ops can start where a tensor takes time to reach another device.

The bound of Papadimitriou and Yannakakis ("Towards an architecture-independent analysis of parallel
algorithms", SIAM J. Comput. 1990), with devices that run their ops in program order. What comes
before an op either runs on the op's device, one after another, or its outputs have to arrive.
Starting from the op, the input that would arrive last is tried on the device; the op starts when
the device has done all that is tried there, or when the first input that is not there arrives, and
the best of these is a time that no placement beats.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., object])

NONE = -1


class Inputs(NamedTuple):
    """Which ops an op reads from, and how long that takes from another device."""

    first: NDArray[np.int64]  # [op + 1] offsets into source
    source: NDArray[np.int64]  # [input] op
    delay: NDArray[np.float64]  # [input] s


class Ops(NamedTuple):
    """What is known of the ops; an op comes behind all that it reads from."""

    group: NDArray[np.int64]  # [op] ops of one group share a device
    before: NDArray[np.int64]  # [op] the op of its group just before it, -1 = none
    seconds: NDArray[np.float64]  # [op] on the fastest device
    release: NDArray[np.float64]  # [op] s, it does not start earlier


class Tried(NamedTuple):
    """Working memory: ops that are tried on the device, falling, and inputs that are not."""

    member: NDArray[np.int64]  # [member] op
    behind: NDArray[np.float64]  # [member] s, of it and all members that run after it
    source: NDArray[np.int64]  # [open] op
    reader: NDArray[np.int64]  # [open] 1 + position of the member that reads it, 0 = the op itself
    delay: NDArray[np.float64]  # [open] s; inf = it must be on the device
    sizes: NDArray[np.int64]  # [2] members, open inputs


def compiled(function: Function) -> Function:
    """Compiles a function at its first call; typed as the function it is given."""
    return cast(
        Function, numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function)
    )


def make_tried(members: int, inputs: int) -> Tried:
    """Returns working memory for so many members and open inputs; what has no room is left out."""
    return Tried(
        np.zeros(members, np.int64),
        np.zeros(members),
        np.zeros(inputs, np.int64),
        np.zeros(inputs, np.int64),
        np.zeros(inputs),
        np.zeros(2, np.int64),
    )


@compiled
def _open(tried: Tried, source: int, reader: int, delay: float) -> None:
    """Lists an input, unless its op is a member or there is no room."""
    for at in range(tried.sizes[0]):
        if tried.member[at] == source:
            return
    at = tried.sizes[1]
    if at < len(tried.source):
        tried.source[at], tried.reader[at], tried.delay[at] = source, reader, delay
        tried.sizes[1] += 1


@compiled
def _open_inputs(inputs: Inputs, ops: Ops, tried: Tried, op: int, reader: int) -> None:
    """Lists what an op needs: its inputs, and the op of its group just before it."""
    if ops.before[op] != NONE:
        _open(tried, ops.before[op], reader, np.inf)
    for k in range(inputs.first[op], inputs.first[op + 1]):
        source = inputs.source[k]
        if ops.group[source] != ops.group[op]:
            _open(tried, source, reader, inputs.delay[k])


@compiled
def _last_arrival(ops: Ops, tried: Tried, start: NDArray[np.float64]) -> tuple[int, float]:
    """Returns the open input that would let the op start last from another device, and when."""
    last, time = NONE, -1.0
    for at in range(tried.sizes[1]):
        if tried.delay[at] == np.inf:
            continue
        source = tried.source[at]
        arrival = start[source] + ops.seconds[source] + tried.delay[at]
        if tried.reader[at]:
            arrival += tried.behind[tried.reader[at] - 1]
        if arrival > time:
            last, time = at, arrival
    return last, time


@compiled
def _sure(tried: Tried) -> int:
    """Returns the latest op among those that must be on the device, as an open input."""
    found = NONE
    for at in range(tried.sizes[1]):
        if tried.delay[at] == np.inf and (found == NONE or tried.source[at] > tried.source[found]):
            found = at
    return found


@compiled
def _take(ops: Ops, tried: Tried, op: int) -> int:
    """Makes an op a member and closes its inputs' entries; returns its position + 1."""
    at = tried.sizes[0]
    while at > 0 and tried.member[at - 1] < op:
        tried.member[at] = tried.member[at - 1]
        at -= 1
    tried.member[at] = op
    tried.sizes[0] += 1
    total = 0.0
    for k in range(tried.sizes[0]):
        total += ops.seconds[tried.member[k]]
        tried.behind[k] = total
    kept = 0
    for k in range(tried.sizes[1]):
        if tried.source[k] != op:
            tried.source[kept], tried.delay[kept] = tried.source[k], tried.delay[k]
            tried.reader[kept] = tried.reader[k] + (tried.reader[k] > at)
            kept += 1
    tried.sizes[1] = kept
    return int(at + 1)


@compiled
def _all_done(ops: Ops, tried: Tried, start: NDArray[np.float64]) -> float:
    """Returns when one device has run all members, in program order."""
    time = 0.0
    for k in range(tried.sizes[0] - 1, -1, -1):
        op = tried.member[k]
        time = max(time, start[op]) + ops.seconds[op]
    return time


@compiled
def _start(inputs: Inputs, ops: Ops, tried: Tried, start: NDArray[np.float64], op: int) -> float:
    """Returns a time before which an op cannot start, given those of all before it."""
    done = ops.release[op]
    if ops.before[op] != NONE:
        done = max(done, start[ops.before[op]] + ops.seconds[ops.before[op]])
    for k in range(inputs.first[op], inputs.first[op + 1]):
        done = max(done, start[inputs.source[k]] + ops.seconds[inputs.source[k]])
    tried.sizes[:] = 0
    _open_inputs(inputs, ops, tried, op, 0)
    best = np.inf
    while done < best:
        last, arrival = _last_arrival(ops, tried, start)
        if last == NONE or arrival <= done or tried.sizes[0] == len(tried.member):
            return float(done)
        sure = _sure(tried)
        if sure == NONE:
            best = min(best, max(done, arrival))
            sure = last
        taken = tried.source[sure]
        position = _take(ops, tried, taken)
        _open_inputs(inputs, ops, tried, taken, position)
        done = max(done, _all_done(ops, tried, start))
    return float(best)


@compiled
def earliest_starts(inputs: Inputs, ops: Ops, tried: Tried) -> NDArray[np.float64]:
    """Returns times before which ops cannot start on any devices, [op] s."""
    start = np.zeros(len(ops.group))
    for op in range(len(start)):
        start[op] = _start(inputs, ops, tried, start, op)
    return start


@compiled
def join_groups(
    group: NDArray[np.int64], one: NDArray[np.int64], other: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns groups, [op], of which those of each pair of ops (one, other) are made one."""
    parent = np.arange(group.max() + 1)
    for k in range(len(one)):
        a, b = group[one[k]], group[other[k]]
        while parent[a] != a:
            a = parent[a]
        while parent[b] != b:
            b = parent[b]
        parent[max(a, b)] = min(a, b)
    for k in range(len(parent)):
        parent[k] = parent[parent[k]]  # parents have smaller numbers
    return parent[group]
