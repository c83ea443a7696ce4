"""How fast things go: max-min fair rates, and what running work costs other running work."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tests.reference_problem import ReferenceProblem
from tests.reference_tasks import Communication

Flow: TypeAlias = tuple[Mapping[int, float], float]
"""(channel -> bytes on it per byte of the flow, most bytes/s that the flow can take)"""


def fair_rates(
    flows: Sequence[Flow], bandwidth: Sequence[float] | Mapping[int, float]
) -> list[float]:
    """Shares channels by progressive filling.

    All rates rise together from zero. Where a flow reaches its own cap it stops there; where a
    channel becomes full, all flows that use it stop. The others rise on, until none is left.

    Args:
        flows: the usage and the cap of each.
        bandwidth: of each channel, bytes/s.

    Returns:
        The rate of each flow, bytes/s.
    """
    rates: dict[int, float] = {}  # of the flows that have stopped
    level = 0.0  # of all the others, bytes/s
    while len(rates) < len(flows):
        rising = [index for index in range(len(flows)) if index not in rates]
        full_at: dict[int, float] = {}  # channel -> the level at which it is full
        for channel in sorted({c for i in rising for c, share in flows[i][0].items() if share > 0}):
            taken = sum(flows[i][0].get(channel, 0.0) * rate for i, rate in rates.items())
            share = sum(flows[i][0].get(channel, 0.0) for i in rising)
            full_at[channel] = (bandwidth[channel] - taken) / share
        cap = min(flows[i][1] for i in rising)
        channel, full = min(
            full_at.items(), key=lambda entry: (entry[1], entry[0]), default=(-1, cap)
        )
        if cap <= full:
            level = cap
            rates.update({i: level for i in rising if flows[i][1] == cap})
        else:
            level = max(level, full)  # it never sinks, not even by rounding
            rates.update({i: level for i in rising if flows[i][0].get(channel, 0.0) > 0})
    return [rates[index] for index in range(len(flows))]


def compute_factor(
    problem: ReferenceProblem, op: int, device: int, active: Sequence[Communication]
) -> float:
    """How many times longer an op takes beside these communications; the largest factor."""
    if not problem.settings.slow_down:
        return 1.0
    limits, op_class = problem.limits[device], problem.op_class[op]
    factors = [1.0]
    for other in active:
        if device in other.devices:
            beside = limits.compute_beside_copy
            if other.transfer is None:
                beside = limits.compute_beside_collective
            factors.append(beside[op_class])
    return max(factors)


def communication_factor(
    problem: ReferenceProblem, communication: Communication, computing: set[int]
) -> float:
    """How many times longer a communication takes while these devices compute."""
    if not problem.settings.slow_down:
        return 1.0
    factors = [1.0]
    for device in set(communication.devices) & computing:
        limits = problem.limits[device]
        if communication.transfer is None:
            factors.append(limits.collective_beside_compute)
        else:
            factors.append(limits.copy_beside_compute)
    return max(factors)
