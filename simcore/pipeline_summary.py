"""A pipeline plan and its simulation in words: its stages, and what binds it."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from simcore.graph import OpGraph
from simcore.plan import Plan
from simcore.profile_store import load_profile
from simcore.result import DeviceUse, Result
from simcore.shard_summary import layout_name
from simcore.shards import is_sharded, plan_meshes
from simcore.units import format_seconds

_STAGE = re.compile(r"(\d+)[FBIWU]")  # what the name of a task begins with
_SHORT = 3  # components of a module path that are shown, where none before is a number
_MANY = 0.02  # of the critical path or the step; less is not worth a word


def stage_rows(graph: OpGraph, plan: Plan, result: Result) -> list[dict[str, Any]]:
    """Returns what each stage of a pipeline plan is and does.

    Args:
        graph: the graph.
        plan: the plan.
        result: its simulation.
    """
    used = {use.name: use for use in result.devices}
    seconds = _stage_seconds(plan, result)
    op = {name: number for number, name in enumerate(graph.op_names)}
    rows = []
    for number, stage in enumerate(plan.stages):
        units = [op[name] for name in stage.ops] or list(range(graph.num_ops))
        fullest = max((used[name] for name in stage.devices), key=_fullness)
        rows.append(
            {
                "name": stage.name,
                "first_module": graph.op_modules[units[0]] or graph.op_names[units[0]],
                "last_module": graph.op_modules[units[-1]] or graph.op_names[units[-1]],
                "units": len(stage.ops) or graph.num_units,
                "devices": list(stage.devices),
                "recompute": stage.recompute,
                "busy": seconds[number] / result.run.step_time if result.run.step_time else 0.0,
                "peak_memory_bytes": fullest.reserved,
                "capacity_bytes": fullest.capacity,
            }
        )
    return rows


def _fullness(use: DeviceUse) -> float:
    return use.reserved / use.capacity if use.capacity else 0.0


def _stage_seconds(plan: Plan, result: Result) -> list[float]:
    """Returns how long one device of each stage computes for it, in s, [stage].

    Where ops have no stage in their names, what its devices compute is shared out evenly.
    """
    run = result.run
    here = np.flatnonzero(run.placement >= 0)
    found = [_STAGE.match(result.graph.op_names[op]) for op in here.tolist()]
    if all(found):
        total = np.zeros(len(plan.stages))
        stage = [int(match[1]) for match in found if match]
        np.add.at(total, stage, (run.end - run.start)[here])
        pairs = set(zip(stage, run.placement[here].tolist(), strict=True))
        ran = Counter(number for number, _ in pairs)  # of equal devices one may stand for all
        return [float(t) / max(1, ran[number]) for number, t in enumerate(total)]
    used = {use.name: use for use in result.devices}
    shared = Counter(stage.devices for stage in plan.stages)
    return [
        sum(used[name].busy for name in stage.devices) / len(stage.devices) / shared[stage.devices]
        for stage in plan.stages
    ]


def short_module(path: str) -> str:
    """Returns a module path up to its first number, or its first components."""
    parts = path.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1 if numbers else _SHORT])


def explain_pipeline(
    graph: OpGraph,
    plan: Plan,
    result: Result,
    baselines: Mapping[str, float | None],
    notes: Mapping[str, str],
) -> str:
    """Returns what a pipeline plan does, what binds it and which GPUs are idle.

    Args:
        graph: the graph.
        plan: the plan; it fits.
        result: its simulation.
        baselines: step time of other strategies in s, None where they have no plan that fits.
        notes: what is to be said about them.
    """
    names = {name for stage in plan.stages for name in stage.devices}
    used = [use for use in result.devices if use.name in names]
    sentences = [f"{layout_name(graph, plan)}." if is_sharded(plan) else "", _shape(plan)]
    sentences += [_bubble(result, used), _binds(plan, result)]
    sentences += _recomputed(plan)
    single = baselines.get("single_device")
    if single is not None and result.step_time:
        times = single / result.step_time
        sentences.append(f"It is {times:.2f} times as fast as one GPU.")
    if plan.semantics:
        changes = ", ".join(plan.semantics)
        sentences.append(f"It changes the mathematics of training: {changes}.")
    idle = [
        use.name
        for use in result.devices
        if use.name not in names
        and use.name not in plan.constraints.exclude
        and not load_profile(use.kind).is_cpu
    ]
    if idle:
        reason = notes.get("pipeline", "")
        sentences.append(f"Idle: {', '.join(idle)}{f' ({reason})' if reason else ''}.")
    return " ".join(sentence for sentence in sentences if sentence)


def _recomputed(plan: Plan) -> list[str]:
    """Says which stages run what again."""
    words = {"full": "run their forward again", "selective": "run attention cores again"}
    parts = []
    for how, what in words.items():
        stages = [stage.name for stage in plan.stages if stage.recompute == how]
        if stages:
            parts.append(f"{', '.join(stages)} {what}")
    return [f"Memory binds: {'; '.join(parts)}."] if parts else []


def _shape(plan: Plan) -> str:
    """Says how many stages there are, and their rhythm."""
    copies = {mesh.copies for mesh in plan_meshes(plan)}
    ranks = len({stage.devices for stage in plan.stages})
    parts = f"{len(plan.stages)} stages"
    if ranks < len(plan.stages):
        parts += f" on {ranks} ranks"
    if copies != {1}:
        parts += f", {' or '.join(map(str, sorted(copies)))} copies of each"
    batch, count = plan.job.batch, plan.microbatches
    if plan.semantics and plan.schedule == "pipedream":
        return f"{parts}; schedule {plan.schedule}, a minibatch of {batch} samples at a time."
    each = "" if batch is None else f" of {batch // count} samples"
    return f"{parts}; schedule {plan.schedule}, {count} microbatches{each}."


def _bubble(result: Result, used: list[DeviceUse]) -> str:
    """Says how the GPUs in use spend the step."""
    offered = result.step_time * len(used)
    if not offered:
        return "Nothing takes time."
    busy, bubble, moving, launch = (
        sum(getattr(use, key) for use in used) / offered
        for key in ("busy", "bubble", "communication", "launch")
    )
    text = f"The GPUs in use compute {busy:.0%} of the time; the bubble is {bubble:.0%}"
    text += f", transfers {moving:.0%}" * (moving >= _MANY / 2)
    text += f", waiting for the host {launch:.0%}" * (launch >= _MANY / 2)
    return f"{text}."


def _binds(plan: Plan, result: Result) -> str:
    """Says what the critical path is made of."""
    total: Counter[str] = Counter()
    device: Counter[str] = Counter()
    for step in result.critical_path:
        total[step.kind] += step.end - step.start  # type: ignore[assignment]
        if step.kind == "compute":
            device[step.place] += step.end - step.start  # type: ignore[assignment]
    if not device or not sum(total.values()):
        return ""
    name, seconds = device.most_common(1)[0]
    stages = [stage.name for stage in plan.stages if name in stage.devices]
    length = sum(total.values())
    text = f"What binds: {' and '.join(stages)} compute {seconds / length:.0%} of the critical path"
    words = {"transfer": "hops", "collective": "sums of gradients", "launch": "the host"}
    others = [
        f"{words[kind]} {format_seconds(total[kind])}"
        for kind in words
        if total[kind] >= _MANY * length
    ]
    return f"{text}{', ' if others else ''}{', '.join(others)}."
