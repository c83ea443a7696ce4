"""About how long a pipeline over nodes takes: cheap, to try the likely ones first."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from agents.pipelines.env import PipelineTask
from agents.pipelines.nodes import NodeCosts, NodeGraph
from agents.pipelines.plans import DagPlan

_PASSES = 2  # of a ring all-reduce: every byte leaves and comes about twice
_AHEAD = {"zb-h1": 0.5}  # of the fill that is left
_NEVER = 1e12  # s
_OVER = 4.0  # how much longer a stage counts that looks too large for its devices
_RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0}  # of the forward


class Estimator:
    """Estimates plans of a task."""

    def __init__(self, task: PipelineTask) -> None:
        nodes = task.simulator.nodes
        self.nodes, self.cluster = nodes, nodes.space.problem.cluster
        self.batch = nodes.space.problem.job.batch or 1
        self.kind = [nodes.chain.kinds.index(device.kind) for device in self.cluster.devices]
        self.room = nodes.room()
        self.costs = lru_cache(maxsize=None)(lambda samples: _finite(nodes.costs(samples)))
        self.ahead = _work_ahead(nodes)  # of each node, before each of its units

    def __call__(self, plan: DagPlan) -> float:
        """Returns about the seconds of a step: slowest stage, fill along the deepest path."""
        moved = self._moved(plan)
        paces = []
        depth = self._depths(plan)
        for stage, devices in enumerate(plan.devices):
            costs = self.costs(self.batch // plan.microbatches // len(devices))
            inside = self._inside(plan, stage)
            in_flight = min(plan.microbatches, depth[stage] + 1)
            pace = max(
                self._pace(plan, (stage, in_flight), costs, inside),
                moved[stage] / len(devices),
            )
            paces.append(pace)
        path = [0.0] * len(paces)
        for stage in reversed(range(len(paces))):
            behind = (path[b] for a, b in self._edges(plan) if a == stage)
            path[stage] = paces[stage] + max(behind, default=0.0)
        fill = _AHEAD.get(plan.schedule, 1.0)
        slowest = max(paces)
        return (plan.microbatches - 1) * slowest + slowest + (max(path) - slowest) * fill

    def _inside(self, plan: DagPlan, stage: int) -> NDArray[np.float64]:
        """Returns how much of each node a stage has, [node]."""
        inside: NDArray[np.float64] = (np.array(plan.stage) == stage).astype(np.float64)
        for node, count, other in plan.apart:
            part = self.ahead[node][count]
            inside[node] = (1.0 - part) * inside[node] + part * (other == stage)
        return inside

    def _pace(
        self, plan: DagPlan, where: tuple[int, int], costs: NodeCosts, inside: NDArray[np.float64]
    ) -> float:
        stage, in_flight = where
        devices, rounds = plan.devices[stage], plan.microbatches
        kinds = [self.kind[device] for device in devices]
        again = _RECOMPUTED[plan.recompute[stage]]
        seconds = inside @ np.maximum(costs.seconds, costs.launch)
        seconds = seconds + again * (inside @ costs.forward)
        gradient = float(inside @ costs.gradient)
        once = float((inside @ costs.update)[kinds].max())
        if len(devices) > 1:
            share = (len(devices) - 1) / len(devices)
            rate = min(
                float(self.cluster.route_bandwidth[a, b])
                for a in devices
                for b in devices
                if a != b
            )
            once += _PASSES * share * gradient / max(rate, 1.0)
        held = float(inside @ (costs.held + costs.state)) + 2 * gradient
        held += float(inside @ costs.saved) * in_flight * (1.0 - again)
        over = _OVER if held > self.room[list(devices)].min() else 1.0
        return float(seconds[kinds].max() + once / rounds) * over

    def _moved(self, plan: DagPlan) -> list[float]:
        """Returns seconds that what comes into each stage takes from one device, and back."""
        sent = self.costs(self.batch // plan.microbatches).sent
        found = [0.0] * plan.num_stages
        for (source, target), num_bytes in zip(self.nodes.edges, sent.tolist(), strict=True):
            one, other = plan.stage[source], plan.stage[target]
            if one != other:
                pair = plan.devices[one][0], plan.devices[other][0]
                found[other] += num_bytes / max(float(self.cluster.route_bandwidth[pair]), 1.0)
        return found

    def _edges(self, plan: DagPlan) -> set[tuple[int, int]]:
        pairs = ((plan.stage[a], plan.stage[b]) for a, b in self.nodes.edges)
        return {pair for pair in pairs if pair[0] != pair[1]}

    def _depths(self, plan: DagPlan) -> list[int]:
        depth = [0] * plan.num_stages
        for source, target in sorted(self._edges(plan), reverse=True):
            depth[source] = max(depth[source], depth[target] + 1)
        return depth


def _finite(costs: NodeCosts) -> NodeCosts:
    """Returns costs with very many seconds where a kind cannot run a node, not inf."""
    names = ("seconds", "launch", "forward", "update")
    large = {name: np.nan_to_num(getattr(costs, name), posinf=_NEVER) for name in names}
    return costs._replace(**large)


def _work_ahead(nodes: NodeGraph) -> list[NDArray[np.float64]]:
    """Returns the part of each node's work that its first units have, [node][number of units]."""
    space, order = nodes.space, nodes.chain.order
    work = space.work.min(axis=1)[order]
    found = []
    for node in range(nodes.num_nodes):
        mine = work[nodes.node[order] == node]
        found.append(np.concatenate([[0.0], np.cumsum(mine)]) / max(float(mine.sum()), 1e-300))
    return found
