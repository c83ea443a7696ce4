"""What no pipeline of sharded stages beats, however its stages are cut.

How a stage is shared out does not depend on where the stages are cut, so what all of them compute
and say to each other in a microbatch is known in advance. A rank runs its share of that for every
microbatch, after the forward of the stages before it and, where the backward is one task, before
their backward; one microbatch goes through all stages and back. Any weights of the ranks with sum 1
bound the busiest one, and what a stage does counts where that is least (the dual of dividing the
work at will). Assumed is what `agents.automap.bounds` assumes. Messages between stages, the host
and memory take nothing, nor does what a recomputing backward runs again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from agents.automap.combined import KINDS, SCHEDULES, ZERO, Combined
from agents.automap.contention import busiest_rate
from agents.planners.pipeline_bound import once_a_step
from agents.planners.pipeline_cuts import stages_at
from simcore.bounds import ROUNDING
from simcore.buckets import gradients_of
from simcore.collectives import make_collective
from simcore.cost import cost_table
from simcore.errors import PlacewrightError
from simcore.graph import Phase
from simcore.mesh import DATA, DATA_AXIS, Mesh
from simcore.plan import Plan
from simcore.shards import OneDevice, communication_at, one_device
from simcore.stage_cut import cut_graph
from simcore.stages import backward_phases

_TILTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the ranks' weights: equal, to what fits the fill
_AXIS = "tp"
_NEVER = np.inf


class Work(NamedTuple):
    """What one device of every stage does, the stages together, at some samples."""

    forward: float  # s a microbatch
    backward: float  # s a microbatch
    inward: float  # s a microbatch, of the backward what stages before wait for
    update: float  # s a step
    heaviest: float  # s a microbatch, of what no cut divides
    said: float  # s of all this that are collectives
    loose: tuple[float, float, float]  # of forward, backward, inward: of stages that need not wait
    gradient: int  # bytes


class _Local(NamedTuple):
    """What one device does of a kind of sharding."""

    device: OneDevice
    phase: NDArray[np.uint8]  # [op] F, I, W or U; U where it may run once a step
    segment: NDArray[np.int64]  # [op] between which places of the chain
    gradients: NDArray[np.int64]  # [gradient] tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class CombinedBound:
    """The bound of each plan of a combined problem.

    Attributes:
        problem: the problem; its devices are of one kind.
        locals: what one device does, by shards and kind; None where there is no such plan.
        works: by ranks, shards, kind and microbatches.
    """

    problem: Combined
    locals: dict[tuple[int, int], _Local | None] = field(default_factory=dict)
    works: dict[tuple[int, ...], Work | None] = field(default_factory=dict)

    def of(self, row: Sequence[int]) -> float:
        """Returns seconds that the plan of a row does not beat; inf where it does not exist.

        Only the slots up to the schedule count, and whether the optimizer is sharded.
        """
        work = self.work(row[:4])
        if work is None:
            return _NEVER
        problem = self.problem
        ranks, rounds = problem.stages[row[0]], problem.microbatches[row[3]]
        copies = len(problem.devices) // ranks // problem.stages[row[1]]
        if ZERO[row[5]]:
            work = work._replace(update=work.update / copies)
        if ranks == 1:
            seconds = self._alone(work, rounds, row, copies)
        else:
            seconds = filled(work, (ranks, rounds), SCHEDULES[row[4]])
        return float(seconds) * (1.0 - ROUNDING)

    def least(
        self,
        *,
        sharded: bool,
        plain: bool,
        goes_on: Callable[[], bool] | None = None,
        floor: float = 0.0,
    ) -> float:
        """Returns seconds that no plan beats; inf where there is none.

        Args:
            sharded: of plans that share something out, see `shares`; else of the others.
            plain: whether plans count that are the model in one stage and nothing more.
            goes_on: asked before each plan; None: all are looked at.
            floor: s that no plan beats that was not looked at.
        """
        least = _NEVER
        for row in self._rows():
            if goes_on is not None and not goes_on():
                return min(least, floor)
            if self.shares(row) == sharded and (plain or not self.is_plain(row)):
                least = min(least, self.of(row))
        return least

    def is_plain(self, row: Sequence[int]) -> bool:
        """Whether a plan has one stage, one microbatch, and is not made to need less memory."""
        is_one = self.problem.stages[row[0]] == 1 and self.problem.microbatches[row[3]] == 1
        return is_one and ZERO[row[5]] == 0 and row[6] == 0

    def shares(self, row: Sequence[int]) -> bool:
        """Whether devices share a copy of a stage, or the optimizer of a model in one stage."""
        stages = self.problem.stages
        return stages[row[1]] > 1 or (stages[row[0]] == 1 and ZERO[row[5]] > 0)

    def _rows(self) -> Iterator[tuple[int, ...]]:
        """Yields rows without recomputing, which only adds to the work."""
        yield from ((*head, 0) for head in self._heads((), 6))

    def _heads(self, head: tuple[int, ...], slots: int) -> Iterator[tuple[int, ...]]:
        """Yields what so many slots may hold that begin with some."""
        if len(head) == slots:
            yield head
            return
        for action in self.problem.legal(head):
            yield from self._heads((*head, action), slots)

    def _alone(self, work: Work, rounds: int, row: Sequence[int], copies: int) -> float:
        """Returns what a model in one stage does not beat, s."""
        both = work.forward + work.backward
        sums = self._sums(row, work.gradient) if copies > 1 else 0.0
        if self.is_plain(row):  # collectives may run beside ops
            return max(both - work.said + work.update, sums)
        before = work.forward + (rounds - 1) * both  # nothing is summed before the last backward
        return max(rounds * both + work.update, before + sums)

    def _sums(self, row: Sequence[int], num_bytes: int) -> float:
        """Returns s for which sums of gradients keep the busiest link busy."""
        problem = self.problem
        if problem.space.problem.settings.contention == "none":
            return 0.0
        mesh = self._mesh(1, problem.stages[row[1]])
        groups = [[problem.devices[k] for k in group] for group in mesh.members(DATA_AXIS).tolist()]
        kind = "reduce_scatter" if row[5] else "all_reduce"
        return busiest_rate(problem.space.problem.cluster, kind, groups) * num_bytes

    @cached_property
    def waits_from(self) -> int:
        """The segment of the chain from which each stage waits for the one before, and it for it.

        So wherever the chain is cut behind it; the number of segments where there is none.
        """
        chain = self.problem.chain
        if chain is None or len(chain.places) < 3:
            return 0
        stage = stages_at(chain.places[1:-1], chain.rank)
        cut = cut_graph(self.problem.space.problem.graph, stage)
        ahead = set(zip(cut.forward.source.tolist(), cut.forward.target.tolist(), strict=True))
        back = set(zip(cut.backward.target.tolist(), cut.backward.source.tolist(), strict=True))
        pairs = [(k, k + 1) for k in range(cut.num_stages - 1)]
        broken = [k for k, pair in enumerate(pairs) if pair not in ahead & back]
        if broken and broken[-1] == len(pairs) - 1:
            return cut.num_stages
        return broken[-1] + 1 if broken else 0

    def _mesh(self, ranks: int, shards: int) -> Mesh:
        copies = len(self.problem.devices) // ranks // shards
        return Mesh.of({DATA: copies} | ({_AXIS: shards} if shards > 1 else {}))

    def work(self, head: Sequence[int]) -> Work | None:
        """Returns what there is to do, None where there is no such plan.

        Args:
            head: ranks, shards, kind and microbatches of a row.
        """
        key = tuple(head)
        if key not in self.works:
            try:
                self.works[key] = self._found(key)
            except PlacewrightError:
                self.works[key] = None
        return self.works[key]

    def _found(self, head: tuple[int, ...]) -> Work | None:
        problem, task = self.problem, self.problem.space.problem
        ranks, shards, rounds = (*(problem.stages[k] for k in head[:2]),
                                 problem.microbatches[head[3]])  # fmt: skip
        local = self._local(head[1], head[2])
        mesh = self._mesh(ranks, shards)
        if local is None:
            return None
        samples, rest = divmod(task.job.batch or 1, rounds * mesh.copies * local.device.samples)
        if rest:
            return None
        graph = local.device.graph
        kind = task.cluster.devices[problem.devices[0]].kind
        seconds = cost_table(graph, task.job, (kind,), (samples,)).seconds[:, 0, 0].copy()
        spoken = self._spoken(local.device, (ranks, mesh), samples)
        seconds[list(spoken)] = list(spoken.values())
        often = local.phase != Phase.U
        ahead, inward = local.phase == Phase.F, local.phase == Phase.I
        loose = local.segment < self.waits_from
        sizes = graph.at_batch(samples).tensor_bytes
        return Work(
            forward=float(seconds[ahead].sum()),
            backward=float(seconds[often & ~ahead].sum()),
            inward=float(seconds[inward].sum()),
            update=float(seconds[~often].sum()),
            heaviest=float(np.bincount(local.segment[often], seconds[often]).max(initial=0.0)),
            said=sum(spoken.values()),
            loose=(
                float(seconds[ahead & loose].sum()),
                float(seconds[often & ~ahead & loose].sum()),
                float(seconds[inward & loose].sum()),
            ),
            gradient=int(sizes[local.gradients].sum()),
        )

    def _spoken(self, device: OneDevice, where: tuple[int, Mesh], samples: int) -> dict[int, float]:
        """Returns s of each collective op, of the ranks the one where it is fastest.

        Args:
            device: what a device does.
            where: number of ranks, and the mesh of each.
            samples: of one device.
        """
        (ranks, mesh), devices = where, self.problem.devices
        cluster = self.problem.space.problem.cluster
        width, known = len(devices) // ranks, {}
        found = communication_at(device, mesh, samples)
        for kind, axis, size in set(found.values()):
            groups = mesh.members(axis).tolist()
            known[kind, axis, size] = min(
                max(
                    make_collective(
                        kind, size, cluster, [devices[rank * width + k] for k in group]
                    ).idle_time
                    for group in groups
                )
                for rank in range(ranks)
            )
        return {op: known[what] for op, what in found.items()}

    def _local(self, shards: int, kind: int) -> _Local | None:
        """Returns what one device does of a kind of sharding, None where it does not exist."""
        if (shards, kind) not in self.locals:
            try:
                self.locals[shards, kind] = self._lowered(shards, kind)
            except PlacewrightError:
                self.locals[shards, kind] = None
        return self.locals[shards, kind]

    def _lowered(self, shards: int, kind: int) -> _Local | None:
        problem, task = self.problem, self.problem.space.problem
        count, graph = problem.stages[shards], task.graph
        groups = problem.groups(count, KINDS[kind])
        if count > 1 and not groups:
            return None
        names = [task.cluster.devices[device].name for device in problem.devices[:count]]
        plan = Plan.data_parallel(graph, task.cluster, task.job, names)
        split = {"mesh": {DATA: 1, _AXIS: count}, "sharding": {_AXIS: groups}}
        stage = plan.stages[0]
        if count > 1:
            stage = msgspec.structs.replace(stage, **split)
        plan = msgspec.structs.replace(plan, stages=(stage,))
        device = one_device(graph, plan, np.zeros(graph.num_units, np.int32))
        phase = backward_phases(device.graph).copy()
        phase[once_a_step(device.graph)] = Phase.U
        return _Local(device, phase, self._segments(device), gradients_of(device.graph))

    def _segments(self, device: OneDevice) -> NDArray[np.int64]:
        """Returns between which places of the chain each op of a device is, [op]."""
        chain, graph = self.problem.chain, self.problem.space.problem.graph
        if chain is None:
            return np.zeros(device.graph.num_ops, np.int64)
        segment = stages_at(chain.places[1:-1], chain.rank)
        known = device.base >= 0
        of_unit = np.zeros(device.graph.num_units, np.int64)
        of_unit[device.graph.unit[known]] = segment[graph.unit[device.base[known]]]
        found: NDArray[np.int64] = of_unit[device.graph.unit]
        return found


def filled(work: Work, shape: tuple[int, int], schedule: str) -> float:
    """Returns what a pipeline does not beat, in s.

    Args:
        work: of all its stages.
        shape: ranks and microbatches.
        schedule: its name. With ``interleaved`` a rank need not wait; with ``zb-h1`` the ranks
            before one need not wait for all of its backward.
    """
    ranks, rounds = shape
    chained = work.forward - work.loose[0], work.backward - work.loose[1]
    inward = work.inward - work.loose[2]
    path = chained[0] + (inward if schedule == "zb-h1" else chained[1])  # of one microbatch
    best = max(rounds * work.heaviest, path)
    for tilt in _TILTS:
        weight = (1.0 - tilt / rounds) ** np.arange(ranks - 1, -1.0, -1.0)
        weight /= weight.sum()
        behind = 1.0 - np.cumsum(weight)  # of the ranks that wait for one
        plain = float(rounds * weight.min())
        full = plain if schedule == "interleaved" else float((rounds * weight + behind).min())
        ahead = work.loose[0] * plain + chained[0] * full
        best = max(best, ahead + work.backward * plain + work.update * float(weight.min()))
        if schedule == "1f1b":
            best = max(best, ahead + work.loose[1] * plain + chained[1] * full)
    return best
