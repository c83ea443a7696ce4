"""The loops of one XLA op at the file's batch, before its sizes are known to grow with the batch.

A rule labels the dimensions of what an op reads and writes, as an einsum does; a label is a loop.
One dimension may hold several (heads and what is in a head): it is then a sequence of (label,
size), outermost first.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from simcore.loops import LoopKind
from simcore.signature import OpClass

Part = tuple[str, int]
Label = str | tuple[Part, ...]  # "" = cannot be split
CUT = ""


class Use(NamedTuple):
    """One value that an op reads or writes, with a label for each dimension."""

    value: int
    labels: tuple[Label, ...]
    is_output: bool = False
    whole: bool = False  # as in `simcore.loops.Access`


class Special(NamedTuple):
    """What is not plain about a loop."""

    kind: LoopKind
    payload: int  # the value whose bytes are exchanged


class Nest(NamedTuple):
    """The loops of one op and what it costs.

    Attributes:
        uses: what it reads, then what it writes.
        op_class: of the op.
        dims: dimension of the signature -> labels whose sizes it multiplies; an op without them
            walks over the elements of `walked`.
        walked: a value.
        factor: multiplies the FLOPs.
        special: of each label that is not a plain MAP.
        is_linear: it works on sums of parts.
        given: dimensions of the signature that no loop has.
    """

    uses: tuple[Use, ...]
    op_class: OpClass
    dims: Mapping[str, tuple[str, ...]] = {}
    walked: int = -1
    factor: float = 1.0
    special: Mapping[str, Special] = {}
    is_linear: bool = False
    given: Mapping[str, int] = {}


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    """Returns the prefix with 0, 1 and so on."""
    return tuple(f"{prefix}{index}" for index in range(count))


def chosen(labels: Sequence[Label], dims: Iterable[int]) -> tuple[Label, ...]:
    """Returns labels by their places."""
    return tuple(labels[dim] for dim in dims)


def without(labels: Sequence[Label], dims: Iterable[int]) -> tuple[Label, ...]:
    """Returns labels, CUT at some places."""
    gone = frozenset(dims)
    return tuple(CUT if place in gone else label for place, label in enumerate(labels))


def parts_of(label: Label, size: int) -> tuple[Part, ...]:
    """Returns the loops of one dimension; one of size 1 has none."""
    if size == 1:
        return ()
    return ((label, size),) if isinstance(label, str) else label


def growing_part(parts: Sequence[Part], batch: int) -> str:
    """Returns the label of what grows in a dimension that grows, CUT where none can.

    That is the outermost part of just the batch, else the outermost that is a multiple of it.
    """
    exact = [name for name, size in parts if size == batch]
    return (*exact, *(name for name, size in parts if size % batch == 0), CUT)[0]


def reshaped(
    before: Sequence[int], after: Sequence[int]
) -> tuple[tuple[Label, ...], tuple[Label, ...]]:
    """Returns the labels of the dimensions of one memory in two shapes.

    From the outside in, each dimension is cut where the other shape has a boundary; from the first
    boundary on that falls inside of a number, nothing can be split.
    """
    left: list[list[Part]] = [[] for _ in before]
    right: list[list[Part]] = [[] for _ in after]
    rest, other = [*map(int, before)], [*map(int, after)]
    elements = prod(rest) * prod(other)
    i = j = count = 0
    while i < len(before) and j < len(after) and elements:
        if rest[i] == 1:
            i += 1
        elif other[j] == 1:
            j += 1
        elif rest[i] % other[j] and other[j] % rest[i]:
            break
        else:
            part = (f"e{count}", min(rest[i], other[j]))
            left[i].append(part)
            right[j].append(part)
            rest[i] //= part[1]
            other[j] //= part[1]
            count += 1
    return _labels(left, rest), _labels(right, other)


def _labels(parts: Sequence[list[Part]], rest: Sequence[int]) -> tuple[Label, ...]:
    found: list[Label] = []
    for held, left in zip(parts, rest, strict=True):
        if len(held) == 1 and left == 1:
            found.append(held[0][0])
        elif not held:
            found.append(CUT)
        else:
            found.append((*held, (CUT, left)) if left > 1 else tuple(held))
    return tuple(found)
