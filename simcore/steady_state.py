"""Seconds per minibatch of an asynchronous schedule that goes on for ever, and what binds them.

In the steady state every rank repeats one unit of actions. An action starts when the one before it
on its rank has ended and its inputs are there, so all goes round in cycles, and the period is the
largest of their ratios: seconds round the cycle by minibatches from its start to its end (maximum
cycle mean of the event graph; Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity,
chapter 2). Times are summed as whole numbers, so the period is exact but for its last rounding.

Asynchronous schedules change the mathematics: a gradient is taken with weights that are as many
updates old as there were minibatches in flight (PipeDream, arXiv 1806.03377, section 3.3). A plan
with such a schedule says `SEMANTICS_ASYNC` in its semantics, and nobody chooses it unasked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from simcore.errors import DeadlockError, PlanError
from simcore.schedule import Action, Schedule, made, max_in_flight, needs
from simcore.schedule_check import check
from simcore.schedule_run import Cost, Hop, hops_of, seconds_of
from simcore.signature import Phase
from simcore.units import format_seconds

SEMANTICS_ASYNC = "asynchronous updates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """The steady state of a schedule.

    Attributes:
        seconds: s per minibatch.
        cycle: actions that bind it; each waits for the one before it, and the first, `minibatches`
            later, for the last. A loop of one rank alone comes before longer ones that are equal.
        ranks: the rank of each action of the cycle.
        minibatches: from the start of the cycle to its end.
        hop_seconds: s of hops in the cycle, of seconds x minibatches.
    """

    seconds: float
    cycle: tuple[Action, ...]
    ranks: tuple[int, ...]
    minibatches: int
    hop_seconds: float

    def __str__(self) -> str:
        ranks = sorted(set(self.ranks))
        if len(ranks) == 1:
            who = f"rank {ranks[0]} never waits"
        else:
            who = f"ranks {', '.join(map(str, ranks))} wait for each other"
        if self.hop_seconds:
            total = format_seconds(self.seconds * self.minibatches)
            who += f", {format_seconds(self.hop_seconds)} of {total} in hops"
        path, plural = " ".join(map(str, self.cycle)), "es" * (self.minibatches > 1)
        return (
            f"{format_seconds(self.seconds)} per minibatch: {who}: {path}, every "
            f"{self.minibatches} minibatch{plural}"
        )


def steady_period(
    schedule: Schedule, cost: Cost, hop: Hop = 0.0, update: float | Sequence[float] = 0.0
) -> Period:
    """Returns how many seconds apart the minibatches of an asynchronous schedule end, and why.

    Hops wait for no other hop, as in `simcore.schedule_times.simulate_unit`, whose times grow by
    this period with every minibatch once the start has been forgotten.

    Args:
        schedule: asynchronous and one that `check` accepts. Each rank repeats a unit of actions;
            the first and the last quarter of the minibatches may be run otherwise.
        cost: seconds of the phases that the schedule has.
        hop: seconds of a hop, of activations and of gradients.
        update: seconds of the update after each backward, one for all stages or [stage]; the rank
            runs nothing else meanwhile, but the gradient is sent on before it.

    Raises:
        PlanError: the schedule is synchronous, cannot run or repeats nothing; or the seconds are
            missing, negative or not finite, or not one for each stage.
        DeadlockError: it runs to its end, but would stop if it went on.
    """
    if not schedule.asynchronous:
        raise PlanError(
            f"schedule {schedule.name!r} is synchronous: it is flushed at the end of every step "
            "and has no steady state"
        )
    check(schedule)
    seconds = seconds_of(schedule, {**cost, Phase.U: update})
    units, size = _units(schedule)
    graph = _Events(schedule, [_updated(unit, seconds[Phase.U]) for unit in units], size)
    graph.add_loops(seconds)
    graph.add_inputs(seconds, hops_of(schedule, hop))
    return graph.period(_tightest(graph))


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """Returns how many versions of its weights each stage keeps, the newest included, [stage].

    One for each minibatch in flight where the schedule is asynchronous: stage s of p stages of
    ``pipedream`` keeps p - s. One where it is not.
    """
    if not schedule.asynchronous:
        return (1,) * schedule.num_stages
    return tuple(max_in_flight(schedule))


def weight_memory_factor(schedule: Schedule, share: float = 1.0) -> tuple[float, ...]:
    """Returns how many times the weights' bytes a stage keeps because of its versions, [stage].

    Args:
        schedule: of any kind.
        share: of the bytes that have versions: 1 counts weights alone; 1/4 weights among weights,
            gradients and the state of fp32 Adam, which have one version.

    Raises:
        PlanError: the share is not from 0 to 1.
    """
    if not 0 <= share <= 1:
        raise PlanError(f"share of the bytes that have versions: {share} is not from 0 to 1")
    return tuple(1.0 + (versions - 1) * share for versions in weight_versions(schedule))


def _units(schedule: Schedule) -> tuple[list[list[Action]], int]:
    """Returns the unit that each rank repeats, and the minibatches that it goes on by."""
    for low, high in _ranges(schedule):
        for size in range(1, (high - low) // 2 + 1):
            units = []
            for row in schedule.actions:
                unit = _unit(row, size, low, high)
                if unit is None:
                    break
                units.append(unit)
            else:
                return units, size
    raise PlanError(f"schedule {schedule.name!r}: {_no_unit(schedule)}")


def _ranges(schedule: Schedule) -> list[tuple[int, int]]:
    """Returns the minibatches to look for the steady state in, from and to: all, then half."""
    count = schedule.num_microbatches
    return sorted({(low, count - low) for low in (0, count // 4)})


def _unit(row: Sequence[Action], size: int, low: int, high: int) -> list[Action] | None:
    """Returns what a rank repeats every `size` minibatches; None where it does not.

    Among the minibatches from low to high, each must run as the one `size` before it, and two units
    must be seen one after the other: between them no other order is possible if it goes on.
    """
    inside = [action for action in row if low <= action.microbatch < high]
    later = [_moved(action, -size) for action in inside if action.microbatch >= low + size]
    if later != [action for action in inside if action.microbatch < high - size]:
        return None
    length = sum(action.microbatch < low + size for action in inside)
    for start in range(len(inside) - 2 * length + 1):
        unit, following = inside[start : start + length], inside[start + length :][:length]
        if following == [_moved(action, size) for action in unit]:
            return unit
    return None


def _moved(action: Action, minibatches: int) -> Action:
    return action._replace(microbatch=action.microbatch + minibatches)


def _no_unit(schedule: Schedule) -> str:
    """Returns why there is no steady state."""
    count, held = schedule.num_microbatches, max_in_flight(schedule)
    stage = held.index(max(held))
    if held[stage] >= count:
        return (
            f"{count} minibatches show no steady state, for stage {stage} has {held[stage]} in "
            "flight; take more minibatches, or fewer in flight"
        )
    tries = [
        (size, low, high)
        for low, high in _ranges(schedule)
        for size in range(1, (high - low) // 2 + 1)
    ]
    for rank, row in enumerate(schedule.actions):
        if all(_unit(row, *numbers) is None for numbers in tries):
            return f"rank {rank} repeats no unit of actions in {count} minibatches: no steady state"
    return (
        f"the ranks repeat units of different numbers of minibatches, and {count} are too few for "
        "a common one"
    )


def _updated(unit: Sequence[Action], seconds: Sequence[float]) -> list[Action]:
    """Returns a unit with the updates that take time."""
    row = []
    for action in unit:
        row.append(action)
        if action.phase in (Phase.B, Phase.W) and seconds[action.stage]:
            row.append(action._replace(phase=Phase.U))
    return row


class _Wait(NamedTuple):
    """An event that starts when another has ended, and after a hop."""

    source: int  # event
    target: int  # event
    seconds: float  # of the source
    hop: float  # s
    rounds: int  # how many times the size of a unit the target's minibatch is the later one


class _Events:
    """The event graph: an event for each action of the units, in every round.

    Attributes:
        schedule: whose events they are.
        size: minibatches of a round.
        actions: [event]; round n runs them on minibatch (microbatch modulo size) + n x size.
        loops: waits of each rank for itself, [rank][position].
        waits: all of them.
    """

    def __init__(self, schedule: Schedule, units: Sequence[Sequence[Action]], size: int) -> None:
        self.schedule, self.size = schedule, size
        self.actions = [action for unit in units for action in unit]
        self.loops: list[list[_Wait]] = []
        self.waits: list[_Wait] = []
        self._units = units

    def add_loops(self, seconds: dict[Phase, list[float]]) -> None:
        """Adds the order of each rank; the first action of a unit follows the last one before."""
        first = 0
        for unit in self._units:
            events = range(first, first + len(unit))
            following = [*unit[1:], *(_moved(action, self.size) for action in unit[:1])]
            loop = [
                _Wait(
                    event,
                    first + (event - first + 1) % len(unit),
                    seconds[action.phase][action.stage],
                    0.0,
                    after.microbatch // self.size - action.microbatch // self.size,
                )
                for event, action, after in zip(events, unit, following, strict=True)
            ]
            first += len(unit)
            self.loops += [loop] if loop else []
            self.waits += loop

    def add_inputs(
        self, seconds: dict[Phase, list[float]], hops: dict[tuple[int, int], float]
    ) -> None:
        """Adds what comes from other ranks; the order of a rank has what it takes from itself."""
        before, after = self.schedule.predecessors, self.schedule.successors
        row = [action._replace(microbatch=action.microbatch % self.size) for action in self.actions]
        maker = {made(action): event for event, action in enumerate(row)}
        for event, action in enumerate(row):
            for need in needs(action, before, after) if action.phase != Phase.U else ():
                hop = hops.get((need.stage, action.stage))  # None on one rank
                if hop is not None:
                    source = maker[need]
                    phase = self.actions[source].phase
                    self.waits.append(_Wait(source, event, seconds[phase][need.stage], hop, 0))

    def path(self, cycle: Sequence[_Wait]) -> tuple[tuple[Action, ...], int]:
        """Returns the actions of a cycle and how many minibatches it goes on by."""
        actions = [self.actions[wait.source] for wait in cycle]
        *rounds, total = accumulate((wait.rounds for wait in cycle), initial=0)
        shifts = [(number - min(rounds)) * self.size for number in rounds]
        return tuple(
            action._replace(microbatch=action.microbatch % self.size + shift)
            for action, shift in zip(actions, shifts, strict=True)
        ), total * self.size

    def period(self, cycle: Sequence[_Wait]) -> Period:
        """Returns what a cycle says, from the first action on the lowest rank that is in it."""
        events = [wait.source for wait in cycle]  # those of lower ranks are lower
        start = events.index(min(events))
        actions, minibatches = self.path([*cycle[start:], *cycle[:start]])
        return Period(
            seconds=float(sum(map(_exact, cycle)) / minibatches),
            cycle=actions,
            ranks=tuple(self.schedule.stage_rank[action.stage] for action in actions),
            minibatches=minibatches,
            hop_seconds=float(sum(Fraction(wait.hop) for wait in cycle)),
        )


def _exact(wait: _Wait) -> Fraction:
    return Fraction(wait.seconds) + Fraction(wait.hop)


def _tightest(graph: _Events) -> list[_Wait]:
    """Returns a cycle of the largest ratio of seconds to rounds.

    From the slowest rank's own loop on, as long as there is a better cycle (Newton's method, as
    Dinkelbach uses it for ratios); all in whole numbers.
    """
    count, waits = len(graph.actions), graph.waits
    stuck = _gaining_cycle(count, waits, [1 - (count + 1) * wait.rounds for wait in waits])
    if stuck:
        raise DeadlockError(
            f"schedule {graph.schedule.name!r}: if it went on, these would wait for each other: "
            + " ".join(map(str, graph.path(stuck)[0]))
        )
    exact = [_exact(wait) for wait in waits]
    scale = max(seconds.denominator for seconds in exact)  # they are powers of two
    whole = {wait: int(seconds * scale) for wait, seconds in zip(waits, exact, strict=True)}
    best: list[_Wait] | None = max(graph.loops, key=lambda loop: sum(whole[wait] for wait in loop))
    while best:
        cycle = best
        seconds, rounds = sum(whole[wait] for wait in cycle), sum(wait.rounds for wait in cycle)
        gains = [whole[wait] * rounds - seconds * wait.rounds for wait in waits]
        best = _gaining_cycle(count, waits, gains)
    return cycle


def _gaining_cycle(count: int, waits: Sequence[_Wait], gains: Sequence[int]) -> list[_Wait] | None:
    """Returns a cycle whose gains are more than 0 in sum, None if there is none (Bellman-Ford).

    Args:
        count: of events.
        waits: the edges.
        gains: of each wait.
    """
    value = [0] * count  # the most that a path to an event gains
    last: list[_Wait | None] = [None] * count  # of such a path
    moved = True
    while moved:
        moved = False
        for wait, gain in zip(waits, gains, strict=True):
            if value[wait.source] + gain > value[wait.target]:
                value[wait.target] = value[wait.source] + gain
                last[wait.target] = wait
                moved = True
        cycle = _circle(last)
        if cycle:
            return cycle
    return None


def _circle(last: Sequence[_Wait | None]) -> list[_Wait] | None:
    """Returns a cycle of the paths in the order of time, None if they have none."""
    seen = [-1] * len(last)  # from which event it was come to
    for start in range(len(last)):
        event, path = start, []
        while seen[event] < 0:
            seen[event] = start
            wait = last[event]
            if wait is None:
                break
            path.append(wait)
            event = wait.source
        else:
            if seen[event] == start:
                first = next(place for place, wait in enumerate(path) if wait.target == event)
                return path[first:][::-1]
    return None
