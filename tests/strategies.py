"""Problems to simulate, and the ways to simulate them.

Random ones come from one generator, fed by a seeded numpy generator or by hypothesis.

Half of the cases are *tied*: every duration is a small multiple of one power of two, so that many
events fall on the same instant and the order of equals decides. The other half is *rough*: times
that make every addition round, so that an addition done in another order shows in the last bit.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.collectives import Collective
from simcore.cost import CostSource, CostTable
from simcore.graph import GraphBuilder, OpClass, OpGraph, Out, Phase
from simcore.job import Job
from simcore.lower import Problem
from simcore.plan import Settings
from simcore.profile import Limits
from simcore.simulation import run_placement
from tests.reference import (
    ReferenceProblem,
    ReferenceResult,
    TransferTimes,
    simulate_reference,
)

T = TypeVar("T")

TICK = 2.0**-10  # s, the unit of tied times
TICK_us = 976.5625  # the same, as a cluster file says it
MIB = 2**20  # bytes, one tick at one GiB/s
GIB_PER_S = 1.073741824  # GB/s
KINDS = ("V100-SXM2-16GB", "T4-16GB", "P100-PCIe-16GB", "CPU-2x-Xeon-E5-2698v4")
ALL_SETTINGS = [
    Settings(order=order, host=host, launch=launch, contention=contention)
    for order, host, launch, contention in itertools.product(
        *(
            get_args(get_type_hints(Settings)[field])
            for field in ("order", "host", "launch", "contention")
        )
    )
]


class Draws:
    """Where random choices come from. Small numbers and False are the simple choices."""

    def __init__(self, integer: Callable[[int, int], int]) -> None:
        self.integer = integer  # (low, high), both included

    def pick(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        return self.integer(1, 100) > 100 - percent


class Network(NamedTuple):
    """A cluster as it is written in a cluster file."""

    kinds: tuple[str, ...]  # [dev]
    forwards: bool  # whether devices pass traffic on
    switches: int
    links: tuple[tuple[str, str, float, float], ...]  # (a, b, GB/s, us)


class Case(NamedTuple):
    """One random problem with one placement."""

    graph: OpGraph
    cluster: Cluster
    job: Job
    settings: Settings
    cost: CostTable
    placement: NDArray[np.int32]  # [op] device index
    priorities: NDArray[np.int64] | None  # [op] least first
    network: Network  # what the cluster was built from
    limits: tuple[Limits, ...] | None = None  # [dev] None = the profiles'
    collectives: Mapping[int, Collective] = MappingProxyType({})  # by op


Play = Callable[[Case], ReferenceResult]  # one way to simulate a case


@lru_cache(maxsize=256)
def build_cluster(network: Network, prefix: str = "", speed: float = 1.0) -> Cluster:
    """Writes a network as a cluster file and reads it; ``speed`` divides every time exactly."""
    lines = ['format = "placewright-cluster/1"', f'name = "{prefix}random"']
    lines.append(f"switches = {[f'{prefix}s{switch}' for switch in range(network.switches)]}")
    for device, kind in enumerate(network.kinds):
        lines += ["[[devices]]", f'name = "{prefix}d{device}"', f'kind = "{kind}"', 'node = "n0"']
        lines += ["forwards = true"] if network.forwards else []
    for a, b, bandwidth_GBps, latency_us in network.links:
        lines += ["[[links]]", f'a = "{prefix}{a}"', f'b = "{prefix}{b}"']
        lines += [f"bandwidth_GBps = {bandwidth_GBps * speed!r}"]
        lines += [f"latency_us = {latency_us / speed!r}"]
    return Cluster.from_toml("\n".join(lines), "random.toml")


def build_cost(
    seconds: Sequence[Sequence[float]],
    launch: Sequence[Sequence[float]],
    kinds: Sequence[str],
    job: Job,
) -> CostTable:
    """Makes a cost table of given seconds, both [op][kind]."""
    return CostTable(
        seconds=np.array(seconds, np.float64)[:, :, None],
        launch=np.array(launch, np.float64),
        source=np.full((len(seconds), len(kinds)), CostSource.FIXED, np.uint8),
        relative_error=np.zeros((len(seconds), len(kinds))),
        kinds=tuple(kinds),
        batches=(job.batch,),
    )


class Scale(NamedTuple):
    """How one case draws its quantities."""

    draws: Draws
    tied: bool

    def seconds(self) -> float:
        if self.tied:
            return self.draws.pick((1, 0, 1, 2, 3)) * TICK
        return self.draws.integer(0, 1000) / 1.1e6

    def bytes(self) -> int:
        if self.tied:
            return self.draws.pick((1, 0, 1, 2, 4)) * MIB
        return self.draws.integer(0, 4_000_000)

    def bandwidth_GBps(self) -> float:
        if self.tied:
            return self.draws.pick((1, 1, 2, 4)) * GIB_PER_S
        return self.draws.integer(30, 300) / 97

    def latency_us(self) -> float:
        if self.tied:
            return self.draws.pick((0, 0, 1, 2)) * TICK_us
        return self.draws.integer(0, 300) * 1.7


def draw_network(scale: Scale, max_devices: int) -> Network:
    """Draws 1 to ``max_devices`` devices: a full mesh, a star, two stars with a neck, or a ring."""
    draws = scale.draws
    count = draws.integer(1, min(4, max_devices))
    if draws.chance(15):
        count = draws.integer(1, max_devices)
    present = KINDS[: draws.integer(1, len(KINDS))]
    kinds = tuple(draws.pick(present) for _ in range(count))
    topology = draws.pick(("mesh", "star", "neck", "ring"))
    if topology == "mesh":
        wires = [(f"d{a}", f"d{b}") for a in range(count) for b in range(a + 1, count)]
    elif topology == "star":
        wires = [(f"d{a}", "s0") for a in range(count)]
    elif topology == "neck":
        wires = [("s0", "s1")] + [(f"d{a}", f"s{draws.integer(0, 1)}") for a in range(count)]
    else:
        ends = [(a, (a + 1) % count) for a in range(count if count > 2 else count - 1)]
        wires = [(f"d{a}", f"d{b}") for a, b in ends]
    uniform = draws.chance(50)
    shared = (scale.bandwidth_GBps(), scale.latency_us())
    return Network(
        kinds=kinds,
        forwards=topology == "ring",
        switches={"star": 1, "neck": 2}.get(topology, 0),
        links=tuple(
            (a, b, *(shared if uniform else (scale.bandwidth_GBps(), scale.latency_us())))
            for a, b in wires
        ),
    )


def draw_graph(scale: Scale, num_ops: int, percent_collectives: int = 0) -> OpGraph:
    """Draws a graph: shared tensors, views, in-place ops, updates, units, control edges."""
    draws = scale.draws
    computing: list[int] = []
    builder = GraphBuilder("random")
    persistent = [builder.parameter(f"p{p}", scale.bytes()) for p in range(draws.integer(0, 3))]
    persistent += [builder.buffer(f"b{b}", scale.bytes()) for b in range(draws.integer(0, 1))]
    window = draws.pick((60, 3, 8))  # how far back an op looks for its inputs
    most_inputs = draws.pick((2, 1, 3, 6))
    with_sync = draws.chance(30)
    tensors: list[int] = []
    for op in range(num_ops):
        recent = tensors[-window:]
        if percent_collectives and draws.chance(percent_collectives):
            read = [draws.pick(recent) for _ in range(draws.integer(0, 3)) if recent]
            made = [Out(scale.bytes()) for _ in range(draws.integer(0, 2))]
            collective = builder.op(
                f"o{op}", op_class=OpClass.COLLECTIVE, inputs=read, outputs=made
            )
            tensors += builder.outputs(collective)
            continue
        inputs = [draws.pick(recent) for _ in range(draws.integer(0, most_inputs)) if recent]
        if tensors and draws.chance(20):
            inputs.append(tensors[0])  # one tensor with many consumers
        if persistent and draws.chance(30):
            inputs.append(draws.pick(persistent))
        owned = [tensor for tensor in inputs if tensor in persistent]
        update = bool(owned) and draws.chance(30)
        handle = builder.op(
            f"o{op}",
            phase=Phase.U if update else Phase.F,
            op_class=OpClass.UPDATE if update else OpClass.OTHER,
            inputs=inputs,
            outputs=[draw_output(scale, inputs) for _ in range(draws.pick((1, 1, 1, 2, 3, 0)))],
            unit_of=draws.pick(computing) if computing and draws.chance(10) else None,
            sync=with_sync and draws.chance(15),
            workspace=draw_affine(scale),
            resident=draw_affine(scale),
            elements=draws.integer(0, 1000) if update else 0,
        )
        computing.append(handle)
        tensors += builder.outputs(handle)
    return builder.build()


def draw_output(scale: Scale, inputs: list[int]) -> Out:
    """Draws a tensor of its own, or a view or new version of an input's storage."""
    if inputs and scale.draws.chance(20):
        return Out(scale.bytes(), storage_of=scale.draws.pick(inputs))
    return Out(scale.bytes())


def draw_affine(scale: Scale) -> tuple[int, int]:
    """Draws bytes that are mostly none, sometimes constant, sometimes grow with the batch."""
    constant = scale.bytes() if scale.draws.chance(15) else 0
    return (constant, scale.bytes() if scale.draws.chance(5) else 0)


def draw_case(draws: Draws, max_ops: int = 60, max_devices: int = 16) -> Case:
    """Draws a whole problem with one placement."""
    scale = Scale(draws, tied=not draws.chance(50))
    num_ops = draws.integer(1, min(12, max_ops))
    if draws.chance(25):
        num_ops = draws.integer(1, max_ops)
    network = draw_network(scale, max_devices)
    graph = draw_graph(scale, num_ops)
    kinds = tuple(dict.fromkeys(network.kinds))
    job = Job(
        batch=draws.pick((1, 4)),
        optimizer=draws.pick(("adam", "sgd", "momentum")),
        precision=draws.pick(("fp32", "bf16")),
    )
    no_launch = draws.chance(30)
    seconds = [[scale.seconds() for _ in kinds] for _ in range(num_ops)]
    launch = [[0.0 if no_launch else scale.seconds() / 4 for _ in kinds] for _ in range(num_ops)]
    settings = Settings(
        order=draws.pick(("program", "ready")),
        host=draws.pick(("one", "per_rank")),
        launch=draws.pick(("eager", "graph")),
        contention=draws.pick(("fifo", "ordered", "port", "none")),
    )
    return Case(
        graph=graph,
        cluster=build_cluster(network),
        job=job,
        settings=settings,
        cost=build_cost(seconds, launch, kinds, job),
        placement=draw_placement(draws, graph, len(network.kinds)),
        priorities=draw_priorities(draws, num_ops) if draws.chance(50) else None,
        network=network,
    )


def draw_placement(draws: Draws, graph: OpGraph, num_devices: int) -> NDArray[np.int32]:
    """Draws a device for every placement unit, [op]."""
    devices = [draws.integer(0, num_devices - 1) for _ in range(graph.num_units)]
    placement = np.array(devices, np.int32)[graph.unit]
    placement[graph.op_class == OpClass.COLLECTIVE] = -1
    return placement


def draw_priorities(draws: Draws, num_ops: int) -> NDArray[np.int64]:
    """Draws priorities with many ties, [op]."""
    return np.array([draws.integer(0, 3) for _ in range(num_ops)], np.int64)


def seeded(rng: np.random.Generator) -> Draws:
    """Returns choices of a numpy generator."""
    return Draws(lambda low, high: int(rng.integers(low, high + 1)))


def random_case(rng: np.random.Generator) -> Case:
    """Draws a problem of 1 to 60 ops on 1 to 16 devices."""
    return draw_case(seeded(rng))


def draw_collective(scale: Scale, cluster: Cluster) -> Collective:
    """Draws a collective of all devices that loads some channels, some more than others."""
    draws, ids = scale.draws, range(len(cluster.channels))
    channels = [channel for channel in ids if draws.chance(60)]
    usage = [draws.pick((1.0, 1.0, 0.5, 2.0)) for _ in channels]
    volume = float(scale.bytes())
    loads = zip(usage, channels, strict=True)
    slowest = max((u / cluster.channels[c].bandwidth for u, c in loads), default=2.0**-30)
    return Collective(
        kind="all_reduce",
        algorithm="ring",
        members=tuple(range(cluster.num_devices)),
        num_bytes=int(volume),
        latency=scale.latency_us() * 1e-6 if not scale.tied else draws.pick((0, 1)) * TICK,
        duration=volume * slowest * draws.pick((1, 1, 2)),
        volume=volume,
        channels=np.array(channels, np.int64),
        usage=np.array(usage, np.float64),
    )


def draw_limits(scale: Scale, slows: bool, costs_time: bool) -> Limits:
    """Draws what one device does at once."""
    draws = scale.draws
    factors = [draws.pick((1.0, 1.5, 2.0)) if slows else 1.0 for _ in range(4)]
    return Limits(
        out_engines=draws.pick((1, 1, 2, 3)),
        in_engines=draws.pick((0, 0, 1, 2)),
        message_overhead=scale.seconds() / 8 if costs_time else 0.0,
        copy_beside_compute=factors[0],
        collective_beside_compute=factors[1],
        compute_beside_copy=(factors[2],) * len(OpClass),
        compute_beside_collective=(factors[3],) * len(OpClass),
    )


def draw_busy_case(draws: Draws, contention: str, max_ops: int = 40) -> Case:
    """Draws a problem with collectives, engine limits, slow-down and every way to send."""
    is_exact = contention != "fair"
    scale = Scale(draws, tied=is_exact and draws.chance(50))
    case = draw_case(draws, max_ops)
    num_ops = draws.integer(1, max_ops)
    graph = draw_graph(scale, num_ops, percent_collectives=draws.pick((0, 15, 30)))
    kinds, cluster = case.cost.kinds, case.cluster
    seconds = [[scale.seconds() for _ in kinds] for _ in range(num_ops)]
    launch = [[scale.seconds() / 4 for _ in kinds] for _ in range(num_ops)]
    costs_time, slows = draws.chance(40), not is_exact and draws.chance(50)
    order = draws.pick(("program", "program", "ready"))
    p2p = draws.pick(("copy", "copy", "inline", "rendezvous")) if order == "program" else "copy"
    return case._replace(
        graph=graph,
        cost=build_cost(seconds, launch, kinds, case.job),
        placement=draw_placement(draws, graph, len(case.network.kinds)),
        priorities=None,
        settings=msgspec.structs.replace(
            case.settings, order=order, p2p=p2p, contention=contention, slow_down=slows
        ),
        limits=tuple(draw_limits(scale, slows, costs_time) for _ in case.network.kinds),
        collectives={
            int(op): draw_collective(scale, cluster)
            for op in np.flatnonzero(graph.op_class == OpClass.COLLECTIVE)
        },
    )


@st.composite
def cases(draw: st.DrawFn, max_ops: int = 8, max_devices: int = 4) -> Case:
    """Small problems for hypothesis; they shrink to few ops, one device, no launch cost."""
    return draw_case(Draws(lambda low, high: draw(st.integers(low, high))), max_ops, max_devices)


def renamed(case: Case, prefix: str) -> Case:
    """Returns the case with other names in the same order."""
    graph = replace(
        case.graph,
        op_names=tuple(prefix + name for name in case.graph.op_names),
        tensor_names=tuple(prefix + name for name in case.graph.tensor_names),
    )
    return case._replace(graph=graph, cluster=build_cluster(case.network, prefix))


def twice_as_fast(case: Case) -> Case:
    """Returns the case with every rate doubled and every latency and duration halved."""
    cost = replace(case.cost, seconds=case.cost.seconds / 2, launch=case.cost.launch / 2)
    return case._replace(cost=cost, cluster=build_cluster(case.network, "", 2.0))


def toy(
    seconds: Sequence[float],
    wires: Sequence[tuple[int, float, Sequence[int]]],
    placement: Sequence[int],
    *,
    sync: Sequence[int] = (),
    **rest: Any,
) -> Case:
    """Builds a problem small enough to work by hand.

    Args:
        seconds: [op] s, the same on every device.
        wires: tensors as (producer, GB, consumers), by producer.
        placement: [op] device index.
        sync: ops that the host waits for.
        rest: see ``timed``.
    """
    builder = GraphBuilder("toy")
    handles: dict[int, int] = {}  # wire -> tensor handle
    for op in range(len(seconds)):
        mine = [wire for wire, (producer, _, _) in enumerate(wires) if producer == op]
        handle = builder.op(
            f"o{op}",
            inputs=[handles[wire] for wire, (_, _, users) in enumerate(wires) if op in users],
            outputs=[Out(int(wires[wire][1] * 1e9)) for wire in mine],
            sync=op in sync,
        )
        handles.update(zip(mine, builder.outputs(handle), strict=True))
    return timed(builder, seconds, placement, **rest)


def timed(
    builder: GraphBuilder,
    seconds: Sequence[float],
    placement: Sequence[int],
    *,
    links: Sequence[tuple[str, str, float, float]] = (("d0", "d1", 1.0, 0.0),),
    launch_seconds: Sequence[float] | None = None,
    priorities: Sequence[int] | None = None,
    **settings: Any,
) -> Case:
    """Gives a graph op times, a network and a placement.

    Args:
        builder: the graph.
        seconds: [op] s, the same on every device.
        placement: [op] device index.
        links: (a, b, GB/s, latency in s) between ``d0``, ``d1``, ... and the switch ``s0``.
        launch_seconds: [op] s, none by default.
        priorities: [op] the least goes first.
        settings: what differs from ``Settings()``.
    """
    ends = {end for link in links for end in link[:2]}
    num_devices = sum(end.startswith("d") for end in ends)
    network = Network(
        kinds=KINDS[:1] * num_devices,
        forwards=False,
        switches=len(ends) - num_devices,
        links=tuple((a, b, rate, latency * 1e6) for a, b, rate, latency in links),
    )
    job = Job(batch=1)
    launch = launch_seconds or [0.0] * len(seconds)
    return Case(
        graph=builder.build(),
        cluster=build_cluster(network),
        job=job,
        settings=Settings(**settings),
        cost=build_cost([[s] for s in seconds], [[s] for s in launch], KINDS[:1], job),
        placement=np.array(placement, np.int32),
        priorities=None if priorities is None else np.array(priorities),
        network=network,
    )


def reference_problem(case: Case) -> ReferenceProblem:
    return ReferenceProblem.build(
        case.graph,
        case.cluster,
        case.job,
        case.settings,
        cost=case.cost,
        limits=case.limits,
        collectives=case.collectives,
    )


def play_reference(case: Case) -> ReferenceResult:
    """Plays a case on the slow simulator."""
    return simulate_reference(reference_problem(case), case.placement, case.priorities)


def compiled_problem(case: Case) -> Problem:
    return Problem.build(
        case.graph,
        case.cluster,
        case.job,
        case.settings,
        cost=case.cost,
        limits=case.limits,
        collectives=case.collectives,
    )


def play_compiled(case: Case) -> ReferenceResult:
    """Plays a case on the compiled simulator and says it in the reference's words."""
    run = run_placement(compiled_problem(case), case.placement, case.priorities)
    fields = ("tensor", "source", "target", "request", "start", "end")
    columns = [getattr(run, f"transfer_{field}").tolist() for field in fields]
    return ReferenceResult(
        step_time=float(run.step_time),
        start=run.start.tolist(),
        end=run.end.tolist(),
        transfers=list(map(TransferTimes, *columns)),
        allocated=run.allocated.tolist(),
    )


WAYS: dict[str, Play] = {"reference": play_reference, "compiled": play_compiled}
