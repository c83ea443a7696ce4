"""Loops of XLA ops with sizes in the batch and strides in memory, as an `OpGraph` keeps them."""

from collections.abc import Mapping, Sequence

from simcore.frontends.hlo_batch import Growth
from simcore.frontends.hlo_nest import Label, Nest, numbered, parts_of, reshaped
from simcore.frontends.hlo_roles import Piece
from simcore.frontends.hlo_step import Op, Step
from simcore.frontends.hlo_views import Extent, View, access, dense, split
from simcore.loops import Access, Loop, LoopKind, OpLoops
from simcore.signature import Affine, OpClass

_Read = tuple[View, Sequence[Label], Sequence[int], int]  # with the shape and the element's bytes


def extents_of(step: Step, growth: Growth, value: int) -> tuple[Extent, ...]:
    """Returns the dimensions of a value as an op writes it: dense."""
    return dense([growth.dim(value, dim) for dim in range(len(step.values[value].shape))])


def op_loops(
    step: Step, growth: Growth, view: Mapping[int, View], nest: Nest, op: Op
) -> OpLoops | None:
    """Returns the loops of an op, None where no rule is known.

    Args:
        step: the step.
        growth: sizes of its values.
        view: what is read, as the builder's tensors.
        nest: labels of the op.
        op: outputs are called by their place among its outputs.
    """
    if not nest.uses:
        return None
    sizes = growth.part_sizes(nest)
    kinds = {label: name for name, labels in nest.dims.items() for label in labels}
    loops = _loops(sizes, kinds if nest.dims else "elements", growth, nest)
    number = {loop.name: place for place, loop in enumerate(loops)}
    accesses: list[Access] = []
    for use in nest.uses:
        array = step.values[use.value]
        seen = view.get(use.value)
        if use.is_output:
            seen = View(op.outputs.index(use.value), extents_of(step, growth, use.value))
        if seen is None:
            return None
        pieces = split(seen.extents, use.labels, sizes, array.shape)
        accesses.append(
            access(seen.tensor, array.itemsize, pieces, number,
                   is_output=use.is_output, whole=use.whole)
        )  # fmt: skip
    return OpLoops(loops, tuple(accesses), nest.is_linear)


def _loops(
    sizes: Mapping[str, Affine], dims: Mapping[str, str] | str, growth: Growth | None = None,
    nest: Nest | None = None,
) -> tuple[Loop, ...]:  # fmt: skip
    """Returns the loops of more than one iteration."""
    found = []
    for label, size in sizes.items():
        if size == (1, 0):
            continue
        dim = dims if isinstance(dims, str) else dims.get(label, "")
        special = nest.special.get(label) if nest else None
        if special is None or growth is None:
            found.append(Loop(label, size, LoopKind.MAP, dim))
        else:
            is_batch = size[1] > 0 and nest is not None and nest.op_class == OpClass.NORMALISATION
            kind = LoopKind.SEMANTIC if is_batch else special.kind  # statistics of the batch
            found.append(Loop(label, size, kind, dim, growth.num_bytes(special.payload)))
    return tuple(found)


def written_loops(extents: Sequence[Extent], shape: Sequence[int], itemsize: int) -> OpLoops:
    """Returns the loops of an op that reads nothing and writes one tensor."""
    names = numbered("e", len(extents))
    sizes = {name: extent.size for name, extent in zip(names, extents, strict=True)}
    return _elementwise(sizes, [], (View(0, tuple(extents)), names, shape, itemsize))


def update_loops(step: Step, view: Mapping[int, View], piece: Piece) -> OpLoops:
    """Returns the loops of an update: a parameter and its gradient, element by element."""
    held = view[piece.values[0]]
    array = step.values[piece.values[0]]
    names: tuple[Label, ...] = numbered("e", len(array.shape))
    others: list[tuple[Label, ...]] = []
    for value in piece.gradients:
        shape = step.values[value].shape
        labels = names
        if shape != array.shape:
            names, labels = reshaped(array.shape, shape)
        others.append(labels)
    reads: list[_Read] = [(held, names, array.shape, array.itemsize)]
    for value, labels in zip(piece.gradients, others, strict=True):
        kind = step.values[value]
        reads.append((view[value], labels, kind.shape, kind.itemsize))
    written = (View(0, held.extents), names, array.shape, array.itemsize)
    return _elementwise(_constant(reads), reads, written)


def refresh_loops(step: Step, view: Mapping[int, View], piece: Piece, tensor: int) -> OpLoops:
    """Returns the loops of an op that reads an updated parameter."""
    array = step.values[piece.values[0]]
    seen = View(tensor, view[piece.values[0]].extents)
    reads: list[_Read] = [(seen, numbered("e", len(array.shape)), array.shape, array.itemsize)]
    return _elementwise(_constant(reads), reads, None)


def _constant(reads: Sequence[_Read]) -> dict[str, Affine]:
    """Returns the sizes of labels that do not know the batch."""
    return {
        name: (number, 0)
        for _, labels, shape, _ in reads
        for label, size in zip(labels, shape, strict=True)
        for name, number in parts_of(label, size)
        if name
    }


def _elementwise(
    sizes: Mapping[str, Affine], reads: Sequence[_Read], written: _Read | None
) -> OpLoops:
    loops = _loops(sizes, "elements")
    number = {loop.name: place for place, loop in enumerate(loops)}
    uses = [(read, False) for read in reads] + ([(written, True)] if written else [])
    accesses = tuple(
        access(seen.tensor, itemsize, split(seen.extents, labels, sizes, shape), number,
               is_output=is_output, whole=False)
        for (seen, labels, shape, itemsize), is_output in uses
    )  # fmt: skip
    return OpLoops(loops, accesses)
