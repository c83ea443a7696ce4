"""A PipeDream layer profile posed as a max-load problem, as the authors' layer graphs are.

A layer is a forward node and, in training, a backward node of its colour class, joined by mirrored
edges. A tensor's cost is its bytes over the bandwidth; CPUs are so many times slower, 10 in the
published layer graphs. A forward node holds parameters and outputs, a backward node as much again.
The ``Input`` layers carry data-loading time and are left out, as PipeDream does.
"""

from typing import NamedTuple

from agents.exact.max_load import MaxLoadProblem, make_max_load
from simcore.frontends.dnn_partitioning import DeviceLimits, Edge, Node, PartitioningFile
from simcore.frontends.pipedream import Layer, Profile
from simcore.signature import OpClass
from simcore.units import MS


class Machine(NamedTuple):
    """What the layers are placed on."""

    accelerators: int = 6
    cpus: int = 1
    memory: float = 16 * 2**30  # bytes of an accelerator
    bandwidth: float = 12e9  # bytes/s
    cpu_slowness: float = 10.0


DEFAULT_MACHINE = Machine()


def profile_problem(
    profile: Profile, machine: Machine = DEFAULT_MACHINE, *, training: bool = True
) -> MaxLoadProblem:
    """Returns the problem of a profile; its time unit is the millisecond.

    Args:
        profile: the layers, forward and backward times in seconds, sizes in bytes.
        machine: the devices.
        training: whether there are backward nodes.
    """
    layers = {n: layer for n, layer in profile.layers.items() if layer.op_class != OpClass.INPUT}
    number = {name: index for index, name in enumerate(layers)}
    nodes = [
        _node(layer, number[name], machine, backward=backward, shift=backward * len(layers))
        for backward in ((False, True) if training else (False,))
        for name, layer in layers.items()
    ]
    edges = []
    for name, layer in layers.items():
        for source in profile.sources[name]:
            if source in layers:
                cost = sum(layers[source].outputs) / machine.bandwidth / MS
                one, other = number[source], number[name]
                edges.append(Edge(one, other, cost))
                if training:
                    gradient = sum(layer.outputs) / machine.bandwidth / MS
                    edges.append(Edge(other + len(layers), one + len(layers), gradient))
    limits = DeviceLimits(
        accelerators=machine.accelerators,
        cpus=machine.cpus,
        accelerator_memory=machine.memory,
    )
    return make_max_load(PartitioningFile(nodes, edges), limits, profile.name)


def _node(layer: Layer, number: int, machine: Machine, *, backward: bool, shift: int) -> Node:
    time = (layer.backward if backward else layer.forward) / MS
    return Node(
        id=number + shift,
        fpga_latency=time,
        cpu_latency=time * machine.cpu_slowness,
        size=float(layer.parameter + sum(layer.outputs)),
        backward=backward,
        color=number,
    )
