"""Names to arrays: the only place where a graph, a cluster and a job become integers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.cost import CostTable, cost_table, kinds_of
from simcore.errors import PlanError
from simcore.graph import MAX_TOTAL, OpClass, OpGraph, Sized
from simcore.job import Job
from simcore.kernel import (
    COST,
    MAX_LANE_DEVICES,
    NONE,
    OP,
    P2P,
    PAIR,
    TENSOR,
    Contention,
    Engine,
    Host,
    LaneTables,
    Mode,
    Order,
    Records,
    Tables,
    make_lane_tables,
    make_records,
)
from simcore.memory import (
    HeldParameters,
    SharedStorages,
    hold_parameters,
    share_storages,
    storage_uses,
)
from simcore.network import NetworkTables, network_tables
from simcore.plan import ONE_HOST, Settings
from simcore.profile import Limits
from simcore.profile_store import load_profile
from simcore.reach import Readers, other_units_readers, unit_leaders
from simcore.sizes import sizes_at

if TYPE_CHECKING:
    from simcore.collectives import Collective

MAX_DEVICES = 4096
_NO_COLLECTIVES: "Mapping[int, Collective]" = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """One graph, cluster and job made ready for the kernel; placements of it run in batches."""

    graph: OpGraph
    cluster: Cluster
    job: Job
    settings: Settings
    cost: CostTable
    batch: int | None  # samples each copy of the model sees
    tables: Tables
    lane_tables: LaneTables | None  # what lanes read; None where they do not apply
    mode: Mode
    engine: Engine  # how batches are run; all engines that apply give the same bits
    capacity: NDArray[np.int64]  # [dev] bytes that reserved memory may reach
    fragmentation: NDArray[np.float64]  # [dev] reserved = allocated * (1 + fragmentation) + context
    context: NDArray[np.int64]  # [dev] bytes

    @classmethod
    def build(  # noqa: PLR0913 - what a problem consists of
        cls,
        graph: OpGraph,
        cluster: Cluster,
        job: Job,
        settings: Settings = ONE_HOST,
        *,
        cost: CostTable | None = None,
        copies: int = 1,
        reserve_memory: int = 0,
        priorities: Sequence[int] = (),
        limits: Sequence[Limits] | None = None,
        collectives: "Mapping[int, Collective]" = _NO_COLLECTIVES,
    ) -> "Problem":
        """Lowers a problem.

        Args:
            graph: the graph.
            cluster: the cluster.
            job: the job.
            settings: how plans are simulated.
            cost: seconds per op and device kind; None = from the hardware profiles.
            copies: data-parallel copies of the model; each sees batch / copies samples.
            reserve_memory: bytes to leave free on every GPU.
            priorities: one number per op, least first, used under ``ready`` order.
            limits: what each device does at once, [dev]; None = from the hardware profiles.
            collectives: what each op of class ``COLLECTIVE`` does, by op.

        Raises:
            PlanError: the batch does not divide by the copies, sizes leave int64, settings that
                do not go together, or a collective op without its collective.
        """
        _check_settings(settings)
        if priorities and len(priorities) != graph.num_ops:
            raise PlanError(f"{len(priorities)} priorities for {graph.num_ops} ops")
        batch = batch_per_copy(graph, job, copies)
        kinds = kinds_of(cluster)
        if cost is None:
            cost = cost_table(graph, job, kinds, (batch,))
        profiles = [load_profile(device.kind) for device in cluster.devices]
        columns = np.array([cost.kinds.index(device.kind) for device in cluster.devices], np.int64)
        if limits is None:
            limits = [profile.limits for profile in profiles]
        network = network_tables(graph, cluster, limits, collectives)
        costs = _costs(graph, cost, cost.batches.index(batch))
        if settings.launch == "graph":
            costs["launch"], costs["trail"] = 0.0, 0.0
            network.limits["message_overhead"] = 0.0
        tables = _tables(graph, cluster, sizes_at(graph, job, batch), costs, columns, network)
        tables.ops["resident"][:-1] += _state_bytes(graph, job)
        tables.ops["priority"][:-1] = priorities or 0
        mode = choose_mode(settings, limits)
        engine = choose_engine(mode, tables)
        is_cpu = np.array([profile.is_cpu for profile in profiles])
        memory = np.array([device.memory for device in cluster.devices], np.int64)
        return cls(
            graph=graph,
            cluster=cluster,
            job=job,
            settings=settings,
            cost=cost,
            batch=batch,
            tables=tables,
            lane_tables=make_lane_tables(tables) if engine == Engine.LANES else None,
            mode=mode,
            engine=engine,
            capacity=np.where(is_cpu, memory, np.maximum(memory - reserve_memory, 0)),
            fragmentation=np.array([profile.fragmentation for profile in profiles]),
            context=np.array([profile.context for profile in profiles], np.int64),
        )

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds of every op on every device, [op, dev]; inf = cannot run there."""
        seconds: NDArray[np.float64] = self.tables.cost["duration"][:, self.tables.columns]
        return seconds

    @property
    def supported(self) -> NDArray[np.bool_]:
        """Whether a unit can run on a device, [unit, dev]."""
        supported = np.ones((self.graph.num_units, len(self.cluster.devices)), np.bool_)
        np.logical_and.at(supported, self.graph.unit, np.isfinite(self.seconds))
        return supported

    def reserved(self, allocated: NDArray[np.int64], used: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Returns the bytes that decide what fits, [..., dev]; none on a device without ops.

        Args:
            allocated: peak bytes of the allocator, [..., dev].
            used: whether a device runs any op, [..., dev].
        """
        grown = np.ceil(allocated * (1.0 + self.fragmentation)).astype(np.int64)
        return np.where(used, grown + self.context, 0)

    def expand(self, unit_placements: NDArray[np.integer]) -> NDArray[np.int32]:
        """Turns device indices per unit, [..., unit], into device indices per op, [..., op]."""
        return np.ascontiguousarray(unit_placements[..., self.graph.unit], dtype=np.int32)


def _costs(graph: OpGraph, cost: CostTable, variant: int) -> Records:
    """Returns what every op costs on every kind of device, COST [op, column]."""
    costs = make_records((graph.num_ops, len(cost.kinds)), COST)
    costs["duration"] = cost.seconds[:, :, variant]
    costs["launch"] = cost.launch
    costs["trail"] = 0.0 if cost.trail is None else cost.trail
    waits = np.array([load_profile(kind).synchronous for kind in cost.kinds], np.bool_)
    costs["sync"] = graph.sync[:, None] | waits
    return costs


def choose_mode(settings: Settings, limits: Sequence[Limits]) -> Mode:
    """Returns the settings as numbers; what has no effect on these devices is left out."""
    slow = settings.slow_down and any(limit.slows for limit in limits)
    costs_time = settings.launch == "eager" and any(limit.message_overhead for limit in limits)
    return Mode(
        order=int(Order[settings.order.upper()]),
        host=int(Host[settings.host.upper()]),
        contention=int(Contention[settings.contention.upper()]),
        p2p=int(P2P[settings.p2p.upper()]),
        messages=int(costs_time or settings.p2p != "copy"),
        fluid=int(slow or settings.contention == "fair"),
        slow=int(slow),
    )


def choose_engine(mode: Mode, tables: Tables) -> Engine:
    """Returns the fastest way to play placements that gives the answer of the event loop.

    Where no decision depends on event timing a sweep does, if every collective is an op that stands
    directly behind its last producer; lanes know only the disciplines that hold no channels, and no
    collectives.
    """
    if mode.fluid:
        return Engine.FLUID
    if mode.order == Order.READY or mode.contention == Contention.FIFO or mode.messages:
        return Engine.EVENTS
    collectives = tables.collectives["op"][:-1]
    before = collectives - np.arange(len(collectives))  # as if there were no collectives
    behind = tables.last_producer - np.searchsorted(collectives, tables.last_producer) + 1
    if (before != behind).any():
        return Engine.EVENTS
    is_free = mode.contention in {Contention.NONE, Contention.PORT}
    if is_free and not len(collectives) and len(tables.columns) <= MAX_LANE_DEVICES:
        return Engine.LANES
    return Engine.SWEEP


def _check_settings(settings: Settings) -> None:
    if settings.p2p != "copy" and settings.order != "program":
        raise PlanError(
            f"p2p {settings.p2p!r} needs order 'program': under {settings.order!r} order a device "
            "has no stream that a transfer could take its place in"
        )


def batch_per_copy(graph: OpGraph, job: Job, copies: int) -> int | None:
    """Returns the samples that each of several copies of the model sees.

    Raises:
        PlanError: the batch does not divide by the copies, or seconds were measured at another.
    """
    if copies == 1:
        return job.batch
    if graph.fixed is not None and not job.assume_linear:
        raise PlanError(
            f"{graph.name}: measured at one batch, so its times at a smaller one are unknown "
            "(--assume-linear scales them)"
        )
    if job.batch is None:
        raise PlanError(f"{graph.name}: the batch is unknown, so it cannot be divided (--batch)")
    if job.batch % copies:
        raise PlanError(f"a batch of {job.batch} does not divide by {copies} copies")
    return job.batch // copies


def _state_bytes(graph: OpGraph, job: Job) -> NDArray[np.int64]:
    """Returns the bytes of optimizer state beside each update op, [op]."""
    per_element = job.state_bytes_per_element()
    if graph.elements.sum(dtype=np.float64) * per_element > MAX_TOTAL:
        raise PlanError(f"{graph.name}: over 2**62 bytes of optimizer state")
    return graph.elements * per_element


def _tables(
    graph: OpGraph,
    cluster: Cluster,
    sized: Sized,
    costs: Records,
    columns: NDArray[np.int64],
    network: NetworkTables,
) -> Tables:
    """Returns the kernel's tables; optimizer state and priorities are still missing."""
    num_devices = len(cluster.devices)
    if num_devices > MAX_DEVICES:
        raise PlanError(f"{cluster.name}: {num_devices} devices, at most {MAX_DEVICES}")
    uses = storage_uses(graph, sized)
    shared = share_storages(graph, uses)
    held = hold_parameters(graph, sized)
    readers = other_units_readers(graph)
    return Tables(
        cost=costs,
        columns=columns,
        slow=network.slow,
        ops=_ops(graph, sized, shared, held),
        tensors=_tensors(graph, sized, readers),
        consumers=graph.consumers.astype(np.int64),
        first_touch=uses.first,
        touches=uses.touches,
        readers=readers.ops,
        first_span=shared.first,
        spans=shared.spans,
        first_holder=held.first,
        holders=held.ops,
        held_bytes=held.num_bytes,
        pairs=_pairs(cluster),
        hops=cluster.hops.astype(np.int64),
        bandwidth=network.bandwidth,
        limits=network.limits,
        collectives=network.collectives,
        loads=network.loads,
        members=network.members,
        plan_order=network.plan_order,
        last_producer=network.last_producer,
        max_resources=int(np.diff(cluster.first_hop).max(initial=0)) + 2,
    )


def _ops(graph: OpGraph, sized: Sized, shared: SharedStorages, held: HeldParameters) -> Records:
    ops = make_records(graph.num_ops + 1, OP)
    ops["first_output"] = graph.first_output
    is_collective = graph.op_class == OpClass.COLLECTIVE
    per_op = {
        "collective": np.where(is_collective, np.cumsum(is_collective) - 1, NONE),
        "op_class": graph.op_class,
        "workspace": sized.workspace,
        "resident": sized.resident + held.resident,
        "leader": unit_leaders(graph)[graph.unit],
        "allocate": shared.allocate,
        "release": shared.release,
    }
    for key, values in per_op.items():
        ops[key][:-1] = values
    return ops


def _tensors(graph: OpGraph, sized: Sized, readers: Readers) -> Records:
    tensors = make_records(graph.num_tensors + 1, TENSOR)
    tensors["num_bytes"][:-1] = sized.tensor_bytes
    tensors["first_consumer"] = graph.first_consumer
    tensors["first_reader"] = readers.first
    return tensors


def _pairs(cluster: Cluster) -> Records:
    pairs = make_records(len(cluster.devices) ** 2 + 1, PAIR)
    pairs["first_hop"] = cluster.first_hop
    pairs["bandwidth"][:-1] = np.where(cluster.reachable, cluster.route_bandwidth, 1.0).ravel()
    pairs["latency"][:-1] = cluster.route_latency.ravel()
    pairs["reachable"][:-1] = cluster.reachable.ravel()
    return pairs
