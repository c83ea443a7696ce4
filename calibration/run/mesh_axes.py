"""A rank's place in a mesh: its coordinates, its group along each axis, and what it does there."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from simcore.mesh import Mesh

Tensor = torch.Tensor
_BYTES = {torch.bool: torch.uint8}  # what gloo does not carry, as what it does


class MeshAxes:
    """The groups of one rank.

    Attributes:
        coordinates: of the rank, along each axis of the mesh.
        sizes: of the axes.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        """Makes a group for each axis; all ranks make all groups, in one order."""
        self.coordinates: tuple[int, ...] = tuple(mesh.place[:, rank].tolist())
        self.sizes = mesh.sizes
        self._groups: dict[int, Any] = {}
        self._step = 0
        self._opened: list[Any] = []
        for axis, size in enumerate(mesh.sizes):
            for members in mesh.members(axis).tolist() if size > 1 else ():
                group = dist.new_group(members)
                if rank in members:
                    self._groups[axis] = group
                    self._opened.append(group)

    def all_reduce(self, tensor: Tensor, axis: int, *, largest: bool = False) -> Tensor:
        """Sums a tensor over an axis, in place, or takes the largest."""
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        if self.sizes[axis] > 1:
            dist.all_reduce(tensor, op=op, group=self._groups[axis])
        return tensor

    def start_sum(self, tensor: Tensor, axis: int) -> Callable[[], object]:
        """Starts to sum a tensor over an axis, in place; returns what waits for the end."""
        work = dist.all_reduce(tensor, group=self._groups[axis], async_op=True)
        return work.wait  # type: ignore[no-any-return]

    def gather(self, part: Tensor, axis: int) -> Tensor:
        """Returns the parts of all ranks of an axis, [rank, ...]."""
        sent = _carried(part)
        parts = [torch.empty_like(sent) for _ in range(self.sizes[axis])]
        dist.all_gather(parts, sent, group=self._groups[axis])
        return torch.stack(parts).view(part.dtype)

    def reduce_scatter(self, parts: Tensor, axis: int) -> Tensor:
        """Returns this rank's part of the sum over an axis; `parts` are [rank, ...]."""
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, list(parts.unbind()), group=self._groups[axis])
        return mine

    def all_to_all(self, parts: Tensor, axis: int) -> Tensor:
        """Sends part n of [rank, ...] to rank n, and returns what the ranks sent, [rank, ...]."""
        sent = _carried(parts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._groups[axis])
        return received.view(parts.dtype)

    def next_step(self) -> None:
        """Tells that a step begins: what is drawn at random changes."""
        self._step += 1

    def seed(self, name: str, axes: Sequence[int]) -> None:
        """Seeds what an op draws: alike on ranks that do the same, not where axes split the op.

        Args:
            name: of the op.
            axes: that split it, and those whose ranks have other samples.
        """
        places = ",".join(str(self.coordinates[axis]) for axis in axes)
        torch.manual_seed(zlib.crc32(f"{name} {self._step} {places}".encode()))

    def close(self) -> None:
        """Gives the groups back."""
        for group in self._opened:
            dist.destroy_process_group(group)
        self._opened.clear()


def _carried(tensor: Tensor) -> Tensor:
    """Returns a dense tensor of a kind that can be sent."""
    dense = tensor.contiguous()
    return dense.view(_BYTES[dense.dtype]) if dense.dtype in _BYTES else dense
