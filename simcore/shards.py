"""A plan's meshes -> what one device of each stage does, and what its collectives take."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.collectives import make_collective
from simcore.cost import CostTable
from simcore.errors import PlanError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.mesh import DATA, Mesh
from simcore.plan import Plan
from simcore.sharding.groups import Linkage, find_linkage
from simcore.sharding.local import Communication, local_graph
from simcore.sharding.named import find_roles, style_groups
from simcore.sharding.states import Axis

HALO = "halo"
OWN = "weights of "  # before a group: see `Axis.own`


class OneDevice(NamedTuple):
    """What one device of a plan does.

    Attributes:
        graph: its ops; the whole graph where no stage shares a copy.
        stage: of each placement unit of that graph, [unit].
        base: op of the whole graph, negative = a collective that was put in, [op].
        communication: of each collective op.
        axes: names of the axes that `Communication.axis` numbers.
        samples: devices that share what one device calls its batch.
    """

    graph: OpGraph
    stage: NDArray[np.int32]  # [unit]
    base: NDArray[np.int32]  # [op]
    communication: Mapping[int, Communication]
    axes: tuple[str, ...]
    samples: int


@functools.lru_cache(maxsize=16)
def linkage_of(graph: OpGraph) -> Linkage:
    """Returns the linkage groups of a graph; found once."""
    return find_linkage(graph)


def plan_meshes(plan: Plan) -> list[Mesh]:
    """Returns the mesh of every stage, [stage]."""
    return [Mesh.of(stage.mesh or {}) for stage in plan.stages]


def is_sharded(plan: Plan) -> bool:
    """Whether several devices share a copy of a stage."""
    return any(mesh.shards > 1 for mesh in plan_meshes(plan))


def one_device(graph: OpGraph, plan: Plan, stage: NDArray[np.int32]) -> OneDevice:
    """Returns what one device of each stage does.

    Args:
        graph: the whole graph.
        plan: its stages have meshes.
        stage: of each placement unit, [unit].

    Raises:
        PlanError: a group that the graph does not have, an axis whose groups its size does not
            divide, or stages with the same devices in different meshes.
        GraphError: a graph that cannot be sharded.
    """
    if not is_sharded(plan):
        base = np.arange(graph.num_ops, dtype=np.int32)
        return OneDevice(graph, stage, base, {}, (), 1)
    _check_ranks(plan)
    linkage = linkage_of(graph)
    names = tuple(
        dict.fromkeys(axis for each in plan.stages for axis in each.mesh or {} if axis != DATA)
    )
    axes = []
    for each in plan.stages:
        sizes = each.mesh or {}
        axes.append(
            tuple(
                make_axis(linkage, name, sizes.get(name, 1), each.sharding.get(name, ()))
                for name in names
            )
        )
    local = local_graph(graph, linkage, axes, stage)
    _check_split(plan, linkage, axes, np.array(local.states.choice), stage[graph.unit])
    of_unit = np.zeros(local.graph.num_units, np.int32)
    known = local.base >= 0
    of_unit[local.graph.unit[known]] = stage[graph.unit[local.base[known]]]
    return OneDevice(local.graph, of_unit, local.base, local.communication, names, local.samples)


def _check_ranks(plan: Plan) -> None:
    """Refuses stages on the same devices whose meshes differ; a rank sums in one way."""
    first: dict[tuple[str, ...], int] = {}
    meshes = plan_meshes(plan)
    for number, stage in enumerate(plan.stages):
        other = first.setdefault(stage.devices, number)
        if (meshes[number].names, meshes[number].sizes) != (
            meshes[other].names,
            meshes[other].sizes,
        ):
            raise PlanError(
                f"stages {plan.stages[other].name!r} and {stage.name!r} share their devices, but "
                f"have the meshes {plan.stages[other].mesh} and {stage.mesh}"
            )


def _check_split(
    plan: Plan,
    linkage: Linkage,
    axes: Sequence[Sequence[Axis]],
    choice: NDArray[np.int64],
    stage_of_op: NDArray[np.int32],
) -> None:
    """Refuses an axis whose devices would all do the same; `choice` is of `States`, [op, axis]."""
    for number, stage in enumerate(plan.stages):
        taken = (choice[stage_of_op == number] >= 0).any(axis=0)
        for axis, is_taken in zip(axes[number], taken, strict=True):
            if axis.size > 1 and axis.groups and not is_taken:
                sizes = {linkage.groups[group].size for group in axis.groups}
                words = ", ".join("the batch" if b else str(a) for a, b in sorted(sizes))
                raise PlanError(
                    f"stage {stage.name!r}: axis {axis.name!r} of {axis.size} devices divides none "
                    f"of its groups in any op (sizes {words})"
                )


def make_axis(linkage: Linkage, name: str, size: int, groups: Sequence[str]) -> Axis:
    """Returns an axis from the names of its groups; OWN before one says that it is `Axis.own`.

    Raises:
        PlanError: a group that the graph does not have.
    """
    numbers = tuple(linkage.number(group.removeprefix(OWN)) for group in groups)
    pairs = zip(numbers, groups, strict=True)
    return Axis(name, size, numbers, frozenset(n for n, group in pairs if group.startswith(OWN)))


def communication_at(device: OneDevice, mesh: Mesh, batch: int) -> dict[int, tuple[str, int, int]]:
    """Returns (kind, axis of the mesh, bytes) of each collective op at a batch of one device."""
    found = {}
    for op, what in device.communication.items():
        place = mesh.names.index(device.axes[what.axis])
        size = what.num_bytes[0] + what.num_bytes[1] * batch
        if what.kind == HALO:  # both neighbours get it: an all-to-all of as much for each member
            members = mesh.sizes[place]
            found[op] = ("all_to_all", place, -(-2 * size * members // max(1, members - 1)))
        else:
            found[op] = (what.kind, place, size)
    return found


def with_collectives(
    cost: CostTable, device: OneDevice, plan: Plan, cluster: Cluster, batches: Sequence[int]
) -> CostTable:
    """Returns costs in which each collective takes what it does on an idle network.

    Its seconds are those of the slowest group of its stage; in a stage nothing runs beside it.

    Args:
        cost: of the ops of one device.
        device: what it does.
        plan: says on which devices a stage is.
        cluster: the cluster.
        batches: samples of one device, of each stage.
    """
    if not device.communication:
        return cost
    seconds = cost.seconds.copy()
    meshes = plan_meshes(plan)
    known: dict[tuple[int, int, tuple[str, int, int]], float] = {}
    stage_of_op = device.stage[device.graph.unit]
    for stage, mesh in enumerate(meshes):
        places = [cluster.device_index(name) for name in plan.stages[stage].devices]
        mine = {op for op in device.communication if stage_of_op[op] == stage}
        part = device._replace(communication={op: device.communication[op] for op in sorted(mine)})
        variant = cost.batches.index(batches[stage])
        for op, what in communication_at(part, mesh, batches[stage]).items():
            key = (stage, variant, what)
            if key not in known:
                groups = mesh.members(what[1]).tolist()
                known[key] = max(
                    make_collective(
                        what[0], what[2], cluster, [places[copy] for copy in group]
                    ).idle_time
                    for group in groups
                )
            seconds[op, :, variant] = known[key]
    seconds.flags.writeable = False
    return replace(cost, seconds=seconds)


def sharded_plan(
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    devices: Sequence[str],
    axes: Mapping[str, tuple[str, int]],
) -> Plan:
    """Returns the plan of one stage on a mesh whose axes split what their styles say.

    Args:
        graph: a captured graph.
        cluster: the cluster.
        job: the job.
        devices: device names, in the order of the mesh: copies, then the axes as given.
        axes: axis -> (style, size), see `simcore.sharding.named.STYLES`.

    Raises:
        PlanError: an unknown style, or one that the model has nothing for; or devices that the axes
            do not divide.
    """
    linkage = linkage_of(graph)
    roles = find_roles(graph, linkage)
    parts = math.prod(size for _, size in axes.values())
    if len(devices) % parts:
        raise PlanError(f"{len(devices)} devices do not divide by a mesh of {parts} a copy")
    mesh = {DATA: len(devices) // parts} | {axis: size for axis, (_, size) in axes.items()}
    sharding = {
        axis: tuple(
            OWN * (group in roles.experts) + linkage.groups[group].name
            for group in style_groups(style, roles)
        )
        for axis, (style, size) in axes.items()
        if size > 1
    }
    plan = Plan.data_parallel(graph, cluster, job, devices)
    stage = msgspec.structs.replace(plan.stages[0], mesh=mesh, sharding=sharding)
    return msgspec.structs.replace(plan, stages=(stage,))
