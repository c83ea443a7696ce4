"""Which loops an executed torch op runs over: the table of rules.

Ops are known by their schema name, as in `torch_signatures`. Each rule is checked by running the op
in pieces (``tests/test_loop_rules.py``). An op without a rule has no loops: it is not split.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from simcore.frontends import torch_loops_moves as moves
from simcore.frontends import torch_loops_products as products
from simcore.frontends import torch_loops_rows as rows
from simcore.frontends.torch_fused import CELLS
from simcore.frontends.torch_nest import Args, Nest, Tensor, argument, tensors_of
from simcore.loops import LoopKind
from simcore.signature import OpClass

_Rule = Callable[[Args, Args], Nest | None]


def _settled(args: Args, outs: Args) -> Nest:
    """Reductions that are no sums, over the dimensions that are the second argument."""
    return rows.reduction(args[0], outs, argument(args, 1), LoopKind.INNER)


def _along(count: int, dim: int, statistics: int) -> _Rule:
    return lambda args, outs: rows.along(args[:count], outs, args[dim], statistics)


def _summed(args: Args, outs: Args) -> Nest:
    """Sums and means; the mean of a part counts by its share."""
    return rows.reduction(args[0], outs, argument(args, 1), LoopKind.MAP).linear()


def _extreme(args: Args, outs: Args) -> Nest:
    """max, min, any, all: of two tensors, over a dimension, or over all."""
    second = argument(args, 1)
    if isinstance(second, Tensor):
        return rows.pointwise(args[:2], outs)
    return rows.reduction(args[0], outs, second, LoopKind.INNER)


def _norm(args: Args, outs: Args) -> Nest:
    return rows.reduction(args[0], outs, argument(args, 2), LoopKind.INNER)


def _variance(args: Args, outs: Args) -> Nest:
    dims = argument(args, 1)
    return rows.reduction(args[0], outs, None if isinstance(dims, bool) else dims, LoopKind.INNER)


def _sorted(position: int) -> _Rule:
    return lambda args, outs: moves.sorted_along(args, outs, argument(args, position, -1))


def _copied(args: Args, outs: Args) -> Nest:
    """Copies and conversions; rounding to whole numbers does not work on sums of parts."""
    tensors = tensors_of(args)
    linear = all(t.is_floating_point() for t in (*tensors, *outs)) and len(tensors) > 0
    return rows.pointwise(tensors, outs).linear(when=linear)


def _overwritten(args: Args, outs: Args) -> Nest:
    """copy_: what was there before does not matter."""
    return _copied(args[1:2], outs)


def _filled(_args: Args, outs: Args) -> Nest:
    return rows.pointwise((), outs)


def _added(args: Args, outs: Args) -> Nest:
    tensors = tensors_of(args[:2])
    return rows.pointwise(tensors, outs).linear(when=len(tensors) == 2)


def _scaled(args: Args, outs: Args) -> Nest:
    """Products; they work on sums of parts where all but one factor are numbers."""
    return rows.pointwise(tensors_of(args[:2]), outs)._replace(linear_reads=1)


def _divided(args: Args, outs: Args) -> Nest:
    """Quotients; they work on sums of parts where the divisor is a number."""
    divisor = args[1]
    number = not isinstance(divisor, Tensor) or (divisor.dim() == 0 and args[0].dim() > 0)
    return rows.pointwise(tensors_of(args[:2]), outs)._replace(linear_reads=int(number))


def _negated(args: Args, outs: Args) -> Nest:
    return rows.pointwise(args[:1], outs).linear()


_RULES: dict[str, _Rule] = {
    "mm": lambda args, outs: products.product(args[0], args[1], outs[0]),
    "mv": lambda args, outs: products.product(args[0], args[1], outs[0]),
    "dot": lambda args, outs: products.product(args[0], args[1], outs[0]),
    "addmm": lambda args, outs: products.product(args[1], args[2], outs[0], args[0]),
    "addmv": lambda args, outs: products.product(args[1], args[2], outs[0], args[0]),
    "bmm": lambda args, outs: products.batched_product(args[0], args[1], outs[0]),
    "baddbmm": lambda args, outs: products.batched_product(args[1], args[2], outs[0], args[0]),
    "linear": products.linear,
    "_grouped_mm": products.grouped_product,
    "convolution": products.convolution,
    "_convolution": products.convolution,
    "convolution_backward": products.convolution_backward,
    "max_pool2d_with_indices": products.pooling,
    "max_pool3d_with_indices": products.pooling,
    "avg_pool2d": products.pooling,
    "avg_pool3d": products.pooling,
    "max_pool2d_with_indices_backward": products.pooling_backward,
    "max_pool3d_with_indices_backward": products.pooling_backward,
    "avg_pool2d_backward": products.pooling_backward,
    "avg_pool3d_backward": products.pooling_backward,
    "_adaptive_avg_pool2d": products.adaptive_pooling,
    "_adaptive_avg_pool3d": products.adaptive_pooling,
    "_adaptive_avg_pool2d_backward": products.adaptive_pooling,
    "_adaptive_avg_pool3d_backward": products.adaptive_pooling,
    "_scaled_dot_product_flash_attention_for_cpu": products.attention_on_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": products.attention_on_cpu_backward,
    "native_layer_norm": rows.layer_norm,
    "native_layer_norm_backward": rows.layer_norm_backward,
    "_fused_rms_norm": rows.layer_norm,
    "_fused_rms_norm_backward": rows.layer_norm_backward,
    "native_group_norm": rows.group_norm,
    "native_group_norm_backward": rows.group_norm_backward,
    "native_batch_norm": rows.batch_norm,
    "_native_batch_norm_legit": rows.batch_norm,
    "_native_batch_norm_legit.no_stats": rows.batch_norm_without_running,
    "native_batch_norm_backward": rows.batch_norm_backward,
    "_softmax": _along(1, 1, 2),
    "_safe_softmax": _along(1, 1, 2),
    "_log_softmax": _along(1, 1, 2),
    "_softmax_backward_data": _along(2, 2, 1),
    "_log_softmax_backward_data": _along(2, 2, 1),
    "logsumexp": _settled,
    "nll_loss_forward": rows.class_loss,
    "nll_loss2d_forward": rows.class_loss,
    "nll_loss_backward": rows.class_loss_backward,
    "nll_loss2d_backward": rows.class_loss_backward,
    "embedding": rows.embedding,
    "embedding_dense_backward": rows.embedding_backward,
    "sum": _summed,
    "mean": _summed,
    "amax": _settled,
    "amin": _settled,
    "argmax": _settled,
    "argmin": _settled,
    "max": _extreme,
    "min": _extreme,
    "any": _extreme,
    "all": _extreme,
    "prod": _variance,
    "var": _variance,
    "std": _variance,
    "var_mean": _variance,
    "norm": _norm,
    "linalg_vector_norm": _norm,
    "cumsum": rows.scan,
    "histc": rows.counted,
    "topk": _sorted(2),
    "sort": _sorted(1),
    "clone": _copied,
    "_to_copy": _copied,
    "copy_": _overwritten,
    "cat": moves.joined,
    "stack": moves.stacked,
    "slice_backward": moves.spread_slice,
    "select_backward": moves.spread_selected,
    "constant_pad_nd": moves.padded,
    "slice_scatter": moves.inserted,
    "triu": moves.last_two,
    "tril": moves.last_two,
    "flip": moves.moved,
    "roll": moves.rolled,
    "repeat": moves.repeated,
    "gather": moves.gathered,
    "scatter": partial(moves.scattered, adds=False),
    "scatter_add": partial(moves.scattered, adds=True),
    "index": moves.picked,
    "_unsafe_index": moves.picked,
    "index_put": moves.put,
    "_index_put_impl": moves.put,
    "_unsafe_index_put": moves.put,
    "index_select": moves.chosen,
    "index_add": moves.added_at,
    "add": _added,
    "sub": _added,
    "mul": _scaled,
    "div": _divided,
    "neg": _negated,
    **dict.fromkeys(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zeros_like",
                     "ones_like", "full_like", "zero", "fill", "arange", "linspace",
                     "scalar_tensor", "bernoulli", "normal", "uniform", "random", "exponential",
                     "rand", "randn", "randint", "rand_like", "randn_like"), _filled),
    **dict.fromkeys(("reflection_pad2d", "replication_pad2d", "pixel_shuffle", "im2col",
                     "upsample_nearest2d", "upsample_bilinear2d"), moves.planes),
}  # fmt: skip
# what a rule raises where an op is called in a form that it does not know, say by keywords
_UNEXPECTED = (AttributeError, IndexError, StopIteration, TypeError, ValueError)
_POINTWISE = frozenset(("native_dropout", "native_dropout_backward", "masked_fill", "where",
                        "clamp", "floor_divide"))  # fmt: skip


def loops_of(name: str, func: Any, op_class: OpClass, args: Args, outs: Args) -> Nest | None:
    """Returns the loops of one executed op at its batch, None where no rule is known.

    Args:
        name: schema name, without namespace for ``aten``.
        func: the overload that ran.
        op_class: of the op.
        args: its positional arguments.
        outs: the tensors it wrote or returned, in order.
    """
    base = name if name in _RULES else name.removesuffix("_")
    if func._overloadname == "no_stats":
        base = f"{base}.no_stats"
    if rule := _RULES.get(base):
        try:
            nest = rule(args, outs)
        except _UNEXPECTED:
            return None
        rounds = "mode" in func._overloadname  # a quotient that is rounded
        return nest._replace(linear_reads=0) if nest and rounds else nest
    if op_class == OpClass.LOSS:
        return rows.loss(args, outs)
    if base in _POINTWISE or torch.Tag.pointwise in func.tags:
        return rows.pointwise(tensors_of(args), outs)
    return None


def emitted_loops(target: str, inputs: Args, outs: Args) -> Nest | None:
    """Returns the loops of an op of `torch_fused`, which never ran.

    Args:
        target: what it is called.
        inputs: tensors in the order of the op, None where one is missing.
        outs: likewise.
    """
    if target == "attention":
        return products.attention(inputs, outs)
    if target == "attention_backward":
        return products.attention_backward(inputs, outs)
    cell = CELLS.get(target.partition("_layer")[0])
    if cell is None:
        return None
    of = products.recurrent_backward if target.endswith("_backward") else products.recurrent
    return of(inputs, outs, cell.gates)


def update_loops(parameter: Tensor, gradient: Tensor) -> Nest:
    """Returns the loops of a parameter's update; optimizer states lie as the parameter does."""
    return rows.pointwise((parameter, gradient), (parameter,))


def input_loops(tensor: Tensor) -> Nest:
    """Returns the loops of what makes an input."""
    return rows.pointwise((), (tensor,))
