"""OpGraph -> totals and rows a person reads: ops, FLOPs and bytes, grouped by kind or module."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simcore.graph import FixedCosts, OpGraph
from simcore.job import Job
from simcore.signature import CLASS_NAMES, Phase, Role

Row = dict[str, Any]  # what the command line prints as JSON; the unit is in the key


def totals(graph: OpGraph, job: Job) -> Row:
    """Returns the graph's sizes at the job's batch."""
    sized = graph.at_batch(job.batch)
    seconds = None if graph.fixed is None else graph.fixed.seconds
    return {
        "name": graph.name,
        "hash": graph.content_hash(),
        "job": {name: getattr(job, name) for name in job.__struct_fields__},
        "ops": graph.num_ops,
        "ops_by_phase": {p.name: int((graph.phase == p).sum()) for p in Phase},
        "units": graph.num_units,
        "edges": len(graph.edges()[0]),
        "tensors": graph.num_tensors,
        "trained_parameters": int(graph.elements.sum()),
        "parameter_bytes": int(_parameter_bytes(graph).sum()),
        "activation_bytes": int(_activation_bytes(graph, job).sum()),
        "flops": float(sized.flops.sum()),
        "measured_s": None if seconds is None else float(seconds[np.isfinite(seconds)].sum()),
        "measured_on": None if graph.fixed is None else graph.fixed.measured_on,
    }


def groups(graph: OpGraph, job: Job, keys: Sequence[str]) -> list[Row]:
    """Returns one row per key, in the order of the keys' first ops. `keys` is [op]."""
    index = {key: row for row, key in enumerate(dict.fromkeys(keys))}
    row_of_op = np.array([index[key] for key in keys])
    columns = {
        "ops": np.ones(graph.num_ops),
        "flops": graph.at_batch(job.batch).flops,
        "parameter_bytes": _parameter_bytes(graph),
        "activation_bytes": _activation_bytes(graph, job),
    }
    sums = {
        label: np.bincount(row_of_op, weights=column).tolist() for label, column in columns.items()
    }
    rows = [
        {"name": key}
        | {
            label: total[row] if label == "flops" else int(total[row])
            for label, total in sums.items()
        }
        for key, row in index.items()
    ]
    if graph.fixed is not None:
        for row, measured in zip(rows, _measured(graph.fixed, row_of_op), strict=True):
            row["measured_s"] = measured
    return rows


def _measured(fixed: FixedCosts, row_of_op: NDArray[np.int64]) -> list[float | None]:
    """Returns the measured seconds of each row's ops, None where the file has none."""
    known = np.isfinite(fixed.seconds)
    seconds = np.bincount(row_of_op, weights=np.where(known, fixed.seconds, 0.0))
    count = np.bincount(row_of_op, weights=known)
    return [float(s) if n else None for s, n in zip(seconds, count, strict=True)]


def kinds(graph: OpGraph) -> list[str]:
    """Returns the class of each op, [op]."""
    return [CLASS_NAMES[op_class] for op_class in graph.op_class]


def modules(graph: OpGraph, *, depth: int) -> list[str]:
    """Returns the first levels of each op's module path, [op]; "(none)" where it has none."""
    return [".".join(module.split(".")[:depth]) or "(none)" for module in graph.op_modules]


def _parameter_bytes(graph: OpGraph) -> NDArray[np.int64]:
    """Returns the parameter bytes that each op is the first to read, [op] bytes."""
    held = np.zeros(graph.num_ops, np.int64)
    used = np.diff(graph.first_consumer) > 0
    is_parameter = (graph.tensor_role == Role.PARAMETER) & (graph.tensor_producer < 0)
    tensor = np.flatnonzero(is_parameter & used)
    np.add.at(held, graph.consumers[graph.first_consumer[tensor]], graph.tensor_bytes[tensor, 0])
    return held


def _activation_bytes(graph: OpGraph, job: Job) -> NDArray[np.int64]:
    """Returns the bytes of the storages that each forward op is the first to write, [op] bytes."""
    written = np.zeros(graph.num_ops, np.int64)
    activation = (graph.tensor_role == Role.ACTIVATION) & (graph.tensor_producer >= 0)
    tensor = np.flatnonzero(activation)
    tensor = tensor[graph.phase[graph.tensor_producer[tensor]] == Phase.F]
    storage, first = np.unique(graph.tensor_storage[tensor], return_index=True)
    fresh = ~graph.persistent_storage[storage]
    size = graph.at_batch(job.batch).storage_bytes[storage[fresh]]
    np.add.at(written, graph.tensor_producer[tensor[first[fresh]]], size)
    return written
