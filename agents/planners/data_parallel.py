"""Data parallel: a copy of the model on each GPU, a slice of the batch for each copy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from agents.planners.space import Overflow, PlacementSpace
from simcore.cluster import Cluster
from simcore.collectives import ring_all_reduce
from simcore.errors import JobError, PlanError
from simcore.lower import Problem
from simcore.plan import Plan
from simcore.result import Result
from simcore.simulation import run_data_parallel
from simcore.units import format_seconds

_RING_STEPS = 20_000  # of the search for a ring over wide routes


class Copies(NamedTuple):
    """One data-parallel plan."""

    plan: Plan
    result: Result
    bound: float  # s, no such plan can be faster: compute and all-reduce without any launch


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """What copies of the model can do.

    Attributes:
        plans: on all GPUs first, then on fewer; empty where copies are not possible.
        note: why not, or on how many GPUs; empty where there is nothing to say.
    """

    plans: tuple[Copies, ...] = ()
    note: str = ""

    @property
    def baseline(self) -> Copies | None:
        """The plan on as many GPUs as the batch divides by, if it fits."""
        return self.plans[0] if self.plans and self.plans[0].result.feasible else None

    @property
    def best(self) -> Copies | None:
        """The fastest plan that fits, on however many GPUs."""
        fitting = (plan for plan in self.plans if plan.result.feasible)
        return min(fitting, key=lambda copies: copies.result.step_time, default=None)


def data_parallel(
    space: PlacementSpace, *, reserve_memory: int = 0, is_pinned: bool = False
) -> DataParallel:
    """Returns data-parallel plans over the GPUs of a space.

    Args:
        space: gives the graph, the job, the settings and the devices that may be used.
        reserve_memory: bytes to leave free on every GPU.
        is_pinned: whether the user pinned parts of the model, which rules copies out.
    """
    if is_pinned:
        return DataParallel(note="a copy of the model is on every GPU, so nothing can be pinned")
    supported = space.problem.supported
    devices = [device for device in space.devices if supported[:, device].all()]
    if len(devices) < 2:
        return DataParallel(note="needs two GPUs that can run the whole model")
    ranked = sorted(devices, key=lambda device: (space.work[:, device].sum(), device))
    try:
        plans = tuple(_plans(space, ranked, reserve_memory))
    except (PlanError, JobError) as error:
        return DataParallel(note=str(error))
    if not plans:
        batch = space.problem.job.batch
        return DataParallel(note=f"a batch of {batch} does not divide by 2 to {len(devices)} GPUs")
    return DataParallel(plans=plans, note=_note(space, plans, len(devices)))


def _plans(space: PlacementSpace, ranked: Sequence[int], reserve_memory: int) -> Iterator[Copies]:
    """Yields a plan per number of GPUs that divides the batch, most first, the fastest GPUs."""
    batch = space.problem.job.batch
    for count in range(len(ranked), 1, -1):
        if batch is None or batch % count == 0:
            yield _copies(space, best_ring(space.problem.cluster, ranked[:count]), reserve_memory)


def _copies(space: PlacementSpace, ring: Sequence[int], reserve_memory: int) -> Copies:
    whole = space.problem
    settings = msgspec.structs.replace(whole.settings, host="per_rank")
    problem = Problem.build(
        whole.graph,
        whole.cluster,
        whole.job,
        settings,
        copies=len(ring),
        reserve_memory=reserve_memory,
    )
    result = run_data_parallel(problem, ring)
    names = [whole.cluster.devices[device].name for device in ring]
    plan = Plan.data_parallel(whole.graph, whole.cluster, whole.job, names, settings=settings)
    slowest = max(use.busy for use in result.devices)
    return Copies(plan, result, slowest + result.collective_time)


def _note(space: PlacementSpace, plans: Sequence[Copies], num_gpus: int) -> str:
    """Says why the plan on most GPUs does not fit, or leaves some out, or is not the best."""
    notes, all_gpus = [], plans[0]
    devices = all_gpus.plan.stages[0].devices
    if len(devices) < num_gpus:
        batch = space.problem.job.batch
        notes.append(
            f"a batch of {batch} does not divide by {num_gpus} GPUs: {len(devices)} are used"
        )
    if not all_gpus.result.feasible:
        worst = max(all_gpus.result.devices, key=lambda use: use.reserved - use.capacity)
        notes.append(str(Overflow(worst.name, worst.reserved, worst.capacity)))
    best = min(plans, key=lambda copies: (not copies.result.feasible, copies.result.step_time))
    if best is not all_gpus and best.result.feasible:
        count, step_time = len(best.plan.stages[0].devices), best.result.step_time
        notes.append(f"{count} GPUs: {format_seconds(step_time)}")
    return "; ".join(notes)


def best_ring(cluster: Cluster, devices: Sequence[int]) -> list[int]:
    """Returns an order of the devices in which a ring all-reduce is fast.

    By index, or the ring whose narrowest route is widest if that is faster; the devices of a node
    stand together.
    """
    by_index = sorted(devices)
    wide = _widest_ring(cluster, by_index)
    size = 2**30  # bytes; large enough that latency does not decide
    if wide is None or not cluster.reachable[np.ix_(by_index, by_index)].all():
        return by_index
    return min((by_index, wide), key=lambda ring: ring_all_reduce(size, cluster, ring))


def _widest_ring(cluster: Cluster, devices: Sequence[int]) -> list[int] | None:
    bandwidth = cluster.route_bandwidth[np.ix_(devices, devices)]
    nodes = [cluster.devices[device].node for device in devices]
    for threshold in np.unique(bandwidth[np.isfinite(bandwidth)])[::-1]:
        ring = _ring(bandwidth >= threshold, nodes)
        if ring is not None:
            return [devices[index] for index in ring]
    return None


def _ring(joined: np.ndarray, nodes: Sequence[str]) -> list[int] | None:
    """Returns the first ring over joined pairs in lexicographic order, None if none is found."""
    count, steps = len(nodes), 0
    path, options = [0], [iter(range(1, count))]
    while path:
        steps += 1
        if steps > _RING_STEPS:
            return None
        here = path[-1]
        if len(path) == count and joined[here, path[0]]:
            return path
        free = set(range(count)) - set(path)
        stays = any(nodes[other] == nodes[here] for other in free)
        for other in options[-1]:
            if other in free and joined[here, other] and (not stays or nodes[other] == nodes[here]):
                path.append(other)
                options.append(iter(range(1, count)))
                break
        else:
            path.pop()
            options.pop()
    return None
