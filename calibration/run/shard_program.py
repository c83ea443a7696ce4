"""A sharded plan -> a `ShardProgram`: what every rank runs, from what the simulator says it does.

The ops, their order and the collectives between them are those of the local graph
(`simcore.sharding.local`), so a run checks that lowering: were a state wrong, the numbers would be.
All ranks run one program; where a rank stands in the mesh decides which part it works on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from calibration.run.layouts import Box, Layout
from calibration.run.local_forms import Share
from calibration.run.recording import Ref
from simcore.mesh import Mesh


class Operand(NamedTuple):
    """A tensor among the arguments of an op, on one rank."""

    handle: int  # tensor of the local graph, -1 = only its shape and dtype are read
    ref: Ref


class RunOp(NamedTuple):
    """An op of the model, on one rank's part."""

    name: str
    function: str | Callable[..., Any]
    args: tuple[Any, ...]  # nested; tensors are Operands
    kwargs: dict[str, Any]
    outputs: tuple[Operand | None, ...]  # of the tensors of the result; None = it is an argument
    written: tuple[tuple[int, int], ...]  # (handle before, handle after) of what is changed
    fresh: tuple[tuple[int, int], ...]  # (handle, local bytes) of what is written, but made nowhere
    key: int  # of a kept op
    share: Share
    made_whole: Layout | None  # the result is whole, and this rank takes its part


class TakeInput(NamedTuple):
    """Samples, or a constant."""

    name: str
    storage: int
    handle: int
    layout: Layout
    split: tuple[bool, ...]


class Alias(NamedTuple):
    """A view: the memory is that of another tensor."""

    source: int
    target: int


class ChangeState(NamedTuple):
    """A collective or a slice between two states of a tensor."""

    name: str
    kind: str  # as `simcore.collectives.ALGORITHMS`, or slice
    axis: int  # of the mesh
    source: int
    target: int
    in_place: bool
    dtype: torch.dtype
    before: tuple[int, ...]  # local sizes of the storage's dimensions
    after: tuple[int, ...]
    box: Box | None  # the part of the storage that is changed, None = all of it
    gathered: int  # dimension that becomes whole, -1 = none
    split: int  # dimension that is split, -1 = none


class SumBucket(NamedTuple):
    """Gradients that are averaged over the copies of the model."""

    name: str
    gradients: tuple[Operand, ...]


class UpdateParameter(NamedTuple):
    """One step of the optimizer on one rank's part of a parameter."""

    name: str
    owner: str  # the parameter's name
    number: int  # of the trained parameter
    parameter: Operand
    gradient: Operand
    target: int


class TakeLoss(NamedTuple):
    """The loss, or this rank's summand of it, times the number of summands."""

    name: str
    loss: Operand
    factor: float


Instruction = RunOp | TakeInput | Alias | ChangeState | SumBucket | UpdateParameter | TakeLoss


class Home(NamedTuple):
    """A parameter or buffer, as a rank keeps it between steps."""

    name: str
    handle: int
    last: int  # the handle that has its content when a step ends
    layout: Layout
    split: tuple[bool, ...]
    ref: Ref  # in the whole


class GradientPlace(NamedTuple):
    """Which part of a gradient a rank has, to put it together again."""

    layout: Layout
    split: tuple[bool, ...]
    ref: Ref  # in the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardProgram:
    """What the ranks of a mesh run in a step.

    Attributes:
        mesh: of the ranks.
        instructions: in order.
        frees: handles that are not needed after an instruction, [instruction].
        homes: parameters and buffers.
        gradients: of the trained parameters, by number.
        constants: values of storages that are neither parameters, buffers nor inputs.
        batch: samples of one copy of the model.
    """

    mesh: Mesh
    instructions: tuple[Instruction, ...]
    frees: tuple[tuple[int, ...], ...]
    homes: tuple[Home, ...]
    gradients: dict[int, GradientPlace]
    constants: dict[int, torch.Tensor] = field(repr=False)
    batch: int


def last_uses(instructions: Sequence[Instruction], kept: set[int]) -> list[tuple[int, ...]]:
    """Returns the handles that are let go of after each instruction.

    Args:
        instructions: in order.
        kept: handles that outlive the step.
    """
    last: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        for handle in handles_of(instruction):
            last[handle] = position
    frees: list[list[int]] = [[] for _ in instructions]
    for handle, position in last.items():
        if handle not in kept:
            frees[position].append(handle)
    return [tuple(each) for each in frees]


def handles_of(instruction: Instruction) -> Iterator[int]:
    """Yields the handles that an instruction uses."""
    match instruction:
        case RunOp():
            yield from (o.handle for o in operands_in(instruction.args) if o.handle >= 0)
            yield from (o.handle for o in operands_in(instruction.kwargs) if o.handle >= 0)
            yield from (o.handle for o in instruction.outputs if o is not None)
            yield from (handle for pair in instruction.written for handle in pair)
            yield from (handle for handle, _ in instruction.fresh)
        case TakeInput():
            yield instruction.handle
        case Alias() | ChangeState():
            yield from (instruction.source, instruction.target)
        case SumBucket():
            yield from (operand.handle for operand in instruction.gradients)
        case UpdateParameter():
            yield instruction.parameter.handle
            yield instruction.gradient.handle
            yield instruction.target
        case TakeLoss():
            yield instruction.loss.handle


def operands_in(value: Any) -> Iterator[Operand]:
    """Yields the tensors in nested arguments."""
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from operands_in(item)
    elif isinstance(value, list | tuple) and not isinstance(value, Ref):
        for item in value:
            yield from operands_in(item)
