"""What a pipeline decides beside its cuts: devices of every rank, microbatches, schedule."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from agents.planners.space import PlacementSpace
from simcore.cluster import Cluster
from simcore.errors import PlanError
from simcore.graph import Phase
from simcore.pipeline_build import ASYNCHRONOUS, STEADY_MINIBATCHES
from simcore.schedule import Schedule, max_in_flight
from simcore.schedule_names import MAX_ACTIONS, accepts, make_schedule

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved")  # that are tried unasked
MOST_PER_RANK = 4  # microbatches, times the ranks; with more, tasks only get smaller
_ANY_COUNT = frozenset({"1f1b", "gpipe", "zb-h1"})  # schedules that take any number of microbatches
_STAGES_PER_RANK = {"interleaved": 2, "zbv": 2}
_FILL = {"zb-h1": 1 / 3, "zb-h2": 0.0, "zbv": 0.0, "interleaved": 1 / 2, ASYNCHRONOUS: 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What the user asks of a pipeline.

    Attributes:
        microbatches: how many, None = what is fastest.
        schedule: which, None = what is fastest.
        allow: changes of the mathematics that a plan may make, as in `Plan.semantics`.
    """

    microbatches: int | None = None
    schedule: str | None = None
    allow: frozenset[str] = frozenset()


ANYTHING = Demands()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A pipeline without its cuts.

    Attributes:
        devices: device indices, [rank][copy]; copies of a stage share each microbatch.
        microbatches: of a step; one where it is asynchronous, since each is a whole batch.
        schedule: its name.
        sharding: of the optimizer, as in `Plan.optimizer_sharding`.
    """

    devices: tuple[tuple[int, ...], ...]
    microbatches: int
    schedule: str
    sharding: int = 0

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.devices)

    @property
    def copies(self) -> int:
        """Number of copies of every stage."""
        return len(self.devices[0])

    @property
    def num_devices(self) -> int:
        """Number of devices in use."""
        return self.num_ranks * self.copies

    @property
    def per_rank(self) -> int:
        """Number of stages on a rank."""
        return _STAGES_PER_RANK.get(self.schedule, 1)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.num_ranks * self.per_rank

    @property
    def is_asynchronous(self) -> bool:
        """Whether weights are updated after each microbatch, which then is a whole batch."""
        return self.schedule == ASYNCHRONOUS

    @property
    def rounds(self) -> int:
        """Number of microbatches that a batch is divided into."""
        return 1 if self.is_asynchronous else self.microbatches

    @property
    def fill(self) -> float:
        """Seconds to fill and drain, over those of all stages but one for a microbatch: about."""
        return _FILL.get(self.schedule, 1.0)

    def stage_devices(self, stage: int) -> tuple[int, ...]:
        """Returns the devices of a stage."""
        return self.devices[self.chain().stage_rank[stage]]

    def chain(self) -> Schedule:
        """Returns the schedule for stages that are a chain."""
        return _chain(self.schedule, self.num_ranks, self._count, self.per_rank)

    def in_flight(self) -> tuple[list[int], list[int]]:
        """Returns microbatches held at most: to the input and to the weight gradient, [stage]."""
        return _in_flight(self.schedule, self.num_ranks, self._count, self.per_rank)

    @property
    def most_in_flight(self) -> int:
        """Microbatches that a stage holds at most, to the input."""
        if self.schedule in {"1f1b", "zb-h1"}:
            return min(self.microbatches, self.num_ranks)
        return self.microbatches if self.schedule == "gpipe" else max(self.in_flight()[0])

    @property
    def _count(self) -> int:
        """Microbatches that show how the schedule goes on."""
        steady = STEADY_MINIBATCHES * self.num_ranks
        return max(self.microbatches, steady) if self.is_asynchronous else self.microbatches


@lru_cache(maxsize=4096)
def _chain(name: str, ranks: int, microbatches: int, per_rank: int) -> Schedule:
    return make_schedule(name, ranks, microbatches, stages_per_rank=per_rank)


@lru_cache(maxsize=4096)
def _in_flight(
    name: str, ranks: int, microbatches: int, per_rank: int
) -> tuple[list[int], list[int]]:
    schedule = _chain(name, ranks, microbatches, per_rank)
    return max_in_flight(schedule), max_in_flight(schedule, until=Phase.W)


def layouts(space: PlacementSpace, demands: Demands) -> list[Layout]:
    """Returns all layouts that are tried on the devices of a space.

    Every number of stages from 2 and of copies of them that there are devices for and that the
    batch divides by; several ways to put them on devices; numbers of microbatches that divide what
    is left of the batch, `MOST_PER_RANK` for each rank at most; schedules; sharded optimizers.

    Args:
        space: gives the job, the cluster and the devices that may be used.
        demands: may fix some of it.
    """
    batch, found = space.problem.job.batch, []
    if batch is None:
        return []
    for ranks in range(2, min(len(space.devices), space.num_units) + 1):
        for copies in range(1, len(space.devices) // ranks + 1):
            if batch % copies:
                continue
            placed = list(arrangements(space, ranks, copies))
            for schedule, microbatches in _rhythms(batch // copies, ranks, demands):
                for sharding in (0, 1) if copies > 1 else (0,):
                    found += [
                        Layout(
                            devices=devices,
                            microbatches=microbatches,
                            schedule=schedule,
                            sharding=sharding,
                        )
                        for devices in placed
                    ]
    return found


def _rhythms(samples: int, ranks: int, demands: Demands) -> Iterator[tuple[str, int]]:
    """Yields schedules with numbers of microbatches that they take."""
    asked = demands.microbatches
    counts = [m for m in range(1, MOST_PER_RANK * ranks + 1) if samples % m == 0]
    if asked is not None:
        counts = [asked] if samples % asked == 0 else []
    for name in (demands.schedule,) if demands.schedule is not None else SCHEDULES:
        if name == ASYNCHRONOUS:
            yield name, asked or 1
            continue
        for count in counts:
            if count == 1 and name != "gpipe" and demands.schedule is None:
                continue  # all the same
            if _takes(name, ranks, count):
                yield name, count


def _takes(name: str, ranks: int, count: int) -> bool:
    """Whether a schedule can be made for so many ranks and microbatches."""
    per_rank = _STAGES_PER_RANK.get(name, 1)
    if 3 * ranks * per_rank * count <= MAX_ACTIONS:
        if name in _ANY_COUNT:
            return True
        if name == "interleaved":
            return accepts(name, "torch", ranks, count)
    try:
        _chain(name, ranks, count, per_rank)
    except PlanError:
        return False
    return True


def arrangements(
    space: PlacementSpace, ranks: int, copies: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yields ways to put stages on the fastest devices, [rank][copy].

    Neighbours in an order of the devices are neighbouring stages, or copies of one stage. Ways
    between which a cluster does not tell, as far as single routes go, are yielded once.
    """
    seen: set[bytes] = set()
    for order in _orders(space, ranks * copies):
        for devices in _grouped(order, ranks, copies):
            key = _signature(space.problem.cluster, [d for rank in devices for d in rank])
            if key not in seen:
                seen.add(key)
                yield devices


def _grouped(
    order: Sequence[int], ranks: int, copies: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    yield tuple(tuple(order[rank * copies : (rank + 1) * copies]) for rank in range(ranks))
    if copies > 1:
        yield tuple(tuple(order[rank::ranks]) for rank in range(ranks))


def _orders(space: PlacementSpace, count: int) -> list[tuple[int, ...]]:
    """Returns orders of the fastest devices: by index, nearest next, fastest first or last."""
    work = np.where(np.isfinite(space.work), space.work, 0.0).sum(axis=0)
    fastest = sorted(space.devices, key=lambda device: (work[device], device))[:count]
    bandwidth = space.problem.cluster.route_bandwidth
    left = sorted(fastest)
    near = [left.pop(0)]
    while left:
        near.append(min(left, key=lambda device: (-bandwidth[near[-1], device], device)))
        left.remove(near[-1])
    orders = [tuple(sorted(fastest)), tuple(near)]
    if len(set(work[fastest].tolist())) > 1:
        orders += [tuple(fastest), tuple(reversed(fastest))]
    return list(dict.fromkeys(orders))


def _signature(cluster: Cluster, devices: Sequence[int]) -> bytes:
    """Returns what tells an order of devices apart: kinds, memory and routes."""
    grid = np.ix_(devices, devices)
    kinds = [(cluster.devices[d].kind, cluster.devices[d].memory) for d in devices]
    size = cluster.num_devices
    hops = np.diff(cluster.first_hop).reshape(size, size)[grid]
    routes = cluster.route_bandwidth[grid].tobytes() + cluster.route_latency[grid].tobytes()
    return repr(kinds).encode() + hops.tobytes() + routes
