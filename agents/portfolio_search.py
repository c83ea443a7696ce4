"""One search of the portfolio: which planner runs when, and what all of them found."""

from typing import Literal, TypeAlias

import numpy as np

from agents.planners.anneal import Anneal
from agents.planners.chain_split import ChainSplit
from agents.planners.compiled_clock import search_clock
from agents.planners.cross_entropy import CrossEntropy
from agents.planners.data_parallel import Copies, DataParallel, data_parallel
from agents.planners.exhaustive import Exhaustive
from agents.planners.heft import Heft
from agents.planners.m_etf import MEtf
from agents.planners.m_topo import MTopo
from agents.planners.pipeline_layouts import Demands
from agents.planners.pipeline_union import AllPipelines
from agents.planners.policy_gradient import PolicyGradient
from agents.planners.random_placement import RandomPlacement
from agents.planners.recorder import Budget, Recorder
from agents.planners.round_robin import RoundRobin
from agents.planners.sharding import Shardings
from agents.planners.single_device import CpuOnly, SingleDevice
from agents.planners.space import PlacementSpace, Planner
from agents.planners.tidy import Tidy
from agents.portfolio_result import Listener, Progress
from simcore.bounds import placement_bound
from simcore.plan import Constraints
from simcore.plan_summary import MODEL_ERROR

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

PLACEMENT = "placement"  # of every op on a device, whoever found it
DATA_PARALLEL = "data_parallel"
PIPELINE = "pipeline"
SHARDING = "sharding"
PIPELINE_SHARE = 0.15  # of what is left of the budget, where placements compete
SHARDING_SHARE = 0.1
PROOF_SHARE = 0.1
SETTLED_SHARE = 0.4  # of each of the two, where no placement can be better any more
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
        self.pipelines: AllPipelines | None = None
        self.shardings: Shardings | None = None
        self.placement_bound = placement_bound(space.problem, space.allowed)
        self.stage = ""
        self.finished: set[str] = set()  # planners
        self.is_improving = False
        self.interrupted = False
        self.started = search_clock()

    def run(self, seed: int) -> None:
        """Runs the planners, the simple ones first, until the budget is spent."""
        try:
            for number, planner in enumerate(self.planners()):
                if planner is IMPROVERS[0]:
                    self._run_shardings()
                    self._run_pipelines()
                    self._prove_shardings()
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

    def planners(self) -> tuple[Planner, ...]:
        """Returns the planners of placements that a strategy takes, in their order."""
        if self.strategy in ALONE:
            return BASELINES[:1]
        return (*BASELINES, *CONSTRUCTIVE, IMPROVERS[0], *self.learners, *IMPROVERS[1:])

    def _nothing_found(self) -> bool:
        if self.strategy == PIPELINE:
            found = self.pipelines
            return found is None or (found.best_time is None and found.nearest is None)
        if self.strategy == SHARDING:
            return self.shardings is None or self.shardings.nearest is None
        return self.recorder.best is None and self.recorder.nearest is None

    def _run(self, planner: Planner, rng: np.random.Generator) -> None:
        is_improver = planner in (*IMPROVERS, *self.learners)
        is_last_resort = isinstance(planner, CpuOnly) and self.recorder.best is None
        is_baseline = planner in BASELINES or is_last_resort
        if is_baseline or (self.budget.left() and not (is_improver and self.is_settled())):
            self.stage, self.is_improving = planner.name, is_improver
            own = Budget(parent=None if is_baseline else self.budget)
            if is_improver:
                own = self.budget.part(SHARES.get(planner.name, 1.0))
            planner.search(self.space, rng, own, self.recorder)
            self.finished.add(planner.name)
            if is_baseline:
                self._charge(own.used)

    def _run_copies(self) -> None:
        self.stage = DATA_PARALLEL
        self._note(self.recorder, self.budget)
        self.copies = data_parallel(
            self.space,
            reserve_memory=self.constraints.reserve_memory_bytes,
            is_pinned=bool(self.constraints.pins),
        )
        self.recorder.evaluations += self.copies.evaluations
        self._charge(self.copies.evaluations)

    def _charge(self, evaluations: int) -> None:
        """Charges what baselines simulate; they leave half to a strategy that is asked for."""
        whole = self.budget.evaluations
        if whole is not None and self.strategy in ALONE:
            evaluations = max(0, min(evaluations, whole // 2 - self.budget.used))
        self.budget.charge(evaluations)

    def _run_pipelines(self) -> None:
        """Searches for pipelines, unless nothing of the budget is left or none can win."""
        is_only = self.strategy == PIPELINE
        if self.strategy in {"placement", SHARDING} or not (is_only or self.budget.left()):
            return
        self.stage, self.is_improving = PIPELINE, False
        self.pipelines = AllPipelines.build(
            self.space,
            self.demands,
            reserve_memory=self.constraints.reserve_memory_bytes,
            listener=self._note_other,
        )
        self._note(self.recorder, self.budget)
        winner = self.winner()
        if is_only or winner is None or winner[1] > self.pipelines.least:
            self.pipelines.run(self.budget.part(1.0 if is_only else PIPELINE_SHARE))
        winner = self.winner()
        if winner is not None and winner[0] == PIPELINE and self.is_settled():
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
            proves=is_only,
        )
        self._note(self.recorder, self.budget)
        winner = self.winner()
        if is_only or winner is None or winner[1] > self.shardings.bound:
            may_win = winner is None or winner[1] > self.shardings.bound * (1.0 + MODEL_ERROR)
            share = SETTLED_SHARE if may_win and self.is_settled() else SHARDING_SHARE
            self.shardings.run(self.budget.part(1.0 if is_only else share))

    def _prove_shardings(self) -> None:
        """Looks for more that no sharded plan beats, where that is the least bound of all."""
        found, bounds = self.shardings, self.bounds()
        budget = self.budget.part(SETTLED_SHARE if self.is_settled() else PROOF_SHARE)
        if found is None or SHARDING not in bounds or budget.seconds is None or found.proven:
            return  # without a clock proofs would take any time
        if bounds[SHARDING] < min(bounds[name] for name in bounds if name != SHARDING):
            self.stage = SHARDING
            self._note(self.recorder, self.budget)
            found.prove(budget)

    def bounds(self) -> dict[str, float]:
        """Returns what plans cannot beat of each kind that takes part in the choice, s."""
        found = {} if self.strategy in ALONE else {PLACEMENT: self.placement_bound}
        if self.copies is not None and self.strategy == "auto":
            fitting = [each.bound for each in self.copies.plans if each.result.feasible]
            found |= {DATA_PARALLEL: min(fitting)} if fitting else {}
        if self.pipelines is not None:
            found[PIPELINE] = self.pipelines.bound
        if self.shardings is not None and self.shardings.tried:
            found[SHARDING] = self.shardings.bound
        return found

    def _note_other(self, budget: Budget) -> None:
        self.recorder.evaluations += 1
        self._note(self.recorder, budget)

    def _note(self, recorder: Recorder, budget: Budget) -> None:
        """Tells the listener where the search stands, and ends it where nothing better exists."""
        if self.is_improving and self.is_settled():
            budget.stop()
        if self.listener is not None:
            winner = self.winner()
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

    def is_settled(self) -> bool:
        """Whether the best plan is as fast as any placement can be."""
        winner = self.winner()
        return winner is not None and winner[1] <= self.placement_bound * (1 + 1e-9)

    def rival(self) -> Copies | None:
        """The data-parallel plan that takes part in the choice."""
        return self.copies.best if self.copies is not None and self.strategy == "auto" else None

    def winner(self) -> tuple[str, float] | None:
        """Returns (finder, step time) of the best plan that fits; of equal ones a placement."""
        found, rival = self.recorder.best, self.rival()
        pipeline = None if self.pipelines is None else self.pipelines.best_time
        times = []
        if found is not None and self.strategy not in ALONE:
            times.append((found.finder, found.step_time))
        if rival is not None:
            times.append((DATA_PARALLEL, rival.result.step_time))
        if pipeline is not None:
            times.append((PIPELINE, pipeline))
        winner = min(times, key=lambda time: time[1], default=None)
        sharded = None if self.shardings is None else self.shardings.best
        # a gain within the model's error is no reason to shard
        if sharded and not (winner and sharded.step_time * (1.0 + MODEL_ERROR) > winner[1]):
            return SHARDING, sharded.step_time
        return winner
