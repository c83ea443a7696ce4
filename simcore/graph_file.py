"""OpGraphs as our own JSON, format ``placewright-graph/1``: what is read is what was written.

One object. ``ops`` are in program order, one a line; they name ``tensors`` and ``signatures`` by
position: first the tensors that no op produces (parameters and buffers), then those of each op.
What is left out has its default: an op is forward (phase F), of class ``other``, with one kernel, a
placement unit of its own and no measured seconds; a tensor is an ``activation``, named after its
op, in a storage of its own. Bytes are a number, or [c0, c1] for c0 + c1 * batch. JSON has neither
NaN nor infinity: seconds left out mean "cost the signature", ``"inf"`` means "not on a GPU".
``loops``, which may be absent, holds distinct `OpLoops` as arrays in the order of their fields;
they call a tensor by its place among the inputs or outputs of the op.
"""

import math
import os
import sys
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from simcore.atomic import write_whole
from simcore.errors import GraphError
from simcore.graph import GraphBuilder, OpGraph, Out
from simcore.loops import OpLoops, check_tensors, renumbered
from simcore.signature import Affine, OpClass, Phase, Role, Signature

__all__ = ["FORMAT", "MAX_FILE_BYTES", "decode_graph", "encode_graph", "read_graph", "write_graph"]

FORMAT = "placewright-graph/1"
MAX_FILE_BYTES = 2**30  # 1 GiB, some millions of ops; more is refused before it fills the memory
MAX_BATCH = 2**40  # samples, as in a Job

_Bytes = int | Affine
_Seconds = float | Literal["inf"] | None  # s
_Enum = TypeVar("_Enum", bound=IntEnum)
_T = TypeVar("_T")


class _OpRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One op of the file; the fields are those of `GraphBuilder.op`."""

    name: str
    module: str = ""
    target: str = ""
    phase: str = "F"
    op_class: str = "other"
    signature: int | None = None  # position in signatures
    unit: int | None = None  # ops with one number are one placement unit
    kernels: int = 1
    sync: bool = False
    workspace: _Bytes = 0
    resident: _Bytes = 0
    elements: int = 0
    inputs: tuple[int, ...] = ()  # positions in tensors
    outputs: tuple[int, ...] = ()  # positions in tensors
    seconds: _Seconds = None
    cpu_seconds: _Seconds = None
    loops: int | None = None  # position in loops


class _TensorRecord(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor of the file."""

    bytes: _Bytes
    name: str | None = None  # None = "<op>:<place among its outputs>"
    role: str = "activation"
    storage_of: int | None = None  # position of the first tensor of the storage that it shares


class _Tables(NamedTuple):
    """What ops name by position."""

    signatures: list[Signature]
    loops: list[OpLoops]


class _Tag(msgspec.Struct):
    """The one field that is looked at first."""

    format: str | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    format: str
    name: str
    signatures: list[msgspec.Raw]  # decoded one by one, so that an error can say which
    tensors: list[_TensorRecord]
    ops: list[_OpRecord]
    batch: int | None = None  # samples of the example or the measurement
    measured_on: str | None = None  # device kind of the seconds
    loops: list[msgspec.Raw] = []  # decoded one by one, as signatures


def encode_graph(graph: OpGraph) -> bytes:
    """Returns the graph as UTF-8 JSON, one op, tensor, signature or nest of loops a line."""
    loops = _placed_loops(graph)
    sections: dict[str, Any] = {
        "format": FORMAT,
        "name": graph.name,
        "batch": graph.batch,
        "measured_on": graph.fixed.measured_on if graph.fixed else None,
        "signatures": _lines(graph.signatures),
        "tensors": _lines(_tensor_records(graph)),
        "ops": _lines(_op_records(graph, loops)),
    }
    if distinct := [nest for nest in dict.fromkeys(loops) if nest is not None]:
        sections["loops"] = _lines(distinct)
    fields = (f'"{key}": '.encode() + msgspec.json.encode(sections[key]) for key in sections)
    return b"{\n" + b",\n".join(fields) + b"\n}\n"


def decode_graph(data: bytes, source: str) -> OpGraph:
    """Returns the graph that the JSON says, checked as every graph is.

    Args:
        data: the file's bytes.
        source: what errors call the file.

    Raises:
        GraphError: not JSON, not of this format, or a key, op or tensor that is wrong; it is named.
    """
    if len(data) > MAX_FILE_BYTES:
        raise GraphError(f"{source}: {len(data)} bytes is more than a graph file may have (1 GiB)")
    try:
        tag = msgspec.json.decode(data, type=_Tag).format
        if tag != FORMAT:
            raise GraphError(f"format is {tag!r}, not {FORMAT!r}")
        return _build(msgspec.json.decode(data, type=_File))
    except (msgspec.DecodeError, GraphError) as error:
        raise GraphError(f"{source}: {error}") from None
    except RecursionError:
        raise GraphError(f"{source}: nested too deeply to be a graph") from None


def write_graph(graph: OpGraph, path: str | Path) -> None:
    """Writes the graph; a reader sees the old file or the whole new one.

    Raises:
        GraphError: the file cannot be written.
    """
    try:
        write_whole(path, encode_graph(graph))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or no name
        raise GraphError(f"{path}: cannot be written: {_reason(error)}") from None


def read_graph(path: str | Path) -> OpGraph:
    """Returns the graph of a file.

    Raises:
        GraphError: the file cannot be read, or is not such a graph.
    """
    try:
        with Path(path).open("rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > MAX_FILE_BYTES:
                raise GraphError(f"{path}: {size} bytes is more than a graph file may have (1 GiB)")
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise GraphError(f"{path}: cannot be read: {_reason(error)}") from None
    return decode_graph(data, str(path))


def _reason(error: OSError | ValueError) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _lines(records: Sequence[Signature | _OpRecord | _TensorRecord | OpLoops]) -> msgspec.Raw:
    encode = msgspec.json.Encoder().encode
    body = b",\n".join(encode(record) for record in records)
    return msgspec.Raw(b"[\n" + body + b"\n]" if body else b"[]")


def _placed_loops(graph: OpGraph) -> list[OpLoops | None]:
    """Returns the loops of each op, [op], with places among its inputs or outputs for tensors."""
    if graph.loops is None:
        return [None] * graph.num_ops
    placed: list[OpLoops | None] = []
    for op, nest in enumerate(graph.loops):
        inputs = graph.inputs[graph.first_input[op] : graph.first_input[op + 1]].tolist()
        place = {tensor: index for index, tensor in enumerate(inputs)}
        first_output = int(graph.first_output[op])
        placed.append(None if nest is None else renumbered(nest, place, -first_output))
    return placed


def _op_records(graph: OpGraph, loops: Sequence[OpLoops | None]) -> list[_OpRecord]:
    distinct = [nest for nest in dict.fromkeys(loops) if nest is not None]
    position = {nest: index for index, nest in enumerate(distinct)}
    shared = np.bincount(graph.unit)[graph.unit] > 1
    seconds = _second_fields(graph.fixed.seconds if graph.fixed else None, graph.num_ops)
    cpu_seconds = _second_fields(graph.fixed.cpu_seconds if graph.fixed else None, graph.num_ops)
    return [
        _OpRecord(
            name=name,
            module=graph.op_modules[op],
            target=graph.op_targets[op],
            phase=Phase(graph.phase[op]).name,
            op_class=_word(OpClass(graph.op_class[op])),
            signature=None if graph.signature[op] < 0 else int(graph.signature[op]),
            unit=int(graph.unit[op]) if shared[op] else None,
            kernels=int(graph.kernels[op]),
            sync=bool(graph.sync[op]),
            workspace=_bytes_field(graph.workspace[op]),
            resident=_bytes_field(graph.resident[op]),
            elements=int(graph.elements[op]),
            inputs=tuple(graph.inputs[graph.first_input[op] : graph.first_input[op + 1]].tolist()),
            outputs=tuple(range(graph.first_output[op], graph.first_output[op + 1])),
            seconds=seconds[op],
            cpu_seconds=cpu_seconds[op],
            loops=None if (nest := loops[op]) is None else position[nest],
        )
        for op, name in enumerate(graph.op_names)
    ]


def _tensor_records(graph: OpGraph) -> list[_TensorRecord]:
    _, first = np.unique(graph.tensor_storage, return_index=True)  # [storage] its first tensor
    records = []
    for tensor, name in enumerate(graph.tensor_names):
        op, base = graph.tensor_producer[tensor], int(first[graph.tensor_storage[tensor]])
        default = f"{graph.op_names[op]}:{tensor - graph.first_output[op]}" if op >= 0 else None
        records.append(
            _TensorRecord(
                bytes=_bytes_field(graph.tensor_bytes[tensor]),
                name=None if name == default else name,
                role=_word(Role(graph.tensor_role[tensor])),
                storage_of=None if base == tensor else base,
            )
        )
    return records


def _word(member: OpClass | Role) -> str:
    """Returns a member's name as the file has it; interned, since defaults are told by identity."""
    return sys.intern(member.name.lower())


def _bytes_field(pair: NDArray[np.int64]) -> _Bytes:
    """Returns (c0, c1) bytes as the file has them."""
    return (int(pair[0]), int(pair[1])) if pair[1] else int(pair[0])


def _second_fields(seconds: NDArray[np.float64] | None, num_ops: int) -> list[_Seconds]:
    """Returns seconds [op] as the file has them."""
    if seconds is None:
        return [None] * num_ops
    return [
        None if math.isnan(value) else "inf" if value == math.inf else value
        for value in seconds.tolist()
    ]


def _seconds(field: _Seconds) -> float:
    """Returns a field of the file in seconds."""
    return math.nan if field is None else float(field)


def _build(file: _File) -> OpGraph:
    """Puts the records through a GraphBuilder, whose handles count up like the file's positions."""
    if file.batch is not None and not 1 <= file.batch <= MAX_BATCH:
        raise GraphError(f"batch must be between 1 and 2**40, not {file.batch}")
    builder = GraphBuilder(file.name, batch=file.batch)
    tables = _Tables(
        [_decoded(raw, Signature, f"signatures[{i}]") for i, raw in enumerate(file.signatures)],
        [_decoded(raw, OpLoops, f"loops[{i}]") for i, raw in enumerate(file.loops)],
    )
    num_tensors = _add_persistent(file, builder)
    first_of_unit: dict[int, int] = {}
    for op in file.ops:
        _check_tensors(file, op, num_tensors)
        num_tensors += len(op.outputs)
        handle = _add_op(file, op, tables, builder, first_of_unit)
        if op.unit is not None:
            first_of_unit.setdefault(op.unit, handle)
    graph = builder.build(measured_on=file.measured_on)
    if file.measured_on is not None and graph.fixed is None:
        raise GraphError(f"measured_on is {file.measured_on!r}, but no op has seconds")
    return graph


def _add_persistent(file: _File, builder: GraphBuilder) -> int:
    """Adds the tensors that no op produces, which come first, and returns how many they are."""
    count = len(file.tensors) - sum(len(op.outputs) for op in file.ops)
    if count < 0:
        raise GraphError(f"ops have {len(file.tensors) - count} outputs, tensors are fewer")
    add = {"parameter": builder.parameter, "buffer": builder.buffer}
    for position, tensor in enumerate(file.tensors[:count]):
        where = f"tensors[{position}] {tensor.name!r}"
        if tensor.role not in add or tensor.name is None or tensor.storage_of is not None:
            raise GraphError(
                f"{where}: the first {count} tensors have no producer, so each must be a parameter"
                " or a buffer with a name and a storage of its own"
            )
        add[tensor.role](tensor.name, tensor.bytes)
    return count


def _check_tensors(file: _File, op: _OpRecord, num_tensors: int) -> None:
    """Refuses inputs that are not there yet, and outputs out of order."""
    for tensor in op.inputs:
        if not 0 <= tensor < len(file.tensors):
            raise GraphError(f"op {op.name!r}: input {tensor} is not a position in tensors")
        if tensor >= num_tensors:
            later = next((o.name for o in file.ops if tensor in o.outputs), None)
            raise GraphError(
                f"op {op.name!r}: input {tensor} is made by op {later!r}, which is not before it"
            )
    expected = tuple(range(num_tensors, num_tensors + len(op.outputs)))
    if op.outputs != expected:
        raise GraphError(
            f"op {op.name!r}: outputs are {list(op.outputs)}, but tensors are numbered by producer,"
            f" so they must be {list(expected)}"
        )


def _add_op(
    file: _File,
    op: _OpRecord,
    tables: _Tables,
    builder: GraphBuilder,
    first_of_unit: dict[int, int],
) -> int:
    """Adds one op, whose tensors are checked, and returns its handle."""
    where = f"op {op.name!r}"
    signature = _entry(tables.signatures, op.signature, "signatures", f"{where}: signature")
    loops = _entry(tables.loops, op.loops, "loops", f"{where}: loops")
    if loops is not None:
        loops = _with_inputs(loops, op, where)
    outputs = [
        Out(out.bytes, out.storage_of, _member(Role, out.role.upper(), f"{where}: role"), out.name)
        for out in (file.tensors[tensor] for tensor in op.outputs)
    ]
    return builder.op(
        op.name,
        module=op.module,
        target=op.target,
        phase=_member(Phase, op.phase, f"{where}: phase"),
        op_class=_member(OpClass, op.op_class.upper(), f"{where}: op_class"),
        signature=signature,
        inputs=op.inputs,
        outputs=outputs,
        unit_of=None if op.unit is None else first_of_unit.get(op.unit),
        kernels=op.kernels,
        sync=op.sync,
        workspace=op.workspace,
        resident=op.resident,
        elements=op.elements,
        seconds=_seconds(op.seconds),
        cpu_seconds=_seconds(op.cpu_seconds),
        loops=loops,
    )


def _decoded(raw: msgspec.Raw, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, GraphError) as error:
        raise GraphError(f"{where}: {error}") from None


def _entry(table: Sequence[_T], position: int | None, name: str, where: str) -> _T | None:
    """Returns what an op names by its position in a table."""
    if position is not None and not 0 <= position < len(table):
        raise GraphError(f"{where} {position} is not a position in {name}")
    return None if position is None else table[position]


def _with_inputs(loops: OpLoops, op: _OpRecord, where: str) -> OpLoops:
    """Returns loops that call an input by its tensor, as a builder wants it."""
    used = sorted(set(op.inputs))
    check_tensors(loops, range(len(used)), len(op.outputs), where)
    return renumbered(loops, dict(enumerate(used)), 0)


def _member(kind: type[_Enum], text: str, what: str) -> _Enum:
    """Returns the member of an enum that a file names."""
    if text not in kind.__members__:
        known, given = ", ".join(kind.__members__), text
        if kind is not Phase:  # the only one that files write in capitals
            known, given = known.lower(), text.lower()
        raise GraphError(f"{what}: {given!r} is none of {known}")
    return kind[text]
