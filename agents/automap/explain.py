"""What a sharded plan splits, group by group, and why: in words and numbers, from the simulator.

For each group that is split: the step time with that group alone left whole, what of computing and
of memory the split saves, which collectives it adds, their bytes and their seconds. For each group
that could be split and is not: what the best split of it alone would cost.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.automap.additive import COLLECTIVE, COMPUTE, GRADIENT, KEPT
from agents.automap.bounds import mesh_bound
from agents.automap.compiled_additive import run_collectives
from agents.automap.operators import OperatorPartition
from simcore.kernel import Change, make_shard_scratch
from simcore.shard_batch import simulate_folded
from simcore.shard_fold import extended
from simcore.shard_space import WHOLE
from simcore.sharding.groups import BATCH
from simcore.units import format_bytes, format_seconds

_SHOWN = 4  # groups of each sort that are told in words
_LEAST = 1e-4  # part of the step; less is not worth a word
_SUMS = "sum_over_copies"  # of gradients, in buckets


class Paid(NamedTuple):
    """Collectives of one kind that a split adds, fewer where negative."""

    number: int
    num_bytes: float
    seconds: float


class Choice(NamedTuple):
    """What a plan does with groups that are decided together.

    Attributes:
        name: of the tensor and the factor that stand for the groups.
        members: groups that are decided together.
        axis: of the mesh; where they stay whole, the axis that they would best be split along.
        is_split: whether they are.
        saves: s of the step that the split saves, on the compiled simulator; negative = it costs.
        computing: s of computing that the split saves.
        kept: bytes of parameters and optimizer state that it saves on a device.
        paid: collectives that the split adds, by kind.
    """

    name: str
    members: int
    axis: str
    is_split: bool
    saves: float
    computing: float
    kept: float
    paid: dict[str, Paid]

    @property
    def collectives(self) -> float:
        """Seconds of collectives that the split adds."""
        return sum(each.seconds for each in self.paid.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Why a plan of one mesh is as it is.

    Attributes:
        mesh: axis -> devices along it, where more than one.
        split: groups that are split, what saves most first.
        whole: groups that could be split, what would cost least first.
        fixed: decisions that no axis of the mesh divides.
        step_time: s, on the compiled simulator.
        computing: s of computing in it.
        communication: s of collectives, hidden or not.
        additive_gap: part by which the plan is above the optimum of the additive objective.
        bound: s that no plan of the mesh beats.
    """

    mesh: dict[str, int]
    split: tuple[Choice, ...]
    whole: tuple[Choice, ...]
    fixed: int
    step_time: float
    computing: float
    communication: float
    additive_gap: float
    bound: float

    @property
    def binds(self) -> str:
        """What most of the step is: computing or communication."""
        return "computing" if self.computing > 0.5 * self.step_time else "communication"

    def lines(self) -> list[str]:
        """Returns sentences."""
        lines = [_sentence(group, self.step_time) for group in self.split[:_SHOWN]]
        if len(self.split) > _SHOWN:
            rest = sum(max(0.0, group.saves) for group in self.split[_SHOWN:])
            saved = (
                f", which saves {format_seconds(rest)}" if rest > _LEAST * self.step_time else ""
            )
            lines.append(f"{len(self.split) - _SHOWN} more are split{saved}.")
        shown = [_sentence(group, self.step_time) for group in self.whole[:_SHOWN]]
        more = len(self.whole) - len(shown)
        lines += shown + ([f"{more} more stay whole."] if more else [])
        hidden = max(0.0, self.computing + self.communication - self.step_time)
        lines.append(
            f"{self.binds.capitalize()} binds: {format_seconds(self.computing)} of computing and "
            f"{format_seconds(self.communication)} of collectives in "
            f"{format_seconds(self.step_time)}, so {format_seconds(hidden)} overlap."
        )
        gap = self.step_time / self.bound - 1.0 if self.bound else math.inf
        lines.append(
            f"Mesh {' x '.join(f'{n} {size}' for n, size in self.mesh.items())}: "
            f"{self.additive_gap:.1%} above the proven optimum of the additive objective, "
            f"{gap:.1%} above what no plan of the mesh beats ({format_seconds(self.bound)})."
        )
        return lines

    def record(self) -> dict[str, Any]:
        """Returns the same for JSON, with all groups."""
        return {
            "mesh": self.mesh,
            "split": [_row(group) for group in self.split],
            "whole": [_row(group) for group in self.whole],
            "not_divisible": self.fixed,
            "compiled_step_time_s": self.step_time,
            "computing_s": self.computing,
            "communication_s": self.communication,
            "binds": self.binds,
            "additive_gap": self.additive_gap,
            "mesh_bound_s": self.bound,
        }


def explain_row(problem: OperatorPartition, row: NDArray[np.int8], optimum: float) -> Explained:
    """Returns why a plan of a mesh is as it is.

    Args:
        problem: the problem of the mesh.
        row: the plan, [decision].
        optimum: s, the least of the additive objective over the mesh's plans.
    """
    additive, mesh = problem.additive, problem.folded.spaces[0].mesh
    choices = choices_of(problem, row)
    time = float(simulate_folded(problem.folded, row[None]).step_time[0])
    rows = np.asarray(row)[None]
    value = float(additive.cost(additive.objective(), rows)[0])
    sums = [float(additive.cost([t[q] for t in additive.tables], rows)[0])
            for q in (COMPUTE, COLLECTIVE, GRADIENT)]  # fmt: skip
    pairs = zip(mesh.names, mesh.sizes, strict=True)
    return Explained(
        mesh={name: size for name, size in pairs if size > 1},
        split=tuple(c for c in choices if c.is_split),
        whole=tuple(c for c in choices if not c.is_split),
        fixed=sum(len(values) == 1 for values in additive.values),
        step_time=time,
        computing=sums[0],
        communication=sums[1] + sums[2] * additive.rate,
        additive_gap=max(0.0, value / optimum - 1.0) if optimum else 0.0,
        bound=mesh_bound(additive),
    )


def choices_of(problem: OperatorPartition, row: NDArray[np.int8]) -> list[Choice]:
    """Returns what a plan does with each group that it could split, what saves most first."""
    others: list[tuple[int, int]] = []  # decision, what it is instead
    for decision, values in enumerate(problem.additive.values):
        instead = [WHOLE] if row[decision] != WHOLE else values[values != WHOLE].tolist()
        others += [(decision, value) for value in instead]
    rows = np.repeat(np.asarray(row)[None], 1 + len(others), axis=0)
    for place, (decision, value) in enumerate(others, start=1):
        rows[place, decision] = value
    times = simulate_folded(problem.folded, rows).step_time
    best: dict[int, int] = {}
    for place, (decision, _) in enumerate(others, start=1):
        if np.isfinite(times[place]):
            best[decision] = min(best.get(decision, place), place, key=lambda k: float(times[k]))
    places = [0, *best.values()]
    deltas = _deltas(problem, rows[places])
    found = [
        _choice(problem, row, rows[place], (float(times[place] - times[0]), delta))
        for place, delta in zip(best.values(), deltas, strict=True)
    ]
    return sorted(found, key=lambda choice: (-choice.saves, choice.name))


def decision_name(problem: OperatorPartition, decision: int) -> str:
    """Returns what a decision is called: samples, or a tensor and its factor."""
    space = problem.folded.spaces[0]
    if any(space.linkage.groups[group].name == BATCH for group in space.decisions[decision]):
        return "samples"
    tensor, factor = problem.folded.names[decision]
    return f"{tensor}:{factor}"


class _Delta(NamedTuple):
    """What another plan has more than the first."""

    computing: float
    kept: float
    paid: dict[str, Paid]


def _choice(
    problem: OperatorPartition,
    row: NDArray[np.int8],
    other: NDArray[np.int8],
    change: tuple[float, _Delta],
) -> Choice:
    """Returns a decision, told as what its split saves and costs."""
    space, delta = problem.folded.spaces[0], change[1]
    decision = int(np.flatnonzero(row != other)[0])
    is_split = bool(row[decision] != WHOLE)
    sign = 1 if is_split else -1  # what the plan without the split has more, it saves
    return Choice(
        name=decision_name(problem, decision),
        members=len(space.decisions[decision]),
        axis=space.axes[int(max(row[decision], other[decision]))],
        is_split=is_split,
        saves=sign * change[0],
        computing=sign * delta.computing,
        kept=sign * delta.kept,
        paid={
            kind: Paid(-sign * p.number, -sign * p.num_bytes, -sign * p.seconds)
            for kind, p in delta.paid.items()
        },
    )


def _deltas(problem: OperatorPartition, rows: NDArray[np.int8]) -> list[_Delta]:
    """Returns what each plan has more than the first, from [plan, decision]."""
    additive = problem.additive
    compute, kept, gradient = (
        additive.cost([t[quantity] for t in additive.tables], rows)
        for quantity in (COMPUTE, KEPT, GRADIENT)
    )
    sums = _collectives(problem, rows)
    found = []
    for place in range(1, len(rows)):
        more = sums[place] - sums[0]
        paid = {
            change.name.lower(): Paid(round(more[change, 0]), more[change, 1], more[change, 2])
            for change in Change
            if more[change].any()
        }
        summed = float(gradient[place] - gradient[0])
        if summed:
            paid[_SUMS] = Paid(0, summed, summed * additive.rate)
        found.append(_Delta(float(compute[place] - compute[0]), float(kept[place] - kept[0]), paid))
    return found


def _collectives(problem: OperatorPartition, rows: NDArray[np.int8]) -> NDArray[np.float64]:
    """Returns how many collectives plans have, their bytes and s, [plan, `Change`, quantity]."""
    found = []
    for space in problem.folded.spaces:
        scratch = make_shard_scratch(space.tables)
        sums = np.zeros((len(rows), len(space.axes), len(Change), 3))
        run_collectives(space.tables, np.ascontiguousarray(rows, np.int8), scratch, sums)
        found.append(sums.sum(axis=1))
    return extended(found[0], found[1:], problem.folded.layers)


def _sentence(group: Choice, step_time: float) -> str:
    times = f" ({group.members} alike)" if group.members > 1 else ""
    effects = []
    if abs(group.computing) >= _LEAST * step_time:
        more = "less" if group.computing >= 0 else "more"
        effects.append(f"{format_seconds(abs(group.computing))} {more} computing")
    if abs(group.kept) >= 1:
        sign = "less" if group.kept >= 0 else "more"
        effects.append(f"{format_bytes(abs(group.kept))} {sign} kept on a device")
    effects += [_payment(kind, each) for kind, each in group.paid.items()]
    inside = f" ({', '.join(effects)})" if effects else ""
    is_worth = abs(group.saves) >= _LEAST * step_time
    if group.is_split:
        verb = "saves" if group.saves >= 0 else "costs"
        effect = f"{verb} {format_seconds(abs(group.saves))} of the step"
        says = f"is split along {group.axis}: {effect if is_worth else 'as fast as whole'}"
    else:
        verb = "cost" if group.saves <= 0 else "save"
        effect = f"would {verb} {format_seconds(abs(group.saves))}"
        says = (
            f"stays whole: a split along {group.axis} {effect if is_worth else 'changes nothing'}"
        )
    return f"{group.name}{times} {says}{inside}."


def _payment(kind: str, paid: Paid) -> str:
    sign = "more" if paid.seconds >= 0 else "less"
    size = f"{format_bytes(abs(paid.num_bytes))}, {format_seconds(abs(paid.seconds))} {sign}"
    if kind == _SUMS:
        return f"gradients summed over copies {size}"
    return f"{paid.number:+d} {kind.replace('_', '-')} of {size}"


def _row(group: Choice) -> Mapping[str, Any]:
    return {
        "group": group.name,
        "members": group.members,
        "axis": group.axis,
        "saves_s": group.saves,
        "computing_saved_s": group.computing,
        "kept_saved_bytes": group.kept,
        "collectives_added": {
            kind: {"count": each.number, "bytes": each.num_bytes, "seconds": each.seconds}
            for kind, each in group.paid.items()
        },
    }
