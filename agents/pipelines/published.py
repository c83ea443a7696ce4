"""PipeDream's and DAPPLE's planners on the nodes of a model; the simulator then rates their stages.

Each planner works under its authors' own objective (`agents.exact`), on a profile made of the
nodes: seconds on the fastest usable kind, bytes sent and parameters. What it leaves open is given
to it at its best: the stages are simulated as synchronous 1F1B for every number of microbatches,
and recompute where they do not fit. PipeDream's own asynchronous execution changes the mathematics.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from agents.exact.dapple import DappleProblem, plan_dapple
from agents.exact.pipedream_planner import plan_pipedream, profile_states
from agents.pipelines.anneal import Best
from agents.pipelines.env import PipelineTask
from agents.pipelines.moves import divides
from agents.pipelines.plans import DagPlan
from simcore.frontends.pipedream import Layer, Profile
from simcore.graph import OpClass, Phase

DAPPLE_SECONDS = 10.0  # of its search
_Stages = list[tuple[list[int], int]]  # (nodes, replicas) of each stage


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


def dapple_best(task: PipelineTask, seconds: float = DAPPLE_SECONDS) -> Best | None:
    """Returns DAPPLE's stages, for each number of microbatches, at their best; None: one stage.

    Args:
        task: the space; all its GPUs are taken to be in one server.
        seconds: of the search for each number of microbatches that is tried.
    """
    states = profile_states(node_profile(task))
    found: list[Best] = []
    counts = sorted({rhythm.microbatches for rhythm in task.rhythms})
    tried = [m for m in counts if task.num_devices <= m <= 4 * task.num_devices] or counts[-1:]
    for microbatches in tried[:2]:
        problem = DappleProblem(states, 1, task.num_devices, 1.0, microbatches)
        plan = plan_dapple(problem, seconds=seconds / 2)
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


def _bandwidth(task: PipelineTask) -> float:
    rates = task.simulator.nodes.space.problem.cluster.route_bandwidth
    usable = list(task.simulator.nodes.space.devices)
    apart = ~np.eye(len(usable), dtype=np.bool_)
    return float(np.median(rates[np.ix_(usable, usable)][apart]))


def _best(task: PipelineTask, stages: _Stages) -> Best | None:
    """Returns the best plan with these stages."""
    plans = [plan for plan in _plans(task, stages) if divides(task, plan)]
    scores = task.score(plans)
    pairs = (Best(*pair) for pair in zip(scores, plans, strict=True))
    return min(pairs, key=lambda best: best.score.rank, default=None)


def _plans(task: PipelineTask, stages: _Stages) -> Iterator[DagPlan]:
    if len(stages) < 2:
        return
    owner = np.zeros(task.num_nodes, np.int64)
    for number, (nodes, _) in enumerate(stages):
        owner[nodes] = number
    ends = np.cumsum([0, *(replicas for _, replicas in stages)]).tolist()
    usable = task.simulator.nodes.space.devices
    devices = tuple(usable[a:b] for a, b in pairwise(ends))
    for microbatches in sorted({rhythm.microbatches for rhythm in task.rhythms}):
        for how in ("none", "full"):
            yield DagPlan(
                stage=tuple(owner.tolist()),
                devices=devices,
                recompute=(how,) * len(stages),
                microbatches=microbatches,
            )
