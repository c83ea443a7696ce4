"""Operator partition: one linkage group after another is split along an axis or left whole.

Reconstruction. State: what was decided of each group, and what the group at hand is. Action: whole,
or an axis of the mesh. Groups come in the order of how much a split of them decides (HPGO's
``param_priority``). The mask takes out what does not divide, what another choice is never worse
than, and what no plan within the memory goes on from. Reward: after the last group,
log(data parallelism's step time / the plan's).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from agents.automap.additive import Additive, dominated
from agents.automap.contention import shared
from agents.automap.problem import Worth, rewards
from simcore.cluster import Cluster
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.mesh import DATA
from simcore.plan import Plan
from simcore.profile_store import load_profile
from simcore.shard_batch import FoldedSpace, simulate_folded
from simcore.shard_fold import merged_groups
from simcore.shard_space import STREAM, WHOLE, ShardSpace, group_ranks
from simcore.sharding.affine import at
from simcore.sharding.groups import BATCH
from simcore.sharding.named import find_roles
from simcore.shards import OWN, linkage_of

FEATURES = ("size", "members", "is_batch", "decides", "saves", "costs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What makes the space smaller; each can be left out to see what it does.

    Attributes:
        fold: equal layers of a stack are decided alike, and few of them are simulated.
        dominated: choices go that another is never worse than in the additive objective.
        memory: choices go that leave no plan whose parameters and optimizer state fit.
    """

    fold: bool = True
    dominated: bool = True
    memory: bool = True


ALL = Pruning()


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorPartition:
    """The problem on one mesh.

    Attributes:
        folded: the space, folded or not.
        additive: what its plans add up to.
        keep: values that are left of each decision, [decision][value].
        order: decisions with a choice, those first that decide most, [slot].
        reserve_memory: bytes to leave free on every device.
        pruning: what was used.
    """

    folded: FoldedSpace
    additive: Additive
    keep: Sequence[NDArray[np.bool_]]  # [decision][value]
    order: tuple[int, ...]
    reserve_memory: int = 0
    pruning: Pruning = ALL
    known: dict[bytes, tuple[float, int]] = field(default_factory=dict)

    @classmethod
    def build(  # noqa: PLR0913 - what a problem consists of
        cls,
        graph: OpGraph,
        cluster: Cluster,
        job: Job,
        devices: Sequence[str],
        mesh: Mapping[str, int],
        *,
        reserve_memory: int = 0,
        pruning: Pruning = ALL,
    ) -> "OperatorPartition":
        """Lowers the problem.

        Args:
            graph: a captured graph.
            cluster: the cluster.
            job: the job.
            devices: names, all of one kind, in the order of the mesh.
            mesh: ``dp`` and one or two other axes -> devices along each.
            reserve_memory: bytes to leave free on every device.
            pruning: what makes the space smaller.

        Raises:
            PlanError: as `ShardSpace.build`, or ops that depend on too many decisions.
            GraphError: a graph without loops, or equal layers that are not split alike.
        """
        task = (graph, cluster, job, devices, mesh)
        folded = shared(FoldedSpace.build(*task) if pruning.fold else _unfolded(*task))
        additive = Additive.build(folded)
        whole = [np.ones(len(values), np.bool_) for values in additive.values]
        keep = dominated(additive) if pruning.dominated else whole
        free = [d for d in additive.free if keep[d].sum() > 1]
        decides = [_places(folded.spaces[0], decision) for decision in free]
        order = [d for _, d in sorted(zip(decides, free, strict=True), key=lambda p: (-p[0], p[1]))]
        return cls(
            folded=folded,
            additive=additive,
            keep=keep,
            order=tuple(order),
            reserve_memory=reserve_memory,
            pruning=pruning,
        )

    @property
    def num_slots(self) -> int:
        """Decisions with a choice."""
        return len(self.order)

    @property
    def num_actions(self) -> int:
        """Whole, and each axis."""
        return 1 + self.additive.num_axes

    @cached_property
    def space_size(self) -> float:
        """Number of plans that are left."""
        return float(np.prod([float(k.sum()) for k in self.keep]))

    @cached_property
    def fixed(self) -> NDArray[np.int8]:
        """The plan in which slots are whole and the rest has what is left of it, [decision]."""
        pairs = zip(self.additive.values, self.keep, strict=True)
        row = np.array([values[keep][0] for values, keep in pairs], np.int8)
        for decision in self.order:
            if self.keep[decision][0]:
                row[decision] = WHOLE
        return row

    @cached_property
    def legal(self) -> NDArray[np.bool_]:
        """Actions that are left, [slot, action]."""
        legal = np.zeros((self.num_slots, self.num_actions), np.bool_)
        for slot, decision in enumerate(self.order):
            legal[slot, self.additive.values[decision][self.keep[decision]] - WHOLE] = True
        return legal

    @cached_property
    def capacity(self) -> float:
        """Bytes that the allocator of one device may hold."""
        space = self.folded.spaces[0]
        devices = [space.cluster.devices[space.cluster.device_index(n)] for n in space.devices]
        profile = load_profile(devices[0].kind)
        room = min(device.memory for device in devices)
        room -= (0 if profile.is_cpu else self.reserve_memory) + profile.context
        return max(0.0, room / (1.0 + profile.fragmentation))

    @cached_property
    def baseline(self) -> float:
        """Seconds of a step in which everything is split by samples, or whole."""
        row = np.full(self.folded.num_decisions, WHOLE, np.int8)
        time = float(simulate_folded(self.folded, row[None]).step_time[0])
        return time if np.isfinite(time) else 1.0

    @cached_property
    def features(self) -> NDArray[np.float32]:
        """What is known about each slot's groups, [slot, feature], 0 to 1; see `FEATURES`."""
        space, rows = self.folded.spaces[0], []
        groups, batch = space.linkage.groups, space.graph.batch or 1
        total = float(
            sum(t.reshape(len(t), -1)[:2].sum(axis=0).max() for t in self.additive.tables)
        )
        for decision in self.order:
            first = groups[space.decisions[decision][0]]
            mine = [
                table[:2].sum(axis=0)
                for scope, table in zip(self.additive.scopes, self.additive.tables, strict=True)
                if decision in scope
            ]
            spread = sum(float(table.max() - table.min()) for table in mine) / max(total, 1e-12)
            rows.append((
                np.log2(1 + at(first.size, batch)) / 24,
                np.log2(1 + len(space.decisions[decision])) / 10,
                float(any(groups[g].name == BATCH for g in space.decisions[decision])),
                np.log2(1 + _places(space, decision)) / 16,
                min(1.0, spread),
                len(mine) / max(1, len(self.additive.tables)),
            ))  # fmt: skip
        return np.clip(np.array(rows, np.float32).reshape(-1, len(FEATURES)), 0.0, 1.0)

    def mask(self, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns what the next group may be, [episode, action]."""
        slot = chosen.shape[1]
        mask = np.repeat(self.legal[slot][None], len(chosen), axis=0)
        if self.pruning.memory:
            for action in np.flatnonzero(self.legal[slot]).tolist():
                tried = np.concatenate([chosen, np.full((len(chosen), 1), action)], axis=1)
                mask[:, action] &= self.least_kept(tried) <= self.capacity
        return mask

    def least_kept(self, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns bytes that every plan that goes on so keeps at least, [episode]."""
        decided = {self.order[slot]: chosen[:, slot] + WHOLE for slot in range(chosen.shape[1])}
        total = np.zeros(len(chosen))
        for scope, table in zip(self.additive.scopes, self.additive.kept(), strict=True):
            known = [d for d in scope if d in decided]
            open_axes = tuple(place for place, d in enumerate(scope) if d not in decided)
            least = table.min(axis=open_axes) if open_axes else table
            places = tuple(np.searchsorted(self.additive.values[d], decided[d]) for d in known)
            total += least[places]
        return total

    def rows(self, chosen: NDArray[np.integer]) -> NDArray[np.int8]:
        """Returns filled slots, [plan, slot], as plans of the space, [plan, decision]."""
        rows = np.repeat(self.fixed[None], len(chosen), axis=0)
        rows[:, list(self.order)] = np.asarray(chosen) + WHOLE
        return rows

    def chosen(self, row: NDArray[np.integer]) -> NDArray[np.int64]:
        """Returns a plan of the space, [decision], as slots; what was pruned is lost."""
        return np.asarray(row, np.int64)[list(self.order)] - WHOLE

    def evaluate(self, chosen: NDArray[np.int64]) -> Worth:
        """Simulates plans, [plan, slot]; the same one once."""
        rows = self.rows(chosen)
        new = {row.tobytes(): row for row in rows if row.tobytes() not in self.known}
        if new:
            found = simulate_folded(
                self.folded, np.stack(list(new.values())), reserve_memory=self.reserve_memory
            )
            pairs = zip(found.step_time.tolist(), found.overflow.tolist(), strict=True)
            self.known.update(zip(new, pairs, strict=True))
        both = [self.known[row.tobytes()] for row in rows]
        seconds = np.array([time for time, _ in both])
        overflow = np.array([over for _, over in both], np.int64)
        value = rewards(seconds, overflow, self.baseline, max(1.0, self.capacity))
        return Worth(value, seconds, overflow)

    def sharding(self, row: NDArray[np.integer]) -> dict[str, tuple[str, ...]]:
        """Returns axis -> names of the groups of the whole graph that a plan splits along it."""
        space, graph = self.folded.spaces[0], self.folded.graph
        linkage = linkage_of(graph)
        ranks = group_ranks(linkage, find_roles(graph, linkage))
        if self.pruning.fold:
            decisions = list(merged_groups(graph, linkage).values())
        else:
            decisions = [tuple(groups) for groups in space.decisions]
        axis_of = {g: int(row[d]) for d, groups in enumerate(decisions) for g in groups}
        order = np.argsort(np.array(ranks.place)).tolist()
        return {
            axis: tuple(
                OWN * (group in ranks.own) + linkage.groups[group].name
                for group in order
                if axis_of.get(group, WHOLE) == number
            )
            for number, axis in enumerate(space.axes)
        }

    def plan(self, row: NDArray[np.integer]) -> Plan | None:
        """Returns a plan of the space as one of one stage; None where an axis splits nothing."""
        space, graph = self.folded.spaces[0], self.folded.graph
        sharding = self.sharding(row)
        if not all(sharding.values()):
            return None
        plan = Plan.data_parallel(graph, space.cluster, space.job, space.devices)
        mesh = dict(zip(space.mesh.names, space.mesh.sizes, strict=True))
        stage = msgspec.structs.replace(plan.stages[0], mesh={DATA: 1} | mesh, sharding=sharding)
        settings = msgspec.structs.replace(STREAM, contention=plan.settings.contention)
        return msgspec.structs.replace(plan, stages=(stage,), settings=settings)

    def content_hash(self) -> str:
        """Returns the graph, cluster, job, mesh and pruning."""
        space = self.folded.spaces[0]
        parts = (self.folded.graph, space.cluster, space.job)
        mesh = zip(space.mesh.names, space.mesh.sizes, strict=True)
        return " ".join([*(part.content_hash() for part in parts), str(list(mesh)),
                         str(self.pruning), str(self.reserve_memory)])  # fmt: skip


def _places(space: ShardSpace, decision: int) -> int:
    """Returns how many factors of storages a decision splits."""
    return sum(len(space.linkage.groups[group].places) for group in space.decisions[decision])


def _unfolded(
    graph: OpGraph, cluster: Cluster, job: Job, devices: Sequence[str], mesh: Mapping[str, int]
) -> FoldedSpace:
    """Returns the space of the whole graph with a decision for each group."""
    space = ShardSpace.build(graph, cluster, job, devices, mesh)
    names = tuple((group.name, 0) for group in space.linkage.groups)
    return FoldedSpace(graph=graph, spaces=(space,), layers=(), names=names)
