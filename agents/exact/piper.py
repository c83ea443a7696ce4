"""Piper's problem and objective (Tarnawski et al., NeurIPS 2021).

Data, tensor and pipeline parallelism and recomputation are chosen together; see `piper_planner`.

Seconds per sample of a stage with d replicas of t devices: compute / d, plus bytes over the
bandwidth: 2 (edge + sync) / d for each edge that leaves or enters, 4 (d - 1) / d / N of the
parameters, N being the microbatches of a batch. The result is the slowest stage's. A device holds
A x (microbatches in flight) + B, in flight being the sum of the degrees d from this stage to the
last over d, rounded up. Every d divides N, and their sum is at most N. The file's sync "times" are
bytes. Within a stage configurations are chosen by the authors' heuristic, which is not exact; the
program over downsets is.

The published resnet and gnmt files have times in milliseconds, so bytes over bytes/s is a thousand
times too small beside them: scale their times by 1e-3 (`read_piper` takes a factor).
"""

from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec
import networkx as nx

from simcore.errors import GraphError
from simcore.frontends.files import check_number, read_bytes

VANILLA, RECOMPUTE = "vanilla", "activation recomp"


class Config(msgspec.Struct, rename="camel", frozen=True):
    """One way to run a node on so many devices."""

    id: str
    time_per_sample: float  # s, forward and backward
    parameter_size: float  # bytes
    memory_usage_a: float = msgspec.field(name="memoryUsageA")  # bytes per microbatch in flight
    memory_usage_b: float = msgspec.field(name="memoryUsageB")  # bytes
    sync_time_fw: dict[str, float] = {}  # predecessor -> bytes
    sync_time_bw: dict[str, float] = {}  # successor -> bytes


class PiperNode(msgspec.Struct, frozen=True):
    """One layer."""

    id: int
    configs: dict[str, list[Config]] = msgspec.field(name="TMPCs")  # tensor degree -> ways
    name: str = ""


class PiperEdge(msgspec.Struct, rename="camel", frozen=True):
    """One tensor between layers."""

    source_id: int
    dest_id: int
    communication_cost: float  # bytes


class PiperProblem(msgspec.Struct, rename="camel", frozen=True):
    """A file: layers and machine."""

    max_memory_per_device: float  # bytes
    max_devices: int
    bandwidth: float  # bytes/s
    mbs_in_batch: int
    nodes: list[PiperNode]
    edges: list[PiperEdge]


class PiperStage(NamedTuple):
    """One stage of a plan."""

    nodes: tuple[int, ...]  # the file's ids, in topological order
    replicas: int
    tensor_degree: int
    configs: tuple[str, ...]  # of each node


class PiperPlan(NamedTuple):
    """The stages, first to last, and what the objective says."""

    seconds_per_sample: float
    stages: tuple[PiperStage, ...]


def read_piper(path: str | Path, *, time_unit: float = 1.0) -> PiperProblem:
    """Returns the problem of a Piper file.

    Args:
        path: the JSON file.
        time_unit: seconds of the file's unit of time.

    Raises:
        GraphError: the file cannot be read or breaks the format.
    """
    try:
        problem = msgspec.json.decode(read_bytes(path), type=PiperProblem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GraphError(f"{path}: not a Piper file: {error}") from None
    _check(problem, str(path))
    if time_unit == 1.0:
        return problem
    nodes = [
        msgspec.structs.replace(
            node,
            configs={
                degree: [
                    msgspec.structs.replace(way, time_per_sample=way.time_per_sample * time_unit)
                    for way in ways
                ]
                for degree, ways in node.configs.items()
            },
        )
        for node in problem.nodes
    ]
    return msgspec.structs.replace(problem, nodes=nodes)


def _check(problem: PiperProblem, source: str) -> None:
    ids = [node.id for node in problem.nodes]
    if not ids or len(set(ids)) < len(ids):
        raise GraphError(f"{source}: no nodes, or a node listed twice")
    if problem.max_devices < 1 or problem.mbs_in_batch < 1 or not problem.bandwidth > 0:
        raise GraphError(f"{source}: maxDevices, mbsInBatch and bandwidth must be positive")
    for edge in problem.edges:
        if edge.source_id not in ids or edge.dest_id not in ids:
            raise GraphError(f"{source}: edge {edge.source_id} -> {edge.dest_id}: no such node")
        check_number(edge.communication_cost, f"{source}: edge {edge.source_id}: bytes")
    for node in problem.nodes:
        for degree, ways in node.configs.items():
            if not (degree.isascii() and degree.isdigit() and int(degree) > 0):
                raise GraphError(f"{source}: node {node.id}: tensor degree {degree!r}")
            for way in ways:
                where = f"{source}: node {node.id}, degree {degree}"
                check_number(way.time_per_sample, f"{where}: timePerSample")
                check_number(way.memory_usage_a, f"{where}: memoryUsageA")
                check_number(way.memory_usage_b, f"{where}: memoryUsageB")
    if not nx.is_directed_acyclic_graph(_graph(problem)):
        raise GraphError(f"{source}: the edges have a cycle")


def _graph(problem: PiperProblem) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(node.id for node in problem.nodes)
    graph.add_edges_from((edge.source_id, edge.dest_id) for edge in problem.edges)
    return graph


def topological_ids(problem: PiperProblem) -> list[int]:
    """Returns the ids of the nodes in a topological order."""
    return list(nx.lexicographical_topological_sort(_graph(problem)))


def piper_seconds(problem: PiperProblem, stages: tuple[PiperStage, ...]) -> float:
    """Returns the objective of a plan; inf where it does not fit. Apart from the planner.

    Args:
        problem: the problem.
        stages: first to last.
    """
    degrees = [stage.replicas for stage in stages]
    behind = list(accumulate(reversed(degrees)))[::-1]
    devices = sum(stage.replicas * stage.tensor_degree for stage in stages)
    if devices > problem.max_devices or behind[0] > problem.mbs_in_batch:
        return float("inf")
    return max(
        _one_stage(problem, stage, -(-total // stage.replicas))
        for stage, total in zip(stages, behind, strict=True)
    )


def _one_stage(problem: PiperProblem, stage: PiperStage, in_flight: int) -> float:
    nodes = {node.id: node for node in problem.nodes}
    chosen = dict(zip(stage.nodes, stage.configs, strict=True))
    compute = moved = parameters = memory = 0.0
    for node, config in chosen.items():
        ways = nodes[node].configs.get(str(stage.tensor_degree), [])
        way = next((way for way in ways if way.id == config), None)
        if way is None:
            return float("inf")
        compute += way.time_per_sample
        parameters += way.parameter_size
        memory += way.memory_usage_a * in_flight + way.memory_usage_b
        for edge in problem.edges:
            if edge.dest_id == node and edge.source_id not in chosen:
                sync = way.sync_time_fw.get(str(edge.source_id), 0.0)
                moved += 2 * (edge.communication_cost + sync)
            if edge.source_id == node and edge.dest_id not in chosen:
                sync = way.sync_time_bw.get(str(edge.dest_id), 0.0)
                moved += 2 * (edge.communication_cost + sync)
    if memory > problem.max_memory_per_device or problem.mbs_in_batch % stage.replicas:
        return float("inf")
    d = stage.replicas
    moved = moved / d + 4 * (d - 1) * parameters / d / problem.mbs_in_batch
    return moved / problem.bandwidth + compute / d


def without(
    problem: PiperProblem, *, tensor: bool = False, recompute: bool = False
) -> PiperProblem:
    """Returns the problem without tensor parallelism, or without recomputation.

    Args:
        problem: the problem.
        tensor: whether degrees beyond 1 are left out.
        recompute: whether configurations that recompute activations are left out.
    """
    nodes = [
        msgspec.structs.replace(
            node,
            configs={
                degree: [way for way in ways if not (recompute and way.id == RECOMPUTE)]
                for degree, ways in node.configs.items()
                if not (tensor and degree != "1")
            },
        )
        for node in problem.nodes
    ]
    return msgspec.structs.replace(problem, nodes=nodes)
