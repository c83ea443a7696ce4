"""Plans that share a model out, each simulated: known ways, groups one by one, and pipelines.

- Known ways: every divisor of the number of GPUs as the size of a shard group, in the styles of
  `simcore.sharding.named` and the two-axis mix of sequence and context parallelism; the rest of the
  GPUs are copies.
- Pipelines whose stages are shared out (`agents.planners.pipeline_shards`).
- Linkage groups chosen one by one (`agents.automap.planner`); may mix styles or have no name.

All are tried on each set of `agents.planners.shard_sets` (all GPUs, those of one server, of one
kind), the last two only where its GPUs are of one kind. Plans that do not fit are tried again with
a sharded optimizer (ZeRO 1 and 3), then also in microbatches that run their forward again. The best
is one that shares out more than the samples, unless none of these fits.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import msgspec

from agents.automap.combined import Combined
from agents.automap.planner import Grouped, GroupSearch
from agents.planners.compiled_clock import search_clock
from agents.planners.pipeline_shards import CombinedSearch, preferred
from agents.planners.recorder import Budget
from agents.planners.shard_bounds import Searched, proven
from agents.planners.shard_reasons import Reasons, reasons_of
from agents.planners.shard_sets import shard_sets
from agents.planners.space import Overflow, PlacementSpace
from simcore.errors import GraphError, JobError, PlanError
from simcore.plan import Plan
from simcore.result import Result
from simcore.shard_summary import layout_name
from simcore.sharding.groups import BATCH
from simcore.sharding.named import STYLES
from simcore.shards import sharded_plan
from simcore.simulation import simulate

_MICROBATCHES = (2, 4, 8, 16, 32)
_SHARDED = (1, 3)  # ZeRO's stages that are tried
_STYLES, _PIPELINES = 0.4, 0.5  # of the seconds, of what is left then; the rest is for groups
_PROOF = 10.0  # s at least for a proof behind a search, else as long as the search

Axes = Mapping[str, tuple[str, int]]


class Sharded(NamedTuple):
    """One plan and its simulation."""

    plan: Plan
    result: Result
    grouped: Grouped | None = None  # what it was made from, if from groups
    search: CombinedSearch | None = None  # that found it, if a pipeline

    @property
    def step_time(self) -> float:
        """Seconds of a step."""
        return self.result.step_time

    @property
    def rank(self) -> tuple[int, float]:
        """What decides which of two is better, least first."""
        return self.result.overflow, self.result.step_time

    @property
    def shares(self) -> bool:
        """Whether more is shared out than the samples: ops, or the optimizer of copies."""
        axes = [groups for stage in self.plan.stages for groups in stage.sharding.values()]
        splits = any(group != BATCH for groups in axes for group in groups)
        is_one = len(self.plan.stages) == 1
        return splits or (is_one and self.plan.optimizer_sharding > 0)


@dataclass(slots=True, kw_only=True)
class Shardings:
    """The search over ways to shard.

    Attributes:
        space: gives the graph, the job, the settings and the devices that may be used.
        reserve_memory: bytes to leave free on every GPU.
        listener: called after each simulation.
        proves: whether meshes are looked at for their bound first, and `run` ends with a proof.
        tried: every plan that was simulated in full, in order; of pipelines the best ones.
        grouped: the best plan of groups on each mesh that was searched, best first.
        note: why nothing was tried; empty where something was.
        proven: s that no plan beats, of all that may be the answer; 0 where it was not looked for.
        searched: what it is proven from.
    """

    space: PlacementSpace
    reserve_memory: int = 0
    listener: Callable[[Budget], None] | None = None
    proves: bool = False
    tried: list[Sharded] = field(default_factory=list)
    grouped: list[Grouped] = field(default_factory=list)
    note: str = ""
    proven: float = 0.0
    searched: Searched = field(init=False)

    def __post_init__(self) -> None:
        self.searched = Searched(sets=shard_sets(self.space.problem, self.devices))

    @property
    def best(self) -> Sharded | None:
        """The fastest plan that fits and shares more out than samples, else any that fits.

        ZeRO only where it is needed or gains more than the model's error.
        """
        fitting = [each for each in self.tried if each.result.feasible]
        plans = [each for each in fitting if each.shares] or fitting
        return preferred(plans, attrgetter("step_time"), lambda p: p.plan.optimizer_sharding)

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
        """Seconds that no plan beats; not proven, if no part of an op is faster than its share."""
        return self.proven or self.searched.floor

    def run(self, budget: Budget) -> None:
        """Simulates one way after another, until the budget is spent."""
        if self.space.problem.graph.loops is None:
            self.note = "only models, HLO and ONNX can be sharded, not a file of measured seconds"
            return
        if len(self.devices) < 2:
            self.note = "needs two GPUs that can run the whole model"
            return
        if not self.searched.sets:
            self.note = "only GPUs share a model out, and there are fewer than two"
            return
        self.searched.all_styles = self._try_styles(budget)
        self._try_pipelines(budget.part(_PIPELINES))
        self._try_groups(budget)
        if not self.tried and not self.note:
            self.note = "the batch or the model divides in none of the known ways"
        if self.proves:
            seconds = budget.seconds
            time = None if seconds is None else max(_PROOF, seconds)
            self.prove(Budget(time, clock=search_clock))

    def prove(self, budget: Budget) -> None:
        """Bounds all that may be the answer; by its floor what the budget is too small for."""
        fitting = [each for each in self.tried if each.result.feasible]
        shares = any(each.shares for each in fitting)
        times = [each.step_time for each in fitting if each.shares or not shares]
        if self.searched.groups is not None:
            self.searched.groups.prove(budget)
        least = min(times, default=math.inf)
        self.proven = proven(self.searched, least, sharded=shares, goes_on=budget.left)

    def reasons(self) -> Reasons | None:
        """Returns why the best plan is as it is; None where there is none that fits."""
        best = self.best
        if best is None:
            return None
        name = layout_name(self.space.problem.graph, best.plan)
        others = [
            (each.step_time, layout_name(self.space.problem.graph, each.plan))
            for each in sorted(self.tried, key=lambda each: each.rank)
            if each.result.feasible and each.step_time > best.step_time
        ]
        runner_up = next((other for other in others if other[1] != name), None)
        pair = (best.plan, best.step_time)
        found = (best.grouped, best.search, runner_up)
        return reasons_of(self.space.problem, pair, *found, shares=best.shares)

    def _try_styles(self, budget: Budget) -> bool:
        """Simulates the known ways; returns whether all of them."""
        own, is_all = budget.part(_STYLES), True
        for each in self.searched.sets:
            for axes in _ways(len(each.names)):
                if not (own.left() if self.tried else budget.left()):
                    if not self.tried:
                        self.note = self.note or "the budget ended before anything was tried"
                    return False
                way = partial(self._styled, each.names, axes)
                is_all &= self._try(way, own if self.tried else budget)
        return is_all

    def _try_pipelines(self, budget: Budget) -> None:
        """Simulates the best pipeline of sharded stages on each set of GPUs of one kind."""
        index = self.space.problem.cluster.device_index
        sets = [each for each in self.searched.sets if each.is_uniform]
        for each in reversed(sets):
            devices = [index(name) for name in each.names]
            problem = Combined.build(self.space, devices, reserve_memory=self.reserve_memory)
            search = CombinedSearch(problem, self.listener, limit=self._limit())
            self.searched.pipelines.append((each, search.bound))
            if not budget.left():
                continue
            try:
                search.run(budget.part(1.0 if each is sets[0] else 0.5))
            finally:  # an interrupted search has a best plan too
                found = self._simulate(partial(getattr, search, "plan"), 0, 1)
                if found is not None:
                    self.tried[-1] = found._replace(search=search)

    def _try_groups(self, budget: Budget) -> None:
        """Simulates the best plans of groups."""
        sets = [each.names for each in self.searched.sets if each.is_uniform]
        if not sets:
            return
        self.searched.groups = search = GroupSearch(
            space=self.space,
            sets=sets,
            reserve_memory=self.reserve_memory,
            proves=self.proves,
            limit=self._limit(),
        )
        search.run(budget.part(0.9))
        self.grouped = search.found
        for each in self.grouped:
            before = len(self.tried)
            self._try(partial(_plan_of, each), budget)
            self.tried[before:] = [t._replace(grouped=each) for t in self.tried[before:]]

    def _limit(self) -> float:
        """Returns s of the best plan that shares something out, inf where there is none."""
        best = self.best
        return best.step_time if best is not None and best.shares else math.inf

    def _try(self, make: Callable[[], Plan | None], budget: Budget) -> bool:
        """Simulates a way; as long as it does not fit, in less memory; False: it was cut short."""
        for sharding, microbatches in _fallbacks():
            if not budget.left():
                return False
            found = self._simulate(make, sharding, microbatches)
            budget.charge(1)
            if self.listener is not None:
                self.listener(budget)
            if found is None or found.result.feasible:
                return True
        return True

    def _styled(self, names: Sequence[str], axes: Axes) -> Plan:
        """Returns the plan of styles."""
        problem = self.space.problem
        return sharded_plan(problem.graph, problem.cluster, problem.job, names, axes)

    def _simulate(
        self, make: Callable[[], Plan | None], sharding: int, microbatches: int
    ) -> Sharded | None:
        """Returns a plan and its simulation, None where it does not exist."""
        problem = self.space.problem
        task = (problem.graph, problem.cluster, problem.job)
        try:
            plan = make()
            if plan is None:
                return None
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


def _ways(count: int) -> Iterator[Axes]:
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


def _fallbacks() -> Iterator[tuple[int, int]]:
    """Yields ZeRO's stage and microbatches, each for less memory than before."""
    yield 0, 1
    yield from ((sharding, 1) for sharding in _SHARDED)
    yield from ((3, microbatches) for microbatches in _MICROBATCHES)


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
