"""JSON graphs of dnn-partitioning (device placement of DNN operators, 2020) -> fixed OpGraph.

Each node becomes one op. ``fpgaLatency`` (milliseconds on an accelerator) becomes the op's
seconds and ``cpuLatency`` its CPU seconds; a node that is not ``supportedOnFpga`` has infinite
seconds, so only CPUs may hold it. ``size`` is memory that the node's device holds for the whole
step, as in the paper's knapsack; the outputs counted by liveness come on top, so memory is never
underestimated. Nodes of one ``colorClass`` are one placement unit; ``isBackwardNode`` is phase B.

An edge carries ``size`` bytes, or, where the file gives only the time ``cost``, the bytes that
take that many milliseconds at 2 GiB/s, the rate of every published file. Edges of one node with
equal bytes carry the same tensor. Latencies contain the launch.
"""

import math
from collections import Counter
from pathlib import Path
from typing import TypeVar

import msgspec

from simcore.errors import GraphError
from simcore.frontends.files import check_number, read_bytes
from simcore.graph import GraphBuilder, OpGraph, Out
from simcore.signature import Phase
from simcore.topology import topological_order
from simcore.units import MS

BYTES_PER_COST = 2 * 2**30 / 1e3  # bytes; one unit of cost is a millisecond at 2 GiB/s

_Schema = TypeVar("_Schema", bound=msgspec.Struct)


class Node(msgspec.Struct):
    """One operator, as the file has it."""

    id: int
    fpga_latency: float = msgspec.field(name="fpgaLatency")  # ms
    cpu_latency: float = msgspec.field(name="cpuLatency")  # ms
    size: float  # bytes
    supported: int | bool = msgspec.field(name="supportedOnFpga", default=True)
    backward: int | bool = msgspec.field(name="isBackwardNode", default=False)
    color: int | None = msgspec.field(name="colorClass", default=None)
    name: str | None = None


class Edge(msgspec.Struct):
    """One use of a tensor, as the file has it."""

    source: int = msgspec.field(name="sourceId")
    target: int = msgspec.field(name="destId")
    cost: float = 0.0  # ms
    size: float | None = None  # bytes


class PartitioningFile(msgspec.Struct):
    """The operators and edges of a file, as it has them."""

    nodes: list[Node]
    edges: list[Edge]


class DeviceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that a file is posed for."""

    accelerators: int = msgspec.field(name="maxFPGAs")
    cpus: int = msgspec.field(name="maxCPUs")
    accelerator_memory: float = msgspec.field(name="maxSizePerFPGA")  # bytes


def read_dnn_partitioning(path: str | Path) -> OpGraph:
    """Returns the graph of a file; program order is topological, ties as the file lists nodes.

    Args:
        path: the JSON file.

    Raises:
        GraphError: the file cannot be read or breaks the format; names file, node or edge, reason.
    """
    return decode_partitioning(read_bytes(path), str(path))


def decode_partitioning(content: bytes, source: str) -> OpGraph:
    """Returns the graph of a file's content; `source` names the file in errors (GraphError)."""
    return _graph(_decode(content, PartitioningFile, source), source)


def read_partitioning(path: str | Path) -> PartitioningFile:
    """Returns a file's own records, checked: ids, edges and numbers make sense, there is no cycle.

    Args:
        path: the JSON file.

    Raises:
        GraphError: the file cannot be read or breaks the format; names file, node or edge, reason.
    """
    source = str(path)
    file = _decode(read_bytes(path), PartitioningFile, source)
    _by_id(file.nodes, source)
    _in_order(node_names(file.nodes), file.edges, source)
    return file


def read_device_limits(path: str | Path) -> DeviceLimits:
    """Returns how many devices, with how much memory, a file is posed for.

    Args:
        path: the JSON file.

    Raises:
        GraphError: the file cannot be read or does not say.
    """
    limits = _decode(read_bytes(path), DeviceLimits, str(path))
    for value in (limits.accelerators, limits.cpus, limits.accelerator_memory):
        check_number(value, f"{path}: device limits")
    return limits


def _decode(content: bytes, schema: type[_Schema], source: str) -> _Schema:
    try:
        return msgspec.json.decode(content, type=schema)
    except msgspec.DecodeError as error:  # ValidationError too
        raise GraphError(f"{source}: not a dnn-partitioning graph: {error}") from None
    except RecursionError:
        raise GraphError(f"{source}: JSON nested too deeply") from None
    except UnicodeDecodeError as error:
        raise GraphError(f"{source}: {error.reason} at byte {error.start}") from None


def _graph(file: PartitioningFile, source: str) -> OpGraph:
    nodes = _by_id(file.nodes, source)
    names = node_names(file.nodes)
    outgoing, order = _in_order(names, file.edges, source)
    ids = {name: node for node, name in names.items()}
    builder = GraphBuilder(Path(source).name)
    arriving: dict[int, list[int]] = {node: [] for node in nodes}
    first_of_color: dict[int, int] = {}
    for name in order:
        node = nodes[ids[name]]
        op = builder.op(
            name,
            phase=Phase.B if node.backward else Phase.F,
            inputs=arriving[node.id],
            outputs=[Out(num_bytes) for num_bytes in outgoing[node.id]],
            unit_of=None if node.color is None else first_of_color.get(node.color),
            kernels=0,
            resident=round(node.size),
            seconds=node.fpga_latency * MS if node.supported else math.inf,
            cpu_seconds=node.cpu_latency * MS,
        )
        if node.color is not None:
            first_of_color.setdefault(node.color, op)
        for tensor, readers in zip(builder.outputs(op), outgoing[node.id].values(), strict=True):
            for reader in readers:
                arriving[reader].append(tensor)
    return builder.build()


def _in_order(
    names: dict[int, str], edges: list[Edge], source: str
) -> tuple[dict[int, dict[int, list[int]]], list[str]]:
    """Returns the tensors of each node, as `_outgoing` does, and the names in topological order."""
    outgoing = _outgoing(edges, names, source)
    targets = {
        names[node]: [names[t] for ts in by_bytes.values() for t in ts]
        for node, by_bytes in outgoing.items()
    }
    return outgoing, topological_order(targets, source)


def _by_id(nodes: list[Node], source: str) -> dict[int, Node]:
    """Returns the nodes by id, with their numbers checked."""
    if not nodes:
        raise GraphError(f"{source}: no nodes")
    by_id: dict[int, Node] = {}
    for node in nodes:
        where = f"{source}: node {node.id}"
        if node.id in by_id:
            raise GraphError(f"{where} is listed twice")
        check_number(node.fpga_latency, f"{where}: fpgaLatency")
        check_number(node.cpu_latency, f"{where}: cpuLatency")
        check_number(node.size, f"{where}: size")
        by_id[node.id] = node
    return by_id


def node_names(nodes: list[Node]) -> dict[int, str]:
    """Returns one distinct name per node id: the file's, with the id where it is not enough."""
    count = Counter(node.name for node in nodes)
    return {
        node.id: node.name
        if node.name and count[node.name] == 1
        else f"{node.name or ''}#{node.id}"
        for node in nodes
    }


def _outgoing(
    edges: list[Edge], names: dict[int, str], source: str
) -> dict[int, dict[int, list[int]]]:
    """Returns node -> bytes -> readers: one entry per tensor of the node."""
    outgoing: dict[int, dict[int, list[int]]] = {node: {} for node in names}
    for edge in edges:
        where = f"{source}: edge {edge.source} -> {edge.target}"
        for node in (edge.source, edge.target):
            if node not in names:
                raise GraphError(f"{where}: there is no node {node}")
        check_number(edge.cost, f"{where}: cost")
        size = edge.cost * BYTES_PER_COST if edge.size is None else edge.size
        num_bytes = round(check_number(size, f"{where}: size"))
        outgoing[edge.source].setdefault(num_bytes, []).append(edge.target)
    return outgoing
