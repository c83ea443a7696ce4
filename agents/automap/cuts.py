"""Pipeline cuts: where a chain of units is cut into stages.

Reconstruction. Slot: the next cut. Action: a place of the chain (`Chain.places`: cuts that go
together, thinned out). Mask: behind the cut before it, enough places left for the others, and a
stage that fits the memory. Reward: log(length of the step with stages of about equal work / with
these). Length is that of `best_cuts`, whose dynamic program is the exact answer.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agents.automap.problem import DEAD_END, Worth
from agents.planners.pipeline_chain import Chain, StageCosts
from agents.planners.pipeline_cuts import best_cuts, equal_split
from agents.planners.pipeline_layouts import Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineCuts:
    """The problem of one layout.

    Attributes:
        chain: the model as a chain.
        layout: stages, devices and microbatches.
        seconds: of a stage from one place to a later one, [stage, place, place]; inf = may not be.
        hops: of what goes into a stage that begins at a place, [stage, place].
    """

    chain: Chain
    layout: Layout
    seconds: NDArray[np.float64]  # [stage, place, place] s
    hops: NDArray[np.float64]  # [stage, place] s

    @classmethod
    def build(cls, chain: Chain, layout: Layout) -> "PipelineCuts":
        """Returns the problem of a layout.

        Raises:
            JobError: measured seconds at another batch.
        """
        costs = StageCosts(chain, layout, 1.0)
        return cls(chain=chain, layout=layout, seconds=costs.seconds("none"), hops=costs.hops())

    @property
    def num_slots(self) -> int:
        """Cuts."""
        return self.layout.num_stages - 1

    @property
    def num_actions(self) -> int:
        """Places, the ends included (which are masked)."""
        return int(self.hops.shape[1])

    @cached_property
    def features(self) -> NDArray[np.float32]:
        """Which cut it is, as a part of all, [slot, 1]."""
        return ((1.0 + np.arange(self.num_slots)) / self.layout.num_stages)[:, None].astype(
            np.float32
        )

    def mask(self, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Places behind the last cut with room for the cuts to come, [episode, action]."""
        slot = chosen.shape[1]
        last = self.num_actions - 1
        begin = chosen[:, -1] if slot else np.zeros(len(chosen), np.int64)
        place = np.arange(self.num_actions)
        mask = (place > begin[:, None]) & (place <= last - (self.num_slots - slot))
        mask &= np.isfinite(self.seconds[slot][begin])
        if slot == self.num_slots - 1:
            mask &= np.isfinite(self.seconds[-1][:, last])
        legal: NDArray[np.bool_] = mask
        return legal

    def length(self, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns seconds to fill, run and drain, [plan], from cuts [plan, slot]."""
        count = len(chosen)
        ends = np.full((count, 1), self.num_actions - 1)
        bounds = np.concatenate([np.zeros((count, 1), np.int64), chosen, ends], axis=1)
        stage = np.arange(self.layout.num_stages)
        seconds = self.seconds[stage, bounds[:, :-1], bounds[:, 1:]]
        hops = self.hops[stage, bounds[:, :-1]]
        slowest = np.maximum(seconds, hops).max(axis=1)
        total: NDArray[np.float64] = (seconds + hops).sum(axis=1)
        total += (self.layout.rounds - 1) * slowest
        return total

    @cached_property
    def baseline(self) -> float:
        """Seconds with stages of about equal work, or of the best cuts where these do not fit."""
        work = np.where(np.isfinite(self.seconds[0]), self.seconds[0], 0.0)
        steps = np.diagonal(work, offset=1)
        even = np.array(equal_split(steps, self.layout.num_stages))[1:-1]
        length = float(self.length(even[None])[0])
        return length if np.isfinite(length) else self.optimum

    @cached_property
    def optimum(self) -> float:
        """Seconds of the best cuts, inf = there are none."""
        best = best_cuts(self.seconds, self.hops, self.layout.rounds)
        return float("inf") if best is None else float(best.cost)

    def evaluate(self, chosen: NDArray[np.int64]) -> Worth:
        """Returns what cuts are worth, [plan, slot]."""
        length = self.length(chosen)
        with np.errstate(invalid="ignore"):
            reward = np.where(np.isfinite(length), np.log(self.baseline / length), DEAD_END)
        return Worth(reward, length, np.zeros(len(chosen), np.int64))

    def content_hash(self) -> str:
        """Returns the problem and the layout."""
        problem = self.chain.space.problem
        parts = (problem.graph, problem.cluster, problem.job)
        return " ".join([*(part.content_hash() for part in parts), repr(self.layout)])
