"""Planners under one budget -> the best plan that any of them found, and a lower bound."""

from collections.abc import Mapping, Sequence

from agents.planners.compiled_clock import search_clock
from agents.planners.constraints import resolve_limits
from agents.planners.pipeline_layouts import ANYTHING, Demands
from agents.planners.pipeline_plans import check_demands
from agents.planners.recorder import Budget
from agents.planners.space import PlacementSpace, Planner
from agents.portfolio_answer import answer
from agents.portfolio_result import Listener, PortfolioResult, Progress
from agents.portfolio_search import Search, Strategy
from simcore.cluster import Cluster
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.lower import Problem
from simcore.plan import ONE_HOST, Constraints, Settings

__all__ = ["DEFAULT_BUDGET", "Demands", "PortfolioResult", "Progress", "Strategy", "plan"]

DEFAULT_BUDGET = 20.0  # s


def plan(  # noqa: PLR0913 - what a user decides
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    *,
    settings: Settings = ONE_HOST,
    strategy: Strategy = "auto",
    demands: Demands = ANYTHING,
    budget_seconds: float = DEFAULT_BUDGET,
    evaluations: int | None = None,
    seed: int = 0,
    pins: Mapping[str, str] | None = None,
    exclude: Sequence[str] = (),
    reserve_memory: int = 0,
    progress: Listener | None = None,
    learners: Sequence[Planner] = (),
) -> PortfolioResult:
    """Searches for the plan with the least step time that fits the memory.

    Args:
        graph: the graph.
        cluster: the cluster.
        job: the job.
        settings: how plans are simulated.
        strategy: ``placement``: a device for every unit; ``pipeline``: stages and microbatches;
            ``sharding``: known ways to share copies out; ``auto``: all, and copies of the model.
        demands: what is asked of a pipeline.
        budget_seconds: seconds for the search, unless there are evaluations. The baselines run
            whatever the budget.
        evaluations: number of plans to simulate; then the clock decides nothing, and the same
            seed gives the same plan.
        seed: of all that is drawn at random.
        pins: module path or op name -> device name.
        exclude: names of devices that nothing may run on.
        reserve_memory: bytes to leave free on every GPU.
        progress: called often, with where the search stands; a KeyboardInterrupt ends the search
            with the best plan so far.
        learners: planners that take part beside the usual ones.

    Raises:
        UsageError: pins or exclusions that name nothing or contradict each other; demands that no
            pipeline can meet.
        PlanError: an op that can run nowhere.
        JobError: a job that the graph cannot run.
        InfeasibleError: no placement is even legal: routes are missing; or no pipeline is.
    """
    check_demands(demands, job.batch)
    pins = dict(pins or {})
    limits = resolve_limits(graph, cluster, pins, exclude)
    constraints = Constraints(
        pins=pins, exclude=tuple(exclude), reserve_memory_bytes=reserve_memory
    )
    problem = Problem.build(graph, cluster, job, settings, reserve_memory=reserve_memory)
    if progress is not None:
        progress(Progress(
            stage="compile", best=None, finder=None, evaluations=0, spent=0.0, seconds_left=None
        ))  # fmt: skip
    space = PlacementSpace.build(problem, pins=limits.pins, exclude=limits.exclude)
    space.evaluate(space.default[None])  # compiles, before the clock starts
    seconds = None if evaluations is not None else budget_seconds
    budget = Budget(seconds, evaluations, clock=search_clock)
    search = Search(space, constraints, (strategy, demands), budget, progress, tuple(learners))
    search.run(seed)
    return answer(search, seed)
