"""Methods of the pipeline study: each returns the step time of its best plan that fits, in s."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agents import pipeline_agent
from agents.pipelines.alpa import alpa_best
from agents.pipelines.anneal import Best, anneal
from agents.pipelines.env import Freedom, PipelineTask
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import Simulator
from agents.pipelines.published import dapple_best, pipedream_best, piper_best
from agents.planners.data_parallel import data_parallel
from agents.planners.pipeline_chain import Chain
from agents.planners.pipeline_layouts import Demands, layouts
from agents.planners.pipeline_plans import Pipelines
from agents.planners.pipeline_search import PipelineSearch
from agents.planners.recorder import Budget
from agents.planners.space import PlacementSpace
from agents.planners.stage_dag_plans import plan_stage_dag
from simcore import Problem
from simcore.cluster import resolve
from simcore.plan import SEMANTICS_BATCH_NORM
from simcore.sources import load_graph

ALLOW = frozenset({SEMANTICS_BATCH_NORM})  # microbatches see their own statistics, as in GPipe
_NO_END = 10**9  # evaluations


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ground:
    """What all methods work on, and what each may spend: simulations, or seconds of processor."""

    space: PlacementSpace
    simulator: Simulator  # over the agent's nodes
    evaluations: int | None
    seconds: float | None

    @classmethod
    def of(
        cls, model: str, cluster: str, evaluations: int | None, seconds: float | None
    ) -> "Ground":
        """Returns the ground of a model and a cluster by name."""
        graph, job, _ = load_graph(model)
        space = PlacementSpace.build(Problem.build(graph, resolve(cluster), job))
        return cls(
            space=space,
            simulator=Simulator(nodes=NodeGraph.build(space), allow=ALLOW),
            evaluations=evaluations,
            seconds=seconds,
        )

    @property
    def task(self) -> PipelineTask:
        """Pipelines over the agent's nodes."""
        return PipelineTask.build(self.simulator)

    @property
    def whole_task(self) -> PipelineTask:
        """The agent's space, where one stage (copies of the model) is a plan too."""
        return PipelineTask.build(self.simulator, Freedom(least=1))

    @property
    def budget(self) -> Budget:
        """What a method may spend, from now on."""
        return Budget(self.seconds, self.evaluations, clock=time.process_time)

    @property
    def identity(self) -> str:
        """Hex digits that change with the problem."""
        problem = self.space.problem
        parts = (problem.graph, problem.cluster, problem.job)
        return "".join(part.content_hash()[:6] for part in parts)


def _data_parallel(ground: Ground, seed: int) -> float:
    best = data_parallel(ground.space).best
    return math.inf if best is None else best.result.step_time


def _equal(ground: Ground, is_copied: Callable[[int, int], bool]) -> float:
    """Returns the best of equal stages with equal copies on all GPUs, 1F1B.

    Each also with less memory where it does not fit.
    """
    chain, best = Chain.build(ground.space), math.inf
    wanted = len(ground.space.devices)
    search = PipelineSearch(chain=chain, layouts=(), allow=ALLOW)
    for layout in layouts(ground.space, Demands(schedule="1f1b", allow=ALLOW)):
        if layout.num_devices == wanted and is_copied(layout.copies, layout.sharding):
            candidate = chain.cut(layout)
            even = None if candidate is None else chain.evenly(candidate)
            found = None if even is None else search.fitted(even, Budget())
            if found is not None and not found.overflow:
                best = min(best, found.step_time)
    return best


def _equal_split(ground: Ground, seed: int) -> float:
    """Equal stages, one per GPU, the best number of microbatches."""
    return _equal(ground, lambda copies, _: copies == 1)


def _expert(ground: Ground, seed: int) -> float:
    """Equal stages with equal copies, the best numbers of stages, copies and microbatches."""
    return min(_equal(ground, lambda _, sharding: sharding == 0), _data_parallel(ground, seed))


def _or_copies(ground: Ground, best: Best | None) -> float:
    """Returns the step time of a planner's stages; one stage is copies of the whole model."""
    if best is None:
        return _data_parallel(ground, 0)
    return best.score.step_time if best.score.fits else math.inf


def _published(plan: Callable[[PipelineTask], Best | None]) -> Callable[[Ground, int], float]:
    return lambda ground, seed: _or_copies(ground, plan(ground.task))


def _alpa(ground: Ground, seed: int) -> float:
    """Alpa's program plans one stage too, which is copies of the whole model."""
    best = alpa_best(ground.task)
    found = math.inf if best is None or not best.score.fits else best.score.step_time
    return min(found, _data_parallel(ground, seed))


def _chain(ground: Ground, seed: int) -> float:
    pipelines = Pipelines.build(ground.space, Demands(allow=ALLOW))
    pipelines.run(ground.budget)
    return math.inf if pipelines.best is None else pipelines.best.step_time


def _stage_dag(ground: Ground, seed: int) -> float:
    return plan_stage_dag(ground.space, Demands(allow=ALLOW), ground.budget).step_time


def _anneal(ground: Ground, seed: int) -> float:
    best = anneal(ground.whole_task, ground.budget, seed)
    return best.score.step_time if best is not None and best.score.fits else math.inf


def _agent(**changes: Any) -> Callable[[Ground, int], float]:
    def run(ground: Ground, seed: int) -> float:
        config = pipeline_agent.Config(evaluations=_NO_END, seed=seed, **changes)
        task = PipelineTask.build(ground.simulator, pipeline_agent.freedom_of(config))
        best = pipeline_agent.solve(config, task, ground.budget).best
        return best.score.step_time if best is not None and best.score.fits else math.inf

    return run


AGENTS: dict[str, dict[str, Any]] = {  # what arms change in the agent's configuration
    "agent": {},
    "agent_unlearned": {"policy": False},
    "agent_unrefined": {"refining": 0.0},
    "agent_untaught": {"teachers": False},
    "agent_symmetrised": {"direction": "symmetrised"},
    "agent_fixed_stages": {"stages": 4},
    "agent_no_copies": {"copies": False},
}
METHODS: dict[str, Callable[[Ground, int], float]] = {
    "data_parallel": _data_parallel,
    "equal_split": _equal_split,
    "expert": _expert,
    "pipedream": _published(pipedream_best),
    "dapple": _published(dapple_best),
    "piper": _published(piper_best),
    "alpa": _alpa,
    "chain": _chain,
    "stage_dag": _stage_dag,
    "anneal": _anneal,
    **{name: _agent(**changes) for name, changes in AGENTS.items()},
}
CHAINS = ("equal_split", "expert", "pipedream", "dapple", "alpa", "chain")  # do not see branches
SEEDED = ("anneal", *AGENTS)
