"""Families of tasks to train on: models by name, graph files, and graphs that are generated.

``generated:8`` stands for eight random training steps. Each has a forward pass of cells in a row,
whose branches run side by side, a backward pass that mirrors it, and one update per cell; sizes and
shapes of the cells are drawn from wide ranges, so that a policy meets many balances of compute,
traffic and memory; three in ten do not fit on one GPU of 16 GB.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agents.fidelity import training_settings
from agents.planners.space import PlacementSpace
from agents.task import PlacementTask
from simcore import Cluster, GraphBuilder, Job, OpGraph, Problem, Settings
from simcore.errors import UsageError
from simcore.graph import Out
from simcore.signature import OpClass, Phase
from simcore.sources import load_graph

_GENERATED = "generated:"
_MEASURED_ON = "V100-SXM2-16GB"  # what the seconds are taken to be of; other kinds scale them
_LARGE = 0.3  # of the graphs do not fit on one GPU
_GPU = 16e9  # bytes
_CLASSES = (OpClass.MATMUL, OpClass.CONVOLUTION, OpClass.ATTENTION, OpClass.POINTWISE)


def family(sources: Sequence[str], seed: int = 0) -> list[tuple[OpGraph, Job]]:
    """Returns the graphs that sources name, each with its job.

    Args:
        sources: what `load_graph` takes, or ``generated:COUNT``.
        seed: of what is generated.

    Raises:
        UsageError: a count that is no whole number.
        GraphError: there is no such model or file.
    """
    graphs: list[tuple[OpGraph, Job]] = []
    for source in sources:
        if not source.startswith(_GENERATED):
            graphs.append(load_graph(source)[:2])
            continue
        count = source.removeprefix(_GENERATED)
        if not (count.isascii() and count.isdigit() and int(count)):
            raise UsageError(f"{source}: write generated:COUNT")
        first = len(graphs)
        graphs += [
            (generated(seed + first + number), Job(assume_linear=True))
            for number in range(int(count))
        ]
    return graphs


def tasks_of(
    graphs: Sequence[tuple[OpGraph, Job]], clusters: Sequence[Cluster], *, num_groups: int
) -> list[PlacementTask]:
    """Returns a task for each graph on each cluster, simulated as policies are trained."""
    return [
        PlacementTask.build(
            PlacementSpace.build(
                Problem.build(graph, cluster, job, training_settings(cluster, Settings()))
            ),
            num_groups=num_groups,
        )
        for graph, job in graphs
        for cluster in clusters
    ]


def generated(seed: int) -> OpGraph:
    """Returns a random training step; the same seed gives the same."""
    rng = np.random.default_rng([seed, 7])
    builder = GraphBuilder(f"generated-{seed}")
    scale = _Scale(10.0 ** rng.uniform(-4, -2.5), 10.0 ** rng.uniform(8.5, 10.5))
    cells = [
        [int(rng.integers(1, 7)) for _ in range(int(rng.choice([1, 1, 2, 3, 4])))]
        for _ in range(int(rng.integers(4, 17)))
    ]  # [cell][branch] steps
    held = int(10.0 ** rng.uniform(6, 7.5))  # bytes of a parameter
    if rng.random() < _LARGE:
        held = int(_GPU * rng.uniform(1.0, 2.5) / sum(map(sum, cells)))
    entry = builder.op("input", op_class=OpClass.INPUT, outputs=(Out(1000),), kernels=0, seconds=0)
    forward, last = list[_Forward](), builder.outputs(entry)[0]
    for cell, branches in enumerate(cells):
        ends = []
        for branch, steps in enumerate(branches):
            end = last
            for step in range(steps):
                inputs = (end, builder.parameter(f"w{len(forward)}", held))
                name = f"cell{cell}.{branch}.{step}"
                forward.append(_draw(builder, name, inputs, scale, rng))
                end = forward[-1].output
            ends.append(end)
        forward.append(_draw(builder, f"join{cell}", tuple(ends), scale, rng))
        last = forward[-1].output
    _mirror(builder, forward)
    return builder.build(measured_on=_MEASURED_ON)


class _Scale(NamedTuple):
    """How large the ops of a graph are."""

    seconds: float  # of a typical op
    traffic: float  # bytes per second of compute


class _Forward(NamedTuple):
    """A forward op."""

    op: int
    output: int  # tensor
    inputs: tuple[int, ...]  # tensors
    seconds: float


def _draw(
    builder: GraphBuilder,
    name: str,
    inputs: tuple[int, ...],
    scale: _Scale,
    rng: np.random.Generator,
) -> _Forward:
    """Adds a forward op of random class and size."""
    seconds = scale.seconds * float(rng.lognormal(0.0, 0.7))
    size = 1 + int(scale.traffic * seconds * rng.uniform(0.05, 1.0))
    kind = _CLASSES[int(rng.integers(len(_CLASSES)))]
    op = builder.op(name, op_class=kind, inputs=inputs, outputs=(Out(size),), seconds=seconds)
    return _Forward(op, builder.outputs(op)[0], inputs, seconds)


def _mirror(builder: GraphBuilder, forward: Sequence[_Forward]) -> None:
    """Adds a backward op and an update for each forward op, last first, in its unit."""
    gradients: dict[int, list[int]] = {}  # of the tensor that an op made
    for number, done in enumerate(reversed(forward)):
        back = builder.op(
            f"back{number}", phase=Phase.B, op_class=OpClass.OTHER, unit_of=done.op,
            inputs=(done.output, *gradients.get(done.output, ())),
            outputs=(Out(1000 + int(1e8 * done.seconds)),), seconds=2 * done.seconds,
        )  # fmt: skip
        for source in done.inputs:
            gradients.setdefault(source, []).append(builder.outputs(back)[0])
        builder.op(
            f"update{number}", phase=Phase.U, op_class=OpClass.UPDATE, unit_of=done.op,
            inputs=builder.outputs(back), seconds=0.05 * done.seconds,
        )  # fmt: skip
