"""The critical path of a simulation in words: what the step waits for, where, and how long."""

from collections import defaultdict

from simcore.result import PathStep, Result
from simcore.units import format_seconds

_WORDS = {
    "compute": "computing",
    "transfer": "transfers",
    "collective": "collectives",
    "launch": "launches",
}
_MOST = 4  # places or modules that are named

Times = defaultdict[str, float]  # name -> s


def path_text(result: Result) -> list[str]:
    """Returns sentences: the kinds of tasks on the path with their places, then the modules.

    Args:
        result: the simulation; its path is a chain of tasks each of which made the next one wait.

    Returns:
        Lines without a full stop; none for a step of no time.
    """
    if not result.step_time or not result.critical_path:
        return []
    kinds: dict[str, Times] = {}
    for step in result.critical_path:
        kinds.setdefault(step.kind, defaultdict(float))[step.place] += step.end - step.start
    total = {kind: sum(places.values()) for kind, places in kinds.items()}
    parts = [
        f"{_WORDS[kind]} {_share(time, result)} ({_largest(kinds[kind], result)})"
        for kind, time in sorted(total.items(), key=lambda item: -item[1])
        if time > 0.0
    ]
    rest = result.step_time - sum(total.values())
    if rest > 1e-3 * result.step_time:
        parts.append(f"waiting in between {_share(rest, result)}")
    lines = [f"a chain of {len(result.critical_path)} tasks: " + ", ".join(parts)]
    modules = _by_module(result)
    if modules:
        named = [f"{name} {format_seconds(time)}" for name, time in _most(modules)]
        lines.append("most of its computing is in " + ", ".join(named))
    return lines


def _most(times: Times) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])[:_MOST]


def _share(seconds: float, result: Result) -> str:
    return f"{seconds / result.step_time:.1%}"


def _largest(places: Times, result: Result) -> str:
    named = _most(places)
    words = [f"{place} {_share(seconds, result)}" for place, seconds in named]
    return ", ".join(words) + (", ..." if len(places) > _MOST else "")


def _by_module(result: Result) -> Times:
    """Returns seconds of computing on the path by module, by op where it has none."""
    graph = result.graph
    module_of = dict(zip(graph.op_names, graph.op_modules, strict=True))
    seconds: Times = defaultdict(float)
    for step in result.critical_path:
        if step.kind == "compute" and step.end > step.start:
            seconds[_module(step, module_of)] += step.end - step.start
    return seconds


def _module(step: PathStep, module_of: dict[str, str]) -> str:
    return module_of.get(step.name) or step.name
