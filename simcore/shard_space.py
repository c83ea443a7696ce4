"""The space of sharded plans of one graph on one mesh, lowered once for batches.

A plan says for each decision along which axis of the mesh its linkage groups are split. In which
order an op looks for a group is fixed: heads, widths, vocabulary and experts, then other groups,
then positions, then the samples, as the styles of `simcore.sharding.named` have it; so tensor,
sequence, context and expert parallelism are points of the space, alone or on two axes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.errors import PlanError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.kernel import ShardTables
from simcore.lower import batch_per_copy, choose_mode
from simcore.mesh import DATA, Mesh
from simcore.plan import DEFAULT_BUCKETS, Buckets, Plan, Settings
from simcore.profile_store import load_profile
from simcore.shard_costs import Lowering
from simcore.shard_tables import Ranks, lower_space
from simcore.sharding.groups import Linkage
from simcore.sharding.named import Roles, find_roles, style_groups
from simcore.shards import OWN, linkage_of

MAX_AXES = 2  # that split ops; `dp` is beside them
# one stream for communication on each device
STREAM = Settings(host="per_rank", contention="ordered", slow_down=False)
WHOLE = -1  # in a plan: not split


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardSpace:
    """One graph on one mesh; its plans run in batches (`simcore.shard_batch`).

    Attributes:
        graph: the whole graph.
        cluster: the cluster.
        job: its batch is divided among the devices that have a part of the samples.
        devices: names, in the order of the mesh.
        mesh: ``dp``, and one or two axes that split ops.
        settings: ``contention`` is ``none`` (collectives do not wait for each other) or ``ordered``
            (a device runs one after the other).
        buckets: how gradients are put together.
        linkage: the groups of the graph.
        decisions: groups that are split together, [decision].
        ranks: in which order an op looks for a group to split.
        axes: names of the axes; a plan calls them 0 and 1.
        tables: for the kernel.
    """

    graph: OpGraph
    cluster: Cluster
    job: Job
    devices: tuple[str, ...]
    mesh: Mesh
    settings: Settings
    buckets: Buckets
    linkage: Linkage
    decisions: tuple[tuple[int, ...], ...]
    ranks: Ranks
    axes: tuple[str, ...]
    tables: ShardTables

    @classmethod
    def build(  # noqa: PLR0913 - what a space consists of
        cls,
        graph: OpGraph,
        cluster: Cluster,
        job: Job,
        devices: Sequence[str],
        mesh: Mapping[str, int],
        *,
        settings: Settings = STREAM,
        buckets: Buckets = DEFAULT_BUCKETS,
        decisions: Sequence[Sequence[int]] | None = None,
    ) -> "ShardSpace":
        """Lowers a space.

        Args:
            graph: a captured graph.
            cluster: the cluster.
            job: the job.
            devices: names, all of one kind, in the order of the mesh.
            mesh: axis -> devices along it; the last axis varies fastest.
            settings: how plans are simulated.
            buckets: how gradients are put together.
            decisions: groups that are split together; None = each group by itself.

        Raises:
            PlanError: devices of several kinds or not as many as the mesh has, more than two axes
                that split, settings that are not known here, or a batch that does not divide.
            GraphError: a graph without loops.
        """
        shape = Mesh.of(mesh)
        linkage = linkage_of(graph)
        places = _check(cluster, devices, shape, settings)
        axes = tuple(n for n, size in zip(shape.names, shape.sizes, strict=True) if n != DATA)
        ranks = group_ranks(linkage, find_roles(graph, linkage))
        number = np.arange(len(linkage.groups))
        given = tuple(map(tuple, decisions)) if decisions is not None else tuple(
            (group,) for group in number.tolist()
        )  # fmt: skip
        base = batch_per_copy(graph, job, shape.copies) or graph.batch or 1
        lowering = Lowering(graph, cluster, job, places, shape, settings, buckets, base)
        return cls(
            graph=graph,
            cluster=cluster,
            job=job,
            devices=tuple(devices),
            mesh=shape,
            settings=settings,
            buckets=buckets,
            linkage=linkage,
            decisions=given,
            ranks=ranks,
            axes=axes,
            tables=lower_space(lowering, linkage, ranks, given),
        )

    @property
    def num_decisions(self) -> int:
        """Columns of a plan."""
        return len(self.decisions)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each axis that splits, [axis]."""
        return tuple(self.mesh.sizes[self.mesh.names.index(axis)] for axis in self.axes)

    @property
    def divides(self) -> NDArray[np.bool_]:
        """Whether a decision can be split along an axis at all, [decision, axis]."""
        groups = self.linkage.groups
        batch = self.graph.batch or 1
        sizes = [groups[decision[0]].size for decision in self.decisions]
        values = np.array([size[0] + size[1] * batch for size in sizes])
        divides: NDArray[np.bool_] = values[:, None] % np.array(self.sizes) == 0
        return divides

    def sharding(self, row: NDArray[np.integer]) -> dict[str, tuple[str, ...]]:
        """Returns axis -> names of the groups that a plan splits along it, as plans have it.

        Args:
            row: the plan, [decision].
        """
        axis_of = self.axis_of(row)
        order = np.argsort(np.array(self.ranks.place)).tolist()
        names = [
            OWN * (number in self.ranks.own) + group.name
            for number, group in enumerate(self.linkage.groups)
        ]
        return {
            axis: tuple(names[group] for group in order if axis_of[group] == number)
            for number, axis in enumerate(self.axes)
        }

    def axis_of(self, row: NDArray[np.integer]) -> list[int]:
        """Returns the axis of each group, WHOLE = none, [group]."""
        axis_of = [WHOLE] * len(self.linkage.groups)
        for axis, groups in zip(np.asarray(row).tolist(), self.decisions, strict=True):
            for group in groups:
                axis_of[group] = axis
        return axis_of

    def plan(self, row: NDArray[np.integer]) -> Plan:
        """Returns a plan of the space as a plan of one stage.

        Args:
            row: the plan, [decision].

        Raises:
            PlanError: an axis without a group: its devices would all do the same.
        """
        sharding = self.sharding(row)
        if idle := [axis for axis, names in sharding.items() if not names]:
            raise PlanError(f"axis {idle[0]!r} splits nothing")
        plan = Plan.data_parallel(self.graph, self.cluster, self.job, self.devices)
        mesh = dict(zip(self.mesh.names, self.mesh.sizes, strict=True))
        stage = msgspec.structs.replace(plan.stages[0], mesh=mesh, sharding=sharding)
        return msgspec.structs.replace(
            plan, stages=(stage,), settings=self.settings, buckets=self.buckets
        )

    def styled(self, styles: Mapping[str, str]) -> NDArray[np.int8]:
        """Returns the plan in which axes split what their styles say, [decision].

        Args:
            styles: axis -> one of `simcore.sharding.named.STYLES`; a group belongs to the first.

        Raises:
            PlanError: an unknown style, or one that the model has nothing for.
        """
        roles = find_roles(self.graph, self.linkage)
        row = np.full(self.num_decisions, WHOLE, np.int8)
        for axis, style in styles.items():
            groups = set(style_groups(style, roles))
            for decision, members in enumerate(self.decisions):
                if row[decision] == WHOLE and groups & set(members):
                    row[decision] = self.axes.index(axis)
        return row


def group_ranks(linkage: Linkage, roles: Roles) -> Ranks:
    """Returns the fixed order of the groups."""
    inside = (*roles.heads, *roles.widths, *roles.vocabulary, *roles.experts)
    last = (*roles.position, *roles.batch)
    others = [group for group in range(len(linkage.groups)) if group not in {*inside, *last}]
    order = dict.fromkeys((*inside, *others, *last))
    place = {group: number for number, group in enumerate(order)}
    places = tuple(place[group] for group in range(len(linkage.groups)))
    return Ranks(places, frozenset(roles.experts))


def _check(
    cluster: Cluster, devices: Sequence[str], mesh: Mesh, settings: Settings
) -> tuple[int, ...]:
    """Returns the device indices of a mesh, refused where batches do not know it."""
    places = tuple(cluster.device_index(name) for name in devices)
    if len(set(places)) != mesh.num_devices or len(places) != mesh.num_devices:
        raise PlanError(f"{len(places)} devices for a mesh of {mesh.num_devices} different ones")
    kinds = sorted({cluster.devices[place].kind for place in places})
    if len(kinds) > 1:
        raise PlanError(f"devices of one mesh must be of one kind, not {' and '.join(kinds)}")
    if len(mesh.names) - 1 > MAX_AXES:
        raise PlanError(f"a mesh of {len(mesh.names) - 1} axes beside dp; at most {MAX_AXES}")
    known = settings.contention in {"none", "ordered"} and settings.order == "program"
    if not known or settings.host != "per_rank" or settings.p2p != "copy":
        raise PlanError(
            "batches of sharded plans know program order, a host per rank, copies, and contention "
            f"none or ordered, not {settings.order}, {settings.host}, {settings.p2p} and "
            f"{settings.contention}"
        )
    limits = load_profile(kinds[0]).limits
    if choose_mode(settings, [limits]).slow:
        raise PlanError(f"{kinds[0]}: slow-down is not known to batches of sharded plans")
    return places
