"""The well-known ways to share a model out over a mesh, each simulated: what a search must beat.

Every divisor of the number of GPUs is tried as the size of a shard group, in the styles of
`simcore.sharding.named` and the two-axis mix of sequence and context parallelism; the rest of the
GPUs are copies. Plans that do not fit are tried again with a sharded optimizer (ZeRO 1 and 3), then
also in microbatches that run their forward again. Behind the styles come plans that choose linkage
groups one by one (`agents.automap.planner`), which may mix styles or have no name.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from agents.automap.explain import explain_groups
from agents.automap.planner import Grouped, grouped_plans
from agents.planners.recorder import Budget
from agents.planners.space import Overflow, PlacementSpace
from simcore.bounds import ROUNDING
from simcore.errors import GraphError, JobError, PlanError
from simcore.plan import Plan
from simcore.result import Result
from simcore.shard_summary import layout_name
from simcore.sharding.named import STYLES
from simcore.shards import sharded_plan
from simcore.simulation import simulate
from simcore.units import format_seconds

_MICROBATCHES = (2, 4, 8, 16, 32)
_SHARDED = (1, 3)  # ZeRO's stages that are tried
_STYLES = 0.5  # of the seconds; the rest is for groups

Axes = Mapping[str, tuple[str, int]]


class Sharded(NamedTuple):
    """One plan and its simulation."""

    plan: Plan
    result: Result

    @property
    def step_time(self) -> float:
        """Seconds of a step."""
        return self.result.step_time

    @property
    def rank(self) -> tuple[int, float]:
        """What decides which of two is better, least first."""
        return self.result.overflow, self.result.step_time


@dataclass(slots=True, kw_only=True)
class Shardings:
    """The search over known ways to shard.

    Attributes:
        space: gives the graph, the job, the settings and the devices that may be used.
        reserve_memory: bytes to leave free on every GPU.
        listener: called after each simulation.
        tried: every simulation, in order.
        grouped: the best plan of groups on each mesh that was searched, best first.
        chosen: the plan of groups that a plan was made from, by number of the simulation.
        note: why nothing was tried; empty where something was.
    """

    space: PlacementSpace
    reserve_memory: int = 0
    listener: Callable[[Budget], None] | None = None
    tried: list[Sharded] = field(default_factory=list)
    grouped: list[Grouped] = field(default_factory=list)
    chosen: dict[int, Grouped] = field(default_factory=dict)
    note: str = ""

    @property
    def best(self) -> Sharded | None:
        """The fastest plan that fits."""
        fitting = (each for each in self.tried if each.result.feasible)
        return min(fitting, key=lambda each: each.step_time, default=None)

    @property
    def nearest(self) -> Sharded | None:
        """The plan that is least over, where none fits."""
        return min(self.tried, key=lambda each: each.rank, default=None)

    @property
    def worst(self) -> Overflow | None:
        """Where the nearest plan does not fit."""
        found = self.nearest
        if found is None or found.result.feasible:
            return None
        use = max(found.result.devices, key=lambda each: each.reserved - each.capacity)
        return Overflow(use.name, use.reserved, use.capacity)

    @property
    def devices(self) -> list[int]:
        """The GPUs that can run the whole model."""
        supported = self.space.problem.supported
        return [device for device in self.space.devices if supported[:, device].all()]

    @property
    def bound(self) -> float:
        """Seconds that no sharded plan beats if no part of an op is faster than its share."""
        problem = self.space.problem
        fastest = problem.seconds[:, self.devices].min(axis=1) if self.devices else [0.0]
        return float(sum(fastest)) / max(1, len(self.devices)) * (1.0 - ROUNDING)

    def run(self, budget: Budget) -> None:
        """Simulates one way after another, until the budget is spent."""
        if self.space.problem.graph.loops is None:
            self.note = "only captured models can be sharded"
            return
        if len(self.devices) < 2:
            self.note = "needs two GPUs that can run the whole model"
            return
        for axes in self._ways(len(self.devices)):
            if not budget.left():
                if not self.tried:
                    self.note = self.note or "the budget ended before anything was tried"
                return
            if self.tried and budget.seconds is not None and budget.spent() > _STYLES:
                break
            self._try(partial(self._styled, axes), budget)
        self._try_groups(budget)
        if not self.tried and not self.note:
            self.note = "the batch or the model divides in none of the known ways"

    def _ways(self, count: int) -> Iterator[Axes]:
        """Yields what the axes beside ``dp`` are."""
        yield {}
        sizes = [size for size in range(2, count + 1) if count % size == 0]
        for size in sizes:
            for style in STYLES:
                yield {_AXIS[style]: (style, size)}
        for size in sizes:
            for inner in range(2, size):
                if size % inner == 0:
                    yield {"cp": ("context", size // inner), "tp": ("sequence", inner)}

    def explain(self) -> list[str]:
        """Returns why the best plan splits what it splits; nothing where it is a known style."""
        best = self.best
        number = next((n for n, each in enumerate(self.tried) if each is best), -1)
        if number not in self.chosen:
            return []
        fitting = [each for each in self.tried if each.result.feasible and each is not best]
        second = min(fitting, key=lambda each: each.step_time, default=None)
        lines = explain_groups(self.chosen[number])
        if second is not None and best is not None:
            name = layout_name(self.space.problem.graph, second.plan)
            more = format_seconds(second.step_time - best.step_time)
            lines.append(f"Runner-up: {name}, {format_seconds(second.step_time)} ({more} more).")
        return lines

    def _try_groups(self, budget: Budget) -> None:
        """Simulates the best plans of groups."""
        kinds = {self.space.problem.cluster.devices[device].kind for device in self.devices}
        if len(kinds) > 1 or not budget.left():
            return
        self.grouped = grouped_plans(
            self.space, self.devices, budget.part(0.9), reserve_memory=self.reserve_memory
        )
        for each in self.grouped:
            before = len(self.tried)
            self._try(partial(_plan_of, each), budget)
            self.chosen |= dict.fromkeys(range(before, len(self.tried)), each)

    def _try(self, make: Callable[[], Plan], budget: Budget) -> None:
        """Simulates a way; as long as it does not fit, in less memory."""
        for sharding, microbatches in self._fallbacks():
            if not budget.left():
                return
            found = self._simulate(make, sharding, microbatches)
            budget.charge(1)
            if self.listener is not None:
                self.listener(budget)
            if found is None or found.result.feasible:
                return

    def _fallbacks(self) -> Iterator[tuple[int, int]]:
        yield 0, 1
        yield from ((sharding, 1) for sharding in _SHARDED)
        yield from ((3, microbatches) for microbatches in _MICROBATCHES)

    def _styled(self, axes: Axes) -> Plan:
        """Returns the plan of styles."""
        problem = self.space.problem
        names = [problem.cluster.devices[device].name for device in self.devices]
        return sharded_plan(problem.graph, problem.cluster, problem.job, names, axes)

    def _simulate(
        self, make: Callable[[], Plan], sharding: int, microbatches: int
    ) -> Sharded | None:
        """Returns a plan and its simulation, None where it does not exist."""
        problem = self.space.problem
        task = (problem.graph, problem.cluster, problem.job)
        try:
            plan = make()
            settings = msgspec.structs.replace(problem.settings, host="per_rank")
            constraints = msgspec.structs.replace(
                plan.constraints, reserve_memory_bytes=self.reserve_memory
            )
            plan = msgspec.structs.replace(plan, settings=settings, constraints=constraints)
            if sharding or microbatches > 1:
                plan = _accumulating(plan, sharding, microbatches)
            found = Sharded(plan, simulate(*task, plan))
        except (PlanError, JobError, GraphError) as error:
            self.note = self.note or str(error)
            return None
        self.tried.append(found)
        return found


_AXIS = {"tensor": "tp", "sequence": "tp", "context": "cp", "expert": "ep"}


def _plan_of(grouped: Grouped) -> Plan:
    return grouped.plan


def _accumulating(plan: Plan, sharding: int, microbatches: int) -> Plan:
    """Returns the plan as a pipeline of one stage, which knows sharded optimizers."""
    stage = msgspec.structs.replace(
        plan.stages[0], recompute="full" if microbatches > 1 else "none"
    )
    return msgspec.structs.replace(
        plan,
        stages=(stage,),
        schedule="gpipe",
        microbatches=microbatches,
        optimizer_sharding=sharding,
    )
