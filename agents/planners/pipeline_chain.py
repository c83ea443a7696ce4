"""The model as a chain of segments, what stages of them take, and the best cuts for a layout.

Axes: place (where the chain may be cut, its ends included), segment (between neighbouring places),
kind (device kind), unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.planners.pipeline_cuts import (
    best_cuts,
    chain_order,
    equal_split,
    ranks_of,
    safe_cuts,
    stages_at,
    thin_out,
)
from agents.planners.pipeline_layouts import Layout
from agents.planners.space import PlacementSpace
from simcore.cost import CostTable, cost_table, kinds_of
from simcore.graph import Phase, Sized
from simcore.plan import DEFAULT_BUCKETS, Buckets
from simcore.recompute import Recompute
from simcore.sizes import sizes_at
from simcore.stage_cut import Messages
from simcore.stages import StageTables, stage_tables

MAX_PLACES = 128  # of the dynamic program; single units are moved afterwards
_SUM_PASSES = 2  # of a ring all-reduce: every byte leaves and comes about twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A pipeline with its cuts.

    Attributes:
        layout: the rest of it.
        bounds: units of the chain before each stage, and of all, [stage + 1].
        recompute: what the backward of each stage runs again, [stage].
        method: how the cuts were found: balanced, equal or shifted.
        buckets: how gradients are put together.
    """

    layout: Layout
    bounds: tuple[int, ...]
    recompute: tuple[Recompute, ...]
    method: str = "balanced"
    buckets: Buckets = DEFAULT_BUCKETS


class Segments(NamedTuple):
    """What lies between neighbouring places, for one microbatch on one device."""

    seconds: NDArray[np.float64]  # [segment, kind] s of forward and backward
    launch: NDArray[np.float64]  # [segment, kind] s of the host for them
    forward: NDArray[np.float64]  # [segment, kind] s of the forward alone
    update: NDArray[np.float64]  # [segment, kind] s, once a step
    accumulate: NDArray[np.float64]  # [segment, kind] s to add gradients to earlier ones
    saved: NDArray[np.float64]  # [segment] bytes from forward to backward
    kept: NDArray[np.float64]  # [segment] bytes from input to weight gradients
    held: NDArray[np.float64]  # [segment] bytes of parameters, buffers and what ops keep
    state: NDArray[np.float64]  # [segment] bytes of optimizer state
    gradient: NDArray[np.float64]  # [segment] bytes
    extra: NDArray[np.float64]  # [place, place] bytes most inside a phase
    crossing: NDArray[np.float64]  # [place] bytes over a cut, there and back
    batch: int  # samples


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """The units of a space in a line, and where they may be cut."""

    space: PlacementSpace
    order: NDArray[np.int32]  # [unit]
    rank: NDArray[np.int64]  # [unit] its place in the order
    cuts: NDArray[np.int64]  # [cut] units before it; any of them go together
    places: NDArray[np.int64]  # [place] units before it; few of the cuts, and both ends
    kinds: tuple[str, ...]  # of all devices of the cluster
    costs: dict[int, CostTable] = field(default_factory=dict)  # by samples
    segments_at: dict[int, Segments] = field(default_factory=dict)  # by samples

    @classmethod
    def build(cls, space: PlacementSpace, *, most: int = MAX_PLACES) -> "Chain":
        """Returns the chain of a space.

        Args:
            space: the space.
            most: number of cuts that the dynamic program may choose from.

        Raises:
            PlanError: the graph is no training step that can be cut.
        """
        problem = space.problem
        order = chain_order(problem.graph)
        rank = ranks_of(order)
        cuts = safe_cuts(problem.graph, order)
        weight = space.work.min(axis=1)[order]
        crossing = _crossing_of_units(space, rank)
        few = thin_out(cuts, weight, crossing[cuts], most)
        return cls(
            space=space,
            order=order,
            rank=rank,
            cuts=cuts,
            places=np.concatenate([[0], few, [space.num_units]]),
            kinds=kinds_of(problem.cluster),
        )

    def cost(self, batch: int) -> CostTable:
        """Returns the cost of every op where a device sees so many samples."""
        if batch not in self.costs:
            problem = self.space.problem
            self.costs[batch] = cost_table(problem.graph, problem.job, self.kinds, (batch,))
        return self.costs[batch]

    def segments(self, batch: int) -> Segments:
        """Returns what lies between places where a device sees so many samples.

        Raises:
            JobError: measured seconds at another batch or kind.
        """
        if batch not in self.segments_at:
            graph, job = self.space.problem.graph, self.space.problem.job
            stage = stages_at(self.places[1:-1], self.rank)
            tables = stage_tables(graph, job, self.kinds, stage, batch, cost=self.cost(batch))
            self.segments_at[batch] = _segments(tables, sizes_at(graph, job, batch), batch)
        return self.segments_at[batch]

    def samples(self, layout: Layout) -> int:
        """Returns the samples that one device of a layout sees in a microbatch."""
        batch = self.space.problem.job.batch
        assert batch is not None
        return batch // layout.rounds // layout.copies

    def columns(self, devices: Sequence[int]) -> list[int]:
        """Returns the kinds of devices as columns of costs."""
        cluster = self.space.problem.cluster
        return sorted({self.kinds.index(cluster.devices[device].kind) for device in devices})

    def cut(self, layout: Layout, *, margin: float = 1.0) -> Candidate | None:
        """Returns the layout with its best cuts; recomputing only where it does not fit otherwise.

        None where there are fewer places than stages, or nothing fits.

        Args:
            layout: the layout.
            margin: fraction of the room of a device that may be used.
        """
        stages = StageCosts(self, layout, margin)
        for recompute in ("none", "full"):
            found = best_cuts(stages.seconds(recompute), stages.hops(), layout.rounds)
            if found is not None:
                bounds = tuple(self.places[list(found.bounds)].tolist())
                return Candidate(
                    layout=layout, bounds=bounds, recompute=(recompute,) * layout.num_stages
                )
        return None

    def evenly(self, candidate: Candidate) -> Candidate | None:
        """Returns a candidate with cuts that give each stage about the same work, if any do.

        The work is that on the fastest kind of its devices; what crosses is not looked at.
        """
        places = np.concatenate([[0], self.cuts, [len(self.order)]])
        if len(places) <= candidate.layout.num_stages:
            return None
        devices = [device for rank in candidate.layout.devices for device in rank]
        ahead = np.concatenate([[0.0], np.cumsum(self.space.work[self.order][:, devices].min(1))])
        ahead[~np.isfinite(ahead)] = ahead[np.isfinite(ahead)].max()
        parts = equal_split(np.diff(ahead[places]), candidate.layout.num_stages)
        return replace(candidate, bounds=tuple(places[parts].tolist()), method="equal")

    def allows(self, candidate: Candidate) -> bool:
        """Whether every unit may run on the devices of its stage."""
        for stage, (begin, end) in enumerate(pairwise(candidate.bounds)):
            devices = list(candidate.layout.stage_devices(stage))
            if not self.space.allowed[self.order[begin:end]][:, devices].all():
                return False
        return True


class StageCosts:
    """What the stages of a layout take between any two places."""

    def __init__(self, chain: Chain, layout: Layout, margin: float) -> None:
        self.chain, self.layout, self.margin = chain, layout, margin
        self.segments = chain.segments(chain.samples(layout))

    def seconds(self, recompute: Recompute) -> NDArray[np.float64]:
        """Returns seconds per microbatch, [stage, place, place]; inf where it may not be.

        Args:
            recompute: of all stages; under ``full`` activations are taken to need no memory.
        """
        found = []
        for stage in range(self.layout.num_stages):
            devices = self.layout.stage_devices(stage)
            legal = self._room(stage, devices, recompute) & self._allowed(devices)
            found.append(np.where(legal, self._time(devices, recompute), np.inf))
        return np.array(found)

    def hops(self) -> NDArray[np.float64]:
        """Returns seconds of what goes into a stage and back, per microbatch, [stage, place]."""
        cluster = self.chain.space.problem.cluster
        crossing = self.segments.crossing
        found = np.zeros((self.layout.num_stages, len(crossing)))
        for stage in range(1, self.layout.num_stages):
            before, here = (self.layout.stage_devices(s) for s in (stage - 1, stage))
            for pair in set(zip(before, here, strict=True)):
                if pair[0] != pair[1]:
                    latency, bandwidth = (
                        float(table[pair])
                        for table in (cluster.route_latency, cluster.route_bandwidth)
                    )
                    time = 2 * latency + crossing / bandwidth if bandwidth else np.inf
                    found[stage] = np.maximum(found[stage], time)
        return found

    def _time(self, devices: Sequence[int], recompute: Recompute) -> NDArray[np.float64]:
        segments, rounds = self.segments, self.layout.rounds
        columns = self.chain.columns(devices)
        seconds = segments.seconds + segments.accumulate * (1.0 - 1.0 / rounds)
        if recompute != "none":
            seconds = seconds + segments.forward
        on_device, by_host = (_between(values[:, columns]) for values in (seconds, segments.launch))
        if self.chain.space.problem.settings.launch == "graph":
            by_host = np.zeros_like(by_host)
        time: NDArray[np.float64] = np.maximum(on_device, by_host).max(axis=2)
        return time

    def _room(self, stage: int, devices: Sequence[int], recompute: Recompute) -> NDArray[np.bool_]:
        """Returns whether the segments from one place to another fit, [place, place]."""
        segments, layout, problem = self.segments, self.layout, self.chain.space.problem
        held, state, gradient, saved, kept = (
            _between(values)
            for values in (
                segments.held,
                segments.state,
                segments.gradient,
                segments.saved,
                segments.kept,
            )
        )
        to_input, to_weight = (counts[stage] for counts in layout.in_flight())
        grads = 1 + (layout.copies > 1) + (layout.rounds > 1)  # in buckets, and to be added
        total = held + gradient * grads + segments.extra
        total += state / (layout.copies if layout.sharding else 1)
        if recompute == "none":
            total += saved * to_input + kept * max(0, to_weight - to_input)
        if layout.is_asynchronous:
            total += held * (to_input - 1)  # versions of the weights
        room = [
            (problem.capacity[device] - problem.context[device])
            / (1.0 + problem.fragmentation[device])
            for device in devices
        ]
        fits: NDArray[np.bool_] = total <= min(room) * self.margin
        return fits

    def _allowed(self, devices: Sequence[int]) -> NDArray[np.bool_]:
        """Returns whether units between two places may be on all devices, [place, place]."""
        chain = self.chain
        bad = ~chain.space.allowed[chain.order][:, list(devices)].all(axis=1)
        ahead = np.concatenate([[0], np.cumsum(bad)])[chain.places]
        place = np.arange(len(ahead))
        legal: NDArray[np.bool_] = ahead[None, :] == ahead[:, None]
        return legal & (place[None, :] > place[:, None])


def _between(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns sums over the segments from one place to another, [place, place, ...]."""
    ahead = np.concatenate([np.zeros((1, *values.shape[1:])), np.cumsum(values, axis=0)])
    sums: NDArray[np.float64] = ahead[None] - ahead[:, None]
    return sums


def _segments(tables: StageTables, sized: Sized, batch: int) -> Segments:
    seconds, launch = tables.seconds, tables.launch
    count = tables.num_stages
    extra = np.zeros((count + 1, count + 1))
    most = tables.extra.max(axis=1)
    for place in range(count):
        extra[place, place + 1 :] = np.maximum.accumulate(most[place:])
    down = _across(tables.cut.forward, sized.tensor_bytes, count)
    up = _across(tables.cut.backward, sized.tensor_bytes, count)
    return Segments(
        seconds=seconds[:, Phase.F] + seconds[:, Phase.B],
        launch=launch[:, Phase.F] + launch[:, Phase.B],
        forward=seconds[:, Phase.F],
        update=seconds[:, Phase.U],
        accumulate=tables.accumulate,
        saved=tables.saved.astype(np.float64),
        kept=tables.kept.astype(np.float64),
        held=(tables.parameters + tables.resident).astype(np.float64),
        state=tables.state_bytes.astype(np.float64),
        gradient=tables.gradient.astype(np.float64),
        extra=extra,
        crossing=down + up,
        batch=batch,
    )


def _across(messages: Messages, num_bytes: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Returns bytes that go over each place, [place]; a tensor counts once."""
    first = np.minimum(messages.source, messages.target)
    last = np.maximum(messages.source, messages.target)
    return _spread(messages.tensor, first, last, num_bytes, count)


def _spread(
    tensor: NDArray[np.integer],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    num_bytes: NDArray[np.int64],
    count: int,
) -> NDArray[np.float64]:
    """Returns bytes of tensors, each on the way from its first item to its last, [item + 1].

    Place k is between items k - 1 and k.
    """
    low = np.full(len(num_bytes), count, np.int64)
    high = np.zeros(len(num_bytes), np.int64)
    np.minimum.at(low, tensor, first)
    np.maximum.at(high, tensor, last)
    moved = np.flatnonzero(low < high)
    change = np.zeros(count + 2)
    np.add.at(change, low[moved] + 1, num_bytes[moved])
    np.add.at(change, high[moved] + 1, -num_bytes[moved].astype(np.float64))
    return np.cumsum(change)[:-1]


def _crossing_of_units(space: PlacementSpace, rank: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns about the bytes that go over a cut before each unit of the chain, [unit + 1]."""
    graph = space.problem.graph
    producer, consumer, tensor = graph.edges()
    moves = (graph.phase[producer] != Phase.U) & (graph.phase[consumer] != Phase.U)
    ends = np.stack([rank[graph.unit[producer[moves]]], rank[graph.unit[consumer[moves]]]])
    return _spread(
        tensor[moves], ends.min(axis=0), ends.max(axis=0), space.tensor_bytes, space.num_units
    )
