"""Placements -> better ones by the simulator alone: what proposals have in common is recombined.

A network's draws are each wrong somewhere. Here the best of them take stretches of the program from
each other, move a border between devices, or give a stretch to a device that the draws like there,
and are simulated; the best are kept and go on (a genetic search; Holland, Adaptation in natural and
artificial systems, 1975). No gradient and no network is needed: one search is some milliseconds
beside its simulations.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.task import PlacementTask

Plans = NDArray[np.int64]  # [plan, group]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """How placements are recombined.

    Attributes:
        kept: placements that go on to the next round.
        children: placements that are simulated in a round.
        uniform: weight of the uniform distribution beside what the draws like.
    """

    kept: int = 16
    children: int = 64
    uniform: float = 0.2

    def run(self, task: PlacementTask, draws: Plans, evaluations: int, seed: int) -> Plans:
        """Returns the best placements met, [plan, group], best first.

        Args:
            task: what simulates.
            draws: where it begins, [plan, group]; they are simulated too.
            evaluations: to make, the draws included.
            seed: of all that is drawn.
        """
        rng, draws = np.random.default_rng(seed), draws[:evaluations]
        liking = self._liking(task, draws)
        reward = task.evaluate(draws).reward
        plans, used = draws[: len(reward)], len(draws)
        plans, reward = self._best(plans, reward)
        while used < evaluations and len(plans):
            size = min(self.children, evaluations - used)
            children = np.stack([self._child(plans, liking, rng) for _ in range(size)])
            found = task.evaluate(children).reward
            used += size
            plans, reward = self._best(
                np.concatenate([plans, children[: len(found)]]), np.concatenate([reward, found])
            )
            if len(found) < size:  # the task's own budget ended
                break
        return plans

    def _liking(self, task: PlacementTask, draws: Plans) -> NDArray[np.float64]:
        """Returns how probable devices are where a stretch is given away, [group, dev]."""
        counts = np.zeros(task.allowed.shape)
        np.add.at(counts, (np.arange(draws.shape[1])[None, :], draws), 1.0 / max(1, len(draws)))
        flat = task.allowed / task.allowed.sum(axis=1, keepdims=True)
        liking: NDArray[np.float64] = (1.0 - self.uniform) * counts + self.uniform * flat
        return liking

    def _best(self, plans: Plans, reward: NDArray[np.float64]) -> tuple[Plans, NDArray[np.float64]]:
        """Returns the best distinct placements and their rewards, best first."""
        _, first = np.unique(plans, axis=0, return_index=True)
        order = first[np.lexsort((first, -reward[first]))][: self.kept]
        return plans[order], reward[order]

    def _child(self, plans: Plans, liking: NDArray[np.float64], rng: np.random.Generator) -> Plans:
        """Returns a new placement, [group]; parents that are better are taken more often."""
        mother, father = (plans[int(len(plans) * rng.random() ** 2)] for _ in range(2))
        child, kind = mother.copy(), rng.integers(4)
        begin, end = stretch(len(child), rng)
        if kind == 0:
            child[begin:end] = father[begin:end]
        elif kind == 1:
            child = moved_border(child, rng)
        elif kind == 2:
            mean = liking[begin:end].mean(axis=0)
            child[begin:end] = rng.choice(len(mean), p=mean / mean.sum())
        else:
            one, other = rng.choice(child), rng.choice(child)
            part = child[begin:end]
            child[begin:end] = np.where(part == one, other, np.where(part == other, one, part))
        legal = liking[np.arange(len(child)), child] > 0
        kept: Plans = np.where(legal, child, mother)
        return kept


def stretch(size: int, rng: np.random.Generator) -> tuple[int, int]:
    """Returns where a stretch of the program begins and ends; short ones are as likely as long."""
    length = int(np.exp(rng.uniform(0.0, np.log(size + 1.0))))
    begin = int(rng.integers(size - length + 1))
    return begin, begin + length


def moved_border(plan: Plans, rng: np.random.Generator) -> Plans:
    """Returns a placement, [group], where one change of device comes earlier or later."""
    borders = np.flatnonzero(plan[1:] != plan[:-1]) + 1
    if not len(borders):
        return plan
    border, plan = int(rng.choice(borders)), plan.copy()
    far = 1 + int(rng.geometric(0.3))
    if rng.random() < 0.5:
        plan[max(0, border - far) : border] = plan[border]
    else:
        plan[border : border + far] = plan[border - 1]
    return plan
