"""Loops of pointwise ops, reductions, normalisations, softmax, losses and embeddings.

Pointwise dimensions are ``e0``, ``e1``, … of the output; reductions number those of their input.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from simcore.frontends.torch_nest import (
    CUT,
    Args,
    Label,
    Nest,
    Special,
    Tensor,
    Use,
    argument,
    axes,
    axis,
    numbered,
    read,
    rows,
    tensors_of,
    written,
)
from simcore.loops import LoopKind

_INDEX_BYTES = 8


def pointwise(reads: Iterable[Tensor], outs: Sequence[Tensor]) -> Nest:
    """Every element alone; inputs are broadcast to the outputs."""
    names = numbered("e", max((out.dim() for out in outs), default=0))
    uses = [u for t in reads for u in read(t, *names[len(names) - t.dim() :])]
    uses += [u for t in outs for u in written(t, *names[len(names) - t.dim() :])]
    return Nest(tuple(uses), "elements")


def reduction(data: Tensor, outs: Args, dims: Any, kind: LoopKind) -> Nest:
    """Dimensions that vanish from the output, or are kept with size 1.

    MAP: the outputs are sums of parts. INNER: they are settled inside, whole on every device.
    """
    gone, names = axes(data, dims), numbered("e", data.dim())
    uses = read(data, *names)
    for out in outs:
        keeps = out.dim() == data.dim()
        labels = tuple(
            CUT if index in gone else name
            for index, name in enumerate(names)
            if keeps or index not in gone
        )
        uses += written(out, *labels, whole=kind == LoopKind.INNER)
    payload = sum(out.numel() * out.element_size() for out in outs)
    special = {} if kind == LoopKind.MAP else {names[i]: Special(kind, payload) for i in gone}
    return Nest(uses, "elements", special)


def counted(args: Args, outs: Args) -> Nest | None:
    """Histograms between given bounds: counts of the parts add up."""
    data, least, greatest = args[0], argument(args, 2, 0), argument(args, 3, 0)
    if least == greatest:  # the bounds are those of the data
        return None
    return Nest((*read(data, *numbered("e", data.dim())), *written(outs[0], CUT)), "elements")


def scan(args: Args, outs: Args) -> Nest:
    """Running sums: each part needs the totals of those before it."""
    names, dim = numbered("e", args[0].dim()), axis(args[0], args[1])
    payload = rows(outs[0], (dim,)) * outs[0].element_size()
    special = {names[dim]: Special(LoopKind.INNER, payload)} if names else {}
    nest = Nest((*read(args[0], *names), *written(outs[0], *names)), "elements", special)
    return nest.linear()


def along(reads: Args, outs: Args, dim: int, statistics: int) -> Nest:
    """Softmax and the like: outputs of the input's shape, with statistics over one dimension.

    Args:
        reads: inputs of the output's shape.
        outs: the output.
        dim: over which the statistics go.
        statistics: fp32 numbers for each row that are summed over the parts.
    """
    (out,) = outs
    names, chosen = numbered("e", out.dim()), axis(out, dim)
    uses = [u for t in reads for u in read(t, *names)]
    payload = statistics * 4 * rows(out, (chosen,))
    special = {names[chosen]: Special(LoopKind.INNER, payload)} if names else {}
    return Nest((*uses, *written(out, *names)), "elements", special)


# normalisation


def _row_labels(data: Tensor, count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the labels of the rows and of the last `count` dimensions."""
    names = numbered("e", data.dim())
    return names[: data.dim() - count], names[data.dim() - count :]


def layer_norm(args: Args, outs: Args) -> Nest:
    """Layer and RMS norm: data, normalised shape, weight, (bias); output and statistics."""
    data, shape = args[0], args[1]
    lead, within = _row_labels(data, len(shape))
    uses = read(data, *lead, *within)
    for weight in tensors_of(args[2:4]):
        uses += read(weight, *within)
    uses += written(outs[0], *lead, *within)
    for statistic in outs[1:]:
        labels = (*lead, *(CUT for _ in within))[: statistic.dim()]
        uses += written(statistic, *labels, whole=True)
    payload = 4 * len(outs[1:]) * math.prod(data.shape[: len(lead)])
    return Nest(uses, "elements", dict.fromkeys(within, Special(LoopKind.INNER, payload)))


def layer_norm_backward(args: Args, outs: Args) -> Nest:
    """grad, data, normalised shape, statistics and weights; gradients of data and weights."""
    data, shape, wanted = args[1], args[2], args[-1]
    lead, within = _row_labels(data, len(shape))
    uses: tuple[Use, ...] = ()
    for tensor in tensors_of(args):
        row = tensor.shape[: len(lead)] == data.shape[: len(lead)] and tensor.dim() == data.dim()
        whole = tensor.shape == data.shape
        labels = (*lead, *within) if whole else (*lead, *(CUT for _ in within)) if row else within
        uses += read(tensor, *labels)
    made = iter(outs)
    for place, want in enumerate(wanted):
        if want:
            uses += written(next(made), *(within if place else (*lead, *within)))
    payload = 4 * 2 * math.prod(data.shape[: len(lead)])
    return Nest(uses, "elements", dict.fromkeys(within, Special(LoopKind.INNER, payload)))


def group_norm(args: Args, outs: Args) -> Nest:
    """Data [n, g * c, ...], weight, bias, n, channels, positions, groups; output, mean, rstd."""
    data, groups = args[0], args[6]
    channels, labels = _group_labels(data, groups)
    uses = read(data, *labels)
    for weight in tensors_of(args[1:3]):
        uses += read(weight, channels)
    uses += written(outs[0], *labels)
    for statistic in outs[1:]:
        uses += written(statistic, "n", "g", whole=True)
    return Nest(uses, "elements", _within_groups(data, groups))


def group_norm_backward(args: Args, outs: Args) -> Nest:
    """grad, data, mean, rstd, weight, n, channels, positions, groups, mask."""
    grad, data, mean, rstd, weight, groups, wanted = *args[:5], args[8], args[9]
    channels, labels = _group_labels(data, groups)
    uses = (
        *read(grad, *labels), *read(data, *labels), *read(mean, "n", "g"), *read(rstd, "n", "g"),
        *read(weight, channels),
    )  # fmt: skip
    made = iter(outs)
    for place, want in enumerate(wanted):
        if want:
            uses += written(next(made), *((channels,) if place else labels))
    return Nest(uses, "elements", _within_groups(data, groups))


def _group_labels(data: Tensor, groups: int) -> tuple[Label, tuple[Label, ...]]:
    """Returns the labels of the channels and of the whole tensor."""
    channels: Label = (("g", groups), ("c", data.shape[1] // groups))
    return channels, ("n", channels, *numbered("p", data.dim() - 2))


def _within_groups(data: Tensor, groups: int) -> dict[str, Special]:
    """Returns the loops over which a group's two statistics go."""
    special = Special(LoopKind.INNER, 4 * 2 * data.shape[0] * groups)
    return dict.fromkeys(("c", *numbered("p", data.dim() - 2)), special)


def batch_norm(args: Args, outs: Args) -> Nest:
    """data, weight, bias, running mean and variance, training; output and statistics.

    In training, a part of the batch has statistics of its own.
    """
    return _batch_norm(tensors_of(args[:5]), outs, args[0], args[5])


def batch_norm_without_running(args: Args, outs: Args) -> Nest:
    """data, weight, bias, training."""
    return _batch_norm(tensors_of(args[:3]), outs, args[0], args[3])


def batch_norm_backward(args: Args, outs: Args) -> Nest:
    """grad, data, weight, running and saved statistics, training, epsilon, mask."""
    return _batch_norm(tensors_of(args[:7]), outs, args[1], args[7], backward=True)


def _batch_norm(
    reads: Args, outs: Args, data: Tensor, training: bool, *, backward: bool = False
) -> Nest:
    labels = ("n", "c", *numbered("p", data.dim() - 2))[: data.dim()]
    uses: tuple[Use, ...] = ()
    for tensor in reads:
        uses += read(tensor, *(labels if tensor.dim() == data.dim() > 1 else ("c",)))
    for out in outs:
        if out.dim() == data.dim():
            uses += written(out, *labels)
        else:  # statistics, or gradients of the weights, which are sums
            uses += written(out, "c" if out.numel() == data.shape[1] else CUT, whole=not backward)
    special = Special(LoopKind.SEMANTIC, 4 * 2 * data.shape[1])
    others = (label for label in labels if label != "c")
    return Nest(uses, "elements", dict.fromkeys(others, special) if training else {})


# losses and embeddings


def class_loss(args: Args, outs: Args) -> Nest:
    """Negative log-likelihood: data [n, c, ...] or [c], target, weight; loss, total weight.

    A part of the classes picks the targets that are its own.
    """
    names, kept = _class_labels(args[0])
    uses = (*read(args[0], *names), *read(args[1], *kept), *read(argument(args, 2), "c"))
    for out in outs:
        uses += written(out, *(kept if out.dim() else ()))
    return Nest(uses, "elements")


def class_loss_backward(args: Args, outs: Args) -> Nest:
    """grad, data, target, weight, ..., total weight."""
    names, kept = _class_labels(args[1])
    grad, data, target, weight, total = *args[:4], args[6]
    uses = (
        *read(grad, *(kept if grad.dim() else ())), *read(data, *names), *read(target, *kept),
        *read(weight, "c"), *read(total), *written(outs[0], *names),
    )  # fmt: skip
    return Nest(uses, "elements")


def _class_labels(data: Tensor) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the labels of scores and of what has one number a sample."""
    if data.dim() == 1:
        return ("c",), ()
    positions = numbered("p", data.dim() - 2)
    return ("n", "c", *positions), ("n", *positions)


def loss(args: Args, outs: Args) -> Nest:
    """Losses of two tensors element by element, which may be summed up (a sum of parts)."""
    reads = tensors_of(args)
    if outs[0].dim() or not any(t.dim() for t in reads):
        return pointwise(reads, outs)
    names = numbered("e", max(t.dim() for t in reads))
    uses = tuple(u for t in reads for u in read(t, *names[len(names) - t.dim() :]))
    return Nest((*uses, *written(outs[0])), "elements")


def embedding(args: Args, outs: Args) -> Nest:
    """Table [v, w], index [...]: a row outside a part of the table gives zeros."""
    names = numbered("t", args[1].dim())
    uses = (*read(args[0], "v", "w"), *read(args[1], *names), *written(outs[0], *names, "w"))
    return Nest(uses, _tokens(names))


def embedding_backward(args: Args, outs: Args) -> Nest:
    """Grad [..., w], index [...]: sums over tokens."""
    names = numbered("t", args[1].dim())
    uses = (*read(args[0], *names, "w"), *read(args[1], *names), *written(outs[0], "v", "w"))
    return Nest(uses, _tokens(names))


def _tokens(names: Iterable[str]) -> Mapping[str, str]:
    return {**dict.fromkeys(names, "elements"), "w": "elements"}
