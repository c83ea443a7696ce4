"""Pipelines over a DAG of stages for the portfolio: whether there are any, search, best plan."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from agents.pipelines.bound import dag_bound
from agents.pipelines.env import Freedom
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import DagPlan, Score, Simulator
from agents.planners.pipeline_layouts import Demands
from agents.planners.pipeline_plans import Found
from agents.planners.recorder import Budget
from agents.planners.space import Overflow, PlacementSpace
from agents.planners.stage_dag import StageDagSearch
from simcore.errors import JobError, PlanError
from simcore.plan import Plan
from simcore.simulation import simulate

FINE_NODES = 96  # of the planner; an agent decides about fewer


class StageDag(NamedTuple):
    """The best pipeline whose stages form a DAG."""

    plan: Plan | None  # None where none was found that fits
    step_time: float  # s, inf where there is none
    bound: float  # s that no such pipeline can beat
    note: str  # how it was found, or why there is none


@dataclass(kw_only=True, eq=False)
class StageDags:
    """The pipelines over DAGs of stages of a space; may be read while the search goes on.

    Attributes:
        search: None where there is nothing to search.
        reason: why there is nothing to search.
    """

    search: StageDagSearch | None = None
    reason: str = ""

    @classmethod
    def build(
        cls,
        space: PlacementSpace,
        demands: Demands,
        *,
        reserve_memory: int = 0,
        listener: Callable[[Budget], None] | None = None,
    ) -> "StageDags":
        """Returns the pipelines of a space, nothing tried yet.

        Args:
            space: gives the graph, the job, the settings and the devices that may be used.
            demands: what may not be chosen freely.
            reserve_memory: bytes to leave free on every GPU.
            listener: called after each simulation.
        """
        freedom = Freedom(microbatches=demands.microbatches, schedule=demands.schedule)
        try:
            simulator = Simulator(
                nodes=NodeGraph.build(space, most=FINE_NODES),
                allow=demands.allow,
                reserve_memory=reserve_memory,
            )
            found = cls(search=StageDagSearch.build(simulator, freedom, listener))
            found.bound  # noqa: B018 - what cannot be costed is found out here
        except (PlanError, JobError) as error:
            return cls(reason=str(error))
        return found

    @cached_property
    def bound(self) -> float:
        """Seconds that no such pipeline can beat; inf where there is none."""
        return float("inf") if self.search is None else dag_bound(self.search.task)

    def run(self, budget: Budget) -> None:
        """Searches until the budget is spent; called again, it goes on."""
        if self.search is not None:
            self.search.run(budget)

    @property
    def best(self) -> Found | None:
        """The best pipeline that fits."""
        return self._found(None if self.search is None else self.search.best)

    @property
    def nearest(self) -> Found | None:
        """The one that is least over where none fits."""
        return self._found(None if self.search is None else self.search.nearest)

    def _found(self, pair: tuple[Score, DagPlan] | None) -> Found | None:
        if self.search is None or pair is None:
            return None
        return Found(self.search.task.simulator.plan(pair[1]), pair[0].step_time)

    @property
    def overflow(self) -> int | None:
        """Bytes that the nearest plan is over the memory, summed over devices; None: no plan."""
        nearest = None if self.search is None else self.search.nearest
        return None if nearest is None else nearest[0].overflow

    @property
    def worst(self) -> Overflow | None:
        """Where the nearest plan does not fit."""
        found = self.nearest
        if self.search is None or found is None:
            return None
        problem = self.search.task.simulator.nodes.space.problem
        result = simulate(problem.graph, problem.cluster, problem.job, found.plan)
        spare = [
            (int(room) - use.reserved, use.name, use.reserved, int(room))
            for use, room in zip(result.devices, problem.capacity, strict=True)
        ]
        return Overflow(*min(spare)[1:])

    @property
    def note(self) -> str:
        """How the best plan was found, or why there is none."""
        if self.search is None:
            return self.reason
        if self.search.best is None:
            return "no stages were found that fit"
        stages = self.search.best[1].num_stages
        return f"{stages} stages, {len(self.search.seen)} pipelines simulated"


def plan_stage_dag(
    space: PlacementSpace,
    demands: Demands,
    budget: Budget,
    *,
    reserve_memory: int = 0,
    listener: Callable[[Budget], None] | None = None,
) -> StageDag:
    """Returns the best pipeline over a DAG of stages that a budget finds.

    Args:
        space: gives the graph, the job, the settings and the devices that may be used.
        demands: what may not be chosen freely.
        budget: of the search; each simulation is charged to it.
        reserve_memory: bytes to leave free on every GPU.
        listener: called after each simulation.
    """
    dags = StageDags.build(space, demands, reserve_memory=reserve_memory, listener=listener)
    dags.run(budget)
    best = dags.best
    if best is None:
        return StageDag(None, float("inf"), dags.bound, dags.note)
    return StageDag(best.plan, best.step_time, dags.bound, dags.note)
