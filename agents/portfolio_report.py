"""What a search says beside its plan: each strategy on its own, and why nothing fits."""

import math

from agents.planners.data_parallel import DataParallel
from agents.planners.single_device import CpuOnly, SingleDevice
from agents.planners.space import Planner
from agents.portfolio_search import (
    BASELINES,
    DATA_PARALLEL,
    IMPROVERS,
    PIPELINE,
    SHARDING,
    Search,
)
from simcore.shard_summary import layout_name
from simcore.units import format_bytes, format_seconds


def baselines_of(search: Search) -> tuple[dict[str, float | None], dict[str, str]]:
    """Returns what each strategy found on its own, and notes where there is more to say."""
    times: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    for planner in search.planners():
        if planner in IMPROVERS:
            continue
        found = search.recorder.by_finder.get(planner.name)
        if found is None and isinstance(planner, CpuOnly):
            continue  # only where nothing else fits
        times[planner.name] = found.step_time if found and found.feasible else None
        if found is None:
            notes[planner.name] = _why_none(search, planner)
        elif not found.feasible:
            notes[planner.name] = str(search.space.overflow(found.placement))
        if planner is BASELINES[0]:
            copies = search.copies or DataParallel(note="not run")
            usual = copies.baseline
            times[DATA_PARALLEL] = None if usual is None else usual.result.step_time
            if copies.note:
                notes[DATA_PARALLEL] = copies.note
    if search.strategy in {"auto", PIPELINE}:
        times[PIPELINE], notes[PIPELINE] = _pipeline_baseline(search)
    if search.strategy in {"auto", SHARDING}:
        times[SHARDING], notes[SHARDING] = _sharding_baseline(search)
    return times, {name: note for name, note in notes.items() if note}


def _pipeline_baseline(search: Search) -> tuple[float | None, str]:
    """Returns what pipelines found on their own, and what is to be said about it."""
    if search.pipelines is None:
        return None, _why_not_run(search)
    found = search.pipelines.best
    least = search.pipelines.least
    if found is None and search.pipelines.is_untried and math.isfinite(least):
        return None, f"not run: it would take at least {format_seconds(least)}"
    return None if found is None else found.step_time, search.pipelines.note


def _sharding_baseline(search: Search) -> tuple[float | None, str]:
    """Returns what the known ways to shard take, and what is to be said about it."""
    if search.shardings is None:
        return None, "pinned" if search.constraints.pins else _why_not_run(search)
    found, worst = search.shardings.best, search.shardings.worst
    if found is not None:
        return found.step_time, layout_name(search.space.problem.graph, found.plan)
    if search.shardings.tried:
        return None, str(worst)
    return None, search.shardings.note or "not run: it cannot be faster"


def _why_none(search: Search, planner: Planner) -> str:
    if isinstance(planner, SingleDevice):
        if search.constraints.pins:
            return "the pins keep the model from being on one GPU alone"
        return "no GPU can run every op"
    if planner.name not in search.finished:
        if planner in search.learners and search.is_settled() and not search.interrupted:
            return "not run: no placement can be faster than the best plan"
        return _why_not_run(search)
    return "has no legal placement to propose"


def _why_not_run(search: Search) -> str:
    return "not run: interrupted" if search.interrupted else "not run: the budget is spent"


def reason_of(search: Search) -> str:
    """Says why nothing fits, with the device that is fullest."""
    problem = search.space.problem
    other = {PIPELINE: search.pipelines, SHARDING: search.shardings}.get(search.strategy)
    nearest = search.recorder.nearest
    if other is not None:
        worst = other.worst
    else:
        worst = None if nearest is None else search.space.overflow(nearest.placement)
    assert worst is not None
    text = (
        f"nothing found fits: the best attempt {worst}, {format_bytes(worst.excess)} "
        f"({worst.excess} bytes) too much"
    )
    least, room = search.space.least_memory, search.space.total_capacity
    if least > room:
        text += (
            f"; parameters and optimizer state alone take {format_bytes(least)}, and all "
            f"devices together have {format_bytes(room)}"
        )
    return f"{problem.graph.name} on {problem.cluster.name}: {text}"
