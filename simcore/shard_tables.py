"""Names to arrays for sharded plans: what every op may split, what that costs, what moves.

Each op has a cost for each pair of loops that it may split along the two axes, and that for each
axis along which the samples may be split (they say what one device calls its batch).
"""

import functools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.buckets import FIRST_BUCKET
from simcore.cluster import Cluster
from simcore.collectives import AUTO, make_collective
from simcore.curves import shipped_curves
from simcore.graph import OpClass, OpGraph, Phase, Role
from simcore.kernel import (
    NONE,
    SHARD_LOOP,
    SHARD_OP,
    SHARD_READ,
    SHARD_TENSOR,
    TIMING,
    Change,
    Records,
    Rule,
    ShardTables,
    make_records,
)
from simcore.kernel.shard_records import AXES, COPIES, POINTS, STEPS
from simcore.loops import LoopKind
from simcore.mesh import DATA_AXIS
from simcore.plan import DEFAULT_BUCKETS
from simcore.profile_store import load_profile
from simcore.shard_costs import Lowering, variant_costs
from simcore.sharding.affine import at
from simcore.sharding.factors import NOT_SPLIT, AtomicLoop
from simcore.sharding.groups import BATCH, Linkage
from simcore.sharding.shares import scaled
from simcore.sharding.states import ANY, PARTIAL, WHOLE

_Group = tuple[int, ...]  # device indices
_PROBES = (2**10, 2**18, 2**22, 2**28)  # bytes at which the slowest group of an axis is looked for


class Ranks(NamedTuple):
    """In which order an op looks for a group to split.

    Attributes:
        place: of each group, least first, [group].
        own: groups that begin only at ops whose parts have weights of their own, see
            `simcore.sharding.states.Axis`.
    """

    place: tuple[int, ...]
    own: frozenset[int]


def lower_space(
    space: Lowering, linkage: Linkage, ranks: Ranks, decisions: Sequence[Sequence[int]]
) -> ShardTables:
    """Returns the kernel's tables.

    Args:
        space: the graph, the mesh and so on.
        linkage: the groups of the graph.
        ranks: in which order an op looks for a group.
        decisions: groups that are split together, [decision]; no group twice.
    """
    graph, buckets = space.graph, space.buckets
    order = candidates(graph, linkage, ranks.place)
    loops, effects, inner = _loops(space, linkage, order, ranks.own)
    ops, reads = _ops(space, order)
    variants, first = variant_costs(space, linkage, order)
    ops["first_variant"] = first
    decision = np.full(len(linkage.groups), NONE, np.int64)
    for number, groups in enumerate(decisions):
        decision[list(groups)] = number
    names = [group.name for group in linkage.groups]
    is_default = buckets.num_bytes == DEFAULT_BUCKETS.num_bytes
    return ShardTables(
        ops=ops,
        loops=loops,
        effects=effects,
        reads=reads,
        tensors=_tensors(graph),
        home=_home(graph),
        variants=variants,
        num_bytes=_num_bytes(space),
        inner=inner,
        timings=_timings(space),
        decision=decision,
        batch_group=names.index(BATCH) if BATCH in names else NONE,
        divides=np.array([space.batch % n == 0 for n in space.samples], np.int64),
        copies=space.mesh.copies,
        in_order=int(space.settings.contention == "ordered"),
        first_bucket=FIRST_BUCKET if is_default else buckets.num_bytes,
        bucket=buckets.num_bytes,
        holds_buckets=int(not buckets.as_views),
    )


def candidates(graph: OpGraph, linkage: Linkage, rank: Sequence[int]) -> list[list[int]]:
    """Returns the atomic loops of each op, in the order in which it would split them, [op]."""
    found = []
    for op, loops in enumerate(linkage.factors.loops):
        groups = linkage.loop_group[op]

        def key(number: int, op: int = op) -> tuple[int, bool, bool, int]:
            loop = linkage.factors.loops[op][number]
            costs = loop.kind != LoopKind.MAP, sums(graph, op, loop)
            return (rank[linkage.loop_group[op][number]], *costs, number)

        found.append(sorted(range(len(loops)), key=key) if groups else [])
    return found


def sums(graph: OpGraph, op: int, loop: AtomicLoop) -> bool:
    """Whether splitting a loop leaves partial sums."""
    known = graph.loops_of(op)
    accesses = known.accesses if known is not None else ()
    pairs = zip(accesses, loop.factor, strict=True)
    return any(a.is_output and not a.whole and factor == NOT_SPLIT for a, factor in pairs)


def _loops(
    space: Lowering, linkage: Linkage, order: list[list[int]], own: frozenset[int]
) -> tuple[Records, NDArray[np.int8], NDArray[np.int64]]:
    """Returns the loops, the states that they give to accesses, and the bytes inside the ops."""
    graph = space.graph
    rows: list[tuple[int, ...]] = []
    effects: list[int] = []
    inner = np.zeros((len(space.samples), sum(map(len, order)), AXES, 2**AXES), np.int64)
    for op, numbers in enumerate(order):
        known = graph.loops_of(op)
        accesses = known.accesses if known is not None else ()
        for number in numbers:
            loop = linkage.factors.loops[op][number]
            most = at(loop.most, graph.batch or 1)
            divides = sum((most % n == 0) << axis for axis, n in enumerate(space.sizes) if n > 1)
            change = NONE
            if loop.kind in {LoopKind.INNER, LoopKind.HALO} and loop.inner != (0, 0):
                is_halo = loop.kind == LoopKind.HALO
                change = Change.ALL_TO_ALL if is_halo else Change.ALL_REDUCE
                inner[:, len(rows)] = _inner(space, loop)
            group = linkage.loop_group[op][number]
            begins = group not in own or _has_own(graph, op, loop)
            cost = 4 * (loop.kind != LoopKind.MAP) + 2 * sums(graph, op, loop) + (group in own)
            rows.append((group, divides, int(begins), cost, len(effects), int(change)))
            adds = loop.kind in {LoopKind.MAP, LoopKind.HALO}
            for access, factor in zip(accesses, loop.factor, strict=True):
                is_sum = adds and access.is_output and not access.whole
                effects.append(factor if factor != NOT_SPLIT else PARTIAL if is_sum else WHOLE)
    return _records(SHARD_LOOP, rows), np.array([*effects, WHOLE], np.int8), inner


def _has_own(graph: OpGraph, op: int, loop: AtomicLoop) -> bool:
    """Whether all tensors of an op have a loop, a parameter among them."""
    known = graph.loops_of(op)
    accesses = known.accesses if known is not None else ()
    held = any(graph.tensor_producer[access.tensor] < 0 for access in accesses)
    return held and all(factor != NOT_SPLIT for factor in loop.factor)


def _inner(space: Lowering, loop: AtomicLoop) -> NDArray[np.int64]:
    """Returns the bytes of the collective inside an op, [sample, axis, mask of the others]."""
    found = np.zeros((len(space.samples), AXES, 2**AXES), np.int64)
    for sample, devices in enumerate(space.samples):
        for axis in range(AXES):
            for mask in range(2**AXES):
                pair = scaled(loop.inner, Fraction(1, _split(space, mask)), devices)
                size = at(pair, space.batch // devices)
                members = space.sizes[axis]
                if loop.kind == LoopKind.HALO:  # as `simcore.shards.communication_at`
                    size = -(-2 * size * members // max(1, members - 1))
                found[sample, axis, mask] = size
    return found


def _split(space: Lowering, mask: int) -> int:
    """Returns the devices along the axes of a mask."""
    a, b = space.sizes
    return (a if mask & 1 else 1) * (b if mask & 2 else 1)


def _records(dtype: np.dtype[np.void], rows: Sequence[tuple[int, ...]]) -> Records:
    records = make_records(len(rows), dtype)
    for name, values in zip(dtype.names or (), zip(*rows, strict=True), strict=False):
        records[name] = values
    return records


def _ops(space: Lowering, order: list[list[int]]) -> tuple[Records, Records]:
    """Returns the ops, without their variants, and what they read."""
    graph = space.graph
    profile = load_profile(space.cluster.devices[space.places[0]].kind)
    ops = make_records(graph.num_ops + 1, SHARD_OP)
    rows: list[tuple[int, int]] = []
    for op in range(graph.num_ops):
        ops["first_read"][op] = len(rows)
        known = graph.loops_of(op)
        is_view = graph.op_class[op] == OpClass.VIEW
        rule = Rule.LOOPS if known is not None else Rule.VIEW if is_view else Rule.UNKNOWN
        ops["rule"][op] = rule
        ops["is_linear"][op] = known is not None and known.is_linear
        rows += _reads(graph, op, rule)
    ops["first_read"][-1] = len(rows)
    ops["first_loop"][1:] = np.cumsum([len(numbers) for numbers in order])
    ops["first_tensor"] = graph.first_output
    per_op = {
        "epoch": graph.phase != Phase.F,
        "is_update": graph.op_class == OpClass.UPDATE,
        "sync": graph.sync | profile.synchronous,
        "launch": graph.kernels * profile.launch_overhead,
    }
    for key, values in per_op.items():
        ops[key][:-1] = values
    if space.settings.launch == "graph":
        ops["launch"] = 0.0
    return ops, _records(SHARD_READ, rows)


def _reads(graph: OpGraph, op: int, rule: Rule) -> Iterator[tuple[int, int]]:
    """Yields (tensor, place of its access, or the state that is needed) of an op."""
    read = graph.inputs[graph.first_input[op] : graph.first_input[op + 1]].tolist()
    known = graph.loops_of(op)
    if known is None:
        yield from ((tensor, ANY if rule == Rule.VIEW else WHOLE) for tensor in read)
        return
    accessed = set()
    for place, access in enumerate(known.accesses):
        if not access.is_output:
            accessed.add(access.tensor)
            yield access.tensor, place
    yield from ((tensor, ANY) for tensor in read if tensor not in accessed)


def _tensors(graph: OpGraph) -> Records:
    tensors = make_records(graph.num_tensors, SHARD_TENSOR)
    tensors["storage"], tensors["producer"] = graph.tensor_storage, graph.tensor_producer
    tensors["place"] = NONE
    tensors["is_held"] = np.isin(graph.tensor_role, (Role.PARAMETER, Role.BUFFER))
    tensors["is_gradient"] = graph.tensor_role == Role.GRADIENT
    for known in graph.loops or ():
        for place, access in enumerate(known.accesses if known is not None else ()):
            if access.is_output:
                tensors["place"][access.tensor] = place
    return tensors


def _home(graph: OpGraph) -> NDArray[np.int64]:
    """Returns the parameter or buffer in each storage, NONE = none, [storage]."""
    home = np.full(graph.num_storages, NONE, np.int64)
    held = int(graph.first_output[0])
    home[graph.tensor_storage[:held]] = np.arange(held)
    return home


def _num_bytes(space: Lowering) -> NDArray[np.int64]:
    """Returns the bytes of tensors on one device, [sample, tensor, mask]."""
    pairs = space.graph.tensor_bytes
    found = np.zeros((len(space.samples), len(pairs), 2**AXES), np.int64)
    for sample, devices in enumerate(space.samples):
        for mask in range(2**AXES):
            split = _split(space, mask)
            constant, slope = -(-pairs[:, 0] // split), -(-pairs[:, 1] * devices // split)
            found[sample, :, mask] = constant + slope * (space.batch // devices)
    return found


def _timings(space: Lowering) -> Records:
    """Returns what collectives take, TIMING [axis, Change, point], of each axis's slowest group."""
    timings = make_records((AXES + 1, len(Change), POINTS), TIMING)
    for axis, size in enumerate(space.sizes):
        if size > 1:
            groups = space.mesh.members(1 + axis).tolist()
            for change in Change:
                if change != Change.SLICE:
                    _fill(space, timings[axis, change], change.name.lower(), groups)
    if space.mesh.copies > 1:
        groups = space.mesh.members(DATA_AXIS).tolist()
        row, algorithm = timings[COPIES, Change.ALL_REDUCE], space.buckets.algorithm
        _fill(space, row, "all_reduce", groups, algorithm)
    return timings


def _fill(
    space: Lowering,
    row: Records,
    kind: str,
    groups: Sequence[Sequence[int]],
    algorithm: str = AUTO,
) -> None:
    """Writes one curve, on a grid that is even in each doubling of the bytes."""
    members = tuple(tuple(space.places[copy] for copy in group) for group in groups)
    known = shipped_curves().identity
    row["latency"], row["duration"] = _sampled(known, kind, algorithm, space.cluster, members)


@functools.lru_cache(maxsize=512)
def _sampled(
    _curves: object, kind: str, algorithm: str, cluster: Cluster, groups: tuple[_Group, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns latency and duration of the slowest group, both [point] s; found once."""
    curves = shipped_curves()  # looked up once, not for each of many sizes

    def make(num_bytes: int, group: _Group) -> tuple[float, float]:
        task = (kind, num_bytes, cluster, group)
        made = make_collective(*task, algorithm=algorithm, curves=curves)
        return made.latency, made.duration if made.volume else 0.0

    slowest = {max(groups, key=lambda group: sum(make(size, group))) for size in _PROBES}
    found = []
    for point in range(POINTS):
        doubling, part = divmod(point, STEPS)
        num_bytes = max(1, round(2**doubling * (1 + part / STEPS)))
        found.append(max((make(num_bytes, group) for group in sorted(slowest)), key=sum))
    latency, duration = np.array(found).T
    return latency, duration
