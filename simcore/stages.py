"""Pipeline stages as tasks: what each phase of a stage costs, sends and holds, per microbatch.

A pipeline is swept once per stage, phase and device kind; what its schedule runs are then these
tasks, not ops. Axes: stage; phase (values of `Phase`: B is the whole backward, I and W its two
halves); kind (device kind); edge.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.cost import CostTable, cost_table
from simcore.graph import OpGraph, Sized
from simcore.job import Job
from simcore.profile_store import load_profile
from simcore.recompute import (
    BACKWARD,
    WEIGHTS,
    Recompute,
    find_reruns,
    find_segments,
    order_of,
    touches_of,
)
from simcore.schedule import Edges
from simcore.sizes import GROWING, sizes_at
from simcore.stage_cut import (
    Cut,
    Messages,
    backward_phases,
    check_stages,
    cut_graph,
    stage_edges,
)
from simcore.stage_memory import Work, held_by_stages, walk_stages
from simcore.stage_times import OpTimes, by_phase, phase_times

__all__ = [
    "Recompute",
    "StageTables",
    "backward_phases",
    "check_stages",
    "stage_edges",
    "stage_tables",
]

_NONE: Recompute = "none"
_SUM_PASSES = 3  # a gradient is read, what was summed before it is read and written


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTables:
    """What the stages of a pipeline do and hold, for one microbatch on one device of each.

    Time: a phase that finds the host at H and the device free at s ends at the later of s + seconds
    and H + seconds + ahead, and leaves the host at H + launch, or at its end where `is_sync`. What
    a backward runs again is in B, and in I (in W, where only W needs it). Adding a microbatch's
    gradients to those of earlier ones (`accumulate`) comes on top of B or W.

    Memory: a stage holds parameters, buffers, resident bytes and optimizer state all the time,
    gradients from the first backward of a step on, `saved` for each microbatch from F to B or I,
    `kept` from I to W, and `extra` inside a phase.

    Ties: along `update_edges` go, once a step and before the target's U, partial sums of gradients
    and updated parameters that the target has a copy of.
    """

    kinds: tuple[str, ...]  # [kind]
    batch: int | None  # samples of a microbatch on one device, None = the graph's own
    recompute: tuple[Recompute, ...]  # [stage]
    cut: Cut  # where each op is, and in which phase
    seconds: NDArray[np.float64]  # [stage, phase, kind] s on the device; inf = cannot run there
    ahead: NDArray[np.float64]  # [stage, phase, kind] s that the end lags behind the host's start
    launch: NDArray[np.float64]  # [stage, phase, kind] s of the host
    is_sync: NDArray[np.bool_]  # [stage, phase, kind] the host waits for the end
    accumulate: NDArray[np.float64]  # [stage, kind] s to add gradients to those of before
    saved: NDArray[np.int64]  # [stage] bytes held from forward to backward
    kept: NDArray[np.int64]  # [stage] bytes held from input gradients to weight gradients
    extra: NDArray[np.int64]  # [stage, phase] most bytes inside, above those held at its start
    first_extra: NDArray[np.int64]  # [stage, phase] the same of the first microbatch of a step
    gradient: NDArray[np.int64]  # [stage] bytes of parameter gradients
    new_gradient: NDArray[np.int64]  # [stage, phase] bytes of those that the phase makes
    parameter_bytes: NDArray[np.int64]  # [stage] bytes, tied ones on each stage that reads them
    buffer_bytes: NDArray[np.int64]  # [stage] bytes
    resident: NDArray[np.int64]  # [stage] bytes that ops keep
    elements: NDArray[np.int64]  # [stage] parameter elements updated
    state_bytes: NDArray[np.int64]  # [stage] bytes of optimizer state
    forward_bytes: NDArray[np.int64]  # [edge, 2] bytes sent: constant, growing with the samples
    backward_bytes: NDArray[np.int64]  # [edge, 2] bytes sent back, likewise
    update_bytes: NDArray[np.int64]  # [update edge] bytes

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.cut.num_stages

    @property
    def edges(self) -> Edges:
        """Who sends activations to whom, [edge]."""
        return self.cut.edges

    @property
    def update_edges(self) -> Edges:
        """Whose update needs what of whom, [update edge]."""
        return self.cut.update_edges

    @property
    def parameters(self) -> NDArray[np.int64]:
        """Bytes of parameters and buffers, [stage]."""
        return self.parameter_bytes + self.buffer_bytes


def stage_tables(  # noqa: PLR0913 - what the tasks depend on
    graph: OpGraph,
    job: Job,
    kinds: Sequence[str],
    stage: NDArray[np.integer],
    batch: int | None,
    *,
    recompute: Sequence[Recompute] = (),
    cost: CostTable | None = None,
) -> StageTables:
    """Returns what the stages of a pipeline do and hold.

    Args:
        graph: the graph.
        job: what is trained.
        kinds: device kinds, distinct.
        stage: of each placement unit, [unit].
        batch: samples that one device of a stage sees in a microbatch; None = the graph's own.
        recompute: what the backward of each stage runs again, [stage]; () = nothing anywhere.
        cost: seconds per op and device kind at this batch; None = from the hardware profiles.

    Raises:
        PlanError: stages that no pipeline can run (see `check_stages`), or an unknown recompute.
        JobError: measured seconds at another batch or kind, see `cost_table`.
    """
    cut = cut_graph(graph, stage)
    touches = touches_of(graph)
    reruns = find_reruns(graph, cut, touches, find_segments(graph, cut, recompute))
    table = cost_table(graph, job, kinds, (batch,)) if cost is None else cost
    sized = sizes_at(graph, job, batch)
    whole, split = (order_of(cut, reruns, split=split) for split in (False, True))
    times = phase_times(whole, split, _op_times(graph, table, kinds, batch))
    in_one = walk_stages(graph, cut, sized, Work(touches, reruns, whole))
    in_two = walk_stages(graph, cut, sized, Work(touches, reruns, split))
    held = held_by_stages(graph, cut, sized)
    gradient = in_one.gradient.sum(axis=1)
    byte_rate = np.array([load_profile(kind).byte_rate("pointwise") for kind in kinds])
    tables = StageTables(
        kinds=tuple(kinds),
        batch=batch,
        recompute=tuple(recompute or [_NONE] * cut.num_stages),
        cut=cut,
        **times._asdict(),
        accumulate=_SUM_PASSES * gradient[:, None] / byte_rate,
        saved=in_one.alive[:, BACKWARD],
        kept=in_two.alive[:, WEIGHTS],
        extra=by_phase(in_one.extra, in_two.extra),
        first_extra=by_phase(in_one.first_extra, in_two.first_extra),
        new_gradient=by_phase(in_one.gradient, in_two.gradient),
        gradient=gradient,
        **held._asdict(),
        state_bytes=held.elements * job.state_bytes_per_element(),
        **_sent(graph, cut, sized, batch)._asdict(),
    )
    for field in fields(tables):
        if isinstance(value := getattr(tables, field.name), np.ndarray):
            value.setflags(write=False)
    return tables


def _op_times(graph: OpGraph, table: CostTable, kinds: Sequence[str], batch: int | None) -> OpTimes:
    columns = [table.kinds.index(kind) for kind in kinds]
    synchronous = np.array([load_profile(kind).synchronous for kind in kinds], np.bool_)
    return OpTimes(
        table.seconds[:, columns, table.batches.index(batch)],
        table.launch[:, columns],
        graph.sync[:, None] | synchronous,
    )


class _Sent(NamedTuple):
    """How much goes between stages, as in `StageTables`."""

    forward_bytes: NDArray[np.int64]  # [edge, 2] bytes
    backward_bytes: NDArray[np.int64]  # [edge, 2] bytes
    update_bytes: NDArray[np.int64]  # [update edge] bytes


def _sent(graph: OpGraph, cut: Cut, sized: Sized, batch: int | None) -> _Sent:
    growing = graph.tensor_bytes[:, 1] * (batch if batch is not None else graph.batch or 1)
    if not graph.tensor_bytes[:, 1].any():  # measured at one batch
        growing = np.where(np.isin(graph.tensor_role, GROWING), sized.tensor_bytes, 0)
    halves = np.stack([sized.tensor_bytes - growing, growing], axis=1)  # [tensor, 2]
    back = cut.backward._replace(source=cut.backward.target, target=cut.backward.source)
    return _Sent(
        _along(cut.edges, cut.forward, halves),
        _along(cut.edges, back, halves),
        _along(cut.update_edges, cut.update, halves).sum(axis=1),
    )


def _along(edges: Edges, messages: Messages, halves: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums the bytes of messages, [tensor, 2], by edge, [edge, 2]."""
    table = np.array(edges, np.int64).reshape(-1, 2)  # ascending
    size = int(table.max(initial=0)) + 1
    edge = np.searchsorted(table @ (size, 1), messages.source * size + messages.target)
    total = np.zeros((len(edges), 2), np.int64)
    np.add.at(total, edge, halves[messages.tensor])
    return total
