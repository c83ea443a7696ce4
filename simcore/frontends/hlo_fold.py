"""Arithmetic of whole numbers that are known before a step runs."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le,
    "GT": operator.gt, "GE": operator.ge,
}  # fmt: skip
_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "maximum": max,
    "minimum": min, "and": operator.and_, "or": operator.or_,
}  # fmt: skip
FOLDED = frozenset({*_BINARY, "constant", "compare", "select", "convert", "negate", "reshape",
                    "not", "copy", "bitcast", "clamp", "divide", "remainder"})  # fmt: skip


def folded(op: str, attributes: Mapping[str, Any], inputs: Sequence[int | None]) -> int | None:
    """Returns the whole number that an op gives, None where it is not known.

    Args:
        op: HLO's name.
        attributes: of the op.
        inputs: numbers that it reads, None where not known.
    """
    if op == "constant":
        return _whole(str(attributes.get("value", "")))
    if op == "select" and len(inputs) == 3 and inputs[0] is not None:
        return inputs[1] if inputs[0] else inputs[2]
    known = [value for value in inputs if value is not None]
    if len(known) != len(inputs) or not known:
        return None
    if op == "compare" and len(known) == 2:
        return int(_COMPARE[attributes["direction"]](*known))
    return _computed(op, known)


def _computed(op: str, known: list[int]) -> int | None:
    if op in _BINARY and len(known) == 2:
        return _BINARY[op](*known)
    if op == "clamp" and len(known) == 3:
        return min(max(known[0], known[1]), known[2])
    if op in {"divide", "remainder"} and len(known) == 2 and known[1] > 0 <= known[0]:
        return known[0] // known[1] if op == "divide" else known[0] % known[1]
    if op == "negate":
        return -known[0]
    if op == "not":
        return int(not known[0])
    return known[0] if op in {"convert", "reshape", "copy", "bitcast"} else None


def _whole(text: str) -> int | None:
    """Returns a constant's number where it is whole and written as such."""
    if text in {"true", "false"}:
        return int(text == "true")
    return int(text) if text.lstrip("-").isdecimal() else None
