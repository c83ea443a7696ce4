"""Loops recorded at three batches -> loops whose sizes and strides are affine in the batch.

An op whose loops differ in structure between the runs, or do not grow by a constant plus a whole
multiple of the batch, has none.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simcore.frontends.torch_nest import Structure, TapeLoops
from simcore.loops import NO_LOOP, Access, Dim, Loop, LoopKind, OpLoops
from simcore.signature import Affine

_ONE = (1, 0)


def fitted(
    columns: Sequence[Sequence[TapeLoops | None]], batches: Sequence[int]
) -> list[OpLoops | None]:
    """Returns the loops of each op; accesses call tensors by their place among reads or writes.

    Args:
        columns: of each of three runs, the loops of each op.
        batches: of each run.
    """
    same = [
        op
        for op, (a, b, c) in enumerate(zip(*columns, strict=True))
        if a and b and c and a.structure == b.structure == c.structure
    ]
    first = [kept for op in same if (kept := columns[0][op])]
    counts = [len(kept.numbers) for kept in first]
    table = np.array(
        [[n for op in same if (kept := column[op]) for n in kept.numbers] for column in columns],
        np.int64,
    ).reshape(3, -1)
    slope, rest = np.divmod(table[1] - table[0], batches[1] - batches[0])
    constant = table[0] - slope * batches[0]
    bad = (rest != 0) | (table[2] != constant + slope * batches[2]) | (slope < 0)
    ends = np.cumsum([0, *counts])
    bad_before = np.cumsum([0, *bad])[ends]
    pairs: list[Affine] = list(zip(constant.tolist(), slope.tolist(), strict=True))
    known: dict[tuple[Structure, tuple[Affine, ...]], OpLoops | None] = {}
    result: list[OpLoops | None] = [None] * len(columns[0])
    for index, (op, kept) in enumerate(zip(same, first, strict=True)):
        if bad_before[index] != bad_before[index + 1]:
            continue
        key = kept.structure, tuple(pairs[ends[index] : ends[index + 1]])
        if key not in known:
            known[key] = _assembled(*key)
        result[op] = known[key]
    return result


def constant_loops(kept: TapeLoops | None) -> OpLoops | None:
    """Returns the loops of an op that does not know the batch."""
    return kept and _assembled(kept.structure, tuple((number, 0) for number in kept.numbers))


class _Place(NamedTuple):
    """One dimension of an access."""

    loop: int
    size: Affine
    stride: Affine


def _assembled(structure: Structure, numbers: Sequence[Affine]) -> OpLoops | None:
    """Returns the loops, without what has size 1; None where a loop has several sizes."""
    inner, rest = numbers[: len(structure.loops)], iter(numbers[len(structure.loops) :])
    places = [
        [_Place(loop, next(rest), next(rest)) for loop in access.loops]
        for access in structure.accesses
    ]
    sizes = _loop_sizes(structure, places)
    if sizes is None:
        return None
    index = {loop: position for position, loop in enumerate(sizes)} | {NO_LOOP: NO_LOOP}
    loops = tuple(
        Loop(name, sizes[loop], kind, dim, inner[loop])
        for loop, (name, kind, dim) in enumerate(structure.loops)
        if loop in sizes
    )
    accesses = tuple(
        Access(a.place, a.itemsize, _dims(dims, index), a.is_output, a.whole)
        for a, dims in zip(structure.accesses, places, strict=True)
    )
    return OpLoops(loops, accesses, structure.is_linear)


def _dims(places: Sequence[_Place], index: Mapping[int, int]) -> tuple[Dim, ...]:
    return tuple(
        Dim(index[place.loop], place.size, place.stride) for place in places if place.size != _ONE
    )


def _loop_sizes(
    structure: Structure, places: Sequence[Sequence[_Place]]
) -> dict[int, Affine] | None:
    """Returns the size of each loop that has more than one iteration, in their order.

    Where borders are exchanged, input and output may differ: the output counts.
    """
    found: dict[int, dict[Affine, None]] = {loop: {} for loop in range(len(structure.loops))}
    by_output = sorted(
        zip(structure.accesses, places, strict=True), key=lambda pair: not pair[0].is_output
    )
    for _, dims in by_output:
        for place in dims:
            if place.loop != NO_LOOP and place.size != _ONE:
                found[place.loop][place.size] = None
    for loop, sizes in found.items():
        if len(sizes) > 1 and structure.loops[loop][1] != LoopKind.HALO:
            return None
    return {loop: next(iter(sizes)) for loop, sizes in found.items() if sizes}
