"""What an op is: its class, dtype and named dimensions, each affine in the batch."""

from enum import IntEnum

import msgspec

from simcore.errors import GraphError

Affine = tuple[int, int]  # (c0, c1): the value at batch b is c0 + c1 * b
MAX_SIZE = 2**60  # of a dimension or a number of bytes


class Phase(IntEnum):
    """What part of the training step an op belongs to (torch pipelining's letters)."""

    F = 0  # forward
    B = 1  # full backward
    I = 2  # noqa: E741 - input gradient, where the backward is split; the field's letter
    W = 3  # weight gradient, where the backward is split
    U = 4  # optimizer update


class OpClass(IntEnum):
    """Classes of ops that share a cost curve."""

    INPUT = 0
    VIEW = 1
    MATMUL = 2
    BATCHED_MATMUL = 3
    CONVOLUTION = 4
    ATTENTION = 5
    RNN = 6
    NORMALISATION = 7
    SOFTMAX = 8
    POINTWISE = 9
    REDUCTION = 10
    EMBEDDING = 11
    POOLING = 12
    COPY = 13
    LOSS = 14
    UPDATE = 15
    OTHER = 16
    GROUP = 17
    COLLECTIVE = 18  # communication among devices; runs on none of them


class Role(IntEnum):
    """What a tensor is to the training step."""

    ACTIVATION = 0
    PARAMETER = 1
    BUFFER = 2
    INPUT = 3
    GRADIENT = 4  # of a parameter


# the dimensions whose product, times the leading number, is the FLOPs of one op of the class
_FLOP_DIMS: dict[str, tuple[float, tuple[str, ...]]] = {
    "matmul": (2.0, ("m", "n", "k")),
    "batched_matmul": (2.0, ("b", "m", "n", "k")),
    "convolution": (2.0, ("n", "k", "out", "c", "filter")),
    "attention": (4.0, ("b", "h", "q", "kv", "d")),
}
CLASS_NAMES: tuple[str, ...] = tuple(member.name.lower() for member in OpClass)


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape of an op, from which FLOPs and bytes are derived at any batch.

    Attributes:
        op_class: lower-case name of an `OpClass`.
        dtype: dtype of the arithmetic, for example ``fp32``.
        dims: (name, c0, c1): the named dimension is c0 + c1 * batch. matmul m n k; batched_matmul
            b m n k; convolution n k out c filter (batch, output channels, output positions, input
            channels per group, filter positions); attention b h q kv d; rnn t b dirs gates h i;
            others: elements.
        factor: multiplies the FLOPs (2.5 for attention's backward, 2 for both gradients of a
            convolution).
        traffic: (c0, c1) bytes read and written.
    """

    op_class: str
    dtype: str
    dims: tuple[tuple[str, int, int], ...] = ()
    factor: float = 1.0
    traffic: Affine = (0, 0)

    def __post_init__(self) -> None:
        if self.op_class not in CLASS_NAMES:
            raise GraphError(f"signature: unknown op class {self.op_class!r}")
        missing = set(_FLOP_DIMS.get(self.op_class, (0.0, ()))[1]) - {dim[0] for dim in self.dims}
        if missing:
            raise GraphError(f"signature {self.op_class}: missing dims {sorted(missing)}")
        for name, constant, slope in (*self.dims, ("traffic", *self.traffic)):
            in_range = -MAX_SIZE <= constant <= MAX_SIZE and 0 <= slope <= MAX_SIZE
            if not in_range or (slope == 0 and constant < 0):
                raise GraphError(
                    f"signature {self.op_class}: {name} {constant} + {slope} * batch is not a size"
                )
        if not 0 <= self.factor < float("inf"):
            raise GraphError(f"signature {self.op_class}: factor {self.factor} is not a count")

    def dim(self, name: str, batch: int) -> int:
        """Returns the named dimension at a batch, 0 where the op has none of that name."""
        for dim_name, constant, slope in self.dims:
            if dim_name == name:
                return constant + slope * batch
        return 0

    def flops(self, batch: int) -> float:
        """Returns the FLOPs of one execution (a multiply-add counts 2)."""
        if self.op_class == "rnn":
            t, b, dirs, gates, h, i = (
                self.dim(n, batch) for n in ("t", "b", "dirs", "gates", "h", "i")
            )
            return self.factor * 2.0 * t * b * dirs * gates * h * (i + h)
        product, names = _FLOP_DIMS.get(self.op_class, (1.0, ("elements",)))
        for name in names:
            product *= self.dim(name, batch)
        return self.factor * product

    def traffic_bytes(self, batch: int) -> int:
        """Returns the bytes read and written by one execution."""
        return self.traffic[0] + self.traffic[1] * batch
