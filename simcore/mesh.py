"""A mesh: named axes over an ordered list of devices; the last axis varies fastest."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

DATA = "dp"  # the axis along which devices train copies of the model
DATA_AXIS = 0
ALONE = -1  # instead of an axis: every device by itself


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """Where each device stands. Axes: copy (a device of the list).

    Attributes:
        names: of the axes, outermost first; the first is ``dp``.
        sizes: devices along each.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    place: NDArray[np.int64] = field(init=False)  # [axis, copy] coordinate

    def __post_init__(self) -> None:
        places = np.indices(self.sizes).reshape(len(self.sizes), -1)
        object.__setattr__(self, "place", places)

    @classmethod
    def of(cls, axes: Mapping[str, int]) -> "Mesh":
        """Returns the mesh of named sizes; ``dp`` is put first."""
        others = {name: size for name, size in axes.items() if name != DATA}
        sizes = {DATA: axes.get(DATA, 1)} | others
        return cls(names=tuple(sizes), sizes=tuple(sizes.values()))

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return int(np.prod(self.sizes))

    @property
    def copies(self) -> int:
        """Copies of the model."""
        return self.sizes[0]

    @property
    def shards(self) -> int:
        """Devices that share one copy."""
        return self.num_devices // self.copies

    def size(self, axis: int) -> int:
        """Returns how many devices are along an axis; ALONE: one."""
        return 1 if axis == ALONE else self.sizes[axis]

    def rank(self, axis: int) -> NDArray[np.int64]:
        """Returns the place of each device along an axis, [copy]."""
        return np.zeros(self.num_devices, np.int64) if axis == ALONE else self.place[axis]

    def group(self, axis: int) -> NDArray[np.int64]:
        """Returns which group along an axis each device is in, [copy]; ALONE: its own."""
        if axis == ALONE:
            return np.arange(self.num_devices)
        others = [number for number in range(len(self.sizes)) if number != axis]
        group = np.zeros(self.num_devices, np.int64)
        for number in others:
            group = group * self.sizes[number] + self.place[number]
        return group

    def members(self, axis: int) -> NDArray[np.int64]:
        """Returns the devices of every group along an axis, in order, [group, member]."""
        order = np.lexsort((self.rank(axis), self.group(axis)))
        return order.reshape(-1, self.size(axis))
