"""Baidu DeepBench: GEMM, convolutions and recurrent layers of older GPUs, all-reduce over PCIe."""

from pathlib import Path
from typing import Any

from calibration.importers.devices import device_of, one_node, several_nodes
from calibration.importers.source import (
    DTYPE_BYTES,
    Imported,
    Importer,
    Row,
    matmul_fields,
    read_table,
)
from simcore.units import MS

_DTYPES = {"fp32": "fp32", "fp16_mixed": "fp16", "fp16_pseudo": "fp16", "int8": "int8"}
_GATES = {"vanilla": 1, "lstm": 4, "gru": 3}
_ALIGNED = 8
_PSEUDO = "fp16 in memory, fp32 arithmetic"
Fields = dict[str, Any]


def _common(importer: Importer, path: Path, row: Row, result: Imported) -> Fields | None:
    """Returns device and dtype of a row, None where one is unknown."""
    device, dtype = device_of(row["gpu"]), _DTYPES.get(row["precision"])
    if device is None or dtype is None:
        result.skip(f"unknown device or precision: {row['gpu']} {row['precision']}")
        return None
    note = _PSEUDO if row["precision"] == "fp16_pseudo" else ""
    return importer.fields(path, device=device, dtype=dtype, note=note)


def _padded(size: int, row: Row) -> int:
    """Returns a size as the benchmark runs it (``PAD_KERNELS``): for tensor cores, in eights.

    It leaves a size alone that need not be a multiple, which changes no time.
    """
    return -(-size // _ALIGNED) * _ALIGNED if row["precision"] == "fp16_mixed" else size


def _add(result: Imported, row: Row, column: str, fields: Fields) -> None:
    if not row[column]:
        result.skip("not run (empty)")
    else:
        result.add(**fields, seconds=row.number(column) * MS)


def _read_gemm(importer: Importer, path: Path, result: Imported) -> None:
    for row in read_table(path, "gpu precision source m n k a_transpose b_transpose time_ms"):
        common = _common(importer, path, row, result)
        if common is not None:
            m, n, k = (_padded(row.whole(name), row) for name in "mnk")
            fields = common | matmul_fields(m, n, k, common["dtype"])
            target = f"gemm_{row['a_transpose']}{row['b_transpose']}"
            _add(result, row, "time_ms", fields | {"phase": "F", "target": target})


def _conv_dims(row: Row) -> dict[str, int]:
    """Output positions as cuDNN counts them: floor((in + 2 pad - filter) / stride) + 1."""
    sides = {}
    for side, kernel in (("w", "s_filter_w"), ("h", "r_filter_h")):
        padded = row.whole(side) + 2 * row.whole(f"pad_{side}")
        sides[side] = (padded - row.whole(kernel)) // row.whole(f"stride_{side}") + 1
    return {
        "n": row.whole("n"), "k": row.whole("k"), "out": sides["w"] * sides["h"],
        "c": _padded(row.whole("c"), row),
        "filter": row.whole("s_filter_w") * row.whole("r_filter_h"),
        "h": row.whole("h"), "w": row.whole("w"), "r": row.whole("r_filter_h"),
        "s": row.whole("s_filter_w"), "stride": row.whole("stride_w"),
    }  # fmt: skip


def _read_conv(importer: Importer, path: Path, result: Imported) -> None:
    columns = (
        "gpu precision source w h c n k s_filter_w r_filter_h pad_w pad_h stride_w stride_h "
        "forward_ms backward_input_ms backward_params_ms"
    )
    phases = {"F": "forward_ms", "I": "backward_input_ms", "W": "backward_params_ms"}
    for row in read_table(path, columns):
        common = _common(importer, path, row, result)
        if common is None:
            continue
        d = _conv_dims(row)
        moved = d["n"] * d["c"] * d["h"] * d["w"] + d["k"] * d["c"] * d["filter"]
        moved += d["n"] * d["k"] * d["out"]
        fields = common | {
            "kind": "op", "op_class": "convolution", "dims": d, "target": "conv",
            "traffic": moved * DTYPE_BYTES[common["dtype"]],
        }  # fmt: skip
        for phase, column in phases.items():
            _add(result, row, column, fields | {"phase": phase})


def _rnn_fields(row: Row, dtype: str) -> Fields:
    """One layer, one direction; the recurrent weights are read at every step.

    The product of the input is not run (``skip_input``; the seconds are too short for it): i is 0.
    """
    t, b, h = row.whole("timesteps"), row.whole("batch"), row.whole("hidden")
    gates = _GATES[row["cell"]]
    moved = t * (gates * h * h + b * h * (2 + gates))
    return {
        "kind": "op", "op_class": "rnn", "target": row["cell"],
        "dims": {"t": t, "b": b, "dirs": 1, "gates": gates, "h": h, "i": 0},
        "traffic": moved * DTYPE_BYTES[dtype],
    }  # fmt: skip


def _weight_gradient(fields: Fields) -> Fields:
    """One product over all steps: the weights move once."""
    d = fields["dims"]
    moved = d["gates"] * d["h"] ** 2 + d["t"] * d["b"] * d["h"] * (1 + d["gates"])
    return {"phase": "W", "traffic": moved * DTYPE_BYTES[fields["dtype"]]}


def _read_rnn(importer: Importer, path: Path, result: Imported) -> None:
    columns = (
        "gpu precision cell hidden batch timesteps forward_ms backward_inputs_or_total_ms "
        "backward_weights_ms n_backward_columns"
    )
    for row in read_table(path, columns):
        common = _common(importer, path, row, result)
        if common is None:
            continue
        if row["cell"] not in _GATES:
            result.skip(f"unknown cell {row['cell']}", 3)
            continue
        fields = common | _rnn_fields(row, common["dtype"])
        _add(result, row, "forward_ms", fields | {"phase": "F"})
        total = row["n_backward_columns"] == "1"
        both = {"phase": "B", "factor": 2.0, "traffic": 2 * fields["traffic"]}
        _add(result, row, "backward_inputs_or_total_ms",
             fields | (both if total else {"phase": "I"}))  # fmt: skip
        if not total:
            _add(result, row, "backward_weights_ms", fields | _weight_gradient(fields))


def _read_all_reduce(importer: Importer, path: Path, result: Imported) -> None:
    for row in read_table(path, "gpu num_floats n_devices n_nodes mean_time_ms algorithm"):
        device = device_of(row["gpu"])
        if device is None:
            result.skip(f"unknown device {row['gpu']}", kind="collective")
            continue
        group = row.whole("n_devices")
        nodes = group if device == "KNL7250" else row.whole("n_nodes") if row["n_nodes"] else 1
        label = (
            one_node(device, "", importer.name)
            if nodes == 1
            else several_nodes(nodes, device, "network", importer.name)
        )
        _add(result, row, "mean_time_ms", importer.fields(
            path, device=device, kind="collective", collective="all_reduce", group=group,
            bytes=4 * row.whole("num_floats"), algorithm="auto", bytes_are="fp32 elements",
            topology=label, software=row["algorithm"],
        ))  # fmt: skip


IMPORTER = Importer(
    name="deepbench",
    contains="kernel+launch",
    how="vendor libraries, mean of repeated runs",
    patterns={
        "gemm.csv": _read_gemm,
        "conv.csv": _read_conv,
        "rnn.csv": _read_rnn,
        "allreduce.csv": _read_all_reduce,
    },
)
