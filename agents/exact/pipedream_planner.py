"""PipeDream's planner (Narayanan et al., SOSP 2019) under its authors' objective.

The time of an asynchronous pipeline is that of its slowest stage or transfer. States are the sets
of layers that can have been done (see `antichains`); a stage is the difference of two. What leaves
a state is counted as the authors do: the outputs of its last layers and of the earlier layers that
are read beyond one of them, even where that reader is done too. A stage of m replicas takes
(compute + 4 (m - 1) W / (bandwidth m)) / m: the authors' code adds the two, their 2018 paper takes
the larger. A transfer takes 2 x bytes / (bandwidth m). With several levels (GPUs in a server,
servers) the times of the spans on one level are what one machine of the next takes. Memory is not
looked at, as is the code's default.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.exact.antichains import list_states, make_dag, members
from agents.exact.compiled_pipedream import Level, Plans, States, plan_level
from simcore.errors import GraphError
from simcore.frontends.pipedream import Profile

MAX_STATES = 2_500  # two levels take memory in its square, and time in its cube


class ReplicatedStage(NamedTuple):
    """One stage of a plan."""

    begin: int  # state
    end: int  # state, exclusive
    replicas: int
    layers: tuple[str, ...]  # of the profile


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamPlan:
    """A plan and what the objective says of it."""

    stages: tuple[ReplicatedStage, ...]
    num_states: int
    single_seconds: float  # of a minibatch on one GPU
    data_parallel_seconds: float  # on all GPUs, each with a copy
    pipeline_seconds: float

    @property
    def speedup(self) -> float:
        """Over one GPU."""
        return self.single_seconds / self.pipeline_seconds

    @property
    def speedup_over_data_parallel(self) -> float:
        """Over data parallelism on all GPUs."""
        return self.data_parallel_seconds / self.pipeline_seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileStates:
    """The layers of a profile that count, and its states. Axes: layer, state."""

    names: list[str]  # [layer]
    members: NDArray[np.bool_]  # [state, layer]
    done_seconds: NDArray[np.float64]  # [state] s of all layers done, forward and backward
    states: States

    @property
    def num_states(self) -> int:
        """Number of states."""
        return len(self.members)


def plan_pipedream(
    profile: Profile, machines: Sequence[int], bandwidths: Sequence[float]
) -> PipeDreamPlan:
    """Returns PipeDream's plan of a profile.

    Args:
        profile: the layers.
        machines: of each level, innermost first: (4, 4) is four servers of four GPUs.
        bandwidths: between the machines of each level, bytes/s.

    Raises:
        GraphError: more states than the program can work on.
    """
    layers = profile_states(profile)
    done = layers.done_seconds
    compute = done[None, :] - np.concatenate(([0.0], done[:-1]))[:, None]
    levels: list[Plans] = []
    inside = 1
    for index, (count, bandwidth) in enumerate(zip(machines, bandwidths, strict=True)):
        is_last = index == len(machines) - 1
        level = Level(count, inside, float(bandwidth), 1 if is_last else len(done))
        plans = _no_plans(len(done), count, level.starts)
        plan_level(layers.states, level, compute, plans)
        levels.append(plans)
        compute, inside = plans.seconds[:, :, -1], count
    return PipeDreamPlan(
        stages=_stages(layers, levels),
        num_states=len(done),
        single_seconds=float(done[-1]),
        data_parallel_seconds=_data_parallel(layers, machines, bandwidths),
        pipeline_seconds=float(compute[0, -1]),
    )


def _no_plans(num_states: int, machines: int, starts: int) -> Plans:
    shape = (starts, num_states, machines)
    return Plans(np.full(shape, np.inf), np.full(shape, -1, np.int64), np.ones(shape, np.int64))


def profile_states(profile: Profile) -> ProfileStates:
    """Returns the states of a profile; inputs and unread ``__getitem__`` are left out.

    Raises:
        GraphError: more than `MAX_STATES` states, or a layer that no state holds.
    """
    readers = {name: 0 for name in profile.layers}
    for sources in profile.sources.values():
        for source in sources:
            readers[source] += 1
    names = [
        name
        for name, layer in profile.layers.items()
        if not (layer.text.startswith("Input") and not profile.sources[name])
        and not (layer.text.startswith("__getitem__") and not readers[name])
    ]
    number = {name: index for index, name in enumerate(names)}
    arcs = [
        (number[source], number[name])
        for name in names
        for source in profile.sources[name]
        if source in number
    ]
    dag = make_dag(len(names), arcs)
    states, borders = list_states(dag, MAX_STATES)
    done = np.zeros((len(states), len(names)), bool)
    for row, state in zip(done, states, strict=True):
        bits = members(dag, state)
        row[[layer for layer in range(len(names)) if bits >> layer & 1]] = True
    if not done[-1].all():
        lost = names[int(done[-1].argmin())]
        raise GraphError(f"{profile.name}: {lost} does not follow from the first layer")
    kept = [profile.layers[name] for name in names]
    weight = np.array([float(layer.parameter) for layer in kept])
    sizes = np.array([float(sum(layer.outputs)) for layer in kept])
    counts = done.astype(np.float64)
    shared = counts @ counts.T
    contains = (shared == counts.sum(axis=1)[None, :]) & ~np.eye(len(done), dtype=bool)
    output = np.array([sizes[list(border)].sum() for border in borders])
    return ProfileStates(
        names=names,
        members=done,
        done_seconds=done @ np.array([layer.forward + layer.backward for layer in kept]),
        states=States(contains, done @ weight, output),
    )


def _stages(layers: ProfileStates, levels: list[Plans]) -> tuple[ReplicatedStage, ...]:
    """Follows the splits from the outermost level to the innermost."""
    spans = [(0, len(layers.members), 1)]
    for plans in reversed(levels):
        spans = [
            (begin, end, replicas * outer)
            for start, stop, outer in spans
            for begin, end, replicas in _spans(plans, start, stop)
        ]
    return tuple(
        ReplicatedStage(begin, end, replicas, _names(layers, begin, end))
        for begin, end, replicas in spans
    )


def _spans(plans: Plans, start: int, stop: int) -> list[tuple[int, int, int]]:
    found = []
    end, machines = stop - 1, plans.seconds.shape[2]
    while True:
        split = int(plans.split[start, end, machines - 1])
        replicas = int(plans.replicas[start, end, machines - 1])
        found.append((start if split < 0 else split + 1, end + 1, replicas))
        if split < 0:
            return found[::-1]
        end, machines = split, machines - replicas


def _names(layers: ProfileStates, begin: int, end: int) -> tuple[str, ...]:
    inside = layers.members[end - 1].copy()
    if begin:
        inside &= ~layers.members[begin - 1]
    return tuple(layers.names[layer] for layer in np.flatnonzero(inside).tolist())


def _data_parallel(
    layers: ProfileStates, machines: Sequence[int], bandwidths: Sequence[float]
) -> float:
    seconds = float(layers.done_seconds[-1])
    weight = float(layers.states.parameters[-1])
    inside = 1
    for count, bandwidth in zip(machines, bandwidths, strict=True):
        seconds += 4 * (count - 1) * weight / (bandwidth * count) / inside
        seconds /= count
        inside = count
    return seconds
