"""A fixed piece of compute that is timed before, between and after steps: is the machine quiet?"""

import statistics
import time
from collections.abc import Sequence

import torch

SIDE = 192
PRODUCTS = 12  # about 5 ms on one core
SAMPLES = 9
MOST_DRIFT = 0.10


def time_yardstick() -> float:
    """Returns the median seconds of a few rounds of small matrix products on one thread."""
    matrix = torch.full((SIDE, SIDE), 1 / SIDE)
    seconds = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        product = matrix
        for _ in range(PRODUCTS):
            product = product @ matrix
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def drift_of(medians: Sequence[Sequence[float]]) -> float:
    """Returns how far the yardstick of any rank was from its median over the run, as a share.

    Args:
        medians: seconds, [time][rank].
    """
    worst = 0.0
    for one_rank in zip(*medians, strict=True):
        middle = statistics.median(one_rank)
        worst = max(worst, *(abs(each / middle - 1) for each in one_rank))
    return worst
