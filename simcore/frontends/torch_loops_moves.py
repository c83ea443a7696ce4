"""Loops of ops that copy, join, pick and spread: dimensions pass through or cannot be split."""

from collections.abc import Iterable, Sequence

from simcore.frontends.torch_nest import (
    CUT,
    Args,
    Nest,
    Tensor,
    Use,
    argument,
    axis,
    numbered,
    read,
    tensors_of,
    written,
)


def aligned(tensors: Sequence[Tensor], outs: Sequence[Tensor], cut: Iterable[int]) -> Nest:
    """Tensors of one rank, whose dimensions are the same but for those that are cut."""
    cut = frozenset(cut)
    labels = [CUT if i in cut else f"e{i}" for i in range(outs[0].dim())]
    uses = [u for t in tensors for u in read(t, *labels)]
    uses += [u for t in outs for u in written(t, *labels)]
    return Nest(tuple(uses), "elements")


def joined(args: Args, outs: Args) -> Nest:
    """Tensors one after the other along a dimension, which is split in each if they are alike.

    Beside empty ones, one is just copied.
    """
    out, dim = outs[0], axis(outs[0], argument(args, 1, 0))
    filled = [t for t in args[0] if t.numel()]
    alike = len({t.shape[dim] for t in filled}) == 1
    nest = aligned(filled, outs, () if len(filled) == 1 else {dim})
    if alike and len(filled) > 1:
        names = numbered("e", out.dim())
        inner = ((CUT, len(filled)), (names[dim], filled[0].shape[dim]))
        labels = (inner if index == dim else name for index, name in enumerate(names))
        nest = Nest(
            (*(u for t in filled for u in read(t, *names)), *written(out, *labels)), "elements"
        )
    empty = [u for t in args[0] if not t.numel() for u in read(t, *(CUT,) * t.dim())]
    return nest._replace(uses=(*empty, *nest.uses)).linear()


def stacked(args: Args, outs: Args) -> Nest:
    """Tensors side by side along a new dimension."""
    out, dim = outs[0], axis(outs[0], argument(args, 1, 0))
    names = numbered("e", out.dim())
    kept = [name for index, name in enumerate(names) if index != dim]
    uses = [u for t in args[0] for u in read(t, *kept)]
    labels = (CUT if index == dim else name for index, name in enumerate(names))
    return Nest((*uses, *written(out, *labels)), "elements").linear()


def spread(args: Args, outs: Args) -> Nest:
    """Backward of slices and pads: the same rank; dimensions of another size cannot be split."""
    data, out = args[0], outs[0]
    sizes = zip(data.shape, out.shape, strict=True)
    cut = [index for index, (size, other) in enumerate(sizes) if size != other]
    return aligned((data,), outs, cut).linear()


def spread_slice(args: Args, outs: Args) -> Nest:
    """Backward of a slice: grad, sizes, dim, …: a slice of all passes through."""
    cut = {axis(outs[0], args[2])} if args[0].shape != outs[0].shape else ()
    return aligned(args[:1], outs, cut).linear()


def spread_selected(args: Args, outs: Args) -> Nest:
    """Backward of picking one index: grad, sizes, dim, index."""
    out, dim = outs[0], axis(outs[0], args[2])
    names = numbered("e", out.dim())
    kept = names[:dim] + names[dim + 1 :]
    labels = (CUT if index == dim else name for index, name in enumerate(names))
    return Nest((*read(args[0], *kept), *written(out, *labels)), "elements").linear()


def padded(args: Args, outs: Args) -> Nest:
    """Constant padding; with zeros it works on sums of parts."""
    return spread(args, outs)._replace(linear_reads=0).linear(when=not argument(args, 2, 0))


def inserted(args: Args, outs: Args) -> Nest:
    """A slice put into a tensor: data, source, dim and positions."""
    return aligned(args[:2], outs, {axis(outs[0], argument(args, 2, 0))}).linear()


def last_two(args: Args, outs: Args) -> Nest:
    """Triangles: what is kept depends on row and column."""
    rank = outs[0].dim()
    return aligned(args[:1], outs, (rank - 2, rank - 1)).linear()


def moved(args: Args, outs: Args) -> Nest:
    """Flips and rolls: data, …, dims last; without dims everything is moved."""
    dims = argument(args, 1, ()) if len(args) == 2 else args[2]
    cut = {axis(outs[0], dim) for dim in dims} if dims else range(outs[0].dim())
    return aligned(args[:1], outs, cut).linear()


def rolled(args: Args, outs: Args) -> Nest:
    """Roll: data, shifts, dims."""
    return moved((args[0], args[1], argument(args, 2, ())), outs)


def repeated(args: Args, outs: Args) -> Nest:
    """Repeats: dimensions that are repeated cannot be split; new ones come first."""
    data, out = args[0], outs[0]
    new = out.dim() - data.dim()
    labels = [
        f"e{i}" if i >= new and data.shape[i - new] == out.shape[i] else CUT
        for i in range(out.dim())
    ]
    uses = (*read(data, *labels[new:]), *written(out, *labels))
    return Nest(uses, "elements").linear()


def planes(args: Args, outs: Args) -> Nest:
    """Resampling and the like: samples and channels pass, positions do not."""
    tensors = [t for t in tensors_of(args) if t.dim() == outs[0].dim()]
    return aligned(tensors, outs, range(2, outs[0].dim()))


def sorted_along(args: Args, outs: Args, dim: int) -> Nest:
    """Sorting and choosing the best along one dimension, which cannot be split."""
    return aligned(args[:1], outs, {axis(args[0], dim)})


def gathered(args: Args, outs: Args) -> Nest:
    """data, dim, index: data is whole along the dimension, positions of the index are not."""
    data, index, out = args[0], args[2], outs[0]
    dim, names = axis(data, args[1]), numbered("e", data.dim())
    held = tuple(
        CUT if i == dim or data.shape[i] != out.shape[i] else name for i, name in enumerate(names)
    )
    return Nest((*read(data, *held), *read(index, *names), *written(out, *names)), "elements")


def scattered(args: Args, outs: Args, *, adds: bool) -> Nest | None:
    """data, dim, index, source; where it adds, parts of the source give sums of parts."""
    data, dim, index, source = args[0], axis(args[0], args[1]), args[2], argument(args, 3)
    if not isinstance(source, Tensor):
        source = None
    names = numbered("e", data.dim())
    same = [i != dim and data.shape[i] == index.shape[i] for i in range(data.dim())]
    held = tuple(name if same[i] else CUT for i, name in enumerate(names))
    given = tuple(
        name if same[i] else ("i" if i == dim and adds else CUT) for i, name in enumerate(names)
    )
    if source is not None and source.shape != index.shape:
        return None
    uses = (*read(data, *held), *read(index, *given), *read(source, *given))
    return Nest((*uses, *written(outs[0], *held)), "elements")


def picked(args: Args, outs: Args) -> Nest | None:
    """Advanced indexing: data, and an index or None for each dimension; what has one is whole."""
    return _indexed(args[0], args[1], outs[0], None)


def put(args: Args, outs: Args) -> Nest | None:
    """Advanced assignment: data, indices, values, accumulate; into sums of parts if it adds."""
    data, indices, values, adds = args[0], args[1], args[2], argument(args, 3, False)
    return _indexed(data, indices, values, outs[0], adds=bool(adds))


def _indexed(
    data: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    out: Tensor | None,
    *,
    adds: bool = False,
) -> Nest | None:
    """Labels data, indices and the indexed values; `out` is None where values are the output."""
    held = [i for i, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if not held or any(not index.dtype.is_signed for index in given):  # masks choose by value
        return None
    rank = max(index.dim() for index in given)
    splits = out is None or adds
    positions = numbered("p", rank) if splits else (CUT,) * rank
    names = [CUT if i in held else f"e{i}" for i in range(data.dim())]
    adjacent = held[-1] - held[0] + 1 == len(held)
    first = held[0] if adjacent else 0
    kept = [name for i, name in enumerate(names) if i not in held]
    labels = (*kept[:first], *positions, *kept[first:])
    uses: tuple[Use, ...] = read(data, *names)
    for index in given:
        uses += read(index, *positions[rank - index.dim() :])
    if out is None:
        return Nest((*uses, *written(values, *labels)), "elements")
    uses += read(values, *labels[len(labels) - values.dim() :])
    return Nest((*uses, *written(out, *names)), "elements")


def chosen(args: Args, outs: Args) -> Nest:
    """index_select: data, dim, index [positions]."""
    data, index, out = args[0], args[2], outs[0]
    dim, names = axis(data, args[1]), numbered("e", data.dim())
    held = (CUT if i == dim else name for i, name in enumerate(names))
    uses = (*read(data, *held), *read(index, *names[dim : dim + 1][: index.dim()]))
    return Nest((*uses, *written(out, *names)), "elements")


def added_at(args: Args, outs: Args) -> Nest:
    """index_add: data, dim, index [positions], source: sums over positions."""
    data, index, source = args[0], args[2], args[3]
    dim, names = axis(data, args[1]), numbered("e", data.dim())
    held = [CUT if i == dim else name for i, name in enumerate(names)]
    given = ["p" if i == dim else name for i, name in enumerate(names)]
    uses = (*read(data, *held), *read(index, *("p",)[: index.dim()]), *read(source, *given))
    return Nest((*uses, *written(outs[0], *held)), "elements")
