"""Ops that the simulator keeps in one piece (attention, recurrent layers), as they run for real.

The capture records them without running them. Here each becomes a pair of calls: the forward runs
torch's own op under autograd and keeps what autograd saved, the backward asks autograd for the
gradients. Both are in one placement unit, so they meet in the same process.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from simcore.frontends.torch_fused import CELLS, fused_kernels
from simcore.frontends.torch_signatures import Kind

Tensor = torch.Tensor
Context = dict[int, Any]  # storage of the first output -> (inputs, outputs) with their history

_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_ATTENTION_OPTIONS = ("dropout_p", "is_causal", "scale", "enable_gqa")


class Tensors(NamedTuple):
    """What a kept op reads and makes, and what runs it."""

    read: Sequence[Tensor | None]
    made: Sequence[Tensor | None]
    run: Callable[..., Any]  # called with (context, key, the first tensors that are read)
    num_args: int  # how many of those it wants; the others are in the context


class CallRecorder(Protocol):
    """What the two calls are recorded by."""

    def emit_whole(self, target: str, kind: Kind, tensors: Tensors, kernels: int) -> None:
        """Records an op that reads and writes these tensors, and what runs it."""


class WholeOp:
    """Records one kept op, forward and backward."""

    def __init__(self, recorder: CallRecorder, run: Callable[..., Any], num_results: int) -> None:
        self.recorder = recorder
        self.run = run
        self.num_results = num_results  # of the forward, which are what has gradients

    def emit(
        self,
        target: str,
        kind: Kind,
        inputs: Iterable[Tensor | None],
        outputs: Iterable[Tensor | None],
        kernels: int = 1,
    ) -> None:
        """Records the forward, or the backward, which the recorder knows by its name."""
        read, made = list(inputs), list(outputs)
        if target.endswith("_backward"):
            tensors = Tensors(read, made, run_backward, self.num_results)
        else:
            tensors = Tensors(read, made, partial(run_forward, run=self.run), len(read))
        self.recorder.emit_whole(target, kind, tensors, kernels)


def run_forward(
    context: Context,
    key: int,
    tensors: Sequence[Tensor | None],
    *,
    run: Callable[..., Any],
) -> list[Tensor | None]:
    """Runs a kept op and keeps its history.

    Args:
        context: where the backward finds it.
        key: under which.
        tensors: the op's inputs.
        run: torch's function.
    """
    leaves = [
        None if tensor is None else tensor.detach().requires_grad_(tensor.is_floating_point())
        for tensor in tensors
    ]
    with torch.enable_grad():
        results = run(*leaves)
    context[key] = leaves, results
    return [None if result is None else result.detach() for result in results]


def run_backward(
    context: Context, key: int, tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Returns the gradients of a kept op's inputs, None where autograd has none."""
    leaves, results = context.pop(key)
    pairs = [
        (result, grad)
        for result, grad in zip(results, tensors, strict=True)
        if result is not None and grad is not None
    ]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    outs, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, wanted, grads, allow_unused=True))
    return [next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves]


def whole_kernels(recorder: CallRecorder) -> dict[str, Callable[..., Any]]:
    """Returns, for `composite_kernels`, what records each kept op with what runs it."""
    plain = fused_kernels(WholeOp(recorder, _nothing, 0))
    kernels = {name: partial(_recurrent, recorder, name) for name in plain}
    return kernels | {
        "scaled_dot_product_attention": partial(_attention, recorder),
        "dropout": plain["dropout"],
    }


def _nothing() -> tuple[()]:
    return ()


def _attention(recorder: CallRecorder, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
    options = {name: given[name] for name in _ATTENTION_OPTIONS if name in given}
    whole = WholeOp(recorder, partial(run_attention, options), 1)
    return fused_kernels(whole)["scaled_dot_product_attention"](*args, **kwargs)


def run_attention(options: dict[str, Any], *tensors: Tensor | None) -> tuple[Tensor]:
    """Runs torch's attention on (query, key, value, mask)."""
    query, key, value, mask = tensors
    attention: Callable[..., Tensor] = F.scaled_dot_product_attention
    return (attention(query, key, value, mask, **options),)


def cut_attention(
    run: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    queries: NDArray[np.int64],
    keys: NDArray[np.int64],
) -> tuple[Callable[..., Any], list[Tensor | None]]:
    """Returns the forward of a part of the queries: what is causal says so by a mask.

    Args:
        run: the forward of a kept attention.
        tensors: query, key, value and mask.
        queries: places of the queries in the whole, [query].
        keys: places of the keys, [key].
    """
    options = run.keywords["run"].args[0] if isinstance(run, partial) else {}
    if not options.get("is_causal") or len(queries) == len(keys):
        return run, list(tensors)
    device = None if tensors[0] is None else tensors[0].device
    mask = torch.from_numpy(queries[:, None] >= keys[None]).to(device)
    masked = partial(run_attention, {**options, "is_causal": False})
    return partial(run_forward, run=masked), [*tensors[:3], mask]


def _recurrent(recorder: CallRecorder, name: str, *args: Any) -> Any:
    mode = name.removesuffix(".input").removesuffix("_cell")
    whole = WholeOp(recorder, partial(run_recurrent, mode), 3)
    return fused_kernels(whole)[name](*args)


def run_recurrent(mode: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Runs one layer of torch's recurrent functions on (input, h0, c0, *weights), time first."""
    data, h0, c0, *weights = tensors
    assert data is not None and h0 is not None  # noqa: PT018 - what every layer has
    per_direction = len(weights) // h0.shape[0]
    state = (h0, c0) if CELLS[mode].has_cell else h0
    options = (per_direction >= 4, 1, 0.0, True, h0.shape[0] == 2, False)
    function: Callable[..., Any] = getattr(torch, mode)
    results: tuple[Tensor, ...] = function(data, state, weights, *options)
    return results if len(results) == 3 else (*results, None)
