"""Loads that no placement can go below, from work alone; transfers come on top."""

import math

import numpy as np
from numpy.typing import NDArray

from agents.exact.max_load import MaxLoadProblem
from agents.exact.units import Units


def work_bound(problem: MaxLoadProblem, units: Units) -> float:
    """Returns a lower bound on the largest load; holds for contiguous and for free placement.

    Accelerators share what CPUs do not take, where CPUs take the operators that suit them best,
    in part if need be; and some device holds the unit that is longest on its best device.

    Args:
        problem: the problem.
        units: units of either kind.

    Returns:
        The bound in the file's unit; inf where a unit fits no device.
    """
    alone = np.where(units.own_memory <= problem.capacity, units.accelerator, np.inf)
    if not problem.num_accelerators:
        alone = np.full_like(alone, np.inf)
    best = np.minimum(alone, units.cpu) if problem.num_cpus else alone
    longest = float(best.max(initial=0.0))
    if not math.isfinite(longest):
        return math.inf
    return max(longest, _shared(problem, alone, units.cpu))


def offload_ratio(work: NDArray[np.float64], cpu: NDArray[np.float64]) -> float:
    """Returns accelerator time that a CPU saves in a unit of its own time, at most; may be inf.

    Args:
        work: of each unit on an accelerator, [unit].
        cpu: its time on a CPU, [unit].
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(work > 0, work / cpu, 0.0).max(initial=0.0))


def _shared(
    problem: MaxLoadProblem, accelerator: NDArray[np.float64], cpu: NDArray[np.float64]
) -> float:
    """Returns the least T such that CPUs with C x T take enough work, fractions allowed."""
    accelerators, cpus = problem.num_accelerators, problem.num_cpus
    must = ~np.isfinite(accelerator)
    forced = float(cpu[must].sum())
    work, cost = accelerator[~must], cpu[~must]
    if not cpus:
        return float(work.sum()) / accelerators
    if not accelerators:
        return float(cpu.sum()) / cpus
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(work > 0, work / cost, 0.0)
    order = np.argsort(-gain, kind="stable")
    taken = np.concatenate(([0.0], np.cumsum(work[order])))
    spent = forced + np.concatenate(([0.0], np.cumsum(cost[order])))
    total = float(work.sum())
    low, high = 0.0, (total + spent[-1]) * 2.0 + 1.0
    for _ in range(100):
        middle = (low + high) / 2
        room = cpus * middle
        offloaded = float(np.interp(room, spent, taken)) if room >= forced else -1.0
        is_enough = offloaded >= 0 and total - offloaded <= accelerators * middle
        low, high = (low, middle) if is_enough else (middle, high)
    return low * (1 - 1e-12)
