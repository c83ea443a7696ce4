"""Aceso's operators of a wide ResNet: one row -> records; channels follow from the width.

The network is a ResNet-50-like stack on 224 x 224 images: a stem of ``width`` channels, then four
stages with planes p = width 2^stage, whose blocks go p (1x1), 2p (3x3), 4p (1x1). Every row's
weights are held against the shape, and a row that does not fit is no record. Convolutions over a
tensor-parallel group gather their output and are no measurement of an op; what has no weights to
split (norms, ReLU, pooling) is done whole by every member.
"""

import re
from typing import Any, NamedTuple

from calibration.importers.source import (
    DTYPE_BYTES,
    Imported,
    elements_fields,
    matmul_fields,
)
from calibration.importers.transformer_rows import SUMMED
from simcore.units import MiB

DIFFERENT = "weights do not fit the shape that the name says"
JOINED = "several ops in one row (shortcut)"
_CONV = re.compile(r"block-([0-3])-(\d+)-(conv[123]|downsample)$")
_NORM = re.compile(r"block-([0-3])-(\d+)-(bn[123])$")
_RELU = re.compile(r"block-([0-3])-(\d+)-relu$")
_POSITIONS = (56, 28, 14, 7)  # of a stage's output, a side


class Conv(NamedTuple):
    """A convolution without bias."""

    n: int
    k: int
    c: int
    side: int  # of the input
    kernel: int
    stride: int

    @property
    def out_side(self) -> int:
        """Positions of the output, a side."""
        return -(-self.side // self.stride)

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.k * self.c * self.kernel**2


def conv_fields(conv: Conv, dtype: str, factor: float) -> dict[str, Any]:
    """Returns the fields of a convolution; with both gradients factor is 2."""
    size, out = DTYPE_BYTES[dtype], conv.out_side**2
    moved = conv.n * conv.c * conv.side**2 + conv.weights + conv.n * conv.k * out
    return {
        "kind": "op",
        "op_class": "convolution",
        "dtype": dtype,
        "dims": {
            "n": conv.n, "k": conv.k, "out": out, "c": conv.c, "filter": conv.kernel**2,
            "h": conv.side, "w": conv.side, "r": conv.kernel, "s": conv.kernel,
            "stride": conv.stride,
        },
        "factor": factor,
        "traffic": round(factor * size * moved),
    }  # fmt: skip


class Image(NamedTuple):
    """What a row of the network is of."""

    batch: int
    width: int
    shards: int
    dtype: str


def width_of(output_mb: float, batch: int, dtype: str) -> int:
    """Returns the width from the stem's output of 112 x 112 positions."""
    return round(output_mb * MiB / (batch * 112**2 * DTYPE_BYTES[dtype]))


def _conv(image: Image, op_name: str) -> Conv | None:
    if op_name == "conv1":
        return Conv(image.batch, image.width, 3, 224, 7, 2)
    found = _CONV.fullmatch(op_name)
    if found is None:
        return None
    stage, block, part = int(found[1]), int(found[2]), found[3]
    planes, first = image.width << stage, block == 0
    wide = image.width if stage == 0 else 2 * planes
    before, side = (wide, min(56, 2 * _POSITIONS[stage])) if first else (4 * planes, 0)
    side = side or _POSITIONS[stage]
    stride = 2 if first and stage > 0 else 1
    after = -(-side // stride)
    parts = {
        "conv1": Conv(image.batch, planes, before, side, 1, 1),
        "conv2": Conv(image.batch, 2 * planes, planes, side, 3, stride),
        "conv3": Conv(image.batch, 4 * planes, 2 * planes, after, 1, 1),
        "downsample": Conv(image.batch, 4 * planes, before, side, 1, stride),
    }
    return parts[part]


def _elementwise(image: Image, op_name: str) -> tuple[str, float, float, int, int] | None:
    """Returns class, passes of forward and backward, channels and side of an op without shards."""
    if op_name in ("bn1", "relu1"):
        kind = "normalisation" if op_name == "bn1" else "pointwise"
        return kind, 2.0, 3.0, image.width, 112
    if (found := _NORM.fullmatch(op_name)) is not None:
        stage, part = int(found[1]), found[3]
        side = _POSITIONS[stage]
        if part == "bn1" and found[2] == "0" and stage > 0:
            side *= 2
        return "normalisation", 2.0, 3.0, (image.width << stage) << int(part[2]) - 1, side
    if (found := _RELU.fullmatch(op_name)) is not None:
        stage = int(found[1])
        return "pointwise", 2.0, 3.0, 4 * image.width << stage, _POSITIONS[stage]
    return None


def _pooling(image: Image, op_name: str) -> dict[str, Any] | None:
    """Returns the fields of the two poolings; elements are those of the output."""
    size = DTYPE_BYTES[image.dtype]
    if op_name == "maxpool":
        out, seen = image.batch * image.width * 56**2, image.batch * image.width * 112**2
    elif op_name == "avgpool":
        out = image.batch * 32 * image.width
        seen = out * 49
    else:
        return None
    return {
        "kind": "op", "op_class": "pooling", "dtype": image.dtype, "dims": {"elements": out},
        "traffic": size * (out + seen),
    }  # fmt: skip


def add_rows(
    result: Imported, image: Image, op_name: str, row: dict[str, float], common: dict[str, Any]
) -> None:
    """Adds the records of one row with ``forward``, ``backward`` (s) and ``weights_mb``."""
    times = {"F": row["forward"], "B": row["backward"]}
    fields = _fields(image, op_name, row["weights_mb"])
    for phase, seconds in times.items():
        found = fields[phase]
        if isinstance(found, str):
            result.skip(found)
        else:
            result.add(**common, **found, phase=phase, target=op_name, seconds=seconds)


def _fields(image: Image, op_name: str, weights_mb: float) -> dict[str, Any]:
    """Returns phase -> fields, or the reason why there are none."""
    if op_name.endswith("downsample") and weights_mb == 0:
        stage = int(op_name.split("-")[1])
        added = elements_fields(
            "pointwise", image.dtype, 3.0, image.batch * _POSITIONS[stage] ** 2,
            4 * image.width << stage,
        )  # fmt: skip
        return {"F": added, "B": JOINED}
    conv = _conv(image, op_name)
    if conv is not None:
        return _conv_phases(image, conv, op_name, weights_mb)
    if op_name == "fc":
        return _last_layer(image, weights_mb)
    pooling = _pooling(image, op_name)
    if pooling is not None:
        return {"F": pooling, "B": pooling}
    found = _elementwise(image, op_name)
    if found is None:
        return dict.fromkeys("FB", f"unknown op {op_name}")
    op_class, forward, backward, channels, side = found
    rows = image.batch * side**2
    return {
        phase: elements_fields(op_class, image.dtype, passes, rows, channels)
        for phase, passes in (("F", forward), ("B", backward))
    }


def _conv_phases(image: Image, conv: Conv, op_name: str, weights_mb: float) -> dict[str, Any]:
    if image.shards > 1:
        return dict.fromkeys("FB", SUMMED)
    if op_name.endswith("downsample"):
        return dict.fromkeys("FB", JOINED)
    expected = conv.weights * DTYPE_BYTES[image.dtype] / MiB
    if abs(weights_mb - expected) > 0.001 + 0.001 * expected:
        return dict.fromkeys("FB", DIFFERENT)
    return {
        phase: conv_fields(conv, image.dtype, factor) for phase, factor in (("F", 1.0), ("B", 2.0))
    }


def _last_layer(image: Image, weights_mb: float) -> dict[str, Any]:
    """The classifier has k inputs and n outputs with a bias: k n + n weights."""
    inputs = 32 * image.width
    outputs = round(weights_mb * MiB / DTYPE_BYTES[image.dtype] / (inputs + 1))
    return {
        phase: matmul_fields(image.batch, outputs, inputs, image.dtype, factor)
        for phase, factor in (("F", 1.0), ("B", 2.0))
    }
