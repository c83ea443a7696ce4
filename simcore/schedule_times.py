"""When each action of a schedule runs, exactly, with given seconds and hops.

Slow and plain: for closed forms and comparison with compiled code.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simcore.schedule import Schedule
from simcore.schedule_check import check
from simcore.schedule_messages import Item, add_messages
from simcore.schedule_run import Cost, Execution, Hop, Receives


class UnitTimes(NamedTuple):
    """When the actions run; they are in the order of `simcore.schedule.to_arrays`."""

    start: NDArray[np.float64]  # [action] s
    end: NDArray[np.float64]  # [action] s
    first_action: NDArray[np.int64]  # [rank + 1]

    @property
    def step(self) -> float:
        """Seconds from 0 to the last end."""
        return float(self.end.max())

    @property
    def bubble(self) -> float:
        """1 - busy / (ranks x step); 0 where nothing takes time."""
        offered = (len(self.first_action) - 1) * self.step
        return 1.0 - float(self.busy().sum()) / offered if offered else 0.0

    def busy(self) -> NDArray[np.float64]:
        """Returns the seconds that each rank runs actions, [rank]."""
        return self._by_rank(self.end - self.start, np.add)

    def idle_inside(self) -> NDArray[np.float64]:
        """Returns the idle seconds of each rank between its first start and its last end, [rank].

        The zero-bubble papers count these: their ranks do not end together.
        """
        first = self._by_rank(self.start, np.minimum)
        return self._by_rank(self.end, np.maximum) - first - self.busy()

    def _by_rank(self, values: NDArray[np.float64], merge: np.ufunc) -> NDArray[np.float64]:
        rows = np.split(values, self.first_action[1:-1])
        return np.array([merge.reduce(row) if row.size else 0.0 for row in rows])


def simulate_unit(
    schedule: Schedule, cost: Cost, hop: Hop = 0.0, *, receives: Receives = "asynchronous"
) -> UnitTimes:
    """Returns when each action runs: as soon as its rank is free and its inputs are there.

    A hop leads from a stage to one on another rank and waits for no other hop, unless `receives`
    says so. Then sends and receives stand between the actions where torch puts them:

    - ``stream``: each rank has one communication stream, first in first out. It is handed a message
      when the actions before it have ended; a send holds the stream for the hop, a receive until
      the data is there.
    - ``blocking``: the rank itself waits in a receive, and for the hop, which begins when both ends
      have come to it; sends hold nothing.

    Args:
        schedule: one that `check` accepts.
        cost: seconds of the phases that the schedule has.
        hop: seconds of a hop, of activations and of gradients.
        receives: how messages are taken.

    Raises:
        PlanError: the seconds are missing, negative or not finite, or not one for each stage; or
            the schedule cannot run.
    """
    rows: Sequence[Sequence[Item]] = schedule.actions
    run = Execution(schedule, cost, hop, receives)
    if receives != "asynchronous":
        check(schedule)
        rows = add_messages(schedule)
    run.go(rows)
    if run.stopped():
        check(schedule)  # says why
    first = np.cumsum([0, *map(len, schedule.actions)], dtype=np.int64)
    start, end = (np.array([t for row in x for t in row]) for x in (run.start, run.end))
    return UnitTimes(start, end, first)
