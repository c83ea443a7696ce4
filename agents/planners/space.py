"""The placement space: devices a unit may use, what a placement costs, estimates to plan by.

Axes: unit (what a placement decides), dev, plan.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from agents.planners.recorder import Budget, Recorder, Scores
from simcore.errors import PlanError
from simcore.graph import OpClass, OpGraph, Phase, Sized
from simcore.lower import Problem
from simcore.profile_store import load_profile
from simcore.simulation import simulate_batch
from simcore.units import format_bytes


class Planner(Protocol):
    """One strategy: proposes placements of a space until it has no more ideas or no budget."""

    @property
    def name(self) -> str:
        """What reports call it."""

    def search(
        self,
        space: "PlacementSpace",
        rng: np.random.Generator,
        budget: Budget,
        recorder: Recorder,
    ) -> None:
        """Proposes placements through `recorder.evaluate`; all it draws comes from `rng`."""


class Overflow(NamedTuple):
    """The device that a placement fills most beyond its capacity."""

    device: str
    reserved: int  # bytes it needs
    capacity: int  # bytes it has

    @property
    def excess(self) -> int:
        """Bytes by which it is over."""
        return self.reserved - self.capacity

    def __str__(self) -> str:
        return (
            f"needs {format_bytes(self.reserved)} on {self.device}, which has "
            f"{format_bytes(self.capacity)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementSpace:
    """All placements of a problem that the user's constraints allow."""

    problem: Problem
    allowed: NDArray[np.bool_]  # [unit, dev]
    devices: tuple[int, ...]  # the GPUs that may be used; all devices where there is no GPU
    order: NDArray[np.int32]  # [unit] units by their first op that computes
    seconds: NDArray[np.float64]  # [op, dev] inf where its unit may not run
    work: NDArray[np.float64]  # [unit, dev] s of the unit's ops, inf where it may not run
    default: NDArray[np.int32]  # [unit] where it goes if a strategy's choice is not allowed
    tensor_bytes: NDArray[np.int64]  # [tensor]
    memory: NDArray[np.float64]  # [unit] bytes it keeps on its device through most of the step
    room: NDArray[np.float64]  # [dev] bytes of kept memory that fit, estimated

    @classmethod
    def build(
        cls,
        problem: Problem,
        *,
        pins: Mapping[int, int] | None = None,
        exclude: Collection[int] = (),
    ) -> "PlacementSpace":
        """Returns the space of a problem.

        Args:
            problem: the lowered problem.
            pins: unit -> device.
            exclude: devices that nothing may run on.

        Raises:
            PlanError: a unit has no device left.
        """
        supported = problem.supported
        allowed = supported.copy()
        allowed[:, list(exclude)] = False
        for unit, device in (pins or {}).items():
            allowed[unit, np.arange(allowed.shape[1]) != device] = False
        _check(problem, supported, allowed)
        seconds = np.where(allowed[problem.graph.unit], _seconds(problem), np.inf)
        work = np.zeros(allowed.shape)
        np.add.at(work, problem.graph.unit, seconds)
        devices = _spread_over(problem, set(exclude))
        sized = problem.graph.at_batch(problem.batch)
        memory, extra = _kept_memory(problem, sized)
        growth = 1.0 + problem.fragmentation
        return cls(
            problem=problem,
            allowed=allowed,
            devices=devices,
            order=_program_order(problem.graph),
            seconds=seconds,
            work=work,
            default=_defaults(work, devices),
            tensor_bytes=sized.tensor_bytes,
            memory=memory,
            room=np.maximum((problem.capacity - problem.context) / growth - extra, 0.0),
        )

    @property
    def num_units(self) -> int:
        """Number of placement units."""
        return len(self.allowed)

    @property
    def num_devices(self) -> int:
        """Number of devices of the cluster, those that may not be used included."""
        return len(self.problem.cluster.devices)

    @property
    def least_memory(self) -> int:
        """Bytes of parameters, buffers and optimizer state: what every placement has to hold."""
        graph, job = self.problem.graph, self.problem.job
        sized = graph.at_batch(self.problem.batch)
        state = graph.elements.sum() * job.state_bytes_per_element()
        held = sized.storage_bytes[graph.persistent_storage].sum()
        return int(held + state + sized.resident.sum())

    @property
    def total_capacity(self) -> int:
        """Bytes that all devices have together that any unit may use."""
        return int(self.problem.capacity[self.allowed.any(axis=0)].sum())

    def evaluate(self, unit_placements: NDArray[np.integer]) -> Scores:
        """Simulates placements, int [plan, unit]; the result does not depend on the threads."""
        plans = self.problem.expand(unit_placements)
        outcome = simulate_batch(self.problem, plans)
        return Scores(outcome.step_time, outcome.overflow, outcome.status)

    def complexity(self, unit_placement: NDArray[np.integer]) -> tuple[int, int]:
        """Returns devices used and changes of device in program order of a placement, [unit]."""
        line = unit_placement[self.order]
        return len(np.unique(line)), int((line[1:] != line[:-1]).sum())

    def repair(self, unit_placements: NDArray[np.integer]) -> NDArray[np.int32]:
        """Returns the placements, [..., unit], with every unit that may not be there moved."""
        fits = self.allowed[np.arange(self.num_units), unit_placements]
        return np.where(fits, unit_placements, self.default).astype(np.int32)

    def overflow(self, unit_placement: NDArray[np.integer]) -> Overflow | None:
        """Returns where a placement, [unit], does not fit; None where it does."""
        outcome = simulate_batch(self.problem, self.problem.expand(unit_placement[None]))
        over = outcome.reserved[0] - self.problem.capacity
        device = int(over.argmax())
        if over[device] <= 0:
            return None
        name = self.problem.cluster.devices[device].name
        return Overflow(name, int(outcome.reserved[0, device]), int(self.problem.capacity[device]))


def _check(problem: Problem, supported: NDArray[np.bool_], allowed: NDArray[np.bool_]) -> None:
    """Refuses a unit without a device."""
    lost = np.flatnonzero(~allowed.any(axis=1))
    if not len(lost):
        return
    unit = int(lost[0])
    name = problem.graph.unit_names[unit]
    where = [d.name for d, ok in zip(problem.cluster.devices, supported[unit], strict=True) if ok]
    if not where:
        raise PlanError(f"op {name!r} can run on no device of {problem.cluster.name}")
    raise PlanError(f"op {name!r} can run on {', '.join(where)} only, which is not allowed")


def _spread_over(problem: Problem, exclude: set[int]) -> tuple[int, ...]:
    """Returns the devices that simple strategies use: no CPU where there is a GPU."""
    kinds = [device.kind for device in problem.cluster.devices]
    left = [device for device in range(len(kinds)) if device not in exclude]
    gpus = [device for device in left if not load_profile(kinds[device]).is_cpu]
    return tuple(gpus or left)


def _program_order(graph: OpGraph) -> NDArray[np.int32]:
    """Returns units by their first op that is no graph input: inputs may come long before."""
    first = np.full(graph.num_units, graph.num_ops, np.int64)
    computes = np.flatnonzero(graph.op_class != OpClass.INPUT)
    np.minimum.at(first, graph.unit[computes], computes)
    return np.argsort(first, kind="stable").astype(np.int32)


def _defaults(work: NDArray[np.float64], devices: tuple[int, ...]) -> NDArray[np.int32]:
    """Returns each unit's fastest device, among those that strategies spread over if it may."""
    preferred = np.full(work.shape, np.inf)
    preferred[:, list(devices)] = work[:, list(devices)]
    preferred = np.where(np.isinf(preferred).all(axis=1)[:, None], work, preferred)
    fastest: NDArray[np.intp] = preferred.argmin(axis=1)
    return fastest.astype(np.int32)


def _seconds(problem: Problem) -> NDArray[np.float64]:
    """Returns the seconds of every op on every device, [op, dev]."""
    cost = problem.cost
    kinds = [cost.kinds.index(device.kind) for device in problem.cluster.devices]
    seconds: NDArray[np.float64] = cost.seconds[:, kinds, cost.batches.index(problem.batch)]
    return seconds


def _kept_memory(problem: Problem, sized: Sized) -> tuple[NDArray[np.float64], float]:
    """Returns bytes that each unit keeps, [unit], and the bytes of what comes and goes.

    Kept are parameters, optimizer state, activations that the backward reads again and gradients
    that wait for the update. How much more there is at the peak is taken from a simulation of all
    units on one device.
    """
    graph = problem.graph
    kept = sized.resident + graph.elements * float(problem.job.state_bytes_per_element())
    reader = graph.consumers
    tensor = np.repeat(np.arange(graph.num_tensors), np.diff(graph.first_consumer))
    held = graph.tensor_producer[tensor] < 0
    pairs = np.stack([graph.unit[reader[held]], graph.tensor_storage[tensor[held]]])
    holder = np.unique(pairs, axis=1)
    memory = np.zeros(graph.num_units)
    np.add.at(memory, graph.unit, kept)
    np.add.at(memory, holder[0], sized.storage_bytes[holder[1]])
    writer, storages = _long_lived(graph, tensor)
    np.add.at(memory, graph.unit[writer], sized.storage_bytes[storages])
    whole = np.flatnonzero(problem.supported.all(axis=0))
    if not len(whole) or not memory.sum():
        return memory, 0.0
    placement = np.full((1, graph.num_ops), whole[0], np.int32)
    peak = float(simulate_batch(problem, placement).allocated[0, whole[0]])
    return memory * min(1.0, peak / memory.sum()), max(0.0, peak - memory.sum())


def _long_lived(
    graph: OpGraph, tensor_of_use: NDArray[np.integer]
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Returns (first writer, storage) of what is read in a later phase than it is written in."""
    written = np.flatnonzero(graph.tensor_producer >= 0)
    first = np.full(graph.num_storages, graph.num_ops - 1, np.int64)
    np.minimum.at(first, graph.tensor_storage[written], graph.tensor_producer[written])
    last = np.zeros(graph.num_storages, np.int64)
    np.maximum.at(last, graph.tensor_storage[tensor_of_use], graph.consumers)
    era = np.where(graph.phase == Phase.F, 0, np.where(graph.phase == Phase.U, 2, 1))
    kept = np.flatnonzero((era[first] < era[last]) & ~graph.persistent_storage)
    return first[kept], kept
