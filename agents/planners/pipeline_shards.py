"""Pipelines of sharded stages: search over the combined problem by simulation.

For every number of ranks and of devices that share a stage the usual plan is tried first (tensor
parallel, four microbatches a rank), in less memory where it does not fit; what would be slower than
the best plan even without communication is left out. From the best of them one slot after another
is changed as long as that helps. Every plan is simulated in full, with equal devices folded.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from agents.automap.combined import BEST, KINDS, SLOTS, WHOLE, ZERO, Combined
from agents.planners.pipeline_layouts import MOST_PER_RANK
from agents.planners.recorder import Budget
from simcore.plan import Plan

Row = tuple[int, ...]
_STAGES, _SHARDS, _KIND, _ROUNDS, _ZERO, _RECOMPUTE = (
    SLOTS.index(name) for name in ("stages", "shards", "kind", "microbatches", "zero", "recompute")
)
_AGAIN = 1.0 / 3.0  # of forward and backward, what the forward is
# ZeRO and recomputation, while a plan does not fit
_FALLBACKS = ((0, 0), (0, 1), (1, 0), (1, 1), (3, 1))


class Alternative(NamedTuple):
    """What a plan has in a slot, and the best plan that was tried with something else in it."""

    slot: str
    chosen: str
    other: str
    seconds: float  # by which the other takes longer


@dataclass(slots=True)
class CombinedSearch:
    """The search; may be read while it goes on.

    Attributes:
        problem: the combined problem.
        listener: called after each simulation.
        tried: seconds (inf = is no plan) and bytes over the memory of every row.
    """

    problem: Combined
    listener: Callable[[Budget], None] | None = None
    tried: dict[Row, tuple[float, int]] = field(default_factory=dict)

    def run(self, budget: Budget) -> None:
        """Searches until nothing helps or the budget is spent."""
        for row in self._usual():
            for zero, recompute in _FALLBACKS:
                lean = self._with(self._with(row, _ZERO, ZERO.index(zero)), _RECOMPUTE, recompute)
                if not budget.left():
                    return
                if lean is not None and self._may_win(lean) and self._try(lean, budget):
                    break
        here = None
        while here != self.row and self.row is not None:
            here = self.row
            for row in self._near(here):
                if not budget.left():
                    return
                if self._may_win(row):
                    self._try(row, budget)

    @property
    def row(self) -> Row | None:
        """The best plan's slots, or those of the plan that is least over; None: there is none."""
        plans = (row for row, (seconds, _) in self.tried.items() if math.isfinite(seconds))
        return min(plans, key=lambda row: self.tried[row][::-1], default=None)

    @property
    def plan(self) -> Plan | None:
        """The plan of `row`."""
        return None if self.row is None else self.problem.plan(self.row)

    @property
    def step_time(self) -> float:
        """Seconds of `plan`, inf where there is none."""
        return math.inf if self.row is None else self.tried[self.row][0]

    @property
    def fits(self) -> bool:
        """Whether `plan` fits the memory."""
        return self.row is not None and self.tried[self.row][1] == 0

    def alternatives(self) -> list[Alternative]:
        """Returns for each slot the best plan that was tried with something else in it."""
        best, found = self.row, []
        if best is None or not self.fits:
            return []
        fitting = {row: time for row, (time, over) in self.tried.items() if not over}
        for slot, name in enumerate(SLOTS):
            others = [row for row in fitting if row[slot] != best[slot]]
            other = min(others, key=lambda row: fitting[row], default=None)
            if other is not None and math.isfinite(fitting[other]):
                says = [self.problem.says(slot, row[slot]) for row in (best, other)]
                found.append(Alternative(name, says[0], says[1], fitting[other] - fitting[best]))
        return found

    def _try(self, row: Row, budget: Budget) -> bool:
        """Simulates a plan, once; returns whether it is one that fits."""
        if row not in self.tried:
            self.tried[row] = self.problem.simulated(row)
            budget.charge(1)
            if self.listener is not None:
                self.listener(budget)
        seconds, over = self.tried[row]
        return math.isfinite(seconds) and not over

    def _least(self, row: Row) -> float:
        """Returns about the seconds of a plan in which stages are equal and nothing is sent."""
        problem = self.problem
        devices = list(problem.devices)
        work = float(problem.space.problem.seconds[:, devices].min(axis=1).sum())
        ranks, rounds = problem.stages[row[_STAGES]], problem.microbatches[row[_ROUNDS]]
        fill = (rounds + ranks - 1) / rounds if row[SLOTS.index("schedule")] == 0 else 1.0
        return work / len(devices) * fill * (1.0 + _AGAIN * row[_RECOMPUTE])

    def _may_win(self, row: Row) -> bool:
        return not self.fits or self._least(row) < self.step_time

    def _usual(self) -> list[Row]:
        """Returns the usual plans for each number of ranks and shards, the most promising first."""
        found = []
        for stages in self.problem.legal(()):
            for shards in self.problem.legal((stages,)):
                kinds = self.problem.legal((stages, shards))
                known = [KINDS.index(name) for name in (WHOLE, "tensor", BEST)]
                for place, kind in enumerate(kind for kind in known if kind in kinds):
                    row = self._filled([stages, shards, kind])
                    if row is not None:
                        found.append((place, self._least(row), row))
        return [row for _, _, row in sorted(found)]

    def _filled(self, row: list[int]) -> Row | None:
        """Returns a row with the usual choice in the slots that are open."""
        while len(row) < len(SLOTS):
            legal = self.problem.legal(row)
            if not legal:
                return None
            choice = legal[0]
            if len(row) == _ROUNDS:
                ranks = self.problem.stages[row[_STAGES]]
                most = MOST_PER_RANK * ranks if ranks > 1 else 1
                few = [k for k in legal if self.problem.microbatches[k] <= most]
                choice = max(few, default=choice)
            row.append(choice)
        return tuple(row)

    def _with(self, row: Row | None, slot: int, action: int) -> Row | None:
        """Returns a row with another action, the later slots as they were where that is legal."""
        if row is None or action not in self.problem.legal(row[:slot]):
            return None
        changed = [*row[:slot], action]
        for old in row[slot + 1 :]:
            legal = self.problem.legal(changed)
            if not legal:
                return None
            near = int(np.argmin([abs(each - old) for each in legal]))
            changed.append(old if old in legal else legal[near])
        return tuple(changed)

    def _near(self, row: Row) -> Iterator[Row]:
        """Yields rows with one other action, those that cost least to change first."""
        for slot in (_ROUNDS, SLOTS.index("schedule"), _ZERO, _RECOMPUTE, _KIND, _SHARDS, _STAGES):
            for action in self.problem.legal(row[:slot]):
                other = None if action == row[slot] else self._with(row, slot, action)
                if other is not None:
                    yield other
