"""One search of the portfolio: which planner runs when, and what all of them found."""

import time
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from agents.planners.anneal import Anneal
from agents.planners.chain_split import ChainSplit
from agents.planners.cross_entropy import CrossEntropy
from agents.planners.data_parallel import Copies, DataParallel, data_parallel
from agents.planners.exhaustive import Exhaustive
from agents.planners.heft import Heft
from agents.planners.m_etf import MEtf
from agents.planners.m_topo import MTopo
from agents.planners.pipeline_layouts import Demands
from agents.planners.pipeline_plans import Found as Pipelined
from agents.planners.pipeline_plans import Pipelines
from agents.planners.policy_gradient import PolicyGradient
from agents.planners.random_placement import RandomPlacement
from agents.planners.recorder import Budget, Found, Recorder
from agents.planners.round_robin import RoundRobin
from agents.planners.sharding import Sharded, Shardings
from agents.planners.single_device import CpuOnly, SingleDevice
from agents.planners.space import PlacementSpace, Planner
from agents.planners.tidy import Tidy
from agents.portfolio_result import Listener, PortfolioResult, Progress, predicted
from simcore.bounds import placement_bound
from simcore.errors import InfeasibleError
from simcore.plan import Constraints, Plan, Provenance
from simcore.plan_summary import MODEL_ERROR, describe_job
from simcore.shard_summary import layout_name
from simcore.simulation import simulate
from simcore.units import format_bytes, format_seconds

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
SHARES = {"cross_entropy": 0.3, "ppo": 0.1, "anneal": 0.95, "eagle": 0.3, "mars": 0.3}

DATA_PARALLEL = "data_parallel"
PIPELINE = "pipeline"
SHARDING = "sharding"
PIPELINE_SHARE = 0.15  # of what is left of the budget, where placements compete
SHARDING_SHARE = 0.1
ALONE = (PIPELINE, SHARDING)  # strategies without placements

Strategy: TypeAlias = Literal["auto", "placement", "pipeline", "sharding"]


class Search:
    """One search: its space, what is spent, what is found."""

    def __init__(
        self,
        space: PlacementSpace,
        constraints: Constraints,
        choice: tuple[Strategy, Demands],
        budget: Budget,
        listener: Listener | None,
        learners: tuple[Planner, ...] = (),
    ) -> None:
        self.learners = learners  # run before the improvers
        self.space = space
        self.constraints = constraints
        self.strategy, self.demands = choice
        self.budget = budget
        self.listener = listener
        self.recorder = Recorder(space=space, listener=self._note)
        self.copies: DataParallel | None = None
        self.pipelines: Pipelines | None = None
        self.shardings: Shardings | None = None
        self.placement_bound = placement_bound(space.problem, space.allowed)
        self.stage = ""
        self.finished: set[str] = set()  # planners
        self.is_improving = False
        self.interrupted = False
        self.started = time.perf_counter()

    def run(self, seed: int) -> None:
        """Runs the planners, the simple ones first, until the budget is spent."""
        try:
            for number, planner in enumerate(self._planners()):
                if planner is IMPROVERS[0]:
                    self._run_shardings()
                    self._run_pipelines()
                self._run(planner, np.random.default_rng([seed, number]))
                if self.copies is None:
                    self._run_copies()
            if self.strategy in ALONE:
                self._run_shardings()
                self._run_pipelines()
        except KeyboardInterrupt:
            if self._nothing_found():
                raise
            self.interrupted = True

    def _planners(self) -> tuple[Planner, ...]:
        if self.strategy in ALONE:
            return BASELINES[:1]
        return (*BASELINES, *CONSTRUCTIVE, IMPROVERS[0], *self.learners, *IMPROVERS[1:])

    def _nothing_found(self) -> bool:
        if self.strategy == PIPELINE:
            found = self.pipelines
            return found is None or (found.best is None and found.nearest is None)
        if self.strategy == SHARDING:
            return self.shardings is None or self.shardings.nearest is None
        return self.recorder.best is None and self.recorder.nearest is None

    def _run(self, planner: Planner, rng: np.random.Generator) -> None:
        is_baseline, is_improver = planner in BASELINES, planner in (*IMPROVERS, *self.learners)
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
        self.recorder.evaluations += self.copies.evaluations
        self.budget.charge(self.copies.evaluations)

    def _run_pipelines(self) -> None:
        """Searches for pipelines, unless nothing of the budget is left or none can win."""
        is_only = self.strategy == PIPELINE
        if self.strategy in {"placement", SHARDING} or not (is_only or self.budget.left()):
            return
        self.stage, self.is_improving = PIPELINE, False
        self.pipelines = Pipelines.build(
            self.space,
            self.demands,
            reserve_memory=self.constraints.reserve_memory_bytes,
            listener=self._note_other,
        )
        self._note(self.recorder, self.budget)
        winner = self._winner()
        if is_only or winner is None or winner[1] > self.pipelines.least:
            self.pipelines.run(self.budget.part(1.0 if is_only else PIPELINE_SHARE))
        winner = self._winner()
        if winner is not None and winner[0] == PIPELINE and self._is_settled():
            self.pipelines.run(self.budget.part(1.0))  # nothing else can be better

    def _run_shardings(self) -> None:
        """Simulates the known ways to shard, unless nothing of the budget is left."""
        is_only = self.strategy == SHARDING
        is_out = self.strategy in {"placement", PIPELINE} or bool(self.constraints.pins)
        if is_out or not (is_only or self.budget.left()):
            return
        self.stage, self.is_improving = SHARDING, False
        self.shardings = Shardings(
            space=self.space,
            reserve_memory=self.constraints.reserve_memory_bytes,
            listener=self._note_other,
        )
        self._note(self.recorder, self.budget)
        winner = self._winner()
        if is_only or winner is None or winner[1] > self.shardings.bound:
            self.shardings.run(self.budget.part(1.0 if is_only else SHARDING_SHARE))

    def _note_other(self, budget: Budget) -> None:
        self.recorder.evaluations += 1
        self._note(self.recorder, budget)

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
        return self.copies.best if self.copies is not None and self.strategy == "auto" else None

    def _winner(self) -> tuple[str, float] | None:
        """Returns (finder, step time) of the best plan that fits; of equal ones a placement."""
        found, rival = self.recorder.best, self._rival()
        pipeline = None if self.pipelines is None else self.pipelines.best
        times = []
        if found is not None and self.strategy not in ALONE:
            times.append((found.finder, found.step_time))
        if rival is not None:
            times.append((DATA_PARALLEL, rival.result.step_time))
        if pipeline is not None:
            times.append((PIPELINE, pipeline.step_time))
        winner = min(times, key=lambda time: time[1], default=None)
        sharded = None if self.shardings is None else self.shardings.best
        # a gain within the model's error is no reason to shard
        if sharded and not (winner and sharded.step_time * (1.0 + MODEL_ERROR) > winner[1]):
            return SHARDING, sharded.step_time
        return winner

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
                predicted=predicted(problem.cluster, result, bound),
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
        if self.strategy == PIPELINE or (winner is not None and winner[0] == PIPELINE):
            pipeline = self._pipeline()
            return pipeline.plan, PIPELINE, pipeline.step_time
        if self.strategy == SHARDING or (winner is not None and winner[0] == SHARDING):
            sharded = self._sharded()
            return sharded.plan, SHARDING, sharded.step_time
        found = self._found()
        plan = Plan.from_placement(
            problem.graph, problem.cluster, problem.job, found.placement, settings=problem.settings
        )
        return plan, found.finder, found.step_time

    def _pipeline(self) -> Pipelined:
        """Returns the best pipeline, or the one that is least over."""
        assert self.pipelines is not None
        found = self.pipelines.best or self.pipelines.nearest
        if found is None:
            raise InfeasibleError(
                f"no pipeline of {self.space.problem.graph.name} on "
                f"{self.space.problem.cluster.name}: {self.pipelines.note}"
            )
        return found

    def _sharded(self) -> Sharded:
        """Returns the best way to shard, or the one that is least over."""
        shardings = self.shardings
        found = None if shardings is None else shardings.best or shardings.nearest
        if found is None:
            note = "pinned" if shardings is None else shardings.note
            raise InfeasibleError(
                f"no way to shard {self.space.problem.graph.name} on "
                f"{self.space.problem.cluster.name}: {note}"
            )
        return found

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
        """Returns what no plan can beat of the kinds that take part in the choice."""
        bounds = [] if self.strategy in ALONE else [self.placement_bound]
        if self.copies is not None and self.strategy == "auto":
            bounds += [copies.bound for copies in self.copies.plans if copies.result.feasible]
        if self.pipelines is not None:
            bounds.append(self.pipelines.bound)
        if self.shardings is not None and self.shardings.tried:
            bounds.append(self.shardings.bound)
        return min(bounds)

    def _baselines(self) -> tuple[dict[str, float | None], dict[str, str]]:
        """Returns what each strategy found on its own, and notes where there is more to say."""
        times: dict[str, float | None] = {}
        notes: dict[str, str] = {}
        for planner in self._planners():
            if planner in IMPROVERS:
                continue
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
        if self.strategy in {"auto", PIPELINE}:
            times[PIPELINE], notes[PIPELINE] = self._pipeline_baseline()
        if self.strategy in {"auto", SHARDING}:
            times[SHARDING], notes[SHARDING] = self._sharding_baseline()
        return times, {name: note for name, note in notes.items() if note}

    def _pipeline_baseline(self) -> tuple[float | None, str]:
        """Returns what pipelines found on their own, and what is to be said about it."""
        if self.pipelines is None:
            return None, self._why_not_run()
        found = self.pipelines.best
        if found is None and self.pipelines.is_untried:
            least = format_seconds(self.pipelines.least)
            return None, f"not run: it would take at least {least}"
        return None if found is None else found.step_time, self.pipelines.note

    def _sharding_baseline(self) -> tuple[float | None, str]:
        """Returns what the known ways to shard take, and what is to be said about it."""
        if self.shardings is None:
            return None, "pinned" if self.constraints.pins else self._why_not_run()
        found, worst = self.shardings.best, self.shardings.worst
        if found is not None:
            return found.step_time, layout_name(self.space.problem.graph, found.plan)
        if self.shardings.tried:
            return None, str(worst)
        return None, self.shardings.note or "not run: it cannot be faster"

    def _why_none(self, planner: Planner) -> str:
        if isinstance(planner, SingleDevice):
            if self.constraints.pins:
                return "the pins keep the model from being on one GPU alone"
            return "no GPU can run every op"
        if planner.name not in self.finished:
            return self._why_not_run()
        return "has no legal placement to propose"

    def _why_not_run(self) -> str:
        return "not run: interrupted" if self.interrupted else "not run: the budget is spent"

    def _reason(self) -> str:
        """Says why nothing fits, with the device that is fullest."""
        problem = self.space.problem
        other = {PIPELINE: self.pipelines, SHARDING: self.shardings}.get(self.strategy)
        worst = self.space.overflow(self._found().placement) if other is None else other.worst
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
