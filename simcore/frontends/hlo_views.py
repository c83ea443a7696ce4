"""How a value of a step lies in memory: views of XLA ops as sizes and strides."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from simcore.frontends.hlo_batch import product
from simcore.frontends.hlo_nest import CUT, Label, parts_of
from simcore.loops import NO_LOOP, Access, Dim
from simcore.signature import Affine

ONE: Affine = (1, 0)
ZERO: Affine = (0, 0)


class Extent(NamedTuple):
    """One dimension of a view."""

    size: Affine
    stride: Affine  # elements of the storage; 0 = every index is the same element


class View(NamedTuple):
    """A value: a tensor of the graph, seen in its own shape."""

    tensor: int  # the builder's handle
    extents: tuple[Extent, ...]


def dense(sizes: Sequence[Affine]) -> tuple[Extent, ...]:
    """Returns the dimensions of a tensor whose last one is the fastest."""
    return tuple(
        Extent(size, product(sizes[place + 1 :])) for place, size in enumerate(sizes)
    )  # fmt: skip


def is_dense(extents: Sequence[Extent]) -> bool:
    """Whether dimensions of more than one element lie as in a dense tensor."""
    wanted = dense([extent.size for extent in extents])
    return all(a == b or a.size == ONE for a, b in zip(extents, wanted, strict=True))


def split(
    extents: Sequence[Extent], labels: Sequence[Label], sizes: Mapping[str, Affine],
    shape: Sequence[int],
) -> list[list[tuple[str, Extent]]]:  # fmt: skip
    """Returns the loops of each dimension with their sizes and strides.

    Args:
        extents: of a view.
        labels: of its dimensions.
        sizes: of all labels but CUT.
        shape: at the file's batch.
    """
    found = []
    for extent, label, number in zip(extents, labels, shape, strict=True):
        parts = parts_of(label, number)
        if len(parts) == 1:
            found.append([(parts[0][0], extent)])
            continue
        each = [sizes[name] if name != CUT else (size, 0) for name, size in parts]
        below = [product(each[place + 1 :]) for place in range(len(each))]
        found.append(
            [
                (name, Extent(size, product((extent.stride, under))))
                for (name, _), size, under in zip(parts, each, below, strict=True)
            ]
        )
    return found


def access(
    tensor: int, itemsize: int, pieces: Sequence[Sequence[tuple[str, Extent]]],
    number: Mapping[str, int], *, is_output: bool, whole: bool,
) -> Access:  # fmt: skip
    """Returns an access from the loops of each dimension; sizes of 1 are left out."""
    dims = tuple(
        Dim(NO_LOOP if name == CUT else number[name], extent.size, extent.stride)
        for piece in pieces
        for name, extent in piece
        if extent.size != ONE
    )
    return Access(tensor, itemsize, dims, is_output, whole)


def merged(
    pieces: Sequence[Sequence[tuple[str, Extent]]], labels: Sequence[Label],
    sizes: Sequence[Affine], shape: Sequence[int],
) -> tuple[Extent, ...] | None:  # fmt: skip
    """Returns the dimensions of a reshaped view, None where its elements must be moved.

    Args:
        pieces: loops of each dimension of the source.
        labels: of the dimensions of the result.
        sizes: of the dimensions of the result.
        shape: of the result at the file's batch.
    """
    known = {name: extent for piece in pieces for name, extent in piece if name != CUT}
    found = []
    for label, size, number in zip(labels, sizes, shape, strict=True):
        parts = [known.get(name) for name, _ in parts_of(label, number)]
        if not parts:
            found.append(Extent(ONE, ZERO))
            continue
        stride = _joint_stride([part for part in parts if part is not None])
        if None in parts or stride is None:
            return None
        found.append(Extent(size, stride))
    return tuple(found)


def _joint_stride(parts: Sequence[Extent]) -> Affine | None:
    """Returns the stride of dimensions that lie one inside the other, None where they do not."""
    for outer, inner in pairwise(parts):
        if outer.stride != product((inner.size, inner.stride)):
            return None
    return parts[-1].stride if parts else None
