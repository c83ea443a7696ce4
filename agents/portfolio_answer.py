"""The answer of a search: its best plan simulated again, the bound, and why that plan won."""

from collections.abc import Mapping

import msgspec

from agents.planners.compiled_clock import search_clock
from agents.planners.pipeline_plans import Found as Pipelined
from agents.planners.recorder import Found
from agents.planners.shard_reasons import Reasons
from agents.planners.sharding import Sharded
from agents.portfolio_report import baselines_of, reason_of
from agents.portfolio_result import PortfolioResult, predicted
from agents.portfolio_search import (
    ALONE,
    DATA_PARALLEL,
    PIPELINE,
    PLACEMENT,
    SHARDING,
    Search,
)
from agents.portfolio_why import Why, use_of
from simcore.errors import InfeasibleError
from simcore.plan import Plan, Provenance
from simcore.plan_summary import describe_job
from simcore.result import Result
from simcore.simulation import simulate


def answer(search: Search, seed: int) -> PortfolioResult:
    """Returns the best plan, simulated again, with everything that is known about it."""
    problem = search.space.problem
    chosen, finder, expected = _chosen(search)
    chosen = msgspec.structs.replace(
        chosen, constraints=search.constraints, job_name=describe_job(problem.job)
    )
    result = simulate(problem.graph, problem.cluster, problem.job, chosen)
    assert result.step_time == expected, (result.step_time, expected)
    bound = min(*search.bounds().values(), result.step_time)  # equal but for rounding
    baselines, notes = baselines_of(search)
    provenance = Provenance(
        strategy=finder,
        seed=seed,
        evaluations=search.recorder.evaluations,
        seconds=round(search_clock() - search.started, 3),
        budget_s=search.budget.seconds,
        baselines=baselines,
        baseline_notes=notes,
    )
    return PortfolioResult(
        plan=msgspec.structs.replace(
            chosen,
            predicted=predicted(problem.cluster, result, bound),
            provenance=provenance,
        ),
        result=result,
        lower_bound=bound,
        baselines=baselines,
        notes=notes,
        recorder=search.recorder,
        interrupted=search.interrupted,
        reason=None if result.feasible else reason_of(search),
        why=_why(search, finder, result, notes) if result.feasible else None,
        sharding=_reasons(search, finder) if result.feasible else None,
    )


def _why(search: Search, finder: str, result: Result, notes: Mapping[str, str]) -> Why:
    """Sets the best plan beside the best one of another strategy; it is simulated for that."""
    others = [(time, name) for name, time in _contenders(search).items() if name != _kind(finder)]
    winner = use_of(finder, result)
    if not others:
        known = {name: note for name, note in notes.items() if name in (DATA_PARALLEL, *ALONE)}
        return Why(winner, None, {name: known[name] for name in known if name != finder})
    name = min(others)[1]
    found = search.recorder.best if name == PLACEMENT else None
    return Why(winner, use_of(name if found is None else found.finder, _rerun(search, name)), {})


def _reasons(search: Search, finder: str) -> Reasons | None:
    """Returns what a sharded plan splits and why."""
    if finder != SHARDING or search.shardings is None:
        return None
    return search.shardings.reasons()


def _kind(finder: str) -> str:
    return finder if finder in (DATA_PARALLEL, *ALONE) else PLACEMENT


def _contenders(search: Search) -> dict[str, float]:
    """Returns the step time of the best plan of each strategy that has one that fits."""
    times: dict[str, float | None] = {
        PLACEMENT: None if search.recorder.best is None else search.recorder.best.step_time,
        PIPELINE: None if search.pipelines is None else search.pipelines.best_time,
    }
    copies = None if search.copies is None else search.copies.best
    sharded = None if search.shardings is None else search.shardings.best
    times[DATA_PARALLEL] = None if copies is None else copies.result.step_time
    if sharded is not None and not (copies is not None and _is_copies(sharded.plan)):
        times[SHARDING] = sharded.step_time
    return {name: time for name, time in times.items() if time is not None}


def _is_copies(plan: Plan) -> bool:
    """Returns whether nothing is split but the samples."""
    is_whole = len(plan.stages) == 1 and not plan.stages[0].sharding
    return is_whole and plan.microbatches == 1 and plan.optimizer_sharding == 0


def _rerun(search: Search, name: str) -> Result:
    """Returns the simulation of the best plan of a strategy that has one."""
    problem = search.space.problem
    if name == DATA_PARALLEL and search.copies is not None and search.copies.best is not None:
        return search.copies.best.result
    if name == SHARDING:
        return _sharded(search).result
    plan = _pipeline(search).plan if name == PIPELINE else _placed(search)
    plan = msgspec.structs.replace(plan, constraints=search.constraints)
    return simulate(problem.graph, problem.cluster, problem.job, plan)


def _placed(search: Search) -> Plan:
    """Returns the best placement as a plan, or the one that is least over."""
    problem = search.space.problem
    return Plan.from_placement(
        problem.graph,
        problem.cluster,
        problem.job,
        _found(search).placement,
        settings=problem.settings,
    )


def _chosen(search: Search) -> tuple[Plan, str, float]:
    """Returns the best plan, who found it, and its step time as it was recorded."""
    winner, rival = search.winner(), search.rival()
    if winner is not None and rival is not None and winner[0] == DATA_PARALLEL:
        return rival.plan, *winner
    if search.strategy == PIPELINE or (winner is not None and winner[0] == PIPELINE):
        pipeline = _pipeline(search)
        return pipeline.plan, PIPELINE, pipeline.step_time
    if search.strategy == SHARDING or (winner is not None and winner[0] == SHARDING):
        sharded = _sharded(search)
        return sharded.plan, SHARDING, sharded.step_time
    found = _found(search)
    return _placed(search), found.finder, found.step_time


def _pipeline(search: Search) -> Pipelined:
    """Returns the best pipeline, or the one that is least over."""
    assert search.pipelines is not None
    found = search.pipelines.best or search.pipelines.nearest
    if found is None:
        raise InfeasibleError(
            f"no pipeline of {search.space.problem.graph.name} on "
            f"{search.space.problem.cluster.name}: {search.pipelines.note}"
        )
    return found


def _sharded(search: Search) -> Sharded:
    """Returns the best way to shard, or the one that is least over."""
    shardings = search.shardings
    found = None if shardings is None else shardings.best or shardings.nearest
    if found is None:
        note = "pinned" if shardings is None else shardings.note
        raise InfeasibleError(
            f"no way to shard {search.space.problem.graph.name} on "
            f"{search.space.problem.cluster.name}: {note}"
        )
    return found


def _found(search: Search) -> Found:
    """Returns the best placement, or the one that is least over."""
    found = search.recorder.best or search.recorder.nearest
    if found is None:
        raise InfeasibleError(
            f"no legal placement of {search.space.problem.graph.name} on "
            f"{search.space.problem.cluster.name}: there is no route between devices that have "
            "to exchange tensors"
        )
    return found
