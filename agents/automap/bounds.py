"""What no plan of a sharded space beats, under stated assumptions.

Assumed: the space is that of one mesh and one choice for all layers of a stack; a device computes
one op at a time, an op takes what the profile says of its share; collectives along one axis, and
the sums of gradients over copies, share a busiest link, so that they take at least their durations
one after another, all groups of an axis theirs at the same time. Then a step takes at least what a
device computes, and at least what the collectives along each axis keep their link busy for, so at
least any mean of these, whether collectives wait for each other or not. The least of such a mean
over all plans is found exactly; the weights climb to where it is largest (the Lagrangian dual,
Held and Karp 1970). What has to wait for what, and that plans have to fit, is not looked at.

Where links are not shared (``contention`` is ``none``) only what a device computes is counted.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from agents.automap.additive import Additive
from agents.automap.contention import alone_ratio, busiest_rate
from agents.automap.eliminate import eliminate
from agents.automap.operators import OperatorPartition
from agents.planners.pipeline_bound import once_a_step
from simcore.bounds import ROUNDING
from simcore.cost import cost_table
from simcore.mesh import DATA_AXIS
from simcore.shard_space import ShardSpace

_STEPS = (0.5, 0.25, 0.1, 0.05)  # of weight that is moved
_COMPUTE = np.array([1.0, 0.0, 0.0, 0.0])


def mesh_bound(additive: Additive, *, shares_links: bool = True) -> float:
    """Returns seconds that no plan of a space beats.

    Args:
        additive: what its plans add up to.
        shares_links: whether collectives at the same time slow each other down.

    Raises:
        PlanError: the decisions are too entangled.
    """
    corners = np.eye(4) if shares_links else _COMPUTE[None]
    return _climb(corners, lambda weights: _least(additive, weights)) * (1.0 - ROUNDING)


def lean_bound(problem: OperatorPartition, *, shares_links: bool = True) -> float:
    """Returns seconds that no plan of a mesh beats in less memory than as it is.

    So with a sharded optimizer, or in microbatches: then nothing runs beside a collective in the
    stage, copies share the update, and gradients are summed by a reduce-scatter. A collective is
    taken to need no more than the busiest link of one group alone.

    Args:
        problem: the problem of a mesh.
        shares_links: whether collectives at the same time slow each other down.

    Raises:
        PlanError: the decisions are too entangled.
    """
    additive, space = problem.additive, problem.folded.spaces[0]
    x, y = (alone_ratio(space, axis) for axis in (0, 1))
    corners = [np.array([1.0, x, y, 0.0])]
    copies = space.mesh.copies
    if copies > 1 and shares_links and additive.least_rate:
        groups = _groups(space)
        half = busiest_rate(space.cluster, "reduce_scatter", groups) / additive.least_rate
        corners.append(np.array([0.0, 0.0, 0.0, min(1.0, half)]))
    less = (1.0 - 1.0 / copies) * _update(problem) if copies > 1 else 0.0
    best = _climb(np.array(corners), lambda weights: _least(additive, weights) - weights[0] * less)
    return best * (1.0 - ROUNDING)


def _climb(corners: NDArray[np.float64], value_of: Callable[[NDArray[np.float64]], float]) -> float:
    """Returns the most that a mean of some weights proves."""
    values = [value_of(corner) for corner in corners]
    weights, best = corners[int(np.argmax(values))], max(0.0, *values)
    for step in _STEPS:
        improves = True
        while improves:
            improves = False
            for corner in corners:
                moved = (1.0 - step) * weights + step * corner
                value = value_of(moved)
                if value > best * (1.0 + 1e-6):
                    weights, best, improves = moved, value, True
    return float(best)


def _least(additive: Additive, weights: NDArray[np.float64]) -> float:
    """Returns the least of a mean over all plans, s."""
    sizes = [len(values) for values in additive.values]
    return eliminate(sizes, additive.scopes, additive.weighted(weights.tolist())).value


def _groups(space: ShardSpace) -> list[list[int]]:
    """Returns device indices of each group of copies."""
    places = [space.cluster.device_index(name) for name in space.devices]
    return [[places[k] for k in group] for group in space.mesh.members(DATA_AXIS).tolist()]


def _update(problem: OperatorPartition) -> float:
    """Returns s of what a whole model does once a step, which no plan has more of."""
    graph, space = problem.folded.graph, problem.folded.spaces[0]
    kind = space.cluster.devices[space.cluster.device_index(space.devices[0])].kind
    cost = cost_table(graph, space.job, (kind,), (graph.batch,))
    return float(cost.seconds[once_a_step(graph), 0, 0].sum())
