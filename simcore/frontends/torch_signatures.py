"""One executed torch op -> its class, named dimensions and FLOP factor.

Ops are known by their schema name, without namespace for ``aten`` (``mm``), with it for others
(``mylib::scan``). An op that is not listed gets its FLOPs from torch's flop counter where a formula
is registered there, else it is costed by the bytes it moves: no op is free for being unknown.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from simcore.signature import OpClass

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip

Args = Sequence[Any]


class Kind(NamedTuple):
    """What an op is, at one batch."""

    op_class: OpClass
    dims: tuple[tuple[str, int], ...]  # (name, size)
    factor: float = 1.0


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the short name of a dtype, for example ``bf16`` or ``int64``."""
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def attention_kind(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *, backward: bool = False
) -> Kind:
    """Returns the kind of one attention op from shapes [..., head, length, width].

    The two products have widths of their own (query's and value's), the signature has one; the
    factor makes up for it. The backward does 5 products where the forward does 2.
    """
    lead = math.prod(query[:-3]) if len(query) > 3 else 1
    heads = query[-3] if len(query) > 2 else 1
    dims = {"b": lead, "h": heads, "q": query[-2], "kv": key[-2], "d": query[-1]}
    factor = (query[-1] + value[-1]) / (2 * query[-1])
    return Kind(OpClass.ATTENTION, tuple(dims.items()), factor * (2.5 if backward else 1.0))


def _matmul(a: torch.Tensor, b: torch.Tensor) -> Kind:
    m = a.shape[0] if a.dim() > 1 else 1
    n = b.shape[1] if b.dim() > 1 else 1
    return Kind(OpClass.MATMUL, (("m", m), ("n", n), ("k", a.shape[-1])))


def _batched_matmul(a: torch.Tensor, b: torch.Tensor) -> Kind:
    dims = (("b", a.shape[0]), ("m", a.shape[1]), ("n", b.shape[2]), ("k", a.shape[2]))
    return Kind(OpClass.BATCHED_MATMUL, dims)


def _linear(a: torch.Tensor, weight: torch.Tensor) -> Kind:
    m = math.prod(a.shape[:-1])
    return Kind(OpClass.MATMUL, (("m", m), ("n", weight.shape[0]), ("k", weight.shape[1])))


def _grouped_matmul(a: torch.Tensor, b: torch.Tensor) -> Kind:
    """Mixture-of-experts product: the ragged dimension is counted once, whatever its groups."""
    if a.dim() == 2:
        return Kind(OpClass.MATMUL, (("m", a.shape[0]), ("n", b.shape[-1]), ("k", a.shape[1])))
    if b.dim() == 2:
        return Kind(OpClass.MATMUL, (("m", a.shape[1]), ("n", b.shape[1]), ("k", a.shape[2])))
    return _batched_matmul(a, b)


def _convolution(
    data: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, transposed: bool
) -> Kind:
    """A transposed convolution is the input gradient of a plain one: input and output swap."""
    spatial = data if transposed else out
    dims = {
        "n": spatial.shape[0],
        "k": weight.shape[0],
        "out": math.prod(spatial.shape[2:]),
        "c": weight.shape[1],
        "filter": math.prod(weight.shape[2:]),
    }
    return Kind(OpClass.CONVOLUTION, tuple(dims.items()))


def _convolution_backward(args: Args, _outs: Args) -> Kind:
    """One op for both gradients; each costs what the forward does."""
    grad, data, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    return _convolution(data, weight, grad, transposed)._replace(factor=float(mask[0] + mask[1]))


def _attention(args: Args, _outs: Args) -> Kind:
    return attention_kind(args[0].shape, args[1].shape, args[2].shape)


def _attention_backward(args: Args, _outs: Args) -> Kind:
    return attention_kind(args[1].shape, args[2].shape, args[3].shape, backward=True)


def _pooling(args: Args, outs: Args) -> Kind:
    """Each output reads the positions of its window."""
    window = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    if not window or args[0].numel() < outs[0].numel() * math.prod(window):
        factor = max(1.0, args[0].numel() / max(1, outs[0].numel()))
    else:
        factor = float(math.prod(window))
    return Kind(OpClass.POOLING, (("elements", outs[0].numel()),), factor)


_RULES: dict[str, Callable[[Args, Args], Kind]] = {
    "mm": lambda args, _: _matmul(args[0], args[1]),
    "mv": lambda args, _: _matmul(args[0], args[1]),
    "dot": lambda args, _: _matmul(args[0], args[1]),
    "addmm": lambda args, _: _matmul(args[1], args[2]),
    "addmm_": lambda args, _: _matmul(args[1], args[2]),
    "addmv": lambda args, _: _matmul(args[1], args[2]),
    "_addmm_activation": lambda args, _: _matmul(args[1], args[2]),
    "_scaled_mm": lambda args, _: _matmul(args[0], args[1]),
    "bmm": lambda args, _: _batched_matmul(args[0], args[1]),
    "baddbmm": lambda args, _: _batched_matmul(args[1], args[2]),
    "baddbmm_": lambda args, _: _batched_matmul(args[1], args[2]),
    "linear": lambda args, _: _linear(args[0], args[1]),
    "_grouped_mm": lambda args, _: _grouped_matmul(args[0], args[1]),
    "convolution": lambda args, outs: _convolution(args[0], args[1], outs[0], args[6]),
    "_convolution": lambda args, outs: _convolution(args[0], args[1], outs[0], args[6]),
    "mkldnn_convolution": lambda args, outs: _convolution(args[0], args[1], outs[0], False),
    "convolution_backward": _convolution_backward,
    "max_pool2d_with_indices": _pooling,
    "max_pool3d_with_indices": _pooling,
    "avg_pool2d": _pooling,
    "avg_pool3d": _pooling,
    "_adaptive_avg_pool2d": _pooling,
    "_adaptive_avg_pool3d": _pooling,
    "adaptive_max_pool2d": _pooling,
}
_FAMILY = "_scaled_dot_product_"  # fused attention of every device

_CLASS_OF: dict[str, OpClass] = {
    name: op_class
    for op_class, names in {
        OpClass.NORMALISATION: """native_layer_norm native_layer_norm_backward native_group_norm
            native_group_norm_backward native_batch_norm native_batch_norm_backward cudnn_batch_norm
            cudnn_batch_norm_backward _native_batch_norm_legit batch_norm_backward _fused_rms_norm
            _fused_rms_norm_backward""",
        OpClass.SOFTMAX: """_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
            logsumexp _safe_softmax""",
        OpClass.LOSS: """nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
            mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss
            huber_loss_backward binary_cross_entropy binary_cross_entropy_backward _ctc_loss
            binary_cross_entropy_with_logits _ctc_loss_backward""",
        OpClass.EMBEDDING: "embedding embedding_dense_backward _embedding_bag",
        OpClass.POOLING: """max_pool2d_with_indices_backward max_pool3d_with_indices_backward
            avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward
            _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward""",
        OpClass.REDUCTION: """sum mean amax amin argmax argmin max min var std var_mean prod all any
            cumsum cumprod topk sort norm linalg_vector_norm histc bincount""",
        OpClass.COPY: """clone _to_copy copy_ cat stack fill_ zero_ zeros zeros_like new_zeros ones
            ones_like new_ones full full_like new_full scalar_tensor arange linspace eye roll repeat
            slice_backward select_backward diagonal_backward unfold_backward index index_put
            _index_put_impl_ _unsafe_index _unsafe_index_put gather scatter scatter_add flip tril
            scatter_reduce index_select index_add index_copy constant_pad_nd reflection_pad2d triu
            replication_pad2d slice_scatter select_scatter as_strided_scatter pixel_shuffle im2col
            col2im""",
        OpClass.POINTWISE: """native_dropout native_dropout_backward bernoulli bernoulli_ normal_
            uniform_ random_ exponential_ rand randn randint rand_like randn_like randperm
            masked_fill floor_divide where clamp isin""",
    }.items()
    for name in names.split()
}  # fmt: skip


def classify(name: str, func: Any, args: Args, kwargs: Mapping[str, Any], outs: Args) -> Kind:
    """Returns what one executed op is.

    Args:
        name: schema name, without namespace for ``aten``.
        func: the overload that ran.
        args: its positional arguments.
        kwargs: its keyword arguments.
        outs: the tensors it wrote or returned, in order.
    """
    if rule := _RULES.get(name):
        return rule(args, outs)
    if name.startswith(_FAMILY):
        return (_attention_backward if name.endswith("_backward") else _attention)(args, outs)
    op_class = _CLASS_OF.get(name) or _CLASS_OF.get(name.removesuffix("_"))
    tags = {tag.name for tag in func.tags}
    if op_class is None and "pointwise" in tags:
        op_class = OpClass.POINTWISE
    if op_class is None and "reduction" in tags:
        op_class = OpClass.REDUCTION
    if op_class is not None:
        return Kind(op_class, (("elements", _elements(op_class, name, args, outs)),))
    if (formula := flop_registry.get(func._overloadpacket)) is not None:
        value = outs[0] if len(outs) == 1 else tuple(outs)
        return Kind(OpClass.OTHER, (("elements", int(formula(*args, **kwargs, out_val=value))),))
    touched = sum(tensor.numel() for tensor in (*args, *outs) if isinstance(tensor, torch.Tensor))
    return Kind(OpClass.OTHER, (("elements", touched),))


def _elements(op_class: OpClass, name: str, args: Args, outs: Args) -> int:
    """Returns how many elements an op walks over: of its output, or of what it reduces."""
    reduces = op_class in (OpClass.REDUCTION, OpClass.LOSS) or name == "embedding_dense_backward"
    walked = [arg for arg in args if isinstance(arg, torch.Tensor)] if reduces else []
    return int((walked or outs)[0].numel())
