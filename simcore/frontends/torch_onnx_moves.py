"""Ops of ONNX that move elements or tell shapes, in torch.

A file with a fixed batch says it in the shapes that it reshapes to. At another batch these are
scaled: of the dimensions that a reshape makes, the one that the growing dimension of its input
goes into.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from simcore.frontends.hlo_nest import growing_part, parts_of, reshaped
from simcore.frontends.torch_onnx_nodes import Node, Tensor, as_tensor, operand


def _reshape(node: Node) -> Tensor:
    data, wanted = node.tensor(0), node.numbers("shape", 1) or []
    shape = [
        data.shape[place] if size == 0 and not node.get("allowzero", 0) else size
        for place, size in enumerate(wanted)
    ]
    return data.reshape(_at_batch(node, list(data.shape), shape))


def _at_batch(node: Node, now: list[int], shape: list[int]) -> list[int]:
    """Returns a shape that was meant for the file's batch, at the batch of now.

    Args:
        node: the reshape.
        now: shape of what is reshaped.
        shape: as the file says, -1 = what is left.
    """
    then, present = node.batch
    before = list(node.shape or ())
    if then in (0, present) or len(before) != len(now) or before == now:
        return shape
    place = next(dim for dim, size in enumerate(now) if size != before[dim])
    return _grown(before, _filled(shape, prod(before)), place, node.batch) or shape


def _filled(shape: list[int], elements: int) -> list[int]:
    known = prod(size for size in shape if size != -1)
    return [elements // max(1, known) if size == -1 else size for size in shape]


def _grown(
    before: list[int], after: list[int], place: int, batch: tuple[int, int]
) -> list[int] | None:
    """Returns the shape after a reshape whose input grows in one dimension, None = it cannot."""
    then, present = batch
    if prod(before) != prod(after):
        return None
    left, right = reshaped(before, after)
    inside = growing_part(parts_of(left[place], before[place]), then)
    for dim, label in enumerate(right):
        names = {name for name, _ in parts_of(label, after[dim])}
        if inside and inside in names:
            return [
                size // then * present if other == dim else size for other, size in enumerate(after)
            ]
    return None


def _flatten(node: Node) -> Tensor:
    data, axis = node.tensor(0), node.get("axis", 1)
    axis = axis % data.dim() if axis < 0 else axis
    return data.reshape(prod(data.shape[:axis]), -1)


def _transpose(node: Node) -> Tensor:
    data = node.tensor(0)
    return data.permute(node.get("perm", list(reversed(range(data.dim())))))


def _squeeze(node: Node) -> Tensor:
    axes = node.numbers("axes", 1)
    return node.tensor(0).squeeze() if axes is None else node.tensor(0).squeeze(tuple(axes))


def _unsqueeze(node: Node) -> Tensor:
    data, axes = node.tensor(0), node.numbers("axes", 1) or []
    rank = data.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        data = data.unsqueeze(axis)
    return data


def _concat(node: Node) -> Tensor:
    return torch.cat([as_tensor(value) for value in node.inputs], node.get("axis"))


def _split(node: Node) -> Any:
    data, axis = node.tensor(0), node.get("axis", 0)
    sizes = node.numbers("split", 1)
    if sizes is None:
        count = node.get("num_outputs", 2)
        sizes = [-(-data.shape[axis] // count)] * count
        sizes[-1] = data.shape[axis] - sum(sizes[:-1])
    return torch.split(data, sizes, axis)


def _slice(node: Node) -> Tensor:
    data = node.tensor(0)
    starts, ends = node.numbers("starts", 1) or [], node.numbers("ends", 2) or []
    axes = node.numbers("axes", 3) or list(range(len(starts)))
    steps = node.numbers("steps", 4) or [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        first, last, stride = slice(start, end, step).indices(data.shape[axis])
        if step < 0:
            raise ValueError("a slice with a negative step is not supported")
        if (first, last, stride) != (0, data.shape[axis], 1):
            data = torch.ops.aten.slice.Tensor(data, axis, first, last, stride)
    return data


def _gather(node: Node) -> Tensor:
    """Rows of a table where it is one, one index where it is a number."""
    data, axis, index = node.tensor(0), node.get("axis", 0), node.value(1)
    if isinstance(index, np.ndarray) and index.ndim == 0:
        return data.select(axis, int(index))
    places = as_tensor(index).long()
    if axis == 0 and data.dim() == 2:
        return F.embedding(places, data)
    axis = axis % data.dim()
    picked = torch.index_select(data, axis, places.flatten())
    if places.dim() == 1:
        return picked
    return picked.reshape(*data.shape[:axis], *places.shape, *data.shape[axis + 1 :])


def _expand(node: Node) -> Tensor:
    data, shape = node.tensor(0), node.numbers("shape", 1) or []
    then, present = node.batch
    if then and shape and shape[0] == then:
        shape[0] = present
    wanted = np.broadcast_shapes(tuple(data.shape), tuple(shape))
    return data.expand(wanted)


def _pad(node: Node) -> Tensor:
    data, pads = node.tensor(0), node.numbers("pads", 1) or []
    axes = node.numbers("axes", 3) or list(range(data.dim()))
    pairs = [(0, 0)] * data.dim()
    for place, axis in enumerate(axes):
        pairs[axis] = pads[place], pads[place + len(axes)]
    mode = node.get("mode", b"constant").decode()
    flat = [number for pair in reversed(pairs) for number in pair]
    if mode != "constant":
        kept = flat[: 2 * (data.dim() - 2)]
        return F.pad(data, kept, {"edge": "replicate", "wrap": "circular"}.get(mode, mode))
    value = 0.0 if node.value(2) is None else float(operand(node.value(2)))
    return F.pad(data, flat, value=value)


def _argmax(node: Node) -> Tensor:
    function = torch.argmax if node.op == "ArgMax" else torch.argmin
    keeps = bool(node.get("keepdims", 1))
    return function(node.tensor(0), node.get("axis", 0), keeps)


def _top(node: Node) -> Any:
    count = (node.numbers("k", 1) or [1])[0]
    largest, is_sorted = bool(node.get("largest", 1)), bool(node.get("sorted", 1))
    return torch.topk(node.tensor(0), count, node.get("axis", -1), largest, is_sorted)


def _triangle(node: Node) -> Tensor:
    diagonal = (node.numbers("k", 1) or [0])[0]
    function = torch.triu if node.get("upper", 1) else torch.tril
    return function(node.tensor(0), diagonal)


def _shape(node: Node) -> Any:
    data = node.tensor(0)
    end = node.get("end")
    return np.array(data.shape[node.get("start", 0) : end], np.int64)


MOVES: dict[str, Callable[[Node], Any]] = {
    "Reshape": _reshape, "Flatten": _flatten, "Transpose": _transpose, "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze, "Concat": _concat, "Split": _split, "Slice": _slice,
    "Gather": _gather, "Expand": _expand, "Pad": _pad, "ArgMax": _argmax, "ArgMin": _argmax,
    "TopK": _top, "Trilu": _triangle, "Shape": _shape,
    "Size": lambda node: np.array(node.tensor(0).numel(), np.int64),
    "Tile": lambda node: node.tensor(0).repeat(node.numbers("repeats", 1) or []),
    "GatherElements": lambda node: torch.gather(
        node.tensor(0), node.get("axis", 0), node.tensor(1).long()
    ),
    "CumSum": lambda node: node.tensor(0).cumsum((node.numbers("axis", 1) or [0])[0]),
}  # fmt: skip
