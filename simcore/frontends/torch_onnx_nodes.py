"""What each op of ONNX does, in torch: arithmetic, products, normalisation, pooling, losses.

A value is a tensor, or a numpy array where it is known (shapes, constants). Attributes that a node
leaves out have the default of the newest opset in which the op is known to us.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

Tensor = torch.Tensor
Value = Any  # a tensor, a numpy array, or None where an optional input is left out


class Node(NamedTuple):
    """One node of a graph.

    Attributes:
        op: its type.
        inputs: values.
        attributes: by name.
        shape: of the first input, as the file says it, with its own batch; None = not known.
        batch: samples of the file and samples now.
        opset: of the file.
    """

    op: str
    inputs: Sequence[Value]
    attributes: Mapping[str, Any]
    shape: tuple[int, ...] | None
    batch: tuple[int, int]
    opset: int

    def get(self, name: str, default: Any = None) -> Any:
        """Returns an attribute."""
        return self.attributes.get(name, default)

    def value(self, place: int) -> Value:
        """Returns an input, None where it is left out."""
        return self.inputs[place] if place < len(self.inputs) else None

    def tensor(self, place: int) -> Tensor:
        """Returns an input as a tensor; what is known is made one.

        Raises:
            ValueError: it is left out.
        """
        value = self.value(place)
        if value is None:
            raise ValueError(f"its input {place} is missing")
        return as_tensor(value)

    def optional(self, place: int) -> Tensor | None:
        """Returns an input as a tensor, None where it is left out."""
        value = self.value(place)
        return None if value is None else as_tensor(value)

    def numbers(self, name: str, place: int) -> list[int] | None:
        """Returns whole numbers that newer opsets give as an input, older as an attribute."""
        given = self.value(place)
        if given is None:
            given = self.get(name)
        if given is None:
            return None
        if isinstance(given, Tensor):
            raise ValueError(f"{name} depends on the values of a tensor")
        return [int(number) for number in np.atleast_1d(given)]


_Function = Callable[[Node], Any]


def as_tensor(value: Value) -> Tensor:
    """Returns a tensor; of a known array, one of its shape and dtype."""
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    return torch.zeros(array.shape, dtype=torch.from_numpy(np.zeros(1, array.dtype)).dtype)


def operand(value: Value) -> Any:
    """Returns a number where a known array is one number, else a tensor."""
    if isinstance(value, np.ndarray) and value.size == 1:
        return value.reshape(()).item()
    return as_tensor(value)


def _unary(function: Callable[[Tensor], Tensor]) -> _Function:
    return lambda node: function(node.tensor(0))


def _binary(function: Callable[[Any, Any], Any]) -> _Function:
    def run(node: Node) -> Any:
        a, b = operand(node.inputs[0]), operand(node.inputs[1])
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            a = node.tensor(0)
        return function(a, b)

    return run


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> _Function:
    """Of any number of inputs."""

    def run(node: Node) -> Tensor:
        total = node.tensor(0)
        for place in range(1, len(node.inputs)):
            total = function(total, node.tensor(place))
        return total

    return run


def _compared(function: Callable[[Tensor, Any], Tensor]) -> _Function:
    return lambda node: function(node.tensor(0), operand(node.inputs[1]))


def _gemm(node: Node) -> Tensor:
    a, b, c = node.tensor(0), node.tensor(1), node.optional(2)
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    a = a.t() if node.get("transA", 0) else a
    plain = alpha == beta == 1.0
    if plain and node.get("transB", 0) and (c is None or c.dim() == 1):
        return F.linear(a, b, c)
    b = b.t() if node.get("transB", 0) else b
    if c is None:
        return a @ b if alpha == 1.0 else (a @ b) * alpha
    return torch.addmm(c, a, b, alpha=alpha, beta=beta)


def _pads(node: Node, size: Sequence[int], window: Sequence[int]) -> list[tuple[int, int]]:
    """Returns padding before and after each position."""
    rank = len(window)
    auto = node.get("auto_pad", b"NOTSET")
    auto = auto.decode() if isinstance(auto, bytes) else auto
    if auto in {"NOTSET", "VALID"}:
        pads = node.get("pads", [0] * 2 * rank) if auto == "NOTSET" else [0] * 2 * rank
        return list(zip(pads[:rank], pads[rank:], strict=True))
    strides, dilations = node.get("strides", [1] * rank), node.get("dilations", [1] * rank)
    found = []
    for length, kernel, stride, dilation in zip(size, window, strides, dilations, strict=True):
        reach = dilation * (kernel - 1) + 1
        total = max(0, (-(-length // stride) - 1) * stride + reach - length)
        small, large = total // 2, total - total // 2
        found.append((small, large) if auto == "SAME_UPPER" else (large, small))
    return found


def _padded(
    data: Tensor, pads: Sequence[tuple[int, int]], value: float
) -> tuple[Tensor, list[int]]:
    """Returns data and the padding that is left to the op: none where it was not the same."""
    if all(before == after for before, after in pads):
        return data, [before for before, _ in pads]
    flat = [number for pair in reversed(pads) for number in pair]
    return F.pad(data, flat, value=value), [0] * len(pads)


def _convolution(node: Node) -> Tensor:
    data, weight = node.tensor(0), node.tensor(1)
    rank = weight.dim() - 2
    data, padding = _padded(data, _pads(node, data.shape[2:], weight.shape[2:]), 0.0)
    return torch.convolution(
        data, weight, node.optional(2), node.get("strides", [1] * rank), padding,
        node.get("dilations", [1] * rank), False, [0] * rank, node.get("group", 1),
    )  # fmt: skip


def _transposed_convolution(node: Node) -> Tensor:
    data, weight = node.tensor(0), node.tensor(1)
    rank = weight.dim() - 2
    pads = _pads(node, data.shape[2:], weight.shape[2:])
    extra = node.get("output_padding", [0] * rank)
    extra = [more + before - after for more, (before, after) in zip(extra, pads, strict=True)]
    return torch.convolution(
        data, weight, node.optional(2), node.get("strides", [1] * rank),
        [before for before, _ in pads], node.get("dilations", [1] * rank), True, extra,
        node.get("group", 1),
    )  # fmt: skip


def _pool(node: Node) -> Any:
    data, window = node.tensor(0), node.get("kernel_shape")
    rank = len(window)
    is_max = node.op == "MaxPool"
    border = float("-inf") if is_max else 0.0
    data, padding = _padded(data, _pads(node, data.shape[2:], window), border)
    strides, ceil = node.get("strides", [1] * rank), bool(node.get("ceil_mode", 0))
    if is_max:
        dilations = node.get("dilations", [1] * rank)
        pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[rank - 1]
        return pool(data, window, strides, padding, dilations, ceil)
    counted = bool(node.get("count_include_pad", 0))
    mean = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[rank - 1]
    return mean(data, window, strides, padding, ceil, counted)


def _global_pool(node: Node) -> Tensor:
    data = node.tensor(0)
    rank = data.dim() - 2
    if node.op == "GlobalMaxPool":
        return data.amax(dim=tuple(range(2, data.dim())), keepdim=True)
    pool = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[rank - 1]
    return pool(data, 1)


def _batch_norm(node: Node) -> Tensor:
    """With the statistics of the batch, as training does, whatever the file was exported for."""
    data, scale, bias, mean, variance = (node.tensor(place) for place in range(5))
    keep = node.get("momentum", 0.9)
    epsilon = node.get("epsilon", 1e-5)
    return F.batch_norm(data, mean, variance, scale, bias, True, 1 - keep, epsilon)


def _layer_norm(node: Node) -> Tensor:
    data, axis = node.tensor(0), node.get("axis", -1)
    shape = list(data.shape[axis % data.dim() :])
    epsilon = node.get("epsilon", 1e-5)
    if node.op in {"RMSNormalization", "SimplifiedLayerNormalization"}:
        return F.rms_norm(data, shape, node.optional(1), epsilon)
    return F.layer_norm(data, shape, node.optional(1), node.optional(2), epsilon)


def _softmax(node: Node) -> Tensor:
    data, axis = node.tensor(0), node.get("axis", -1 if node.opset >= 13 else 1)
    function = F.log_softmax if node.op == "LogSoftmax" else F.softmax
    if node.opset >= 13:
        return function(data, dim=axis)
    flat = data.flatten(axis) if axis else data.reshape(1, -1)
    return function(flat, dim=-1).reshape(data.shape)


def _clip(node: Node) -> Tensor:
    low = node.value(1) if node.value(1) is not None else node.get("min")
    high = node.value(2) if node.value(2) is not None else node.get("max")
    low, high = (None if v is None else operand(v) for v in (low, high))
    return torch.clamp(node.tensor(0), low, high)


def _attention(node: Node) -> Tensor:
    """Attention of opset 23, without a cache."""
    query, key, value = (node.tensor(place) for place in range(3))
    if query.dim() == 3:
        heads, kv_heads = node.get("q_num_heads"), node.get("kv_num_heads")
        query, key, value = (
            part.reshape(*part.shape[:2], count, -1).transpose(1, 2)
            for part, count in ((query, heads), (key, kv_heads), (value, kv_heads))
        )
    out = F.scaled_dot_product_attention(
        query, key, value, node.optional(3), is_causal=bool(node.get("is_causal", 0)),
        scale=node.get("scale"), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2).flatten(2) if node.tensor(0).dim() == 3 else out


def _reduced(node: Node) -> Tensor:
    data = node.tensor(0)
    axes = node.numbers("axes", 1)
    if not axes and node.get("noop_with_empty_axes", 0):
        return data
    dims = tuple(axes) if axes else tuple(range(data.dim()))
    return _REDUCTIONS[node.op](data, dims, bool(node.get("keepdims", 1)))


_REDUCTIONS: dict[str, Callable[[Tensor, tuple[int, ...], bool], Tensor]] = {
    "ReduceSum": lambda data, dims, keep: data.sum(dims, keepdim=keep),
    "ReduceMean": lambda data, dims, keep: data.mean(dims, keepdim=keep),
    "ReduceMax": lambda data, dims, keep: data.amax(dims, keepdim=keep),
    "ReduceMin": lambda data, dims, keep: data.amin(dims, keepdim=keep),
    "ReduceL2": lambda data, dims, keep: torch.linalg.vector_norm(data, 2, dims, keep),
    "ReduceL1": lambda data, dims, keep: data.abs().sum(dims, keepdim=keep),
    "ReduceSumSquare": lambda data, dims, keep: data.square().sum(dims, keepdim=keep),
    "ReduceLogSumExp": torch.logsumexp,
}


def _class_loss(node: Node) -> Any:
    data, target = node.tensor(0), node.tensor(1)
    kind = node.get("reduction", b"mean")
    kind = kind.decode() if isinstance(kind, bytes) else kind
    rows = data if node.op == "NegativeLogLikelihoodLoss" else F.log_softmax(data, 1)
    ignored = node.get("ignore_index", -100)
    loss = F.nll_loss(rows, target.long(), node.optional(2), ignore_index=ignored, reduction=kind)
    return loss if node.op == "NegativeLogLikelihoodLoss" else (loss, rows)


def _dropout(node: Node) -> Any:
    """Drops where the file says that it is for training."""
    data, ratio = node.tensor(0), node.value(1)
    training = node.value(2)
    if training is None or not bool(np.all(training)):
        return (data, torch.ones_like(data, dtype=torch.bool))
    share = 0.5 if ratio is None else float(operand(ratio))
    return torch.native_dropout(data, share, True)


def _cast(node: Node) -> Tensor:
    data, code = node.tensor(0), node.get("to")
    kind = _TYPES.get(code)
    if kind is None:
        raise ValueError(f"dtype {code} of ONNX is not known")
    return data.to(kind)


_TYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32,
    7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip

FUNCTIONS: dict[str, _Function] = {
    "Add": _binary(torch.add), "Sub": _binary(lambda a, b: a - b),
    "Mul": _binary(lambda a, b: a * b), "Div": _binary(lambda a, b: a / b),
    "Pow": _binary(torch.pow), "Mod": _binary(lambda a, b: a % b),
    "PRelu": lambda node: F.prelu(node.tensor(0), node.tensor(1).flatten()),
    "And": _binary(torch.logical_and), "Or": _binary(torch.logical_or),
    "Equal": _compared(torch.eq), "Greater": _compared(torch.gt), "Less": _compared(torch.lt),
    "GreaterOrEqual": _compared(torch.ge), "LessOrEqual": _compared(torch.le),
    "Min": _folded(torch.minimum), "Max": _folded(torch.maximum), "Sum": _folded(torch.add),
    "Not": _unary(torch.logical_not), "Sqrt": _unary(torch.sqrt), "Exp": _unary(torch.exp),
    "Log": _unary(torch.log), "Neg": _unary(torch.neg), "Abs": _unary(torch.abs),
    "Relu": _unary(F.relu), "Sigmoid": _unary(torch.sigmoid), "Tanh": _unary(torch.tanh),
    "Erf": _unary(torch.erf), "Floor": _unary(torch.floor), "Ceil": _unary(torch.ceil),
    "Round": _unary(torch.round), "Sin": _unary(torch.sin), "Cos": _unary(torch.cos),
    "Reciprocal": _unary(torch.reciprocal), "Sign": _unary(torch.sign),
    "Softplus": _unary(F.softplus), "Softsign": _unary(F.softsign), "Mish": _unary(F.mish),
    "HardSwish": _unary(F.hardswish), "IsNaN": _unary(torch.isnan),
    "Identity": _unary(lambda tensor: tensor), "Swish": _unary(F.silu),
    "Gelu": lambda node: F.gelu(
        node.tensor(0),
        approximate="tanh" if node.get("approximate", b"none") == b"tanh" else "none",
    ),
    "LeakyRelu": lambda node: F.leaky_relu(node.tensor(0), node.get("alpha", 0.01)),
    "Elu": lambda node: F.elu(node.tensor(0), node.get("alpha", 1.0)),
    "Selu": _unary(F.selu), "HardSigmoid": _unary(F.hardsigmoid), "Clip": _clip,
    "Where": lambda node: torch.where(node.tensor(0), *map(operand, node.inputs[1:3])),
    "Cast": _cast, "CastLike": lambda node: node.tensor(0).to(node.tensor(1).dtype),
    "Dropout": _dropout, "MatMul": lambda node: node.tensor(0) @ node.tensor(1), "Gemm": _gemm,
    "Einsum": lambda node: torch.einsum(
        node.get("equation").decode(), *(as_tensor(value) for value in node.inputs)
    ),
    "Conv": _convolution, "ConvTranspose": _transposed_convolution, "Attention": _attention,
    "BatchNormalization": _batch_norm, "LayerNormalization": _layer_norm,
    "RMSNormalization": _layer_norm, "SimplifiedLayerNormalization": _layer_norm,
    "InstanceNormalization": lambda node: F.instance_norm(
        node.tensor(0), weight=node.tensor(1), bias=node.tensor(2)
    ),
    "GroupNormalization": lambda node: F.group_norm(
        node.tensor(0), node.get("num_groups"), node.tensor(1), node.tensor(2)
    ),
    "Softmax": _softmax, "LogSoftmax": _softmax, "MaxPool": _pool, "AveragePool": _pool,
    "GlobalAveragePool": _global_pool, "GlobalMaxPool": _global_pool,
    "SoftmaxCrossEntropyLoss": _class_loss, "NegativeLogLikelihoodLoss": _class_loss,
    **dict.fromkeys(_REDUCTIONS, _reduced),
}  # fmt: skip
