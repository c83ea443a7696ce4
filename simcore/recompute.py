"""Recompute: which parts of a forward run again before their backward, and what that saves.

A segment is a part of one stage's forward that runs again: with ``full`` a block, which is what
lies in one module whose path ends in a number (``encoder.layer.3``; the shortest such path counts),
or the whole stage where the graph has no such module; with ``selective`` an attention core, from
the product that makes the scores to the one that uses them. Fused attention has none.

What only ops of one segment touch in the forward is dropped after its last use there. Before the
first op of the backward that needs any of it, the segment runs again up to the last op that makes
something needed (as torch's checkpoint stops early). What crosses a segment's border is kept.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from simcore.errors import PlanError
from simcore.graph import OpClass, OpGraph
from simcore.signature import Phase
from simcore.stage_cut import Cut

Recompute = Literal["none", "selective", "full"]

NONE = -1
FORWARD, BACKWARD, WEIGHTS, UPDATE = range(4)  # what a stage does one after another
PARTS = 4


class Touches(NamedTuple):
    """Ops that read or write a storage that is neither parameter nor buffer."""

    op: NDArray[np.int64]  # [touch]
    tensor: NDArray[np.int64]  # [touch]
    storage: NDArray[np.int64]  # [touch]

    def writes(self, graph: OpGraph) -> NDArray[np.bool_]:
        """Returns which touches write, [touch]."""
        made: NDArray[np.bool_] = graph.tensor_producer[self.tensor] == self.op
        return made


class Reruns(NamedTuple):
    """Forward ops that run again."""

    op: NDArray[np.int64]  # [rerun]
    before: NDArray[np.int64]  # [rerun] backward op it comes before, of a whole backward
    before_split: NDArray[np.int64]  # [rerun] the same where input gradients come first
    dropped: NDArray[np.bool_]  # [storage] one segment makes and uses it; not kept


class Order(NamedTuple):
    """What the stages run for one microbatch and the update, in order, as one list.

    Stage after stage, and of a stage: forward, backward (or input gradients), weight gradients
    (none where the backward is whole), update.
    """

    op: NDArray[np.int64]  # [run]
    again: NDArray[np.bool_]  # [run] a forward op that runs again
    first: NDArray[np.int64]  # [stage * PARTS + part + 1] offsets into runs
    run: NDArray[np.int64]  # [op] where it is
    rerun: NDArray[np.int64]  # [rerun] where it is


@lru_cache(maxsize=4)  # a search cuts one graph again and again
def touches_of(graph: OpGraph) -> Touches:
    """Returns who reads and writes what, parameters and buffers left out."""
    read = np.repeat(np.arange(graph.num_tensors), np.diff(graph.first_consumer))
    written = np.flatnonzero(graph.tensor_producer >= 0)
    tensor = np.concatenate([read, written])
    op = np.concatenate([graph.consumers, graph.tensor_producer[written]]).astype(np.int64)
    storage = graph.tensor_storage[tensor].astype(np.int64)
    kept = ~graph.persistent_storage[storage]
    return Touches(op[kept], tensor[kept], storage[kept])


def find_blocks(graph: OpGraph) -> NDArray[np.int64]:
    """Returns the block of each forward op, [op], NONE = of no block.

    A graph without blocks is one.
    """
    labels: dict[str, int] = {}
    of_module: dict[str, int] = {}
    for module in dict.fromkeys(graph.op_modules):
        parts = module.split(".")
        end = next((i for i, part in enumerate(parts, start=1) if part.isdecimal()), None)
        name = ".".join(parts[:end])
        of_module[module] = NONE if end is None else labels.setdefault(name, len(labels))
    if not labels:
        return np.where(graph.phase == Phase.F, 0, NONE)
    block = np.array([of_module[module] for module in graph.op_modules], np.int64)
    return np.where(graph.phase == Phase.F, block, NONE)


def find_attention_cores(graph: OpGraph) -> NDArray[np.int64]:
    """Returns the attention core of each forward op, [op], NONE = of none.

    A core is two batched products of one block, and what leads from the first to the second, a
    softmax among it.
    """
    core = np.full(graph.num_ops, NONE)
    block = find_blocks(graph)
    products = np.flatnonzero(
        (graph.op_class == OpClass.BATCHED_MATMUL) & (graph.phase == Phase.F) & (block != NONE)
    )
    products = products[np.argsort(block[products], kind="stable")].tolist()
    number = 0
    for first, second in itertools.pairwise(products):
        if block[first] == block[second] and core[first] == NONE:
            members = _between(graph, first, second, block)
            if (graph.op_class[members] == OpClass.SOFTMAX).any() and second in members:
                core[members] = number
                number += 1
    return core


def _between(graph: OpGraph, first: int, second: int, block: NDArray[np.int64]) -> list[int]:
    """Returns the ops of a block that need what the first op makes, up to the second."""
    members = {first}
    for op in range(first + 1, second + 1):
        if block[op] == block[first]:
            read = graph.inputs[graph.first_input[op] : graph.first_input[op + 1]]
            if not members.isdisjoint(graph.tensor_producer[read].tolist()):
                members.add(op)
    return sorted(members)


def find_segments(graph: OpGraph, cut: Cut, recompute: Sequence[Recompute]) -> NDArray[np.int64]:
    """Returns the segment of each forward op, [op], NONE = it does not run again.

    Args:
        graph: the graph.
        cut: its stages.
        recompute: of each stage, [stage]; () = none.

    Raises:
        PlanError: not one per stage, or not a kind of recompute.
    """
    if recompute and len(recompute) != cut.num_stages:
        raise PlanError(
            f"{graph.name}: recompute of {len(recompute)} stages for {cut.num_stages} stages"
        )
    if unknown := [kind for kind in recompute if kind not in get_args(Recompute)]:
        known = ", ".join(get_args(Recompute))
        raise PlanError(f"{graph.name}: recompute must be one of {known}, not {unknown[0]!r}")
    segment = np.full(graph.num_ops, NONE)
    mode = np.array(recompute or ["none"] * cut.num_stages)[cut.stage]
    for kind, find in (("full", find_blocks), ("selective", find_attention_cores)):
        if kind in recompute:
            found = find(graph)
            inside = (mode == kind) & (found != NONE)
            segment[inside] = found[inside] * cut.num_stages + cut.stage[inside]
    return segment


def find_reruns(graph: OpGraph, cut: Cut, touches: Touches, segment: NDArray[np.int64]) -> Reruns:
    """Returns what runs again, and what need not be kept.

    Args:
        graph: the graph.
        cut: its stages.
        touches: of the graph.
        segment: of each op, [op].
    """
    dropped = np.zeros(graph.num_storages, np.bool_)
    nothing = np.zeros(0, np.int64)
    if (segment == NONE).all():
        return Reruns(nothing, nothing, nothing, dropped)
    dropped = _dropped(graph, cut, touches, segment)
    inside = dropped[touches.storage]
    owner = np.full(graph.num_storages, NONE)  # [storage] segment
    forward = cut.phase[touches.op] == Phase.F
    owner[touches.storage[inside & forward]] = segment[touches.op[inside & forward]]
    count = int(segment.max()) + 1
    later = inside & ~forward
    needed = np.bincount(touches.storage[later], minlength=graph.num_storages) > 0
    made = forward & (inside & needed[touches.storage]) & touches.writes(graph)
    end = np.full(count, NONE)  # [segment] last op that runs again
    np.maximum.at(end, segment[touches.op[made]], touches.op[made])
    weights = cut.phase[touches.op[later]] == Phase.W
    before, before_split = np.full((2, count), 2 * graph.num_ops)
    np.minimum.at(before, owner[touches.storage[later]], touches.op[later])
    late = touches.op[later] + np.where(weights, graph.num_ops, 0)
    np.minimum.at(before_split, owner[touches.storage[later]], late)
    is_again = (segment != NONE) & (graph.op_class != OpClass.INPUT)
    op = np.flatnonzero(is_again)
    op = op[op <= end[segment[op]]]
    mine = segment[op]
    return Reruns(op, before[mine], before_split[mine] % graph.num_ops, dropped)


def _dropped(
    graph: OpGraph, cut: Cut, touches: Touches, segment: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Returns which storages one segment makes and uses in the forward, [storage]."""
    phase = cut.phase[touches.op]
    storage, count = touches.storage, graph.num_storages

    def touched(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.bincount(storage[mask], minlength=count) > 0

    forward = phase == Phase.F
    given = graph.op_class[touches.op] == OpClass.INPUT
    outside = forward & ((segment[touches.op] == NONE) | given)
    stage = _only(cut.stage[touches.op], storage, count)
    owner = _only(segment[touches.op[forward]], storage[forward], count)
    dropped: NDArray[np.bool_] = (stage != NONE) & (owner != NONE) & ~touched(outside)
    return dropped & ~touched(phase == Phase.U)


def _only(label: NDArray[np.int64], storage: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Returns the one label that all touches of a storage have, [storage], NONE = several, none."""
    low, high = np.full(count, np.iinfo(np.int64).max), np.full(count, NONE)
    np.minimum.at(low, storage, label)
    np.maximum.at(high, storage, label)
    return np.where(low == high, high, NONE)


def order_of(cut: Cut, reruns: Reruns, *, split: bool) -> Order:
    """Returns what the stages run, in order.

    Args:
        cut: the graph's stages.
        reruns: what runs again.
        split: whether input gradients come before all weight gradients; else program order.
    """
    part_of_phase = np.array([FORWARD, BACKWARD, BACKWARD, WEIGHTS if split else BACKWARD, UPDATE])
    num_ops = len(cut.stage)
    before = reruns.before_split if split else reruns.before
    op = np.concatenate([np.arange(num_ops), reruns.op])
    follows = np.concatenate([np.arange(num_ops), before])
    again = np.arange(len(op)) >= num_ops
    part = cut.stage[follows] * PARTS + part_of_phase[cut.phase[follows]]
    order = np.lexsort((op, ~again, follows, part))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return Order(
        op=op[order],
        again=again[order],
        first=np.searchsorted(part[order], np.arange(cut.num_stages * PARTS + 1)),
        run=place[:num_ops],
        rerun=place[num_ops:],
    )
