"""Published planners on the nodes of a model; the simulator then rates their stages.

PipeDream's, DAPPLE's and Piper's planners work under their authors' own objectives
(`agents.exact`), on a profile made of the nodes: seconds on the fastest usable kind, bytes sent and
parameters; Piper also sees the memory, and that running a forward again saves some. Alpa's program
is in `alpa`. What they leave open is given to them at its best: the stages are simulated as
synchronous 1F1B for every number of microbatches, with and without recomputation. PipeDream's own
asynchronous execution changes the mathematics.
"""

import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from agents.exact.dapple import DappleProblem, plan_dapple
from agents.exact.pipedream_planner import plan_pipedream, profile_states
from agents.exact.piper import (
    RECOMPUTE,
    VANILLA,
    Config,
    PiperEdge,
    PiperNode,
    PiperProblem,
)
from agents.exact.piper_planner import plan_piper
from agents.pipelines.anneal import Best
from agents.pipelines.env import PipelineTask
from agents.pipelines.moves import divides
from agents.pipelines.plans import DagPlan
from agents.planners.recorder import Budget
from simcore.errors import InfeasibleError
from simcore.frontends.pipedream import Layer, Profile
from simcore.graph import OpClass, Phase
from simcore.recompute import Recompute

DAPPLE_SECONDS = 10.0  # of its search
_Stages = list[tuple[list[int], int]]  # (nodes, replicas) of each stage
_MOST_ROUNDS = 4  # microbatches for each GPU, at most, where a planner is told how many there are


def node_profile(task: PipelineTask) -> Profile:
    """Returns the nodes as the layers of a profile at the whole batch, named by their numbers."""
    nodes = task.simulator.nodes
    tables = nodes.at(nodes.space.problem.job.batch or 1)
    fast = int(tables.seconds.sum(axis=(0, 1)).argmin())
    output = np.zeros(nodes.num_nodes, np.int64)
    sources: dict[str, list[str]] = {str(node): [] for node in range(nodes.num_nodes)}
    sizes = tables.forward_bytes.sum(axis=1).tolist()
    for (source, target), size in zip(nodes.edges, sizes, strict=True):
        output[source] = max(output[source], size)
        sources[str(target)].append(str(source))
    layers = {
        str(node): Layer(
            name=str(node),
            text="node",
            op_class=OpClass.MATMUL,
            forward=float(tables.seconds[node, Phase.F, fast]),
            backward=float(tables.seconds[node, Phase.B, fast]),
            outputs=(int(output[node]),),
            parameter=int(tables.parameter_bytes[node]),
        )
        for node in range(nodes.num_nodes)
    }
    return Profile(nodes.space.problem.graph.name, layers, sources)


def pipedream_best(task: PipelineTask) -> Best | None:
    """Returns PipeDream's stages in the rhythm that suits them best; None where it makes one stage.

    Raises:
        GraphError: more states than its program can work on.
    """
    bandwidth = _bandwidth(task)
    plan = plan_pipedream(node_profile(task), (task.num_devices,), (bandwidth,))
    return _best(task, [([int(n) for n in s.layers], s.replicas) for s in plan.stages])


def dapple_best(task: PipelineTask, budget: Budget | None = None) -> Best | None:
    """Returns DAPPLE's stages, for each number of microbatches, at their best; None: one stage.

    Args:
        task: the space; all its GPUs are taken to be in one server.
        budget: of its searches, one for each number of microbatches that is tried; None =
            `DAPPLE_SECONDS` of processor time.
    """
    states = profile_states(node_profile(task))
    found: list[Best] = []
    budget = budget or Budget(DAPPLE_SECONDS, clock=time.process_time)
    for left, microbatches in zip((2, 1), _rounds(task)[:2], strict=False):
        problem = DappleProblem(states, 1, task.num_devices, 1.0, microbatches)
        plan = plan_dapple(problem, budget.part(1 / left))
        stages: _Stages = []
        before = np.zeros(states.members.shape[1], np.bool_)
        for stage in plan.stages:
            now = states.members[stage.end - 1]
            names = [states.names[k] for k in np.flatnonzero(now & ~before)]
            stages.append(([int(name) for name in names], stage.replicas))
            before = now
        best = _best(task, stages)
        found += [] if best is None else [best]
    return min(found, key=lambda best: best.score.rank, default=None)


def piper_problem(task: PipelineTask, microbatches: int) -> PiperProblem:
    """Returns the nodes as Piper's problem, without tensor parallelism; ids are node numbers.

    Args:
        task: the space.
        microbatches: of a step.
    """
    nodes = task.simulator.nodes
    problem = nodes.space.problem
    costs = nodes.costs((problem.job.batch or 1) // microbatches)
    fast = int(costs.seconds.sum(axis=0).argmin())
    fixed = costs.held + costs.state + costs.gradient * (1 + (microbatches > 1)) + costs.extra
    listed = []
    for node in range(nodes.num_nodes):
        seconds = float(max(costs.seconds[node, fast], costs.launch[node, fast]))
        again = seconds + float(costs.forward[node, fast])
        saved, own = float(costs.saved[node]), float(fixed[node])
        size = float(costs.gradient[node])
        ways = [Config(VANILLA, seconds, size, saved, own)]
        if task.recompute:
            ways.append(Config(RECOMPUTE, again, size, 0.0, own + saved))
        listed.append(PiperNode(id=node, configs={"1": ways}))
    return PiperProblem(
        max_memory_per_device=float(task.rooms.min()),
        max_devices=task.num_devices,
        bandwidth=_bandwidth(task),
        mbs_in_batch=microbatches,
        nodes=listed,
        edges=[
            PiperEdge(source, target, num_bytes / 2.0)
            for (source, target), num_bytes in zip(nodes.edges, costs.sent.tolist(), strict=True)
        ],
    )


def piper_best(task: PipelineTask) -> Best | None:
    """Returns Piper's stages, for each number of microbatches, at their best; None: one stage.

    Raises:
        GraphError: more downsets than its program can work on.
        InfeasibleError: by its own count nothing fits.
    """
    found: list[Best] = []
    refused: list[InfeasibleError] = []
    tried = _rounds(task)[:2]
    for microbatches in tried:
        try:
            plan = plan_piper(piper_problem(task, microbatches))
        except InfeasibleError as reason:
            refused.append(reason)
            continue
        again: tuple[Recompute, ...] = tuple(
            "full" if RECOMPUTE in stage.configs else "none" for stage in plan.stages
        )
        stages = [(list(stage.nodes), stage.replicas) for stage in plan.stages]
        best = _best(task, stages, again)
        found += [] if best is None else [best]
    if len(refused) == len(tried):
        raise refused[-1]
    return min(found, key=lambda best: best.score.rank, default=None)


def _rounds(task: PipelineTask) -> list[int]:
    """Returns numbers of microbatches that suit the devices, fewest first."""
    counts = sorted({rhythm.microbatches for rhythm in task.rhythms})
    few, many = task.num_devices, _MOST_ROUNDS * task.num_devices
    return [m for m in counts if few <= m <= many] or counts[-1:]


def _bandwidth(task: PipelineTask) -> float:
    rates = task.simulator.nodes.space.problem.cluster.route_bandwidth
    usable = list(task.simulator.nodes.space.devices)
    apart = ~np.eye(len(usable), dtype=np.bool_)
    return float(np.median(rates[np.ix_(usable, usable)][apart]))


def _best(
    task: PipelineTask, stages: _Stages, again: tuple[Recompute, ...] | None = None
) -> Best | None:
    """Returns the best plan with these stages, that may run again what their planner says."""
    plans = [plan for plan in _plans(task, stages, again) if divides(task, plan)]
    scores = task.score(plans)
    pairs = (Best(*pair) for pair in zip(scores, plans, strict=True))
    return min(pairs, key=lambda best: best.score.rank, default=None)


def _plans(
    task: PipelineTask, stages: _Stages, again: tuple[Recompute, ...] | None
) -> Iterator[DagPlan]:
    if len(stages) < 2:
        return
    owner = np.zeros(task.num_nodes, np.int64)
    for number, (nodes, _) in enumerate(stages):
        owner[nodes] = number
    ends = np.cumsum([0, *(replicas for _, replicas in stages)]).tolist()
    usable = task.simulator.nodes.space.devices
    devices = tuple(usable[a:b] for a, b in pairwise(ends))
    hows: tuple[Recompute, ...] = ("none", "full")
    usual = [(how,) * len(stages) for how in hows]
    for microbatches in sorted({rhythm.microbatches for rhythm in task.rhythms}):
        for how in dict.fromkeys([*usual, *([] if again is None else [again])]):
            yield DagPlan(
                stage=tuple(owner.tolist()),
                devices=devices,
                recompute=how,
                microbatches=microbatches,
            )
