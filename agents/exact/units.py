"""Operators -> units that are placed as one: colour classes, cycles between them, idle leaves.

A split into contiguous sets is a chain of ideals of the forward graph (an ideal holds, with a unit,
all that comes before it), so no cycle may run between devices and each device gets the difference
of two ideals; backward operators follow their class. A class without a forward operator takes the
place that its backward edges, reversed, would give it. Classes on a cycle of the forward graph are
one unit.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from agents.exact.max_load import MaxLoadProblem

Pairs = NDArray[np.int64]  # [pair, 2]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """Units in a topological order. Axes: node, unit, tensor, use, arc.

    A tensor that only one unit touches is not here; tensors of equal writer and readers are one.
    """

    node_unit: NDArray[np.int64]  # [node]
    accelerator: NDArray[np.float64]  # [unit] file's unit; inf where unsupported
    cpu: NDArray[np.float64]  # [unit] file's unit
    memory: NDArray[np.float64]  # [unit] bytes
    own_memory: NDArray[np.float64]  # [unit] bytes, without the idle leaves merged into it
    arcs: Pairs  # [arc, 2] forward edges between units, smaller number first
    tensor_cost: NDArray[np.float64]  # [tensor] file's unit
    tensor_readers: NDArray[np.int64]  # [tensor] units that read it, its writer's not counted
    first_use: NDArray[np.int64]  # [unit + 1] offsets into the uses of each unit
    use_tensor: NDArray[np.int64]  # [use]
    use_writes: NDArray[np.bool_]  # [use] whether the unit writes the tensor

    @property
    def num_units(self) -> int:
        """Number of units."""
        return len(self.cpu)

    @property
    def leaves_merged(self) -> bool:
        """Whether a unit that may hold memory of its own was tied to another."""
        return bool((self.memory > self.own_memory).any())


def forward_units(problem: MaxLoadProblem, *, merge_leaves: bool) -> Units:
    """Returns the units of contiguous splits.

    Args:
        problem: the problem.
        merge_leaves: whether units that take no time and have one neighbour join it. That keeps
            the best load wherever memory is no limit.
    """
    source, target = problem.edges
    class_of = problem.color
    backward = problem.is_backward
    both = ~backward[source] & ~backward[target]
    arcs = [np.stack([class_of[source[both]], class_of[target[both]]], axis=1)]
    orphan = np.ones(class_of.max() + 1, bool)
    orphan[class_of[~backward]] = False
    ends = np.stack([class_of[source], class_of[target]], axis=1)
    mirrored = backward[source] & backward[target] & orphan[ends].any(axis=1)
    arcs.append(ends[mirrored][:, ::-1])
    edges = _between(np.concatenate(arcs))
    group = _cycles(len(orphan), edges)
    return _units(problem, group[class_of], _between(group[edges]), merge_leaves=merge_leaves)


def free_units(problem: MaxLoadProblem, *, merge_leaves: bool) -> Units:
    """Returns the units of free placement: colour classes, without any order between them."""
    none = np.zeros((0, 2), np.int64)
    return _units(problem, problem.color, none, merge_leaves=merge_leaves)


def renumbered(units: Units, order: NDArray[np.int64], arcs: Pairs) -> Units:
    """Returns the units in another order and with other arcs.

    Args:
        units: the units.
        order: units in the new order, [unit].
        arcs: arcs in the old numbers, [arc, 2]; the order must respect them.
    """
    new = np.empty_like(order)
    new[order] = np.arange(len(order))
    lengths = np.diff(units.first_use)[order]
    uses = [np.arange(units.first_use[unit], units.first_use[unit + 1]) for unit in order.tolist()]
    picked = np.concatenate(uses) if uses else np.zeros(0, np.int64)
    return Units(
        node_unit=new[units.node_unit],
        accelerator=units.accelerator[order],
        cpu=units.cpu[order],
        memory=units.memory[order],
        own_memory=units.own_memory[order],
        arcs=new[arcs],
        tensor_cost=units.tensor_cost,
        tensor_readers=units.tensor_readers,
        first_use=np.concatenate(([0], np.cumsum(lengths))),
        use_tensor=units.use_tensor[picked],
        use_writes=units.use_writes[picked],
    )


def grouped(problem: MaxLoadProblem, units: Units, group: NDArray[np.int64]) -> Units:
    """Returns the units with several made one; no cycle may run between the groups.

    Args:
        problem: the problem of the units.
        units: the units.
        group: a dense number for each unit, [unit].
    """
    arcs = _between(group[units.arcs])
    return _units(problem, group[units.node_unit], arcs, merge_leaves=False)


def _units(
    problem: MaxLoadProblem, node_group: NDArray[np.int64], arcs: Pairs, *, merge_leaves: bool
) -> Units:
    source, target = problem.edges
    touching = _between(np.stack([node_group[source], node_group[target]], axis=1))
    count = int(node_group.max()) + 1
    time = np.bincount(node_group, problem.accelerator_time + problem.cpu_time, count)
    leader = np.arange(count)
    if merge_leaves:
        leader = _merged_leaves(time == 0, np.concatenate([arcs, touching]))
    names, unit = np.unique(leader, return_inverse=True)
    arcs = _between(unit[arcs])
    order = _topological(len(names), arcs)
    new = np.empty_like(order)
    new[order] = np.arange(len(order))
    node_unit = new[unit[node_group]]
    is_own = leader[node_group] == node_group
    num = len(names)
    tensors = _tensors(problem, node_unit, num)
    return Units(
        node_unit=node_unit,
        accelerator=_summed(node_unit, problem.accelerator_time, num),
        cpu=_summed(node_unit, problem.cpu_time, num),
        memory=_summed(node_unit, problem.memory, num),
        own_memory=_summed(node_unit, np.where(is_own, problem.memory, 0.0), num),
        arcs=new[arcs],
        tensor_cost=tensors[0],
        tensor_readers=tensors[1],
        first_use=tensors[2],
        use_tensor=tensors[3],
        use_writes=tensors[4],
    )


def _summed(
    unit: NDArray[np.int64], weight: NDArray[np.float64], count: int
) -> NDArray[np.float64]:
    return np.bincount(unit, weight, count).astype(np.float64)


def _between(pairs: NDArray[np.integer]) -> Pairs:
    """Returns the distinct pairs of two different numbers."""
    different = pairs[pairs[:, 0] != pairs[:, 1]]
    distinct: Pairs = np.unique(different, axis=0).astype(np.int64)
    return distinct


def _cycles(count: int, arcs: Pairs) -> NDArray[np.int64]:
    """Returns a number for each strongly connected set of classes, [class]."""
    matrix = coo_array((np.ones(len(arcs), bool), (arcs[:, 0], arcs[:, 1])), (count, count))
    _, labels = connected_components(matrix.tocsr(), connection="strong")
    return np.asarray(labels, np.int64)


def _topological(count: int, arcs: Pairs) -> NDArray[np.int64]:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from(arcs.tolist())
    return np.array(list(nx.lexicographical_topological_sort(graph)), np.int64)


def _merged_leaves(is_idle: NDArray[np.bool_], arcs: Pairs) -> NDArray[np.int64]:
    """Returns for each group the one it joins, [group]: idle ones with one neighbour, in turn."""
    neighbours: list[set[int]] = [set() for _ in is_idle]
    for one, other in arcs.tolist():
        neighbours[one].add(other)
        neighbours[other].add(one)
    joins = np.arange(len(is_idle))
    anchor = int(is_idle.argmin())  # for those without a neighbour
    if is_idle[anchor]:
        return joins
    waiting = [group for group in np.flatnonzero(is_idle).tolist() if len(neighbours[group]) < 2]
    while waiting:
        group = waiting.pop()
        if joins[group] != group or len(neighbours[group]) > 1:
            continue
        host = next(iter(neighbours[group]), anchor)
        joins[group] = host
        neighbours[host].discard(group)
        if is_idle[host] and len(neighbours[host]) < 2:
            waiting.append(host)
    return _roots(joins)


def _roots(joins: NDArray[np.int64]) -> NDArray[np.int64]:
    """Follows each group to the one that joins no other."""
    while (joins[joins] != joins).any():
        joins = joins[joins]
    return joins


def _tensors(
    problem: MaxLoadProblem, node_unit: NDArray[np.int64], num_units: int
) -> tuple[
    NDArray[np.float64],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.bool_],
]:
    """Returns cost, number of readers, first use, tensor and role of the uses; see `Units`."""
    costs: dict[tuple[int, tuple[int, ...]], float] = {}
    for tensor, node in enumerate(problem.tensor_node.tolist()):
        writer = int(node_unit[node])
        span = slice(problem.first_reader[tensor], problem.first_reader[tensor + 1])
        readers = tuple(sorted(set(node_unit[problem.readers[span]].tolist()) - {writer}))
        if readers and problem.tensor_cost[tensor]:
            key = (writer, readers)
            costs[key] = costs.get(key, 0.0) + float(problem.tensor_cost[tensor])
    rows = [
        (unit, tensor, unit == writer)
        for tensor, (writer, readers) in enumerate(costs)
        for unit in (writer, *readers)
    ]
    table = np.array(sorted(rows), np.int64).reshape(-1, 3)
    return (
        np.array(list(costs.values())),
        np.array([len(readers) for _, readers in costs], np.int64),
        offsets(table[:, 0], num_units),
        table[:, 1].copy(),
        table[:, 2].astype(bool),
    )


def offsets(keys: NDArray[np.int64] | Iterable[int], count: int) -> NDArray[np.int64]:
    """Returns where each key's entries begin in a table sorted by key, [count + 1]."""
    sizes = np.bincount(np.asarray(keys, np.int64), minlength=count)
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
