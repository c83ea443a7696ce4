"""Alpa's inter-stage program (Zheng et al., OSDI 2022) on the nodes of a model.

The nodes, in the order of the program, are cut into stages on submeshes: 2^k devices of a server,
or several servers. For every bound on the slowest stage that a stage can set, a dynamic program
finds the stages with the least sum of seconds within the bound; the best of sum + (microbatches -
1) x bound is taken. What a stage holds is checked as Alpa does, for 1F1B: one microbatch more than
there are stages behind. Reconstructed from the paper; what Alpa's intra-operator program says of a
submesh is here the data parallel stage (its copies share the microbatch), with recomputation where
it does not fit otherwise, and hops count as part of a stage. Devices may be left over.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from agents.pipelines.anneal import Best
from agents.pipelines.env import PipelineTask, Rhythm
from agents.pipelines.plans import DagPlan
from agents.planners.compiled_stage_dag import Program, solve, stage_paces
from agents.planners.stage_dag import dag_plan, make_program, recomputed, traced

GAP = 1e-3  # relative; bounds that differ by less are one, as in Alpa


class AlpaPlan(NamedTuple):
    """What the program finds."""

    seconds: float  # of a step, by Alpa's formula
    plan: DagPlan


def alpa_plan(task: PipelineTask, microbatches: int, *, gap: float = GAP) -> AlpaPlan | None:
    """Returns the stages with the least latency by Alpa's formula; None where none fit.

    Args:
        task: the space; stages run as 1F1B.
        microbatches: of a step.
        gap: relative difference of bounds that are told apart.
    """
    line, row = range(task.num_nodes), sorted(task.simulator.nodes.space.devices)
    program = make_program(task, microbatches, line, row)
    program = None if program is None else _on_submeshes(task, program)
    if program is None:
        return None
    paces = stage_paces(program, microbatches)
    rule = microbatches, task.counts[-1], False
    every = np.unique(np.concatenate([paces.plain.ravel(), paces.again.ravel()]))
    best: AlpaPlan | None = None
    last = 0.0
    for bound in every[np.isfinite(every)].tolist():
        if best is not None and (microbatches - 1) * bound >= best.seconds:
            break
        if bound <= last * (1.0 + gap):
            continue
        last = bound
        value, ways, ends = solve(program, paces, rule, bound * (1.0 + gap))
        sums = value[task.counts[0] - 1 :, 0, 0]
        seconds = float(sums.min()) + (microbatches - 1) * bound
        if seconds < np.inf and (best is None or seconds < best.seconds):
            stages = traced(program, ways, ends, task.counts[0] + int(sums.argmin()))
            again = recomputed(paces, stages, rule)
            rhythm = Rhythm(microbatches, "1f1b", 0)
            best = AlpaPlan(seconds, dag_plan(program, stages, again, rhythm, (line, row)))
    return best


def _on_submeshes(task: PipelineTask, program: Program) -> Program | None:
    """Returns the program with those numbers of devices only that are a submesh."""
    devices = task.simulator.nodes.space.problem.cluster.devices
    servers = Counter(devices[d].node for d in task.simulator.nodes.space.devices)
    inside = max(servers.values())
    keep = [
        way
        for way, copies in enumerate(program.copies.tolist())
        if (copies <= inside and copies & (copies - 1) == 0) or copies % inside == 0
    ]
    if not keep:
        return None
    by_way = ("copies", "seconds", "again", "once", "held", "saved", "moved")
    return program._replace(**{name: getattr(program, name)[keep] for name in by_way})


def alpa_best(task: PipelineTask) -> Best | None:
    """Returns the best of the stages for each number of microbatches, as the simulator says."""
    counts = sorted({rhythm.microbatches for rhythm in task.rhythms})
    plans = [found.plan for found in (alpa_plan(task, m) for m in counts) if found is not None]
    pairs = (Best(*pair) for pair in zip(task.score(plans), plans, strict=True))
    return min(pairs, key=lambda best: best.score.rank, default=None)
