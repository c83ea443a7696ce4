"""Loops of matrix products, convolutions, attention and recurrent layers, forward and backward."""

import math
from collections.abc import Sequence

from simcore.frontends.torch_nest import (
    CUT,
    Args,
    Label,
    Nest,
    Special,
    Tensor,
    Use,
    argument,
    numbered,
    read,
    written,
)
from simcore.loops import LoopKind

_BMNK = {label: label for label in "bmnk"}
_CONVOLUTION = {"n": "n", "g": "k", "k": "k", "c": "c"}
_ATTENTION = {"h": "h", "g": "h", "q": "q", "kv": "kv"}


def product(a: Tensor, b: Tensor, out: Tensor, added: Tensor | None = None) -> Nest:
    """Matrix and vector products of at most two dimensions, with a bias or a sum that is added."""
    left, right = ("m", "k")[-a.dim() :], ("k", "n")[: b.dim()]
    result = (*left[:-1], *right[1:])
    uses = (*broadcast(added, result), *read(a, *left), *read(b, *right), *written(out, *result))
    return Nest(uses, _BMNK)


def batched_product(a: Tensor, b: Tensor, out: Tensor, added: Tensor | None = None) -> Nest:
    """Batched matrix products."""
    result = ("b", "m", "n")
    uses = (
        *broadcast(added, result), *read(a, "b", "m", "k"), *read(b, "b", "k", "n"),
        *written(out, *result),
    )  # fmt: skip
    return Nest(uses, _BMNK)


def linear(args: Args, outs: Args) -> Nest:
    """X [..., k], weight [n, k] and bias [n]: the leading dimensions are rows."""
    rows = numbered("m", args[0].dim() - 1)
    uses = (
        *read(args[0], *rows, "k"), *read(args[1], "n", "k"), *read(argument(args, 2), "n"),
        *written(outs[0], *rows, "n"),
    )  # fmt: skip
    return Nest(uses, {**dict.fromkeys(rows, "m"), "n": "n", "k": "k"})


def grouped_product(args: Args, outs: Args) -> Nest | None:
    """Products of groups of unequal length; the ragged dimension cannot be split."""
    a, b, ends = args[0], args[1], argument(args, 2)
    if a.dim() == 3 and b.dim() == 3:
        return batched_product(a, b, outs[0])
    labels: tuple[tuple[str, ...], ...]
    if a.dim() == 2 and b.dim() == 3:
        labels = ((CUT, "k"), (CUT, "k", "n"), (CUT, "n"))
    elif a.dim() == 2 and b.dim() == 2:
        labels = (("m", CUT), (CUT, "n"), (CUT, "m", "n"))
    else:
        return None
    uses = (*read(a, *labels[0]), *read(b, *labels[1]), *read(ends, CUT))
    return Nest((*uses, *written(outs[0], *labels[2])), _BMNK)


def broadcast(tensor: Tensor | None, labels: Sequence[Label]) -> tuple[Use, ...]:
    """Returns an input whose dimensions are the last ones of a result, as broadcasting aligns."""
    return () if tensor is None else read(tensor, *labels[len(labels) - tensor.dim() :])


# convolution


class _Space:
    """The positions of a convolution or pooling: how input and output positions hang together."""

    def __init__(self, data: Tensor, out: Tensor, window: Sequence[Sequence[int]]) -> None:
        """Takes the window as kernel, stride, padding and dilation, each [dimension]."""
        count = data.dim() - 2
        self.names = numbered("out", count)
        self.inside: list[Label] = []  # of the input
        self.outside: list[Label] = []
        self.special: dict[str, Special] = {}
        for index, (name, kernel, stride, padding, dilation) in enumerate(
            zip(self.names, *(_each(values, count) for values in window), strict=True)
        ):
            size, positions = data.shape[2 + index], out.shape[2 + index]
            reach = dilation * (kernel - 1) + 1
            blocks = size == positions * stride
            self.outside.append(name)
            self.inside.append(((name, positions), (CUT, stride)) if blocks else name)
            if reach > stride or padding or not blocks:
                row = data.numel() // size * data.element_size()
                border = -(-max(0, reach - stride) // 2)  # positions of a neighbour that are needed
                self.special[name] = Special(LoopKind.HALO, border * row)


def _each(values: Sequence[int] | int, count: int) -> Sequence[int]:
    """Returns one number a dimension, as torch expands a single one."""
    values = [values] if isinstance(values, int) else list(values)
    return values * count if len(values) == 1 else values


def _channels(weight: Tensor, groups: int) -> tuple[Label, Label]:
    """Returns the labels of input and output channels."""
    if groups == 1:
        return "c", "k"
    return (
        (("g", groups), ("c", weight.shape[1])),
        (("g", groups), ("k", weight.shape[0] // groups)),
    )


def convolution(args: Args, outs: Args) -> Nest:
    """Convolution over positions; a transposed one is split by samples and channels only."""
    data, weight, bias, stride, padding, dilation, transposed = args[:7]
    if transposed:
        return _transposed((data, weight, outs[0]), bias, args[8])
    space = _Space(data, outs[0], (weight.shape[2:], stride, padding, dilation))
    inward, outward = _channels(weight, args[8])
    window = (CUT,) * (weight.dim() - 2)
    uses = (
        *read(data, "n", inward, *space.inside), *read(weight, outward, "c", *window),
        *read(bias, outward), *written(outs[0], "n", outward, *space.outside),
    )  # fmt: skip
    return Nest(uses, _CONVOLUTION | dict.fromkeys(space.names, "out"), space.special)


def _transposed(tensors: Args, bias: Tensor | None, groups: int) -> Nest:
    data, weight, out = tensors
    inward, outward = _channels(weight, groups)[::-1]  # the weight is [in, out / groups]
    cut = (CUT,) * (data.dim() - 2)
    uses = (
        *read(data, "n", inward, *cut), *read(weight, inward, "c", *cut), *read(bias, outward),
        *written(out, "n", outward, *cut),
    )  # fmt: skip
    return Nest(uses, _CONVOLUTION)


def convolution_backward(args: Args, outs: Args) -> Nest:
    """All gradients of a convolution at once."""
    grad, data, weight, _, stride, padding, dilation, transposed = args[:8]
    made = iter(outs)
    results = [next(made) if wanted else None for wanted in args[10]]
    cut: tuple[Label, ...] = (CUT,) * (data.dim() - 2)
    inside = outside = cut
    special: dict[str, Special] = {}
    names: tuple[str, ...] = ()
    if transposed:
        inward, outward = _channels(weight, args[9])[::-1]
    else:
        space = _Space(data, grad, (weight.shape[2:], stride, padding, dilation))
        inward, outward = _channels(weight, args[9])
        inside, outside, special = tuple(space.inside), tuple(space.outside), space.special
        names = space.names
    held = (inward, "c", *cut) if transposed else (outward, "c", *cut)
    uses = (
        *read(grad, "n", outward, *outside), *read(data, "n", inward, *inside),
        *read(weight, *held), *written(results[0], "n", inward, *inside),
        *written(results[1], *held), *written(results[2], outward),
    )  # fmt: skip
    return Nest(uses, _CONVOLUTION | dict.fromkeys(names, "out"), special)


def pooling(args: Args, outs: Args) -> Nest:
    """Pooling with a window: data, kernel, stride (the kernel's where empty), padding, dilation."""
    data, kernel = args[0], args[1]
    stride = argument(args, 2) or kernel
    has_dilation = len(outs) > 1  # of maxima, whose place is told
    dilation = argument(args, 4, 1) if has_dilation else 1
    return _pooling(
        (data,), outs, (data, outs[0]), (kernel, stride, argument(args, 3, 0), dilation)
    )


def pooling_backward(args: Args, outs: Args) -> Nest:
    """Gradient of `pooling`: grad, data, kernel, stride, padding, then dilation or the mode."""
    grad, data, kernel = args[:3]
    stride = args[3] or kernel
    places = args[7] if len(args) == 8 and isinstance(args[7], Tensor) else None
    window = (kernel, stride, args[4], 1 if places is None else args[5])
    return _pooling((grad, data, places), outs, (data, grad), window)


def adaptive_pooling(args: Args, outs: Args) -> Nest | None:
    """Average pooling to a given size, forward and backward, where windows do not overlap."""
    large, small = (args[0], outs[0]) if isinstance(args[1], list | tuple) else (outs[0], args[0])
    sizes = [*zip(large.shape[2:], small.shape[2:], strict=True)]
    if any(inside % outside for inside, outside in sizes):
        return None
    ratio = [inside // outside for inside, outside in sizes]
    reads = tuple(arg for arg in args[:2] if isinstance(arg, Tensor))
    return _pooling(reads, outs, (large, small), (ratio, ratio, 0, 1))


def _pooling(reads: Args, outs: Args, pair: Args, window: Args) -> Nest:
    """Labels every tensor as the large or the small side of a pooling."""
    large, small = pair
    lead = ("n", "c")[4 - large.dim() :] if large.dim() == 3 else ("n", "c")
    if len(lead) == 1:  # no batch
        large, small = large[None], small[None]
    space = _Space(large, small, window)
    places = {True: space.inside, False: space.outside}

    def labels(tensor: Tensor) -> tuple[Label, ...]:
        return (*lead, *places[tensor.shape[len(lead) :] == large.shape[2:]])

    uses = [use for t in reads if t is not None for use in read(t, *labels(t))]
    uses += [use for t in outs for use in written(t, *labels(t))]
    return Nest(tuple(uses), "elements", space.special)


# attention


class _Heads:
    """Labels of the tensors of one attention; heads of keys may serve groups of query heads."""

    def __init__(self, query: Tensor, key: Tensor) -> None:
        self.lead = numbered("b", max(0, query.dim() - 3))
        heads, kept = (t.shape[-3] if t.dim() > 2 else 1 for t in (query, key))
        grouped = heads != kept and kept > 0 and heads % kept == 0
        self.heads: tuple[Label, ...] = ()
        self.key_heads: tuple[Label, ...] = ()
        if query.dim() > 2:
            self.heads = ((("h", kept), ("g", heads // kept)) if grouped else "h",)
            self.key_heads = ("h",)
        self.query = (*self.lead, *self.heads, "q", CUT)
        self.key = (*self.lead, *self.key_heads, "kv", CUT)
        self.rows = self.query[:-1]
        self.scores = (*self.rows, "kv")

    @property
    def dims(self) -> dict[str, str]:
        """The signature's dimension of each label."""
        return _ATTENTION | dict.fromkeys(self.lead, "b")


def attention(reads: Args, outs: Args) -> Nest | None:
    """Attention that keeps its log-sum-exp: query, key, value and mask; output and sums.

    Splitting the keys takes a maximum, a sum and a sum of outputs for each query.
    """
    query, key, value, mask = reads
    heads = _Heads(query, key)
    total = outs[0].numel() * outs[0].element_size()
    rows = math.prod(outs[0].shape[:-1])
    uses = (
        *read(query, *heads.query), *broadcast(key, heads.key), *broadcast(value, heads.key),
        *broadcast(mask, heads.scores), *written(outs[0], *heads.query, whole=True),
    )  # fmt: skip
    for out in outs[1:]:
        fits = tuple(out.shape) == tuple(outs[0].shape[:-1])
        labels = heads.rows if fits else (CUT,) * out.dim()
        uses += written(out, *labels, whole=True)
    return Nest(uses, heads.dims, {"kv": Special(LoopKind.INNER, total + 8 * rows)})


def attention_backward(reads: Args, outs: Args) -> Nest | None:
    """Gradients of query, key, value and mask; each part of the keys stands alone.

    Args:
        reads: gradient, query, key, value, mask, output, sums.
        outs: the gradients, None where not wanted.
    """
    grad, query, key, value, mask, out, sums = reads
    heads = _Heads(query, key)
    held = (heads.query, heads.key, heads.key, heads.scores)
    uses = (
        *read(grad, *heads.query), *read(query, *heads.query), *broadcast(key, heads.key),
        *broadcast(value, heads.key), *broadcast(mask, heads.scores), *read(out, *heads.query),
        *read(sums, *heads.rows),
    )  # fmt: skip
    for result, labels in zip(outs, held, strict=True):
        if result is not None:
            uses += written(result, *labels[len(labels) - result.dim() :])
    return Nest(uses, heads.dims)


def attention_on_cpu(args: Args, outs: Args) -> Nest | None:
    """Torch's fused attention of CPUs."""
    mask = argument(args, 5)
    return attention((*args[:3], mask if isinstance(mask, Tensor) else None), outs)


def attention_on_cpu_backward(args: Args, outs: Args) -> Nest | None:
    """Its backward."""
    grad, query, key, value, out, sums = args[:6]
    return attention_backward((grad, query, key, value, None, out, sums), (*outs, None))


# recurrent layers


class _Layer:
    """Labels of the tensors of one recurrent layer; a projected one is split by samples only.

    Splitting the hidden units takes an all-gather of the hidden state at every step, which moves
    half of what an all-reduce does.
    """

    def __init__(self, inputs: Args, gates: int) -> None:
        """Takes x, h0, c0 and the weights."""
        self.x, h0, *_ = inputs
        self.rows = inputs[3].shape[0]
        self.hidden, self.gates, self.width = self.rows // gates, gates, h0.shape[2]
        self.units = "h" if self.width == self.hidden else CUT
        self.steps = math.prod(self.x.shape[:2]) * h0.shape[0] * self.width
        self.sequence: tuple[Label, ...] = (
            CUT, "b", ((CUT, h0.shape[0]), (self.units, self.width))
        )  # fmt: skip
        self.state: tuple[Label, ...] = (CUT, "b", self.units)
        weights = (self._of_weight(weight) for weight in inputs[3:])
        self.inputs = ((CUT, "b", CUT), self.state, self.state, *weights)

    def saved(self, tensor: Tensor | None) -> tuple[Label, ...]:
        """Returns the labels of what is kept for the backward."""
        if tensor is None:
            return ()
        units = (CUT, tensor.shape[3] // self.hidden), (self.units, self.hidden)
        return (CUT, "b", CUT, units)

    def nest(self, uses: Sequence[Use], gathered: int) -> Nest:
        """Returns the loops, given the elements that are gathered."""
        inner = gathered * self.x.element_size() // 2
        special = {"h": Special(LoopKind.INNER, inner)}
        return Nest(tuple(uses), {"b": "b", "h": "h"}, special)

    def _of_weight(self, weight: Tensor) -> tuple[Label, ...]:
        if weight.shape[0] != self.rows:
            return (CUT,) * weight.dim()
        return (((CUT, self.gates), (self.units, self.hidden)), CUT)[: weight.dim()]


def recurrent(inputs: Args, outs: Args, gates: int) -> Nest:
    """One recurrent layer, all directions.

    Args:
        inputs: x, h0, c0, weights.
        outs: output, hn, cn, what is saved.
        gates: of the cell.
    """
    layer = _Layer(inputs, gates)
    made = (layer.sequence, layer.state, layer.state, layer.saved(outs[3]))
    uses = [u for t, labels in zip(inputs, layer.inputs, strict=True) for u in read(t, *labels)]
    uses += [u for t, labels in zip(outs, made, strict=True) for u in written(t, *labels)]
    return layer.nest(uses, layer.steps)


def recurrent_backward(reads: Args, outs: Args, gates: int) -> Nest:
    """Its backward; the gradient of x is summed over the hidden units inside.

    Args:
        reads: gradients of output, hn and cn; x, h0, c0, weights; output, what was saved.
        outs: gradients of x, h0, c0 and weights, None where not wanted.
        gates: of the cell.
    """
    inputs, saved = reads[3:-2], reads[-1]
    layer = _Layer(inputs, gates)
    labels = (
        layer.sequence, layer.state, layer.state, *layer.inputs, layer.sequence, layer.saved(saved)
    )  # fmt: skip
    uses = [u for t, of in zip(reads, labels, strict=True) for u in read(t, *of)]
    uses += written(outs[0], *layer.inputs[0], whole=True)
    uses += [u for t, of in zip(outs[1:], layer.inputs[1:], strict=True) for u in written(t, *of)]
    return layer.nest(uses, layer.steps + 2 * layer.x.numel())
