"""What an op is on one rank, where its own part of the arguments is not all that changes.

Most ops run on their parts as they are. The ones here have sizes among their arguments, look things
up by place, add something once, average, or need statistics of all ranks inside.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from calibration.run.layouts import Spread
from calibration.run.mesh_axes import MeshAxes
from simcore.errors import RunError

Tensor = torch.Tensor
Run = Callable[..., Any]


class Share(NamedTuple):
    """Which part of an op a rank runs.

    Attributes:
        name: of the op.
        loops: (loop, axis of the mesh) that are split.
        lost: axes along which the first output is a sum of parts.
        once: for each output, axes along which the first rank alone writes it.
        inner: axes whose ranks share statistics inside the op.
        shape: of the rank's part of the first output.
        spread: of the dimension that is looked up, or of queries and of keys.
    """

    name: str
    loops: tuple[tuple[str, int], ...] = ()
    lost: tuple[int, ...] = ()
    once: tuple[tuple[int, ...], ...] = ()
    inner: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    spread: tuple[Spread, ...] = ()

    def axes_of(self, *loops: str) -> list[int]:
        """Returns the axes that split a loop of these names."""
        return [axis for loop, axis in self.loops if loop in loops]


class Piece(NamedTuple):
    """An op to be run in part."""

    run: Run  # the whole op
    args: list[Any]
    kwargs: dict[str, Any]
    share: Share
    mesh: MeshAxes

    def plain(self) -> Any:
        """Runs it as it is."""
        return self.run(*self.args, **self.kwargs)

    def parts(self, axes: Sequence[int]) -> int:
        """Returns into how many parts some axes split."""
        return math.prod(self.mesh.sizes[axis] for axis in axes)

    def is_first(self, axes: Sequence[int]) -> bool:
        """Whether this rank is the first along all of some axes."""
        return not any(self.mesh.coordinates[axis] for axis in axes)

    def rows(self, index: Tensor, number: int = 0) -> Tensor:
        """Returns where places of the whole are in this rank's part, -1 = elsewhere."""
        spread = self.share.spread[number]
        table = torch.full((math.prod(spread.sizes),), -1, dtype=torch.int64, device=index.device)
        mine = torch.from_numpy(spread.places(self.mesh.coordinates)).to(index.device)
        table[mine] = torch.arange(len(mine), device=index.device)
        return table[index]


Form = Callable[[Piece], Any]


def _embedding(piece: Piece) -> Any:
    """A row of the table elsewhere is zero here."""
    if not piece.share.axes_of("v"):
        return piece.plain()
    table, index = piece.args[:2]
    rows = piece.rows(index)
    found: Tensor = piece.run(table, rows.clamp(min=0))
    return found.mul_((rows >= 0).unsqueeze(-1))


def _embedding_backward(piece: Piece) -> Any:
    """Gradients of rows elsewhere go into one more row, which is left out."""
    if not piece.share.axes_of("v"):
        return piece.plain()
    grad, index, _, padding, *_ = piece.args
    width = piece.share.shape[0]
    rows = piece.rows(index)
    rows = torch.where((rows < 0) | (index == padding), width, rows)
    return piece.run(grad, rows, width + 1, -1, False)[:width]


def _added_product(piece: Piece) -> Any:
    """The first rank adds what is added to a product of which it has a summand."""
    if not piece.is_first(piece.share.lost):
        piece.kwargs["beta"] = 0
    return piece.plain()


def _biased(place: int) -> Form:
    """The first rank adds the bias to a sum of parts; others do not."""

    def run(piece: Piece) -> Any:
        if not piece.is_first(piece.share.lost) and place < len(piece.args):
            piece.args[place] = None
        return piece.plain()

    return run


def _adds_into(piece: Piece) -> Any:
    """What is there before counts once."""
    if not piece.is_first(piece.share.lost):
        into = piece.args[0]
        in_place = str(piece.run).split(".")[1].endswith("_")
        piece.args[0] = into.zero_() if in_place else torch.zeros_like(into)
    return piece.plain()


def _convolution(piece: Piece) -> Any:
    if groups := piece.share.axes_of("g"):
        piece.args[8] //= piece.parts(groups)
    return _biased(2)(piece)


def _convolution_backward(piece: Piece) -> Any:
    weight, transposed = piece.args[2], piece.args[7]
    if groups := piece.share.axes_of("g"):
        piece.args[9] //= piece.parts(groups)
    if piece.args[3] is not None:
        width = weight.shape[1] * piece.args[9] if transposed else weight.shape[0]
        piece.args[3] = [width]
    return _written_once(piece)


def _written_once(piece: Piece) -> Any:
    """Outputs that every rank has in full count once."""
    results: tuple[Tensor | None, ...] = piece.plain()
    made = [result for result in results if result is not None]
    for result, axes in zip(made, piece.share.once, strict=True):
        if not piece.is_first(axes):
            result.zero_()
    return results


def _averages(piece: Piece) -> Any:
    """The mean of a part counts by its share."""
    result: Tensor = piece.plain()
    parts = piece.parts(piece.share.lost)
    return result.div_(parts) if parts > 1 else result


def _loss(place: int) -> Form:
    """Losses of two tensors, which average if the argument at a place says so."""

    def run(piece: Piece) -> Any:
        return _averages(piece) if _reduction(piece, place) == 1 else piece.plain()

    return run


def _loss_backward(place: int) -> Form:
    """The same backward: the number of elements is that of all parts."""

    def run(piece: Piece) -> Any:
        result: Tensor = piece.plain()
        axes = {axis for _, axis in piece.share.loops}
        is_mean = _reduction(piece, place) == 1
        return result.div_(piece.parts(sorted(axes))) if is_mean else result

    return run


def _reduction(piece: Piece, place: int) -> int:
    return int(piece.args[place]) if place < len(piece.args) else 1


def _class_loss(piece: Piece) -> Any:
    """Each rank picks the targets that are its own; the mean is over those of all ranks."""
    scores, target, weight, reduction, ignored = piece.args
    valid = target != ignored
    samples = piece.share.axes_of("n", "p0", "p1")
    if reduction == 1 and samples and not bool(valid.all()):
        raise RunError(
            f"{piece.share.name}: some targets are ignored, so that parts of the samples do not "
            "count alike; a split of the samples is not run for real"
        )
    if not piece.share.axes_of("c"):
        loss, total = piece.plain()
        return (loss / piece.parts(samples) if reduction == 1 else loss), total
    if weight is not None:
        raise RunError(f"{piece.share.name}: classes have weights and are split; it is not run")
    dim = min(1, scores.dim() - 1)
    rows = piece.rows(torch.where(valid, target, 0))
    mine = valid & (rows >= 0)
    picked = -scores.gather(dim, rows.clamp(min=0).unsqueeze(dim)).squeeze(dim) * mine
    count = valid.sum().to(scores.dtype)
    total = count if piece.is_first(piece.share.axes_of("c")) else torch.zeros_like(count)
    if reduction == 1:
        return picked.sum() / (count * piece.parts(samples)), total
    return (picked.sum() if reduction else picked), total


def _class_loss_backward(piece: Piece) -> Any:
    grad, scores, target, _, reduction, ignored, total = piece.args
    if not piece.share.axes_of("c"):
        return piece.plain()
    dim = min(1, scores.dim() - 1)
    valid = target != ignored
    rows = piece.rows(torch.where(valid, target, 0))
    each = -grad / total if reduction == 1 else -grad
    each = torch.where(valid & (rows >= 0), each, torch.zeros_like(each))
    made = torch.zeros_like(scores)
    return made.scatter_(dim, rows.clamp(min=0).unsqueeze(dim), each.unsqueeze(dim))


def _softmax(piece: Piece, *, log: bool) -> Any:
    data, dim = piece.args[:2]
    most = _settled(piece, data.amax(dim, keepdim=True), largest=True)
    shifted = data - most
    total = _settled(piece, shifted.exp().sum(dim, keepdim=True))
    return shifted - total.log() if log else shifted.exp_() / total


def _softmax_backward(piece: Piece, *, log: bool) -> Any:
    grad, output, dim = piece.args[:3]
    if log:
        total = _settled(piece, grad.sum(dim, keepdim=True))
        return grad - output.exp() * total
    total = _settled(piece, (grad * output).sum(dim, keepdim=True))
    return (grad - total) * output


def _settled(piece: Piece, statistic: Tensor, *, largest: bool = False) -> Tensor:
    """Returns a statistic over all ranks that share the rows."""
    for axis in piece.share.inner:
        statistic = piece.mesh.all_reduce(statistic.contiguous(), axis, largest=largest)
    return statistic


def _extreme(piece: Piece, *, largest: bool) -> Any:
    """The largest or least of all parts."""
    sign = 1 if largest else -1
    found: Tensor = piece.plain() * sign
    return _settled(piece, found, largest=True) * sign


def _place_of_largest(piece: Piece) -> Any:
    """The first place, in the whole, at which the largest of all parts is."""
    data, dim = piece.args[:2]
    mine = torch.from_numpy(piece.share.spread[0].places(piece.mesh.coordinates)).to(data.device)
    keeps = len(piece.args) > 2 and piece.args[2]
    most, at = data.max(dim, keepdim=bool(keeps))
    best = _settled(piece, most.clone(), largest=True)
    place = torch.where(most == best, -mine[at], torch.iinfo(torch.int64).min)
    return -_settled(piece, place, largest=True)


def _layer_norm(piece: Piece) -> Any:
    """Mean and variance of all ranks from each rank's own, in one sum."""
    data, shape, weight, bias, epsilon = piece.args
    dims = tuple(range(data.dim() - len(shape), data.dim()))
    mean = data.mean(dims, keepdim=True).double()
    square = data.var(dims, unbiased=False, keepdim=True).double() + mean**2
    both = _settled(piece, torch.stack([mean, square])) / piece.parts(piece.share.inner)
    mean = both[0]
    rstd = (both[1] - mean**2).clamp(min=0).add(epsilon).rsqrt()
    made = (data - mean.to(data.dtype)) * rstd.to(data.dtype)
    made = made if weight is None else made * weight
    made = made if bias is None else made + bias
    kept = torch.float32 if data.dtype in {torch.bfloat16, torch.float16} else data.dtype
    return made, mean.to(kept), rstd.to(kept)


def _layer_norm_backward(piece: Piece) -> Any:
    grad, data, shape, mean, rstd, weight, _, wanted = piece.args
    lead = tuple(range(data.dim() - len(shape)))
    dims = tuple(range(data.dim() - len(shape), data.dim()))
    normal = (data - mean) * rstd
    inward = grad if weight is None else grad * weight
    sums = [inward.sum(dims, keepdim=True), (inward * normal).sum(dims, keepdim=True)]
    width = math.prod(data.shape[dim] for dim in dims) * piece.parts(piece.share.inner)
    first, second = _settled(piece, torch.stack(sums)) / width
    made = (rstd * (inward - first - normal * second)).to(data.dtype) if wanted[0] else None
    of_weight = (grad * normal).sum(lead).to(data.dtype) if wanted[1] else None
    return made, of_weight, grad.sum(lead) if wanted[2] else None


def _group_norm(first: int) -> Form:
    """Sizes among the arguments: samples, channels, positions, groups."""

    def run(piece: Piece) -> Any:
        data = next(arg for arg in piece.args if isinstance(arg, Tensor) and arg.dim() > 2)
        piece.args[first] = data.shape[0]
        piece.args[first + 1] = data.shape[1]
        piece.args[first + 3] //= piece.parts(piece.share.axes_of("g"))
        return piece.plain()

    return run


def _shaped(place: int, lead: int = 0) -> Form:
    """An argument is the shape of the output, or all of it but its first dimensions."""

    def run(piece: Piece) -> Any:
        piece.args[place] = list(piece.share.shape[lead:])
        return piece.plain()

    return run


FORMS: dict[str, Form] = {
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "addmm": _added_product,
    "addmv": _added_product,
    "baddbmm": _added_product,
    "linear": _biased(2),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "scatter_add": _adds_into,
    "index_put": _adds_into,
    "_index_put_impl": _adds_into,
    "_unsafe_index_put": _adds_into,
    "index_add": _adds_into,
    "mean": _averages,
    "mse_loss": _loss(2),
    "smooth_l1_loss": _loss(2),
    "huber_loss": _loss(2),
    "binary_cross_entropy": _loss(3),
    "binary_cross_entropy_with_logits": _loss(4),
    "mse_loss_backward": _loss_backward(3),
    "smooth_l1_loss_backward": _loss_backward(3),
    "huber_loss_backward": _loss_backward(3),
    "binary_cross_entropy_backward": _loss_backward(4),
    "nll_loss_forward": _class_loss,
    "nll_loss2d_forward": _class_loss,
    "nll_loss_backward": _class_loss_backward,
    "nll_loss2d_backward": _class_loss_backward,
    "native_group_norm": _group_norm(3),
    "native_group_norm_backward": _group_norm(5),
    "slice_backward": _shaped(1),
    "select_backward": _shaped(1),
    "_adaptive_avg_pool2d": _shaped(1, 2),
    "_adaptive_avg_pool3d": _shaped(1, 2),
}

# ops that settle statistics among the ranks, where the loop that they go over is split
INNER_FORMS: dict[str, Form] = {
    "_softmax": lambda piece: _softmax(piece, log=False),
    "_safe_softmax": lambda piece: _softmax(piece, log=False),
    "_log_softmax": lambda piece: _softmax(piece, log=True),
    "_softmax_backward_data": lambda piece: _softmax_backward(piece, log=False),
    "_log_softmax_backward_data": lambda piece: _softmax_backward(piece, log=True),
    "amax": lambda piece: _extreme(piece, largest=True),
    "amin": lambda piece: _extreme(piece, largest=False),
    "argmax": _place_of_largest,
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
}

# ops that run on their parts as they are
PLAIN = frozenset((
    "mm", "mv", "dot", "bmm", "_grouped_mm", "sum", "amax", "amin", "argmax", "argmin", "max",
    "min", "any", "all", "prod", "var", "std", "var_mean", "norm", "linalg_vector_norm",
    "logsumexp", "cumsum", "histc", "topk", "sort", "clone", "_to_copy", "copy_", "cat", "stack",
    "constant_pad_nd", "slice_scatter", "triu", "tril", "flip", "roll", "repeat", "gather",
    "scatter", "index", "_unsafe_index", "index_select", "native_batch_norm",
    "_native_batch_norm_legit", "native_batch_norm_backward", "_fused_rms_norm",
    "_fused_rms_norm_backward", "max_pool2d_with_indices", "max_pool2d_with_indices_backward",
    "avg_pool2d", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward", "native_dropout",
    "native_dropout_backward", "masked_fill", "where", "clamp", "floor_divide", "zeros_like",
    "ones_like", "full_like", "rand_like", "randn_like", "empty_like", "zero", "fill", "bernoulli",
    "normal", "uniform", "add", "sub", "mul", "div", "neg",
)) | INNER_FORMS.keys()  # fmt: skip

# ops made of nothing: they run whole, and a rank takes its part
MADE_WHOLE = frozenset((
    "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "arange", "linspace",
    "scalar_tensor", "rand", "randn", "randint",
))  # fmt: skip
