"""What pipelines take: about, to try the likely ones first, and at least, whatever their cuts."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agents.planners.pipeline_chain import Chain, Segments
from agents.planners.pipeline_layouts import Layout
from simcore.bounds import ROUNDING
from simcore.graph import OpGraph, Phase
from simcore.stages import backward_phases

_UPDATES = 2  # ring passes of gradients


def estimate(chain: Chain, layout: Layout) -> float:
    """Returns about the step time of a layout with good cuts, in s.

    Perfectly balanced stages, the fill and drain of the schedule, hops at the mean size, the
    updates, and gradients summed after the backward. Where activations look too large, the forward
    runs twice.
    """
    segments = chain.segments(chain.samples(layout))
    work = np.maximum(segments.seconds, segments.launch) + segments.accumulate
    total, heaviest = work.sum(axis=0), work.max(axis=0)  # [kind]
    if _is_tight(chain, layout, segments):
        total = total + segments.forward.sum(axis=0)
    columns = [chain.columns(rank) for rank in layout.devices]
    pace = 1.0 / sum(1.0 / max(float(total[kind].max()), 1e-12) for kind in columns)
    pace = max(pace, *(float(heaviest[kind].min()) for kind in columns))
    hop = _hop(chain, layout, segments)
    once = float(segments.update.sum(axis=0).max()) / layout.num_ranks
    if layout.sharding:
        once /= layout.copies
    filling = (layout.num_ranks - 1) * (layout.fill * pace + hop)
    return layout.rounds * max(pace, hop) + filling + once + _sums(chain, layout, segments)


def _is_tight(chain: Chain, layout: Layout, segments: Segments) -> bool:
    """Whether activations of the microbatches in flight look too large for the devices."""
    problem, ranks = chain.space.problem, layout.num_ranks
    held = segments.held + segments.state + segments.gradient * (1 + (layout.rounds > 1))
    in_flight = layout.most_in_flight
    needed = (held.sum() + segments.saved.sum() * in_flight / layout.per_rank) / ranks
    return bool(needed > problem.capacity[[d for rank in layout.devices for d in rank]].min())


def _hop(chain: Chain, layout: Layout, segments: Segments) -> float:
    """Returns seconds of a typical hop there and back."""
    cluster = chain.space.problem.cluster
    pairs = list(zip(layout.devices, layout.devices[1:], strict=False))
    inner = segments.crossing[1:-1]
    size = float(np.median(inner)) if len(inner) else 0.0
    slowest = min(float(cluster.route_bandwidth[a[0], b[0]]) for a, b in pairs)
    latency = max(float(cluster.route_latency[a[0], b[0]]) for a, b in pairs)
    return 2 * latency + size / slowest if slowest else np.inf


def _sums(chain: Chain, layout: Layout, segments: Segments) -> float:
    """Returns seconds to sum the gradients of the copies of a stage."""
    copies = layout.copies
    if copies == 1:
        return 0.0
    cluster = chain.space.problem.cluster
    slowest = min(
        float(cluster.route_bandwidth[a, b]) for rank in layout.devices for a in rank for b in rank
    )
    size = float(segments.gradient.sum()) / layout.num_ranks
    return _UPDATES * (copies - 1) / copies * size / slowest if slowest else np.inf


def pipeline_bound(chain: Chain, layouts: Sequence[Layout]) -> float:
    """Returns seconds that none of the layouts can beat, with any cuts; inf if there are none.

    For each number of copies and microbatches the largest of

    - the work of all microbatches and one update, divided at will: any weights of devices with sum
      1 bound the busiest one, and each unit counts where its weighted seconds are least;
    - the unit with most work, which the copies of one stage share;
    - where the schedule waits for the update, the longest path of one microbatch, each op on the
      fastest device.

    Transfers, launches, sums of gradients and memory take nothing.
    """
    cases = {(layout.copies, layout.rounds, layout.is_asynchronous) for layout in layouts}
    return min((_bound(chain, *case) for case in sorted(cases)), default=np.inf)


def _bound(chain: Chain, copies: int, rounds: int, asynchronous: bool) -> float:
    problem, space = chain.space.problem, chain.space
    assert problem.job.batch is not None
    seconds, once = seconds_of_ops(chain, problem.job.batch // rounds // copies)
    work, update = work_of_units(chain, seconds, once)
    whole = (rounds * copies * work + update)[:, list(space.devices)]
    may = np.isfinite(whole)
    finite = np.where(may, whole, 0.0)
    load = finite.sum(axis=0)
    weight = np.where(load > 0, 1.0 / np.maximum(load, 1e-300), 0.0)
    weighted = np.where(may, finite * weight / (weight.sum() or 1.0), np.inf)
    bounds = [
        float(weighted.min(axis=1).sum()),
        float((whole / copies).min(axis=1).max()),
        0.0 if asynchronous else longest_path(chain, np.where(once[:, None], 0.0, seconds)),
    ]
    return max(bounds) * (1.0 - ROUNDING)


def seconds_of_ops(chain: Chain, samples: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns seconds of ops where a device sees so many samples, [op, dev], and which run once.

    inf where an op may not be; once a step run, [op], updates and what belongs to them.

    Raises:
        JobError: measured seconds at another batch or kind.
    """
    return _seconds(chain, samples), once_a_step(chain.space.problem.graph)


def work_of_units(
    chain: Chain, seconds: NDArray[np.float64], once: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns seconds of units for each microbatch and for each step, both [unit, dev]."""
    unit = chain.space.problem.graph.unit
    shape = (chain.space.num_units, seconds.shape[1])
    work, update = np.zeros(shape), np.zeros(shape)
    np.add.at(work, unit, np.where(once[:, None], 0.0, seconds))
    np.add.at(update, unit, np.where(once[:, None], seconds, 0.0))
    return work, update


def once_a_step(graph: OpGraph) -> NDArray[np.bool_]:
    """Returns what may run once a step, [op]: updates and what sums gradients of several units."""
    phase = backward_phases(graph)
    producer, consumer, _ = graph.edges()
    reads = (phase[producer] == Phase.W) & (phase[consumer] == Phase.W)
    apart = graph.unit[producer] != graph.unit[consumer]
    once: NDArray[np.bool_] = phase == Phase.U
    while True:
        more = reads & ~once[consumer] & (apart | once[producer])
        if not more.any():
            return once
        once[consumer[more]] = True


def _seconds(chain: Chain, samples: int) -> NDArray[np.float64]:
    """Returns the seconds of ops at so many samples, [op, dev]; inf where they may not run."""
    space, cost = chain.space, chain.cost(samples)
    kinds = [chain.kinds.index(device.kind) for device in space.problem.cluster.devices]
    usable = np.zeros(space.num_devices, np.bool_)
    usable[list(space.devices)] = True
    allowed = (space.allowed & usable)[space.problem.graph.unit]
    return np.where(allowed, cost.seconds[:, kinds, 0], np.inf)


def longest_path(chain: Chain, seconds: NDArray[np.float64]) -> float:
    """Returns the longest path with every op on its fastest device, in s; seconds is [op, dev]."""
    graph = chain.space.problem.graph
    duration = seconds.min(axis=1).tolist()
    producers, consumers, _ = graph.edges()
    ready = [0.0] * graph.num_ops
    order = np.argsort(producers, kind="stable")
    for producer, consumer in zip(
        producers[order].tolist(), consumers[order].tolist(), strict=True
    ):
        ready[consumer] = max(ready[consumer], ready[producer] + duration[producer])
    return max((r + d for r, d in zip(ready, duration, strict=True)), default=0.0)
