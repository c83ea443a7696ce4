"""The throughput problem of Tarnawski et al. (NeurIPS 2020): the most loaded device decides.

The load of an accelerator is the sum of its operators' times, forward and backward, plus the cost
of every tensor that enters or leaves it, each counted once: compute and transfers add up. A CPU
pays for its operators' CPU times only. Memory limits accelerators only. Operators of one colour
class share a device. The largest load is the time per sample of a full pipeline.

Devices are numbered: accelerators first, then CPUs. All times have the file's unit, which is not
stated; milliseconds fit the figures.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simcore.errors import GraphError
from simcore.frontends.dnn_partitioning import (
    DeviceLimits,
    PartitioningFile,
    read_device_limits,
    read_partitioning,
)

MAX_DEVICES = 256
_SAME_COST = 1e-6  # relative; edges of a node that differ by less carry the same tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MaxLoadProblem:
    """Operators, tensors and devices. Axes: node, tensor, reader (of all tensors), edge."""

    name: str
    node_ids: tuple[int, ...]  # [node] the file's ids
    accelerator_time: NDArray[np.float64]  # [node] file's unit; inf where unsupported
    cpu_time: NDArray[np.float64]  # [node] file's unit
    memory: NDArray[np.float64]  # [node] bytes
    is_backward: NDArray[np.bool_]  # [node]
    color: NDArray[np.int64]  # [node] placement class; dense, own class where the file has none
    tensor_node: NDArray[np.int64]  # [tensor] node that writes it
    tensor_cost: NDArray[np.float64]  # [tensor] file's unit
    first_reader: NDArray[np.int64]  # [tensor + 1] offsets into readers
    readers: NDArray[np.int64]  # [reader] nodes
    num_accelerators: int
    num_cpus: int
    capacity: float  # bytes of an accelerator

    @property
    def num_nodes(self) -> int:
        """Number of operators."""
        return len(self.node_ids)

    @property
    def num_devices(self) -> int:
        """Number of accelerators and CPUs."""
        return self.num_accelerators + self.num_cpus

    @property
    def edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sources and targets of all edges, [edge] each."""
        return np.repeat(self.tensor_node, np.diff(self.first_reader)), self.readers

    def device_name(self, device: int) -> str:
        """Returns what plans and reports call a device."""
        if device < self.num_accelerators:
            return f"accelerator{device}"
        return f"cpu{device - self.num_accelerators}"


def read_max_load(path: str | Path) -> MaxLoadProblem:
    """Returns the problem that a dnn-partitioning file poses, devices and memory included.

    Args:
        path: the JSON file.

    Raises:
        GraphError: the file cannot be read, breaks the format, has no devices, or an operator that
            runs before a backward one is read by a forward one.
    """
    return make_max_load(read_partitioning(path), read_device_limits(path), str(path))


def make_max_load(file: PartitioningFile, limits: DeviceLimits, source: str) -> MaxLoadProblem:
    """Returns the problem of a file's records; `source` names it in errors (GraphError)."""
    if not 1 <= limits.accelerators + limits.cpus <= MAX_DEVICES:
        raise GraphError(f"{source}: {limits.accelerators + limits.cpus} devices; 1 to 256 work")
    nodes = file.nodes
    index = {node.id: i for i, node in enumerate(nodes)}
    backward = np.array([bool(node.backward) for node in nodes])
    for edge in file.edges:
        if backward[index[edge.source]] and not backward[index[edge.target]]:
            raise GraphError(
                f"{source}: edge {edge.source} -> {edge.target}: from a backward operator to a "
                "forward one"
            )
    arcs = [(index[edge.source], index[edge.target], edge.cost) for edge in file.edges]
    owner, cost, first, readers = _tensors(arcs)
    classes: dict[tuple[bool, int], int] = {}
    for node in nodes:
        own = (True, node.id) if node.color is None else (False, node.color)
        classes.setdefault(own, len(classes))
    return MaxLoadProblem(
        name=Path(source).name,
        node_ids=tuple(index),
        accelerator_time=np.array([n.fpga_latency if n.supported else math.inf for n in nodes]),
        cpu_time=np.array([float(node.cpu_latency) for node in nodes]),
        memory=np.array([float(node.size) for node in nodes]),
        is_backward=backward,
        color=np.array(
            [
                classes[(True, node.id) if node.color is None else (False, node.color)]
                for node in nodes
            ]
        ),
        tensor_node=owner,
        tensor_cost=cost,
        first_reader=first,
        readers=readers,
        num_accelerators=limits.accelerators,
        num_cpus=limits.cpus,
        capacity=float(limits.accelerator_memory),
    )


def _tensors(
    arcs: list[tuple[int, int, float]],
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns owner, cost, first reader and readers of the tensors of (source, target, cost)."""
    owners: list[int] = []
    costs: list[float] = []
    readers: list[list[int]] = []
    for source, cost, target in sorted({(source, cost, target) for source, target, cost in arcs}):
        known = bool(owners) and owners[-1] == source and cost <= costs[-1] * (1 + _SAME_COST)
        if not known:
            owners.append(source)
            costs.append(cost)
            readers.append([])
        readers[-1].append(target)
    first = np.concatenate(([0], np.cumsum([len(each) for each in readers], dtype=np.int64)))
    flat = [node for each in readers for node in each]
    return (
        np.array(owners, np.int64),
        np.array(costs, np.float64),
        first.astype(np.int64),
        np.array(flat, np.int64),
    )


def device_loads(
    problem: MaxLoadProblem, placement: NDArray[np.integer]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns what a placement asks of the devices; written apart from every search.

    Args:
        problem: the problem.
        placement: device of each node, [node].

    Returns:
        (load in the file's unit, memory in bytes), each [device]. The load of an accelerator that
        holds an unsupported operator is infinite.
    """
    times = np.where(
        placement < problem.num_accelerators, problem.accelerator_time, problem.cpu_time
    )
    load: NDArray[np.float64] = _summed(placement, times, problem.num_devices)
    memory = _summed(placement, problem.memory, problem.num_devices)
    tensor = np.repeat(np.arange(len(problem.tensor_node)), np.diff(problem.first_reader))
    home = placement[problem.tensor_node]
    away = placement[problem.readers]
    leaves = away != home[tensor]
    pairs = np.unique(np.stack([tensor[leaves], away[leaves]]), axis=1)
    senders = np.unique(tensor[leaves])
    transfers = _summed(pairs[1], problem.tensor_cost[pairs[0]], problem.num_devices)
    transfers += _summed(home[senders], problem.tensor_cost[senders], problem.num_devices)
    load[: problem.num_accelerators] += transfers[: problem.num_accelerators]
    return load, memory


def _summed(
    group: NDArray[np.integer], weight: NDArray[np.float64], count: int
) -> NDArray[np.float64]:
    return np.bincount(group, weight, count).astype(np.float64)


def objective(problem: MaxLoadProblem, placement: NDArray[np.integer]) -> float:
    """Returns the largest load of a placement, [node]; infinite where it breaks a limit.

    The limits: memory of accelerators, supported operators, one device per colour class.
    """
    load, memory = device_loads(problem, placement)
    fits = (memory[: problem.num_accelerators] <= problem.capacity).all()
    first = np.zeros(problem.color.max() + 1, np.int64)
    first[problem.color] = placement
    together = (first[problem.color] == placement).all()
    return float(load.max()) if fits and together else math.inf
