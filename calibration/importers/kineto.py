"""Torch profiler traces (Kineto, Chrome JSON): kernels by the op that launched them.

A kernel names its op by ``External id``; with ``record_shapes=True`` an op has the shapes and types
of its inputs. The seconds of an op are those of its kernels together, without launches and waits.
Products, convolutions and ops that are known by their bytes become records; NCCL kernels whose
group and size are stated become collectives (with the waiting for other ranks inside), and copies
between host and device become links.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from calibration.importers.devices import device_of, one_node
from calibration.importers.json_stream import EVENTS, stream_trace, text_of
from calibration.importers.source import (
    DTYPE_BYTES,
    UNKNOWN_DEVICE,
    Imported,
    batched_fields,
    elements_fields,
    matmul_fields,
)
from calibration.records import COLLECTIVES
from simcore.profile_store import device_kinds
from simcore.units import US

HOW = "torch profiler, kernels of each op"
_DTYPES = {
    "float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16", "double": "fp64",
    "Float": "fp32", "Half": "fp16", "BFloat16": "bf16",
}  # fmt: skip
_NCCL = {
    "allreduce": "all_reduce", "_allgather_base": "all_gather", "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "all_to_all": "all_to_all", "all_to_allv": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip
# name -> class, tensors read and written
_BY_BYTES = {
    "add": ("pointwise", 3), "add_": ("pointwise", 3), "mul": ("pointwise", 3),
    "relu": ("pointwise", 2), "gelu": ("pointwise", 2), "silu": ("pointwise", 2),
    "tanh": ("pointwise", 2), "sigmoid": ("pointwise", 2), "copy_": ("copy", 2),
    "native_layer_norm": ("normalisation", 2), "_softmax": ("softmax", 2),
    "native_batch_norm": ("normalisation", 2), "cudnn_batch_norm": ("normalisation", 2),
}  # fmt: skip
_WAYS = {"HtoD": "h2d", "DtoH": "d2h"}
_CONVOLUTION = "aten::cudnn_convolution"
NO_SHAPE = "an op whose shapes the trace does not have"
Shape = list[int]


class _Op(NamedTuple):
    name: str
    shapes: list[Shape]
    dtype: str
    values: list[Any]  # of the inputs that are no tensors, as text


@dataclass(slots=True)
class _Trace:
    """What is kept of a trace: ops by id, kernel seconds by id."""

    ops: dict[int, _Op] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    device: str = UNKNOWN_DEVICE
    copies: list[dict[str, Any]] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)
    loose: int = 0  # kernels without an op


def read_trace(
    path: Path, device: str = "", progress: Callable[[int], None] = lambda _: None
) -> Imported:
    """Returns the records of one trace.

    Args:
        path: the JSON file.
        device: kind of the GPU; "" = what the trace says.
        progress: told the bytes read so far.

    Raises:
        MeasurementError: the file is damaged; names the byte.
    """
    trace = _Trace()
    for key, value in stream_trace(path, progress):
        if key == EVENTS and isinstance(value, dict):
            _take(trace, value)
        elif key == "deviceProperties":
            trace.device = _device(value)
    trace.device = device or trace.device
    result = Imported(files=[path.name])
    common = {
        "device": trace.device, "contains": "kernel", "how": HOW, "source": f"trace/{path.name}",
    }  # fmt: skip
    _add_ops(trace, result, common)
    for fields in trace.copies:
        host = one_node(trace.device, f"host {fields.pop('memory')}")
        result.add(**common, **fields, topology=host)
    for fields in trace.collectives:
        result.add(**common, **fields, topology=one_node(trace.device))
    if trace.loose:
        result.skip("a kernel without its op", trace.loose)
    return result


def _device(properties: Any) -> str:
    """Returns the kind of the first GPU: a profile's name that its name begins with, or ours."""
    if not (isinstance(properties, list) and properties and isinstance(properties[0], dict)):
        return UNKNOWN_DEVICE
    name = str(properties[0].get("name", ""))
    short = name.removeprefix("NVIDIA ").removeprefix("Tesla ").removeprefix("GeForce ")
    for kind in device_kinds():
        if kind.casefold() == short.replace(" ", "-").casefold():
            return kind
    return device_of(name) or UNKNOWN_DEVICE


def _take(trace: _Trace, event: dict[str, Any]) -> None:
    kind, args = event.get("cat"), event.get("args")
    if not isinstance(args, dict):
        return
    if kind == "cpu_op":
        _take_op(trace, event, args)
    elif kind == "kernel":
        _take_kernel(trace, event, args)
    elif kind == "gpu_memcpy":
        _take_copy(trace, event, args)


def _take_op(trace: _Trace, event: dict[str, Any], args: dict[str, Any]) -> None:
    number, shapes = args.get("External id"), args.get("Input Dims")
    types = args.get("Input type")
    if not isinstance(number, int) or not isinstance(shapes, list):
        return
    first = next((t for t in types if t in _DTYPES), "") if isinstance(types, list) else ""
    known = [shape if _is_shape(shape) else [] for shape in shapes]
    name, values = text_of(str(event.get("name", ""))), args.get("Concrete Inputs")
    kept = values if name == _CONVOLUTION and isinstance(values, list) else []
    trace.ops[number] = _Op(name, known, _DTYPES.get(first, ""), kept)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and all(isinstance(size, int) and size >= 0 for size in shape)


def _duration(event: dict[str, Any]) -> float:
    """Returns seconds; 0 where the event states none."""
    value = event.get("dur")
    good = isinstance(value, int | float) and math.isfinite(value) and value > 0
    return float(value) * US if good and value is not None else 0.0


def _take_kernel(trace: _Trace, event: dict[str, Any], args: dict[str, Any]) -> None:
    seconds = _duration(event)
    kind = _NCCL.get(str(args.get("Collective name", "")))
    if kind in COLLECTIVES:
        _take_collective(trace, kind or "", args, seconds)
        return
    number = args.get("External id")
    if not isinstance(number, int) or seconds == 0:
        trace.loose += 1
        return
    trace.seconds[number] = trace.seconds.get(number, 0.0) + seconds


def _take_collective(trace: _Trace, kind: str, args: dict[str, Any], seconds: float) -> None:
    group, size = args.get("Group size"), args.get("In msg nelems")
    width = DTYPE_BYTES.get(_DTYPES.get(str(args.get("dtype", "")), ""), 0)
    if not (isinstance(group, int) and isinstance(size, int) and group > 1 and width and size > 0):
        trace.loose += 1
        return
    whole = size * width * (group if kind == "all_gather" else 1)
    trace.collectives.append({
        "kind": "collective", "collective": kind, "group": group, "bytes": whole,
        "algorithm": "auto", "bytes_are": "elements that go in", "seconds": seconds,
        "note": "the waiting for other ranks is inside",
    })  # fmt: skip


def _take_copy(trace: _Trace, event: dict[str, Any], args: dict[str, Any]) -> None:
    found = re.match(r"Memcpy (HtoD|DtoH) \((.+)\)", str(event.get("name", "")))
    size, seconds = args.get("bytes"), _duration(event)
    if found is None or not isinstance(size, int) or size < 1 or seconds == 0:
        trace.loose += 1
        return
    memory = "pinned" if "Pinned" in found[2] else "pageable"
    trace.copies.append({
        "kind": "link", "bytes": size, "seconds": seconds, "direction": _WAYS[found[1]],
        "scope": "host", "memory": memory,
    })  # fmt: skip


def _add_ops(trace: _Trace, result: Imported, common: dict[str, Any]) -> None:
    for number, seconds in trace.seconds.items():
        op = trace.ops.get(number)
        fields = _fields(op) if op is not None else None
        if op is None or fields is None:
            result.skip(NO_SHAPE if op is None else f"op {op.name}")
            continue
        result.add(**common, **fields, target=op.name, phase="F", seconds=seconds)


def _fields(op: _Op) -> dict[str, Any] | None:
    """Returns what an op is, None where its shapes do not say."""
    name, shapes = op.name.removeprefix("aten::"), op.shapes
    if op.dtype not in DTYPE_BYTES:
        return None
    tensors = shapes[1:3] if name in ("addmm", "baddbmm") else shapes[:2]
    ranks = [len(shape) for shape in tensors]
    if name in ("mm", "addmm") and ranks == [2, 2]:
        (m, k), (_, n) = tensors
        return matmul_fields(m, n, k, op.dtype)
    if name in ("bmm", "baddbmm") and ranks == [3, 3]:
        (b, m, k), (_, _, n) = tensors
        return batched_fields(b, m, n, k, op.dtype)
    if op.name == _CONVOLUTION and ranks == [4, 4]:
        return _convolution(op)
    if name in _BY_BYTES and shapes and shapes[0]:
        op_class, passes = _BY_BYTES[name]
        cols = shapes[0][-1] if op_class in ("normalisation", "softmax") else 1
        rows = math.prod(shapes[0]) // max(1, cols)
        return elements_fields(op_class, op.dtype, passes, rows, cols)
    return None


def _convolution(op: _Op) -> dict[str, Any] | None:
    """Inputs: data, weight, padding, stride, dilation, groups; positions as cuDNN counts them."""
    (n, _, height, width), (k, c, r, s) = op.shapes[:2]
    numbers = [[int(number) for number in re.findall(r"\d+", str(v))] for v in op.values[2:5]]
    if [len(group) for group in numbers] != [2, 2, 2] or 0 in numbers[1]:
        return None
    padding, stride, dilation = numbers
    out = math.prod(
        (size + 2 * pad - far * (kernel - 1) - 1) // step + 1
        for size, pad, far, kernel, step in zip(
            (height, width), padding, dilation, (r, s), stride, strict=True
        )
    )
    moved = math.prod(op.shapes[0]) + math.prod(op.shapes[1]) + n * k * out
    return {
        "kind": "op", "op_class": "convolution", "dtype": op.dtype,
        "dims": {
            "n": n, "k": k, "out": out, "c": c, "filter": r * s, "h": height, "w": width,
            "r": r, "s": s, "stride": stride[0],
        },
        "traffic": moved * DTYPE_BYTES[op.dtype],
    }  # fmt: skip
