"""What one forward and backward executed: ops, and the values they read and write.

A *value* is a storage and a version of its content; every write makes a new version. A view that
covers its storage is the value itself, one that covers a part is a *region* of it.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from simcore.frontends.torch_nest import TapeLoops
from simcore.frontends.torch_signatures import Kind
from simcore.signature import Phase, Role

ALL = -1  # the region that is a whole storage


class Value(NamedTuple):
    """A tensor as an op sees it."""

    storage: int
    version: int
    region: int  # ALL, or a part of the storage, numbered within it
    bytes: int  # of the region


@dataclass(slots=True, kw_only=True)
class Storage:
    """One piece of memory."""

    name: str
    bytes: int
    role: Role
    version: int = 0
    writer: int = -1  # op that wrote the current version, -1 = nobody
    first_user: int = -1
    loops: TapeLoops | None = None  # of the op that makes it, where it is an input
    regions: dict[tuple[Any, ...], int] = field(default_factory=dict)


class TapeOp(NamedTuple):
    """One executed op."""

    target: str
    kind: Kind
    dtype: str
    phase: Phase
    module: str
    reads: tuple[Value, ...]  # distinct
    writes: tuple[Value, ...]  # one per storage; version 0 = fresh
    traffic: int  # bytes read and written
    kernels: int
    joins: int  # op whose placement unit it shares, -1 = a unit of its own
    loops: TapeLoops | None  # places are those in reads and writes


@dataclass(slots=True)
class Tape:
    """What one forward and backward executed."""

    ops: list[TapeOp] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)


def dense_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor, what is expanded counted once."""
    count = tensor.numel()
    strides = tensor.stride()
    if 0 in strides and count:
        for size, stride in zip(tensor.shape, strides, strict=True):
            count = count if stride else count // size
    return count * tensor.element_size()


def region_of(tensor: torch.Tensor, storage: Storage) -> tuple[int, int]:
    """Returns which part of its storage a tensor is, and the bytes of the part.

    Two shapes or axis orders of the same elements are the same part.
    """
    num_bytes = dense_bytes(tensor)
    if num_bytes >= storage.bytes:
        return ALL, storage.bytes
    axes: list[tuple[int, int]] = []  # (stride, size), widest first, neighbours joined
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True):
        if size == 1 or stride == 0:
            continue
        if axes and axes[-1][0] == stride * size:
            axes[-1] = (stride, axes[-1][1] * size)
        else:
            axes.append((stride, size))
    key = (tensor.storage_offset() * tensor.element_size(), tensor.element_size(), *axes)
    return storage.regions.setdefault(key, len(storage.regions)), num_bytes
