"""Data parallel: a copy of the model on each GPU, a slice of the batch for each copy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from agents.planners.space import Overflow, PlacementSpace
from simcore.bounds import copies_bound
from simcore.errors import JobError, PlanError
from simcore.plan import DEFAULT_BUCKETS, Buckets, Plan
from simcore.result import Result
from simcore.simulation import Options, simulate_copies
from simcore.units import format_seconds

# what torch does; and one sum behind the backward, for where they slow each other too much
BUCKETS = (DEFAULT_BUCKETS, Buckets(num_bytes=0))


class Copies(NamedTuple):
    """One data-parallel plan."""

    plan: Plan
    result: Result
    bound: float  # s, no such plan can be faster
    evaluations: int  # simulations it took to find it


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
    def evaluations(self) -> int:
        """Number of simulations."""
        return sum(copies.evaluations for copies in self.plans)

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
            yield _copies(space, sorted(ranked[:count]), reserve_memory)


def _copies(space: PlacementSpace, devices: Sequence[int], reserve_memory: int) -> Copies:
    """Returns the fastest plan on these devices; one in less memory if that does not fit."""
    problem = space.problem
    task = (problem.graph, problem.cluster, problem.job)
    settings = msgspec.structs.replace(problem.settings, host="per_rank")
    options = Options(settings=settings, reserve_memory=reserve_memory)

    def simulate(buckets: Buckets) -> tuple[Buckets, Result]:
        return buckets, simulate_copies(*task, devices, options, buckets=buckets)

    tried = [simulate(buckets) for buckets in BUCKETS]
    buckets, result = min(tried, key=lambda one: (not one[1].feasible, one[1].step_time))
    if not result.feasible:
        tried.append(simulate(msgspec.structs.replace(buckets, as_views=True)))
        buckets, result = tried[-1]
    names = [problem.cluster.devices[device].name for device in devices]
    plan = Plan.data_parallel(*task, names, settings=settings)
    return Copies(
        plan=msgspec.structs.replace(plan, buckets=buckets),
        result=result,
        bound=copies_bound(*task, devices, settings),
        evaluations=len(tried),
    )


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
