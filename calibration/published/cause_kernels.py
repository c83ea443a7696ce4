"""How kernels of a framework differ from one kernel an op: what is fused, in place, or unaligned.

The costs of a graph are those of torch's own kernels. Megatron-LM has its own for what a layer does
beside its products, and for the loss over a split vocabulary (Narayanan et al., 2021, 4.2;
Korthikanti et al., 2022). Each is said here by the bytes that it moves against those of the ops
that it replaces; none is fitted. Its softmax is one kernel only where samples x heads of a device
are a multiple of four (`is_kernel_available` of its fused softmax); else torch casts to fp32,
scales, masks, normalises and casts back. What rows of products that do not start at multiples of
16 bytes cost is fitted, see `assumptions.UNALIGNED`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.cost import CostTable
from simcore.graph import OpGraph
from simcore.signature import Phase

UNALIGNED_STEPS = {16: 0, 8: 1, 4: 1, 2: 3}  # bytes that rows are multiples of -> slow-downs
_HEAD = "head.mm"  # products of the vocabulary, there and back


class Kernels(NamedTuple):
    """What kernels a framework has.

    Attributes:
        fused: bias, dropout and addition are one kernel; normalisation moves its states as fast as
            additions do; messages between stages are split among tensor-parallel devices.
        in_place: the loss over the vocabulary is Megatron's: it works in place and looks only at
            the logits of the right words.
        half: the loss is computed in the precision of the logits.
        runs_ahead: the host launches ops without waiting for those before.
        fours: softmax is Megatron's, which wants samples x heads to be a multiple of four.
        overlaps: collectives of backward run beside products, see `cause_overlap`, and products
            add the gradients of weights to those of microbatches before (Megatron since 3.0).
        blocks: the host launches an op when the one before has ended (CUDA_LAUNCH_BLOCKING=1).
        wide: gradients are added, and summed over all copies, in fp32 (DeepSpeed's bf16 optimizer).
        traced: the step is put together from a trace of one layer on one device, see
            `assumptions`; gradients are not added, and the update has no fp32 copy.
        compiled: a compiler fused what lies between products, see `cause_compiler`.
    """

    fused: bool = False
    in_place: bool = False
    half: bool = False
    runs_ahead: bool = False
    fours: bool = False
    overlaps: bool = False
    blocks: bool = False
    wide: bool = False
    traced: bool = False
    compiled: bool = False


TORCH = Kernels()
COMPILED = Kernels(compiled=True)
MEGATRON = Kernels(fused=True, in_place=True, runs_ahead=True, fours=True)
MEGATRON_3 = MEGATRON._replace(overlaps=True)  # of 2022
BLOOM = MEGATRON._replace(runs_ahead=False, blocks=True, wide=True)  # as the project's script
FIRST_MEGATRON = Kernels(in_place=True, runs_ahead=True)  # of 2019
TRACED = Kernels(in_place=True, half=True, runs_ahead=True, fours=True, traced=True)  # vTrain

_IN_PLACE = {  # op of the loss -> what of its bytes Megatron's loss moves
    "nll_loss_forward": 0.0,  # reads one logit a row
    "nll_loss_forward.backward.nll_loss_backward": 0.0,  # subtracts one in each row
    "sub.backward.add": 2 / 3,  # two passes instead of three
}
_CAST = ("_to_copy", "_to_copy.backward._to_copy")  # of the logits to fp32, and back
_WHOLE_ROWS = ("amax", "sub", "exp", "sum", "exp.backward.mul", "sub.backward.add")
_DROPOUT = ".dropout.native_dropout"  # of a sub-layer; the addition after it is the same kernel
_MASK = 1 / 5  # of a dropout's bytes: all that it moves beside what the addition moves
_SOFTMAX = {  # op of torch's softmax -> bytes that its kernels move against those of one
    "attention._softmax": 9.0,
    "attention._softmax.backward._softmax_backward_data": 20 / 3,
}
_SOFTMAX_KERNELS = 5
_WITHOUT_COPY = 22 / 28  # of the bytes that Adam moves for a parameter of 16 bits
_NORM = ".native_layer_norm"  # moves two tensors forward and three back; an addition moves three


def with_kernels(
    cost: CostTable,
    graph: OpGraph,
    kernels: Kernels,
    *,
    row_bytes: int,
    unaligned: float,
    attentions: int = 0,
) -> CostTable:
    """Returns the costs of a framework's own kernels.

    Args:
        cost: of torch's kernels.
        graph: what one device does, of `simcore.models.megatron`.
        kernels: of the framework.
        row_bytes: of a row of logits on one device; 0 = products do not depend on it.
        unaligned: see `assumptions.UNALIGNED`.
        attentions: samples x heads of one device.
    """
    factor = np.ones(graph.num_ops)
    factor[_named(graph, _HEAD)] = unaligned ** unaligned_steps(row_bytes)
    for change in _changes(kernels):
        change(graph, factor)
    if kernels.fours and attentions % 4:
        for name, more in _SOFTMAX.items():
            factor[_ending(graph, name)] *= more
    seconds = cost.seconds * factor[:, None, None]
    launch = cost.launch
    if kernels.fused:
        seconds = _normalised(seconds, graph)
        fused = _ending(graph, _DROPOUT)
        launch = np.where(fused[:, None], 0.0, launch)
    return replace(cost, seconds=seconds, launch=launch)


def kernel_counts(graph: OpGraph, kernels: Kernels, attentions: int) -> NDArray[np.int64]:
    """Returns how many kernels each op is that launches any, [op].

    Args:
        graph: as for `with_kernels`.
        kernels: likewise.
        attentions: likewise.
    """
    counts = np.ones(graph.num_ops, np.int64)
    if kernels.fours and attentions % 4:
        for name in _SOFTMAX:
            counts[_ending(graph, name)] = _SOFTMAX_KERNELS
    return counts


def unaligned_steps(row_bytes: int) -> int:
    """Returns how often a product slows down by `assumptions.UNALIGNED` for rows of so many bytes.

    Ampere copies 16, 8 or 4 bytes at a time beside its products. Two bytes it cannot: such products
    get Turing's kernels (``cutlass_75_..._align1`` in profiles).
    """
    if row_bytes == 0:
        return 0
    return next(steps for size, steps in UNALIGNED_STEPS.items() if row_bytes % size == 0)


def _changes(kernels: Kernels) -> list[Callable[[OpGraph, NDArray[np.float64]], None]]:
    chosen = (
        (kernels.fused, _fuse),
        (kernels.in_place, _work_in_place),
        (kernels.half, _halve),
        (kernels.traced, _update_without_copy),
    )
    return [change for is_so, change in chosen if is_so]


def _fuse(graph: OpGraph, factor: NDArray[np.float64]) -> None:
    factor[_ending(graph, _DROPOUT)] *= _MASK


def _work_in_place(graph: OpGraph, factor: NDArray[np.float64]) -> None:
    for name, share in _IN_PLACE.items():
        factor[np.array([each == name for each in graph.op_names])] *= share


def _halve(graph: OpGraph, factor: NDArray[np.float64]) -> None:
    factor[np.array([name in _CAST for name in graph.op_names])] = 0.0
    factor[np.array([name in _WHOLE_ROWS for name in graph.op_names])] *= 0.5


def _update_without_copy(graph: OpGraph, factor: NDArray[np.float64]) -> None:
    factor[graph.phase == Phase.U] *= _WITHOUT_COPY


def _normalised(seconds: NDArray[np.float64], graph: OpGraph) -> NDArray[np.float64]:
    """Returns seconds, [op, kind, batch], in which norms of layers are as fast as additions."""
    place = {name: op for op, name in enumerate(graph.op_names)}
    found = seconds.copy()
    for op, name in enumerate(graph.op_names):
        layer = ".".join(name.split(".")[:2])
        addition = place.get(f"{layer}.add")
        if addition is None or _NORM not in name:
            continue
        if name.endswith(_NORM):
            found[op] = np.minimum(found[op], seconds[addition] * 2 / 3)
        elif name.endswith(f"{_NORM}.backward"):
            found[op] = np.minimum(found[op], seconds[addition])
    return found


def _named(graph: OpGraph, start: str) -> NDArray[np.bool_]:
    return np.array([name.startswith(start) for name in graph.op_names], bool)


def _ending(graph: OpGraph, end: str) -> NDArray[np.bool_]:
    return np.array(
        [name.startswith("layers.") and name.endswith(end) for name in graph.op_names], bool
    )
