"""NeuSight: fp32 kernels of six GPUs, and the ops of traced models."""

import re
from pathlib import Path
from typing import Any

from calibration.importers.devices import device_of
from calibration.importers.source import (
    Imported,
    Importer,
    Row,
    batched_fields,
    elements_fields,
    matmul_fields,
    read_table,
)
from simcore.units import MS

# tensors read and written; a suffix u has a scalar for its second operand
_PASSES = {
    "add": 3, "mul": 3, "div": 3, "pow": 2, "relu": 2, "tanh": 2, "gelu": 2,
    "addu": 2, "mulu": 2, "divu": 2, "powu": 2,
}  # fmt: skip
_CLASSES = {"ln": "normalisation", "softmax": "softmax"}


def _fields(row: Row) -> dict[str, Any] | None:
    op = row["op"]
    if op == "bmm":
        b, m, n, k = (row.whole(name) for name in "BMNK")
        return batched_fields(b, m, n, k, "fp32")
    if op == "linear":
        return matmul_fields(row.whole("M"), row.whole("N"), row.whole("K"), "fp32")
    passes = 2 if op in _CLASSES else _PASSES.get(op)
    if passes is None:
        return None
    rows, cols = row.whole("B"), row.whole("H")
    return elements_fields(_CLASSES.get(op, "pointwise"), "fp32", passes, rows, cols)


def _read_ops(importer: Importer, path: Path, result: Imported) -> None:
    found = re.fullmatch(r"ops_fp32_(.+)", path.stem)
    device = device_of(found[1]) if found else None
    common = importer.fields(path, device=device, phase="F")
    for row in read_table(path, "op B M N K H latency_ms"):
        fields = _fields(row)
        if device is None or fields is None:
            result.skip(f"unknown device ({path.name})" if device is None else f"op {row['op']}")
            continue
        seconds = row.number("latency_ms") * MS
        result.add(**common, **fields, target=row["op"], seconds=seconds)


IMPORTER = Importer(
    name="neusight",
    contains="kernel",
    how="CUDA events, mean of the fastest runs; TF32 off",
    software="PyTorch 2.1",
    patterns={"ops_fp32_*.csv": _read_ops},
)
