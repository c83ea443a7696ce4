"""Problems with collectives, limits and op classes: small ones to work by hand, and random ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simcore.cluster import Cluster
from simcore.collectives import Collective
from simcore.graph import GraphBuilder, OpClass, Out
from simcore.job import Job
from simcore.plan import Settings
from simcore.profile import Limits
from simcore.units import GB, US
from tests.strategies import (
    Case,
    Draws,
    Scale,
    build_cluster,
    build_cost,
    draw_network,
    seeded,
    timed,
)

STAR = tuple((f"d{device}", "s0", 1.0, 0.0) for device in range(3))
MESH = (("d0", "d1", 1.0, 0.0), ("d0", "d2", 1.0, 0.0), ("d1", "d2", 1.0, 0.0))


def collective(
    members: Sequence[int],
    duration: float,
    volume: float,
    usage: Mapping[int, float] | None = None,
    latency: float = 0.0,
) -> Collective:
    """Says what the simulators read of a collective.

    Args:
        members: device indices.
        duration: s, after the latency, on an idle network.
        volume: bytes.
        usage: channel -> bytes on it per byte of volume.
        latency: s.
    """
    used = dict(sorted((usage or {}).items()))
    return Collective(
        kind="all_reduce",
        algorithm="ring",
        members=tuple(members),
        num_bytes=int(volume),
        latency=latency,
        duration=duration,
        volume=volume,
        channels=np.array(list(used), np.int64),
        usage=np.array(list(used.values()), np.float64),
    )


def by_class(factors: Mapping[OpClass, float]) -> tuple[float, ...]:
    """Returns factors of all op classes; 1 where none is given."""
    return tuple(factors.get(op_class, 1.0) for op_class in OpClass)


def toy(
    seconds: Sequence[float],
    wires: Sequence[tuple[int, float, Sequence[int]]],
    placement: Sequence[int],
    *,
    collectives: Mapping[int, Collective] | None = None,
    limits: Mapping[int, Limits] | None = None,
    classes: Mapping[int, OpClass] | None = None,
    sync: Sequence[int] = (),
    **rest: Any,
) -> Case:
    """Builds a problem small enough to work by hand.

    Args:
        seconds: [op] s, the same on every device.
        wires: tensors as (producer, GB, consumers), by producer.
        placement: [op] device index, -1 for collectives.
        collectives: by op.
        limits: by device; what is not given is ``Limits()``.
        classes: by op; what is not given is OTHER.
        sync: ops that the host waits for.
        rest: see ``strategies.timed``.
    """
    builder = GraphBuilder("toy")
    handles: dict[int, int] = {}  # wire -> tensor handle
    for op, device in enumerate(placement):
        mine = [wire for wire, (producer, _, _) in enumerate(wires) if producer == op]
        op_class = OpClass.COLLECTIVE if device < 0 else (classes or {}).get(op, OpClass.OTHER)
        handle = builder.op(
            f"o{op}",
            op_class=op_class,
            inputs=[handles[wire] for wire, (_, _, users) in enumerate(wires) if op in users],
            outputs=[Out(int(wires[wire][1] * GB)) for wire in mine],
            sync=op in sync,
        )
        handles.update(zip(mine, builder.outputs(handle), strict=True))
    case = timed(builder, seconds, placement, **rest)
    known = dict(limits or {})
    return case._replace(
        limits=tuple(known.get(device, Limits()) for device in range(case.cluster.num_devices)),
        collectives=dict(collectives or {}),
    )


# random problems


def random_toy(rng: np.random.Generator, **settings: Any) -> Case:
    """Draws ops, transfers and collectives on 1 to 4 devices, with limits, in any setting.

    Args:
        rng: where the choices come from.
        settings: what is not drawn.
    """
    draws = seeded(rng)
    scale = Scale(draws, tied=draws.chance(50))
    network = draw_network(scale, 4)
    kinds, cluster, job = tuple(dict.fromkeys(network.kinds)), build_cluster(network), Job(batch=1)
    builder = GraphBuilder("random")
    placement: list[int] = []
    collectives: dict[int, Collective] = {}
    made_on: dict[int, set[int]] = {}  # tensor -> devices
    sent: set[int] = set()  # tensors that transfers take to any device
    for op in range(draws.integer(1, draws.pick((8, 24)))):
        on = {draws.integer(0, cluster.num_devices - 1)}
        if is_collective := draws.chance(20):
            on |= {draws.integer(0, cluster.num_devices - 1) for _ in range(3)}
            collectives[op] = draw_exchange(scale, cluster, on)
        in_reach = [t for t in made_on if made_on[t] & on or (t in sent and not is_collective)]
        handle = builder.op(
            f"o{op}",
            op_class=OpClass.COLLECTIVE if is_collective else draws.pick(list(OpClass)[:-1]),
            inputs=[draws.pick(in_reach[-6:]) for _ in range(draws.integer(0, 3)) if in_reach],
            outputs=[Out(scale.bytes()) for _ in range(draws.pick((1, 1, 2, 0)))],
            sync=not is_collective and draws.chance(5),
        )
        placement.append(-1 if is_collective else min(on))
        made_on.update(dict.fromkeys(builder.outputs(handle), on))
        sent |= set() if is_collective else set(builder.outputs(handle))
    seconds = [[scale.seconds() for _ in kinds] for _ in placement]
    launch = [[scale.seconds() / 4 for _ in kinds] for _ in placement]
    return Case(
        graph=builder.build(),
        cluster=cluster,
        job=job,
        settings=draw_settings(draws, settings),
        cost=build_cost(seconds, launch, kinds, job),
        placement=np.array(placement, np.int32),
        priorities=None,
        network=network,
        limits=tuple(draw_device_limits(scale) for _ in network.kinds),
        collectives=collectives,
    )


def draw_settings(draws: Draws, fixed: Mapping[str, Any]) -> Settings:
    drawn: dict[str, Any] = {
        "order": draws.pick(("program", "program", "ready")),
        "host": draws.pick(("one", "per_rank")),
        "launch": draws.pick(("eager", "graph")),
        "p2p": draws.pick(("copy", "inline", "rendezvous")),
        "contention": draws.pick(("fair", "fair", "fifo", "ordered", "port", "none")),
        "slow_down": draws.chance(50),
    } | dict(fixed)
    if drawn["order"] == "ready":
        drawn["p2p"] = "copy"
    return Settings(**drawn)


def draw_exchange(scale: Scale, cluster: Cluster, members: set[int]) -> Collective:
    """Draws a volume, channels, and a duration that the channels allow."""
    draws, volume = scale.draws, float(scale.bytes())
    usage = {c.id: draws.pick((1.0, 0.5, 1.5, 2.0)) for c in cluster.channels if draws.chance(40)}
    loads = [volume * share / cluster.channels[c].bandwidth for c, share in usage.items()]
    return collective(
        members=sorted(members),
        duration=max(loads, default=scale.seconds()) * draws.pick((1, 1, 2)),
        volume=volume,
        usage=usage,
        latency=scale.latency_us() * US,
    )


def draw_device_limits(scale: Scale) -> Limits:
    def factor() -> float:
        return scale.draws.pick((1.0, 1.0, 1.5, 2.0, 4.0))

    return Limits(
        out_engines=scale.draws.pick((1, 1, 2, 3)),
        in_engines=scale.draws.pick((0, 0, 1, 2)),
        message_overhead=scale.draws.pick((0.0, scale.seconds() / 4)),
        copy_beside_compute=factor(),
        collective_beside_compute=factor(),
        compute_beside_copy=tuple(factor() for _ in OpClass),
        compute_beside_collective=tuple(factor() for _ in OpClass),
    )
