"""Clusters of published runs: nodes of GPUs of one kind, and one network port for each GPU."""

import functools
import itertools
from dataclasses import dataclass

from calibration.published.rows import Run
from simcore.cluster import Cluster, Device, Link
from simcore.profile_store import load_link
from simcore.units import GB, US

FABRIC = "fabric"
_PORT_LATENCY = 5 * US  # of each of the two hops between nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the nodes of a source are.

    Attributes:
        kind: of its devices.
        link: kind of the links inside a node.
        curves: measurements of collectives on that very machine, as `simcore.curves` names it.
        switched: whether a node's links go to a switch; else each pair of GPUs has one.
        bandwidth: of a link, bytes/s; 0 = its kind's.
        port: share of a GPU of its node's network, bytes/s.
        per_node: GPUs of a node, where the row does not say.
    """

    kind: str
    link: str
    curves: str = ""
    switched: bool = True
    bandwidth: float = 0.0
    port: float = 0.0
    per_node: int = 8


_A100 = Machine(kind="A100-SXM4-80GB", link="NVLink3-NVSwitch")
_MACHINES = {  # (source, or source and part, GPU as its rows name it)
    ("VIA-Research/vTrain/single", "A100"): Machine(
        kind="A100-SXM4-40GB", link="NVLink3-NVSwitch", curves="vtrain", port=12.5 * GB
    ),  # its memory is not stated: see `calibration.published.assumptions`
    ("VIA-Research/vTrain", "A100"): Machine(
        kind="A100-SXM4-80GB", link="NVLink3-NVSwitch", curves="vtrain", port=12.5 * GB
    ),  # 800 Gb/s a node
    ("bigscience-workshop/bigscience", "A100-SXM4-80GB"): Machine(
        kind="A100-SXM4-80GB", link="NVLink3-NVSwitch", port=6.25 * GB
    ),  # four Omni-Path links of 100 Gb/s a node
    ("bigscience-workshop/bigscience", "V100-SXM2-32GB"): Machine(
        kind="V100-SXM2-32GB", link="NVLink2-2", switched=False, port=12.5 * GB, per_node=4
    ),
    ("bigscience-workshop/bigscience", "V100-SXM2-16GB"): Machine(
        kind="V100-SXM2-16GB", link="NVLink2-2", switched=False, port=12.5 * GB, per_node=4
    ),
    ("calculon-ai/calculon", "A100-SXM4-80GB"): Machine(
        kind="A100-SXM4-80GB", link="NVLink3-NVSwitch", port=25 * GB
    ),  # Selene: eight HDR InfiniBand ports a node
    ("nv-adlr.github.io/MegatronLMV1", "V100 (DGX-2H)"): Machine(
        kind="V100-SXM2-32GB", link="NVLink2-NVSwitch", bandwidth=135 * GB, per_node=16
    ),  # six links of 25 GB/s; the V100 of a DGX-2H has 450 W, its profile 300 W
    ("sitar-lab/NeuSight", "NVIDIA A100-SXM4-40GB"): Machine(
        kind="A100-SXM4-40GB", link="NVLink3-NVSwitch"
    ),
    ("sitar-lab/NeuSight", "NVIDIA H100 80GB HBM3"): Machine(
        kind="H100-SXM5-80GB", link="NVLink4-NVSwitch"
    ),
    ("eth-easl/sailor", "GH-96"): Machine(
        kind="GH200-96GB", link="NVLink4-mesh", switched=False, port=25 * GB, per_node=4
    ),  # Alps Clariden: one Slingshot port of 200 Gb/s a GPU
    ("NVIDIA/Megatron-LM", "A100"): _A100,
    ("mosaicml/llm-foundry", "A100-40GB"): Machine(
        kind="A100-SXM4-40GB", link="NVLink3-NVSwitch", port=25 * GB
    ),  # RoCE of 1,600 Gb/s a node, as the rows say
    ("mosaicml/llm-foundry", "A100-80GB"): Machine(
        kind="A100-SXM4-80GB", link="NVLink3-NVSwitch", port=25 * GB
    ),
    ("mosaicml/llm-foundry", "H100-80GB"): Machine(
        kind="H100-SXM5-80GB", link="NVLink4-NVSwitch", port=50 * GB
    ),  # eight ports of 400 Gb/s a node, as DGX H100
    ("NVIDIA/Megatron-LM", "H100"): Machine(kind="H100-SXM5-80GB", link="NVLink4-NVSwitch"),
    ("NVIDIA/Megatron-LM", "GB200"): Machine(
        kind="GB200-186GB", link="NVLink5-NVSwitch", per_node=4, port=50 * GB
    ),
    ("pytorch/torchtitan", "H100 96GB HBM2e 500W"): Machine(
        kind="H100-SXM5-80GB", link="NVLink4-NVSwitch", port=50 * GB
    ),  # its memory has 2.4 TB/s and it 500 W, the profile 3.35 TB/s and 700 W
    ("NVIDIA/DeepLearningExamples", "V100-16GB"): Machine(
        kind="V100-SXM2-16GB", link="NVLink2-NVSwitch", bandwidth=135 * GB, port=6.25 * GB
    ),  # DGX-1: rings use all six links of 25 GB/s; four InfiniBand ports of 100 Gb/s a node
    ("NVIDIA/DeepLearningExamples", "V100-32GB"): Machine(
        kind="V100-SXM2-32GB", link="NVLink2-NVSwitch", bandwidth=135 * GB, port=6.25 * GB
    ),  # DGX-1, DGX-2 and DGX-2H, whose V100 has 450 W, its profile 300 W
    ("NVIDIA/DeepLearningExamples", "A100-40GB"): Machine(
        kind="A100-SXM4-40GB", link="NVLink3-NVSwitch", port=25 * GB
    ),  # DGX A100: eight InfiniBand ports of 200 Gb/s a node
    ("NVIDIA/DeepLearningExamples", "A100-80GB"): Machine(
        kind="A100-SXM4-80GB", link="NVLink3-NVSwitch", port=25 * GB
    ),
}  # fmt: skip
_ONE_GPU = {  # NeuSight's rows of one GPU
    "AMD Instinct MI100": "MI100-32GB",
    "AMD Instinct MI250": "MI250-64GB",
    "NVIDIA A100-PCIE-40GB": "A100-PCIE-40GB",
    "Tesla P100-PCIE-16GB": "P100-PCIe-16GB",
    "Tesla T4": "T4-16GB",
    "Tesla V100-PCIE-32GB": "V100-PCIe-32GB",
}


def machine_of(run: Run) -> Machine | None:
    """Returns the machine of a run, None = unknown."""
    if run.num_gpus == 1 and run.gpu in _ONE_GPU:
        return Machine(kind=_ONE_GPU[run.gpu], link="PCIe4x16")
    gpu = run.gpu.removeprefix(f"{run.num_gpus}x")
    return _MACHINES.get((f"{run.source}/{run.part}", gpu), _MACHINES.get((run.source, gpu)))


def cluster_of(run: Run, machine: Machine) -> Cluster:
    """Returns the cluster of a run: the GPUs that it uses, node by node."""
    per_node = min(run.per_node or machine.per_node, run.num_gpus)
    return _cluster(machine, per_node, run.num_gpus)


@functools.lru_cache(maxsize=32)
def _cluster(machine: Machine, per_node: int, num_gpus: int) -> Cluster:
    devices, links, switches = [], [], []
    nodes = -(-num_gpus // per_node)
    for node in range(nodes):
        count = min(per_node, num_gpus - node * per_node)
        names = [f"n{node}.gpu{place}" for place in range(count)]
        devices += [Device.of_kind(name, machine.kind, node=f"node{node}") for name in names]
        if count > 1 and machine.switched:
            switches.append(f"n{node}.switch")
            links += [_link(machine, name, switches[-1]) for name in names]
        elif count > 1:
            links += [_link(machine, a, b) for a, b in itertools.combinations(names, 2)]
        if nodes > 1:
            links += [Link(name, FABRIC, "", machine.port, _PORT_LATENCY) for name in names]
    return Cluster(
        name=f"{num_gpus}x{machine.kind}",
        devices=tuple(devices),
        switches=(*switches, *([FABRIC] if nodes > 1 else [])),
        links=tuple(links),
    )


def _link(machine: Machine, a: str, b: str) -> Link:
    """Returns a link inside a node; its kind leads to the curves of that machine."""
    if machine.bandwidth:
        return Link(a, b, machine.link, machine.bandwidth, load_link("NVLink2-2").latency)
    known = load_link(machine.link)
    kind = f"{machine.link}; {machine.curves}" if machine.curves else machine.link
    return Link(a, b, kind, known.bandwidth, known.latency)
