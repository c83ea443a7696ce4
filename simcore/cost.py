"""Costs: a graph, a job and device kinds -> seconds of every op on every kind at every batch.

An op's seconds are what its kernels take on the device; launching them is the host's time and is
kept apart. Where they come from, first that applies:

- measured seconds of a fixed graph, for the kind and the batch they were measured at (`FIXED`), or
  scaled linearly to others where the job allows it (`SCALED`);
- measured seconds of the profile's table for the same op and sizes (`MEASURED`);
- the curve of the op's class and dtype in the hardware profile (`CURVE`), see `simcore.op_curves`;
- the roofline: the larger of FLOPs / achievable FLOP/s and bytes / achievable bytes/s, with the
  efficiencies of the hardware profile (`ROOFLINE`); an update moves elements times the traffic of
  the job's optimizer;
- nothing, for views, graph inputs and ops without a signature (`ZERO`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simcore.cluster import Cluster
from simcore.errors import GraphError, JobError
from simcore.graph import FixedCosts, OpClass, OpGraph
from simcore.job import Job
from simcore.op_curves import CostSource, OpCosts, Query, op_costs
from simcore.profile import HardwareProfile
from simcore.profile_store import load_profile
from simcore.signature import Signature

MEASURED_ERROR = 0.05  # relative; run to run spread of a profiled op
SCALED_ERROR = 0.3  # relative; as a roofline
_FREE = (OpClass.INPUT, OpClass.VIEW)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable:
    """What every op costs. Axes: op, kind, variant (a batch); read-only."""

    seconds: NDArray[np.float64]  # [op, kind, variant] s on the device; inf = cannot run there
    launch: NDArray[np.float64]  # [op, kind] s of the host
    source: NDArray[np.uint8]  # [op, kind] CostSource
    relative_error: NDArray[np.float64]  # [op, kind] standard error / seconds
    kinds: tuple[str, ...]  # [kind]
    batches: tuple[int | None, ...]  # [variant] samples; None = the graph's own
    trail: NDArray[np.float64] | None = None  # [op, kind] s of the host after a launch; None = 0


def cost_table(
    graph: OpGraph, job: Job, kinds: Sequence[str], batches: Sequence[int | None]
) -> CostTable:
    """Returns the cost of every op on every kind at every batch.

    Args:
        graph: the graph.
        job: gives the optimizer's traffic, and whether measured seconds may be scaled.
        kinds: device kinds, distinct.
        batches: samples that one copy of the model sees; None = the graph's own.

    Raises:
        GraphError: a coarse graph, whose groups have no signature; see `Coarse.cost`.
        JobError: a fixed graph at a batch or on a GPU kind that it was not measured at, without
            `Job.assume_linear`.
        ProfileError: a kind, or the kind measured on where seconds are scaled, has no profile.
    """
    if graph.fixed is None and (graph.op_class == OpClass.GROUP).any():
        raise GraphError(f"{graph.name}: groups of ops cost what their members do (Coarse.cost)")
    profiles = [load_profile(kind) for kind in kinds]
    costed = _costed(graph)
    source = np.zeros((graph.num_ops, len(kinds)), np.uint8)
    error = np.zeros((graph.num_ops, len(kinds)))
    seconds = np.zeros((graph.num_ops, len(kinds), len(batches)))
    for variant, batch in enumerate(batches):
        size = batch if batch is not None else (graph.batch or 1)
        for kind, profile in enumerate(profiles):
            costs = _op_costs(graph, job, profile, size)
            seconds[costed, kind, variant] = costs.seconds[costed]
            worse = costed & (costs.relative_error >= error[:, kind])
            error[worse, kind] = costs.relative_error[worse]
            source[worse, kind] = costs.source[worse]
    if graph.fixed is not None:
        scales = np.array([_batch_scale(graph, graph.fixed, job, batch) for batch in batches])
        for kind in range(len(kinds)):
            measured = _measured(graph, graph.fixed, job, profiles, kind)
            _overlay(seconds[:, kind], source[:, kind], measured, scales)
            update = graph.op_class == OpClass.UPDATE  # what an update does knows no batch
            seconds[update, kind] = np.where(
                np.isnan(measured[0][update, None]),
                seconds[update, kind],
                measured[0][update, None],
            )
    table = CostTable(
        seconds=seconds,
        launch=graph.kernels[:, None] * np.array([profile.launch_overhead for profile in profiles]),
        source=source,
        relative_error=_relative_error(source, error),
        kinds=tuple(kinds),
        batches=tuple(batches),
    )
    for array in (table.seconds, table.launch, table.source, table.relative_error):
        array.flags.writeable = False
    return table


def kinds_of(cluster: Cluster) -> tuple[str, ...]:
    """Returns the device kinds of a cluster, as cost tables of it order them."""
    return tuple(dict.fromkeys(device.kind for device in cluster.devices))


def scaled_costs(
    cost: CostTable, scale: NDArray[np.float64], base: NDArray[np.integer] | None = None
) -> CostTable:
    """Returns costs whose seconds are multiplied.

    Args:
        cost: the costs.
        scale: of each op of a graph and kind, [op, kind].
        base: op of that graph for each of the table, negative = none, [op]; None: the same ops.
    """
    factors = np.vstack([scale, np.ones((1, scale.shape[1]))])  # the last is of what has no base
    rows = np.arange(len(scale)) if base is None else np.maximum(base, -1)
    seconds = cost.seconds * factors[rows][:, :, None]
    seconds.flags.writeable = False
    return replace(cost, seconds=seconds)


def assumptions(graph: OpGraph, job: Job, kinds: Sequence[str]) -> list[str]:
    """Returns what a user should know about the seconds of a file that does not say whose."""
    if graph.fixed is None or graph.fixed.measured_on is not None:
        return []
    gpus = [kind for kind in dict.fromkeys(kinds) if not load_profile(kind).is_cpu]
    if len(gpus) != 1 and not job.assume_linear:
        return []  # `cost_table` refuses
    return [
        f"{graph.name} does not say on which device kind its seconds were measured; they are taken "
        f"as those of {' and '.join(gpus)}"
    ]


def _costed(graph: OpGraph) -> NDArray[np.bool_]:
    """Returns which ops the roofline knows something about, [op]."""
    update = (graph.op_class == OpClass.UPDATE) & (graph.elements > 0)
    known: NDArray[np.bool_] = (graph.signature >= 0) | update
    return known & ~np.isin(graph.op_class, _FREE)


def _op_costs(graph: OpGraph, job: Job, profile: HardwareProfile, batch: int) -> OpCosts:
    """Returns the cost of every op on one kind at one batch; each distinct op is costed once."""
    places: dict[tuple[int, str, int], int] = {}
    asked = zip(graph.signature.tolist(), graph.op_targets, graph.phase.tolist(), strict=True)
    place = np.array([places.setdefault(key, len(places)) for key in asked], np.int64)
    none = Signature("other", "fp32")  # costs nothing
    queries = [
        Query(graph.signatures[signature] if signature >= 0 else none, target, phase)
        for signature, target, phase in places
    ]
    found = op_costs(profile, queries, batch)
    costs = OpCosts(found.seconds[place], found.source[place], found.relative_error[place])
    update = graph.op_class == OpClass.UPDATE
    moved = graph.elements[update] * float(job.update_traffic_per_element())
    costs.seconds[update] = moved / profile.byte_rate("update")
    costs.source[update] = CostSource.ROOFLINE
    costs.relative_error[update] = profile.relative_error("update")
    return costs


def _batch_scale(graph: OpGraph, fixed: FixedCosts, job: Job, batch: int | None) -> float:
    """Returns what measured seconds are multiplied by at a batch, or refuses the batch.

    A file that does not say its batch was measured at the job's.
    """
    measured = fixed.batch if fixed.batch is not None else job.batch
    if batch is None or batch == measured:
        return 1.0
    known = "an unknown batch" if measured is None else f"batch {measured}"
    if measured is None or not job.assume_linear:
        raise JobError(
            f"{graph.name}: its seconds were measured at {known} and say nothing about batch "
            f"{batch}{'' if measured is None else ' (--assume-linear scales them)'}"
        )
    return batch / measured


def _measured(
    graph: OpGraph, fixed: FixedCosts, job: Job, profiles: Sequence[HardwareProfile], kind: int
) -> tuple[NDArray[np.float64], bool]:
    """Returns measured seconds on a kind, [op] with NaN = cost the signature; whether scaled."""
    profile = profiles[kind]
    if fixed.measured_on == profile.kind:
        return fixed.seconds, False
    if profile.is_cpu:
        missing = np.where(np.isnan(fixed.seconds), np.nan, np.inf)
        if fixed.cpu_seconds is None:
            return missing, False
        return np.where(np.isnan(fixed.cpu_seconds), missing, fixed.cpu_seconds), False
    gpus = [other.kind for other in profiles if not other.is_cpu]
    if fixed.measured_on is None and len(gpus) == 1:
        return fixed.seconds, False
    if not job.assume_linear:
        where = f"on {fixed.measured_on}" if fixed.measured_on else "on one unknown device kind"
        raise JobError(
            f"{graph.name}: its seconds were measured {where} and say nothing about "
            f"{profile.kind if fixed.measured_on else ' and '.join(gpus)} (--assume-linear scales "
            "them with the fp32 peak where the kind is known)"
        )
    if fixed.measured_on is None:
        return fixed.seconds, True
    return fixed.seconds * (
        load_profile(fixed.measured_on).peak("fp32") / profile.peak("fp32")
    ), True


def _overlay(
    seconds: NDArray[np.float64],
    source: NDArray[np.uint8],
    measured: tuple[NDArray[np.float64], bool],
    scales: NDArray[np.float64],
) -> None:
    """Puts measured seconds over the roofline of one kind: seconds [op, variant], source [op]."""
    values, other_kind = measured
    given = ~np.isnan(values)
    seconds[given] = values[given, None] * scales
    scaled = other_kind or bool((scales != 1.0).any())
    source[given] = CostSource.SCALED if scaled else CostSource.FIXED
    source[np.isinf(values)] = CostSource.IMPOSSIBLE


def _relative_error(
    source: NDArray[np.uint8], modelled: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the relative standard error of the seconds, [op, kind], given that of predictions."""
    error = np.where(source == CostSource.SCALED, SCALED_ERROR, modelled)
    error = np.where(source == CostSource.FIXED, MEASURED_ERROR, error)
    return np.where(np.isin(source, (CostSource.ZERO, CostSource.IMPOSSIBLE)), 0.0, error)
