"""What no pipeline of the space can beat: work that has to fit the memories, and the longest path.

For each number of microbatches, the largest of

- work: a linear program shares the nodes out over the devices at will, fractions of samples of
  fractions of nodes. Every device has room for its shares' parameters, gradients and optimizer
  state, and works no longer than the bound. A copy of a stage holds more than its share of samples,
  so every plan that fits is a solution;
- the heaviest unit, shared by as many copies as there can be;
- the longest path of one microbatch, each op on its fastest device at its fastest size.

Transfers, launches, sums of gradients and recomputing take nothing. Gives inf where the program has
no solution: no plan fits then.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_array

from agents.pipelines.env import PipelineTask
from agents.pipelines.nodes import NodeGraph
from agents.planners.pipeline_bound import longest_path, seconds_of_ops, work_of_units
from simcore.bounds import ROUNDING
from simcore.graph import Phase

_SLACK = 1e-6  # of the linear program's own tolerance


def dag_bound(task: PipelineTask) -> float:
    """Returns seconds that no plan of the space can beat; inf if none can fit.

    Args:
        task: the space.

    Raises:
        JobError: measured seconds at another batch or kind.
    """
    counts = sorted({rhythm.microbatches for rhythm in task.rhythms}, reverse=True)
    best = np.inf
    for microbatches in counts:
        quick = _path_and_unit(task, microbatches)
        if quick < best:
            best = min(best, max(quick, _shared_out(task, microbatches)))
    return best * (1.0 - ROUNDING)


def copies_of(task: PipelineTask, microbatches: int) -> list[int]:
    """Returns the numbers of copies that a stage may have."""
    samples = (task.simulator.nodes.space.problem.job.batch or 0) // microbatches
    most = task.num_devices - task.counts[0] + 1 if task.copies else 1
    return [c for c in range(1, most + 1) if samples % c == 0]


def _path_and_unit(task: PipelineTask, microbatches: int) -> float:
    chain = task.simulator.nodes.chain
    samples = (chain.space.problem.job.batch or 0) // microbatches
    path = unit = np.inf
    for copies in copies_of(task, microbatches):
        seconds, once = seconds_of_ops(chain, samples // copies)
        path = min(path, longest_path(chain, np.where(once[:, None], 0.0, seconds)))
        work, update = work_of_units(chain, seconds, once)
        # a sharded update is divided among the copies
        whole = (microbatches * work + update / copies)[:, list(chain.space.devices)]
        unit = min(unit, float(whole.min(axis=1).max()))
    return max(path, unit)


def _shared_out(task: PipelineTask, microbatches: int) -> float:
    """Returns the value of the linear program, s; inf where it has no solution."""
    nodes = task.simulator.nodes
    work = _work(task, microbatches)  # [node, dev]
    held, room = nodes.least_held(), nodes.room()[list(nodes.space.devices)]
    size, devices = work.shape
    shares = np.flatnonzero(np.isfinite(work).ravel())
    node, device = shares // devices, shares % devices
    scale = max(float(work.ravel()[shares].max(initial=0.0)), 1e-12)
    unit = max(float(room.max()), 1.0)
    columns = np.arange(len(shares))
    value = np.concatenate([work.ravel()[shares] / scale, -np.ones(devices), held[node] / unit])
    row = np.concatenate([device, np.arange(devices), devices + device])
    column = np.concatenate([columns, np.full(devices, len(shares)), columns])
    shape = (2 * devices, len(shares) + 1)
    cost = np.zeros(len(shares) + 1)
    cost[-1] = 1.0
    found = linprog(
        cost,
        A_ub=coo_array((value, (row, column)), shape=shape).tocsr(),
        b_ub=np.concatenate([np.zeros(devices), np.maximum(room, 0.0) / unit]),
        A_eq=coo_array((np.ones(len(shares)), (node, columns)), shape=(size, shape[1])).tocsr(),
        b_eq=np.ones(size),
        bounds=(0, None),
        method="highs",
    )
    if found.status == 2:
        return np.inf
    return float(found.fun) * scale * (1.0 - _SLACK) if found.status == 0 else 0.0


def _work(task: PipelineTask, microbatches: int) -> NDArray[np.float64]:
    """Returns the least seconds of a step for whole nodes, [node, dev], on any copies' devices."""
    nodes: NodeGraph = task.simulator.nodes
    problem, chain = nodes.space.problem, nodes.chain
    samples = (problem.job.batch or 0) // microbatches
    usable = list(nodes.space.devices)
    kinds = [chain.kinds.index(problem.cluster.devices[d].kind) for d in usable]
    least = np.full((nodes.num_nodes, len(usable)), np.inf)
    for copies in copies_of(task, microbatches):
        tables = nodes.at(samples // copies)
        batch = tables.seconds[:, Phase.F] + tables.seconds[:, Phase.B]
        whole = copies * (microbatches * batch[:, kinds])
        least = np.minimum(least, whole + tables.seconds[:, Phase.U][:, kinds])
    return np.where(nodes.allowed[:, usable], least, np.inf)
