"""A pipeline task -> the numbers a policy sees; none depends on a graph's or a cluster's ids."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.observe import observe_cluster
from agents.pipelines.env import DAG_SCHEDULES, PipelineTask, Rhythm

NODE_FEATURES = 14
EDGE_FEATURES = 2
RHYTHM_FEATURES = 3 + len(DAG_SCHEDULES)
_WAVES = 3  # of a rank code


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineObservation:
    """What a policy sees of a task before anything is decided. Axes: node, edge, dev (usable)."""

    nodes: NDArray[np.float32]  # [node, feature]
    source: NDArray[np.int64]  # [edge] node
    target: NDArray[np.int64]  # [edge] node
    edges: NDArray[np.float32]  # [edge, feature]
    devices: NDArray[np.float32]  # [dev, feature]
    pairs: NDArray[np.float32]  # [dev, dev, feature]
    rhythms: NDArray[np.float32]  # [rhythm, feature]
    work: NDArray[np.float32]  # [node] part of the whole
    memory: NDArray[np.float32]  # [node] bytes held at least, in mean devices
    sent: NDArray[np.float32]  # [edge] part of all bytes on edges


def observe_pipeline(task: PipelineTask) -> PipelineObservation:
    """Returns what a policy sees of a task.

    Of each node: work, activations kept, bytes held, what comes and goes, how many units it has,
    its depth from either end by work, and the code of its place. Of each edge: its bytes. Of
    devices and routes: as `agents.observe.observe_cluster`. Of each rhythm: microbatches, samples
    of one, schedule and whether the optimizer is sharded.
    """
    nodes = task.simulator.nodes
    batch = nodes.space.problem.job.batch or 1
    costs = nodes.costs(batch)
    source, target = np.array(nodes.edges, np.int64).reshape(-1, 2).T
    size = nodes.num_nodes
    work = np.where(np.isfinite(costs.seconds), costs.seconds, 0.0).min(axis=1)
    top, bottom = _levels(nodes.edges, work)
    rank = np.arange(size) / max(1, size - 1)
    angle = np.pi * rank[:, None] * 2.0 ** np.arange(_WAVES)
    columns = (
        _share(work), _share(costs.saved), _share(task.held),
        _share(np.bincount(target, costs.sent, size).astype(np.float64)),
        _share(np.bincount(source, costs.sent, size).astype(np.float64)),
        _share(np.bincount(nodes.node, minlength=size).astype(np.float64)),
        top / max(top.max(), 1e-12), bottom / max(bottom.max(), 1e-12),
    )  # fmt: skip
    seen = observe_cluster(nodes.space)
    usable = list(nodes.space.devices)
    return PipelineObservation(
        nodes=np.concatenate(
            [np.stack(columns, axis=1), np.sin(angle), np.cos(angle)], axis=1
        ).astype(np.float32),
        source=source,
        target=target,
        edges=np.stack([_share(costs.sent), np.ones(len(source))], axis=1).astype(np.float32),
        devices=seen.devices[usable],
        pairs=seen.pairs[np.ix_(usable, usable)],
        rhythms=np.array([_rhythm(r, batch) for r in task.rhythms], np.float32),
        work=(work / max(float(work.sum()), 1e-12)).astype(np.float32),
        memory=(task.held / max(float(task.rooms.mean()), 1.0)).astype(np.float32),
        sent=(costs.sent / max(float(costs.sent.sum()), 1.0)).astype(np.float32),
    )


def _rhythm(rhythm: Rhythm, batch: int) -> list[float]:
    names = [float(rhythm.schedule == name) for name in DAG_SCHEDULES]
    samples = batch / rhythm.microbatches
    return [np.log2(rhythm.microbatches) / 6, np.log2(samples) / 10, rhythm.sharding, *names]


def _share(values: NDArray[np.float64]) -> NDArray[np.float64]:
    share: NDArray[np.float64] = np.sqrt(values / max(float(values.max(initial=0.0)), 1e-300))
    return share


def _levels(
    edges: tuple[tuple[int, int], ...], work: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns seconds on the longest way to each node, and from it to the end, both [node]."""
    top, bottom = np.zeros(len(work)), work.copy()
    for source, target in sorted(edges, key=lambda edge: edge[1]):
        top[target] = max(top[target], top[source] + work[source])
    for source, target in sorted(edges, reverse=True):
        bottom[source] = max(bottom[source], work[source] + bottom[target])
    return top, bottom
