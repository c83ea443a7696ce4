"""Times of pipeline stages: each phase of a stage as one task of host and device."""

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from simcore.recompute import BACKWARD, FORWARD, PARTS, UPDATE, WEIGHTS, Order
from simcore.signature import Phase

_WHOLE = {Phase.F: FORWARD, Phase.B: BACKWARD, Phase.U: UPDATE}
_SPLIT = {Phase.I: BACKWARD, Phase.W: WEIGHTS}

T = TypeVar("T", bound=np.generic)


class OpTimes(NamedTuple):
    """What each op takes."""

    seconds: NDArray[np.float64]  # [op, kind] s on the device
    launch: NDArray[np.float64]  # [op, kind] s of the host
    is_sync: NDArray[np.bool_]  # [op, kind] the host waits for its end


class PhaseTimes(NamedTuple):
    """What each phase takes, the device busy with it from first op to last."""

    seconds: NDArray[np.float64]  # [stage, phase, kind] s, sum over its ops
    ahead: NDArray[np.float64]  # [stage, phase, kind] s between host's start and end, less seconds
    launch: NDArray[np.float64]  # [stage, phase, kind] s, sum over its ops
    is_sync: NDArray[np.bool_]  # [stage, phase, kind] any op is


def phase_times(whole: Order, split: Order, ops: OpTimes) -> PhaseTimes:
    """Returns what each phase of each stage takes.

    The host issues the ops one after another and the device runs each once it is issued and the
    one before it has ended. So the phase ends after all ops from some op k on ran without a gap:
    at the host's start + what it took to issue up to k + the seconds from k on, for the worst k,
    or all seconds after the device was free.

    Args:
        whole: what the stages run, the backward in one.
        split: the same with the backward split.
        ops: what each op takes.
    """
    in_one, in_two = _part_times(whole, ops), _part_times(split, ops)
    return PhaseTimes(
        by_phase(in_one.seconds, in_two.seconds),
        by_phase(in_one.ahead, in_two.ahead),
        by_phase(in_one.launch, in_two.launch),
        by_phase(in_one.is_sync, in_two.is_sync),
    )


def by_phase(whole: NDArray[T], split: NDArray[T]) -> NDArray[T]:
    """Returns values by phase, [stage, phase, ...].

    Args:
        whole: of the parts that stages run where the backward is whole, [stage, part, ...].
        split: of those where it is split, likewise.
    """
    return np.stack(
        [whole[:, _WHOLE[p]] if p in _WHOLE else split[:, _SPLIT[p]] for p in Phase], axis=1
    )


def _part_times(order: Order, ops: OpTimes) -> PhaseTimes:
    """Returns the same of what `Order` tells apart, [stage, part, kind]."""
    counts = np.diff(order.first)
    row = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(row)) - order.first[row]
    shape = (len(counts), int(counts.max(initial=0)) + 1, ops.seconds.shape[1])
    busy, issued, waits = np.zeros(shape), np.zeros(shape), np.zeros(shape, np.bool_)
    busy[row, column + 1] = ops.seconds[order.op]  # summed: what ran before each op
    issued[row, column] = ops.launch[order.op]
    waits[row, column] = ops.is_sync[order.op]
    np.cumsum(busy, axis=1, out=busy)
    np.cumsum(issued, axis=1, out=issued)
    by_part = (-1, PARTS, shape[2])
    return PhaseTimes(
        busy[:, -1].reshape(by_part),
        (issued - busy).max(axis=1).reshape(by_part),
        issued[:, -1].reshape(by_part),
        waits.any(axis=1).reshape(by_part),
    )
