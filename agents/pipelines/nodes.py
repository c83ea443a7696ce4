"""A model as a DAG of few nodes, each of which goes to a stage as a whole, and what they take.

Nodes are made of the segments between the safe cuts of the chain of units (`pipeline_cuts`), joined
along edges until there are few: parts of a line first, the lightest first, and only where no cycle
can come of it. The branches of a model thus stay apart. Stages numbered so that no edge between
nodes goes to a smaller number are a DAG; every DAG of stages can be numbered so.

Axes: node (in an order in which edges go forward), kind (device kind), unit.
"""

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.planners.pipeline_chain import Chain
from agents.planners.pipeline_cuts import stages_at
from agents.planners.space import PlacementSpace
from simcore.graph import Phase
from simcore.schedule import Edges
from simcore.stage_cut import cut_graph
from simcore.stages import StageTables, stage_edges, stage_tables

MAX_NODES = 40  # a decision each
_OFF_LINE = 4.0  # how much heavier a pair counts that is no part of a line
_UNLIKE = 16.0  # likewise, where the two may not be on the same devices


class NodeCosts(NamedTuple):
    """What nodes take at so many samples on a device."""

    seconds: NDArray[np.float64]  # [node, kind] s of forward and backward of a microbatch
    launch: NDArray[np.float64]  # [node, kind] s of the host for them
    forward: NDArray[np.float64]  # [node, kind] s of the forward alone
    update: NDArray[np.float64]  # [node, kind] s once a step
    held: NDArray[np.float64]  # [node] bytes of parameters, buffers and what ops keep
    state: NDArray[np.float64]  # [node] bytes of optimizer state
    gradient: NDArray[np.float64]  # [node] bytes
    saved: NDArray[np.float64]  # [node] bytes from forward to backward, per microbatch
    extra: NDArray[np.float64]  # [node] bytes most inside a phase
    sent: NDArray[np.float64]  # [edge] bytes there and back, per microbatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeGraph:
    """The nodes of a model.

    Attributes:
        chain: the units in a line, with costs by samples.
        node: node of every unit, int32 [unit].
        edges: pairs of nodes of which the second reads what the first makes, or sends gradients
            straight back to it, in order.
        allowed: devices that all units of a node may be on, [node, dev].
    """

    chain: Chain
    node: NDArray[np.int32]  # [unit]
    edges: Edges
    allowed: NDArray[np.bool_]  # [node, dev]
    tables: dict[int, StageTables] = field(default_factory=dict)  # by samples

    @classmethod
    def build(cls, space: PlacementSpace, *, most: int = MAX_NODES) -> "NodeGraph":
        """Returns the nodes of a space.

        Args:
            space: the space.
            most: number of nodes to come down to where that is possible.

        Raises:
            PlanError: the graph is no training step that can be cut.
        """
        chain = Chain.build(space)
        graph = space.problem.graph
        segment = stages_at(chain.cuts, chain.rank)
        weight = np.bincount(segment, _finite(space.work.min(axis=1))).astype(np.float64)
        may = np.ones((len(weight), space.num_devices), np.bool_)
        np.logical_and.at(may, segment, space.allowed)
        may = may[:, list(space.devices)]
        group = _joined(may, stage_edges(graph, segment), weight, most)
        node = group[segment].astype(np.int32)
        edges = cut_graph(graph, node).edges
        allowed = np.ones((int(node.max()) + 1, space.num_devices), np.bool_)
        np.logical_and.at(allowed, node, space.allowed)
        return cls(chain=chain, node=node, edges=edges, allowed=allowed)

    @property
    def space(self) -> PlacementSpace:
        """The space that the units are of."""
        return self.chain.space

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.allowed)

    @property
    def is_line(self) -> bool:
        """Whether no two nodes can run side by side."""
        follows = set(self.edges)
        return all((k, k + 1) in follows for k in range(self.num_nodes - 1))

    def at(self, samples: int) -> StageTables:
        """Returns the tables of the nodes, each a stage of its own.

        Raises:
            JobError: measured seconds at another batch or kind.
        """
        if samples not in self.tables:
            problem = self.space.problem
            self.tables[samples] = stage_tables(
                problem.graph,
                problem.job,
                self.chain.kinds,
                self.node,
                samples,
                cost=self.chain.cost(samples),
            )
        return self.tables[samples]

    def costs(self, samples: int) -> NodeCosts:
        """Returns what the nodes take where a device sees so many samples of a microbatch."""
        tables = self.at(samples)
        seconds, launch = tables.seconds, tables.launch
        sent = (tables.forward_bytes + tables.backward_bytes).sum(axis=1)
        return NodeCosts(
            seconds=seconds[:, Phase.F] + seconds[:, Phase.B],
            launch=launch[:, Phase.F] + launch[:, Phase.B],
            forward=seconds[:, Phase.F],
            update=seconds[:, Phase.U],
            held=(tables.parameters + tables.resident).astype(np.float64),
            state=tables.state_bytes.astype(np.float64),
            gradient=tables.gradient.astype(np.float64),
            saved=tables.saved.astype(np.float64),
            extra=tables.extra.max(axis=1).astype(np.float64),
            sent=sent.astype(np.float64),
        )

    def room(self) -> NDArray[np.float64]:
        """Returns bytes that each device has for a stage, [dev]."""
        problem = self.space.problem
        free: NDArray[np.float64] = (problem.capacity - problem.context) / (
            1.0 + problem.fragmentation
        )
        return free

    def least_held(self) -> NDArray[np.float64]:
        """Returns bytes that each node takes on some device whatever the plan, [node].

        Parameters, gradients and optimizer state. A tied parameter counts at the first node that
        reads it; activations are taken to be recomputed.
        """
        tables = self.at(self.space.problem.job.batch or 1)
        parameters = self._parameters()
        gradient = np.minimum(tables.gradient.astype(np.float64), parameters)
        return parameters + gradient + tables.state_bytes

    def _parameters(self) -> NDArray[np.float64]:
        """Returns bytes of parameters and buffers, each at the first node that reads it, [node]."""
        graph = self.space.problem.graph
        tensor = np.repeat(np.arange(graph.num_tensors), np.diff(graph.first_consumer))
        storage = graph.tensor_storage[tensor]
        kept = (graph.tensor_producer[tensor] < 0) & graph.persistent_storage[storage]
        first = np.full(graph.num_storages, self.num_nodes, np.int64)
        np.minimum.at(first, storage[kept], self.node[graph.unit[graph.consumers[kept]]])
        held = np.flatnonzero(first < self.num_nodes)
        sizes = graph.at_batch(self.space.problem.job.batch).storage_bytes[held]
        return np.bincount(first[held], sizes, self.num_nodes).astype(np.float64)


def _finite(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isfinite(values), values, 0.0)


def _joined(
    may: NDArray[np.bool_], edges: Edges, weight: NDArray[np.float64], most: int
) -> NDArray[np.int64]:
    """Returns the node of each segment, [segment], numbered so that edges go forward.

    Segments that may be on no common device, [segment, dev], stay apart.
    """
    size = len(may)
    where = {k: int("".join("01"[flag] for flag in row), 2) for k, row in enumerate(may.tolist())}
    after: dict[int, set[int]] = {k: set() for k in range(size)}
    before: dict[int, set[int]] = {k: set() for k in range(size)}
    for source, target in edges:
        after[source].add(target)
        before[target].add(source)
    load, owner = dict(enumerate(weight.tolist())), list(range(size))
    while len(load) > most:
        pair = _lightest(load, before, after, where)
        if pair is None:
            break
        kept, gone = pair
        where[kept] &= where.pop(gone)
        _join(before, after, kept, gone)
        load[kept] += load.pop(gone)
        owner = [kept if at == gone else at for at in owner]
    first = {node: owner.index(node) for node in load}
    number = {node: k for k, node in enumerate(_in_order(before, after, first))}
    return np.array([number[node] for node in owner], np.int64)


def _lightest(
    load: dict[int, float],
    before: dict[int, set[int]],
    after: dict[int, set[int]],
    where: dict[int, int],
) -> tuple[int, int] | None:
    """Returns the best pair to join: one has the other alone on that side, so no cycle comes.

    Both may be on one of the devices that are bits of `where`; equal sets come first.
    """
    best: tuple[float, int, int] | None = None
    for source, weight in load.items():
        for target in after[source]:
            alone = (len(after[source]) == 1) + (len(before[target]) == 1)
            if alone and where[source] & where[target]:
                cost = (weight + load[target]) * (1.0 if alone == 2 else _OFF_LINE)
                cost *= 1.0 if where[source] == where[target] else _UNLIKE
                best = min(best or (np.inf, 0, 0), (cost, source, target))
    return None if best is None else (best[1], best[2])


def _join(before: dict[int, set[int]], after: dict[int, set[int]], kept: int, gone: int) -> None:
    for source in before.pop(gone):
        after[source].discard(gone)
        if source != kept:
            after[source].add(kept)
            before[kept].add(source)
    for target in after.pop(gone):
        before[target].discard(gone)
        if target != kept:
            before[target].add(kept)
            after[kept].add(target)
    after[kept].discard(kept)
    before[kept].discard(kept)


def _in_order(
    before: dict[int, set[int]], after: dict[int, set[int]], first: dict[int, int]
) -> list[int]:
    """Returns nodes so that edges go forward, those early in the program first."""
    waiting = {node: len(sources) for node, sources in before.items()}
    ready = [(first[node], node) for node, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)[1]
        order.append(node)
        for target in after[node]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (first[target], target))
    return order
