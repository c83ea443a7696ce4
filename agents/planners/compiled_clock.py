"""The clock of a search: seconds that pass but for those in which code is compiled.

On first use numba compiles for tens of seconds; a search would find its budget spent.
"""

import time

from numba.core import event


class _Compiling(event.Listener):
    """Adds up the seconds of compiling; what is compiled inside of it counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0
        self._started = 0.0

    def on_start(self, event: event.Event) -> None:
        """Notes that something is compiled."""
        if not self._depth:
            self._started = time.perf_counter()
        self._depth += 1

    def on_end(self, event: event.Event) -> None:
        """Notes that it is done."""
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._started


_compiling = _Compiling()
event.register("numba:compile", _compiling)  # type: ignore[no-untyped-call]  # numba has no types


def search_clock() -> float:
    """Returns seconds of a clock that stands still while code is compiled."""
    return time.perf_counter() - _compiling.seconds
