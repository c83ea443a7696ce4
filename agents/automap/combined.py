"""The combined problem: mesh shape x sharding x stages x microbatches in one plan.

Beyond Auto-MAP, which chooses one kind of parallelism at a time. Slots, in order: ranks of the
pipeline, devices that share a copy of a stage, how these split it (a style of
`simcore.sharding.named`, or ``best``: the optimum of the additive objective on the mesh),
microbatches, schedule, ZeRO, recomputation. What is left of the devices are copies. Stages are cut
by the dynamic program of the pipeline planner. Every plan is simulated in full. Reward: log(data
parallelism's step time / the plan's).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from agents.automap.eliminate import eliminate
from agents.automap.operators import OperatorPartition
from agents.automap.problem import Worth, rewards
from agents.planners.pipeline_chain import Chain
from agents.planners.pipeline_layouts import Layout
from agents.planners.space import PlacementSpace
from simcore.errors import PlacewrightError, PlanError
from simcore.plan import Plan, Stage
from simcore.sharding.named import STYLES, find_roles, style_groups
from simcore.shards import OWN, linkage_of
from simcore.simulation import simulate

WHOLE, BEST = "none", "best"
KINDS = (WHOLE, *STYLES, BEST)
SLOTS = ("stages", "shards", "kind", "microbatches", "schedule", "zero", "recompute")
SCHEDULES = ("1f1b", "interleaved", "zb-h1")
ZERO = (0, 1, 3)
_SAYS = {WHOLE: "no op split", BEST: "the split of least seconds in sum"}
_AXIS = "tp"


@dataclass(frozen=True, kw_only=True, eq=False)
class Combined:
    """The problem of a graph on some GPUs of a cluster.

    Attributes:
        space: gives the graph, the job, the settings and the devices.
        devices: indices, in the order of the cluster.
        stages: numbers of stages.
        microbatches: numbers of microbatches.
        reserve_memory: bytes to leave free on every GPU.
    """

    space: PlacementSpace
    devices: tuple[int, ...]
    stages: tuple[int, ...]
    microbatches: tuple[int, ...]
    reserve_memory: int = 0
    known: dict[tuple[int, ...], tuple[float, int]] = field(default_factory=dict)
    shardings: dict[tuple[int, str], tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def build(
        cls, space: PlacementSpace, devices: Sequence[int], *, reserve_memory: int = 0
    ) -> "Combined":
        """Returns the problem; numbers of stages divide the devices, microbatches the batch."""
        count = len(devices)
        batch = space.problem.job.batch or 1
        return cls(
            space=space,
            devices=tuple(devices),
            stages=tuple(n for n in range(1, count + 1) if count % n == 0),
            microbatches=tuple(2**k for k in range(8) if batch % 2**k == 0),
            reserve_memory=reserve_memory,
        )

    @property
    def num_slots(self) -> int:
        """See `SLOTS`."""
        return len(SLOTS)

    @cached_property
    def num_actions(self) -> int:
        """As many as the largest slot has."""
        sizes = (self.stages, KINDS, self.microbatches, SCHEDULES, ZERO)
        return max(map(len, sizes))

    @property
    def features(self) -> NDArray[np.float32]:
        """Nothing is known but which slot it is, [slot, 1]."""
        return np.zeros((self.num_slots, 1), np.float32)

    def mask(self, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns what divides and exists, [episode, action]."""
        mask = np.zeros((len(chosen), self.num_actions), np.bool_)
        for episode, row in enumerate(chosen.tolist()):
            for action in self.legal(row):
                mask[episode, action] = True
        return mask

    def legal(self, row: Sequence[int]) -> list[int]:
        """Returns what the slot behind those that a row fills may hold."""
        slot = SLOTS[len(row)]
        if slot == "stages":
            most = len(self.chain.places) - 1 if self.chain is not None else 1
            return [k for k, number in enumerate(self.stages) if number <= most]
        left = len(self.devices) // self.stages[row[0]]
        if slot == "shards":
            return [k for k, number in enumerate(self.stages) if left % number == 0]
        return self._legal_within(slot, row, self.stages[row[1]], left)

    def _legal_within(self, slot: str, row: Sequence[int], shards: int, left: int) -> list[int]:
        """Returns what a slot may hold where so many of the devices of a stage share a copy."""
        copies, batch = left // shards, self.space.problem.job.batch or 1
        if slot == "kind":
            split = [k for k, kind in enumerate(KINDS) if self.groups(shards, kind)]
            return [0] if shards == 1 else split
        if slot == "microbatches":
            return [k for k, n in enumerate(self.microbatches) if batch % (n * copies) == 0]
        if slot == "schedule":
            return self._schedules(self.stages[row[0]], self.microbatches[row[3]])
        if slot == "zero":
            return [k for k, zero in enumerate(ZERO) if copies > 1 or zero == 0]
        return [0, 1]

    def says(self, slot: int, action: int) -> str:
        """Returns what an action of a slot is, in words."""
        if SLOTS[slot] == "kind":
            return _SAYS.get(KINDS[action], f"{KINDS[action]} parallel")
        values: tuple[object, ...] = (
            self.stages, self.stages, KINDS, self.microbatches, SCHEDULES, ZERO, ("none", "full")
        )[slot]  # fmt: skip
        return str(values[action])

    def _schedules(self, ranks: int, rounds: int) -> list[int]:
        """Returns the schedules that go with so many ranks and microbatches; the first always."""
        found = [0]
        for number, name in enumerate(SCHEDULES[1:] if ranks > 1 and rounds > 1 else (), 1):
            layout = Layout(devices=((0,),) * ranks, microbatches=rounds, schedule=name)
            try:
                layout.chain()
            except PlanError:
                continue
            if self.chain is not None and layout.num_stages < len(self.chain.places):
                found.append(number)
        return found

    @cached_property
    def chain(self) -> Chain | None:
        """The model as a chain that stages are cut from, None where it cannot be cut."""
        try:
            return Chain.build(self.space)
        except PlacewrightError:
            return None

    def groups(self, shards: int, kind: str) -> tuple[str, ...]:
        """Returns names of the groups that a kind splits, none where it does not exist."""
        key = (shards, kind)
        if kind == WHOLE:
            return ()
        if key not in self.shardings:
            try:
                self.shardings[key] = self._named(shards, kind)
            except PlacewrightError:
                self.shardings[key] = ()
        return self.shardings[key]

    def _named(self, shards: int, kind: str) -> tuple[str, ...]:
        problem = self.space.problem
        if kind == BEST:
            names = [problem.cluster.devices[device].name for device in self.devices]
            mesh = {_AXIS: shards}
            part = OperatorPartition.build(
                problem.graph, problem.cluster, problem.job, names[:shards], mesh
            )
            less = part.additive.restricted(part.keep)
            sizes = [len(values) for values in less.values]
            best = eliminate(sizes, less.scopes, less.objective())
            return part.sharding(less.row(best.places))[_AXIS]
        linkage = linkage_of(problem.graph)
        roles = find_roles(problem.graph, linkage)
        return tuple(
            OWN * (group in roles.experts) + linkage.groups[group].name
            for group in style_groups(kind, roles)
        )

    def plan(self, row: Sequence[int]) -> Plan | None:
        """Returns filled slots as a plan, None where stages cannot be cut so."""
        problem, names = self.space.problem, self.space.problem.cluster.device_names
        number, shards = self.stages[row[0]], self.stages[row[1]]
        groups, rounds = self.groups(shards, KINDS[row[2]]), self.microbatches[row[3]]
        width = len(self.devices) // number
        ranks = tuple(self.devices[k * width : (k + 1) * width] for k in range(number))
        plan = Plan.data_parallel(
            problem.graph, problem.cluster, problem.job, [names[d] for d in self.devices]
        )
        schedule = SCHEDULES[row[4]]
        stages = self._stages(plan.stages[0], ranks, (rounds, schedule, shards))
        if stages is None:
            return None
        mesh = {"dp": width // shards} | ({_AXIS: shards} if shards > 1 else {})
        sharding = {_AXIS: groups} if shards > 1 else {}
        recompute = "full" if row[6] else "none"
        staged = number > 1 or rounds > 1 or row[5] > 0 or row[6] > 0
        return msgspec.structs.replace(
            plan,
            stages=tuple(
                msgspec.structs.replace(s, mesh=mesh, sharding=sharding, recompute=recompute)
                for s in stages
            ),
            microbatches=rounds,
            schedule=(schedule if number > 1 else "gpipe") if staged else plan.schedule,
            optimizer_sharding=ZERO[row[5]],
            settings=msgspec.structs.replace(problem.settings, host="per_rank"),
            constraints=msgspec.structs.replace(
                plan.constraints, reserve_memory_bytes=self.reserve_memory
            ),
        )

    def _stages(
        self, whole: Stage, ranks: tuple[tuple[int, ...], ...], rhythm: tuple[int, str, int]
    ) -> list[Stage] | None:
        """Returns the stages on their devices, None where the model cannot be cut so.

        Args:
            whole: the model as one stage.
            ranks: devices of each.
            rhythm: microbatches, schedule, devices that share a copy of a stage.
        """
        if len(ranks) == 1:
            return [whole]
        problem, names = self.space.problem, self.space.problem.cluster.device_names
        bounds = self._bounds(ranks, rhythm)
        if bounds is None or self.chain is None:
            return None
        units = [problem.graph.unit_names[unit] for unit in self.chain.order.tolist()]
        layout = Layout(devices=ranks, microbatches=rhythm[0], schedule=rhythm[1])
        return [
            msgspec.structs.replace(
                whole,
                name=f"stage{k}",
                devices=tuple(names[d] for d in layout.stage_devices(k)),
                ops=tuple(units[bounds[k] : bounds[k + 1]]),
            )
            for k in range(layout.num_stages)
        ]

    def _bounds(
        self, ranks: tuple[tuple[int, ...], ...], rhythm: tuple[int, str, int]
    ) -> tuple[int, ...] | None:
        """Returns the cuts; of a stage, each device has room for its share, or for anything."""
        rounds, schedule, shards = rhythm
        layout = Layout(devices=ranks, microbatches=rounds, schedule=schedule)
        batch = self.space.problem.job.batch or 1
        if self.chain is None:
            return None
        if batch % (rounds * layout.copies):
            layout = replace(layout, devices=tuple((rank[0],) for rank in ranks))
        for margin in (float(shards), math.inf):
            found = self.chain.cut(layout, margin=margin)
            if found is not None:
                return found.bounds
        return None

    @cached_property
    def baseline(self) -> float:
        """Seconds of data parallelism over all devices, fitting or not; 1 where there is none."""
        row = [0] * self.num_slots
        seconds = self.simulated(row)[0]
        return seconds if math.isfinite(seconds) else 1.0

    def simulated(self, row: Sequence[int]) -> tuple[float, int]:
        """Returns seconds and bytes over the memory of a plan; inf where it does not exist."""
        key = tuple(row)
        if key not in self.known:
            problem = self.space.problem
            try:
                plan = self.plan(row)
                if plan is None:
                    self.known[key] = (math.inf, 0)
                else:
                    found = simulate(problem.graph, problem.cluster, problem.job, plan)
                    self.known[key] = (found.step_time, found.overflow)
            except PlacewrightError:
                self.known[key] = (math.inf, 0)
        return self.known[key]

    def evaluate(self, chosen: NDArray[np.int64]) -> Worth:
        """Simulates plans, [plan, slot]; the same one once."""
        both = [self.simulated(row) for row in chosen.tolist()]
        seconds = np.array([time for time, _ in both])
        overflow = np.array([over for _, over in both], np.int64)
        capacity = max(1.0, float(self.space.problem.capacity[list(self.devices)].mean()))
        return Worth(rewards(seconds, overflow, self.baseline, capacity), seconds, overflow)

    def content_hash(self) -> str:
        """Returns the problem and the devices."""
        problem = self.space.problem
        parts = (problem.graph, problem.cluster, problem.job)
        return " ".join([*(part.content_hash() for part in parts), str(self.devices)])
