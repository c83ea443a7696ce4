"""A pipeline over nodes, as a plan and as the simulator sees it; many are simulated at once."""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from agents.pipelines.nodes import NodeGraph
from agents.planners.pipeline_run import play
from simcore.cost import CostTable, cost_table
from simcore.errors import PlanError
from simcore.kernel import Status
from simcore.pipeline import Pipeline
from simcore.pipeline_batch import PipelineProblem, simulate_pipelines, stack_tables
from simcore.pipeline_build import build_pipeline, semantics_of
from simcore.plan import DEFAULT_BUCKETS, Buckets, Plan, Ref, Stage
from simcore.recompute import Recompute

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_MAX_SCHEDULES = 64  # lowered ones that are kept
_MAX_KNOWN = 100_000  # results that are kept
_LEGAL = frozenset({Status.OK, Status.OUT_OF_MEMORY})


@dataclass(frozen=True, slots=True, kw_only=True)
class DagPlan:
    """A pipeline over the nodes of a model.

    Attributes:
        stage: of each node; no edge goes to a smaller number, [node].
        devices: device indices of each stage, which share its microbatches, [stage][copy].
        recompute: what the backward of each stage runs again, [stage].
        microbatches: of a step.
        schedule: its name; one stage per rank.
        sharding: of the optimizer, as in `Plan.optimizer_sharding`.
        buckets: how gradients are put together.
        apart: nodes whose first units go to another stage: (node, number of units, stage). Not
            every such plan can be run.
    """

    stage: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...]
    recompute: tuple[Recompute, ...]
    microbatches: int
    schedule: str = "1f1b"
    sharding: int = 0
    buckets: Buckets = DEFAULT_BUCKETS
    apart: tuple[tuple[int, int, int], ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.devices)


class Score(NamedTuple):
    """What the simulator says of a pipeline."""

    overflow: int  # bytes over capacity, summed over devices
    step_time: float  # s, inf where it is illegal
    full: tuple[int, ...] = ()  # devices over capacity

    @property
    def fits(self) -> bool:
        """Whether it is legal and fits the memory."""
        return self.overflow == 0 and self.step_time < np.inf

    @property
    def rank(self) -> tuple[int, float]:
        """What decides which of two is better, least first."""
        return self.overflow if self.step_time < np.inf else 2**62, self.step_time


ILLEGAL = Score(0, float("inf"))


@dataclass(slots=True, kw_only=True, eq=False)
class Simulator:
    """Simulates pipelines over the nodes of a model, and knows those it has met.

    Attributes:
        nodes: the nodes.
        allow: changes of the mathematics that a plan may make.
        reserve_memory: bytes to leave free on every GPU.
    """

    nodes: NodeGraph
    allow: frozenset[str] = frozenset()
    reserve_memory: int = 0
    known: dict[DagPlan, Score] = field(default_factory=dict)
    costs: dict[tuple[int, ...], CostTable] = field(default_factory=dict)  # by samples
    lowered: "OrderedDict[object, PipelineProblem]" = field(default_factory=OrderedDict)
    template: Plan = field(init=False)  # without stages
    names: list[NDArray[np.object_]] = field(init=False)  # [node][unit] names

    def __post_init__(self) -> None:
        problem, chain = self.nodes.space.problem, self.nodes.chain
        self.template = Plan(
            graph=Ref(name=problem.graph.name, hash=problem.graph.content_hash()),
            cluster=Ref(name=problem.cluster.name, hash=problem.cluster.content_hash()),
            job=problem.job,
            job_hash=problem.job.content_hash(),
            stages=(),
            settings=msgspec.structs.replace(problem.settings, host="per_rank", granularity="task"),
        )
        units = np.array(problem.graph.unit_names, np.object_)[chain.order]
        node = self.nodes.node[chain.order]
        self.names = [units[node == k] for k in range(self.nodes.num_nodes)]

    def may(self, microbatches: int, schedule: str) -> bool:
        """Whether plans in this rhythm leave the mathematics as it is allowed to be."""
        plan = msgspec.structs.replace(self.template, microbatches=microbatches, schedule=schedule)
        return set(semantics_of(plan, self.nodes.space.problem.graph)) <= self.allow

    def plan(self, found: DagPlan) -> Plan:
        """Returns a pipeline as a plan."""
        problem = self.nodes.space.problem
        names = problem.cluster.device_names
        units: list[list[str]] = [[] for _ in found.devices]
        first = {node: (count, stage) for node, count, stage in found.apart}
        for node, stage in enumerate(found.stage):
            count, other = first.get(node, (0, stage))
            units[other] += self.names[node][:count].tolist()
            units[stage] += self.names[node][count:].tolist()
        plan = msgspec.structs.replace(
            self.template,
            stages=tuple(
                Stage(
                    name=f"stage{number}",
                    devices=tuple(names[device] for device in devices),
                    ops=tuple(units[number]),
                    mesh={"dp": len(devices)},
                    recompute=found.recompute[number],
                )
                for number, devices in enumerate(found.devices)
            ),
            microbatches=found.microbatches,
            schedule=found.schedule,
            optimizer_sharding=found.sharding,
            buckets=found.buckets,
        )
        return msgspec.structs.replace(plan, semantics=semantics_of(plan, problem.graph))

    def scores(self, plans: Sequence[DagPlan]) -> list[Score]:
        """Returns what pipelines take; what changes the mathematics without leave is illegal.

        Where every stage has one device and several pipelines share a schedule, they are simulated
        as one batch.
        """
        fresh = [plan for plan in dict.fromkeys(plans) if plan not in self.known]
        if len(self.known) + len(fresh) > _MAX_KNOWN:
            self.known.clear()
            fresh = list(dict.fromkeys(plans))
        waiting: dict[object, list[tuple[DagPlan, Pipeline]]] = defaultdict(list)
        for plan in fresh:
            pipeline = self._pipeline(plan)
            if pipeline is None:
                self.known[plan] = ILLEGAL
            elif any(len(rank) > 1 for rank in pipeline.devices):
                self.known[plan] = self._alone(pipeline)
            else:
                ties = tuple(tie._replace(num_bytes=0) for tie in pipeline.ties)
                waiting[pipeline.schedule, ties].append((plan, pipeline))
        for key, pairs in waiting.items():
            if len(pairs) == 1 and key not in self.lowered:
                self.known[pairs[0][0]] = self._alone(pairs[0][1])
            else:
                scores = self._together(key, [pipeline for _, pipeline in pairs])
                self.known.update(zip((plan for plan, _ in pairs), scores, strict=True))
        return [self.known[plan] for plan in plans]

    def _pipeline(self, found: DagPlan) -> Pipeline | None:
        problem, nodes = self.nodes.space.problem, self.nodes
        pairs = [*enumerate(found.stage), *((node, stage) for node, _, stage in found.apart)]
        if not all(nodes.allowed[node, list(found.devices[s])].all() for node, s in pairs):
            return None
        plan = self.plan(found)
        if not set(plan.semantics) <= self.allow:
            return None
        try:
            return build_pipeline(
                problem.graph, problem.cluster, problem.job, plan, cost=self._cost(found)
            )
        except PlanError:
            return None

    def _cost(self, found: DagPlan) -> CostTable | None:
        problem = self.nodes.space.problem
        samples = (problem.job.batch or 0) // found.microbatches
        sizes = tuple(dict.fromkeys(samples // len(devices) for devices in found.devices))
        if 0 in sizes:
            return None  # refused with a reason
        if sizes not in self.costs:
            kinds = self.nodes.chain.kinds
            self.costs[sizes] = cost_table(problem.graph, problem.job, kinds, sizes)
        return self.costs[sizes]

    def _alone(self, pipeline: Pipeline) -> Score:
        problem, settings = self.nodes.space.problem, self.template.settings
        try:
            played = play(problem, pipeline, settings, reserve_memory=self.reserve_memory)
        except PlanError:  # a route that is missing
            return ILLEGAL
        return self._judged(played.is_legal, played.step_time, played.reserved)

    def _together(self, key: object, pipelines: Sequence[Pipeline]) -> list[Score]:
        problem = self.nodes.space.problem
        if key not in self.lowered:
            self.lowered[key] = PipelineProblem.build(
                problem.cluster,
                problem.job,
                pipelines[0].schedule,
                self.template.settings,
                ties=pipelines[0].ties,
            )
        self.lowered.move_to_end(key)
        whole = self.lowered[key]
        if len(self.lowered) > _MAX_SCHEDULES:
            self.lowered.popitem(last=False)
        outcome = simulate_pipelines(whole, stack_tables(pipelines, whole))
        return [
            self._judged(status in _LEGAL, float(step_time), reserved)
            for status, step_time, reserved in zip(
                outcome.status, outcome.step_time, outcome.reserved, strict=True
            )
        ]

    def _judged(self, is_legal: bool, step_time: float, reserved: NDArray[np.int64]) -> Score:
        if not is_legal:
            return ILLEGAL
        room = self.nodes.space.problem.capacity
        over = np.maximum(reserved - room, 0)
        return Score(int(over.sum()), step_time, tuple(np.flatnonzero(over).tolist()))
