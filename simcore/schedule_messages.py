"""Sends and receives between the actions of a schedule, where torch puts them."""

from collections.abc import Sequence
from typing import NamedTuple

from simcore.errors import DeadlockError
from simcore.schedule import Action, Schedule, made, needs
from simcore.signature import Phase

HELD_STAGES = 3  # whose parameters torch gathers ahead


class Message(NamedTuple):
    """One end of a hop: activations to a later stage, or gradients to an earlier one.

    Attributes:
        source: the stage that sends.
        target: the stage that receives.
        phase: F for activations, B for gradients.
        microbatch: of what is sent.
        is_send: whether this is the sender's end.
    """

    source: int
    target: int
    phase: Phase
    microbatch: int
    is_send: bool

    def __str__(self) -> str:
        kind, stage = ("SEND", self.source) if self.is_send else ("RECV", self.target)
        return f"{stage}{kind}_{self.phase.name}{self.microbatch}"

    def received(self) -> "Message":
        """Returns the receiver's end of the hop."""
        return self._replace(is_send=False)

    def result(self) -> Action:
        """Returns what is sent, as `simcore.schedule.needs` says it."""
        return Action(self.source, self.phase, self.microbatch)


Item = Action | Message


def add_messages(schedule: Schedule) -> list[list[Item]]:
    """Returns the items of each rank: its actions, each followed by the sends of what it made.

    As torch.distributed.pipelining does: the ranks take turns, one action each, and a send puts its
    receive at the end of what its target's rank has by then. Stages on one rank send nothing.

    Raises:
        DeadlockError: the schedule stops; see `simcore.schedule_check.check`.
    """
    before, after = schedule.predecessors, schedule.successors
    rows: list[list[Item]] = [[] for _ in schedule.actions]
    done: set[Action] = set()  # in the form of `needs`
    turns = [_turns(actions) for actions in schedule.actions]
    moved = True
    while moved:
        moved = False
        for rank in range(schedule.num_ranks):
            if not turns[rank]:
                continue
            action = turns[rank][-1]
            if action is not None and not done.issuperset(needs(action, before, after)):
                continue
            moved = True
            turns[rank].pop()
            if action is None:
                continue
            rows[rank].append(action)
            done.add(made(action))
            for message in _hops(schedule, made(action), before, after):
                rows[rank].append(message)
                rows[schedule.stage_rank[message.target]].append(message.received())
    for rank, left in enumerate(turns):
        if left:
            raise DeadlockError(f"schedule {schedule.name!r}: rank {rank} stops at {left[-1]}")
    return rows


def _turns(actions: Sequence[Action]) -> list[Action | None]:
    """Returns what a rank does in its turns, last turn first; None is work on parameters.

    torch gathers the parameters of the next three stages ahead, drops those of others, and reduces
    the gradients of a stage after its last backward, each in a turn of its own.
    """
    turns: list[Action | None] = []
    held: list[int] = []  # stages, in the order of their next action
    reduced: set[int] = set()
    for action in reversed(actions):
        ahead = [action.stage, *(stage for stage in held if stage != action.stage)][:HELD_STAGES]
        if turns:
            turns += [None] * len(set(ahead) ^ set(held))
        if action.phase in (Phase.B, Phase.W) and action.stage not in reduced:
            reduced.add(action.stage)
            turns.append(None)
        turns.append(action)
        held = ahead
    return turns + [None] * len(held)


def _hops(
    schedule: Schedule, result: Action, before: list[list[int]], after: list[list[int]]
) -> list[Message]:
    stage, phase, microbatch = result
    if phase == Phase.W:
        return []
    rank = schedule.stage_rank
    return [
        Message(stage, target, phase, microbatch, is_send=True)
        for target in (after if phase == Phase.F else before)[stage]
        if rank[target] != rank[stage]
    ]
