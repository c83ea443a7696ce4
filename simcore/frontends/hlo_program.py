"""A program of XLA ops as it stands in a file: functions of statements, in HLO's vocabulary.

Both texts, HLO and StableHLO, are read into it; an op is called what HLO calls it (``dot``,
``broadcast``), without the dialect. Which attributes an op has, and under what names, is said in
`hlo_ops`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from simcore.errors import GraphError

DTYPES: dict[str, tuple[str, int]] = {
    "pred": ("bool", 1), "i1": ("bool", 1),
    "f64": ("fp64", 8), "f32": ("fp32", 4), "f16": ("fp16", 2), "bf16": ("bf16", 2),
    "f8E4M3FN": ("fp8", 1), "f8e4m3fn": ("fp8", 1), "f8E5M2": ("fp8", 1), "f8e5m2": ("fp8", 1),
    **{f"{letter}{bits}": (f"{name}{bits}", max(1, bits // 8))
       for letter, name in (("s", "int"), ("i", "int"), ("si", "int"), ("u", "uint"),
                            ("ui", "uint"))
       for bits in (2, 4, 8, 16, 32, 64)},
    "c64": ("complex64", 8), "complex<f32>": ("complex64", 8),
    "c128": ("complex128", 16), "complex<f64>": ("complex128", 16),
}  # fmt: skip
FLOATS = frozenset({"fp64", "fp32", "fp16", "bf16", "fp8"})


class Array(NamedTuple):
    """The type of one value.

    Attributes:
        shape: sizes of the dimensions.
        dtype: our name of it, for example ``fp32``.
        itemsize: bytes of an element.
        layout: dimensions from the fastest to the slowest in memory; None = the last is fastest.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    layout: tuple[int, ...] | None = None


TOKEN = Array((), "token", 0)  # what orders effects; it has no content
Kind = Array | tuple["Kind", ...]  # an array, or a tuple of values


class Statement(NamedTuple):
    """One line of a function.

    Attributes:
        op: HLO's name of it.
        names: of its results.
        kinds: types of its results.
        operands: names of what it reads.
        attributes: whole numbers, texts or tuples of them.
        bodies: functions that it calls, in the order of the text.
        label: where in the source program it comes from (``jit(step)/jvp()/add``), "" = unknown.
        line: in the file, from 1.
    """

    op: str
    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    operands: tuple[str, ...]
    attributes: Mapping[str, Any]
    bodies: tuple["Function", ...] | tuple[str, ...]
    label: str
    line: int


class Function(NamedTuple):
    """A function, a fused computation, or the body of a loop."""

    name: str
    parameters: tuple[str, ...]
    kinds: tuple[Kind, ...]  # of the parameters
    statements: tuple[Statement, ...]
    results: tuple[str, ...]


class Program(NamedTuple):
    """A file.

    Attributes:
        source: its path, for messages.
        functions: by name.
        entry: name of the function that is the step.
        aliases: parameter of the entry -> result whose memory it gives (a donated argument).
        parameter_labels: what the source program calls the entry's parameters, "" = unknown.
    """

    source: str
    functions: Mapping[str, Function]
    entry: str
    aliases: Mapping[int, int]
    parameter_labels: tuple[str, ...]


def array(shape: str, dtype: str, where: str, layout: tuple[int, ...] | None = None) -> Array:
    """Returns the type of sizes parted by ``,`` or ``x``.

    Raises:
        GraphError: a size that is not fixed, or an unknown dtype.
    """
    known = DTYPES.get(dtype)
    if known is None:
        raise GraphError(f"{where}: dtype {dtype!r} is not known")
    parts = [part for part in shape.replace("x", ",").split(",") if part]
    if any(not part.isdecimal() for part in parts):
        raise GraphError(f"{where}: the size {shape!r} is not fixed; lower with concrete shapes")
    plain = layout is None or layout == tuple(reversed(range(len(parts))))
    return Array(tuple(map(int, parts)), *known, None if plain else layout)


def split_top(text: str, separator: str = ",") -> list[str]:
    """Returns the parts between separators that stand outside of brackets and quotes."""
    parts, depth, start, quoted = [], 0, 0, False
    for place, letter in enumerate(text):
        if letter == '"' and text[place - 1 : place] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif letter in "([{<":
            depth += 1
        elif letter in ")]}" or (letter == ">" and text[place - 1 : place] != "-"):
            depth -= 1
        elif depth == 0 and text.startswith(separator, place):
            parts.append(text[start:place])
            start = place + len(separator)
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def closing(text: str, start: int) -> int:
    """Returns the place of the bracket that closes the one at `start`, -1 = none."""
    depth, quoted = 0, False
    for place in range(start, len(text)):
        letter = text[place]
        if letter == '"' and text[place - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if depth == 0:
                return place
    return -1
