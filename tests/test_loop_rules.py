"""Every rule of `torch_loops`: torch runs the op in pieces, and what comes out is the whole."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore.frontends.torch_loops import emitted_loops, loops_of, update_loops
from simcore.frontends.torch_nest import CUT, Nest, Use
from simcore.frontends.torch_recorder import tensors_in
from simcore.frontends.torch_signatures import classify
from simcore.loops import LoopKind

aten = torch.ops.aten
Tensor = torch.Tensor
Sizes = tuple[int, ...]


def f(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


@dataclass(frozen=True)
class Case:
    """One op, and what its pieces must know beside their tensors."""

    op: Any
    args: Callable[[Sizes], tuple[Any, ...]]  # sizes of 2 to 5 -> arguments
    adjust: Callable[[list[Any], str, slice, tuple[Any, ...]], Any] = lambda *_: None
    added: tuple[int, ...] = ()  # arguments that one part adds
    once: tuple[tuple[str, int], ...] = ()  # (loop, output) that one part writes
    is_mean: bool = False
    loops: str = ""  # the loops that must be there and plain
    kinds: dict[str, LoopKind] = field(default_factory=dict)  # of the others


def nest_of(op: Any, args: Sequence[Any], outs: Sequence[Tensor]) -> Nest:
    name = op._schema.name.removeprefix("aten::")
    kind = classify(name, op, args, {}, outs)
    nest = loops_of(name, op, kind.op_class, args, outs)
    assert nest is not None
    return nest


def flat(use: Use) -> list[tuple[str, int]]:
    """(label, size) of every loop of every dimension, in the order of the memory."""
    places: list[tuple[str, int]] = []
    for label, size in zip(use.labels, use.tensor.shape, strict=True):
        if isinstance(label, str):
            places.append((label, size))
        elif size == 1:
            places.append((CUT, 1))
        else:
            assert math.prod(part for _, part in label) == size
            places += label
    return places


def loop_sizes(nest: Nest) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for use in nest.uses:
        for label, size in flat(use):
            if label != CUT and nest.special.get(label, [0])[0] != LoopKind.HALO:
                assert sizes.get(label, 1) in (1, size) or size == 1, (label, use.tensor.shape)
                sizes[label] = max(size, sizes.get(label, 1))
    return sizes


def has(use: Use, label: str) -> bool:
    return any(name == label and size > 1 for name, size in flat(use))


def piece(use: Use, tensor: Tensor, label: str, part: slice) -> Tensor:
    """The part of a tensor along a loop, in the tensor's own rank."""
    places = flat(use)
    wide = tensor.reshape([size for _, size in places])
    for axis, (name, size) in enumerate(places):
        if name == label and size > 1:
            wide = wide.narrow(axis, part.start, part.stop - part.start)
    left = list(wide.shape)
    shape = []
    for name, size in zip(use.labels, tensor.shape, strict=True):
        count = 1 if isinstance(name, str) or size == 1 else len(name)
        shape.append(math.prod(left[:count]))
        del left[:count]
    return wide.reshape(shape)


def together(use: Use, parts: list[Tensor], label: str) -> Tensor:
    """The whole from its parts along a loop."""
    places = flat(use)
    axis = [name for name, _ in places].index(label)
    wide = []
    for part in parts:
        count = part.numel() * places[axis][1] // max(1, use.tensor.numel())
        shape = [size for _, size in places]
        shape[axis] = count
        wide.append(part.reshape(shape))
    return torch.cat(wide, axis).reshape(use.tensor.shape)


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change) for item in value)
    return value


def cuts(size: int, count: int) -> list[slice]:
    edges = [size * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9, equal_nan=True)


def check_loop(case: Case, args: tuple[Any, ...], nest: Nest, label: str, size: int) -> None:
    count = 3 if size > 2 else 2
    labelled = {id(use.tensor): use for use in nest.uses if not use.is_output}
    outputs = [use for use in nest.uses if use.is_output]
    partial = not all(has(use, label) for use in outputs)
    results = []
    for number, part in enumerate(cuts(size, count)):

        def cut(tensor: Tensor, part: slice = part, number: int = number) -> Tensor:
            use = labelled.get(id(tensor))
            if use is None or not has(use, label):
                added = partial and any(tensor is args[place] for place in case.added)
                return torch.zeros_like(tensor) if added and number else tensor.clone()
            return piece(use, tensor, label, part).clone()

        given_args = list(mapped(args, cut))
        case.adjust(given_args, label, part, args)
        results.append(list(tensors_in(case.op(*given_args))))
    for place, use in enumerate(outputs):
        parts = [result[place] for result in results]
        if has(use, label):
            same(together(use, parts, label), use.tensor)
        elif use.whole:
            for made in parts:
                same(made, use.tensor)
        elif (label, place) in case.once:
            same(parts[0], use.tensor)
        else:
            weights = [1.0] * count
            if case.is_mean:
                weights = [(part.stop - part.start) / size for part in cuts(size, count)]
            same(sum(w * made for w, made in zip(weights, parts, strict=True)), use.tensor)  # type: ignore[arg-type]


def shapes_follow(*places: int) -> Callable[..., None]:
    """Adjusts arguments that are the output's shape, whose loops are e0, e1, …."""

    def adjust(args: list[Any], label: str, part: slice, _whole: Any) -> None:
        for place in places:
            shape = list(args[place])
            shape[int(label[1:])] = part.stop - part.start
            args[place] = shape

    return adjust


def groups_follow(*places: int) -> Callable[..., None]:
    def adjust(args: list[Any], label: str, part: slice, whole: Any) -> None:
        if label == "g":
            for place in places:
                args[place] = whole[place] * (part.stop - part.start) // whole[places[-1]]

    return adjust


def group_norm_follows(args: list[Any], label: str, part: slice, whole: Any) -> None:
    first = next(i for i, value in enumerate(args) if isinstance(value, int))
    width = part.stop - part.start
    if label == "n":
        args[first] = width
    if label == "g":
        args[first + 1] = whole[first + 1] // whole[first + 3] * width
        args[first + 3] = width


def norm_args(s: Sizes) -> tuple[Any, ...]:
    data, weight, bias = f(s[0], s[1], s[2]), f(s[2]), f(s[2])
    _, mean, rstd = aten.native_layer_norm(data, [s[2]], weight, bias, 1e-5)
    return f(s[0], s[1], s[2]), data, [s[2]], mean, rstd, weight, bias, [True] * 3


def group_args(s: Sizes) -> tuple[Any, ...]:
    data, channels = f(s[0], s[1] * s[2], 3, 2), s[1] * s[2]
    weight = f(channels)
    _, mean, rstd = aten.native_group_norm(data, weight, f(channels), s[0], channels, 6, s[1], 1e-5)
    return f(*data.shape), data, mean, rstd, weight, s[0], channels, 6, s[1], [True] * 3


def batch_args(s: Sizes) -> tuple[Any, ...]:
    data, weight = f(s[0], s[1], s[2]), f(s[1])
    _, mean, rstd = aten.native_batch_norm(data, weight, f(s[1]), None, None, True, 0.1, 1e-5)
    return f(*data.shape), data, weight, None, None, mean, rstd, True, 1e-5, [True] * 3


def conv_args(s: Sizes, groups: int = 1, kernel: int = 3, stride: int = 1) -> tuple[Any, ...]:
    data = f(s[0], groups * s[1], 8, 8)
    weight, bias = f(groups * s[2], s[1], kernel, kernel), f(groups * s[2])
    return data, weight, bias, [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups


def patches(s: Sizes) -> tuple[Any, ...]:
    return f(s[0], s[1], 8, 6), f(s[2], s[1], 2, 2), None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1


def conv_backward(args: tuple[Any, ...]) -> tuple[Any, ...]:
    out = aten.convolution(*args)
    sizes = None if args[2] is None else [len(args[2])]
    return (f(*out.shape), *args[:2], sizes, *args[3:], [True, True, args[2] is not None])


def transposed_args(s: Sizes) -> tuple[Any, ...]:
    return (f(s[0], s[1], 4, 4), f(s[1], s[2], 3, 3), f(s[2]), [2, 2], [1, 1], [1, 1], True,
            [1, 1], 1)  # fmt: skip


def pool_args(s: Sizes) -> tuple[Any, ...]:
    data = f(s[0], s[1], 8, 6)
    out, places = aten.max_pool2d_with_indices(data, [3, 3], [2, 2], [1, 1])
    return f(*out.shape), data, [3, 3], [2, 2], [1, 1], [1, 1], False, places


def shifted(place: int, label: str) -> Callable[..., None]:
    """Adjusts indices to a part of what they point at; -1 stands for what is elsewhere."""

    def adjust(args: list[Any], of: str, part: slice, whole: Any) -> None:
        if of == label:
            index = args[place] - part.start
            width = part.stop - part.start
            args[place] = torch.where((index < 0) | (index >= width), -1, index)
            for other, value in enumerate(args):
                if type(value) is int and label == "v":
                    args[other] = width if value == whole[2] else value

    return adjust


class Embedding:
    """torch's embedding; a row elsewhere is zero."""

    _schema = aten.embedding.default._schema
    _overloadname = "default"
    tags = aten.embedding.default.tags

    def __call__(self, table: Tensor, index: Tensor) -> Tensor:
        rows = aten.embedding(table, index.clamp(min=0))
        return rows * (index >= 0).unsqueeze(-1)


MM, BMM, E = "m k n", "b m k n", "e0 e1 e2"
CASES: dict[str, Case] = {
    "mm": Case(aten.mm.default, lambda s: (f(s[0], s[1]), f(s[1], s[2])), loops=MM),
    "mm of a transposed input": Case(
        aten.mm.default, lambda s: (f(s[1], s[0]).t(), f(s[1], s[2])), loops=MM
    ),
    "addmm": Case(
        aten.addmm.default,
        lambda s: (f(s[2]), f(s[0], s[1]), f(s[1], s[2])),
        added=(0,),
        loops=MM,
    ),
    "addmm of a matrix": Case(
        aten.addmm.default,
        lambda s: (f(s[0], s[2]), f(s[0], s[1]), f(s[1], s[2])),
        added=(0,),
        loops=MM,
    ),
    "mv": Case(aten.mv.default, lambda s: (f(s[0], s[1]), f(s[1])), loops="m k"),
    "dot": Case(aten.dot.default, lambda s: (f(s[0]), f(s[0])), loops="k"),
    "bmm": Case(aten.bmm.default, lambda s: (f(s[3], s[0], s[1]), f(s[3], s[1], s[2])), loops=BMM),
    "baddbmm": Case(
        aten.baddbmm.default,
        lambda s: (f(1, s[0], s[2]), f(s[3], s[0], s[1]), f(s[3], s[1], s[2])),
        added=(0,),
        loops=BMM,
    ),
    "linear": Case(
        aten.linear.default,
        lambda s: (f(s[0], s[1], s[2]), f(s[3], s[2]), f(s[3])),
        added=(2,),
        loops="m0 m1 k n",
    ),
    "convolution": Case(
        aten.convolution.default,
        conv_args,
        added=(2,),
        loops="n c k",
        kinds={"out0": LoopKind.HALO, "out1": LoopKind.HALO},
    ),
    "convolution of one position": Case(
        aten.convolution.default,
        lambda s: conv_args(s, kernel=1),
        added=(2,),
        loops="n c k out0 out1",
    ),
    "convolution of patches": Case(aten.convolution.default, patches, loops="n c k out0 out1"),
    "convolution in groups": Case(
        aten.convolution.default,
        lambda s: conv_args(s, groups=s[3]),
        groups_follow(8),
        added=(2,),
        loops="n g c k",
        kinds={"out0": LoopKind.HALO, "out1": LoopKind.HALO},
    ),
    "transposed convolution": Case(
        aten.convolution.default, transposed_args, added=(2,), loops="n c k"
    ),
    "convolution_backward": Case(
        aten.convolution_backward.default,
        lambda s: conv_backward(conv_args(s)),
        once=(("c", 2),),
        loops="n c k",
        kinds={"out0": LoopKind.HALO, "out1": LoopKind.HALO},
    ),
    "convolution_backward of patches": Case(
        aten.convolution_backward.default,
        lambda s: conv_backward(patches(s)),
        loops="n c k out0 out1",
    ),
    "convolution_backward in groups": Case(
        aten.convolution_backward.default,
        lambda s: conv_backward(conv_args(s, groups=s[3])),
        groups_follow(9),
        once=(("c", 2),),
        loops="n g c k",
        kinds={"out0": LoopKind.HALO, "out1": LoopKind.HALO},
    ),
    "transposed convolution_backward": Case(
        aten.convolution_backward.default,
        lambda s: conv_backward(transposed_args(s)),
        once=(("k", 2),),
        loops="n c k",
    ),
    "max_pool2d": Case(
        aten.max_pool2d_with_indices.default,
        lambda s: (f(s[0], s[1], 8, 6), [3, 3], [2, 2], [1, 1]),
        loops="n c",
        kinds={"out0": LoopKind.HALO, "out1": LoopKind.HALO},
    ),
    "max_pool2d_backward": Case(
        aten.max_pool2d_with_indices_backward.default,
        pool_args,
        loops="n c",
        kinds={"out0": LoopKind.HALO, "out1": LoopKind.HALO},
    ),
    "avg_pool2d": Case(
        aten.avg_pool2d.default, lambda s: (f(s[0], s[1], 8, 6), [2, 2]), loops="n c out0 out1"
    ),
    "avg_pool2d_backward": Case(
        aten.avg_pool2d_backward.default,
        lambda s: (f(s[0], s[1], 4, 3), f(s[0], s[1], 8, 6), [2, 2], [2, 2], [0, 0], False, True,
                   None),
        loops="n c out0 out1",
    ),
    "adaptive_avg_pool2d_backward": Case(
        aten._adaptive_avg_pool2d_backward.default,
        lambda s: (f(s[0], s[1], 4, 3), f(s[0], s[1], 8, 6)),
        loops="n c out0 out1",
    ),
    "layer_norm": Case(
        aten.native_layer_norm.default,
        lambda s: (f(s[0], s[1], s[2]), [s[2]], f(s[2]), f(s[2]), 1e-5),
        loops="e0 e1",
        kinds={"e2": LoopKind.INNER},
    ),
    "layer_norm_backward": Case(
        aten.native_layer_norm_backward.default,
        norm_args,
        loops="e0 e1",
        kinds={"e2": LoopKind.INNER},
    ),
    "group_norm": Case(
        aten.native_group_norm.default,
        lambda s: (f(s[0], s[1] * s[2], 3, 2), f(s[1] * s[2]), f(s[1] * s[2]), s[0], s[1] * s[2], 6,
                   s[1], 1e-5),
        group_norm_follows,
        loops="n g",
        kinds=dict.fromkeys(("c", "p0", "p1"), LoopKind.INNER),
    ),
    "group_norm_backward": Case(
        aten.native_group_norm_backward.default,
        group_args,
        group_norm_follows,
        loops="n g",
        kinds=dict.fromkeys(("c", "p0", "p1"), LoopKind.INNER),
    ),
    "batch_norm": Case(
        aten.native_batch_norm.default,
        lambda s: (f(s[0], s[1], s[2]), f(s[1]), f(s[1]), f(s[1]), f(s[1]), True, 0.1, 1e-5),
        loops="c",
        kinds=dict.fromkeys(("n", "p0"), LoopKind.SEMANTIC),
    ),
    "batch_norm of fixed statistics": Case(
        aten.native_batch_norm.default,
        lambda s: (f(s[0], s[1], s[2]), f(s[1]), f(s[1]), f(s[1]), f(s[1]).abs(), False, 0.1, 1e-5),
        loops="n c p0",
    ),
    "batch_norm_backward": Case(
        aten.native_batch_norm_backward.default,
        batch_args,
        loops="c",
        kinds=dict.fromkeys(("n", "p0"), LoopKind.SEMANTIC),
    ),
    "softmax": Case(
        aten._softmax.default,
        lambda s: (f(s[0], s[1], s[2]), -1, False),
        loops="e0 e1",
        kinds={"e2": LoopKind.INNER},
    ),
    "log_softmax_backward": Case(
        aten._log_softmax_backward_data.default,
        lambda s: (f(s[0], s[1]), aten._log_softmax(f(s[0], s[1]), 1, False), 1, torch.float64),
        loops="e0",
        kinds={"e1": LoopKind.INNER},
    ),
    "sum": Case(aten.sum.dim_IntList, lambda s: (f(s[0], s[1], s[2]), [0, -1]), loops=E),
    "sum that keeps": Case(aten.sum.dim_IntList, lambda s: (f(*s[:3]), [1], True), loops=E),
    "sum of all": Case(aten.sum.default, lambda s: (f(s[0], s[1]),), loops="e0 e1"),
    "mean": Case(aten.mean.dim, lambda s: (f(*s[:3]), [1, 2]), is_mean=True, loops=E),
    "mean of all": Case(aten.mean.default, lambda s: (f(s[0]),), is_mean=True, loops="e0"),
    "amax": Case(
        aten.amax.default, lambda s: (f(*s[:3]), [1]), loops="e0 e2", kinds={"e1": LoopKind.INNER}
    ),
    "argmax": Case(
        aten.argmax.default, lambda s: (f(*s[:3]), -1), loops="e0 e1", kinds={"e2": LoopKind.INNER}
    ),
    "max": Case(
        aten.max.dim, lambda s: (f(*s[:3]), 0), loops="e1 e2", kinds={"e0": LoopKind.INNER}
    ),
    "vector_norm": Case(
        aten.linalg_vector_norm.default,
        lambda s: (f(*s[:3]), 2, [1], True),
        loops="e0 e2",
        kinds={"e1": LoopKind.INNER},
    ),
    "var": Case(
        aten.var_mean.correction,
        lambda s: (f(*s[:3]), [2]),
        loops="e0 e1",
        kinds={"e2": LoopKind.INNER},
    ),
    "logsumexp": Case(
        aten.logsumexp.default,
        lambda s: (f(*s[:3]), [1], True),
        loops="e0 e2",
        kinds={"e1": LoopKind.INNER},
    ),
    "cumsum": Case(
        aten.cumsum.default, lambda s: (f(*s[:3]), 1), loops="e0 e2", kinds={"e1": LoopKind.INNER}
    ),
    "topk": Case(aten.topk.default, lambda s: (f(*s[:3]), 2, -1), loops="e0 e1"),
    "sort": Case(aten.sort.default, lambda s: (f(*s[:3]), 1), loops="e0 e2"),
    "add with broadcast": Case(
        aten.add.Tensor, lambda s: (f(*s[:3]), f(s[1], 1)), loops=E
    ),
    "mul of outer shapes": Case(aten.mul.Tensor, lambda s: (f(s[0], 1), f(1, s[1])), loops="e0 e1"),
    "gelu_backward": Case(
        aten.gelu_backward.default, lambda s: (f(*s[:2]), f(*s[:2])), loops="e0 e1"
    ),
    "masked_fill": Case(
        aten.masked_fill.Scalar, lambda s: (f(*s[:3]), f(s[1], s[2]) > 0, 0.5), loops=E
    ),
    "where": Case(
        aten.where.self, lambda s: (f(s[0], 1) > 0, f(s[0], s[1]), f(s[1])), loops="e0 e1"
    ),
    "dropout_backward": Case(
        aten.native_dropout_backward.default,
        lambda s: (f(*s[:2]), f(*s[:2]) > 0, 1.25),
        loops="e0 e1",
    ),
    "nll_loss": Case(
        aten.nll_loss_forward.default,
        lambda s: (f(s[0], s[1]), ints(s[1], s[0]), f(s[1]).abs(), 2, -1),
        shifted(1, "c"),
        loops="n c",
    ),
    "nll_loss of each sample": Case(
        aten.nll_loss_forward.default,
        lambda s: (f(s[0], s[1]), ints(s[1], s[0]), None, 0, -1),
        shifted(1, "c"),
        once=(("n", 1), ("c", 1)),
        loops="n c",
    ),
    "nll_loss_backward": Case(
        aten.nll_loss_backward.default,
        lambda s: (f(), f(s[0], s[1]), ints(s[1], s[0]), None, 1, -1, torch.tensor(7.0).double()),
        shifted(2, "c"),
        loops="n c",
    ),
    "mse_loss": Case(
        aten.mse_loss.default, lambda s: (f(*s[:2]), f(*s[:2]), 1), is_mean=True, loops="e0 e1"
    ),
    "mse_loss_backward": Case(
        aten.mse_loss_backward.default, lambda s: (f(), f(*s[:2]), f(*s[:2]), 2), loops="e0 e1"
    ),
    "embedding": Case(
        Embedding(), lambda s: (f(s[0], s[1]), ints(s[0], s[2], s[3])), shifted(1, "v"),
        loops="v w t0 t1",
    ),
    "embedding_backward": Case(
        aten.embedding_dense_backward.default,
        lambda s: (f(s[2], s[3], s[1]), ints(s[0], s[2], s[3]), s[0] + 10, -1, False),
        shifted(1, "v"),
        loops="v w t0 t1",
    ),
    "clone": Case(aten.clone.default, lambda s: (f(s[1], s[0]).t(),), loops="e0 e1"),
    "cat": Case(aten.cat.default, lambda s: ([f(s[0], s[1]), f(s[0], s[1] + 1)], 1), loops="e0"),
    "cat of equal ones": Case(
        aten.cat.default, lambda s: ([f(s[0], s[1]), f(s[0], s[1])], 1), loops="e0 e1"
    ),
    "cat with an empty tensor": Case(
        aten.cat.default, lambda s: ([f(0), f(s[0], s[1])], 1), loops="e0 e1"
    ),
    "histc": Case(aten.histc.default, lambda s: (f(s[0], s[1]), 4, -1, 1), loops="e0 e1"),
    "stack": Case(aten.stack.default, lambda s: ([f(s[0], s[1])] * 2, 1), loops="e0 e2"),
    "slice_backward": Case(
        aten.slice_backward.default,
        lambda s: (f(s[0], s[1] - 1), [s[0], s[1]], 1, 1, 99, 1),
        shapes_follow(1),
        loops="e0",
    ),
    "select_backward": Case(
        aten.select_backward.default,
        lambda s: (f(s[0], s[2]), [s[0], s[1], s[2]], 1, 0),
        shapes_follow(1),
        loops="e0 e2",
    ),
    "constant_pad": Case(
        aten.constant_pad_nd.default, lambda s: (f(s[0], s[1], s[2]), [0, 1], 0.0), loops="e0 e1"
    ),
    "slice_scatter": Case(
        aten.slice_scatter.default,
        lambda s: (f(s[0], s[1]), f(s[0], 1), 1, 0, 1),
        loops="e0",
    ),
    "triu": Case(aten.triu.default, lambda s: (f(*s[:3]), 1), loops="e0"),
    "flip": Case(aten.flip.default, lambda s: (f(*s[:3]), [1]), loops="e0 e2"),
    "roll": Case(aten.roll.default, lambda s: (f(*s[:3]), [1], [2]), loops="e0 e1"),
    "repeat": Case(aten.repeat.default, lambda s: (f(s[0], s[1]), [2, 1, 3]), loops="e1"),
    "gather": Case(
        aten.gather.default,
        lambda s: (f(*s[:3]), 1, ints(s[1], s[0], s[3], s[2])),
        loops="e0 e1 e2",
    ),
    "scatter": Case(
        aten.scatter.src,
        lambda s: (f(*s[:2]), 1, torch.argsort(f(*s[:2]), 1), f(*s[:2])),
        loops="e0",
    ),
    "scatter_add": Case(
        aten.scatter_add.default,
        lambda s: (f(*s[:3]), 1, ints(s[1], s[0], s[3], s[2]), f(s[0], s[3], s[2])),
        added=(0,),
        loops="e0 i e2",
    ),
    "index": Case(
        aten.index.Tensor,
        lambda s: (f(*s[:3]), [None, ints(s[1], s[3], 2)]),
        loops="e0 e2 p0 p1",
    ),
    "index at two places": Case(
        aten.index.Tensor,
        lambda s: (f(*s[:3]), [ints(s[0], s[3]), None, ints(s[2], s[3])]),
        loops="e1 p0",
    ),
    "index_put": Case(
        aten.index_put.default,
        lambda s: (f(*s[:3]), [None, ints(s[1], 1)], f(s[0], 1, s[2])),
        loops="e0 e2",
    ),
    "index_put that adds": Case(
        aten.index_put.default,
        lambda s: (f(*s[:3]), [None, ints(s[1], s[3])], f(s[0], s[3], s[2]), True),
        added=(0,),
        loops="e0 e2 p0",
    ),
    "index_select": Case(
        aten.index_select.default, lambda s: (f(*s[:3]), 1, ints(s[1], s[3])), loops="e0 e1 e2"
    ),
    "index_add": Case(
        aten.index_add.default,
        lambda s: (f(*s[:3]), 1, ints(s[1], s[3]), f(s[0], s[3], s[2])),
        added=(0,),
        loops="e0 e2 p",
    ),
    "upsample": Case(
        aten.upsample_nearest2d.default, lambda s: (f(s[0], s[1], 2, 2), [4, 4]), loops="e0 e1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@given(sizes=st.tuples(*[st.integers(2, 5)] * 4), seed=st.integers(0, 2**30))
@settings(max_examples=4, deadline=None)
def test_an_op_in_pieces_is_the_op(name: str, sizes: Sizes, seed: int) -> None:
    case = CASES[name]
    torch.manual_seed(seed)
    args = case.args(sizes)
    whole = mapped(args, Tensor.clone)
    outs = list(tensors_in(case.op(*whole)))
    nest = nest_of(case.op, args, outs)
    found = loop_sizes(nest)
    plain = [label for label in found if label not in nest.special]
    assert sorted(plain) == sorted(case.loops.split())
    assert {label: special.kind for label, special in nest.special.items()} == case.kinds
    for label in plain:
        if found[label] > 1:
            check_loop(case, args, nest, label, found[label])


@pytest.mark.parametrize("name", CASES)
def test_an_op_that_claims_it_works_on_sums_of_parts(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    args, other = (case.args((4, 3, 2, 5)) for _ in range(2))
    outs = list(tensors_in(case.op(*mapped(args, Tensor.clone))))
    nest = nest_of(case.op, args, outs)
    if not 0 < nest.linear_reads == nest.num_reads:
        return
    others = iter(tensors_in(other))
    summed = mapped(args, lambda tensor: tensor + next(others))
    parts = zip(outs, tensors_in(case.op(*other)), strict=True)
    for total, (a, b) in zip(tensors_in(case.op(*summed)), parts, strict=True):
        same(total, a + b)


LINEAR = {
    aten.add.Tensor: (f(3), f(3)),
    aten.sub.Tensor: (f(3), f(3)),
    aten.mul.Tensor: (f(3), 2.0),
    aten.div.Scalar: (f(3), 2.0),
    aten.neg.default: (f(3),),
    aten.clone.default: (f(3),),
    aten.sum.default: (f(3),),
    aten.cat.default: ([f(3), f(3)],),
}
NOT_LINEAR = {
    aten.add.Scalar: (f(3), 2.0),
    aten.mul.Tensor: (f(3), f(3)),
    aten.div.Tensor: (f(3), f(3)),
    aten.div.Tensor_mode: (f(3), 2.0),
    aten.rsub.Scalar: (f(3), 1),
    aten.relu.default: (f(3),),
    aten.amax.default: (f(3),),
    aten.mm.default: (f(3, 3), f(3, 3)),
}


@pytest.mark.parametrize("op", [*LINEAR, *NOT_LINEAR], ids=str)
def test_sums_of_parts_pass_what_is_linear_in_all_its_tensors_together(op: Any) -> None:
    for table, expected in ((LINEAR, True), (NOT_LINEAR, False)):
        if op in table:
            args = table[op]
            keywords = {"rounding_mode": "floor"} if op is aten.div.Tensor_mode else {}
            nest = nest_of(op, args, list(tensors_in(op(*args, **keywords))))
            assert (0 < nest.linear_reads == nest.num_reads) == expected


# what never runs while it is recorded: attention and recurrent layers


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    groups = query.shape[-3] // key.shape[-3]
    scores = query @ key.repeat_interleave(groups, -3).mT
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1) @ value.repeat_interleave(groups, -3), scores.logsumexp(-1)


def attend_backward(*args: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and mask from those of the output, as kernels have them."""
    grad, query, key, value, mask, out, sums = args
    groups = query.shape[-3] // key.shape[-3]
    wide_key, wide_value = (t.repeat_interleave(groups, -3) for t in (key, value))
    scores = query @ wide_key.mT
    scores = scores if mask is None else scores + mask
    weights = (scores - sums[..., None]).exp()
    inward = weights * (grad @ wide_value.mT - (grad * out).sum(-1, keepdim=True))

    def of_head(wide: Tensor) -> Tensor:
        return wide.unflatten(-3, (key.shape[-3], groups)).sum(-3)

    results = [inward @ wide_key, of_head(inward.mT @ query), of_head(weights.mT @ grad)]
    if mask is not None:
        results.append(inward.sum_to_size(mask.shape))
    return tuple(results)


ATTENTION = {
    "plain": ((2, 3, 4), (2, 3, 5), None),
    "grouped": ((2, 6, 4), (2, 3, 5), None),
    "one key head": ((2, 3, 4), (2, 1, 5), None),
    "masked": ((2, 3, 4), (2, 3, 5), (2, 1, 4, 5)),
    "mask of all samples": ((2, 6, 4), (2, 3, 5), (4, 5)),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_in_pieces_is_attention(name: str) -> None:
    torch.manual_seed(1)
    lead, key_lead, mask_shape = ATTENTION[name]
    query, key, value = f(*lead, 4), f(*key_lead, 4), f(*key_lead, 6)
    mask = None if mask_shape is None else f(*mask_shape)
    args = (query, key, value, mask)
    outs = list(attend(*args))
    nest = emitted_loops("attention", args, outs)
    assert nest is not None
    found = loop_sizes(nest)
    assert nest.special["kv"].kind == LoopKind.INNER
    plain = {label for label, size in found.items() if size > 1 and label != "kv"}
    expected = {"b0", "q"} | ({"h"} if key_lead[1] > 1 else set())
    expected |= {"g"} if lead[1] != key_lead[1] else set()
    assert plain == expected
    for label in plain:
        check_loop(Case(attend, tuple), args, nest, label, found[label])
    backward = (f(*outs[0].shape), *args, *outs)
    made = [*attend_backward(*backward)]
    nest = emitted_loops("attention_backward", backward, [*made, *[None] * (4 - len(made))])
    assert nest is not None
    assert not nest.special
    for label in (*plain, "kv"):
        check_loop(Case(attend_backward, tuple), backward, nest, label, loop_sizes(nest)[label])


@pytest.mark.parametrize("parts", [2, 5])
def test_keys_in_pieces_are_joined_by_what_the_rule_says_is_exchanged(parts: int) -> None:
    query, key, value = f(2, 3, 4, 8), f(2, 3, 5, 8), f(2, 3, 5, 8)
    out, sums = attend(query, key, value, None)
    pieces = [attend(query, key[:, :, part], value[:, :, part], None) for part in cuts(5, parts)]
    top = torch.stack([own for _, own in pieces]).amax(0)  # a maximum of each row
    total = sum((own - top).exp() for _, own in pieces)  # a sum of each row
    joined = sum(o * (own - top).exp()[..., None] for o, own in pieces) / total[..., None]
    same(joined, out)
    same(top + total.log(), sums)
    nest = emitted_loops("attention", (query, key, value, None), (out, sums))
    assert nest is not None
    assert nest.special["kv"].inner == out.numel() * 8 + 2 * 4 * sums.numel()


def test_torchs_fused_attention_of_cpus_has_the_same_loops() -> None:
    query, key, value = (f(2, 3, 4, 8) for _ in range(3))
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    outs = list(op(query, key, value))
    nest = nest_of(op, (query, key, value), outs)
    emitted = emitted_loops("attention", (query, key, value, None), outs)
    assert nest == emitted
    for label in ("b0", "h", "q"):
        check_loop(Case(op, tuple), (query, key, value), nest, label, loop_sizes(nest)[label])
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    args = (f(*outs[0].shape), query, key, value, *outs, 0.0, False)
    nest = nest_of(back, args, list(back(*args)))
    for label in ("b0", "h"):
        check_loop(Case(back, tuple), args, nest, label, loop_sizes(nest)[label])


def lstm(x: Tensor, h0: Tensor, c0: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch._VF.lstm(x, (h0, c0), list(weights), True, 1, 0.0, False, False, False)  # type: ignore[attr-defined,no-any-return]


def test_a_recurrent_layer_is_split_by_samples_and_its_units_gather_the_state() -> None:
    steps, batch, width, hidden = 3, 4, 5, 6
    x, h0, c0 = f(steps, batch, width), f(1, batch, hidden), f(1, batch, hidden)
    weights = [f(4 * hidden, width), f(4 * hidden, hidden), f(4 * hidden), f(4 * hidden)]
    args = (x, h0, c0, *weights)
    outs = [*lstm(*args)]
    nest = emitted_loops("lstm_layer", args, (*outs, None))
    assert nest is not None
    check_loop(Case(lstm, tuple), args, nest, "b", batch)
    # units: each part runs a step on the state of all, which is gathered after it
    used = {id(use.tensor): use for use in nest.uses}
    shares = [
        [piece(used[id(t)], t, "h", part) for t in (c0, *weights)] for part in cuts(hidden, 3)
    ]
    state, gathered = h0, 0
    for step in x:
        parts = []
        for share in shares:
            cell, w_ih, w_hh, b_ih, b_hh = share
            i, g, c, o = (step @ w_ih.T + b_ih + state[0] @ w_hh.T + b_hh).chunk(4, -1)
            share[0] = g.sigmoid() * cell + i.sigmoid() * c.tanh()
            parts.append(o.sigmoid() * share[0].tanh())
        state = torch.cat(parts, -1)
        gathered += state.numel() * state.element_size()
    same(state, outs[1])
    assert nest.special["h"].kind == LoopKind.INNER
    assert nest.special["h"].inner == gathered // 2  # an all-gather is half an all-reduce


def test_the_backward_of_a_recurrent_layer_is_split_by_samples() -> None:
    steps, batch, width, hidden = 3, 4, 5, 6
    x, h0, c0 = f(steps, batch, width), f(1, batch, hidden), f(1, batch, hidden)
    weights = [f(4 * hidden, width), f(4 * hidden, hidden), f(4 * hidden), f(4 * hidden)]
    grads = f(steps, batch, hidden), f(1, batch, hidden), f(1, batch, hidden)

    def backward(*args: Tensor) -> tuple[Tensor, ...]:
        given, leaves = args[:3], [t.detach().requires_grad_() for t in args[3:-2]]
        return torch.autograd.grad(lstm(*leaves), leaves, given)  # type: ignore[arg-type]

    args = (*grads, x, h0, c0, *weights, lstm(x, h0, c0, *weights)[0], f(steps, batch, 1, 36))
    nest = emitted_loops("lstm_layer_backward", args, backward(*args))
    assert nest is not None
    made = backward(*args)
    uses = {id(use.tensor): use for use in nest.uses}
    assert len(uses) == len(args) + len(made)
    nest = emitted_loops("lstm_layer_backward", args, made)
    assert nest is not None
    check_loop(Case(backward, tuple), args, nest, "b", batch)


# collectives inside an op, and borders


def stats(inner: int, *exchanged: Tensor) -> None:
    """What is exchanged is fp32 on a real device."""
    assert inner == 4 * sum(tensor.numel() for tensor in exchanged)


def whole_outputs(nest: Nest) -> list[bool]:
    return [use.whole for use in nest.uses if use.is_output]


def test_softmax_in_pieces_exchanges_a_maximum_and_a_sum_of_each_row() -> None:
    x = f(4, 6)
    for op in (aten._softmax.default, aten._log_softmax.default):
        out = op(x, 1, False)
        nest = nest_of(op, (x, 1, False), [out])
        parts = x.split(2, 1)
        top = torch.stack([p.amax(1) for p in parts]).amax(0)
        total = torch.stack([(p - top[:, None]).exp().sum(1) for p in parts]).sum(0)
        own = [p - top[:, None] - total.log()[:, None] for p in parts]
        joined = torch.cat(own, 1)
        same(joined if op is aten._log_softmax.default else joined.exp(), out)
        stats(nest.special["e1"].inner, top, total)


def test_the_backward_of_softmax_in_pieces_exchanges_a_sum_of_each_row() -> None:
    grad, out = f(4, 6), f(4, 6).softmax(1)
    op = aten._softmax_backward_data.default
    args = (grad, out, 1, torch.float64)
    nest = nest_of(op, args, [op(*args)])
    pairs = [*zip(grad.split(2, 1), out.split(2, 1), strict=True)]
    total = torch.stack([(g * o).sum(1) for g, o in pairs]).sum(0)
    same(torch.cat([o * (g - total[:, None]) for g, o in pairs], 1), op(*args))
    stats(nest.special["e1"].inner, total)


def test_layer_norm_in_pieces_exchanges_two_sums_of_each_row() -> None:
    x, weight, bias = f(4, 6), f(6), f(6)
    args = (x, [6], weight, bias, 1e-5)
    out, mean, rstd = aten.native_layer_norm(*args)
    nest = nest_of(aten.native_layer_norm.default, args, [out, mean, rstd])
    parts = x.split(2, 1)
    first = torch.stack([p.sum(1, keepdim=True) for p in parts]).sum(0)
    second = torch.stack([(p * p).sum(1, keepdim=True) for p in parts]).sum(0)
    same(first / 6, mean)
    scale = (second / 6 - (first / 6) ** 2 + 1e-5).rsqrt()
    same(scale, rstd)
    whole = zip(parts, weight.split(2), bias.split(2), strict=True)
    same(torch.cat([(p - first / 6) * scale * w + b for p, w, b in whole], 1), out)
    stats(nest.special["e1"].inner, first, second)
    assert whole_outputs(nest) == [False, True, True]


@pytest.mark.parametrize(
    ("op", "args", "joined"),
    [
        (aten.amax.default, ([1],), lambda parts: torch.stack(parts).amax(0)),
        (aten.logsumexp.default, ([1],), lambda parts: torch.stack(parts).logsumexp(0)),
        (aten.linalg_vector_norm.default, (2, [1]), lambda parts: torch.stack(parts).norm(dim=0)),
    ],
    ids=str,
)
def test_reductions_that_are_no_sums_are_settled_inside(
    op: Any, args: tuple[Any, ...], joined: Callable[[list[Tensor]], Tensor]
) -> None:
    x = f(4, 6)
    out = op(x, *args)
    nest = nest_of(op, (x, *args), [out])
    same(joined([op(part, *args) for part in x.split(2, 1)]), out)
    assert nest.special["e1"].inner == out.numel() * out.element_size()
    assert whole_outputs(nest) == [True]


def test_a_running_sum_in_pieces_exchanges_the_totals_of_the_parts() -> None:
    x = f(4, 6)
    out = aten.cumsum(x, 1)
    nest = nest_of(aten.cumsum.default, (x, 1), [out])
    done, before = [], torch.zeros(4, 1, dtype=x.dtype)
    for part in x.split(2, 1):
        done.append(part.cumsum(1) + before)
        before = before + part.sum(1, keepdim=True)
    same(torch.cat(done, 1), out)
    assert nest.special["e1"].inner == before.numel() * before.element_size()


def test_batch_norm_of_a_part_of_the_batch_is_another_function_unless_sums_are_exchanged() -> None:
    x, weight, bias = f(4, 3, 5), f(3), f(3)
    args = (x, weight, bias, None, None, True, 0.1, 1e-5)
    outs = [*aten.native_batch_norm(*args)]
    nest = nest_of(aten.native_batch_norm.default, args, outs)
    parts = x.split(2)
    alone = torch.cat([aten.native_batch_norm(p, *args[1:])[0] for p in parts])
    assert not torch.allclose(alone, outs[0])
    first = torch.stack([p.sum((0, 2)) for p in parts]).sum(0)
    second = torch.stack([(p * p).sum((0, 2)) for p in parts]).sum(0)
    mean, scale = first / 20, (second / 20 - (first / 20) ** 2 + 1e-5).rsqrt()
    joined = (x - mean[:, None]) * (scale * weight)[:, None] + bias[:, None]
    same(joined, outs[0])
    assert nest.special["n"].kind == nest.special["p0"].kind == LoopKind.SEMANTIC
    stats(nest.special["n"].inner, first, second)
    assert whole_outputs(nest) == [False, True, True]
    back = batch_args((4, 3, 5))
    made = [*aten.native_batch_norm_backward(*back)]
    nest = nest_of(aten.native_batch_norm_backward.default, back, made)
    assert whole_outputs(nest) == [False, False, False]  # the weights' gradients are sums


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [(12, 3, 1, 1), (12, 3, 2, 1), (12, 5, 1, 2), (16, 7, 2, 3)],
)
def test_a_convolution_over_a_part_of_the_positions_needs_its_neighbours_borders(
    size: int, kernel: int, stride: int, padding: int
) -> None:
    data, weight = f(2, 3, size, 6), f(4, 3, kernel, 1)
    args = (data, weight, None, [stride, 1], [padding, 0], [1, 1], False, [0, 0], 1)
    out = aten.convolution(*args)
    nest = nest_of(aten.convolution.default, args, [out])
    special = nest.special["out0"]
    assert special.kind == LoopKind.HALO
    row = 2 * 3 * 6 * 8
    assert special.inner % row == 0
    border = special.inner // row
    padded = torch.nn.functional.pad(data, (0, 0, padding, padding))
    parts = []
    for part in cuts(out.shape[2], 2):
        first, last = part.start * stride - padding, (part.stop - 1) * stride - padding + kernel
        own = slice(part.start * stride, part.stop * stride)
        # no part looks further than the border into its neighbour
        assert part.start == 0 or own.start - first <= border
        assert part.stop == out.shape[2] or last - own.stop <= border
        parts.append(aten.convolution(padded[:, :, first + padding : last + padding], weight, None,
                                      [stride, 1], [0, 0], [1, 1], False, [0, 0], 1))  # fmt: skip
    same(torch.cat(parts, 2), out)


def test_an_update_in_pieces_is_the_update() -> None:
    whole, grad = f(4, 6), f(4, 6)

    def updated(parameter: Tensor, gradient: Tensor) -> Tensor:
        leaf = torch.nn.Parameter(parameter.clone())
        leaf.grad = gradient.clone()
        optimizer = torch.optim.Adam([leaf])
        optimizer.step()
        optimizer.step()
        return leaf.detach()

    after = updated(whole, grad)
    nest = update_loops(whole, grad)
    uses = (*nest.uses[:2], nest.uses[2]._replace(tensor=after))
    for label, size in (("e0", 4), ("e1", 6)):
        check_loop(Case(updated, tuple), (whole, grad), nest._replace(uses=uses), label, size)
