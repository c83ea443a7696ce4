"""Planners under one budget -> the best plan that any of them found, and a lower bound."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from agents.planners.anneal import Anneal
from agents.planners.chain_split import ChainSplit
from agents.planners.constraints import resolve_limits
from agents.planners.cross_entropy import CrossEntropy
from agents.planners.data_parallel import Copies, DataParallel, data_parallel
from agents.planners.exhaustive import Exhaustive
from agents.planners.heft import Heft
from agents.planners.m_etf import MEtf
from agents.planners.m_topo import MTopo
from agents.planners.policy_gradient import PolicyGradient
from agents.planners.random_placement import RandomPlacement
from agents.planners.recorder import Budget, Found, Recorder
from agents.planners.round_robin import RoundRobin
from agents.planners.single_device import CpuOnly, SingleDevice
from agents.planners.space import PlacementSpace, Planner
from agents.planners.tidy import Tidy
from simcore.bounds import placement_bound
from simcore.cluster import Cluster
from simcore.errors import InfeasibleError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.lower import Problem
from simcore.plan import ONE_HOST, Constraints, Plan, Predicted, Provenance, Settings
from simcore.plan_summary import describe_job
from simcore.profile import load_profile
from simcore.result import Result
from simcore.simulation import simulate
from simcore.units import format_bytes

BASELINES: tuple[Planner, ...] = (SingleDevice(), RoundRobin(), RandomPlacement(), ChainSplit())
CONSTRUCTIVE: tuple[Planner, ...] = (MTopo(), MEtf(), Heft(), CpuOnly())
IMPROVERS: tuple[Planner, ...] = (
    Exhaustive(),
    CrossEntropy(),
    PolicyGradient(least_evaluations=10_000, least_seconds=6.0),  # so in searches of a minute
    Anneal(),
    Tidy(),
)
# of what is left of the budget when they start; the others take all
SHARES = {"cross_entropy": 0.3, "ppo": 0.1, "anneal": 0.95}

DATA_PARALLEL = "data_parallel"
DEFAULT_BUDGET = 20.0  # s

Strategy: TypeAlias = Literal["auto", "placement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search stands."""

    stage: str  # compile, or the name of a planner
    best: float | None  # s, step time of the best plan that fits
    finder: str | None
    evaluations: int
    spent: float  # fraction of the budget
    seconds_left: float | None  # None: the budget is in evaluations


Listener: TypeAlias = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PortfolioResult:
    """What a search found.

    Attributes:
        plan: the best plan; where nothing fits, the one that is least over.
        result: its simulation.
        lower_bound: seconds that no plan of the plan spaces in use can beat.
        baselines: step time of each strategy on its own, None where it has no plan that fits.
        notes: why a baseline is None, or what else is to be said about it.
        recorder: all that the search over placements kept.
        interrupted: whether the search was cut short.
        reason: why nothing fits; None where the plan does.
    """

    plan: Plan
    result: Result
    lower_bound: float
    baselines: Mapping[str, float | None]
    notes: Mapping[str, str]
    recorder: Recorder
    interrupted: bool = False
    reason: str | None = None

    @property
    def feasible(self) -> bool:
        """Whether the plan fits the memory."""
        return self.result.feasible


def plan(  # noqa: PLR0913 - what a user decides
    graph: OpGraph,
    cluster: Cluster,
    job: Job,
    *,
    settings: Settings = ONE_HOST,
    strategy: Strategy = "auto",
    budget_seconds: float = DEFAULT_BUDGET,
    evaluations: int | None = None,
    seed: int = 0,
    pins: Mapping[str, str] | None = None,
    exclude: Sequence[str] = (),
    reserve_memory: int = 0,
    progress: Listener | None = None,
) -> PortfolioResult:
    """Searches for the plan with the least step time that fits the memory.

    Args:
        graph: the graph.
        cluster: the cluster.
        job: the job.
        settings: how plans are simulated.
        strategy: ``placement``: a device for every unit; ``auto``: copies of the model too.
        budget_seconds: seconds for the search, unless there are evaluations. The baselines run
            whatever the budget.
        evaluations: number of placements to simulate; then the clock decides nothing, and the same
            seed gives the same plan.
        seed: of all that is drawn at random.
        pins: module path or op name -> device name.
        exclude: names of devices that nothing may run on.
        reserve_memory: bytes to leave free on every GPU.
        progress: called often, with where the search stands; a KeyboardInterrupt ends the search
            with the best plan so far.

    Raises:
        UsageError: pins or exclusions that name nothing or contradict each other.
        PlanError: an op that can run nowhere.
        JobError: a job that the graph cannot run.
        InfeasibleError: no placement is even legal: routes are missing.
    """
    pins = dict(pins or {})
    limits = resolve_limits(graph, cluster, pins, exclude)
    constraints = Constraints(
        pins=pins, exclude=tuple(exclude), reserve_memory_bytes=reserve_memory
    )
    problem = Problem.build(graph, cluster, job, settings, reserve_memory=reserve_memory)
    if progress is not None:
        progress(Progress(
            stage="compile", best=None, finder=None, evaluations=0, spent=0.0, seconds_left=None
        ))  # fmt: skip
    space = PlacementSpace.build(problem, pins=limits.pins, exclude=limits.exclude)
    space.evaluate(space.default[None])  # compiles, before the clock starts
    seconds = None if evaluations is not None else budget_seconds
    search = _Search(space, constraints, strategy, Budget(seconds, evaluations), progress)
    search.run(seed)
    return search.answer(seed)


class _Search:
    """One search: its space, what is spent, what is found."""

    def __init__(
        self,
        space: PlacementSpace,
        constraints: Constraints,
        strategy: Strategy,
        budget: Budget,
        listener: Listener | None,
    ) -> None:
        self.space = space
        self.constraints = constraints
        self.copies_compete = strategy == "auto"
        self.budget = budget
        self.listener = listener
        self.recorder = Recorder(space=space, listener=self._note)
        self.copies: DataParallel | None = None
        self.placement_bound = placement_bound(space.problem, space.allowed)
        self.stage = ""
        self.finished: set[str] = set()  # planners
        self.is_improving = False
        self.interrupted = False
        self.started = time.perf_counter()

    def run(self, seed: int) -> None:
        """Runs the planners, the simple ones first, until the budget is spent."""
        try:
            for number, planner in enumerate((*BASELINES, *CONSTRUCTIVE, *IMPROVERS)):
                self._run(planner, np.random.default_rng([seed, number]))
                if self.copies is None:
                    self._run_copies()
        except KeyboardInterrupt:
            if self.recorder.best is None and self.recorder.nearest is None:
                raise
            self.interrupted = True

    def _run(self, planner: Planner, rng: np.random.Generator) -> None:
        is_baseline, is_improver = planner in BASELINES, planner in IMPROVERS
        if is_baseline or (self.budget.left() and not (is_improver and self._is_settled())):
            self.stage, self.is_improving = planner.name, is_improver
            own = Budget(parent=None if is_baseline else self.budget)
            if is_improver:
                own = self.budget.part(SHARES.get(planner.name, 1.0))
            planner.search(self.space, rng, own, self.recorder)
            self.finished.add(planner.name)
            if is_baseline:
                self.budget.charge(own.used)

    def _run_copies(self) -> None:
        self.stage = DATA_PARALLEL
        self._note(self.recorder, self.budget)
        self.copies = data_parallel(
            self.space,
            reserve_memory=self.constraints.reserve_memory_bytes,
            is_pinned=bool(self.constraints.pins),
        )
        self.recorder.evaluations += len(self.copies.plans)
        self.budget.charge(len(self.copies.plans))

    def _note(self, recorder: Recorder, budget: Budget) -> None:
        """Tells the listener where the search stands, and ends it where nothing better exists."""
        if self.is_improving and self._is_settled():
            budget.stop()
        if self.listener is not None:
            winner = self._winner()
            self.listener(
                Progress(
                    stage=self.stage,
                    best=None if winner is None else winner[1],
                    finder=None if winner is None else winner[0],
                    evaluations=recorder.evaluations,
                    spent=self.budget.spent(),
                    seconds_left=self.budget.seconds_left(),
                )
            )

    def _is_settled(self) -> bool:
        """Whether the best plan is as fast as any placement can be."""
        winner = self._winner()
        return winner is not None and winner[1] <= self.placement_bound * (1 + 1e-9)

    def _rival(self) -> Copies | None:
        """The data-parallel plan that takes part in the choice."""
        return self.copies.best if self.copies is not None and self.copies_compete else None

    def _winner(self) -> tuple[str, float] | None:
        """Returns (finder, step time) of the best plan that fits; a placement wins ties."""
        found, rival = self.recorder.best, self._rival()
        if rival is not None and (found is None or rival.result.step_time < found.step_time):
            return DATA_PARALLEL, rival.result.step_time
        return None if found is None else (found.finder, found.step_time)

    def answer(self, seed: int) -> PortfolioResult:
        """Returns the best plan, simulated again, with everything that is known about it."""
        problem = self.space.problem
        chosen, finder, expected = self._chosen()
        chosen = msgspec.structs.replace(
            chosen, constraints=self.constraints, job_name=describe_job(problem.job)
        )
        result = simulate(problem.graph, problem.cluster, problem.job, chosen)
        assert result.step_time == expected, (result.step_time, expected)
        bound = min(self._bound(), result.step_time)  # equal but for rounding
        baselines, notes = self._baselines()
        provenance = Provenance(
            strategy=finder,
            seed=seed,
            evaluations=self.recorder.evaluations,
            seconds=round(time.perf_counter() - self.started, 3),
            budget_s=self.budget.seconds,
            baselines=baselines,
            baseline_notes=notes,
        )
        return PortfolioResult(
            plan=msgspec.structs.replace(
                chosen,
                predicted=_predicted(problem.cluster, result, bound),
                provenance=provenance,
            ),
            result=result,
            lower_bound=bound,
            baselines=baselines,
            notes=notes,
            recorder=self.recorder,
            interrupted=self.interrupted,
            reason=None if result.feasible else self._reason(),
        )

    def _chosen(self) -> tuple[Plan, str, float]:
        """Returns the best plan, who found it, and its step time as it was recorded."""
        problem, winner, rival = self.space.problem, self._winner(), self._rival()
        if winner is not None and rival is not None and winner[0] == DATA_PARALLEL:
            return rival.plan, *winner
        found = self._found()
        plan = Plan.from_placement(
            problem.graph, problem.cluster, problem.job, found.placement, settings=problem.settings
        )
        return plan, found.finder, found.step_time

    def _found(self) -> Found:
        """Returns the best placement, or the one that is least over."""
        found = self.recorder.best or self.recorder.nearest
        if found is None:
            raise InfeasibleError(
                f"no legal placement of {self.space.problem.graph.name} on "
                f"{self.space.problem.cluster.name}: there is no route between devices that have "
                "to exchange tensors"
            )
        return found

    def _bound(self) -> float:
        """Returns what no plan can beat that is a placement or, where they compete, of copies."""
        plans = self.copies.plans if self.copies is not None and self.copies_compete else ()
        return min([self.placement_bound, *(c.bound for c in plans if c.result.feasible)])

    def _baselines(self) -> tuple[dict[str, float | None], dict[str, str]]:
        """Returns what each strategy found on its own, and notes where there is more to say."""
        times: dict[str, float | None] = {}
        notes: dict[str, str] = {}
        for planner in (*BASELINES, *CONSTRUCTIVE):
            found = self.recorder.by_finder.get(planner.name)
            if found is None and isinstance(planner, CpuOnly):
                continue  # only where nothing else fits
            times[planner.name] = found.step_time if found and found.feasible else None
            if found is None:
                notes[planner.name] = self._why_none(planner)
            elif not found.feasible:
                notes[planner.name] = str(self.space.overflow(found.placement))
            if planner is BASELINES[0]:
                copies = self.copies or DataParallel(note="not run")
                usual = copies.baseline
                times[DATA_PARALLEL] = None if usual is None else usual.result.step_time
                if copies.note:
                    notes[DATA_PARALLEL] = copies.note
        return times, notes

    def _why_none(self, planner: Planner) -> str:
        if isinstance(planner, SingleDevice):
            if self.constraints.pins:
                return "the pins keep the model from being on one GPU alone"
            return "no GPU can run every op"
        if planner.name not in self.finished:
            return "not run: interrupted" if self.interrupted else "not run: the budget is spent"
        return "has no legal placement to propose"

    def _reason(self) -> str:
        """Says why nothing fits, with the device that is fullest."""
        problem = self.space.problem
        worst = self.space.overflow(self._found().placement)
        assert worst is not None
        text = (
            f"nothing found fits: the best attempt {worst}, {format_bytes(worst.excess)} "
            f"({worst.excess} bytes) too much"
        )
        least, room = self.space.least_memory, self.space.total_capacity
        if least > room:
            text += (
                f"; parameters and optimizer state alone take {format_bytes(least)}, and all "
                f"devices together have {format_bytes(room)}"
            )
        return f"{problem.graph.name} on {problem.cluster.name}: {text}"


def _predicted(cluster: Cluster, result: Result, bound: float) -> Predicted:
    kinds = sorted({device.kind for device in cluster.devices})
    return Predicted(
        step_time_s=result.step_time,
        throughput_samples_per_s=result.throughput,
        peak_memory_bytes={use.name: use.reserved for use in result.devices},
        lower_bound_s=bound,
        simulator=f"placewright {_version()}",
        profiles={kind: _profile_hash(kind) for kind in kinds},
    )


def _profile_hash(kind: str) -> str:
    content = msgspec.json.encode(load_profile(kind), order="sorted")
    return hashlib.sha256(content).hexdigest()[:16]


def _version() -> str:
    try:
        return version("placewright")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
