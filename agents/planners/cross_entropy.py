"""Cross-entropy over groups of units: Post's family, one categorical per group and no network.

Gao, Chen and Li, Post: device placement with cross-entropy minimization and proximal policy
optimization, NeurIPS 2018. A reconstruction: what the paper says of its loop is known (samples, a
closed-form fit to the best tenth, a mixture with the uniform distribution, steps of the PPO
objective in between), its constants are not. Ours are below. Ours is also what is around it: groups
become smaller in the course of the search, and the first distribution leans to the best placement
known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.losses import elite_fit
from agents.planners.grouping import Grouping
from agents.planners.recorder import Budget, Recorder
from agents.planners.space import PlacementSpace
from agents.task import PlacementTask

Probabilities = NDArray[np.float64]  # [group, dev]


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """Fits independent categoricals to the best of what it samples from them.

    Attributes:
        levels: numbers of groups, at most; each level begins where the one before ended, with an
            equal part of the budget.
        samples: placements of a round.
        elite: fraction of them that the fit is made to, the best ones.
        step: weight of the fit; the rest is the distribution before.
        noise: decisions of a placement that are drawn uniformly in the long run, on average.
        start_weight: probability of the best placement known, at first.
        renewal: weight of the uniform distribution where a level begins.
        patience: rounds without a better placement after which a level ends.
        lives: searches that begin one after another, those after the first from nothing known.
        ascents: rounds of the PPO objective between two fits, each with steps of its own samples.
    """

    levels: tuple[int, ...] = (32, 64, 128)
    samples: int = 32
    elite: float = 0.1
    step: float = 0.3
    noise: float = 1.7
    start_weight: float = 0.7
    renewal: float = 0.2
    patience: int = 20
    lives: int = 1
    ascents: int = 0
    name: str = "cross_entropy"

    def search(
        self,
        space: PlacementSpace,
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Goes from few groups to many, as often as the budget lasts and there are lives."""
        tasks = [PlacementTask.of(grouping) for grouping in distinct(space, self.levels)]
        for life in range(self.lives if tasks else 0):
            now = uniform(tasks[0].allowed) if life else self._lean(tasks[0].grouping, recorder)
            for number, task in enumerate(tasks):
                if number:
                    before = now[tasks[number - 1].grouping.group]
                    now = refined(task.grouping, before, self.renewal)
                part = budget.part(1.0 / (len(tasks) - number))
                now = self._fit(task.recorded(self.name, recorder, part), now, rng, part)
            if not budget.left():
                return

    def _lean(self, grouping: Grouping, recorder: Recorder) -> Probabilities:
        """Returns a distribution around the best placement known, uniform if there is none."""
        flat = uniform(grouping.allowed)
        best = recorder.best or recorder.nearest
        if best is None:
            return flat
        start = (1.0 - self.start_weight) * flat
        start[np.arange(len(flat)), grouping.summarise(best.placement)] += self.start_weight
        return start

    def _fit(
        self, task: PlacementTask, start: Probabilities, rng: np.random.Generator, budget: Budget
    ) -> Probabilities:
        """Samples and fits until the budget is spent or nothing better comes."""
        now, best, stale, turn = start, -np.inf, 0, 0
        noise = min(1.0, self.noise / max(1, task.num_groups))
        while budget.left() and stale < self.patience:
            actions = sample(now, task.allowed, self.samples, rng)
            reward = task.evaluate(actions).reward
            if not len(reward):
                break
            actions, stale, turn = actions[: len(reward)], stale + 1, turn + 1
            if reward.max() > best:
                best, stale = reward.max(), 0
            if turn % (self.ascents + 1):
                now = ascend(now, actions, standardised(reward))
                continue
            fit = elite_fit(
                actions, reward, task.allowed,
                elites=max(1, round(self.elite * len(reward))), uniform=noise,
            )  # fmt: skip
            now = (1.0 - self.step) * now + self.step * fit
        return now


def distinct(space: PlacementSpace, levels: Sequence[int]) -> list[Grouping]:
    """Returns the groupings of a space, without those of equally many groups as one before."""
    groupings = {
        grouping.num_groups: grouping for grouping in (Grouping.of(space, n) for n in levels)
    }
    return [grouping for size, grouping in groupings.items() if size]


def uniform(allowed: NDArray[np.bool_]) -> Probabilities:
    """Returns equal probabilities of all that is allowed, [group, dev]."""
    flat: Probabilities = allowed / allowed.sum(axis=1, keepdims=True)
    return flat


def refined(grouping: Grouping, before: Probabilities, renewal: float) -> Probabilities:
    """Returns the means of what units had, [unit, dev], over the units of each group."""
    total = np.zeros(grouping.allowed.shape)
    np.add.at(total, grouping.group, before * grouping.weight[:, None])
    flat = uniform(grouping.allowed)
    total = np.where(grouping.allowed, total, 0.0) + 1e-12 * flat
    means: Probabilities = total / total.sum(axis=1, keepdims=True)
    return (1.0 - renewal) * means + renewal * flat


def sample(
    probabilities: Probabilities, allowed: NDArray[np.bool_], num: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draws actions, [num, group]; never one that is not allowed."""
    cumulative = probabilities.cumsum(axis=1)
    drawn = rng.random((num, len(cumulative), 1))
    choice = (drawn >= cumulative).sum(axis=2)
    last = allowed.shape[1] - 1 - allowed[:, ::-1].argmax(axis=1)
    chosen: NDArray[np.int64] = np.minimum(choice, last)  # rounding leaves sums below 1
    return chosen


def standardised(reward: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns rewards as standard deviations from their mean, [sample]."""
    spread = max(float(reward.std()), 1e-12)
    centred: NDArray[np.float64] = (reward - reward.mean()) / spread
    return centred


def ascend(
    probabilities: Probabilities,
    actions: NDArray[np.integer],
    advantage: NDArray[np.float64],
    *,
    steps: int = 10,
    rate: float = 0.1,
    clip: float = 0.2,
) -> Probabilities:
    """Climbs the PPO objective in the logits, whose gradient for a categorical is written out.

    Args:
        probabilities: when the actions were sampled, [group, dev].
        actions: [sample, group].
        advantage: of each sample, [sample].
        steps: of gradient ascent.
        rate: of a step, per sample.
        clip: how far a ratio may go from 1 before its gradient stops.
    """
    group = np.arange(len(probabilities))
    now = probabilities
    worth = advantage[:, None]
    for _ in range(steps):
        ratio = now[group, actions] / probabilities[group, actions]  # [sample, group]
        stopped = np.where(worth > 0, ratio >= 1.0 + clip, ratio <= 1.0 - clip)
        weight = np.where(stopped, 0.0, worth * ratio) / len(actions)
        gradient = -weight.sum(axis=0)[:, None] * now
        np.add.at(gradient, (np.broadcast_to(group, actions.shape), actions), weight)
        now = now * np.exp(rate * len(actions) * gradient)
        now = now / now.sum(axis=1, keepdims=True)
    return now
