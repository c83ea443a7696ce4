"""The pipeline planner: even and balanced cuts for many layouts, the best ones moved unit by unit.

A layout says how many stages there are, on which devices, and in which rhythm they run. Each gets
the cuts that a dynamic program finds best; the simulator says what that takes. Layouts are tried in
the order of an estimate, corrected for each number of stages and copies by what their first
simulation took. A plan that does not fit runs the forward of its full stages again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from agents.planners.pipeline_bound import estimate
from agents.planners.pipeline_chain import Candidate, Chain
from agents.planners.pipeline_layouts import Layout
from agents.planners.pipeline_run import play
from agents.planners.recorder import Budget
from agents.planners.space import Overflow
from simcore.cost import CostTable
from simcore.errors import PlanError
from simcore.pipeline_build import build_pipeline, semantics_of
from simcore.plan import Plan, Ref, Stage
from simcore.recompute import Recompute
from simcore.simulation import Options, simulate_pipeline

ENUMERATION = 0.7  # of the budget; the rest is for moving cuts
ESTIMATES = 0.5  # of a budget of seconds, for estimates of layouts
FINALISTS = 3  # layouts whose cuts are moved before all have been tried
STEPS = (16, -16, 4, -4, 1, -1)  # units that a cut is moved by
MARGINS = (1.0, 0.85, 0.7)  # of the memory, for what its estimate misses
_GOLDEN = (5.0**0.5 - 1.0) / 2.0  # multiples of it, modulo 1, are spread evenly
_TOO_BIG = 2.0  # a layout that does not fit is taken for that much slower than its estimate

Listener = Callable[[Budget], None]


class Tried(NamedTuple):
    """A pipeline and what the simulator says of it."""

    candidate: Candidate
    step_time: float  # s
    overflow: int  # bytes over capacity, summed over devices
    worst: Overflow | None  # where it does not fit
    full: tuple[int, ...]  # devices that are over capacity
    semantics: tuple[str, ...]

    @property
    def rank(self) -> tuple[int, float]:
        """What decides which of two is better, least first."""
        return self.overflow, self.step_time


@dataclass(slots=True, kw_only=True)
class PipelineSearch:
    """One search for pipelines.

    Attributes:
        chain: the model.
        layouts: what is tried, of which some may change the mathematics.
        allow: changes of the mathematics that the answer may make.
        reserve_memory: bytes to leave free on every GPU.
        listener: called after each simulation.
        tried: every simulation, in order.
    """

    chain: Chain
    layouts: Sequence[Layout]
    allow: frozenset[str] = frozenset()
    reserve_memory: int = 0
    listener: Listener | None = None
    tried: list[Tried] = field(default_factory=list)
    known: dict[Candidate, Tried | None] = field(default_factory=dict)
    changes: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    queues: "tuple[()] | tuple[_Queue, _Queue]" = ()  # allowed layouts and others
    template: Plan = field(init=False)  # without stages; every device has a process of its own
    best: Tried | None = None  # that fits and is allowed
    nearest: Tried | None = None  # that is allowed and does not fit, least over
    apart: Tried | None = None  # that fits and is not allowed

    def __post_init__(self) -> None:
        problem = self.chain.space.problem
        self.template = Plan(
            graph=Ref(name=problem.graph.name, hash=problem.graph.content_hash()),
            cluster=Ref(name=problem.cluster.name, hash=problem.cluster.content_hash()),
            job=problem.job,
            job_hash=problem.job.content_hash(),
            stages=(),
            settings=msgspec.structs.replace(problem.settings, host="per_rank", granularity="task"),
        )

    def run(self, budget: Budget) -> None:
        """Tries layouts, then moves the cuts of the best, until the budget is spent.

        Called again, it goes on.
        """
        if not self.queues:
            allowed = self.allowed
            known = set(allowed)
            other = [layout for layout in self.layouts if layout not in known]
            part = budget.part(ESTIMATES)
            self.queues = (_Queue(self.chain, allowed, part), _Queue(self.chain, other, part))
        first, second = self.queues
        share = ENUMERATION if first.waiting else 1.0
        self._enumerate(first, budget.part(share * (0.5 if second.waiting else 1.0)))
        self._enumerate(second, budget.part(0.5 * share))
        self._improve_best(FINALISTS, budget)
        self._enumerate(first, budget)
        self._improve_best(len(self.layouts), budget)

    @property
    def allowed(self) -> list[Layout]:
        """The layouts that change nothing in the mathematics but what is allowed."""
        return [layout for layout in self.layouts if set(self._semantics(layout)) <= self.allow]

    def _semantics(self, layout: Layout) -> tuple[str, ...]:
        key = (layout.schedule, layout.microbatches)
        if key not in self.changes:
            plan = msgspec.structs.replace(
                self.template, schedule=layout.schedule, microbatches=layout.microbatches
            )
            self.changes[key] = semantics_of(plan, self.chain.space.problem.graph)
        return self.changes[key]

    # layouts

    def _enumerate(self, queue: "_Queue", budget: Budget) -> None:
        """Tries layouts, the most promising first; one, even if nothing is left."""
        while queue.waiting and (budget.left() or not self.tried):
            expected, layout = queue.pop()
            found = self._cut(layout, budget)
            if found is None:
                continue
            if queue.is_new(layout) and budget.left():
                even = self.chain.evenly(found.candidate)
                if even is not None:
                    self.fitted(even, budget)
            queue.note(layout, found.step_time / expected * (_TOO_BIG if found.overflow else 1.0))

    def _cut(self, layout: Layout, budget: Budget) -> Tried | None:
        """Returns a layout with its best cuts; those that need less, where the best do not fit."""
        best: Tried | None = None
        for margin in MARGINS:
            candidate = self.chain.cut(layout, margin=margin)
            found = None if candidate is None else self.fitted(candidate, budget)
            if found is not None and _beats(found, best):
                best = found
            if best is None or not best.overflow or not budget.left():
                break
        return best

    def fitted(self, candidate: Candidate, budget: Budget) -> Tried | None:
        """Simulates a candidate, and again with less memory where it does not fit."""
        found = self.simulate(candidate, budget)
        while found is not None and found.overflow and budget.left():
            smaller = _smaller(found)
            if smaller is None:
                break
            again = self.simulate(smaller, budget)
            if again is None:
                break
            found = again
        return found

    # cuts

    def _improve_best(self, most: int, budget: Budget) -> None:
        """Improves the best plans of so many layouts."""
        best = sorted((t for t in self.tried if set(t.semantics) <= self.allow), key=_rank)
        finalists = {tried.candidate.layout: tried for tried in reversed(best)}
        for tried in sorted(finalists.values(), key=_rank)[:most]:
            self._improve(tried, budget)

    def _improve(self, found: Tried, budget: Budget) -> None:
        """Keeps more where there is room, then moves cuts and whole stages while it helps."""
        found = self._relaxed(found, budget)
        cuts = list(range(1, found.candidate.layout.num_stages))
        groups = [[cut] for cut in cuts] + [list(pair) for pair in pairwise(cuts)]
        still = turn = 0
        while still < len(groups) and budget.left():
            moved = self._moved(found, groups[turn], budget)
            still = 0 if moved is not None else still + 1
            found = moved or found
            turn = (turn + 1) % len(groups)

    def _relaxed(self, found: Tried, budget: Budget) -> Tried:
        """Returns the candidate with stages that run less again, and gradients summed at once.

        Each only where that helps.
        """
        options: list[Callable[[Candidate], Candidate]] = []
        if found.candidate.layout.copies > 1:
            options.append(_with_one_sum)
        for stage, was in enumerate(found.candidate.recompute):
            if was == "full":
                options += [partial(_with_recompute, stage, how) for how in ("none", "selective")]
        for option in options:
            if budget.left():
                other = self.simulate(option(found.candidate), budget)
                found = found if other is None else min(found, other, key=_rank)
        return found

    def _moved(self, found: Tried, cuts: Sequence[int], budget: Budget) -> Tried | None:
        """Returns the candidate with some cuts where it is best, None where they are that."""
        best = found
        for step in STEPS:
            bounds = list(found.candidate.bounds)
            for cut in cuts:
                bounds[cut] += step
            if all(a < b for a, b in pairwise(bounds)) and budget.left():
                candidate = replace(found.candidate, bounds=tuple(bounds), method="shifted")
                moved = self.simulate(candidate, budget)
                best = best if moved is None else min(best, moved, key=_rank)
        return None if best is found else best

    # one plan

    def simulate(self, candidate: Candidate, budget: Budget) -> Tried | None:
        """Returns what a candidate takes, None where no pipeline can run it."""
        if candidate not in self.known:
            self.known[candidate] = self._simulate(candidate)
            if (found := self.known[candidate]) is not None:
                self.tried.append(found)
                self._keep(found)
                budget.charge(1)
                if self.listener is not None:
                    self.listener(budget)
        return self.known[candidate]

    def _keep(self, found: Tried) -> None:
        if not set(found.semantics) <= self.allow:
            if not found.overflow and _beats(found, self.apart):
                self.apart = found
        elif found.overflow:
            if _beats(found, self.nearest):
                self.nearest = found
        elif _beats(found, self.best):
            self.best = found

    def _simulate(self, candidate: Candidate) -> Tried | None:
        if not self.chain.allows(candidate):
            return None
        cost = self.chain.cost(self.chain.samples(candidate.layout))
        try:
            return self._played(candidate, self.plan(candidate), cost)
        except PlanError:  # no stages of a pipeline, a route that is missing, a deadlock
            return None

    def _played(self, candidate: Candidate, plan: Plan, cost: CostTable) -> Tried | None:
        problem = self.chain.space.problem
        task = (problem.graph, problem.cluster, problem.job)
        if candidate.layout.is_asynchronous:
            options = Options(settings=plan.settings, reserve_memory=self.reserve_memory)
            result = simulate_pipeline(*task, plan, options)
            reserved = [use.reserved for use in result.devices]
            return self._judged(candidate, plan, result.step_time, reserved)
        pipeline = build_pipeline(*task, plan, cost=cost)
        played = play(problem, pipeline, plan.settings, reserve_memory=self.reserve_memory)
        if not played.is_legal:
            return None
        return self._judged(candidate, plan, played.step_time, played.reserved.tolist())

    def _judged(
        self, candidate: Candidate, plan: Plan, step_time: float, reserved: Sequence[int]
    ) -> Tried:
        problem = self.chain.space.problem
        over = np.maximum(np.asarray(reserved) - problem.capacity, 0)
        device = int(over.argmax())
        name = problem.cluster.devices[device].name
        worst = Overflow(name, int(reserved[device]), int(problem.capacity[device]))
        return Tried(
            candidate,
            step_time,
            int(over.sum()),
            worst if over.any() else None,
            tuple(np.flatnonzero(over).tolist()),
            plan.semantics,
        )

    def plan(self, candidate: Candidate) -> Plan:
        """Returns a candidate as a plan."""
        problem, layout = self.chain.space.problem, candidate.layout
        devices, units = problem.cluster.device_names, problem.graph.unit_names
        stages = []
        for number, recompute in enumerate(candidate.recompute):
            begin, end = candidate.bounds[number : number + 2]
            stages.append(
                Stage(
                    name=f"stage{number}",
                    devices=tuple(devices[d] for d in layout.stage_devices(number)),
                    ops=tuple(units[unit] for unit in self.chain.order[begin:end].tolist()),
                    mesh={"dp": layout.copies},
                    recompute=recompute,
                )
            )
        return msgspec.structs.replace(
            self.template,
            stages=tuple(stages),
            microbatches=layout.microbatches,
            schedule=layout.schedule,
            optimizer_sharding=layout.sharding,
            buckets=candidate.buckets,
            semantics=self._semantics(layout),
        )


class _Queue:
    """Layouts that wait to be tried; estimates are corrected by what others of a shape took.

    Those that there is no time to estimate come last; they are spread over all shapes.
    """

    def __init__(self, chain: Chain, layouts: Sequence[Layout], budget: Budget) -> None:
        seconds = dict.fromkeys(range(len(layouts)), float("inf"))
        for number in np.argsort(np.arange(len(layouts)) * _GOLDEN % 1.0, kind="stable").tolist():
            seconds[number] = estimate(chain, layouts[number])
            if not budget.left():
                break
        self.chain = chain
        self.waiting = sorted(
            ((seconds[number], number, layout) for number, layout in enumerate(layouts)),
            key=lambda entry: entry[:2],
        )
        self.factor: dict[tuple[int, int], float] = {}

    def pop(self) -> tuple[float, Layout]:
        """Returns the most promising layout, with its estimate in s."""
        place = min(range(len(self.waiting)), key=lambda k: (self._corrected(k), k))
        expected, _, layout = self.waiting.pop(place)
        if expected == float("inf"):
            expected = estimate(self.chain, layout)
        return max(expected, 1e-12), layout

    def _corrected(self, place: int) -> float:
        expected, _, layout = self.waiting[place]
        return expected * self.factor.get(_shape(layout), 1.0)

    def is_new(self, layout: Layout) -> bool:
        """Whether none with as many stages and copies was simulated."""
        return _shape(layout) not in self.factor

    def note(self, layout: Layout, factor: float) -> None:
        """Notes how much longer a layout takes than was estimated."""
        self.factor[_shape(layout)] = factor


def _shape(layout: Layout) -> tuple[int, int]:
    return layout.num_ranks, layout.copies


def _rank(tried: Tried) -> tuple[int, float]:
    return tried.rank


def _beats(found: Tried, other: Tried | None) -> bool:
    return other is None or found.rank < other.rank


def _with_one_sum(candidate: Candidate) -> Candidate:
    return replace(candidate, buckets=msgspec.structs.replace(candidate.buckets, num_bytes=0))


def _with_recompute(stage: int, how: Recompute, candidate: Candidate) -> Candidate:
    recompute = list(candidate.recompute)
    recompute[stage] = how
    return replace(candidate, recompute=tuple(recompute))


def _smaller(found: Tried) -> Candidate | None:
    """Returns the candidate in less memory, None where there is nothing left to do.

    First gradients live in their buckets, where there are copies; then the stages of full devices
    run their forward again.
    """
    candidate = found.candidate
    if candidate.layout.copies > 1 and not candidate.buckets.as_views:
        views = msgspec.structs.replace(candidate.buckets, as_views=True)
        return replace(candidate, buckets=views)
    full = {
        stage
        for stage in range(candidate.layout.num_stages)
        if set(candidate.layout.stage_devices(stage)) & set(found.full)
    }
    recompute = tuple(
        "full" if stage in full else was for stage, was in enumerate(candidate.recompute)
    )
    return None if recompute == candidate.recompute else replace(candidate, recompute=recompute)
