"""Aceso's operators of a transformer layer: one row -> records, in closed form of the model.

Rows are of one process of a tensor-parallel group, and hold the collectives that such an op needs:
a column-parallel product sums its input's gradient in the backward, a row-parallel one its output
in the forward (Megatron-LM). Those phases are no measurement of an op. Both values of ``tp_algo``
split a product the same way, which the equal times show.

What a row runs beside its op is in the profiler's source (microsoft/SuperScaler, flex_ops.py), and
the times agree: with these passes each op moves its bytes as fast as the dropout of the scores, on
all seven GPUs of the tables, in 16 and in 32 bits.

- queries, keys and values: a bias is added, and each of them is copied to be contiguous;
- after attention and MLP: bias, dropout and sum are three kernels;
- GELU's backward sums the gradient of its bias;
- the backward of a norm adds the gradient of the residual, which leaves the row as well;
- the last norm copies its input first where there are several samples.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from calibration.importers.source import (
    DTYPE_BYTES,
    Imported,
    batched_fields,
    elements_fields,
    matmul_fields,
)

SUMMED = "contains a collective over the tensor-parallel group"
MIXED = "several ops in one row (logits and loss)"
COPIED = "several ops in one row (product, bias and copies)"
EMBEDDED = "several ops in one row (words, positions, sum, dropout and a copy)"
APART = "several ops in one row (scores scaled, masked and softmax apart)"
NOT_RUN = "a placeholder: too large to run"
LAST = "several ops in one row (a copy and the last norm)"


class Layer(NamedTuple):
    """What a row is of."""

    batch: int
    length: int
    hidden: int
    heads: int
    shards: int
    dtype: str
    product_dtype: str = ""  # of the products' arithmetic, where it is another
    input_gradient_only: bool = False  # in the backward of products with weights

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.batch * self.length

    @property
    def products(self) -> int:
        """Products of one head each, of one shard."""
        return self.batch * self.heads // self.shards


Phase = tuple[str, dict[str, Any] | str]  # phase; fields, or why there are none


def records(layer: Layer, op_name: str) -> tuple[Phase, Phase] | None:
    """Returns forward and backward of an op, None where the op is not known."""
    make = _OPS.get(op_name.removeprefix("enc-"))
    return None if make is None else make(layer)


def _product(layer: Layer, n: int, k: int, *, column: bool) -> tuple[Phase, Phase]:
    shards = layer.shards
    n, k = (n // shards, k) if column else (n, k // shards)
    phases: list[Phase] = []
    backward = ("I", 1.0) if layer.input_gradient_only else ("B", 2.0)
    for phase, factor in (("F", 1.0), backward):
        summed = shards > 1 and (phase != "F") == column
        fields = matmul_fields(layer.tokens, n, k, layer.product_dtype or layer.dtype, factor)
        phases.append((phase, SUMMED if summed else fields))
    return phases[0], phases[1]


def _attention_product(layer: Layer, n: int, k: int) -> tuple[Phase, Phase]:
    dtype = layer.product_dtype or layer.dtype
    forward, backward = (
        batched_fields(layer.products, layer.length, n, k, dtype, factor=factor)
        for factor in (1.0, 2.0)
    )
    return ("F", forward), ("B", backward)


def _passes(
    op_class: str, forward: float, backward: float, size: Callable[[Layer], tuple[int, int]]
) -> Callable[[Layer], tuple[Phase, Phase]]:
    """Returns the maker of an op that goes so many times over rows x columns."""

    def make(layer: Layer) -> tuple[Phase, Phase]:
        rows, cols = size(layer)
        return (
            ("F", elements_fields(op_class, layer.dtype, forward, rows, cols)),
            ("B", elements_fields(op_class, layer.dtype, backward, rows, cols)),
        )

    return make


def _masked(forward: float, backward: float, size: Callable[[Layer], tuple[int, int]]) -> Any:
    """As `_passes`, of a dropout: its mask takes one byte an element."""

    def make(layer: Layer) -> tuple[Phase, Phase]:
        mask = 1 / DTYPE_BYTES[layer.dtype]
        return _passes("pointwise", forward + mask, backward + mask, size)(layer)

    return make


def _scores(layer: Layer) -> tuple[int, int]:
    return layer.products * layer.length, layer.length


def _states(layer: Layer) -> tuple[int, int]:
    return layer.tokens, layer.hidden


def _inner(layer: Layer) -> tuple[int, int]:
    return layer.tokens, 4 * layer.hidden // layer.shards


def _softmax(layer: Layer) -> tuple[Phase, Phase]:
    """Megatron's causal kernel reads the half below the diagonal (the times are too short for all).

    It takes 16-bit scores of a number of heads that its blocks of four divide. Else the ops are
    apart: on all GPUs of the tables such rows take four (fp32) to twelve times as long.
    """
    if DTYPE_BYTES[layer.dtype] != 2 or layer.products % 4:
        return ("F", APART), ("B", APART)
    return _passes("softmax", 1.5, 2.0, _scores)(layer)


def _norm(layer: Layer) -> tuple[Phase, Phase]:
    """Its backward: of the input, of weights (where they are asked for), and a sum."""
    backward = 3.0 + (0.0 if layer.input_gradient_only else 2.0) + 3.0
    return _passes("normalisation", 2.0, backward, _states)(layer)


_OPS: dict[str, Callable[[Layer], tuple[Phase, Phase]]] = {
    "attention-qkv": lambda _: (("F", COPIED), ("B", COPIED)),
    "attention-dense": lambda s: _product(s, s.hidden, s.hidden, column=False),
    "MLP-GEMM-1": lambda s: _product(s, 4 * s.hidden, s.hidden, column=True),
    "MLP-GEMM-2": lambda s: _product(s, s.hidden, 4 * s.hidden, column=False),
    "attention-score": lambda s: _attention_product(s, s.length, s.hidden // s.heads),
    "attention-context": lambda s: _attention_product(s, s.hidden // s.heads, s.length),
    "attention-softmax": _softmax,
    "attention-dropout": _masked(2.0, 2.0, _scores),
    "MLP-gelu": _passes("pointwise", 2.0, 4.0, _inner),
    "post-attention-dropout": _masked(7.0, 4.0, _states),
    "post-MLP-dropout": _masked(7.0, 4.0, _states),
    "1st-layernorm": _norm,
    "2nd-layernorm": _norm,
    "final-layernorm": lambda _: (("F", LAST), ("B", LAST)),
    "encoder-embedding": lambda _: (("F", EMBEDDED), ("B", EMBEDDED)),
    "gpt-post-process": lambda _: (("F", MIXED), ("B", MIXED)),
}


def add_rows(
    result: Imported,
    layer: Layer,
    op_name: str,
    seconds: Iterator[float | None],
    common: dict[str, Any],
) -> None:
    """Adds the records of one row.

    Args:
        result: to add to.
        layer: what the row is of.
        op_name: as in the row.
        seconds: the forward's, then the backward's; None where it was not run.
        common: fields that all records of the file have.
    """
    phases = records(layer, op_name)
    if phases is None:
        result.skip(f"unknown op {op_name}", 2)
        return
    for (phase, fields), time in zip(phases, seconds, strict=True):
        if isinstance(fields, str):
            result.skip(fields)
        elif time is None:
            result.skip(NOT_RUN)
        else:
            result.add(**common, **fields, phase=phase, target=op_name, seconds=time)
