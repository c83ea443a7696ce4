"""What the slow simulator is told: graph, cluster, costs and collectives as plain lists."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from simcore.cluster import Cluster
from simcore.cost import CostTable
from simcore.graph import OpClass, OpGraph, Role
from simcore.job import Job
from simcore.plan import Settings
from simcore.profile import Limits
from simcore.profile_store import load_profile


class CollectiveLike(Protocol):
    """What a collective op needs to say."""

    @property
    def members(self) -> Iterable[int]: ...  # device indices
    @property
    def latency(self) -> float: ...  # s
    @property
    def duration(self) -> float: ...  # s, after the latency, on an idle network
    @property
    def volume(self) -> float: ...  # bytes
    @property
    def channels(self) -> Iterable[int]: ...  # [use] channel ids
    @property
    def usage(self) -> Iterable[float]: ...  # [use] bytes on the channel per byte of volume


class Exchange(NamedTuple):
    """One collective, as plain values."""

    members: list[int]  # device indices
    latency: float  # s
    duration: float  # s
    volume: float  # bytes
    usage: dict[int, float]  # channel -> bytes on it per byte of volume


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceProblem:
    """Everything about a problem but the placement, as plain lists."""

    settings: Settings
    num_devices: int
    # ops
    op_class: list[OpClass]  # [op]
    seconds: list[list[float]]  # [op][dev] s
    launch: list[list[float]]  # [op][dev] s
    sync: list[list[bool]]  # [op][dev] the host waits for the op's end
    inputs: list[list[int]]  # [op] tensor ids
    outputs: list[list[int]]  # [op] tensor ids
    workspace: list[int]  # [op] bytes
    resident: list[int]  # [op] bytes
    optimizer_state: list[int]  # [op] bytes
    exchanges: dict[int, Exchange]  # collective op -> what it moves
    # tensors
    producer: list[int]  # [tensor] op id, -1 for a parameter or a buffer
    consumers: list[list[int]]  # [tensor] op ids
    tensor_bytes: list[int]  # [tensor] bytes
    storage: list[int]  # [tensor] storage id
    storage_bytes: list[int]  # [storage] bytes
    persistent: set[int]  # storages of parameters and buffers
    # devices and channels
    route: list[list[list[int]]]  # [dev][dev] channel ids
    latency: list[list[float]]  # [dev][dev] s
    bandwidth: list[list[float]]  # [dev][dev] B/s
    channel_bandwidth: list[float]  # [channel] B/s
    limits: list[Limits]  # [dev]
    fragmentation: list[float]  # [dev] fraction of allocated
    context: list[int]  # [dev] bytes

    @classmethod
    def build(
        cls,
        graph: OpGraph,
        cluster: Cluster,
        job: Job,
        settings: Settings,
        *,
        cost: CostTable,
        limits: Sequence[Limits] | None = None,
        collectives: Mapping[int, CollectiveLike] | None = None,
    ) -> "ReferenceProblem":
        """Reads the arrays of a graph, a cluster and a cost table into lists.

        Args:
            graph: what is computed.
            cluster: where.
            job: batch and optimizer.
            settings: how it is played.
            cost: seconds and launch times of every op.
            limits: [dev] engines, overheads and factors; None = as the profiles say.
            collectives: op -> collective, for each op of class COLLECTIVE.

        Raises:
            ValueError: a collective op without its collective or the reverse; inline or rendezvous
                transfers in another order than that of the program.
        """
        ops, tensors = range(graph.num_ops), range(graph.num_tensors)
        devices = range(len(cluster.devices))
        sized = graph.at_batch(job.batch)
        profiles = [load_profile(device.kind) for device in cluster.devices]
        kind = [cost.kinds.index(device.kind) for device in cluster.devices]
        producer, storage = graph.tensor_producer.tolist(), graph.tensor_storage.tolist()
        inputs = [
            graph.inputs[graph.first_input[op] : graph.first_input[op + 1]].tolist() for op in ops
        ]
        op_class = [OpClass(value) for value in graph.op_class.tolist()]
        exchanges = {op: read_collective(c) for op, c in sorted((collectives or {}).items())}
        if list(exchanges) != [op for op in ops if op_class[op] == OpClass.COLLECTIVE]:
            raise ValueError("collectives must be given for the collective ops, and for no others")
        if settings.p2p != "copy" and settings.order != "program":
            raise ValueError(f"p2p {settings.p2p} needs program order")
        return cls(
            settings=settings,
            num_devices=len(cluster.devices),
            op_class=op_class,
            seconds=[[float(cost.seconds[op, kind[dev], 0]) for dev in devices] for op in ops],
            launch=[[float(cost.launch[op, kind[dev]]) for dev in devices] for op in ops],
            sync=[
                [bool(graph.sync[op]) or profiles[dev].synchronous for dev in devices] for op in ops
            ],
            inputs=inputs,
            outputs=[[tensor for tensor in tensors if producer[tensor] == op] for op in ops],
            workspace=sized.workspace.tolist(),
            resident=sized.resident.tolist(),
            optimizer_state=[
                int(graph.elements[op]) * job.state_bytes_per_element()
                if graph.op_class[op] == OpClass.UPDATE
                else 0
                for op in ops
            ],
            exchanges=exchanges,
            producer=producer,
            consumers=[[op for op in ops if tensor in inputs[op]] for tensor in tensors],
            tensor_bytes=sized.tensor_bytes.tolist(),
            storage=storage,
            storage_bytes=sized.storage_bytes.tolist(),
            persistent={
                storage[tensor]
                for tensor in tensors
                if graph.tensor_role[tensor] in (Role.PARAMETER, Role.BUFFER)
            },
            route=[[list(cluster.route(i, j)) for j in devices] for i in devices],
            latency=cluster.route_latency.tolist(),
            bandwidth=cluster.route_bandwidth.tolist(),
            channel_bandwidth=[channel.bandwidth for channel in cluster.channels],
            limits=[profile.limits for profile in profiles] if limits is None else list(limits),
            fragmentation=[profile.fragmentation for profile in profiles],
            context=[profile.context for profile in profiles],
        )


def read_collective(collective: CollectiveLike) -> Exchange:
    """Turns a record of arrays into plain values."""
    uses = zip(collective.channels, collective.usage, strict=True)
    return Exchange(
        members=[int(device) for device in collective.members],
        latency=float(collective.latency),
        duration=float(collective.duration),
        volume=float(collective.volume),
        usage={int(channel): float(share) for channel, share in uses},
    )
