"""What a learner acts on: a placement space in groups, with a reward; batches of actions in."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.planners.grouping import Grouping
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace
from agents.reward import Form, Outcome, Reward, negative_log_time
from simcore import Cluster, Job, OpGraph, Problem, Settings, Status
from simcore.cluster import Device, Link

TOY_OPTIMUM = 14e-3  # s, the least step time of `toy()`


class Evaluation(NamedTuple):
    """What actions lead to."""

    reward: NDArray[np.float64]  # [plan]
    fits: NDArray[np.bool_]  # [plan] legal and within the memory
    step_time: NDArray[np.float64]  # [plan] s, inf if illegal
    overflow: NDArray[np.int64]  # [plan] bytes over capacity
    status: NDArray[np.uint8]  # [plan] Status


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementTask:
    """A device for every group of units.

    Attributes:
        grouping: the groups, and the space they are of.
        reward: what a simulation is worth.
        score: simulates placements, int32 [plan, unit]; may return fewer than it is given, the
            first ones, where a budget ends.
    """

    grouping: Grouping
    reward: Reward
    score: Callable[[NDArray[np.int32]], Outcome]  # [plan, unit] placements

    @classmethod
    def build(
        cls, space: PlacementSpace, *, num_groups: int = 128, form: Form = negative_log_time
    ) -> "PlacementTask":
        """Returns the task of a space in so many groups, at most."""
        return cls.of(Grouping.of(space, num_groups), form=form)

    @classmethod
    def of(cls, grouping: Grouping, *, form: Form = negative_log_time) -> "PlacementTask":
        """Returns the task of groups; rewards compare with everything on its default device."""
        space = grouping.space
        usual = float(space.evaluate(space.default[None]).step_time[0])
        capacity = float(space.problem.capacity[list(space.devices)].mean())
        reward = Reward(
            baseline=usual if 0 < usual < np.inf else 1.0, capacity=max(1.0, capacity), form=form
        )
        return cls(grouping=grouping, reward=reward, score=space.evaluate)

    def recorded(self, finder: str, recorder: Recorder, budget: Budget) -> "PlacementTask":
        """Returns the task with its simulations noted for a planner and paid from its budget."""

        def score(placements: NDArray[np.int32]) -> Outcome:
            return recorder.evaluate(
                finder, placements if budget.left() else placements[:0], budget
            )

        return replace(self, score=score)

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """Actions there are, [group, dev]."""
        return self.grouping.allowed

    @property
    def num_groups(self) -> int:
        """Number of decisions."""
        return len(self.allowed)

    @property
    def num_devices(self) -> int:
        """Number of devices of the cluster."""
        return self.grouping.space.num_devices

    def evaluate(self, actions: NDArray[np.integer]) -> Evaluation:
        """Simulates a batch of actions on all cores.

        Args:
            actions: device of each group, [plan, group]. A plan with a device that a group may not
                use is illegal; it is not simulated and has the reward of an illegal plan.

        Returns:
            What the plans are worth, in order; fewer of them where the budget of `score` ended.

        Raises:
            ValueError: the array does not have one column per group.
        """
        actions = np.asarray(actions)
        if actions.ndim != 2 or actions.shape[1] != self.num_groups:
            raise ValueError(f"actions must be [plan, {self.num_groups}], not {actions.shape}")
        known = (actions >= 0) & (actions < self.num_devices)
        may_be: NDArray[np.bool_] = self.allowed[
            np.arange(self.num_groups), np.where(known, actions, 0)
        ]
        legal = np.asarray((known & may_be).all(axis=1))
        outcome = self.score(self.grouping.expand(actions[legal])) if legal.any() else _nothing()
        scored, asked = len(outcome.step_time), int(legal.sum())
        size = len(actions) if scored == asked else int(np.flatnonzero(legal)[scored])
        legal = legal[:size]
        step_time, overflow = np.full(size, np.inf), np.zeros(size, np.int64)
        status = np.full(size, Status.ILLEGAL_DEVICE, np.uint8)
        step_time[legal], overflow[legal] = outcome.step_time, outcome.overflow
        status[legal] = outcome.status
        rewards = self.reward.of(_Scored(step_time, overflow, status))
        return Evaluation(rewards.value, rewards.fits, step_time, overflow, status)

    def content_hash(self) -> str:
        """Returns 16 hex digits that change with anything that decides an action's reward."""
        problem, digest = self.grouping.space.problem, hashlib.sha256()
        reward = self.reward
        for part in (
            problem.graph.content_hash(),
            problem.cluster.content_hash(),
            problem.job.content_hash(),
            problem.settings,
            (reward.form.__name__, reward.baseline, reward.slowest, reward.capacity),
        ):
            digest.update(f"{part!r}\n".encode())
        space = self.grouping.space
        for array in (self.grouping.group, self.allowed, space.allowed, problem.capacity):
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]


class _Scored(NamedTuple):
    """An outcome that is put together."""

    step_time: NDArray[np.float64]  # [plan] s
    overflow: NDArray[np.int64]  # [plan] bytes
    status: NDArray[np.uint8]  # [plan] Status


def _nothing() -> _Scored:
    return _Scored(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.uint8))


def toy() -> PlacementTask:
    """Returns a small task whose optimum is known: 14 ms (`TOY_OPTIMUM`); one GPU takes 29 ms.

    Eleven units on three equal GPUs, joined pairwise at 1 GB/s: a source (1 ms) feeds three
    branches of three units (2, 3 and 4 ms each, 2 MB between them), which a join (1 ms) gathers;
    source and join exchange 1 MB with every branch. Nothing is faster than the critical path:
    source, slow branch and join, 1 + 12 + 1 = 14 ms. It is reached with these on one GPU and each
    other branch on its own: the source's tensor is sent twice, one after the other, so that the
    branches start at 2 and 3 ms, and both outputs are there when the slow branch ends at 13. Only
    the GPUs' names may change: 6 of 177,147 placements are as fast (the tests try all).
    """
    gpus = tuple(Device.of_kind(f"gpu{number}", "V100-SXM2-16GB") for number in range(3))
    pairs = (("gpu0", "gpu1"), ("gpu0", "gpu2"), ("gpu1", "gpu2"))
    links = tuple(Link(a, b, "", 1e9, 0.0) for a, b in pairs)
    seconds, edges = {"source": 1e-3}, []
    for branch, unit_seconds in (("a", 2e-3), ("b", 3e-3), ("c", 4e-3)):
        seconds |= {f"{branch}{step}": unit_seconds for step in range(3)}
        edges += [("source", f"{branch}0", 1_000_000), (f"{branch}2", "join", 1_000_000)]
        edges += [(f"{branch}{step}", f"{branch}{step + 1}", 2_000_000) for step in range(2)]
    graph = OpGraph.from_edges(seconds | {"join": 1e-3}, edges, name="toy")
    cluster = Cluster(name="toy", devices=gpus, links=links)
    problem = Problem.build(graph, cluster, Job(), Settings(launch="graph"))
    return PlacementTask.build(PlacementSpace.build(problem))
