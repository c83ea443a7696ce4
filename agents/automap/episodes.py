"""Episodes over a decision problem: many at once for a learner, or one as a gymnasium environment.

Observation of both: what is known about the slot at hand, which slot that is, and what every slot
holds, one-hot; see `observation_size`.
"""

from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from agents.automap.problem import DEAD_END, DecisionProblem, Worth

Info = dict[str, Any]


class Steps(NamedTuple):
    """One step of many episodes that stand at the same slot. Axes: episode."""

    observation: NDArray[np.float32]  # [episode, feature] after it
    mask: NDArray[np.bool_]  # [episode, action] after it; all False where it is over
    reward: NDArray[np.float64]  # [episode]
    is_over: NDArray[np.bool_]  # [episode]


def observation_size(problem: DecisionProblem) -> int:
    """Returns the number of features of an observation."""
    slots, actions = problem.num_slots, problem.num_actions
    return int(problem.features.shape[1]) + slots + slots * (actions + 1)


def observe(problem: DecisionProblem, chosen: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns observations, [episode, feature], after some slots were filled, [episode, filled]."""
    count, filled = chosen.shape
    slots, actions = problem.num_slots, problem.num_actions
    held = np.zeros((count, slots, actions + 1), np.float32)
    held[:, filled:, actions] = 1.0  # open
    episode, slot = np.indices(chosen.shape)
    held[episode, slot, chosen] = 1.0
    here = np.zeros((count, slots), np.float32)
    known = np.zeros((count, problem.features.shape[1]), np.float32)
    if filled < slots:
        here[:, filled] = 1.0
        known[:] = problem.features[filled]
    return np.concatenate([known, here, held.reshape(count, -1)], axis=1)


class Episodes:
    """Episodes of one problem, side by side; those that met a dead end stay where they are."""

    def __init__(self, problem: DecisionProblem, count: int) -> None:
        self.problem = problem
        self.chosen = np.zeros((count, 0), np.int64)
        self.alive = np.ones(count, np.bool_)
        self.worth: Worth | None = None  # of those that came to the end, in order
        self.mask = problem.mask(self.chosen) if problem.num_slots else self._nothing()
        if not problem.num_slots:
            self.worth = problem.evaluate(self.chosen)

    def observation(self) -> NDArray[np.float32]:
        """Returns what is seen now, [episode, feature]."""
        return observe(self.problem, self.chosen)

    def step(self, actions: NDArray[np.int64]) -> Steps:
        """Fills the next slot of every episode, [episode]; the last one is simulated."""
        self.chosen = np.concatenate([self.chosen, actions[:, None]], axis=1)
        reward, before = np.zeros(len(actions)), self.alive.copy()
        is_last = self.chosen.shape[1] == self.problem.num_slots
        self.mask = self._nothing() if is_last else self.problem.mask(self.chosen)
        if is_last:
            whole = np.flatnonzero(self.alive)
            if len(whole):
                self.worth = self.problem.evaluate(self.chosen[whole])
                reward[whole] = self.worth.reward
        else:
            self.mask &= self.alive[:, None]
            dead = self.alive & ~self.mask.any(axis=1)
            reward[dead] = DEAD_END
            self.alive &= ~dead
        is_over = before & (is_last | ~self.alive)
        return Steps(self.observation(), self.mask, reward, is_over)

    def _nothing(self) -> NDArray[np.bool_]:
        return np.zeros((len(self.chosen), self.problem.num_actions), np.bool_)


class PlanEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """One slot a step.

    Observation: a dictionary of features, float32 0 to 1, and action_mask, int8 [action], all 1
        after the last slot.
    Action: what the slot holds; one that the mask forbids ends the episode as a dead end does.
    Reward: 0 until the last slot, then that of the plan; a dead end has `DEAD_END`.
    Termination: after the last slot or at a dead end; never truncated.
    Info: at the end step_time (s) and overflow (bytes).
    """

    def __init__(self, problem: DecisionProblem) -> None:
        self.problem = problem
        self.action_space = spaces.Discrete(problem.num_actions)
        self.observation_space = spaces.Dict({
            "features": spaces.Box(0.0, 1.0, (observation_size(problem),), np.float32),
            "action_mask": spaces.MultiBinary(problem.num_actions),
        })  # fmt: skip
        self._episodes: Episodes | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], Info]:
        """Begins an episode with all slots open; the seed decides nothing."""
        super().reset(seed=seed, options=options)
        self._episodes = Episodes(self.problem, 1)
        return self._observation(self._episodes), {}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, Info]:
        """Fills a slot."""
        episodes = self._episodes
        if episodes is None:
            raise ResetNeeded("the episode is over, or has not begun: call reset() first")
        if not episodes.mask[0, action]:
            seen = self._observation(episodes)
            self._episodes = None
            return seen, DEAD_END, True, False, {}
        done = episodes.step(np.array([action], np.int64))
        seen, info = self._observation(episodes), {}
        if done.is_over[0]:
            self._episodes = None
            if (worth := episodes.worth) is not None:
                info = {
                    "step_time": float(worth.step_time[0]),
                    "overflow": int(worth.overflow[0]),
                }
        return seen, float(done.reward[0]), bool(done.is_over[0]), False, info

    def _observation(self, episodes: Episodes) -> dict[str, Any]:
        mask = episodes.mask[0] if episodes.mask.any() else np.ones(self.problem.num_actions)
        return {"features": episodes.observation()[0], "action_mask": mask.astype(np.int8)}
