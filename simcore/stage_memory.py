"""Memory of pipeline stages: what one microbatch holds between its phases, and more inside them.

A storage is on a stage from the first op there that touches it to the last, as large as the largest
of its tensors touched there; what another stage made is there from its first touch, at the latest
from the end of the phase that receives it. Parameters, buffers and optimizer state are held all the
time and apart, and so are gradients of parameters: storages that the update and an earlier phase
touch.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.graph import OpGraph, Role, Sized
from simcore.recompute import (
    BACKWARD,
    FORWARD,
    NONE,
    PARTS,
    UPDATE,
    Order,
    Reruns,
    Touches,
)
from simcore.signature import Phase
from simcore.stage_cut import Cut


class Held(NamedTuple):
    """What stages hold for the whole step, and what their updates update."""

    parameter_bytes: NDArray[np.int64]  # [stage] bytes
    buffer_bytes: NDArray[np.int64]  # [stage] bytes
    resident: NDArray[np.int64]  # [stage] bytes that ops keep
    elements: NDArray[np.int64]  # [stage] parameter elements


class Walk(NamedTuple):
    """Bytes of one microbatch on each stage, parameters left out.

    Parts are forward, backward (or input gradients), weight gradients and update.
    """

    alive: NDArray[np.int64]  # [stage, part] at its start, gradients of parameters left out
    extra: NDArray[np.int64]  # [stage, part] most inside it above that
    first_extra: NDArray[np.int64]  # [stage, part] the same where gradients of parameters are new
    gradient: NDArray[
        np.int64
    ]  # [stage, part] gradients of parameters that it is the first to make


class Work(NamedTuple):
    """What the stages do."""

    touches: Touches
    reruns: Reruns
    order: Order


class _Lives(NamedTuple):
    """From when to when storages are on stages."""

    stage: NDArray[np.int64]  # [life]
    num_bytes: NDArray[np.int64]  # [life]
    first: NDArray[np.int64]  # [life] run before which it comes, NONE = its part runs nothing
    last: NDArray[np.int64]  # [life] run after which it goes
    arrives: NDArray[np.int64]  # [life] part in which it comes
    leaves: NDArray[np.int64]  # [life] part in which it goes
    is_gradient: NDArray[np.bool_]  # [life] of a parameter


def held_by_stages(graph: OpGraph, cut: Cut, sized: Sized) -> Held:
    """Returns what stages hold for the whole step; what several stages read is held by each."""
    tensor = np.repeat(np.arange(graph.num_tensors), np.diff(graph.first_consumer))
    given = graph.tensor_producer[tensor] < 0
    storage = graph.tensor_storage[tensor[given]].astype(np.int64)
    found = np.unique(storage * cut.num_stages + cut.stage[graph.consumers[given]])
    storage, stage = found // cut.num_stages, found % cut.num_stages
    trained = np.zeros(graph.num_storages, np.bool_)
    trained[graph.tensor_storage[graph.tensor_role == Role.PARAMETER]] = True
    held = np.zeros((2, cut.num_stages), np.int64)
    np.add.at(held, (np.where(trained[storage], 0, 1), stage), sized.storage_bytes[storage])
    kept = np.zeros((2, cut.num_stages), np.int64)
    np.add.at(kept[0], cut.stage, sized.resident)
    np.add.at(kept[1], cut.stage, graph.elements)
    return Held(held[0], held[1], kept[0], kept[1])


def walk_stages(graph: OpGraph, cut: Cut, sized: Sized, work: Work) -> Walk:
    """Returns what one microbatch holds on each stage.

    Args:
        graph: the graph.
        cut: its stages.
        sized: its sizes at the microbatch.
        work: what the stages do.
    """
    lives = _lives(graph, cut, sized.tensor_bytes, work)
    workspace = sized.workspace[work.order.op]
    is_gradient = lives.is_gradient
    gradient = np.zeros((cut.num_stages, PARTS), np.int64)
    made = lives.stage[is_gradient], lives.arrives[is_gradient]
    np.add.at(gradient, made, lives.num_bytes[is_gradient])
    alive = np.zeros((cut.num_stages, PARTS + 1), np.int64)
    for part in range(1, PARTS):
        over = ~is_gradient & (lives.arrives < part) & (lives.leaves >= part)
        np.add.at(alive[:, part], lives.stage[over], lives.num_bytes[over])
    grown = np.diff(alive, axis=1)
    return Walk(
        alive=alive[:, :PARTS],
        extra=np.maximum(_peaks(lives, work.order, workspace, ~is_gradient), grown),
        first_extra=np.maximum(
            _peaks(lives, work.order, workspace, np.ones_like(is_gradient)), grown + gradient
        ),
        gradient=gradient,
    )


def _lives(graph: OpGraph, cut: Cut, tensor_bytes: NDArray[np.int64], work: Work) -> _Lives:
    touches, _, order = work
    touch, run, again = _happens(graph, cut, work)
    place = cut.stage[touches.op] * graph.num_storages + touches.storage  # [touch]
    memory = place[touch] * 2 + again
    by_memory = np.lexsort((run, memory))
    is_new = np.ones(len(memory), np.bool_)
    is_new[1:] = memory[by_memory][1:] != memory[by_memory][:-1]
    start = np.flatnonzero(is_new)
    end = np.append(start, len(memory))[1:] - 1
    part_of_run = np.repeat(np.arange(len(order.first) - 1) % PARTS, np.diff(order.first))
    first, last = run[by_memory[start]], run[by_memory[end]]
    place, again = place[touch[by_memory[start]]], again[by_memory[start]]  # [life]
    stage, storage = place // graph.num_storages, place % graph.num_storages
    touched = part_of_run[first]
    arrives = np.minimum(touched, _received(graph, cut)[place])
    begin, after = (order.first[stage * PARTS + arrives + offset] for offset in (0, 1))
    received = np.where(begin < after, begin, NONE)
    updated = _updated(cut, touches, graph.num_storages)[storage]
    return _Lives(
        stage=stage,
        num_bytes=np.maximum.reduceat(tensor_bytes[touches.tensor[touch[by_memory]]], start),
        first=np.where(arrives < touched, received, first),
        last=last,
        arrives=arrives,
        leaves=part_of_run[last],
        is_gradient=updated & (touched != UPDATE) & ~again,
    )


def _happens(
    graph: OpGraph, cut: Cut, work: Work
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Returns which touch happens at which run, and whether on memory made again, each [...].

    What a segment drops is made again; so is what it hands on, and then dropped at once.
    """
    touches, reruns, order = work
    rerun = np.full(graph.num_ops, NONE)
    rerun[reruns.op] = order.rerun
    repeated = np.flatnonzero(rerun[touches.op] != NONE)
    dropped = reruns.dropped[touches.storage]
    touch = np.concatenate([np.arange(len(touches.op)), repeated])
    run = np.concatenate([order.run[touches.op], rerun[touches.op[repeated]]])
    again = np.concatenate(
        [dropped & (cut.phase[touches.op] != Phase.F), (dropped | touches.writes(graph))[repeated]]
    )
    return touch, run, again


def _updated(cut: Cut, touches: Touches, num_storages: int) -> NDArray[np.bool_]:
    """Returns which storages an update touches, [storage]."""
    updates = cut.phase[touches.op] == Phase.U
    touched: NDArray[np.bool_] = np.bincount(touches.storage[updates], minlength=num_storages) > 0
    return touched


def _received(graph: OpGraph, cut: Cut) -> NDArray[np.int64]:
    """Returns the first part in which a storage comes from elsewhere, [stage * storage].

    PARTS where it does not.
    """
    part = np.full(cut.num_stages * graph.num_storages, PARTS)
    for number, messages in ((BACKWARD, cut.backward), (FORWARD, cut.forward)):
        place = messages.target * graph.num_storages + graph.tensor_storage[messages.tensor]
        part[place] = number
    return part


def _peaks(
    lives: _Lives,
    order: Order,
    workspace: NDArray[np.int64],
    counted: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Returns the most bytes inside each part above what is alive at its start, [stage, part].

    Gradients of parameters stay; other lives go.
    """
    num_runs = len(order.op)
    comes, goes = np.zeros((2, num_runs + 1), np.int64)
    inside = counted & (lives.first != NONE)
    np.add.at(comes, lives.first[inside] + 1, lives.num_bytes[inside])
    left = counted & ~lives.is_gradient
    np.add.at(goes, lives.last[left] + 1, lives.num_bytes[left])
    comes, goes = np.cumsum(comes), np.cumsum(goes)  # [run + 1] before each run
    level = comes[1:] - goes[:-1] + workspace
    begin = order.first[:-1]
    filled = np.flatnonzero(np.diff(order.first))
    peak = np.zeros(len(begin), np.int64)
    if len(filled):
        starts = begin[filled]
        peak[filled] = np.maximum.reduceat(level, starts) - comes[starts] + goes[starts]
    return np.maximum(peak, 0).reshape(-1, PARTS)
