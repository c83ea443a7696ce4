"""Compiled: one level of PipeDream's dynamic program over states and machines."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.exact.compiled_options import compiled


class States(NamedTuple):
    """States in topological order; state j is a set of layers that can have been done."""

    contains: NDArray[np.bool_]  # [state, state] whether the first strictly contains the second
    parameters: NDArray[np.float64]  # [state] bytes of its layers
    output: NDArray[np.float64]  # [state] bytes that leave it


class Level(NamedTuple):
    """The machines of a level of the hierarchy."""

    machines: int
    inside: int  # machines of the level below that make up one of these
    bandwidth: float  # bytes/s between them
    starts: int  # spans that begin at states below this are asked for


class Plans(NamedTuple):
    """The best pipelines of spans; span i to j is state j without state i - 1."""

    seconds: NDArray[np.float64]  # [start, end, machines - 1] s; inf where there is none
    split: NDArray[np.int64]  # [start, end, machines - 1] last state before the last stage, or -1
    replicas: NDArray[np.int64]  # [start, end, machines - 1] of the last stage


@compiled
def _weight(states: States, start: int, end: int) -> float:
    return float(states.parameters[end] - (states.parameters[start - 1] if start else 0.0))


@compiled
def _one_stage(
    states: States, level: Level, compute: NDArray[np.float64], plans: Plans, start: int
) -> None:
    """Sets the plans of one replicated stage; gradients are summed by all replicas."""
    for end in range(start, len(states.output)):
        for machines in range(1, level.machines + 1):
            exchanged = 4.0 * (machines - 1) * _weight(states, start, end)
            exchanged /= level.bandwidth * machines * level.inside
            seconds = (compute[start, end] + exchanged) / machines
            plans.seconds[start, end, machines - 1] = seconds
            plans.replicas[start, end, machines - 1] = machines


@compiled
def _last_stage(
    states: States,
    level: Level,
    compute: NDArray[np.float64],
    before_end: tuple[int, int],
    replicas: int,
) -> float:
    """Returns seconds of a last stage, or of the transfers to and from it, if those are longer."""
    before, end = before_end
    exchanged = 4.0 * (replicas - 1) * _weight(states, before + 1, end)
    exchanged /= level.bandwidth * replicas
    seconds = (compute[before + 1, end] + exchanged) / replicas
    wide = level.bandwidth * replicas
    seconds = max(seconds, 2.0 * states.output[before] / wide)
    if end < len(states.output) - 1:
        seconds = max(seconds, 2.0 * states.output[end] / wide)
    return float(seconds)


@compiled
def _split(
    states: States,
    level: Level,
    compute: NDArray[np.float64],
    plans: Plans,
    span: tuple[int, int, int],
) -> None:
    """Improves the plan of a span on so many machines by a last stage of its own."""
    start, end, machines = span
    best = plans.seconds[start, end, machines - 1]
    for before in range(start, end):
        if not states.contains[end, before]:
            continue
        if start > 0 and states.contains[start - 1, before]:
            continue
        for replicas in range(1, machines):
            first = plans.seconds[start, before, machines - replicas - 1]
            if first >= best:
                continue
            last = _last_stage(states, level, compute, (before, end), replicas)
            if max(first, last) < best:
                best = max(first, last)
                plans.split[start, end, machines - 1] = before
                plans.replicas[start, end, machines - 1] = replicas
    plans.seconds[start, end, machines - 1] = best


@compiled
def plan_level(states: States, level: Level, compute: NDArray[np.float64], plans: Plans) -> None:
    """Fills the plans of a level.

    Args:
        states: the states.
        level: the machines.
        compute: seconds of a span on one machine of this level, [start, end].
        plans: is filled; infinite seconds and splits of -1 to begin with.
    """
    for start in range(level.starts):
        _one_stage(states, level, compute, plans, start)
        for machines in range(2, level.machines + 1):
            for end in range(start + 1, len(states.output)):
                _split(states, level, compute, plans, (start, end, machines))
