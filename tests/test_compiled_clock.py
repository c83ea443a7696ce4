"""The clock that searches are timed by."""

import time

import numba

from agents.planners.compiled_clock import search_clock


def test_the_clock_stands_still_while_code_is_compiled() -> None:
    twice = numba.njit(lambda number: numba.float64(number) * 2.0)
    real, own = time.perf_counter(), search_clock()
    twice(1)
    real, own = time.perf_counter() - real, search_clock() - own
    assert 0.0 <= own < 0.5 * real


def test_the_clock_runs_where_nothing_is_compiled() -> None:
    own = search_clock()
    time.sleep(0.01)
    assert search_clock() - own >= 0.01
