"""Ops that accelerators run in one piece but a CPU build of torch may take apart: kept whole.

Recurrent layers, attention and dropout reach the dispatcher in another form on every device: one
kernel here, thousands of small ops there. The three are caught before torch takes them apart, and
recorded as an accelerator runs them: one op per recurrent layer (both directions together), one per
attention and one per dropout, forward and backward.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import Function

from simcore.frontends.torch_signatures import Kind, attention_kind
from simcore.signature import OpClass

Tensor = torch.Tensor


class Emitter(Protocol):
    """What records an op that never ran."""

    def emit(
        self,
        target: str,
        kind: Kind,
        inputs: Iterable[Tensor | None],
        outputs: Iterable[Tensor | None],
        kernels: int = 1,
    ) -> None:
        """Records one op from the tensors it reads and the fresh tensors it writes."""


class Cell(NamedTuple):
    """One kind of recurrent cell."""

    gates: int
    has_cell: bool  # a cell state beside the hidden state
    saved: int  # hidden-sized values per step and sample kept for the backward, output excluded


CELLS = {
    "lstm": Cell(4, True, 6),  # four gates, the cell state and its tanh
    "gru": Cell(3, False, 4),  # three gates and the recurrent part of the new one
    "rnn_tanh": Cell(1, False, 0),
    "rnn_relu": Cell(1, False, 0),
}


class _RecurrentLayer(Function):
    """One layer over the whole sequence, all directions; nothing is computed."""

    @staticmethod
    def forward(
        ctx: Any,
        emitter: Emitter,
        mode: str,
        x: Tensor,
        h0: Tensor,
        c0: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        cell, directions = CELLS[mode], h0.shape[0]
        steps, batch = x.shape[:2]
        hidden = weights[0].shape[0] // cell.gates
        out = x.new_empty(steps, batch, directions * h0.shape[2])
        hn = torch.empty_like(h0)
        cn = None if c0 is None else torch.empty_like(c0)
        saved = x.new_empty(steps, batch, directions, cell.saved * hidden) if cell.saved else None
        kind = recurrent_kind(mode, x, h0, hidden)
        emitter.emit(f"{mode}_layer", kind, (x, h0, c0, *weights), (out, hn, cn, saved), steps)
        ctx.emitter, ctx.mode, ctx.kind = emitter, mode, kind
        ctx.save_for_backward(x, h0, c0, out, saved, *weights)
        ctx.set_materialize_grads(False)
        return out, hn, cn

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, h0, c0, out, saved, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        inputs = (x, h0, c0, *weights)
        results = [torch.empty_like(t) if n else None for t, n in zip(inputs, needed, strict=True)]
        ctx.emitter.emit(
            f"{ctx.mode}_layer_backward",
            ctx.kind._replace(factor=2 * ctx.kind.factor),
            (*grads, *inputs, out, saved),
            results,
            x.shape[0],
        )
        return None, None, *results


def recurrent_kind(mode: str, x: Tensor, h0: Tensor, hidden: int) -> Kind:
    """Returns the kind of one recurrent layer; a projected hidden state is in the factor."""
    gates, projected = CELLS[mode].gates, h0.shape[2]
    steps, batch, width = x.shape
    dims = {"t": steps, "b": batch, "dirs": h0.shape[0], "gates": gates, "h": hidden, "i": width}
    factor = 1.0
    if projected != hidden:
        factor = (width + projected + projected / gates) / (width + hidden)
    return Kind(OpClass.RNN, tuple(dims.items()), factor)


class _Attention(Function):
    """Fused attention: keeps output and log-sum-exp, never the scores; nothing is computed."""

    @staticmethod
    def forward(
        ctx: Any, emitter: Emitter, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        leads = query.shape[:-3], key.shape[:-3], value.shape[:-3]
        lead = torch.broadcast_shapes(*leads)  # type: ignore[no-untyped-call]
        heads = query.shape[-3:-2]
        shape = (*lead, *query.shape[-2:-1], *heads, value.shape[-1])
        out = query.new_empty(shape)  # heads after positions, as kernels lay it out
        if heads:
            out = out.transpose(-3, -2)
        sums = query.new_empty(out.shape[:-1], dtype=torch.float32)
        shapes = (out.shape[:-1] + query.shape[-1:], key.shape, value.shape)
        kind = attention_kind(*shapes)
        emitter.emit("attention", kind, (query, key, value, mask), (out, sums))
        ctx.emitter, ctx.kind = emitter, attention_kind(*shapes, backward=True)
        ctx.save_for_backward(query, key, value, mask, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        pairs = zip(saved[:4], needed, strict=True)
        results = [torch.empty_like(tensor) if need else None for tensor, need in pairs]
        ctx.emitter.emit("attention_backward", ctx.kind, (grad, *saved), results)
        return None, *results


def fused_kernels(emitter: Emitter) -> dict[str, Callable[..., Any]]:
    """Returns, for `composite_kernels`, what records each of these ops whole."""
    return {
        "scaled_dot_product_attention": partial(_attention, emitter),
        "dropout": _dropout,
        **{f"{mode}.input": partial(_recurrent, emitter, mode) for mode in CELLS},
        **{f"{mode}_cell": partial(_cell, emitter, mode) for mode in CELLS},
    }


def _dropout(data: Tensor, p: float, train: bool) -> Any:
    """The accelerators' dropout keeps a mask of one byte an element, the CPU's one of floats."""
    if not train or not 0 < p < 1:
        return NotImplemented
    return torch.native_dropout(data, p, train)[0]


def _attention(  # noqa: PLR0913, PLR0917 - torch's own signature
    emitter: Emitter,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Shapes that torch would refuse are left to torch, for its message."""
    del dropout_p, is_causal, scale  # they change no cost
    heads = query.shape[-3:-2], key.shape[-3:-2]
    if query.dim() < 2 or query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        return NotImplemented
    if heads[0] != heads[1] and not enable_gqa:
        return NotImplemented
    return _Attention.apply(emitter, query, key, value, attn_mask)  # type: ignore[no-untyped-call]


def _recurrent(  # noqa: PLR0913, PLR0917 - torch's own signature
    emitter: Emitter,
    mode: str,
    data: Tensor,
    state: Any,
    weights: Sequence[Tensor],
    _has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Runs one of torch's recurrent functions as a loop over its layers."""
    h0, c0 = state if CELLS[mode].has_cell else (state, None)
    directions = 2 if bidirectional else 1
    per_layer = len(weights) // num_layers
    x = data.transpose(0, 1) if batch_first else data
    ends: list[tuple[Tensor, Tensor | None]] = []
    for layer in range(num_layers):
        chosen = slice(layer * directions, (layer + 1) * directions)
        x, hn, cn = _RecurrentLayer.apply(  # type: ignore[no-untyped-call]
            emitter, mode, x, h0[chosen], None if c0 is None else c0[chosen],
            *weights[layer * per_layer : (layer + 1) * per_layer],
        )  # fmt: skip
        ends.append((hn, cn))
        if train and dropout and layer + 1 < num_layers:
            x = torch.native_dropout(x, dropout, True)[0]
    out = x.transpose(0, 1) if batch_first else x
    hidden = _joined([hn for hn, _ in ends])
    cells = [cn for _, cn in ends if cn is not None]
    return (out, hidden, _joined(cells)) if cells else (out, hidden)


def _cell(
    emitter: Emitter, mode: str, data: Tensor, state: Any, *weights: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs one step of a recurrent cell: a layer over one position."""
    h0, c0 = state if CELLS[mode].has_cell else (state, None)
    _, hn, cn = _RecurrentLayer.apply(  # type: ignore[no-untyped-call]
        emitter, mode, data[None], h0[None], None if c0 is None else c0[None],
        *(weight for weight in weights if weight is not None),
    )  # fmt: skip
    return hn[0] if cn is None else (hn[0], cn[0])


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
