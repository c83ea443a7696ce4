"""Many sharded plans of one space: step times and memory, in compiled code on all cores.

A folded space has few of a model's repeated layers, and one decision for all of them.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.errors import GraphError, PlanError
from simcore.graph import OpGraph
from simcore.job import Job
from simcore.kernel import ShardOutcome, Status, make_shard_scratch, run_shards
from simcore.plan import DEFAULT_BUCKETS, Buckets, Settings
from simcore.profile_store import load_profile
from simcore.run import share_out
from simcore.shard_fold import KEPT, Fold, extended, find_repeats, fold, merged_groups
from simcore.shard_space import STREAM, WHOLE, ShardSpace
from simcore.shards import linkage_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardResult:
    """The outcome of every plan; all devices of the mesh do and hold the same."""

    step_time: NDArray[np.float64]  # [plan] s, inf where it cannot run
    allocated: NDArray[np.int64]  # [plan] peak bytes of a device's allocator
    reserved: NDArray[np.int64]  # [plan] with fragmentation and context; decides what fits
    # ILLEGAL_DEVICE = the batch does not divide; DEADLOCK = a sum of gradients waits for an update
    status: NDArray[np.uint8]  # [plan] Status
    num_ops: NDArray[np.int64]  # [plan] ops and collectives of one device
    overflow: NDArray[np.int64]  # [plan] bytes over the capacity of one device


def simulate_shardings(
    space: ShardSpace,
    plans: NDArray[np.integer],
    *,
    reserve_memory: int = 0,
    threads: int | None = None,
) -> ShardResult:
    """Simulates many sharded plans on all cores.

    The numbers are those of `simcore.simulate` for the same plan and settings, but for the times of
    collectives, which are read from curves of 16 points in each doubling of the bytes, and are
    those of the slowest group where groups of an axis differ.

    Args:
        space: the lowered space.
        plans: axis along which each decision is split, -1 = none, [plan, decision].
        reserve_memory: bytes to leave free on every device.
        threads: number of threads, None = one per core. The result does not depend on it.

    Raises:
        PlanError: plans of another width, or an axis that the space does not have.
    """
    out = _run(space, _rows(space, plans), threads)
    return _with_memory(space, out, reserve_memory)


def _rows(space: ShardSpace, plans: NDArray[np.integer]) -> NDArray[np.int8]:
    """Returns plans as the kernel takes them."""
    given = np.asarray(plans)
    if given.ndim != 2 or given.shape[1] != space.num_decisions or given.dtype.kind not in "iu":
        raise PlanError(
            f"plans must be whole numbers [plan, {space.num_decisions}], not {given.dtype} "
            f"{list(given.shape)}"
        )
    if given.size and not WHOLE <= given.min() <= given.max() < len(space.axes):
        raise PlanError(f"plans must be {WHOLE} to {len(space.axes) - 1}")
    return np.ascontiguousarray(given, np.int8)


def _run(space: ShardSpace, rows: NDArray[np.int8], threads: int | None) -> ShardOutcome:
    count = len(rows)
    out = ShardOutcome(
        step_time=np.full(count, np.inf),
        allocated=np.zeros(count, np.int64),
        num_ops=np.zeros(count, np.int64),
    )

    def work(begin: int, end: int) -> None:
        run_shards(space.tables, rows, out, make_shard_scratch(space.tables), begin, end)

    share_out(work, count, count * space.graph.num_ops, threads)
    return out


def _with_memory(space: ShardSpace, out: ShardOutcome, reserve_memory: int) -> ShardResult:
    """Returns the outcome with what is reserved, and whether that fits every device."""
    devices = [space.cluster.devices[space.cluster.device_index(n)] for n in space.devices]
    profile = load_profile(devices[0].kind)
    capacity = min(device.memory for device in devices) - (0 if profile.is_cpu else reserve_memory)
    grown = np.ceil(out.allocated * (1.0 + profile.fragmentation)).astype(np.int64)
    runs = np.isfinite(out.step_time)
    reserved = np.where(runs, grown + profile.context, 0)
    overflow = np.maximum(reserved - max(capacity, 0), 0)
    status = np.where(overflow > 0, np.uint8(Status.OUT_OF_MEMORY), np.uint8(Status.OK))
    broken = np.where(out.num_ops > 0, np.uint8(Status.DEADLOCK), np.uint8(Status.ILLEGAL_DEVICE))
    return ShardResult(
        step_time=out.step_time,
        allocated=out.allocated,
        reserved=reserved,
        status=np.where(runs, status, broken),
        num_ops=out.num_ops,
        overflow=overflow,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedSpace:
    """A space in which repeated layers are decided alike, and few of them are simulated.

    Attributes:
        graph: the whole graph.
        spaces: of the graph with few layers, then with one more layer of each stack.
        layers: that the first of them lacks, of each stack, [stack].
        names: (tensor, factor) that stands for the groups of each decision, [decision].
    """

    graph: OpGraph
    spaces: tuple[ShardSpace, ...]
    layers: tuple[int, ...]
    names: tuple[tuple[str, int], ...]

    @classmethod
    def build(  # noqa: PLR0913 - as `ShardSpace.build`
        cls,
        graph: OpGraph,
        cluster: Cluster,
        job: Job,
        devices: Sequence[str],
        mesh: Mapping[str, int],
        *,
        settings: Settings = STREAM,
        buckets: Buckets = DEFAULT_BUCKETS,
    ) -> "FoldedSpace":
        """Folds a graph and lowers what is left.

        Args:
            graph: a captured graph.
            cluster: the cluster.
            job: the job.
            devices: names, all of one kind, in the order of the mesh.
            mesh: axis -> devices along it.
            settings: how plans are simulated.
            buckets: how gradients are put together.

        Raises:
            PlanError: as `ShardSpace.build`.
            GraphError: as there, or folding changed what may be split.
        """
        known = _folded(graph)
        spaces = tuple(
            ShardSpace.build(
                each.graph,
                cluster,
                job,
                devices,
                mesh,
                settings=settings,
                buckets=buckets,
                decisions=tuple(groups.values()),
            )
            for each, groups in zip(known.folds, known.merged, strict=True)
        )
        return cls(
            graph=graph,
            spaces=spaces,
            layers=known.layers,
            names=tuple(known.merged[0]),
        )

    @property
    def num_decisions(self) -> int:
        """Columns of a plan."""
        return len(self.names)

    @property
    def num_ops(self) -> int:
        """Ops of all graphs that one plan is simulated on."""
        return sum(space.graph.num_ops for space in self.spaces)

    def unfolded(self) -> ShardSpace:
        """Returns the space of the whole graph with the same decisions.

        Raises:
            GraphError: the whole graph has other groups than its folds.
        """
        first = self.spaces[0]
        merged = merged_groups(self.graph, linkage_of(self.graph))
        if tuple(merged) != self.names:
            raise GraphError(f"{self.graph.name}: its layers look alike but are not split alike")
        return ShardSpace.build(
            self.graph,
            first.cluster,
            first.job,
            first.devices,
            dict(zip(first.mesh.names, first.mesh.sizes, strict=True)),
            settings=first.settings,
            buckets=first.buckets,
            decisions=tuple(merged.values()),
        )


class _Folded(NamedTuple):
    """What a graph is without most of its repeated layers."""

    folds: tuple[Fold, ...]  # with few layers, then with one more layer of each stack
    layers: tuple[int, ...]  # that the first of them lacks, of each stack, [stack]
    merged: tuple[Mapping[tuple[str, int], tuple[int, ...]], ...]  # groups decided alike, [fold]


@functools.lru_cache(maxsize=8)
def _folded(graph: OpGraph) -> _Folded:
    """Returns a graph folded; found once, as every mesh asks for it.

    Raises:
        GraphError: folding changed what may be split.
    """
    repeats = find_repeats(graph)
    few = {repeat.stack: KEPT for repeat in repeats}
    kept = [few, *(few | {repeat.stack: KEPT + 1} for repeat in repeats)]
    folds = tuple(fold(graph, repeats, each) for each in kept)
    merged = tuple(merged_groups(each.graph, linkage_of(each.graph)) for each in folds)
    if any(list(each) != list(merged[0]) for each in merged):
        raise GraphError(f"{graph.name}: its layers look alike but are not split alike")
    layers = tuple(folds[0].dropped[repeat.stack] for repeat in repeats)
    return _Folded(folds, layers, merged)


def simulate_folded(
    folded: FoldedSpace,
    plans: NDArray[np.integer],
    *,
    reserve_memory: int = 0,
    threads: int | None = None,
) -> ShardResult:
    """Simulates many sharded plans that treat all layers of a stack alike.

    Memory is that of the whole graph; so is the step time of one copy. With several copies, buckets
    of gradients do not end where layers do, and the step time is a few thousandths off.

    Args:
        folded: the folded space.
        plans: axis along which each decision is split, -1 = none, [plan, decision].
        reserve_memory: bytes to leave free on every device.
        threads: number of threads, None = one per core.

    Raises:
        PlanError: plans of another width, or an axis that the space does not have.
    """
    rows = _rows(folded.spaces[0], plans)
    few, *more = (_run(space, rows, threads) for space in folded.spaces)
    runs = np.all([np.isfinite(each.step_time) for each in (few, *more)], axis=0)
    known = [np.where(runs, each.step_time, 0.0) for each in (few, *more)]
    seconds = extended(known[0], known[1:], folded.layers)
    out = ShardOutcome(
        step_time=np.where(runs, seconds, np.inf),
        allocated=extended(few.allocated, [each.allocated for each in more], folded.layers),
        num_ops=extended(few.num_ops, [each.num_ops for each in more], folded.layers),
    )
    return _with_memory(folded.spaces[0], out, reserve_memory)
