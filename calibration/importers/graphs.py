"""Models whose every op was timed: NeuSight's torch.fx graphs, TrioSim's traces.

NeuSight times each node alone with CUDA events, which a launch is inside of: no node takes less
than 5 to 10 us. What a node computes follows from its shapes and from the name of its module.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

from calibration.importers.devices import device_of
from calibration.importers.source import (
    DTYPE_BYTES,
    Imported,
    Importer,
    Row,
    batched_fields,
    elements_fields,
    matmul_fields,
    read_table,
)
from simcore.errors import MeasurementError
from simcore.units import MS, US

Shape = list[int]
_LINEAR = re.compile(
    r"dense|query|key|value|lm_head|fc\d|[qkv]_proj|out_proj|classifier|qa_outputs|project_(in|out)"
)
_NORM = re.compile(r"LayerNorm|ln_\w+|.*layer_norm")
_EMBEDDING = re.compile(r"wte|wpe|embed_tokens|embed_positions|\w+_embeddings")
_DROPOUT = re.compile(r"drop|\w*dropout")
# a sum hands its gradient on; an embedding's goes over the whole table
_PASSED_ON = re.compile(r"function (add|sub)>|wte|wpe|embed")
NO_WORK = "shapes, views and other nodes without a known amount of work"


def _read_graph(importer: Importer, path: Path, result: Imported) -> None:
    device = device_of(path.parent.name)
    source = f"{importer.name}/{path.parent.name}/{path.name}"
    columns = "name op target inputs input_shapes output_shape dtype fw_ms bw_ms acc_ms"
    for row in read_table(path, columns):
        fields = _node(row, training="-train-" in path.name) if device is not None else None
        if fields is None or row.number("fw_ms") == 0:
            result.skip(NO_WORK if device is not None else f"unknown device {path.parent.name}")
            continue
        common = importer.fields(path, device=device, source=source, target=row["target"])
        result.add(**common, **fields, phase="F", seconds=row.number("fw_ms") * MS)
        if row.number("bw_ms") > 0 and not _PASSED_ON.search(row["target"]):
            both = _backward(fields)
            result.add(**common, **both, phase="B", seconds=row.number("bw_ms") * MS)


def _backward(fields: dict[str, Any]) -> dict[str, Any]:
    """Both gradients of a product are two products; others move half as much again."""
    if fields["op_class"] in ("matmul", "batched_matmul"):
        return fields | {"factor": 2.0, "traffic": 2 * fields["traffic"]}
    return fields | {"traffic": fields["traffic"] * 3 // 2}


def _shapes(row: Row, column: str) -> list[Shape]:
    """Returns shapes written as lists or a tuple; what is none is an empty one."""
    text = row[column].replace("(", "[").replace(",)", "]").replace(")", "]")
    try:
        found = json.loads(text)
    except ValueError:
        raise MeasurementError(f"{row.where}: {column}: {row[column]!r} is no shape") from None
    shapes = found if column == "input_shapes" else [found]
    return [shape for shape in shapes if isinstance(shape, list)]


def _node(row: Row, *, training: bool) -> dict[str, Any] | None:
    if row["dtype"] != "float32":
        return None
    if not training and _DROPOUT.fullmatch(row["target"].rpartition(".")[2]):
        return None  # nothing is dropped, nothing is done
    inputs, (out,) = _shapes(row, "input_shapes"), _shapes(row, "output_shape")
    if row["op"] == "call_module":
        return _module(row["target"].rpartition(".")[2], inputs, out)
    if row["op"] == "call_function":
        found = re.match(r"<(?:built-in )?(?:function|method) (\w+)", row["target"])
        return _function(found[1] if found else "", inputs, out)
    return None


def _module(name: str, inputs: list[Shape], out: Shape) -> dict[str, Any] | None:
    data = inputs[0] if inputs else []
    if not data or not out:
        return None
    if _LINEAR.fullmatch(name):
        return matmul_fields(math.prod(data[:-1]), out[-1], data[-1], "fp32")
    if _NORM.fullmatch(name):
        return _elements("normalisation", 2.0, out)
    if _EMBEDDING.fullmatch(name):
        return _elements("embedding", 2.0, out)
    if _DROPOUT.fullmatch(name):
        return _elements("pointwise", 2.25, out)  # and a mask of one byte
    return _elements("pointwise", 2.0, out) if name.startswith("act") else None


def _function(name: str, inputs: list[Shape], out: Shape) -> dict[str, Any] | None:
    if name == "addmm" and [len(shape) for shape in inputs[1:3]] == [2, 2]:
        (m, k), (_, n) = inputs[1:3]
        return matmul_fields(m, n, k, "fp32")
    if name in ("matmul", "bmm") and len(inputs) == 2 and min(map(len, inputs)) > 2:
        a, b = inputs
        return batched_fields(math.prod(a[:-2]), a[-2], b[-1], a[-1], "fp32")
    if name == "softmax":
        return _elements("softmax", 2.0, out)
    if name in ("gelu", "relu", "tanh") and out:
        return _elements("pointwise", 2.0, out)
    if name in ("add", "sub", "mul", "truediv") and math.prod(out) > 1:
        full = sum(shape == out for shape in inputs)
        return _elements("pointwise", 1.0 + full, out) if full else None
    return None


def _elements(op_class: str, passes: float, shape: Shape) -> dict[str, Any]:
    return elements_fields(op_class, "fp32", passes, math.prod(shape[:-1]), shape[-1])


def _read_triosim(importer: Importer, path: Path, result: Imported) -> None:
    """Forward and backward of one iteration; tensors are in a file of their own."""
    device = "H100-SXM5-80GB"  # by the name of the directory at the source
    shapes = _tensors(path.with_name(path.name.replace("_trace", "_tensor")))
    columns = (
        "OperatorID OperatorName Operator_input Operator_output Operator_cudatime "
        "Operator_cudatimenooverlap InputSize OutputSize gpuid stage tpflag"
    )
    for row in read_table(path, columns):
        ins = [shapes.get(int(n), []) for n in re.findall(r"\d+", row["Operator_input"])]
        outs = [shapes.get(int(n), []) for n in re.findall(r"\d+", row["Operator_output"])]
        fields = _triosim_op(row["OperatorName"], ins, outs) if row["stage"] == "forward" else None
        if fields is None:
            result.skip(f"op {row['OperatorName']}")
            continue
        result.add(
            **importer.fields(path), **fields, device=device, target=row["OperatorName"],
            phase="F", seconds=row.number("Operator_cudatime") * US,
        )  # fmt: skip


def _tensors(path: Path) -> dict[int, Shape]:
    columns = "Index TensorID TensorShape TensorNumElement TensorEachByte TensorType"
    rows = read_table(path, columns, "TensorStorgeid gpuid")
    return {row.whole("TensorID"): json.loads(row["TensorShape"]) for row in rows}


def _triosim_op(name: str, ins: list[Shape], outs: list[Shape]) -> dict[str, Any] | None:
    name, out = name.removeprefix("aten::"), outs[0] if outs else []
    ranks = [len(shape) for shape in ins[:2]]
    if name == "linear" and ranks == [2, 2]:
        return matmul_fields(ins[0][0], ins[1][0], ins[0][1], "fp32")
    if name == "conv2d" and ranks == [4, 4] and len(out) == 4:
        return _conv(ins[0], ins[1], out)
    if name == "relu_" and out:
        return _elements("pointwise", 2.0, out)
    if name == "max_pool2d" and out and ins:
        moved = math.prod(ins[0]) + math.prod(out)
        return {
            "kind": "op", "op_class": "pooling", "dtype": "fp32",
            "dims": {"elements": math.prod(out)}, "traffic": 4 * moved,
        }  # fmt: skip
    return None


def _conv(data: Shape, weight: Shape, out: Shape) -> dict[str, Any]:
    moved = math.prod(data) + math.prod(weight) + math.prod(out)
    return {
        "kind": "op", "op_class": "convolution", "dtype": "fp32",
        "dims": {
            "n": out[0], "k": out[1], "out": out[2] * out[3], "c": weight[1],
            "filter": weight[2] * weight[3], "h": data[2], "w": data[3], "r": weight[2],
            "s": weight[3], "stride": -(-data[2] // out[2]),
        },
        "traffic": DTYPE_BYTES["fp32"] * moved,
    }  # fmt: skip


NEUSIGHT_GRAPHS = Importer(
    name="neusight_graphs",
    contains="kernel+launch",
    how="each node of a torch.fx graph alone, CUDA events; TF32 off",
    software="PyTorch 2.1",
    patterns={"opgraphs/*/*.csv": _read_graph},
    folder="neusight",
)
TRIOSIM = Importer(
    name="triosim",
    contains="kernel",
    how="torch profiler, one training iteration",
    patterns={"*_trace.csv": _read_triosim},
)
