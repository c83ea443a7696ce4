"""Policies against classical planners on one workload: step times, and how long they took."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.fidelity import training_settings
from agents.planners.anneal import Anneal
from agents.planners.grouping import Grouping
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace
from agents.portfolio_search import BASELINES, CONSTRUCTIVE
from agents.task import PlacementTask
from agents.train import Trained
from agents.zero_shot import ZeroShot
from simcore import Cluster, Job, OpGraph, Problem, Settings

_FINALISTS = 16  # placements that are simulated again at full fidelity


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What is compared.

    Attributes:
        trained: networks by name.
        placements: simulated zero-shot, a half of them drawn from the network, a half recombined.
        polish: neighbours of the best that are tried after that.
        tune: evaluations of training on a task; 0 = none.
        groups: decisions, at most.
    """

    trained: Mapping[str, Trained]
    placements: int
    polish: int
    tune: int
    groups: int


class Row(NamedTuple):
    """What the methods found on one workload; the keys of both are the methods."""

    graph: str
    cluster: str
    step_time_s: dict[str, float | None]  # at full fidelity; None = nothing fits
    seconds: dict[str, float]  # to find it, from the compiled problem on


def evaluate(policies: Policies, graph: OpGraph, job: Job, cluster: Cluster, seed: int) -> Row:
    """Returns what every policy and the classical planners find.

    Args:
        policies: what is compared.
        graph: the graph.
        job: the job.
        cluster: the cluster.
        seed: of all that is drawn.
    """
    space, full = (
        PlacementSpace.build(Problem.build(graph, cluster, job, settings))
        for settings in (training_settings(cluster, Settings()), Settings())
    )
    for either in (space, full):
        either.evaluate(either.default[None])  # compiles, before any clock starts
    row = Row(graph.name, cluster.name, {}, {})

    def note(method: str, search: Callable[[], NDArray[np.integer]]) -> None:
        begin = time.perf_counter()
        row.step_time_s[method] = best_time(full, search())
        row.seconds[method] = time.perf_counter() - begin

    note("constructive", lambda: _classical(space, 0, seed))
    note(
        "annealing",
        lambda: _classical(space, max(policies.tune, policies.placements + policies.polish), seed),
    )
    for name, trained in policies.trained.items():
        note(f"{name} zero-shot", lambda t=trained: _zero_shot(policies, t, space, seed))  # type: ignore[misc]
        if policies.tune:
            note(f"{name} tuned", lambda t=trained: _tuned(policies, t, space, seed))  # type: ignore[misc]
    return row


def best_time(full: PlacementSpace, placements: NDArray[np.integer]) -> float | None:
    """Returns the least step time of placements, [plan, unit], s; None where none fits."""
    if not len(placements):
        return None
    scores = full.evaluate(placements)
    fits = np.isfinite(scores.step_time) & (scores.overflow == 0)
    return float(scores.step_time[fits].min()) if fits.any() else None


def _classical(space: PlacementSpace, evaluations: int, seed: int) -> NDArray[np.int32]:
    """Returns the best of the constructive planners and what annealing made of them."""
    recorder = Recorder(space=space)
    for number, planner in enumerate((*BASELINES, *CONSTRUCTIVE)):
        planner.search(space, np.random.default_rng([seed, number]), Budget(), recorder)
    if evaluations:
        budget = Budget(evaluations=evaluations)
        Anneal().search(space, np.random.default_rng([seed, 100]), budget, recorder)
    finds = [*recorder.curve[-_FINALISTS:], *recorder.by_finder.values()]
    return np.stack([found.placement for found in finds])


def task_in(space: PlacementSpace, trained: Trained, groups: int) -> PlacementTask:
    """Returns the task that a network is asked: groups as it was trained on, at most."""
    return PlacementTask.of(Grouping.of(space, max(groups, trained.config.GROUPS)))


def _zero_shot(
    policies: Policies, trained: Trained, space: PlacementSpace, seed: int
) -> NDArray[np.int32]:
    """Returns the best that come of a network's draws."""
    drawn = -(-policies.placements // 2)
    shot = ZeroShot(
        placements=drawn,
        recombined=policies.placements - drawn,
        polished=policies.polish,
        groups=policies.groups,
    )
    recorder = Recorder(space=space)
    shot.search(trained, space, seed, Budget(), recorder)
    finds = [*recorder.curve[-_FINALISTS:], *recorder.by_finder.values()]
    return np.array([found.placement for found in finds])


def _tuned(
    policies: Policies, trained: Trained, space: PlacementSpace, seed: int
) -> NDArray[np.int32]:
    """Returns the best of what a network finds while it is trained on the task."""
    task = task_in(space, trained, policies.groups)
    result = trained.tuned(task, policies.tune, seed)
    return task.grouping.expand(np.array([finalist.actions for finalist in result.finalists]))
