"""Ops that the graph has in one piece and that torch takes apart: run for real, timed in one piece.

The counterpart of `simcore.frontends.torch_fused`, which records the same ops without running them:
attention, recurrent layers and dropout, forward and backward, in the same order and under the same
names, so that what is timed here is what the graph has.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd import Function

from simcore.frontends.torch_fused import CELLS
from simcore.frontends.torch_private import compiled_composite

Tensor = torch.Tensor


class Watch(Protocol):
    """What times a piece of work as one op."""

    suspended: bool  # inside such a piece

    def whole(self, target: str) -> AbstractContextManager[None]:
        """Times what runs inside as one op of that name."""


class _Whole(Function):
    """Runs a function of tensors as one op, and its gradient as another."""

    @staticmethod
    def forward(
        ctx: Any, watch: Watch, target: str, compute: Callable[..., Any], *inputs: Tensor | None
    ) -> Any:
        needed = ctx.needs_input_grad[3:]
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(need)
            for tensor, need in zip(inputs, needed, strict=True)
        ]
        with torch.enable_grad(), watch.whole(target):
            outputs = compute(*leaves)
        ctx.watch, ctx.target, ctx.leaves, ctx.outputs = watch, target, leaves, outputs
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        pairs = [(o, g) for o, g in zip(ctx.outputs, grads, strict=True) if g is not None]
        outputs, given = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        wanted = [leaf for leaf in ctx.leaves if leaf is not None and leaf.requires_grad]
        with ctx.watch.whole(f"{ctx.target}_backward"):
            found = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
        by_leaf = dict(zip(map(id, wanted), found, strict=True))
        return None, None, None, *(by_leaf.get(id(leaf)) for leaf in ctx.leaves)


def whole_kernels(watch: Watch) -> dict[str, Callable[..., Any]]:
    """Returns, for `composite_kernels`, what runs and times each of these ops whole."""
    return {
        "scaled_dot_product_attention": partial(_attention, watch),
        "dropout": partial(_dropout, watch),
        **{f"{mode}.input": partial(_recurrent, watch, mode) for mode in CELLS},
        **{f"{mode}_cell": partial(_cell, watch, mode) for mode in CELLS},
    }


def _dropout(watch: Watch, data: Tensor, p: float, train: bool) -> Any:
    if watch.suspended or not train or not 0 < p < 1:
        return NotImplemented
    return torch.native_dropout(data, p, train)[0]


def _attention(
    watch: Watch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: Any,
    **options: Any,
) -> Any:
    """Shapes that torch would refuse are left to torch, for its message."""
    if watch.suspended:
        return NotImplemented
    run = compiled_composite("scaled_dot_product_attention")

    def compute(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor]:
        return (run(query, key, value, mask, *rest, **options),)

    (out,) = _Whole.apply(watch, "attention", compute, query, key, value, attn_mask)  # type: ignore[no-untyped-call]
    return out


def _recurrent(  # noqa: PLR0913, PLR0917 - torch's own signature
    watch: Watch,
    mode: str,
    data: Tensor,
    state: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Runs one of torch's recurrent functions layer by layer."""
    if watch.suspended:
        return NotImplemented
    cell = CELLS[mode]
    h0, c0 = state if cell.has_cell else (state, None)
    run = compiled_composite(f"{mode}.input")

    def compute(x: Tensor, h: Tensor, c: Tensor | None, *own: Tensor) -> Any:
        begin = h if c is None else [h, c]
        return run(x, begin, list(own), has_biases, 1, 0.0, train, bidirectional, False)

    directions = 2 if bidirectional else 1
    per_layer = len(weights) // num_layers
    x = data.transpose(0, 1) if batch_first else data
    ends: list[Sequence[Tensor]] = []
    for layer in range(num_layers):
        chosen = slice(layer * directions, (layer + 1) * directions)
        own = weights[layer * per_layer : (layer + 1) * per_layer]
        begin = h0[chosen], None if c0 is None else c0[chosen]
        x, *end = _Whole.apply(watch, f"{mode}_layer", compute, x, *begin, *own)  # type: ignore[no-untyped-call]
        ends.append(end)
        if train and dropout and layer + 1 < num_layers:
            x = torch.native_dropout(x, dropout, True)[0]
    out = x.transpose(0, 1) if batch_first else x
    return (out, *(_joined(parts) for parts in zip(*ends, strict=True)))


def _cell(watch: Watch, mode: str, data: Tensor, state: Any, *weights: Tensor | None) -> Any:
    """Runs one step of a recurrent cell."""
    if watch.suspended:
        return NotImplemented
    cell = CELLS[mode]
    h0, c0 = state if cell.has_cell else (state, None)
    run = compiled_composite(f"{mode}_cell")

    def compute(x: Tensor, h: Tensor, c: Tensor | None, *own: Tensor | None) -> Any:
        found = run(x, h if c is None else [h, c], *own)
        return found if isinstance(found, tuple) else (found,)

    made = _Whole.apply(watch, f"{mode}_layer", compute, data, h0, c0, *weights)  # type: ignore[no-untyped-call]
    return made if c0 is not None else made[0]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
