"""What a sharded plan splits, group by group, and why: in words, from the simulator.

For each group that is split: the step time with that group alone left whole, what of computing and
of memory the split saves, which collectives it adds and how long they take in sum.
"""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.automap.additive import COLLECTIVE, COMPUTE, KEPT
from agents.automap.bounds import mesh_bound
from agents.automap.operators import OperatorPartition
from agents.automap.planner import Grouped
from simcore.shard_batch import simulate_folded
from simcore.shard_space import WHOLE
from simcore.sharding.local import local_graph
from simcore.shards import make_axis
from simcore.units import format_bytes, format_seconds

_SHOWN = 6  # groups that are listed


class SplitGroup(NamedTuple):
    """A decision of a plan.

    Attributes:
        name: of the tensor and the factor that stand for its groups.
        members: groups that are decided together.
        axis: of the mesh.
        saves: s that the step takes longer with it whole, on the compiled simulator.
        computing: s of computing that the split saves.
        collectives: s of collectives that it adds.
        kept: bytes of parameters and optimizer state that it saves on a device.
        kinds: what collectives it adds (less, if negative), by kind.
    """

    name: str
    members: int
    axis: str
    saves: float
    computing: float
    collectives: float
    kept: float
    kinds: dict[str, int]


def split_groups(problem: OperatorPartition, row: NDArray[np.int8]) -> list[SplitGroup]:
    """Returns what a plan splits, what saves most first.

    Args:
        problem: the problem of the mesh.
        row: the plan, [decision].
    """
    split = np.flatnonzero(row != WHOLE).tolist()
    others = np.repeat(row[None], 1 + len(split), axis=0)
    for place, decision in enumerate(split):
        others[1 + place, decision] = WHOLE
    times = simulate_folded(problem.folded, others).step_time
    additive, space = problem.additive, problem.folded.spaces[0]
    sums = [additive.cost([t[q] for t in additive.tables], others)
            for q in (COMPUTE, COLLECTIVE, KEPT)]  # fmt: skip
    mine = _kinds(problem, row)
    found = []
    for place, decision in enumerate(split):
        tensor, factor = problem.folded.names[decision]
        without = _kinds(problem, others[1 + place])
        kinds = {k: mine[k] - without[k] for k in {*mine, *without} if mine[k] != without[k]}
        delta = [float(values[1 + place] - values[0]) for values in sums]
        found.append(
            SplitGroup(
                name=f"{tensor}:{factor}",
                members=len(space.decisions[decision]),
                axis=space.axes[int(row[decision])],
                saves=float(times[1 + place] - times[0]),
                computing=delta[0],
                collectives=-delta[1],
                kept=delta[2],
                kinds=dict(sorted(kinds.items())),
            )
        )
    return sorted(found, key=lambda group: (-group.saves, group.name))


def _kinds(problem: OperatorPartition, row: NDArray[np.int8]) -> Counter[str]:
    """Returns how many collectives of each kind there are where few layers are left."""
    space = problem.folded.spaces[0]
    pairs = zip(space.axes, space.sizes, strict=True)
    sharding = space.sharding(row)
    axes = [make_axis(space.linkage, name, size, sharding[name]) for name, size in pairs]
    stage = np.zeros(space.graph.num_units, np.int32)
    local = local_graph(space.graph, space.linkage, [tuple(axes)], stage)
    return Counter(what.kind for what in local.communication.values())


def explain_groups(found: Grouped) -> list[str]:
    """Returns sentences: what is split, what that saves and costs, what binds, what is proven."""
    groups = split_groups(found.problem, found.row)
    lines = [_sentence(group) for group in groups[:_SHOWN]]
    if len(groups) > _SHOWN:
        rest = sum(group.saves for group in groups[_SHOWN:])
        lines.append(f"{len(groups) - _SHOWN} more groups: {format_seconds(max(0.0, rest))}.")
    lines += [_binds(found), _proof(found)]
    return lines


def _sentence(group: SplitGroup) -> str:
    times = f" ({group.members} alike)" if group.members > 1 else ""
    kinds = ", ".join(f"{count:+d} {kind.replace('_', '-')}" for kind, count in group.kinds.items())
    change = "saves" if group.saves >= 0 else "costs"
    return (
        f"{group.name}{times} is split along {group.axis}: {change} "
        f"{format_seconds(abs(group.saves))} of the step and {format_bytes(max(0.0, group.kept))} "
        f"a device; computes {format_seconds(abs(group.computing))} "
        f"{'less' if group.computing >= 0 else 'more'}, collectives take "
        f"{format_seconds(abs(group.collectives))} {'more' if group.collectives >= 0 else 'less'}"
        f" ({kinds or 'none added'})."
    )


def _binds(found: Grouped) -> str:
    """Says what the step consists of."""
    additive = found.problem.additive
    parts = [float(additive.cost([t[q] for t in additive.tables], found.row[None])[0])
             for q in (COMPUTE, COLLECTIVE)]  # fmt: skip
    share = parts[0] / found.step_time if found.step_time else 0.0
    what = "computing" if share > 0.5 else "communication"
    hidden = max(0.0, sum(parts) - found.step_time)
    return (
        f"{what.capitalize()} binds: {format_seconds(parts[0])} of computing and "
        f"{format_seconds(parts[1])} of collectives in a step of "
        f"{format_seconds(found.step_time)}, so {format_seconds(hidden)} overlap."
    )


def _proof(found: Grouped) -> str:
    """Says how far from the best of its mesh a plan may be."""
    problem, parts = found.problem, []
    if found.is_exact:
        parts.append(f"all {problem.space_size:,.0f} plans that pruning left were simulated")
    over = found.additive / found.optimum - 1.0 if found.optimum else 0.0
    parts.append(f"{over:.1%} above the proven optimum of the additive objective")
    bound = mesh_bound(problem.additive)
    gap = found.step_time / bound - 1.0 if bound else math.inf
    parts.append(f"{gap:.1%} above what no plan of the mesh beats ({format_seconds(bound)})")
    return f"Mesh {_mesh(found)}: {'; '.join(parts)}."


def _mesh(found: Grouped) -> str:
    mesh = found.problem.folded.spaces[0].mesh
    pairs = zip(mesh.names, mesh.sizes, strict=True)
    return " x ".join(f"{name} {size}" for name, size in pairs if size > 1)
