"""What a graph is built from: ops and tensors as records, before they become arrays."""

from typing import NamedTuple

from simcore.errors import GraphError
from simcore.signature import Affine, OpClass, Phase, Role, Signature

MAX_BYTES = 2**60  # keeps every sum of bytes inside int64


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


def affine_bytes(value: int | Affine, what: str) -> Affine:
    """Returns bytes as a checked (c0, c1) pair."""
    pair = value if isinstance(value, tuple) else (value, 0)
    for part in pair:
        if not -MAX_BYTES <= part <= MAX_BYTES or part != int(part):  # NaN and inf are refused too
            raise GraphError(f"{what}: {part} is not a whole number of bytes below 2**60")
    if pair[1] < 0 or (pair[1] == 0 and pair[0] < 0):
        raise GraphError(f"{what}: {pair} bytes is negative")
    return int(pair[0]), int(pair[1])
