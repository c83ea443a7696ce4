"""Coarsening: a graph with its placement units grouped, and the way back to the fine graph.

`fuse`, `by_module` and `to_at_most` choose groups of units; each group becomes one unit of a coarse
graph, with one op per phase. Groups follow the *forward DAG* (which unit feeds which in the forward
pass) and are acyclic together, hence convex: no path leaves a group and comes back. Where the ops
of two groups still wait for each other both ways (say, a colocated backward that calls itself
forward), an op is cut into as many as it takes, so a coarse graph is always acyclic.

Exact on the coarse graph: the sums of seconds and launches (`Coarse.cost`), kernels, parameters,
buffers, optimizer state, resident bytes, and what travels: a tensor that another group needs keeps
its identity, so it is sent once to each device. Not exact: a group op starts when all its inputs
are there and gives its outputs at its end, so overlap inside it is lost, and inputs and outputs are
alive together. Tensors that outlive an op but stay in their group (activations kept for the
backward, gradients) become one tensor per lifetime with the sum of their bytes; those that die
within an op are its workspace: the peak of a walk in program order. The largest of several sizes is
taken per coefficient of the batch, so it is never too small. The true numbers are those of the
expanded plan on the fine graph.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from simcore.contract import acyclic_parts, contract
from simcore.errors import GraphError
from simcore.graph import OpGraph
from simcore.signature import OpClass, Phase

__all__ = ["Coarse", "by_module", "fuse", "to_at_most"]

_FUSABLE = (OpClass.POINTWISE, OpClass.VIEW)
_BACKWARD = (Phase.B, Phase.I, Phase.W)
# a nominal device that weighs ops against each other where no seconds are given
_FLOP_RATE, _BYTE_RATE, _LAUNCH = 10e12, 500e9, 5e-6  # FLOP/s, B/s, s
_UPDATE_TRAFFIC = 28  # bytes per parameter element: fp32 Adam
_CAP_GROWTH = 1.25


class Costs(Protocol):
    """What `Coarse.cost` needs of a cost table; the table is a dataclass."""

    @property
    def seconds(self) -> NDArray[np.float64]: ...  # [op, kind, variant] s
    @property
    def launch(self) -> NDArray[np.float64]: ...  # [op, kind] s
    @property
    def source(self) -> NDArray[np.uint8]: ...  # [op, kind]
    @property
    def relative_error(self) -> NDArray[np.float64]: ...  # [op, kind]


_Costs = TypeVar("_Costs", bound=Costs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Coarse:
    """A coarse graph and how the fine one maps to it."""

    graph: OpGraph
    fine: OpGraph
    group: NDArray[np.int32]  # [fine unit] unit of the coarse graph
    op_group: NDArray[np.int32]  # [fine op] op of the coarse graph
    split: tuple[str, ...] = ()  # modules cut into several groups to keep the graph acyclic

    def expand(self, unit_devices: NDArray[np.integer[Any]]) -> NDArray[np.int32]:
        """Returns the devices of fine units, [..., fine unit], from those of groups, [..., unit].

        Raises:
            ValueError: the last axis is not the units of the coarse graph.
        """
        if unit_devices.shape[-1:] != (self.graph.num_units,):
            raise ValueError(
                f"expected [..., {self.graph.num_units}] devices, got {list(unit_devices.shape)}"
            )
        return np.ascontiguousarray(unit_devices[..., self.group], dtype=np.int32)

    def cost(self, table: _Costs) -> _Costs:
        """Returns the cost table of the coarse graph: sums over the ops of each group op.

        A group op cannot be costed by itself, since it has no signature. Its source is that of its
        longest member; errors are taken to be common to the members, so they do not average out.

        Args:
            table: a `CostTable` of the fine graph.

        Raises:
            ValueError: the table is of another graph.
        """
        if table.seconds.shape[0] != self.fine.num_ops:
            raise ValueError(f"expected {self.fine.num_ops} ops, got {table.seconds.shape[0]}")
        longest = table.seconds.max(axis=2, initial=0.0)  # [fine op, kind]
        weight = np.where(np.isfinite(longest), longest, 0.0)
        total = self._sum(weight)
        source = np.zeros(total.shape, np.uint8)
        for kind in range(longest.shape[1]):
            order = np.lexsort((longest[:, kind], self.op_group))
            longest_of_group = order[np.cumsum(np.bincount(self.op_group)) - 1]
            source[:, kind] = table.source[longest_of_group, kind]
        changes: dict[str, NDArray[Any]] = {
            "seconds": self._sum(table.seconds),
            "launch": self._sum(table.launch),
            "source": source,
            "relative_error": self._sum(weight * table.relative_error)
            / np.where(total > 0, total, 1.0),
        }
        for array in changes.values():
            array.setflags(write=False)
        return cast(_Costs, replace(cast(Any, table), **changes))

    def _sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sums values of fine ops, [fine op, ...], over each group op, in program order."""
        total = np.zeros((self.graph.num_ops, *values.shape[1:]))
        np.add.at(total, self.op_group, values)
        return total


def fuse(graph: OpGraph) -> Coarse:
    """Groups pointwise ops and views with their producer, the latest where there are several."""
    order, links = _forward_dag(graph)
    forward = graph.phase == Phase.F
    fusable = np.bincount(graph.unit[forward], minlength=graph.num_units) > 0
    fusable[graph.unit[forward & ~np.isin(graph.op_class, _FUSABLE)]] = False
    group = list(range(graph.num_units))  # [rank] rank of the group's first unit
    latest = [-1] * graph.num_units  # [rank] last group that feeds it
    joins = fusable[order].tolist()
    for link in np.lexsort((links.source, links.target)).tolist():
        source, target = int(links.source[link]), int(links.target[link])
        # no other path leads here from the last of all that feed it, so no cycle is closed
        latest[target] = max(latest[target], group[source])
        if joins[target]:
            group[target] = latest[target]
    return _grouped(graph, order, np.array(group))


def by_module(graph: OpGraph, depth: int) -> Coarse:
    """Groups units by the first components of their `nn.Module` path.

    A module that others run in between (a parent's own ops around its children) is cut into convex
    groups, named ``module``, ``module#2``, ..., and listed in `Coarse.split`.

    Args:
        graph: the graph.
        depth: components of the path to keep; 0 makes one group.

    Raises:
        GraphError: depth is negative.
    """
    if depth < 0:
        raise GraphError(f"{graph.name}: depth must be at least 0, not {depth}")
    order, links = _forward_dag(graph)
    first = np.full(graph.num_units, -1)
    first[graph.unit[::-1]] = np.arange(graph.num_ops)[::-1]
    forward = np.flatnonzero(graph.phase == Phase.F)[::-1]
    first[graph.unit[forward]] = forward  # [unit] its first forward op, else its first op
    modules = [".".join(graph.op_modules[op].split(".")[:depth]) for op in first[order]]  # [rank]
    labels = {module: label for label, module in enumerate(dict.fromkeys(modules))}
    label = np.array([labels[module] for module in modules])
    part = acyclic_parts(label, links.source, links.target)
    keys = sorted(set(zip(label.tolist(), part.tolist(), strict=True)))
    group = {key: number for number, key in enumerate(keys)}
    parts = Counter[int]()
    names = []
    for module_label, _ in keys:
        parts[module_label] += 1
        name = list(labels)[module_label] or "(model)"
        names.append(name if parts[module_label] == 1 else f"{name}#{parts[module_label]}")
    of_rank = [group[key] for key in zip(label.tolist(), part.tolist(), strict=True)]
    split = tuple(module or "(model)" for module in labels if parts[labels[module]] > 1)
    return _grouped(graph, order, np.array(of_rank), names, split)


def to_at_most(graph: OpGraph, n: int, seconds: NDArray[np.float64] | None = None) -> Coarse:
    """Groups units until there are at most n groups, joining heavy links and evening out the work.

    Groups that are neighbours in a topological order can always be joined without closing a cycle.
    So each pass lays the groups out depth first, heaviest link first, and joins neighbours, most
    bytes first, while a group's work stays under a cap, which starts at 1/n of all and grows.

    Args:
        graph: the graph.
        n: number of groups at most.
        seconds: work of each op, [op] s; None = measured seconds where the graph has them, else
            what a nominal device takes.

    Raises:
        GraphError: n is not positive.
    """
    if n < 1:
        raise GraphError(f"{graph.name}: the number of groups must be at least 1, not {n}")
    order, links = _forward_dag(graph)
    work = _total(graph.unit, _work(graph, seconds), graph.num_units)[order]  # [rank]
    work = work + (work.sum() or 1.0) * 1e-3 / len(work)  # units without work count a little
    cap = work.sum() / n
    group = np.arange(graph.num_units)  # [rank]
    while len(work) > n:
        joined = _join_neighbours(links, work, cap, len(work) - n)
        group, work = joined[group], _total(joined, work, int(joined.max()) + 1)
        if len(work) == len(joined):
            cap *= _CAP_GROWTH
        links = _Links.between(joined[links.source], joined[links.target], links.weight)
    return _grouped(graph, order, group)


class _Links(NamedTuple):
    """Which unit or group feeds which; each pair once."""

    source: NDArray[np.int64]  # [link]
    target: NDArray[np.int64]  # [link]
    weight: NDArray[np.float64]  # [link] bytes that travel, either way, where the two are apart

    @classmethod
    def between(
        cls, source: NDArray[np.int64], target: NDArray[np.int64], weight: NDArray[np.float64]
    ) -> "_Links":
        """Sums the weights of equal pairs and drops those that link a thing to itself."""
        apart = source != target
        size = int(max(source.max(initial=0), target.max(initial=0))) + 1
        pair, inverse = np.unique(source[apart] * size + target[apart], return_inverse=True)
        return cls(pair // size, pair % size, _total(inverse, weight[apart], len(pair)))


def _forward_dag(graph: OpGraph) -> tuple[NDArray[np.int64], _Links]:
    """Returns units in a topological order, [rank], and the links between ranks, all upward.

    A unit without forward ops (a sum of gradients, say) stands in the mirror of its backward.
    Where units feed each other both ways, only the links along the order are kept.
    """
    producer, consumer, tensor = graph.edges()
    source, target = graph.unit[producer].astype(np.int64), graph.unit[consumer].astype(np.int64)
    forward = (graph.phase[producer] == Phase.F) & (graph.phase[consumer] == Phase.F)
    backward = np.isin(graph.phase[producer], _BACKWARD) & np.isin(graph.phase[consumer], _BACKWARD)
    has_forward = np.zeros(graph.num_units, np.bool_)
    has_forward[graph.unit[graph.phase == Phase.F]] = True
    mirrored = backward & ~(has_forward[source] & has_forward[target])
    _, once = np.unique(tensor * graph.num_units + target, return_index=True)
    size = np.zeros(len(tensor))
    size[once] = graph.at_batch(None).tensor_bytes[tensor[once]]
    travel = _Links.between(np.minimum(source, target), np.maximum(source, target), size)
    feeds = _Links.between(
        np.concatenate([source[forward], target[mirrored]]),
        np.concatenate([target[forward], source[mirrored]]),
        np.zeros(forward.sum() + mirrored.sum()),
    )
    pair = np.minimum(feeds.source, feeds.target) * graph.num_units + np.maximum(
        feeds.source, feeds.target
    )
    found = np.searchsorted(travel.source * graph.num_units + travel.target, pair)
    feeds = feeds._replace(weight=travel.weight[found])
    order = _depth_first(graph.num_units, feeds)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    up = rank[feeds.source] < rank[feeds.target]
    return order, _Links(rank[feeds.source][up], rank[feeds.target][up], feeds.weight[up])


def _depth_first(num: int, links: _Links) -> NDArray[np.int64]:
    """Returns a topological order that follows heavy links; a cycle is entered at its lowest."""
    by_weight = np.lexsort((-links.target, links.weight, links.source))
    first = np.searchsorted(links.source[by_weight], np.arange(num + 1)).tolist()
    targets = links.target[by_weight].tolist()
    waiting = np.bincount(links.target, minlength=num).tolist()
    done = [False] * num
    stack = [node for node in reversed(range(num)) if not waiting[node]]
    order: list[int] = []
    lowest = 0
    while len(order) < num:
        if not stack:
            while done[lowest]:
                lowest += 1
            stack.append(lowest)
        node = stack.pop()
        if done[node]:
            continue
        done[node] = True
        order.append(node)
        for target in targets[first[node] : first[node + 1]]:
            waiting[target] -= 1
            if not waiting[target]:
                stack.append(target)
    return np.array(order)


def _join_neighbours(
    links: _Links, work: NDArray[np.float64], cap: float, surplus: int
) -> NDArray[np.int64]:
    """Joins neighbours of one layout and returns [group] -> new group, numbered along it."""
    order = _depth_first(len(work), links)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    adjacent = place[links.target] - place[links.source] == 1
    bond = np.full(len(order) - 1, -1.0)  # [gap between neighbours] bytes, -1 = no link
    bond[place[links.source[adjacent]]] = links.weight[adjacent]
    heavy_first = np.argsort(-bond, kind="stable")
    linked = heavy_first[: int((bond >= 0).sum())]
    pair_work = work[order][:-1] + work[order][1:]
    rest = np.flatnonzero(bond < 0)
    rest = rest[np.argsort(pair_work[rest], kind="stable")]
    runs = _Runs(work[order], cap, surplus)
    runs.join(linked)
    if runs.joined.sum() * 8 <= surplus:  # links alone bring too little
        runs.join(rest)
    group = np.empty_like(order)
    group[order] = np.concatenate([[0], np.cumsum(~runs.joined)])
    return group


class _Runs:
    """Neighbours joined into runs, each with its work; places are those of a layout."""

    def __init__(self, work: NDArray[np.float64], cap: float, surplus: int) -> None:
        self.joined = np.zeros(len(work) - 1, np.bool_)  # [gap] between a place and the next
        self._cap = cap  # work that a run may have
        self._surplus = surplus  # joins that are still wanted
        self._end = list(range(len(work)))  # [place] the other end of the run that ends here
        self._work: list[float] = work.tolist()  # [place] work of the run that ends here

    def join(self, gaps: NDArray[np.int64]) -> None:
        """Closes the gaps in the order given, as long as cap and surplus allow."""
        for gap in gaps.tolist():
            work = self._work[gap] + self._work[gap + 1]
            if self._surplus == 0 or work > self._cap:
                continue
            left, right = self._end[gap], self._end[gap + 1]
            self._end[left], self._end[right] = right, left
            self._work[left] = self._work[right] = work
            self.joined[gap] = True
            self._surplus -= 1


def _total(
    label: NDArray[np.integer[Any]], values: NDArray[np.float64], size: int
) -> NDArray[np.float64]:
    """Sums values by label, [label]."""
    return np.bincount(label, values, size).astype(np.float64)


def _work(graph: OpGraph, seconds: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Returns seconds of each op, given, measured or on a nominal device, [op]; ratios count."""
    sized = graph.at_batch(None)
    traffic = sized.traffic + graph.elements * float(_UPDATE_TRAFFIC)
    nominal = np.maximum(sized.flops / _FLOP_RATE, traffic / _BYTE_RATE) + graph.kernels * _LAUNCH
    if seconds is None and graph.fixed is not None:
        seconds = graph.fixed.seconds
    if seconds is None:
        return np.asarray(nominal, np.float64)
    return np.where(np.isfinite(seconds), seconds, nominal)


def _grouped(
    graph: OpGraph,
    order: NDArray[np.int64],
    group_of_rank: NDArray[np.int64],
    names: Sequence[str] | None = None,
    split: tuple[str, ...] = (),
) -> Coarse:
    """Returns the coarse graph of a grouping of units given in topological order."""
    group = np.empty_like(order)
    group[order] = np.unique(group_of_rank, return_inverse=True)[1]
    if names is None:
        _, first, size = np.unique(group, return_index=True, return_counts=True)
        units = graph.unit_names
        names = [
            units[unit] if num == 1 else f"{units[unit]}+{num - 1}"
            for unit, num in zip(first.tolist(), size.tolist(), strict=True)
        ]
    coarse, op_group = contract(graph, group, names)
    unit_of_group = np.empty(len(names), np.int32)
    unit_of_group[group[graph.unit]] = coarse.unit[op_group]
    return Coarse(
        graph=coarse,
        fine=graph,
        group=unit_of_group[group],
        op_group=op_group,
        split=split,
    )
