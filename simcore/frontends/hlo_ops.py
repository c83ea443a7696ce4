"""Which loops an XLA op runs over, and what it costs: the table of rules.

An op without a rule has no loops and is costed by the bytes it moves. Operations are counted as
XLA counts them: one for an element of a pointwise op or a reduction, two for a multiply-add, of a
convolution only those that do not fall on padding.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from simcore.errors import GraphError
from simcore.frontends.hlo_nest import (
    CUT,
    Label,
    Nest,
    Special,
    Use,
    numbered,
    reshaped,
    without,
)
from simcore.frontends.hlo_program import FLOATS
from simcore.frontends.hlo_step import POINTWISE, VIEWS, Op, Step
from simcore.loops import LoopKind
from simcore.signature import OpClass

_Rule = Callable[[Op, Step], Nest]
_COPIES = frozenset({"convert", "negate", "real", "imag"})


def nest_of(op: Op, step: Step) -> Nest:
    """Returns the loops and the cost of an op; one without a rule can be split nowhere.

    Raises:
        GraphError: a view whose shapes do not fit; names file, line and op.
    """
    rule = _RULES.get(op.op) or (_pointwise if op.op in POINTWISE else _random_or_unknown)
    try:
        nest = rule(op, step)
    except (IndexError, KeyError, TypeError, ValueError):  # a form that the rule does not know
        nest = _unknown(op, step)
    if all(len(use.labels) == len(_shape(step, use.value)) for use in nest.uses):
        if nest.uses or op.op not in VIEWS:
            return nest
    elif op.op not in VIEWS:
        return _unknown(op, step)
    raise GraphError(
        f"{step.source}: line {op.line}: {op.op}: its attributes do not fit its shapes"
    )


def _shape(step: Step, value: int) -> tuple[int, ...]:
    return step.values[value].shape


def _read(step: Step, value: int, labels: Sequence[Label]) -> tuple[Use, ...]:
    """Returns an input, nothing where it is a constant."""
    if value in step.constants:
        return ()
    return (Use(value, tuple(labels)),)


def _written(value: int, labels: Sequence[Label], *, whole: bool = False) -> tuple[Use, ...]:
    return (Use(value, tuple(labels), True, whole),)


def _pointwise(op: Op, step: Step) -> Nest:
    """Every element alone; a scalar goes to all."""
    out = op.outputs[0]
    names = numbered("e", len(_shape(step, out)))
    uses: tuple[Use, ...] = ()
    for value in op.inputs:
        uses += _read(step, value, names if _shape(step, value) else ())
    for value in op.outputs:
        uses += _written(value, names)
    op_class = OpClass.COPY if op.op == "convert" else OpClass.POINTWISE
    floats = all(step.values[v].dtype in FLOATS for v in (*op.inputs, out))
    is_linear = floats and _is_linear(op, step)
    factor = 0.0 if op.op in _COPIES else 1.0
    return Nest(uses, op_class, walked=out, factor=factor, is_linear=is_linear)


def _is_linear(op: Op, step: Step) -> bool:
    varying = [value for value in op.inputs if value not in step.constants]
    if op.op in {"add", "subtract"}:
        return len(varying) == 2
    if op.op == "multiply":
        return len(varying) == 1
    if op.op == "divide":
        return op.inputs[1] in step.constants
    return op.op in {"negate", "convert"}


def _dot(op: Op, step: Step) -> Nest:
    """Products: batch, free and contracted dimensions; the result has them in this order."""
    left, right = op.inputs
    a, b = list[str]([""] * len(_shape(step, left))), list[str]([""] * len(_shape(step, right)))
    found: dict[str, list[str]] = {"b": [], "m": [], "n": [], "k": []}
    for key, kind in (("batch", "b"), ("contracting", "k")):
        pairs = zip(
            op.attributes.get(f"lhs_{key}_dims", ()), op.attributes.get(f"rhs_{key}_dims", ()),
            strict=True,
        )  # fmt: skip
        for index, (i, j) in enumerate(pairs):
            a[i] = b[j] = f"{kind}{index}"
            found[kind].append(f"{kind}{index}")
    for side, kind in ((a, "m"), (b, "n")):
        for place, label in enumerate(side):
            if not label:
                side[place] = f"{kind}{len(found[kind])}"
                found[kind].append(side[place])
    result = (*found["b"], *found["m"], *found["n"])
    uses = (*_read(step, left, a), *_read(step, right, b), *_written(op.outputs[0], result))
    if not found["b"]:
        del found["b"]
    op_class = OpClass.BATCHED_MATMUL if "b" in found else OpClass.MATMUL
    return Nest(uses, op_class, {key: tuple(labels) for key, labels in found.items()})


def _reduce(op: Op, step: Step) -> Nest:
    """Sums leave parts; other reductions are settled inside."""
    count = len(op.outputs)
    data = op.inputs[:count]
    gone = frozenset(op.attributes["dimensions"])
    names = numbered("e", len(_shape(step, data[0])))
    kept = tuple(name for place, name in enumerate(names) if place not in gone)
    is_sum = op.attributes.get("reducer") == "add" and count == 1
    uses: tuple[Use, ...] = ()
    for value in data:
        uses += _read(step, value, names)
    for value in op.outputs:
        uses += _written(value, kept, whole=not is_sum)
    special = Special(LoopKind.INNER, op.outputs[0])
    return Nest(
        uses, OpClass.REDUCTION, walked=data[0], is_linear=is_sum,
        special={} if is_sum else {names[dim]: special for dim in gone},
    )  # fmt: skip


def _view(op: Op, step: Step) -> Nest:
    """What moves nothing: the labels say which dimensions are the same."""
    source, out = op.inputs[0], op.outputs[0]
    before, after = _shape(step, source), _shape(step, out)
    names: tuple[Label, ...] = numbered("e", len(after))
    dims = op.attributes.get("dimensions", ())
    if op.op == "broadcast":
        held: tuple[Label, ...] = tuple(
            names[dim] if before[place] == after[dim] else CUT for place, dim in enumerate(dims)
        )
    elif op.op == "transpose":
        held = tuple(names[dims.index(place)] for place in range(len(before)))
    elif op.op == "slice":
        held = without(names, (d for d, size in enumerate(after) if size != before[d]))
        names = held if len(op.attributes["stride"]) == len(after) else ()
    elif op.op == "bitcast":
        held, names = _same_bytes(op, step)
    else:
        held, names = reshaped(before, after)
    uses = (*_read(step, source, held), *_written(out, names))
    return Nest(uses, OpClass.COPY, walked=out, factor=0.0, is_linear=True)


def _same_bytes(op: Op, step: Step) -> tuple[tuple[Label, ...], tuple[Label, ...]]:
    """A bitcast keeps the bytes: their order follows from the layouts."""
    orders, shapes = [], []
    for value in (op.inputs[0], op.outputs[0]):
        shape, layout = step.values[value].shape, step.values[value].layout
        order = tuple(reversed(layout)) if layout else tuple(range(len(shape)))
        orders.append(order)
        shapes.append(tuple(shape[dim] for dim in order))
    labels = reshaped(*shapes)
    held, made = (
        tuple(by[order.index(dim)] for dim in range(len(order)))
        for by, order in zip(labels, orders, strict=True)
    )
    return held, made


def _joined(op: Op, step: Step) -> Nest:
    """One after the other along a dimension, which is split in each if they are alike."""
    out, dim = op.outputs[0], op.attributes["dimensions"][0]
    names = numbered("e", len(_shape(step, out)))
    sizes = [_shape(step, value)[dim] for value in op.inputs]
    alike = len(set(sizes)) == 1 and not step.constants.intersection(op.inputs)
    inside: Label = ((CUT, len(sizes)), (names[dim], sizes[0])) if alike else CUT
    held = names if alike else without(names, (dim,))
    made = tuple(inside if place == dim else name for place, name in enumerate(names))
    uses: tuple[Use, ...] = ()
    for value in op.inputs:
        uses += _read(step, value, held)
    uses += _written(out, made)
    return Nest(uses, OpClass.COPY, walked=out, factor=0.0, is_linear=alike)


def _aligned(op: Op, step: Step) -> Nest:
    """Values of one rank; dimensions of another size, or those that are named, cannot be split."""
    out = op.outputs[0]
    shape = _shape(step, out)
    named = op.attributes.get("dimensions", ()) if op.op in {"reverse", "sort"} else ()
    ranked = [value for value in op.inputs if len(_shape(step, value)) == len(shape) > 0]
    differ = {d for v in ranked for d, size in enumerate(_shape(step, v)) if size != shape[d]}
    padded = {
        d
        for key in ("low", "high", "interior")
        for d, size in enumerate(op.attributes.get(key, ()))
        if size
    }
    names = without(numbered("e", len(shape)), {*named, *differ, *padded})
    uses: tuple[Use, ...] = ()
    for value in op.inputs:
        fits = value in ranked
        uses += _read(step, value, names if fits else (CUT,) * len(_shape(step, value)))
    for value in op.outputs:
        uses += _written(value, names)
    return Nest(uses, OpClass.COPY, walked=out, factor=0.0)


def _windowed(op: Op, step: Step) -> Nest:
    """Pooling and its backward: dimensions with a window of 1 pass."""
    out, size = op.outputs[0], op.attributes["size"]
    names = numbered("e", len(_shape(step, out)))
    held = without(names, (d for d, window in enumerate(size) if window != 1))
    uses: tuple[Use, ...] = ()
    for value in op.inputs:
        uses += _read(step, value, held if _shape(step, value) else ())
    uses += _written(out, held)
    spreads = op.op == "select_and_scatter"
    walked = op.inputs[1] if spreads else out
    return Nest(uses, OpClass.POOLING, walked=walked, factor=float(max(1, prod(size) - 1)))


def _gather(op: Op, step: Step) -> Nest:
    """Rows of a table; a part of the rows gives zeros for the others."""
    table, index, *_ = op.inputs
    out, a = op.outputs[0], op.attributes
    held, at, made = _positions(op, step, (table, index, out), a["offset_dims"])
    sizes, shape = a["slice_sizes"], _shape(step, table)
    inside = [d for d in range(len(shape)) if d not in {*a["collapsed_slice_dims"], *_batching(a)}]
    for dim, place in zip(inside, a["offset_dims"], strict=True):
        whole = sizes[dim] == shape[dim]
        held[dim] = made[place] = f"w{dim}" if whole else CUT
    uses = (*_read(step, table, held), *_read(step, index, at), *_written(out, made))
    return Nest(uses, OpClass.EMBEDDING, walked=out, factor=0.0)


def _scatter(op: Op, step: Step) -> Nest:
    """Sums at places of a table; other ways of writing are split only beside the places."""
    table, index, given = op.inputs[:3]
    out, a = op.outputs[0], op.attributes
    held, at, made = _positions(op, step, (table, index, given), a["update_window_dims"])
    shape, window = _shape(step, table), _shape(step, given)
    outside = {*a["inserted_window_dims"], *_batching(a)}
    inside = [d for d in range(len(shape)) if d not in outside]
    for dim, place in zip(inside, a["update_window_dims"], strict=True):
        whole = window[place] == shape[dim]
        held[dim] = made[place] = f"w{dim}" if whole else CUT
    if a.get("reducer") != "add":
        at = [CUT if label[:1] == "p" else label for label in at]
        made = [CUT if label[:1] == "p" else label for label in made]
        held = [CUT if label == "v" else label for label in held]
    uses = (*_read(step, table, held), *_read(step, index, at), *_read(step, given, made))
    walked = index if given in step.constants else given
    return Nest((*uses, *_written(out, held)), OpClass.EMBEDDING, walked=walked)


def _batching(attributes: Any) -> tuple[int, ...]:
    found = attributes.get("operand_batching_dims", ()) or attributes.get("input_batching_dims", ())
    return tuple(found)


def _positions(
    op: Op, step: Step, values: tuple[int, int, int], window: Sequence[int]
) -> tuple[list[str], list[str], list[str]]:
    """Labels table, indices and rows but for the dimensions that a row has."""
    a = op.attributes
    table, index, rows = (len(_shape(step, value)) for value in values)
    held, at, made = [CUT] * table, [CUT] * index, [CUT] * rows
    outer = [dim for dim in range(rows) if dim not in window]
    places = [dim for dim in range(index) if dim != a["index_vector_dim"]]
    for number, (place, dim) in enumerate(zip(places, outer, strict=True)):
        at[place] = made[dim] = f"p{number}"
    paired = a.get("start_indices_batching_dims", ()) or a.get("scatter_indices_batching_dims", ())
    for dim, place in zip(_batching(a), paired, strict=True):
        label = f"b{dim}"
        made = [label if each == at[place] else each for each in made]
        at[place] = held[dim] = label
    chosen_dims = a.get("start_index_map", ()) or a.get("scatter_dims_to_operand_dims", ())
    gone = a.get("collapsed_slice_dims", ()) or a.get("inserted_window_dims", ())
    if len(chosen_dims) == 1 and chosen_dims[0] in gone:
        held[chosen_dims[0]] = "v"
    return held, at, made


def _convolution(op: Op, step: Step) -> Nest:
    """Samples and channels; positions only where the window is one position."""
    a, (data, weight), out = op.attributes, op.inputs, op.outputs[0]
    shapes = [_shape(step, value) for value in (data, weight, out)]
    lhs, rhs, res = a["dim_labels"]
    groups, samples = a.get("feature_group_count", 1), a.get("batch_group_count", 1)
    n, k = shapes[2][res.index("b")], shapes[1][rhs.index("o")]
    c = shapes[1][rhs.index("i")]
    many = groups * samples
    outward: Label = (("g", many), ("k", k // many)) if many > 1 else "k"
    inward: Label = (("g", groups), ("c", c)) if groups > 1 else "c"
    rows: Label = (("g", samples), ("n", n)) if samples > 1 else "n"
    labels = [{"b": rows, "f": inward}, {"o": outward, "i": "c"}, {"b": "n", "f": outward}]
    valid, positions, window = _pairs(op, shapes)
    for digit in "".join(sorted(letter for letter in res if letter.isdigit())):
        plain = shapes[1][rhs.index(digit)] == 1 and _same(shapes, (lhs, res), digit)
        for side in (labels[0], labels[2]):
            side[digit] = f"out{digit}" if plain else CUT
        labels[1][digit] = CUT
    held, kept, made = (
        tuple(by[letter] for letter in order)
        for by, order in zip(labels, (lhs, rhs, res), strict=True)
    )
    uses = (*_read(step, data, held), *_read(step, weight, kept), *_written(out, made))
    dims = {"n": ("n",), "k": ("g", "k"), "c": ("c",)}
    return Nest(
        uses, OpClass.CONVOLUTION, dims, factor=valid / max(1, positions * window),
        given={"out": positions, "filter": window},
    )  # fmt: skip


def _same(shapes: Sequence[Sequence[int]], orders: tuple[str, str], digit: str) -> bool:
    return shapes[0][orders[0].index(digit)] == shapes[2][orders[1].index(digit)]


def _pairs(op: Op, shapes: Sequence[Sequence[int]]) -> tuple[int, int, int]:
    """Returns pairs of output and window positions that meet data, and how many of each."""
    a = op.attributes
    lhs, rhs, res = a["dim_labels"]
    valid = positions = window = 1
    for place, digit in enumerate(sorted(letter for letter in res if letter.isdigit())):
        sizes = (
            shapes[0][lhs.index(digit)], shapes[1][rhs.index(digit)], shapes[2][res.index(digit)]
        )  # fmt: skip
        at = (
            np.arange(sizes[2])[:, None] * a["stride"][place]
            + np.arange(sizes[1]) * a["rhs_dilation"][place]
            - a["low"][place]
        )
        step = a["lhs_dilation"][place]
        meets = (at >= 0) & (at <= (sizes[0] - 1) * step) & (at % step == 0)
        valid *= int(meets.sum())
        positions *= sizes[2]
        window *= sizes[1]
    return valid, positions, window


def _random_or_unknown(op: Op, step: Step) -> Nest:
    """Random numbers come in parts; nothing is known of other ops."""
    if not op.op.startswith("rng"):
        return _unknown(op, step)
    uses: tuple[Use, ...] = ()
    for value in op.inputs:
        uses += _read(step, value, (CUT,) * len(_shape(step, value)))
    for value in op.outputs:
        uses += _written(value, numbered(f"o{value}_", len(_shape(step, value))))
    return Nest(uses, OpClass.POINTWISE, walked=op.outputs[-1])


def _unknown(op: Op, step: Step) -> Nest:
    return Nest((), OpClass.OTHER, walked=op.outputs[0])


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(VIEWS, _view),
    "dot": _dot, "reduce": _reduce, "concatenate": _joined, "pad": _aligned,
    "reverse": _aligned, "sort": _aligned, "dynamic_slice": _aligned,
    "dynamic_update_slice": _aligned, "reduce_window": _windowed, "select_and_scatter": _windowed,
    "gather": _gather, "scatter": _scatter, "convolution": _convolution,
}  # fmt: skip
