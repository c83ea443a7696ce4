"""What it takes to have a tensor in another shape and sharded otherwise.

Splitting a dimension over an axis of a mesh gives each device the elements of one digit of their
index: the digit has a stride (elements below it) and a size (devices). A reshape moves no element,
so it changes no digit: where an axis has the same digit before and after, its devices need nothing
from each other, whatever the dimensions are called.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from simcore.errors import PlanError

_ORDER = ("slice", "all_to_all", "all_gather")  # small ones first


class Layout(NamedTuple):
    """A shape, and what splits it.

    Attributes:
        shape: of the whole tensor.
        split: axis of the mesh -> dimension that it splits; along other axes devices have copies.
            Of two axes that split one dimension, the first takes the larger parts.
    """

    shape: tuple[int, ...]
    split: Mapping[str, int]


class Step(NamedTuple):
    """One collective, or a slice.

    Attributes:
        kind: ``all_gather``, ``all_to_all`` or ``slice`` (free).
        axis: of the mesh.
        num_bytes: of the full buffer of one device, as `simcore.collectives.Collective` counts.
        received: bytes that each device gets from others.
    """

    kind: str
    axis: str
    num_bytes: int
    received: int


def price_reshape(
    source: Layout, target: Layout, mesh: Mapping[str, int], itemsize: int
) -> list[Step]:
    """Returns what leads from one layout to another, in the order in which it is done.

    Args:
        source: as the tensor is.
        target: as it is wanted: as many elements, in the same order.
        mesh: axis -> devices.
        itemsize: bytes of an element.

    Returns:
        One step for each axis whose digit changes; none where all are aligned.

    Raises:
        PlanError: shapes of different sizes, an unknown axis or dimension, or one that the axis
            does not divide.
    """
    if prod(source.shape) != prod(target.shape):
        raise PlanError(f"{list(source.shape)} cannot be reshaped to {list(target.shape)}")
    before, after = _digits(source, mesh), _digits(target, mesh)
    kinds = {axis: _kind(before.get(axis), after.get(axis)) for axis in mesh}
    changed = sorted((a for a, kind in kinds.items() if kind), key=lambda a: _ORDER.index(kinds[a]))
    size = prod(source.shape) * itemsize // prod(mesh[axis] for axis in before)
    steps = []
    for axis in changed:
        kind, devices = kinds[axis], mesh[axis]
        if kind == "slice":
            size //= devices
            steps.append(Step(kind, axis, size, 0))
            continue
        size *= devices if kind == "all_gather" else 1
        steps.append(Step(kind, axis, size, size // devices * (devices - 1)))
    return steps


def _digits(layout: Layout, mesh: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Returns (stride, size) of the digit that each axis splits; not of axes of one device."""
    left = list(layout.shape)
    found = {}
    for axis, dim in layout.split.items():
        if axis not in mesh:
            raise PlanError(f"no axis {axis!r} in a mesh of {', '.join(mesh)}")
        if not 0 <= dim < len(left):
            raise PlanError(f"axis {axis!r}: {list(layout.shape)} has no dimension {dim}")
        if left[dim] % mesh[axis]:
            raise PlanError(f"axis {axis!r}: {mesh[axis]} devices do not divide {left[dim]}")
        left[dim] //= mesh[axis]
        if mesh[axis] > 1:
            found[axis] = (left[dim] * _below(layout.shape, dim), mesh[axis])
    return found


def _below(shape: Sequence[int], dim: int) -> int:
    return prod(shape[dim + 1 :])


def _kind(before: tuple[int, int] | None, after: tuple[int, int] | None) -> str:
    """Returns what changes a digit, "" = nothing has to."""
    if before == after:
        return ""
    if before is None:
        return "slice"
    return "all_gather" if after is None else "all_to_all"
