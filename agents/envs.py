"""Gymnasium environments over a placement task: all groups at once, or one group a step.

Both are deterministic, and neither cuts an episode by itself: what ends it is a termination. A
limit on steps is gymnasium's own `TimeLimit`, which reports a truncation. Learners that need
thousands of rewards use `PlacementTask.evaluate`, many placements at once; the environments give
the same rewards one by one.
"""

from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from agents.observe import FEATURES, group_features
from agents.task import Evaluation, PlacementTask
from simcore import Status

Observation: TypeAlias = dict[str, Any]
Info: TypeAlias = dict[str, Any]


class OneShotPlacement(gymnasium.Env[Observation, NDArray[np.int64]]):
    """Places all groups with one action.

    Observation: a dictionary, the same in every episode.
        features: float32 [group, feature], 0 to 1; see `agents.observe`.
        action_mask: int8 [group, dev], 1 where the group may use the device.
    Action: a device index for each group, in program order, [group].
    Reward: that of the whole placement (`agents.reward`), the higher the faster. A plan that does
        not fit the memory gets less than any that does, an action that the mask forbids least.
    Termination: after one step; never truncated.
    Info: step_time (s, inf if illegal), fits, overflow (bytes over capacity), status.
    """

    def __init__(self, task: PlacementTask) -> None:
        self.task = task
        self.action_space = spaces.MultiDiscrete(np.full(task.num_groups, task.num_devices))
        self.observation_space = spaces.Dict(
            {
                "features": _features_space(task),
                "action_mask": spaces.MultiBinary(list(task.allowed.shape)),
            }
        )
        self._features = group_features(task.grouping)
        self._is_over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begins an episode; all are alike, so the seed decides nothing."""
        super().reset(seed=seed, options=options)
        self._is_over = False
        return self._observation(), {}

    def step(self, action: NDArray[np.int64]) -> tuple[Observation, float, bool, bool, Info]:
        """Simulates the placement; the episode is over."""
        _check_begun(self._is_over)
        self._is_over = True
        found = self.task.evaluate(np.asarray(action)[None])
        return self._observation(), float(found.reward[0]), True, False, _info(found)

    def _observation(self) -> Observation:
        return {
            "features": self._features.copy(),
            "action_mask": self.task.allowed.astype(np.int8),
        }


class StepwisePlacement(gymnasium.Env[Observation, np.int64]):
    """Places one group a step, in program order.

    Observation: a dictionary.
        features: float32 [group, feature], 0 to 1; see `agents.observe`.
        placement: the device of each group, the number of devices where undecided, [group].
        group: the group to place now; the number of groups after the last.
        action_mask: int8 [dev], 1 where that group may go; all 1 after the last group.
    Action: a device index.
    Reward: sparse: 0 until the last group, then that of the whole placement. Dense: what the step
        changed, with the undecided groups where they are by default; an episode then sums to the
        reward of its placement minus that of the default one, so the best policy is the same (Ng,
        Harada and Russell, Policy invariance under reward transformations, 1999).
    Termination: after the last group; or at once, with the reward of an illegal plan, by an action
        that the mask forbids. Never truncated.
    Info: after the last group step_time (s), fits, overflow (bytes over capacity) and status.
    """

    def __init__(self, task: PlacementTask, *, dense: bool = False) -> None:
        self.task, self.dense = task, dense
        self.action_space = spaces.Discrete(task.num_devices)
        self.observation_space = spaces.Dict(
            {
                "features": _features_space(task),
                "placement": spaces.MultiDiscrete(np.full(task.num_groups, task.num_devices + 1)),
                "group": spaces.Discrete(task.num_groups + 1),
                "action_mask": spaces.MultiBinary(task.num_devices),
            }
        )
        self._features = group_features(task.grouping)
        self._default = task.grouping.summarise(task.grouping.space.default)
        self._placement = np.full(task.num_groups, task.num_devices, np.int64)
        self._group = task.num_groups
        self._worth = 0.0  # of the groups decided and the others by default; dense only

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begins an episode with nothing placed; all are alike, so the seed decides nothing."""
        super().reset(seed=seed, options=options)
        self._placement[:] = self.task.num_devices
        self._group = 0
        self._worth = float(self._evaluate().reward[0]) if self.dense else 0.0
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, Info]:
        """Places one group."""
        _check_begun(self._group == self.task.num_groups)
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r} is not in {self.action_space}")
        is_legal = self.task.allowed[self._group, action]
        self._placement[self._group] = action
        self._group = self._group + 1 if is_legal else self.task.num_groups
        is_over = self._group == self.task.num_groups
        if not (is_over or self.dense):
            return self._observation(), 0.0, False, False, {}
        found = self._evaluate()
        worth = float(found.reward[0])
        reward, self._worth = worth - self._worth, worth
        return self._observation(), reward, is_over, False, _info(found) if is_over else {}

    def _evaluate(self) -> Evaluation:
        undecided = self._placement == self.task.num_devices
        return self.task.evaluate(np.where(undecided, self._default, self._placement)[None])

    def _observation(self) -> Observation:
        is_over = self._group == self.task.num_groups
        mask = np.ones(self.task.num_devices) if is_over else self.task.allowed[self._group]
        return {
            "features": self._features.copy(),
            "placement": self._placement.copy(),
            "group": np.int64(self._group),
            "action_mask": mask.astype(np.int8),
        }


def _features_space(task: PlacementTask) -> spaces.Box:
    return spaces.Box(0.0, 1.0, (task.num_groups, len(FEATURES)), np.float32)


def _check_begun(is_over: bool) -> None:
    if is_over:
        raise ResetNeeded("the episode is over, or has not begun: call reset() first")


def _info(found: Evaluation) -> Info:
    """Returns what is known about one placement."""
    return {
        "step_time": float(found.step_time[0]),
        "fits": bool(found.fits[0]),
        "overflow": int(found.overflow[0]),
        "status": Status(found.status[0]).name,
    }
