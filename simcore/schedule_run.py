"""The recursion that times a schedule: each rank runs its actions in order, as soon as it can."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

from simcore.errors import PlanError
from simcore.schedule import Action, Schedule, made, needs
from simcore.schedule_messages import Item, Message
from simcore.signature import Phase

Cost = Mapping[Phase, float | Sequence[float]]  # s of each phase, one for all stages or [stage]
Hop = float | Mapping[tuple[int, int], float]  # s, one for all or (from stage, to stage) -> s
Receives = Literal["asynchronous", "stream", "blocking"]
UNIT_COST: Cost = {Phase.F: 1.0, Phase.B: 1.0, Phase.I: 1.0, Phase.W: 1.0}


def seconds_of(schedule: Schedule, cost: Cost) -> dict[Phase, list[float]]:
    """Returns the seconds of each phase, [stage].

    Raises:
        PlanError: they are missing, negative or not finite, or not one for each stage.
    """
    seconds = {}
    for phase, value in cost.items():
        if isinstance(value, int | float):
            stages = [float(value)] * schedule.num_stages
        else:
            stages = [float(number) for number in value]
        if len(stages) != schedule.num_stages:
            raise PlanError(
                f"schedule {schedule.name!r}: cost of phase {phase.name} has {len(stages)} numbers "
                f"for {schedule.num_stages} stages"
            )
        if not all(0 <= number < float("inf") for number in stages):
            raise PlanError(f"schedule {schedule.name!r}: cost of phase {phase.name} is no seconds")
        seconds[phase] = stages
    used = {action.phase for row in schedule.actions for action in row}
    missing = used - set(seconds) - {Phase.U}  # which is no action
    if missing:
        raise PlanError(f"schedule {schedule.name!r}: no cost of phase {min(missing).name}")
    return seconds


def hops_of(schedule: Schedule, hop: Hop) -> dict[tuple[int, int], float]:
    """Returns the seconds from stage to stage, of stages on different ranks, both ways.

    Raises:
        PlanError: they are missing, negative or not finite.
    """
    hops = {}
    for edge in (way for a, b in schedule.edges for way in ((a, b), (b, a))):
        if schedule.stage_rank[edge[0]] == schedule.stage_rank[edge[1]]:
            continue
        seconds = hop if isinstance(hop, int | float) else hop.get(edge)
        if seconds is None or not 0 <= seconds < float("inf"):
            raise PlanError(
                f"schedule {schedule.name!r}: hop {edge[0]} -> {edge[1]}: {seconds} is no seconds"
            )
        hops[edge] = float(seconds)
    return hops


class Execution:
    """The state while actions are timed, rank after rank, each as far as it gets.

    Attributes:
        start: s, [rank][position], of the actions that ran.
        end: s, likewise.
    """

    def __init__(
        self,
        schedule: Schedule,
        cost: Cost = UNIT_COST,
        hop: Hop = 0.0,
        receives: Receives = "asynchronous",
    ) -> None:
        ranks = range(schedule.num_ranks)
        self.start: list[list[float]] = [[] for _ in ranks]
        self.end: list[list[float]] = [[] for _ in ranks]
        self._schedule, self._receives = schedule, receives
        self._seconds = seconds_of(schedule, cost)
        self._hops = hops_of(schedule, hop)
        self._stages = schedule.predecessors, schedule.successors
        self._now = [0.0 for _ in ranks]  # when each rank is free
        self._done: dict[Action, float] = {}  # in the form of `needs` -> end
        self._arrived: dict[tuple[Action, int], float] = {}  # (what, at which stage) -> when
        self._posted: list[deque[tuple[Message, float]]] = [deque() for _ in ranks]
        self._stream = [0.0 for _ in ranks]  # when each communication stream is free
        self._sent: dict[Message, float] = {}  # receiving end -> when

    def go(self, rows: Sequence[Sequence[Item]]) -> None:
        """Runs all that can be run.

        Args:
            rows: the schedule's actions, with the messages between them unless asynchronous.
        """
        position = [0] * len(rows)
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(rows):
                while position[rank] < len(row) and self._take(rank, row[position[rank]]):
                    position[rank] += 1
                    moved = True
                while self._posted[rank] and self._serve(rank):
                    self._posted[rank].popleft()
                    moved = True

    def stopped(self) -> dict[int, Action]:
        """Returns the action that each rank waits at, of the ranks that have not ended."""
        rows = enumerate(self._schedule.actions)
        return {
            rank: row[len(self.end[rank])] for rank, row in rows if len(self.end[rank]) < len(row)
        }

    def missing(self, action: Action) -> Action:
        """Returns what an action waits for, in the form of `needs`."""
        return next(need for need in needs(action, *self._stages) if need not in self._done)

    def _take(self, rank: int, item: Item) -> bool:
        if isinstance(item, Message):
            return self._post(rank, item)
        if not 0 <= item.stage < self._schedule.num_stages or item.phase not in self._seconds:
            return False
        ready = self._now[rank]
        for need in needs(item, *self._stages):
            there = self._there(need, item.stage)
            if there is None:
                return False
            ready = max(ready, there)
        self._now[rank] = ready + self._seconds[item.phase][item.stage]
        self.start[rank].append(ready)
        self.end[rank].append(self._now[rank])
        self._done.setdefault(made(item), self._now[rank])
        return True

    def _there(self, need: Action, stage: int) -> float | None:
        end = self._done.get(need)
        rank = self._schedule.stage_rank
        if end is None or rank[need.stage] == rank[stage]:
            return end
        if self._receives != "asynchronous":
            return self._arrived.get((need, stage))
        return end + self._hops[need.stage, stage]

    def _post(self, rank: int, message: Message) -> bool:
        if self._receives == "stream":
            self._posted[rank].append((message, self._now[rank]))
        elif message.is_send:
            self._sent[message.received()] = self._now[rank]
        elif message not in self._sent:
            return False
        else:
            begin = max(self._now[rank], self._sent[message])
            self._now[rank] = begin + self._hops[message.source, message.target]
            self._arrived[message.result(), message.target] = self._now[rank]
        return True

    def _serve(self, rank: int) -> bool:
        message, posted = self._posted[rank][0]
        begin = max(self._stream[rank], posted)
        if message.is_send:
            end = begin + self._hops[message.source, message.target]
            self._sent[message.received()] = end
        elif message not in self._sent:
            return False
        else:
            end = max(begin, self._sent[message])
            self._arrived[message.result(), message.target] = end
        self._stream[rank] = end
        return True
