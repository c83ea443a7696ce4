"""Compiled: simulated annealing over placements of units, for the largest load.

Moves and swaps of units between devices; what is asked of a device is kept up to date tensor by
tensor. A placement beyond the memory of an accelerator is never entered. The energy is a high norm
of the loads, which sees all devices where the maximum sees one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.exact.compiled_options import compiled

_POWER = 12.0


class Pieces(NamedTuple):
    """What is placed, and the devices."""

    accelerator: NDArray[np.float64]  # [unit]; inf where unsupported
    cpu: NDArray[np.float64]  # [unit]
    memory: NDArray[np.float64]  # [unit] bytes
    tensor_cost: NDArray[np.float64]  # [tensor]
    tensor_readers: NDArray[np.int64]  # [tensor]
    first_use: NDArray[np.int64]  # [unit + 1]
    use_tensor: NDArray[np.int64]  # [use]
    use_writes: NDArray[np.bool_]  # [use]
    accelerators: int
    capacity: float  # bytes


class State(NamedTuple):
    """A placement and what follows from it; kept up to date by `_move`."""

    device: NDArray[np.int64]  # [unit]
    home: NDArray[np.int64]  # [tensor] device of its writer
    readers: NDArray[np.int64]  # [tensor, device]
    load: NDArray[np.float64]  # [device]
    memory: NDArray[np.float64]  # [device] bytes
    best: NDArray[np.int64]  # [unit] the best placement so far
    best_load: NDArray[np.float64]  # [1] its largest load
    random: NDArray[np.uint64]  # [1] of the generator; not 0


@compiled
def _draw(state: State, count: int) -> int:
    """Returns a random number from 0 to count - 1 (Marsaglia's xorshift64)."""
    value = state.random[0]
    value ^= value << np.uint64(13)
    value ^= value >> np.uint64(7)
    value ^= value << np.uint64(17)
    state.random[0] = value
    return np.int64(value % np.uint64(count))  # type: ignore[return-value]


@compiled
def _chance(state: State) -> float:
    """Returns a random number from 0 to 1."""
    return _draw(state, 2**30) / 2.0**30


@compiled
def _pays(pieces: Pieces, state: State, tensor: int, device: int) -> float:
    """Returns what a tensor costs a device."""
    if device >= pieces.accelerators:
        return 0.0
    here = state.readers[tensor, device]
    is_home = state.home[tensor] == device
    crosses = (is_home and here < pieces.tensor_readers[tensor]) or (not is_home and here > 0)
    return float(pieces.tensor_cost[tensor]) if crosses else 0.0


@compiled
def _time(pieces: Pieces, unit: int, device: int) -> float:
    if device < pieces.accelerators:
        return float(pieces.accelerator[unit])
    return float(pieces.cpu[unit])


@compiled
def _move(pieces: Pieces, state: State, unit: int, target: int) -> None:
    source = state.device[unit]
    for k in range(pieces.first_use[unit], pieces.first_use[unit + 1]):
        tensor = pieces.use_tensor[k]
        for device in (source, target):
            state.load[device] -= _pays(pieces, state, tensor, device)
        if pieces.use_writes[k]:
            state.home[tensor] = target
        else:
            state.readers[tensor, source] -= 1
            state.readers[tensor, target] += 1
        for device in (source, target):
            state.load[device] += _pays(pieces, state, tensor, device)
    state.load[source] -= _time(pieces, unit, source)
    state.load[target] += _time(pieces, unit, target)
    state.memory[source] -= pieces.memory[unit]
    state.memory[target] += pieces.memory[unit]
    state.device[unit] = target


@compiled
def restart(pieces: Pieces, state: State, device: NDArray[np.int64]) -> None:
    """Sets the placement, [unit], and all that follows from it."""
    state.device[:] = device
    state.readers[:] = 0
    state.load[:] = 0.0
    state.memory[:] = 0.0
    for unit in range(len(device)):
        state.load[device[unit]] += _time(pieces, unit, device[unit])
        state.memory[device[unit]] += pieces.memory[unit]
        for k in range(pieces.first_use[unit], pieces.first_use[unit + 1]):
            if pieces.use_writes[k]:
                state.home[pieces.use_tensor[k]] = device[unit]
            else:
                state.readers[pieces.use_tensor[k], device[unit]] += 1
    for tensor in range(len(state.home)):
        for d in range(len(state.load)):
            state.load[d] += _pays(pieces, state, tensor, d)
    _note_best(pieces, state)


@compiled
def _note_best(pieces: Pieces, state: State) -> None:
    worst = state.load.max()
    for device in range(pieces.accelerators):
        if state.memory[device] > pieces.capacity:
            return
    if worst < state.best_load[0] * (1.0 - 1e-12):
        state.best_load[0] = worst
        state.best[:] = state.device


@compiled
def _energy(state: State) -> float:
    worst = state.load.max()
    if worst <= 0.0:
        return 0.0
    total = 0.0
    for load in state.load:
        total += (max(load, 0.0) / worst) ** _POWER
    return float(worst * total ** (1.0 / _POWER))


@compiled
def _fits(pieces: Pieces, state: State, unit: int, target: int) -> bool:
    if target >= pieces.accelerators:
        return True
    if not np.isfinite(pieces.accelerator[unit]):
        return False
    return bool(state.memory[target] + pieces.memory[unit] <= pieces.capacity)


@compiled
def _neighbour(pieces: Pieces, state: State, unit: int) -> int:
    """Returns the device of a unit that a random tensor of this one ties it to."""
    uses = pieces.first_use[unit + 1] - pieces.first_use[unit]
    if uses == 0 or _chance(state) < 0.3:
        return _draw(state, len(state.load))
    tensor = pieces.use_tensor[pieces.first_use[unit] + _draw(state, uses)]
    device = int(state.home[tensor])
    if device != state.device[unit]:
        return device
    start = _draw(state, len(state.load))
    for step in range(len(state.load)):
        device = (start + step) % len(state.load)
        if device != state.device[unit] and state.readers[tensor, device] > 0:
            return device
    return start


@compiled
def _try_swap(pieces: Pieces, state: State, one: int, target: int) -> int:
    """Moves a unit and a random one of its target the other way; returns that one, -1 = none."""
    source = state.device[one]
    other = _draw(state, len(state.device))
    for _ in range(20):
        if state.device[other] == target:
            break
        other = _draw(state, len(state.device))
    if state.device[other] != target:
        return -1
    _move(pieces, state, one, target)
    if not _fits(pieces, state, other, source):
        _move(pieces, state, one, source)
        return -1
    _move(pieces, state, other, source)
    if target < pieces.accelerators and state.memory[target] > pieces.capacity:
        _move(pieces, state, other, target)
        _move(pieces, state, one, source)
        return -1
    return other


@compiled
def anneal(pieces: Pieces, state: State, steps: int, heat: tuple[float, float]) -> None:
    """Anneals the placement from the first heat to the last, relative to its largest load."""
    scale = state.load.max()
    energy = _energy(state)
    for step in range(steps):
        temperature = scale * heat[0] * (heat[1] / heat[0]) ** (step / steps)
        unit = _draw(state, len(state.device))
        source = state.device[unit]
        target = _neighbour(pieces, state, unit)
        other = -1
        if target == source:
            continue
        if _chance(state) < 0.25:
            if np.isfinite(pieces.accelerator[unit]) or target >= pieces.accelerators:
                other = _try_swap(pieces, state, unit, target)
            if other < 0:
                continue
        elif not _fits(pieces, state, unit, target):
            continue
        else:
            _move(pieces, state, unit, target)
        proposed = _energy(state)
        if proposed <= energy or _chance(state) < np.exp((energy - proposed) / temperature):
            energy = proposed
            _note_best(pieces, state)
            continue
        if other >= 0:
            _move(pieces, state, other, target)
        _move(pieces, state, unit, source)
