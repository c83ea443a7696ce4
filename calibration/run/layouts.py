"""How the memory of a model is shared out: which elements of a storage a rank has, and where.

The factors of a storage (`simcore.sharding.factors`) are its dimensions, outermost first. Where
axes of the mesh split a factor, it is taken apart further: one dimension for each axis, then the
rest. A rank has one place of a dimension that is split and all of the others, so its own part is
again a dense storage, and a tensor in the whole is a tensor in the part.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibration.run.recording import Ref
from simcore.sharding.states import Vector

NEVER = -1  # instead of an axis: the dimension is not split
Box = tuple[tuple[int, int], ...]  # (first, count) of each dimension


class LayoutError(ValueError):
    """A tensor that has no place in a part of its storage."""


class Spread(NamedTuple):
    """Which places of one dimension of a tensor a rank has.

    Attributes:
        sizes: of the dimensions that it consists of, outermost first.
        axes: that split them, NEVER where whole.
    """

    sizes: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def is_split(self) -> bool:
        """Whether some rank lacks some of them."""
        return any(axis != NEVER for axis in self.axes)

    def places(self, coordinates: Sequence[int]) -> NDArray[np.int64]:
        """Returns the places of a rank in the whole dimension, ascending.

        Args:
            coordinates: of the rank, along each axis.
        """
        whole = np.arange(math.prod(self.sizes)).reshape(self.sizes)
        mine = tuple(
            slice(None) if axis == NEVER else slice(coordinates[axis], coordinates[axis] + 1)
            for axis in self.axes
        )
        return whole[mine].ravel()


class Layout(NamedTuple):
    """The dimensions of a storage, outermost first, none of size 1.

    States number the axes that split ops; in the mesh, that of the copies comes before them.

    Attributes:
        sizes: of the whole.
        axes: axis of the mesh that splits a dimension in some state, NEVER where none does.
        factors: factor of the storage that it is a part of.
    """

    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    factors: tuple[int, ...]

    def is_split(self, state: Vector) -> tuple[bool, ...]:
        """Returns which dimensions are split in a state."""
        pairs = zip(self.axes, self.factors, strict=True)
        return tuple(axis != NEVER and state[axis - 1] == factor for axis, factor in pairs)

    def local(self, state: Vector) -> tuple[int, ...]:
        """Returns the sizes of a rank's part."""
        split = self.is_split(state)
        return tuple(1 if cut else size for size, cut in zip(self.sizes, split, strict=True))

    def check(self, state: Vector) -> None:
        """Refuses a state whose axes do not divide the storage.

        Raises:
            LayoutError: so.
        """
        wanted = sum(factor >= 0 for factor in state)
        if sum(self.is_split(state)) != wanted:
            raise LayoutError("devices along the axis do not divide a tensor of it")

    def place(self, ref: Ref, state: Vector, expanded: Sequence[int]) -> Ref:
        """Returns a tensor as it lies in a rank's part.

        Args:
            ref: in the whole storage.
            state: of the storage.
            expanded: local sizes of the dimensions that repeat one element (stride 0), in order.

        Raises:
            LayoutError: it has a part of a dimension that is split.
        """
        split = self.is_split(state)
        if not any(split) and 0 not in ref.stride:
            return ref
        below, here = strides_of(self.sizes), strides_of(self.local(state))
        repeats = iter(expanded)
        sizes, strides = [], []
        for size, stride in zip(ref.size, ref.stride, strict=True):
            if size == 1 or stride == 0:
                sizes.append(next(repeats, size) if size != 1 else 1)
                strides.append(stride if size != 1 else 1)
            elif (cover := self.cover(size, stride)) is not None:
                first, last = cover
                sizes.append(math.prod(self.local(state)[first : last + 1]))
                strides.append(here[last])
            else:
                last = self._inside(size, stride, split)
                sizes.append(size)
                strides.append(stride // below[last] * here[last])
        offset = 0
        for dim, place in enumerate(self._digits(ref.offset)):
            if place and split[dim]:
                raise LayoutError("a slice of what is split")
            offset += place * here[dim]
        return Ref(ref.storage, ref.dtype, tuple(sizes), tuple(strides), offset)

    def box(self, ref: Ref) -> Box | None:
        """Returns which places a tensor has of each dimension, None where they are no box."""
        below, digits = strides_of(self.sizes), self._digits(ref.offset)
        found = [(place, 1) for place in digits]
        for size, stride in zip(ref.size, ref.stride, strict=True):
            if size == 1 or stride == 0:
                continue
            if (cover := self.cover(size, stride)) is not None:
                first, last = cover
                for dim in range(first, last + 1):
                    found[dim] = (0, self.sizes[dim])
            elif (
                stride in below
                and digits[below.index(stride)] + size <= (self.sizes[below.index(stride)])
            ):
                found[below.index(stride)] = (digits[below.index(stride)], size)
            else:
                return None
        return tuple(found)

    def spread(self, ref: Ref, dim: int, state: Vector) -> Spread:
        """Returns which places of one dimension of a tensor a rank has."""
        size, stride = ref.size[dim], ref.stride[dim]
        cover = self.cover(size, stride) if stride else None
        if cover is None:
            return Spread((size,), (NEVER,))
        parts = range(cover[0], cover[1] + 1)
        split = self.is_split(state)
        return Spread(
            tuple(self.sizes[part] for part in parts),
            tuple(self.axes[part] if split[part] else NEVER for part in parts),
        )

    def cover(self, size: int, stride: int) -> tuple[int, int] | None:
        """Returns the first and the last of the dimensions that a tensor's dimension is."""
        below = strides_of(self.sizes)
        if stride not in below:
            return None
        last = first = below.index(stride)
        count = self.sizes[last]
        while count < size and first > 0:
            first -= 1
            count *= self.sizes[first]
        return (first, last) if count == size else None

    def _digits(self, offset: int) -> list[int]:
        below = strides_of(self.sizes)
        return [offset // b % size for b, size in zip(below, self.sizes, strict=True)]

    def _inside(self, size: int, stride: int, split: Sequence[bool]) -> int:
        """Returns the dimension that a tensor's dimension takes steps in; none of them is split."""
        below = strides_of(self.sizes)
        fitting = [dim for dim, b in enumerate(below) if b <= stride and stride % b == 0]
        if not fitting:
            raise LayoutError(f"steps of {stride} elements")
        last = fitting[0]
        reach = stride * (size - 1)
        if any(split[dim] for dim in range(last + 1) if below[dim] <= reach):
            raise LayoutError("a slice of what is split")
        return last


def strides_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of dense dimensions, outermost first."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
