"""Attributes of StableHLO statements -> HLO's names of ops and attributes."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from simcore.errors import GraphError

_NAMES = {
    "dot_general": "dot", "broadcast_in_dim": "broadcast", "bitcast_convert": "bitcast_convert",
    "func.call": "call", "composite": "call", "case": "conditional", "if": "conditional",
    "dynamic_update_slice": "dynamic_update_slice", "optimization_barrier": "opt_barrier",
    "rng_bit_generator": "rng_bit_generator",
}  # fmt: skip
_LIST = r"\s*=?\s*(?:array<i64(?::\s*([^>]*))?>|\[([^\]]*)\]|dense<\[?([^\]>]*)\]?>)"
_Attributes = Mapping[str, Any]


def hlo_name(full: str) -> str:
    """Returns HLO's name of an op, with underscores, for example ``dot`` of ``dot_general``."""
    short = full.rpartition(".")[2]
    return _NAMES.get(short, short)


def attributes_of(op: str, text: str, where: str) -> _Attributes:
    """Returns what `hlo_ops` needs to know of a statement.

    Args:
        op: HLO's name.
        text: the statement between op and types.
        where: file, line and op, for messages.

    Raises:
        GraphError: an attribute that the op needs is missing or cannot be read.
    """
    reader = _READERS.get(op)
    if reader is None:
        return {}
    try:
        return reader(text)
    except (ValueError, IndexError, AttributeError):
        raise GraphError(f"{where}: an attribute is missing or cannot be read") from None


def _numbers(text: str, key: str) -> tuple[int, ...]:
    """Returns a list of whole numbers, empty where it is not given."""
    found = re.search(rf"(?<![\w]){key}{_LIST}", text)
    if found is None:
        return ()
    inside = next((group for group in found.groups() if group is not None), "")
    return tuple(int(part) for part in inside.split(",") if part.strip())


def _number(text: str, key: str, default: int) -> int:
    found = re.search(rf"(?<![\w]){key}\s*=\s*(-?\d+)", text)
    return int(found.group(1)) if found else default


def _dot(text: str) -> _Attributes:
    found = {}
    for key, left, right in (
        ("contracting_dims", "lhs_contracting_dims", "rhs_contracting_dims"),
        ("batching_dims", "lhs_batch_dims", "rhs_batch_dims"),
    ):
        pair = re.search(rf"{key} = \[([\d, ]*)\] x \[([\d, ]*)\]", text)
        sides = pair.groups() if pair else ("", "")
        for name, side in zip((left, right), sides, strict=True):
            found[name] = tuple(int(part) for part in side.split(",") if part.strip())
    if "#stablehlo.dot" in text:  # the generic form
        for key in ("lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch"):
            long = key.replace("batch", "batching") + "_dimensions"
            found[f"{key}_dims"] = _numbers(text, long)
    return found


def _dimensions(text: str) -> _Attributes:
    for key in ("dims", "dim", "broadcast_dimensions", "permutation", "dimensions", "dimension"):
        if re.search(rf"(?<![\w]){key}\s*=", text):
            found = _numbers(text, key)
            return {"dimensions": found or _single(text, key)}
    return {"dimensions": ()}


def _single(text: str, key: str) -> tuple[int, ...]:
    value = _number(text, key, -1)
    return (value,) if value >= 0 else ()


def _iota(text: str) -> _Attributes:
    return {"iota_dimension": _number(text, "(?:dim|iota_dimension)", 0)}


def _constant(text: str) -> _Attributes:
    found = re.search(r"dense<(.*)>", text)
    return {"value": found.group(1) if found else "?"}


def _slice(text: str) -> _Attributes:
    found = re.search(r"\[([\d:, ]*)\]", text)
    if found is None:
        raise ValueError(text)
    parts = [[int(n) for n in part.split(":")] for part in found.group(1).split(",") if part]
    return {
        "start": tuple(part[0] for part in parts),
        "limit": tuple(part[1] for part in parts),
        "stride": tuple(part[2] if len(part) > 2 else 1 for part in parts),
    }


def _pad(text: str) -> _Attributes:
    return {key: _numbers(text, key) for key in ("low", "high", "interior")}


def _convolution(text: str) -> _Attributes:
    labels = re.search(r"dim_numbers = \[([^\]]*)\]x\[([^\]]*)\]->\[([^\]]*)\]", text)
    if labels is None:
        raise ValueError(text)
    pads = re.search(r"pad = \[((?:\[[^\]]*\],?\s*)*)\]", text)
    pairs = re.findall(r"\[\s*(-?\d+),\s*(-?\d+)\]", pads.group(1)) if pads else []
    sides = tuple("".join(part.replace(",", " ").split()) for part in labels.groups())
    rank = len(sides[0]) - 2
    ones, zeros = (1,) * rank, ((0, 0),) * rank
    return {
        "dim_labels": sides,
        "stride": _numbers(text, "stride") or ones,
        "low": tuple(int(pair[0]) for pair in pairs or zeros),
        "high": tuple(int(pair[1]) for pair in pairs or zeros),
        "lhs_dilation": _numbers(text, "lhs_dilate") or ones,
        "rhs_dilation": _numbers(text, "rhs_dilate") or ones,
        "feature_group_count": _number(text, "feature_group_count", 1),
        "batch_group_count": _number(text, "batch_group_count", 1),
    }


def _gather(text: str) -> _Attributes:
    keys = ("offset_dims", "collapsed_slice_dims", "operand_batching_dims",
            "start_indices_batching_dims", "start_index_map", "slice_sizes")  # fmt: skip
    found: dict[str, Any] = {key: _numbers(text, key) for key in keys}
    return found | {"index_vector_dim": _number(text, "index_vector_dim", 0)}


def _scatter(text: str) -> _Attributes:
    keys = ("update_window_dims", "inserted_window_dims", "input_batching_dims",
            "scatter_indices_batching_dims", "scatter_dims_to_operand_dims")  # fmt: skip
    found: dict[str, Any] = {key: _numbers(text, key) for key in keys}
    return found | {"index_vector_dim": _number(text, "index_vector_dim", 0)}


def _window(text: str) -> _Attributes:
    return {"size": _numbers(text, "window_dimensions")}


def _sizes(text: str) -> _Attributes:
    return {"dynamic_slice_sizes": _numbers(text, "(?:slice_)?sizes")}


def _compare(text: str) -> _Attributes:
    found = re.search(r"\b(EQ|NE|LT|LE|GT|GE)\b", text)
    return {"direction": found.group(1) if found else ""}


def _target(text: str) -> _Attributes:
    found = re.search(r"@([\w.$-]+)|call_target_name\s*=\s*\"([^\"]+)\"", text)
    return {"custom_call_target": (found.group(1) or found.group(2)) if found else ""}


_READERS: dict[str, Callable[[str], _Attributes]] = {
    "dot": _dot, "broadcast": _dimensions, "transpose": _dimensions, "reduce": _dimensions,
    "reverse": _dimensions, "concatenate": _dimensions, "sort": _dimensions, "iota": _iota,
    "constant": _constant, "slice": _slice, "pad": _pad, "convolution": _convolution,
    "gather": _gather, "scatter": _scatter, "reduce_window": _window,
    "select_and_scatter": _window, "dynamic_slice": _sizes, "compare": _compare,
    "custom_call": _target,
}  # fmt: skip
