"""What a graph is built from: ops and tensors as records, and how they become arrays."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from simcore.errors import GraphError
from simcore.loops import OpLoops, renumbered
from simcore.signature import Affine, OpClass, Phase, Role, Signature

MAX_BYTES = 2**60  # keeps every sum of bytes inside int64


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCosts:
    """Measured seconds of a graph that was profiled, not captured."""

    seconds: NDArray[np.float64]  # [op] s; NaN = cost the op's signature; inf = cannot run on a GPU
    cpu_seconds: NDArray[np.float64] | None  # [op] s; None = the file has no CPU times
    measured_on: str | None  # device kind, None = unknown
    batch: int | None  # samples the seconds are for, None = unknown


class Out(NamedTuple):
    """One output of an op, as given to `GraphBuilder.op`."""

    bytes: int | Affine
    storage_of: int | None = None  # tensor handle whose storage it shares (view or in-place)
    role: Role = Role.ACTIVATION
    name: str | None = None


class TensorPart(NamedTuple):
    """A tensor of a graph that is being built."""

    name: str
    producer: int
    bytes: Affine
    storage: int
    role: Role


class OpPart(NamedTuple):
    """An op of a graph that is being built; the fields are those of `OpGraph`."""

    name: str
    module: str
    target: str
    phase: Phase
    op_class: OpClass
    signature: Signature | None
    inputs: list[int]
    kernels: int
    sync: bool
    workspace: Affine
    resident: Affine
    elements: int
    seconds: float
    cpu_seconds: float
    loops: OpLoops | None


def affine_bytes(value: int | Affine, what: str) -> Affine:
    """Returns bytes as a checked (c0, c1) pair."""
    pair = value if isinstance(value, tuple) else (value, 0)
    for part in pair:
        if not -MAX_BYTES <= part <= MAX_BYTES or part != int(part):  # NaN and inf are refused too
            raise GraphError(f"{what}: {part} is not a whole number of bytes below 2**60")
    if pair[1] < 0 or (pair[1] == 0 and pair[0] < 0):
        raise GraphError(f"{what}: {pair} bytes is negative")
    return int(pair[0]), int(pair[1])


def fixed_costs(
    ops: Sequence[OpPart], measured_on: str | None, batch: int | None
) -> FixedCosts | None:
    """Returns the measured seconds of all ops, None where no op has any."""
    seconds = np.array([op.seconds for op in ops], np.float64)
    cpu_seconds = np.array([op.cpu_seconds for op in ops], np.float64)
    seconds[np.isnan(seconds)] = np.nan  # one bit pattern, so equal graphs have equal hashes
    cpu_seconds[np.isnan(cpu_seconds)] = np.nan
    has_cpu = not np.isnan(cpu_seconds).all()
    if np.isnan(seconds).all() and not has_cpu:
        return None
    return FixedCosts(
        seconds=seconds,
        cpu_seconds=cpu_seconds if has_cpu else None,
        measured_on=measured_on,
        batch=batch,
    )


def tensor_columns(ops: Sequence[OpPart], tensors: Sequence[TensorPart]) -> dict[str, Any]:
    """Numbers tensors by producer, parameters first, and returns the fields that name them."""
    order = sorted(range(len(tensors)), key=lambda t: tensors[t].producer)
    number = {tensor: i for i, tensor in enumerate(order)}
    ordered = [tensors[t] for t in order]
    producer = np.array([t.producer for t in ordered], np.int32)
    storages = {s: i for i, s in enumerate(dict.fromkeys(t.storage for t in ordered))}
    used = [sorted(number[t] for t in op.inputs) for op in ops]
    first_output = np.searchsorted(producer, np.arange(len(ops) + 1)).astype(np.int64)
    return {
        "first_input": np.cumsum([0] + [len(u) for u in used], dtype=np.int64),
        "inputs": np.array([t for u in used for t in u], np.int32),
        "first_output": first_output,
        "tensor_names": tuple(t.name for t in ordered),
        "tensor_producer": producer,
        "tensor_bytes": np.array([t.bytes for t in ordered], np.int64).reshape(-1, 2),
        "tensor_storage": np.array([storages[t.storage] for t in ordered], np.int32),
        "tensor_role": np.array([t.role for t in ordered], np.uint8),
        "loops": _numbered_loops(ops, number, first_output.tolist()),
    }


def _numbered_loops(
    ops: Sequence[OpPart], number: Mapping[int, int], first_output: Sequence[int]
) -> tuple[OpLoops | None, ...] | None:
    """Returns the loops of all ops with tensor ids of the graph, None where no op has any."""
    if all(op.loops is None for op in ops):
        return None
    return tuple(
        None if op.loops is None else renumbered(op.loops, number, first)
        for op, first in zip(ops, first_output, strict=False)  # which ends in one number more
    )


def hash_of(fields: Mapping[str, Any]) -> str:
    """Returns 16 hex digits that change with any of a graph's fields."""
    digest = hashlib.sha256()
    for key, value in fields.items():
        if isinstance(value, np.ndarray):
            digest.update(f"{key}{value.dtype}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, FixedCosts):
            digest.update(value.seconds.tobytes())
            digest.update(b"" if value.cpu_seconds is None else value.cpu_seconds.tobytes())
            digest.update(repr((value.measured_on, value.batch)).encode())
        elif key == "loops":
            digest.update(key.encode() + msgspec.json.encode(value))
        else:
            digest.update(f"{key}{value!r}".encode())
    return digest.hexdigest()[:16]
