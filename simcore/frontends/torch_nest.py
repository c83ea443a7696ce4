"""The loops of one executed torch op at one batch, before they are fitted over batches.

A rule labels the dimensions of the tensors that an op reads and writes, much as an einsum does; a
label is a loop. One dimension may hold several loops (heads and what is in a head): it is then a
sequence of (label, size), outermost first.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from simcore.loops import LoopKind

Tensor = torch.Tensor
Args = Sequence[Any]
Part = tuple[str, int]  # a label, and how many iterations of a dimension are its
Label = str | tuple[Part, ...]  # "" = cannot be split

CUT = ""  # the label of a dimension that cannot be split


class Use(NamedTuple):
    """One tensor that an op reads or writes, with its labels."""

    tensor: Tensor
    labels: tuple[Label, ...]  # one a dimension
    is_output: bool = False
    whole: bool = False  # as in `Access`


class Special(NamedTuple):
    """What is not plain about a loop."""

    kind: LoopKind
    inner: int = 0  # bytes


class Nest(NamedTuple):
    """The loops of one op at one batch."""

    uses: tuple[Use, ...]  # inputs, then outputs
    dims: Mapping[str, str] | str  # the signature's dimension of each label, or of all labels
    special: Mapping[str, Special] = {}  # of each label that is not a plain MAP
    linear_reads: int = 0  # it works on sums of parts if it reads so many tensors; 0 = never

    @property
    def num_reads(self) -> int:
        """Number of inputs."""
        return sum(not use.is_output for use in self.uses)

    def linear(self, *, when: bool = True) -> "Nest":
        """Returns the nest of an op that works on sums of parts."""
        return self._replace(linear_reads=self.num_reads) if when else self


def read(tensor: Tensor | None, *labels: Label) -> tuple[Use, ...]:
    """Returns an input with its labels, nothing where there is no such tensor."""
    return () if tensor is None else (Use(tensor, labels),)


def written(tensor: Tensor | None, *labels: Label, whole: bool = False) -> tuple[Use, ...]:
    """Returns an output with its labels, nothing where there is no such tensor."""
    return () if tensor is None else (Use(tensor, labels, True, whole),)


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    """Returns the prefix with 0, 1 and so on."""
    return tuple(f"{prefix}{index}" for index in range(count))


def argument(args: Args, position: int, default: Any = None) -> Any:
    """Returns a positional argument, the default where it is left out."""
    return args[position] if position < len(args) else default


def tensors_of(args: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among arguments."""
    return [arg for arg in args if isinstance(arg, Tensor)]


def axis(tensor: Tensor, dim: int) -> int:
    """Returns a dimension counted from the front."""
    return dim % max(1, tensor.dim())


def axes(tensor: Tensor, dims: Any) -> frozenset[int]:
    """Returns the dimensions that a reduction names: a number, a list, all for None or none."""
    if isinstance(dims, int):
        dims = [dims]
    return frozenset(axis(tensor, dim) for dim in dims or range(tensor.dim()))


def rows(tensor: Tensor, without: Iterable[int]) -> int:
    """Returns the elements of a tensor over all but some dimensions."""
    left = set(range(tensor.dim())) - set(without)
    return math.prod(tensor.shape[dim] for dim in left)


class TapeLoops(NamedTuple):
    """The loops of a recorded op: what may not depend on the batch, and what may."""

    structure: "Structure"
    numbers: tuple[int, ...]  # per loop its inner bytes; per access size and stride of each place


class TapeAccess(NamedTuple):
    """One tensor of a recorded op."""

    place: int  # among the op's reads or writes
    itemsize: int
    loops: tuple[int, ...]  # of each dimension, NO_LOOP = cannot be split
    is_output: bool
    whole: bool


class Structure(NamedTuple):
    """What may not depend on the batch."""

    loops: tuple[tuple[str, LoopKind, str], ...]  # name, kind, dimension of the signature
    accesses: tuple[TapeAccess, ...]
    is_linear: bool


def tape_loops(nest: Nest, places: Sequence[int]) -> TapeLoops | None:
    """Returns a nest as it is kept on the tape.

    Args:
        nest: what a rule said.
        places: of each of its uses, the place among the op's reads or writes; -1 = neither, for
            instance a number, or a tensor of which only the shape is read.

    Returns:
        None where the labels do not fit the tensors.
    """
    index: dict[str, int] = {CUT: -1}
    accesses: list[TapeAccess] = []
    numbers: list[int] = []
    for use, place in zip(nest.uses, places, strict=True):
        if place < 0:
            continue
        labels, sizes = _flat(use)
        if labels is None:
            return None
        loops = tuple(index.setdefault(label, len(index) - 1) for label in labels)
        numbers += sizes
        accesses.append(
            TapeAccess(place, use.tensor.element_size(), loops, use.is_output, use.whole)
        )
    del index[CUT]
    special = [nest.special.get(label, _PLAIN) for label in index]
    kinds = tuple(
        (label, kind, nest.dims if isinstance(nest.dims, str) else nest.dims.get(label, ""))
        for label, (kind, _) in zip(index, special, strict=True)
    )
    num_reads = sum(not access.is_output for access in accesses)
    structure = Structure(kinds, tuple(accesses), 0 < nest.linear_reads == num_reads)
    return TapeLoops(structure, (*(int(inner) for _, inner in special), *numbers))


_PLAIN = Special(LoopKind.MAP)


def _flat(use: Use) -> tuple[tuple[str, ...] | None, list[int]]:
    """Returns labels, and size and stride in turn, with dimensions of several loops spelled out."""
    shape, strides = use.tensor.shape, use.tensor.stride()
    if len(use.labels) != len(shape):
        return None, []
    if all(isinstance(label, str) for label in use.labels):
        numbers = [number for pair in zip(shape, strides, strict=True) for number in pair]
        return use.labels, numbers  # type: ignore[return-value]
    labels: list[str] = []
    numbers = []
    for label, size, stride in zip(use.labels, shape, strides, strict=True):
        parts = _parts(label, size)
        left = math.prod(part for _, part in parts)
        if left != size:
            return None, []
        for name, part in parts:
            left //= part
            labels.append(name)
            numbers += [part, stride * left]
    return tuple(labels), numbers


def _parts(label: Label, size: int) -> tuple[Part, ...]:
    """Returns the loops of one dimension; what is broadcast holds none."""
    if isinstance(label, str):
        return ((label, size),)
    return label if size != 1 else ((CUT, 1),)
