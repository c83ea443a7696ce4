"""The environment of pipelined placement: decisions one after another, masked, and their reward.

A plan is decided in this order: microbatches and schedule (one choice), the number of stages, a
stage for each node, what each usable device does (nothing, or a copy of a stage), what the backward
of each stage runs again. Masks keep every partial plan completable: stages stay a DAG and none
stays empty, copies divide the microbatch, what a stage holds at least has room on its devices.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.pipelines.compiled_masks import device_choices, stage_choices
from agents.pipelines.nodes import NodeGraph
from agents.pipelines.plans import RECOMPUTES, DagPlan, Score, Simulator
from agents.reward import Reward
from agents.task import Evaluation
from simcore.errors import PlanError
from simcore.kernel import Status

DAG_SCHEDULES = ("1f1b", "gpipe", "zb-h1")  # that run a DAG of stages, one stage per rank
MOST_MICROBATCHES = 64
MOST_STAGES = 64


class Rhythm(NamedTuple):
    """Microbatches and a schedule."""

    microbatches: int
    schedule: str
    sharding: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """What a plan may decide.

    Attributes:
        stages: their number, None = what is best.
        least: the smallest number to choose from; one stage is copies of the whole model.
        copies: whether several devices may share the microbatches of a stage.
        microbatches: their number, None = what is best.
        schedule: None = what is best.
        recompute: whether backwards may run forwards again.
    """

    stages: int | None = None
    least: int = 2
    copies: bool = True
    recompute: bool = True
    microbatches: int | None = None
    schedule: str | None = None


def rhythms(batch: int, freedom: Freedom) -> tuple[Rhythm, ...]:
    """Returns the choices of microbatches and schedule, fewest microbatches first."""
    counts = [m for m in range(1, min(batch, MOST_MICROBATCHES) + 1) if batch % m == 0]
    if freedom.microbatches is not None:
        counts = [m for m in counts if m == freedom.microbatches]
    names = [name for name in DAG_SCHEDULES if freedom.schedule in {None, name}]
    sharding = (0, 1) if freedom.copies else (0,)
    return tuple(
        Rhythm(count, name, shard) for count in counts for name in names for shard in sharding
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineTask:
    """All pipelines over the nodes of a model, as decisions.

    Attributes:
        simulator: what says how good a plan is; has the nodes.
        rhythms: choices of the first decision.
        counts: numbers of stages to choose from.
        reach: whether one node leads to another, [node, node].
        held: bytes that nodes hold at least, [node].
        rooms: bytes that usable devices have, [dev].
        copies: whether a stage may have several devices.
        recompute: whether backwards may run forwards again.
        reward: what a simulation is worth.
        score: simulates plans; fewer than it is given, the first ones, where a budget ends.
    """

    simulator: Simulator
    rhythms: tuple[Rhythm, ...]
    counts: tuple[int, ...]
    reach: NDArray[np.bool_]  # [node, node]
    held: NDArray[np.float64]  # [node] bytes
    rooms: NDArray[np.float64]  # [dev] bytes
    copies: bool
    recompute: bool
    reward: Reward
    score: Callable[[Sequence[DagPlan]], list[Score]] = field(compare=False)

    @classmethod
    def build(cls, simulator: Simulator, freedom: Freedom | None = None) -> "PipelineTask":
        """Returns the task of a model's nodes.

        Raises:
            PlanError: nothing to choose from: the batch, the schedule or the number of stages.
        """
        freedom = freedom or Freedom()
        nodes = simulator.nodes
        problem, devices = nodes.space.problem, list(nodes.space.devices)
        most = min(len(devices), nodes.num_nodes, MOST_STAGES)
        one = freedom.stages
        counts = tuple(range(freedom.least, most + 1)) if one is None else (one,)
        choices = tuple(
            rhythm
            for rhythm in rhythms(problem.job.batch or 0, freedom)
            if simulator.may(rhythm.microbatches, rhythm.schedule)
        )
        if not choices or not counts or not 1 <= counts[0] <= counts[-1] <= most:
            raise PlanError(
                f"{problem.graph.name} on {problem.cluster.name}: no pipeline of a DAG of stages: "
                f"{len(choices)} choices of microbatches and schedule, at most {most} stages"
            )
        work = nodes.space.work[:, devices]
        usual = float(np.where(np.isfinite(work), work, 0.0).sum(axis=0).max())
        capacity = float(problem.capacity[devices].mean())
        return cls(
            simulator=simulator,
            rhythms=choices,
            counts=counts,
            reach=_reach(nodes),
            held=nodes.least_held(),
            rooms=nodes.room()[devices],
            copies=freedom.copies,
            recompute=freedom.recompute,
            reward=Reward(baseline=max(usual, 1e-12), capacity=max(1.0, capacity)),
            score=simulator.scores,
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.held)

    @property
    def num_devices(self) -> int:
        """Number of usable devices."""
        return len(self.rooms)

    @property
    def widths(self) -> NDArray[np.int64]:
        """Number of choices of each decision, [decision]."""
        stages = self.counts[-1]
        parts = (
            [len(self.rhythms), len(self.counts)],
            [stages] * self.num_nodes,
            [stages + 1] * self.num_devices,
            [len(RECOMPUTES)] * stages,
        )
        return np.array([width for part in parts for width in part], np.int64)

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """Choices there are of each decision before anything is decided, [decision, choice]."""
        widths = self.widths
        every: NDArray[np.bool_] = np.arange(widths.max()) < widths[:, None]
        return every

    def plan(self, actions: NDArray[np.integer]) -> DagPlan:
        """Returns what decisions, [decision], amount to."""
        chosen = [int(action) for action in actions]
        rhythm, count = self.rhythms[chosen[0]], self.counts[chosen[1]]
        stage = chosen[2 : 2 + self.num_nodes]
        work = chosen[2 + self.num_nodes : 2 + self.num_nodes + self.num_devices]
        again = chosen[2 + self.num_nodes + self.num_devices :]
        usable = self.simulator.nodes.space.devices
        return DagPlan(
            stage=tuple(stage),
            devices=tuple(
                tuple(usable[d] for d, choice in enumerate(work) if choice == s + 1)
                for s in range(count)
            ),
            recompute=tuple(RECOMPUTES[again[s]] for s in range(count)),
            microbatches=rhythm.microbatches,
            schedule=rhythm.schedule,
            sharding=rhythm.sharding,
        )

    def actions(self, plan: DagPlan) -> NDArray[np.int64]:
        """Returns the decisions, [decision], that lead to a plan of this space.

        Raises:
            ValueError: it is not in this space.
        """
        usable = self.simulator.nodes.space.devices
        of = {device: s + 1 for s, devices in enumerate(plan.devices) for device in devices}
        again = [RECOMPUTES.index(how) for how in plan.recompute]
        return np.array(
            [
                self.rhythms.index(Rhythm(plan.microbatches, plan.schedule, plan.sharding)),
                self.counts.index(plan.num_stages),
                *plan.stage,
                *(of.get(device, 0) for device in usable),
                *again,
                *[0] * (self.counts[-1] - len(again)),
            ],
            np.int64,
        )

    def evaluate(self, actions: NDArray[np.integer]) -> Evaluation:
        """Simulates a batch of decisions, [plan, decision]; fewer where the budget ends."""
        scores = self.score([self.plan(row) for row in np.asarray(actions)])
        step_time = np.array([score.step_time for score in scores])
        overflow = np.array([score.overflow for score in scores], np.int64)
        legal = np.isfinite(step_time)
        status = np.where(overflow > 0, Status.OUT_OF_MEMORY, Status.OK)
        status = np.where(legal, status, Status.ILLEGAL_DEVICE).astype(np.uint8)
        rewards = self.reward.of(_Scored(step_time, overflow, status))
        return Evaluation(rewards.value, rewards.fits, step_time, overflow, status)

    def content_hash(self) -> str:
        """Returns 16 hex digits that change with anything that decides a reward."""
        problem, nodes = self.simulator.nodes.space.problem, self.simulator.nodes
        digest = hashlib.sha256()
        for part in (
            problem.graph.content_hash(),
            problem.cluster.content_hash(),
            problem.job.content_hash(),
            (
                self.simulator.template.settings,
                self.rhythms,
                self.counts,
                self.copies,
                self.recompute,
            ),
            (sorted(self.simulator.allow), self.simulator.reserve_memory, self.reward),
        ):
            digest.update(f"{part!r}\n".encode())
        for array in (nodes.node, nodes.allowed, problem.capacity):
            digest.update(array.tobytes())
        return digest.hexdigest()[:16]


class _Scored(NamedTuple):
    """An outcome that is put together."""

    step_time: NDArray[np.float64]  # [plan] s
    overflow: NDArray[np.int64]  # [plan] bytes
    status: NDArray[np.uint8]  # [plan] Status


def _reach(nodes: NodeGraph) -> NDArray[np.bool_]:
    """Returns whether one node leads to another, [node, node]; edges go forward."""
    reach = np.zeros((nodes.num_nodes, nodes.num_nodes), np.bool_)
    for source, target in sorted(nodes.edges, reverse=True):
        reach[source, target] = True
        reach[source] |= reach[target]
    return reach


_BY_ROW = (
    "rhythm", "count", "stage", "floor", "load", "copies", "used", "may", "next_copies",
)  # fmt: skip


class Walk:
    """Partial plans on the way through the decisions of a task, all at the same one."""

    def __init__(self, task: PipelineTask, rows: int) -> None:
        stages, nodes = task.counts[-1], task.num_nodes
        self.task, self.rows, self.at = task, rows, 0
        self.rhythm = np.zeros(rows, np.int64)
        self.count = np.zeros(rows, np.int64)  # stages
        self.stage = np.full((rows, nodes), -1, np.int64)
        self.floor = np.zeros((rows, nodes), np.int64)
        self.load = np.zeros((rows, stages))  # bytes at least
        self.copies = np.zeros((rows, stages), np.int64)
        self.used = np.zeros((rows, stages), np.bool_)
        self.may = np.ones((rows, stages, task.num_devices), np.bool_)
        self.next_copies = np.zeros((rows, task.num_devices + 2), np.int64)
        self.rooms = np.sort(task.rooms)[::-1].copy()
        self.allowed = task.simulator.nodes.allowed[:, list(task.simulator.nodes.space.devices)]

    @property
    def part(self) -> tuple[str, int]:
        """What is decided next (rhythm, count, node, device or recompute), and its number."""
        at, nodes, devices = self.at, self.task.num_nodes, self.task.num_devices
        if at < 2:
            return ("rhythm", "count")[at], 0
        if at < 2 + nodes:
            return "node", at - 2
        if at < 2 + nodes + devices:
            return "device", at - 2 - nodes
        return "recompute", at - 2 - nodes - devices

    def mask(self) -> NDArray[np.bool_]:
        """Returns the choices of the next decision, [row, choice]; at least one in each row."""
        part, number = self.part
        task = self.task
        if part == "node":
            ground = (task.reach, task.held, self.rooms)
            return stage_choices(number, self.floor, self.load, self.used, self.count, ground)
        if part == "device":
            where = (np.ascontiguousarray(self.may[:, :, number]), task.rooms)
            return device_choices(
                number, self.copies, self.load, self.count, self.next_copies, where
            )
        legal = np.ones((self.rows, int(task.widths[self.at])), np.bool_)
        if part == "recompute":
            legal[:, 1:] = ((number < self.count) & task.recompute)[:, None]
        return legal

    def take(self, choice: NDArray[np.integer]) -> None:
        """Decides, [row]."""
        part, number = self.part
        rows = np.arange(self.rows)
        if part == "rhythm":
            self.rhythm = np.asarray(choice, np.int64)
            self._set_copies()
        elif part == "count":
            self.count = np.array(self.task.counts, np.int64)[choice]
        elif part == "node":
            self.stage[:, number] = choice
            self.used[rows, choice] = True
            self.load[rows, choice] += self.task.held[number]
            self.may[rows, choice] &= self.allowed[number]
            later = np.where(self.task.reach[number], np.asarray(choice)[:, None], 0)
            self.floor = np.maximum(self.floor, later)
        elif part == "device":
            works = np.flatnonzero(choice)
            self.copies[works, choice[works] - 1] += 1
        self.at += 1

    def only(self, rows: NDArray[np.integer]) -> None:
        """Goes on with some of the partial plans, each as often as it is named."""
        self.rows = len(rows)
        for name in _BY_ROW:
            setattr(self, name, getattr(self, name)[rows])

    def _set_copies(self) -> None:
        batch = self.task.simulator.nodes.space.problem.job.batch or 0
        for microbatches in {r.microbatches for r in self.task.rhythms}:
            samples, following, most = batch // microbatches, -1, self.next_copies.shape[1]
            row = np.full(most, -1, np.int64)
            for copies in range(most - 1, 0, -1):
                if samples % copies == 0 and (self.task.copies or copies == 1):
                    following = copies
                row[copies] = following
            row[0] = row[1]
            mine = [self.task.rhythms[k].microbatches == microbatches for k in self.rhythm]
            self.next_copies[mine] = row


def random_actions(task: PipelineTask, rng: np.random.Generator, rows: int) -> NDArray[np.int64]:
    """Draws plans, uniform over what the masks allow at each decision, [row, decision]."""
    walk = Walk(task, rows)
    chosen = []
    for _ in task.widths:
        legal = walk.mask()
        ranks = rng.random((rows, 1)) * legal.sum(axis=1, keepdims=True)
        choice = (np.cumsum(legal, axis=1) > ranks).argmax(axis=1)
        walk.take(choice)
        chosen.append(choice)
    return np.stack(chosen, axis=1)
