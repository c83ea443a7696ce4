"""A placement of a dnn-partitioning file -> a cluster of the file's devices and a Plan.

The file says how many devices there are and how much memory accelerators have; what it does not say
is filled in: accelerators and CPUs have the profiles below (times come from the file), and every
accelerator has a link of 2 GiB/s to the host, the rate of the published transfer costs.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agents.exact.max_load import MaxLoadProblem
from simcore.cluster import Cluster
from simcore.frontends.dnn_partitioning import BYTES_PER_COST, node_names, read_partitioning
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.plan import Plan
from simcore.units import GB, GiB

ACCELERATOR_KIND = "V100-SXM2-16GB"
CPU_KIND = "CPU-2x-Xeon-E5-2698v4"
_HOST = "host"
_CPU_GBPS = 1000.0  # host memory; the problem lets a CPU transfer for nothing


def cluster_text(problem: MaxLoadProblem) -> str:
    """Returns the TOML of a cluster with the problem's devices, under their names."""
    memory = max(round(problem.capacity), 1) / GiB
    lines = [
        'format = "placewright-cluster/1"',
        f'name = "{problem.num_accelerators} accelerators and {problem.num_cpus} CPUs"',
        'description = "the devices that a dnn-partitioning file is posed for"',
        f'switches = ["{_HOST}"]',
    ]
    rate = BYTES_PER_COST * 1e3 / GB
    for device in range(problem.num_devices):
        name = problem.device_name(device)
        is_cpu = device >= problem.num_accelerators
        lines += ["", "[[devices]]", f'name = "{name}"']
        lines += [f'kind = "{CPU_KIND if is_cpu else ACCELERATOR_KIND}"']
        lines += [] if is_cpu else [f"memory_GiB = {memory!r}"]
        lines += ["", "[[links]]", f'a = "{name}"', f'b = "{_HOST}"']
        lines += [f"bandwidth_GBps = {_CPU_GBPS if is_cpu else rate!r}", "latency_us = 0.0"]
    return "\n".join(lines) + "\n"


def make_placement_plan(
    path: str | Path,
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    placement: NDArray[np.int64],
) -> Plan:
    """Returns the plan of one stage that places the file's operators so.

    Args:
        path: the dnn-partitioning file.
        graph: the graph of that file.
        cluster: the cluster of `cluster_text`.
        job: the job.
        placement: device of each of the file's nodes, [node].
    """
    names = node_names(read_partitioning(path).nodes)
    device = dict(zip(names.values(), placement.tolist(), strict=True))
    return Plan.from_placement(graph, cluster, job, [device[name] for name in graph.unit_names])
