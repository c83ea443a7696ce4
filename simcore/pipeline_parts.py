"""What the tasks of a pipeline are written from, as records."""

from collections.abc import Sequence
from typing import NamedTuple

from simcore.graph import Out, Phase
from simcore.pipeline import Cost, Part
from simcore.schedule import Action

Place = tuple[int, int]  # (stage, copy)


class Rule(NamedTuple):
    """What the bytes of a tensor follow."""

    size_of: str  # freed, shared, made, gradient, forward, backward or tie
    number: int  # of the stage, edge or tie
    share: float = 1.0


class Task(NamedTuple):
    """What an op of the program stands for."""

    stage: int
    phase: Phase
    copy: int
    adds: bool  # gradients are added to those of earlier microbatches
    is_free: bool  # it costs nothing


class Messages(NamedTuple):
    """What a task sends."""

    outs: list[Out]
    rules: list[Rule]
    targets: list[tuple[Phase, int, int, int]]  # (phase, stage, copy, microbatch) that reads it

    def add(self, out: Out, rule: Rule, target: tuple[Phase, int, int, int]) -> None:
        """Adds a message."""
        self.outs.append(out)
        self.rules.append(rule)
        self.targets.append(target)


class Piece(NamedTuple):
    """A backward, or a part of one."""

    action: Action
    label: str
    part: Part | None
    gathered: dict[int, list[int]]  # tensors that each place waits for
    is_first: bool
    is_end: bool
    sums: bool  # the gradients of the stage are complete with it


class Work(NamedTuple):
    """A task that is to be written."""

    label: str
    place: Place
    phase: Phase
    cost: Cost
    inputs: Sequence[int]  # tensors
    outs: Sequence[Out]
    adds: bool = False  # gradients are added to those of earlier microbatches
