"""Compiled: all ideals of a partial order, and how they lie above each other.

Units are numbered in a topological order. An ideal grows only by units beyond its last one, so
each is made once.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.exact.compiled_options import compiled

_WORD = 64


class Order(NamedTuple):
    """The partial order."""

    first_before: NDArray[np.int64]  # [unit + 1] offsets into before
    before: NDArray[np.int64]  # [arc] direct predecessors of each unit
    first_after: NDArray[np.int64]  # [unit + 1] offsets into after
    after: NDArray[np.int64]  # [arc] direct successors of each unit
    key: NDArray[np.uint64]  # [unit] random; an ideal's hash is the exclusive or of its units'


@compiled
def _has(bits: NDArray[np.uint64], unit: int) -> bool:
    return bool((bits[unit // _WORD] >> np.uint64(unit % _WORD)) & np.uint64(1) != np.uint64(0))


@compiled
def _set(bits: NDArray[np.uint64], unit: int) -> None:
    bits[unit // _WORD] |= np.uint64(1) << np.uint64(unit % _WORD)


@compiled
def _can_join(order: Order, member: NDArray[np.uint64], unit: int) -> bool:
    for k in range(order.first_before[unit], order.first_before[unit + 1]):
        if not _has(member, order.before[k]):
            return False
    return True


@compiled
def _can_leave(order: Order, member: NDArray[np.uint64], unit: int) -> bool:
    for k in range(order.first_after[unit], order.first_after[unit + 1]):
        if _has(member, order.after[k]):
            return False
    return True


@compiled
def _grown_bits(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    grown = np.zeros((2 * len(rows), rows.shape[1]), np.uint64)
    grown[: len(rows)] = rows
    return grown


@compiled
def _grow_from(
    order: Order,
    member: NDArray[np.uint64],
    free: NDArray[np.uint64],
    last: NDArray[np.int64],
    parent: int,
    count: int,
) -> int:
    """Adds the ideals with one unit more than `parent`, beyond its last; returns how many then."""
    num_units = len(order.key)
    for word in range((last[parent] + 1) // _WORD, member.shape[1]):
        bits = free[parent, word]
        while bits != np.uint64(0):
            low = bits & (~bits + np.uint64(1))
            bits ^= low
            unit = word * _WORD
            while low != np.uint64(1):
                low >>= np.uint64(1)
                unit += 1
            if unit <= last[parent] or unit >= num_units:
                continue
            member[count] = member[parent]
            free[count] = free[parent]
            _set(member[count], unit)
            free[count, unit // _WORD] ^= np.uint64(1) << np.uint64(unit % _WORD)
            for k in range(order.first_after[unit], order.first_after[unit + 1]):
                if _can_join(order, member[count], order.after[k]):
                    _set(free[count], order.after[k])
            last[count] = unit
            count += 1
    return count


@compiled
def list_ideals(order: Order, limit: int) -> tuple[NDArray[np.uint64], NDArray[np.int64], bool]:
    """Returns (members [ideal, word], first of each size [unit + 2], whether all are there).

    Stops at the first size with which there are more than `limit`.
    """
    num_units = len(order.key)
    member = np.zeros((1024 + num_units, num_units // _WORD + 1), np.uint64)
    free = np.zeros_like(member)
    last = np.zeros(len(member), np.int64)
    last[0] = -1
    for unit in range(num_units):
        if order.first_before[unit] == order.first_before[unit + 1]:
            _set(free[0], unit)
    first_level = np.zeros(num_units + 2, np.int64)
    count, begin = 1, 0
    for size in range(num_units + 1):
        first_level[size + 1] = count
        end = count
        for parent in range(begin, end):
            if count + num_units > len(member):
                member, free = _grown_bits(member), _grown_bits(free)
                longer = np.zeros(len(member), np.int64)
                longer[: len(last)] = last
                last = longer
            count = _grow_from(order, member, free, last, parent, count)
            if count > limit:
                return member[:1].copy(), first_level, False
        begin = end
    return member[:count].copy(), first_level, True


@compiled
def _hash(order: Order, member: NDArray[np.uint64]) -> np.uint64:
    value = np.uint64(0)
    for unit in range(len(order.key)):
        if _has(member, unit):
            value ^= order.key[unit]
    return value


@compiled
def _find(
    member: NDArray[np.uint64],
    slots: NDArray[np.int64],
    bits: NDArray[np.uint64],
    value: np.uint64,
) -> int:
    """Returns the slot of an ideal, or the free slot where it belongs."""
    mask = np.uint64(len(slots) - 1)
    slot = value & mask
    while slots[slot] >= 0:
        if (member[slots[slot]] == bits).all():
            break
        slot = (slot + np.uint64(1)) & mask
    return int(slot)


@compiled
def link_ideals(
    order: Order, member: NDArray[np.uint64]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Returns first_down, down_unit and down_ideal of `Ideals`."""
    num_ideals, num_units = len(member), len(order.key)
    size = 1
    while size < 2 * num_ideals:
        size *= 2
    slots = np.full(size, -1, np.int64)
    hashes = np.zeros(num_ideals, np.uint64)
    first_down = np.zeros(num_ideals + 1, np.int64)
    for ideal in range(num_ideals):
        hashes[ideal] = _hash(order, member[ideal])
        slots[_find(member, slots, member[ideal], hashes[ideal])] = ideal
        links = 0
        for unit in range(num_units):
            if _has(member[ideal], unit) and _can_leave(order, member[ideal], unit):
                links += 1
        first_down[ideal + 1] = first_down[ideal] + links
    down_unit = np.zeros(first_down[-1], np.int32)
    down_ideal = np.zeros(first_down[-1], np.int32)
    bits = np.zeros(member.shape[1], np.uint64)
    k = 0
    for ideal in range(num_ideals):
        for unit in range(num_units):
            if _has(member[ideal], unit) and _can_leave(order, member[ideal], unit):
                bits[:] = member[ideal]
                bits[unit // _WORD] ^= np.uint64(1) << np.uint64(unit % _WORD)
                down_unit[k] = unit
                value = hashes[ideal] ^ order.key[unit]
                down_ideal[k] = slots[_find(member, slots, bits, value)]
                k += 1
    return first_down, down_unit, down_ideal


@compiled
def sum_ideals(
    first_down: NDArray[np.int64],
    down_unit: NDArray[np.int32],
    down_ideal: NDArray[np.int32],
    weight: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Returns the sum of the weights, [unit], of the units in each ideal, [ideal]."""
    total = np.zeros(len(first_down) - 1)
    for ideal in range(1, len(total)):
        link = first_down[ideal]
        total[ideal] = total[down_ideal[link]] + weight[down_unit[link]]
    return total
