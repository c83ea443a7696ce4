"""Piper's program over downsets, and the equal-stages planner that its authors compare it with.

A downset here holds, with a node, all that comes after it: the program grows pipelines from their
last stage. Microbatches in flight depend on the stages behind only, so a stage can be priced then.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from agents.exact.compiled_ideals import link_ideals, list_ideals
from agents.exact.compiled_piper import (
    Lattice,
    Layers,
    Machine,
    Tables,
    below,
    choose_configs,
    cost_configs,
    fill_downset,
    stage_seconds,
)
from agents.exact.ideals import make_order
from agents.exact.piper import (
    RECOMPUTE,
    VANILLA,
    PiperPlan,
    PiperProblem,
    PiperStage,
    piper_seconds,
    topological_ids,
)
from agents.exact.units import offsets
from simcore.errors import GraphError, InfeasibleError

MAX_DOWNSETS = 40_000
TRANSFORMER = "ParallelTransformerLayer"  # what the authors' file calls a transformer layer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Setting:
    """A problem as arrays; node r is the r-th from the end of a topological order."""

    ids: list[int]  # [node]
    names: list[list[list[str]]]  # [node][degree][config]
    layers: Layers
    machine: Machine
    lattice: Lattice
    members: NDArray[np.bool_]  # [downset, node]


def plan_piper(
    problem: PiperProblem, *, report: Callable[[float], None] | None = None
) -> PiperPlan:
    """Returns Piper's plan.

    Args:
        problem: the problem, its machine included.
        report: is told the fraction of the work that is done.

    Raises:
        InfeasibleError: no pipeline fits the memory.
        GraphError: too many downsets.
    """
    setting = _setting(problem)
    machine = setting.machine
    count = len(setting.members)
    shape = (count, machine.devices + 1, machine.most + 1)
    tables = Tables(
        np.full(shape, np.inf), np.zeros(shape, np.int32), np.zeros(shape[:2], np.int64)
    )
    tables.best[0] = 0.0
    tables.num_drops[0] = 1
    for top in range(1, count):
        fill_downset(setting.layers, machine, setting.lattice, tables, setting.members, top)
        if report is not None:
            report((top + 1) / count)
    if not np.isfinite(tables.best[-1, -1, -1]):
        raise InfeasibleError(
            f"no pipeline on {machine.devices} devices fits {machine.memory:.3g} bytes on each"
        )
    stages = _trace(setting, tables)
    return PiperPlan(float(tables.best[-1, -1, -1]), stages)


def _setting(problem: PiperProblem) -> _Setting:
    ids = topological_ids(problem)[::-1]
    number = {node: r for r, node in enumerate(ids)}
    arcs = np.array(
        [[number[edge.dest_id], number[edge.source_id]] for edge in problem.edges], np.int64
    ).reshape(-1, 2)
    order = make_order(len(ids), arcs)
    member, _, is_complete = list_ideals(order, MAX_DOWNSETS)
    if not is_complete:
        raise GraphError(f"more than {MAX_DOWNSETS} downsets; Piper's program would not end")
    bits = np.unpackbits(member.view(np.uint8), axis=1, bitorder="little")
    by_id = {node.id: node for node in problem.nodes}
    degrees = sorted({int(degree) for node in problem.nodes for degree in node.configs})
    names = [
        [[way.id for way in by_id[node].configs.get(str(t), [])] for t in degrees] for node in ids
    ]
    machine = Machine(
        degree=np.array(degrees, np.int64),
        devices=problem.max_devices,
        memory=float(problem.max_memory_per_device),
        bandwidth=float(problem.bandwidth),
        batches=problem.mbs_in_batch,
        most=min(problem.mbs_in_batch, problem.max_devices),
    )
    return _Setting(
        ids=ids,
        names=names,
        layers=_layers(problem, number, degrees),
        machine=machine,
        lattice=Lattice(*link_ideals(order, member)),
        members=bits[:, : len(ids)].astype(bool),
    )


def _layers(problem: PiperProblem, number: dict[int, int], degrees: list[int]) -> Layers:
    nodes = sorted(problem.nodes, key=lambda node: number[node.id])
    most = max((len(ways) for node in nodes for ways in node.configs.values()), default=1)
    count = np.zeros((len(nodes), len(degrees)), np.int64)
    values = np.zeros((4, len(nodes), len(degrees), most))
    ends = sorted(
        [(number[e.source_id], number[e.dest_id], e, False) for e in problem.edges]
        + [(number[e.dest_id], number[e.source_id], e, True) for e in problem.edges],
        key=lambda end: end[:2],
    )
    moved = np.zeros((len(ends), len(degrees), most))
    for r, node in enumerate(nodes):
        for t, degree in enumerate(degrees):
            ways = node.configs.get(str(degree), [])
            count[r, t] = len(ways)
            for c, way in enumerate(ways):
                values[:, r, t, c] = (
                    way.time_per_sample,
                    way.parameter_size,
                    way.memory_usage_a,
                    way.memory_usage_b,
                )
    for e, (here, other, edge, enters) in enumerate(ends):
        for t, degree in enumerate(degrees):
            for c, way in enumerate(nodes[here].configs.get(str(degree), [])):
                sync = way.sync_time_fw if enters else way.sync_time_bw
                extra = sync.get(str(nodes[other].id), 0.0)
                moved[e, t, c] = 2 * (edge.communication_cost + extra)
    return Layers(
        count,
        values[0],
        values[1],
        values[2],
        values[3],
        offsets([end[0] for end in ends], len(nodes)),
        np.array([end[1] for end in ends], np.int64),
        moved,
    )


def _trace(setting: _Setting, tables: Tables) -> tuple[PiperStage, ...]:
    """Finds the stages behind the best value, first to last."""
    stages = []
    top, devices, total = len(setting.members) - 1, *map(int, tables.best.shape[1:])
    devices, total = devices - 1, total - 1
    while top:
        value = tables.best[top, devices, total]
        while devices and tables.best[top, devices - 1, total] == value:
            devices -= 1
        while total and tables.best[top, devices, total - 1] == value:
            total -= 1
        top, stage = _first_stage(setting, tables, (top, devices, total))
        stages.append(stage)
        devices -= stage.replicas * stage.tensor_degree
        total -= stage.replicas
    return tuple(stages)


def _first_stage(
    setting: _Setting, tables: Tables, state: tuple[int, int, int]
) -> tuple[int, PiperStage]:
    """Returns what is left and the first stage of the best pipeline of a state."""
    top, devices, total = state
    machine, layers = setting.machine, setting.layers
    value = tables.best[top, devices, total]
    for smaller in below(setting.lattice, top, len(setting.ids)).tolist():
        is_inside = setting.members[top] & ~setting.members[smaller]
        nodes = np.flatnonzero(is_inside)
        for t, d in _degrees(setting, nodes, devices, total):
            degree = int(machine.degree[t])
            rest = tables.best[smaller, devices - d * degree, total - d]
            if rest > value:
                continue
            seconds = stage_seconds(layers, machine, nodes, is_inside, (t, d))
            in_flight = -(-total // d)
            if max(rest, seconds[in_flight]) == value:
                cost = cost_configs(layers, machine, nodes, is_inside, (t, d))
                chosen = choose_configs(layers, machine, nodes, cost, (t, in_flight))
                ordered = sorted(zip(nodes.tolist(), chosen.tolist(), strict=True), reverse=True)
                return smaller, PiperStage(
                    nodes=tuple(setting.ids[node] for node, _ in ordered),
                    replicas=d,
                    tensor_degree=degree,
                    configs=tuple(setting.names[node][t][c] for node, c in ordered),
                )
    raise AssertionError("a value of the table has no stage that gives it")


def _degrees(
    setting: _Setting, nodes: NDArray[np.int64], devices: int, total: int
) -> Iterator[tuple[int, int]]:
    """Yields (index of a tensor degree, replicas) that a stage of these nodes may have."""
    machine = setting.machine
    for t, degree in enumerate(machine.degree.tolist()):
        if (setting.layers.num_configs[nodes, t] > 0).all():
            for d in range(1, min(devices // degree, total) + 1):
                if machine.batches % d == 0:
                    yield t, d


def plan_equal_stages(problem: PiperProblem, *, tensor: bool = True) -> PiperPlan:
    """Returns the best plan with equal stages and the same degrees in all, as PipeDream-2BW's.

    Transformer layers are shared out evenly, what comes before and after them goes to the ends, or
    to stages of its own; without transformer layers all nodes are shared out. Activations are
    recomputed everywhere or nowhere.

    Args:
        problem: the problem.
        tensor: whether tensor parallelism may be used.

    Raises:
        InfeasibleError: no such plan fits.
    """
    best = PiperPlan(float("inf"), ())
    for parts in _equal_parts(problem):
        for d in range(1, min(problem.max_devices, problem.mbs_in_batch) // len(parts) + 1):
            if problem.mbs_in_batch % d:
                continue
            for degree in _common_degrees(problem) if tensor else [1]:
                if len(parts) * d * degree > problem.max_devices:
                    continue
                for way in (VANILLA, RECOMPUTE):
                    stages = tuple(
                        PiperStage(tuple(part), d, degree, (way,) * len(part)) for part in parts
                    )
                    seconds = piper_seconds(problem, stages)
                    if seconds < best.seconds_per_sample:
                        best = PiperPlan(seconds, stages)
    if not best.stages:
        raise InfeasibleError("no plan with equal stages fits the memory")
    return best


def _common_degrees(problem: PiperProblem) -> list[int]:
    shared = set.intersection(*({int(t) for t in node.configs} for node in problem.nodes))
    return sorted(shared)


def _equal_parts(problem: PiperProblem) -> Iterator[list[list[int]]]:
    """Yields the nodes of each stage, for each number of stages."""
    order = topological_ids(problem)
    names = {node.id: node.name for node in problem.nodes}
    blocks = [node for node in order if names[node] == TRANSFORMER] or order
    before, after = _around(problem, set(blocks))
    for apart in (False, True) if len(blocks) < len(order) else (False,):
        for count in range(1, min(problem.max_devices, len(blocks)) + 1):
            small, larger = divmod(len(blocks), count)
            sizes = [small] * (count - larger) + [small + 1] * larger
            ends = np.cumsum([0, *sizes]).tolist()
            parts = [blocks[one:other] for one, other in pairwise(ends)]
            if apart:
                parts = [before, *parts, after]
            else:
                parts = [before + parts[0], *parts[1:]]
                parts[-1] = parts[-1] + after
            if len(parts) <= problem.max_devices and all(parts):
                yield parts


def _around(problem: PiperProblem, blocks: set[int]) -> tuple[list[int], list[int]]:
    """Returns the nodes before and after the blocks."""
    before: list[int] = []
    after: list[int] = []
    while len(blocks) + len(before) + len(after) < len(problem.nodes):
        known = len(before) + len(after)
        for edge in problem.edges:
            one, other = edge.source_id, edge.dest_id
            placed = blocks.union(before, after)
            if one not in placed and (other in before or other in blocks):
                before.append(one)
            elif other not in placed and (one in after or one in blocks):
                after.append(other)
        if len(before) + len(after) == known:  # apart from all blocks
            placed = blocks.union(before, after)
            before += [node.id for node in problem.nodes if node.id not in placed]
    return before, after
