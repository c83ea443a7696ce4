"""How a plan shares a model out, in words: what is split along which axis, under its known name."""

from simcore.graph import OpGraph
from simcore.plan import Plan
from simcore.result import Result
from simcore.sharding.groups import Linkage
from simcore.sharding.named import Roles, find_roles, style_of
from simcore.shards import linkage_of, make_axis, plan_meshes
from simcore.units import format_seconds

_SHOWN = 3  # groups that are listed by name
_WORDS = {
    "tensor": "tensor parallel (heads, widths and vocabulary are split, as Megatron-LM does)",
    "sequence": "tensor and sequence parallel (what is between the products is split by position)",
    "context": "context parallel (split by position; attention gathers keys and values)",
    "expert": "expert parallel (each device has some of the experts)",
}
_ZERO = {1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3 (fully sharded)"}


def layout_name(graph: OpGraph, plan: Plan) -> str:
    """Returns what a plan of meshes is called, for example ``dp 2 x tp 4 (sequence), ZeRO-1``."""
    linkage = linkage_of(graph)
    roles = find_roles(graph, linkage)
    parts = {}
    for stage, mesh in zip(plan.stages, plan_meshes(plan), strict=True):
        for axis, size in zip(mesh.names, mesh.sizes, strict=True):
            if size > 1:
                style = _style(linkage, roles, stage.sharding.get(axis, ()))
                parts[axis] = f"{axis} {size}" + (f" ({style})" if style else "")
    if len(plan.stages) > 1:
        parts["pp"] = f"pp {len(plan.stages)}"
    zero = _ZERO.get(plan.optimizer_sharding)
    return " x ".join(parts.values()) + (f", {zero}" if zero else "")


def _style(linkage: Linkage, roles: Roles, names: tuple[str, ...]) -> str:
    return style_of(make_axis(linkage, "", 1, names).groups, roles)


def explain_sharding(graph: OpGraph, plan: Plan, result: Result) -> str:
    """Returns in a few sentences what is split, what that costs, and what it saves.

    Args:
        graph: the whole graph.
        plan: a plan of one stage whose mesh shards.
        result: its simulation.
    """
    linkage = linkage_of(graph)
    roles = find_roles(graph, linkage)
    stage, mesh = plan.stages[0], plan_meshes(plan)[0]
    sentences = [f"{mesh.num_devices} GPUs: {layout_name(graph, plan)}."]
    for axis, size in zip(mesh.names[1:], mesh.sizes[1:], strict=True):
        names = stage.sharding.get(axis, ())
        what = _WORDS.get(_style(linkage, roles, names)) or "splits " + _listed(names)
        sentences.append(f"Axis {axis} of {size}: {what}.")
    busiest = max(result.devices, key=lambda use: use.communication)
    share = busiest.communication / result.step_time if result.step_time else 0.0
    sentences.append(
        f"Collectives are under way for {format_seconds(result.collective_time)}; "
        f"{busiest.name} waits for them {share:.0%} of the step."
    )
    return " ".join(sentences)


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
