"""The yardstick: push-pops on a flat binary heap, timed beside every speed that is reported.

A speed as a multiple of it holds on other machines and on noisy ones.
"""

import time

import numba
import numpy as np

KEYS = 1024
PUSH_POPS = 10_000_000
PARTS = 20


@numba.njit(cache=True)
def push_pops(times: np.ndarray, items: np.ndarray, count: int) -> float:
    """Pops the least of 1,024 keys and pushes a larger one, `count` times."""
    size = times.shape[0]
    state = np.uint64(12345)
    for _ in range(count):
        top, item = times[0], items[0]
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        time_, moved = times[size - 1], items[size - 1]
        at, child = 0, 1
        while child < size - 1:
            if child + 1 < size - 1 and times[child + 1] < times[child]:
                child += 1
            if times[child] >= time_:
                break
            times[at], items[at] = times[child], items[child]
            at, child = child, 2 * child + 1
        times[at], items[at] = time_, moved
        key = top + float(state >> np.uint64(40))
        at = size - 1
        while at > 0 and times[(at - 1) >> 1] > key:
            times[at], items[at] = times[(at - 1) >> 1], items[(at - 1) >> 1]
            at = (at - 1) >> 1
        times[at], items[at] = key, item
    return float(times[0])


def measure(count: int = PUSH_POPS) -> float:
    """Returns processor seconds per push-pop, of the best part of all push-pops."""
    times, items = np.arange(KEYS, dtype=np.float64), np.arange(KEYS)
    push_pops(times.copy(), items.copy(), 10)
    best, part = np.inf, count // PARTS
    for _ in range(PARTS):
        begin = time.thread_time()
        push_pops(times, items, part)
        best = min(best, time.thread_time() - begin)
    return best / part
