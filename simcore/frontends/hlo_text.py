"""HLO text -> Program: what ``lowered.as_text(dialect="hlo")`` and ``compiled.as_text()`` print.

The grammar is a line an instruction: ``%name = type op(operands), key=value, ...``; computations
are blocks of them. It is read here, not by jaxlib, so that who plans need not have jax.
"""

import re
from collections.abc import Mapping
from typing import Any

from simcore.errors import GraphError
from simcore.frontends.hlo_program import (
    TOKEN,
    Function,
    Kind,
    Program,
    Statement,
    array,
    closing,
    split_top,
)

_HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(\(.*\)\s*->\s*.*)?\{\s*$")
_NAME = re.compile(r"^(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_TYPE = re.compile(r"^([a-z]\w*)\[([\d,<=?]*)\](?:\{([\d,]*)[^}]*\})?")
_OP = re.compile(r"^\s*([\w\-]+)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_ALIAS = re.compile(r"\{([\d, ]*)\}:\s*\((\d+),")
_LABEL = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLS = ("to_apply", "calls", "condition", "body", "true_computation", "false_computation",
          "select", "scatter", "branch_computations", "called_computations")  # fmt: skip
_RENAMED = {"select-and-scatter": "select_and_scatter"}


def decode_hlo(text: str, source: str) -> Program:
    """Returns the program of HLO text.

    Args:
        text: starts with ``HloModule``.
        source: path, for messages.

    Raises:
        GraphError: it breaks the grammar; names file, line and instruction.
    """
    lines = text.splitlines()
    functions: dict[str, Function] = {}
    block: list[tuple[Statement, bool]] | None = None
    entry = name = ""
    for number, raw in enumerate(lines, 1):
        line = _COMMENT.sub("", raw).strip()
        where = f"{source}: line {number}"
        if block is None:
            head = _HEAD.match(line)
            if head and not line.startswith("HloModule"):
                name, block = head.group(2), []
                entry = name if head.group(1) else entry
        elif line == "}" or line.startswith("} "):
            functions[name] = _function(name, block, where)
            block = None
        elif line:
            try:
                block.append(_instruction(line, number, where))
            except (AttributeError, IndexError, TypeError, ValueError):
                raise GraphError(f"{where}: {line[:60]!r} cannot be read") from None
    if block is not None:
        raise GraphError(f"{source}: line {len(lines)}: the computation {name!r} is not closed")
    if not entry:
        raise GraphError(f"{source}: no ENTRY computation: the file is cut short, or no HLO text")
    return Program(source, functions, entry, _aliases(lines), _labels(functions[entry]))


def _aliases(lines: list[str]) -> dict[int, int]:
    """Returns parameter -> result of the module's header."""
    header = next((line for line in lines if line.startswith("HloModule")), "")
    start = header.find("input_output_alias=")
    if start < 0:
        return {}
    brace = header.index("{", start)
    found = _ALIAS.findall(header[brace : closing(header, brace) + 1])
    return {int(parameter): int(result or 0) for result, parameter in found if "," not in result}


def _labels(entry: Function) -> tuple[str, ...]:
    made = {s.names[0]: s.label for s in entry.statements if s.op == "parameter"}
    return tuple(made.get(name) or name.partition(".")[0] for name in entry.parameters)


def _function(name: str, block: list[tuple[Statement, bool]], where: str) -> Function:
    if not block:
        raise GraphError(f"{where}: the computation {name!r} is empty")
    held = sorted(
        (s for s, _ in block if s.op == "parameter"), key=lambda s: int(s.attributes["number"])
    )
    roots = [s for s, is_root in block if is_root]
    root = roots[0] if roots else block[-1][0]
    return Function(
        name,
        tuple(s.names[0] for s in held),
        tuple(s.kinds[0] for s in held),
        tuple(s for s, _ in block),
        root.names,
    )


def _instruction(line: str, number: int, where: str) -> tuple[Statement, bool]:
    named = _NAME.match(line)
    if named is None:
        raise GraphError(f"{where}: {line[:60]!r} is no instruction (name = type op(...))")
    name = named.group(2)
    where = f"{where}: {name}"
    kind, rest = _kind(line[named.end() :], where)
    opened = _OP.match(rest)
    if opened is None:
        raise GraphError(f"{where}: no op after the type")
    start = opened.end() - 1
    end = closing(rest, start)
    if end < 0:
        raise GraphError(f"{where}: the operands of {opened.group(1)} are not closed")
    op = _RENAMED.get(opened.group(1), opened.group(1).replace("-", "_"))
    inside, tail = rest[start + 1 : end], rest[end + 1 :]
    attributes = _attributes(tail, where)
    bodies = tuple(
        body for key in _CALLS if isinstance(attributes.get(key), str)
        for body in _called(attributes[key])
    ) if op != "custom_call" else ()  # fmt: skip
    operands: tuple[str, ...] = ()
    if op == "parameter":
        attributes = {"number": int(inside) if inside.strip().isdecimal() else 0}
    elif op == "constant":
        attributes = {"value": inside.strip()}
    else:
        operands = tuple(part.split()[-1].lstrip("%") for part in split_top(inside))
    label = _LABEL.search(tail)
    statement = Statement(
        op,
        (name,),
        (kind,),
        operands,
        attributes,
        bodies,
        label.group(1).replace("\\", "") if label else "",
        number,
    )
    return statement, bool(named.group(1))


def _called(value: str) -> list[str]:
    return [part.strip().lstrip("%") for part in value.strip("{}").split(",")]


def _kind(text: str, where: str) -> tuple[Kind, str]:
    """Returns the type at the beginning of a text, and the rest."""
    if text.startswith("("):
        end = closing(text, 0)
        parts = split_top(text[1:end]) if end > 0 else []
        return tuple(_kind(part, where)[0] for part in parts), text[end + 1 :]
    if text.startswith("token"):
        return TOKEN, text.partition("]")[2]
    found = _TYPE.match(text)
    if found is None:
        raise GraphError(f"{where}: {text[:40]!r} is no type")
    layout = found.group(3)
    order = None if not layout else tuple(int(part) for part in layout.split(",") if part)
    return array(found.group(2), found.group(1), where, order), text[found.end() :]


def _attributes(text: str, where: str) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for part in split_top(text):
        key, equals, value = part.partition("=")
        if equals:
            found[key.strip()] = _value(value.strip())
    try:
        if "window" in found:
            found |= _window(found["window"])
        if "padding" in found and isinstance(found["padding"], str):
            found |= _padding(found["padding"])
        if "slice" in found:
            found |= _slices(found["slice"])
        if "dim_labels" in found:
            found["dim_labels"] = tuple(re.split(r"_|->", found["dim_labels"]))
    except (ValueError, IndexError):
        raise GraphError(f"{where}: the window, padding or slice cannot be read") from None
    return found


def _value(text: str) -> Any:
    """Returns whole numbers and lists of them as such, all else as text."""
    inner = text[1:-1].strip() if text[:1] == "{" and text[-1:] == "}" else None
    if inner is not None and re.fullmatch(r"[\d,\s\-]*", inner):
        return tuple(int(part) for part in inner.split(",") if part.strip())
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _window(text: str) -> dict[str, tuple[Any, ...]]:
    """Reads ``{size=3x3 stride=2x2 pad=0_1x0_1 lhs_dilate=2x2}``; what is missing is plain."""
    fields = dict(part.split("=") for part in text.strip("{}").split())
    size = tuple(int(n) for n in fields.get("size", "").split("x") if n)
    ones = "x".join("1" for _ in size)
    numbers = {
        key: tuple(int(n) for n in fields.get(short, ones).split("x") if n)
        for key, short in (("stride", "stride"), ("lhs_dilation", "lhs_dilate"),
                           ("rhs_dilation", "rhs_dilate"))
    }  # fmt: skip
    pads = fields.get("pad", "x".join("0_0" for _ in size))
    pairs = [tuple(map(int, pair.split("_"))) for pair in pads.split("x") if pair]
    return {
        "size": size, **numbers,
        "low": tuple(pair[0] for pair in pairs), "high": tuple(pair[1] for pair in pairs),
    }  # fmt: skip


def _padding(text: str) -> dict[str, tuple[int, ...]]:
    """Reads ``0_1_0x2_3``: low, high and, where given, interior padding of each dimension."""
    parts = [[int(n) for n in part.split("_")] for part in text.split("x") if part]
    return {
        "low": tuple(part[0] for part in parts),
        "high": tuple(part[1] for part in parts),
        "interior": tuple(part[2] if len(part) > 2 else 0 for part in parts),
    }


def _slices(text: str) -> dict[str, tuple[int, ...]]:
    """Reads ``{[0:4], [0:16:2]}``."""
    parts = [[int(n) for n in part.split(":")] for part in re.findall(r"\[([\d:]+)\]", text)]
    return {
        "start": tuple(part[0] for part in parts),
        "limit": tuple(part[1] for part in parts),
        "stride": tuple(part[2] if len(part) > 2 else 1 for part in parts),
    }
