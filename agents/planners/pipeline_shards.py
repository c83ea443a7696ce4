"""Pipelines of sharded stages: search over the combined problem by simulation.

For every number of ranks and of devices that share a stage the usual plan is tried first (tensor
parallel, four microbatches a rank), in less memory where it does not fit; what cannot beat the best
plan (`agents.automap.combined_bound`) is left out. From the best of them one slot after another is
changed as long as that helps. Every plan is simulated in full, with equal devices folded.

Plans that share nothing out are tried only while nothing else fits. A sharded optimizer is taken
only where it is needed, or gains more than the model's error.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from agents.automap.combined import BEST, KINDS, SLOTS, WHOLE, ZERO, Combined
from agents.automap.combined_bound import CombinedBound
from agents.planners.pipeline_layouts import MOST_PER_RANK
from agents.planners.recorder import Budget
from simcore.plan import Plan
from simcore.plan_summary import MODEL_ERROR

Row = tuple[int, ...]
T = TypeVar("T")
_STAGES, _SHARDS, _KIND, _ROUNDS, _ZERO, _RECOMPUTE = (
    SLOTS.index(name) for name in ("stages", "shards", "kind", "microbatches", "zero", "recompute")
)
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
        limit: s; plans that cannot be faster are not tried.
        bound: what a plan cannot beat.
    """

    problem: Combined
    listener: Callable[[Budget], None] | None = None
    tried: dict[Row, tuple[float, int]] = field(default_factory=dict)
    limit: float = math.inf
    bound: CombinedBound = field(init=False)

    def __post_init__(self) -> None:
        self.bound = CombinedBound(problem=self.problem)

    def run(self, budget: Budget) -> None:
        """Searches until nothing helps or the budget is spent."""
        for row in self._usual():
            for zero, recompute in _FALLBACKS:
                lean = self._with(self._with(row, _ZERO, ZERO.index(zero)), _RECOMPUTE, recompute)
                if not budget.left():
                    return
                if lean is None or not self._may_win(lean):
                    continue
                if self._try(lean, budget) and (self._is_sharded(lean) or lean == row):
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
        fitting = [row for row in self._plans() if not self.tried[row][1]]
        sharded = [row for row in fitting if self._is_sharded(row)]
        if fitting:
            return preferred(sharded or fitting, self._seconds, lambda row: ZERO[row[_ZERO]])
        return min(self._plans(), key=lambda row: self.tried[row][::-1], default=None)

    @property
    def is_sharded(self) -> bool:
        """Whether `plan` fits and shares anything out."""
        return self.fits and self.row is not None and self._is_sharded(self.row)

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
        """Returns for each slot the best plan that was tried with something else in it.

        None that is faster: it shares nothing out, or has more of ZeRO and is little faster.
        """
        best, found = self.row, []
        if best is None or not self.fits:
            return []
        slower = {
            row: time - self.step_time
            for row, (time, over) in self.tried.items()
            if not over and self.step_time <= time < math.inf
        }
        for slot, name in enumerate(SLOTS):
            others = [row for row in slower if row[slot] != best[slot]]
            other = min(others, key=slower.__getitem__, default=None)
            if other is not None:
                says = [self.problem.says(slot, row[slot]) for row in (best, other)]
                found.append(Alternative(name, says[0], says[1], slower[other]))
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

    def _plans(self) -> Iterator[Row]:
        return (row for row, (seconds, _) in self.tried.items() if math.isfinite(seconds))

    def _seconds(self, row: Row) -> float:
        return self.tried[row][0]

    def _is_sharded(self, row: Row) -> bool:
        """Whether a plan shares anything out; a sharded optimizer counts where it is needed."""
        if self.problem.stages[row[_SHARDS]] > 1 or not self.bound.shares(row):
            return self.bound.shares(row)
        whole = self.tried.get((*row[:_ZERO], 0, *row[_ZERO + 1 :]))
        return whole is not None and (whole[1] > 0 or not math.isfinite(whole[0]))

    def _may_win(self, row: Row) -> bool:
        is_found = self.is_sharded or math.isfinite(self.limit)
        if is_found and not self.bound.shares(row) and self.problem.stages[row[_STAGES]] > 1:
            return False  # a single stage still tells whether copies need a sharded optimizer
        best = min(self.limit, self.step_time if self.is_sharded else math.inf)
        if math.isinf(best):  # the bound takes a while
            return True
        return self._least(row) < best and self.bound.of(row) < best

    def _least(self, row: Row) -> float:
        """Returns about the seconds of a plan in which stages are equal and nothing is sent."""
        problem = self.problem
        devices = list(problem.devices)
        work = float(problem.space.problem.seconds[:, devices].min(axis=1).sum())
        ranks, rounds = problem.stages[row[_STAGES]], problem.microbatches[row[_ROUNDS]]
        fill = (rounds + ranks - 1) / rounds if row[SLOTS.index("schedule")] == 0 else 1.0
        return work / len(devices) * fill

    def _usual(self) -> list[Row]:
        """Returns the usual plans for each number of ranks and shards, the most promising first.

        Pipelines that share nothing out come last.
        """
        found = []
        for stages in self.problem.legal(()):
            for shards in self.problem.legal((stages,)):
                kinds = self.problem.legal((stages, shards))
                known = [KINDS.index(name) for name in (WHOLE, "tensor", BEST)]
                for place, kind in enumerate(kind for kind in known if kind in kinds):
                    row = self._filled([stages, shards, kind])
                    if row is not None:
                        is_last = self.problem.stages[shards] == 1 < self.problem.stages[stages]
                        found.append((is_last, place, self._least(row), row))
        return [each[-1] for each in sorted(found)]

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


def preferred(
    plans: Iterable[T], seconds: Callable[[T], float], zero: Callable[[T], int]
) -> T | None:
    """Returns the fastest plan, or one with less of ZeRO that is as fast within the model's error.

    Args:
        plans: that fit.
        seconds: of a plan.
        zero: the stage of ZeRO of a plan, 0 = its optimizer is not sharded.
    """
    ranked = sorted(plans, key=seconds)
    near = [each for each in ranked if seconds(each) <= (1.0 + MODEL_ERROR) * seconds(ranked[0])]
    return min(near, key=zero, default=None)  # of equal ones the first
