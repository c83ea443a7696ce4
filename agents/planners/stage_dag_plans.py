"""The stage-DAG planner for the portfolio: one call gives the best plan, its time and the bound."""

from collections.abc import Callable
from typing import NamedTuple

from agents.pipelines.bound import dag_bound
from agents.pipelines.env import Freedom
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import Simulator
from agents.planners.pipeline_layouts import Demands
from agents.planners.recorder import Budget
from agents.planners.space import PlacementSpace
from agents.planners.stage_dag import StageDagSearch
from simcore.errors import JobError, PlanError
from simcore.plan import Plan

FINE_NODES = 96  # of the planner; an agent decides about fewer


class StageDag(NamedTuple):
    """The best pipeline whose stages form a DAG."""

    plan: Plan | None  # None where none was found that fits
    step_time: float  # s, inf where there is none
    bound: float  # s that no such pipeline can beat
    note: str  # how it was found, or why there is none


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
    nothing = float("inf")
    freedom = Freedom(microbatches=demands.microbatches, schedule=demands.schedule)
    try:
        simulator = Simulator(
            nodes=NodeGraph.build(space, most=FINE_NODES),
            allow=demands.allow,
            reserve_memory=reserve_memory,
        )
        search = StageDagSearch.build(simulator, freedom, listener)
        bound = dag_bound(search.task)
        search.run(budget)
    except (PlanError, JobError) as error:
        return StageDag(None, nothing, nothing, str(error))
    if search.best is None:
        return StageDag(None, nothing, bound, "no stages were found that fit")
    score, found = search.best
    count = len(search.seen)
    note = f"{found.num_stages} stages, {count} pipelines simulated"
    return StageDag(simulator.plan(found), score.step_time, bound, note)
