"""What fills the memory of each device at its peak, by class."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from simcore.graph import OpClass, Role, Sized
from simcore.lower import Problem
from simcore.memory import StorageUses, storage_uses
from simcore.result import RawRun
from simcore.sizes import sizes_at

Held = Mapping[str, NDArray[np.int64]]  # class -> bytes held for the whole step beside op, [op]

PARAMETERS, BUFFERS, STATE = "parameters", "buffers", "optimizer state"
GRADIENTS, ACTIVATIONS, RECEIVED = "gradients", "activations", "received"
WORKSPACE, OTHER = "workspace", "other"
_CLASS = {Role.PARAMETER: PARAMETERS, Role.BUFFER: BUFFERS, Role.GRADIENT: GRADIENTS}
_MOVING = (GRADIENTS, ACTIVATIONS, RECEIVED)
NOTHING: Held = MappingProxyType({})


def memory_breakdown(
    problem: Problem, run: RawRun, held: Held = NOTHING
) -> tuple[dict[str, int], ...]:
    """Returns bytes by class at the peak of each device, [dev]; they add up to the peak.

    Args:
        problem: what was played.
        run: how it went.
        held: what the bytes are that ops hold for the whole step, where the graph does not say.
    """
    found: list[dict[str, int]] = []
    sized = sizes_at(problem.graph, problem.job, problem.batch)
    uses = storage_uses(problem.graph, sized)
    used = set(run.placement.tolist())
    for device in range(len(run.allocated)):
        if device not in used:
            found.append({})
            continue
        classes = _held(problem, run, device, sized, held)
        classes |= _moving(problem, run, device, sized, uses)
        classes[OTHER] += int(run.allocated[device]) - sum(classes.values())  # blocks cut smaller
        found.append({name: size for name, size in classes.items() if size})
    return tuple(found)


def _held(problem: Problem, run: RawRun, device: int, sized: Sized, held: Held) -> dict[str, int]:
    """Returns what a device holds for the whole step."""
    graph, here = problem.graph, run.placement == device
    reads = here[np.repeat(np.arange(graph.num_ops), np.diff(graph.first_input))]
    tensors = np.unique(graph.inputs[reads])
    tensors = tensors[graph.tensor_producer[tensors] < 0]
    storages, first = np.unique(graph.tensor_storage[tensors], return_index=True)
    roles = graph.tensor_role[tensors[first]]
    found = {
        name: int(sized.storage_bytes[storages[roles == role]].sum())
        for role, name in _CLASS.items()
        if name != GRADIENTS
    }
    per_element = problem.job.state_bytes_per_element()
    found[STATE] = int(graph.elements[here].sum()) * per_element
    known = 0
    for name, sizes in held.items():
        found[name] = found.get(name, 0) + int(sizes[here].sum())
        known += int(sizes[here].sum())
    found[OTHER] = found.get(OTHER, 0) + int(sized.resident[here].sum()) - known
    return found


def _moving(
    problem: Problem, run: RawRun, device: int, sized: Sized, uses: StorageUses
) -> dict[str, int]:
    """Returns what comes and goes, at the moment of the peak."""
    graph = problem.graph
    ops = np.flatnonzero(run.placement == device)
    if problem.settings.order == "ready":
        ops = ops[np.lexsort((ops, run.start[ops]))]
    place = np.full(graph.num_ops, -1)
    place[ops] = np.arange(len(ops))
    at = place[uses.touches["op"]]
    mine = at >= 0
    storage, at, size = uses.storage[mine], at[mine], uses.touches["num_bytes"][mine]
    found, inverse = np.unique(storage, return_inverse=True)
    first, last = np.full(len(found), len(ops)), np.full(len(found), -1)
    largest = np.zeros(len(found), np.int64)
    np.minimum.at(first, inverse, at)
    np.maximum.at(last, inverse, at)
    np.maximum.at(largest, inverse, size)
    classes = _classes(problem, run, device)[found]
    alive = np.zeros((len(_MOVING), len(ops) + 1), np.int64)
    np.add.at(alive, (classes, first), largest)
    np.add.at(alive, (classes, last + 1), -largest)
    alive = np.cumsum(alive, axis=1)[:, :-1]
    workspace = sized.workspace[ops]
    total = alive.sum(axis=0) + workspace
    if not len(ops) or total.max() <= 0:
        return {}
    peak = int(total.argmax())
    shares = {name: int(alive[row, peak]) for row, name in enumerate(_MOVING)}
    return shares | {WORKSPACE: int(workspace[peak])}


def _classes(problem: Problem, run: RawRun, device: int) -> NDArray[np.int64]:
    """Returns the row of `_MOVING` for every storage as one device sees it, [storage]."""
    graph = problem.graph
    rows = np.full(graph.num_storages, _MOVING.index(RECEIVED))
    produced = graph.tensor_producer >= 0
    local = np.zeros(graph.num_tensors, np.bool_)
    local[produced] = run.placement[graph.tensor_producer[produced]] == device
    local[produced] |= graph.op_class[graph.tensor_producer[produced]] == OpClass.COLLECTIVE
    rows[graph.tensor_storage[local]] = _MOVING.index(ACTIVATIONS)
    gradients = local & (graph.tensor_role == Role.GRADIENT)
    rows[graph.tensor_storage[gradients]] = _MOVING.index(GRADIENTS)
    return rows
