"""Names and placement units of the ops of a step.

A backward op belongs to the forward op whose values it reads: the product that gives the gradient
of a weight, to the first that reads the weight; another, to the forward op with which it shares
most of what it reads, of the same kind where there is one, and of equals the last. One that reads
gradients only belongs to the earliest op that these belong to.
"""

import re
from collections.abc import Mapping, Sequence

from simcore.frontends.hlo_roles import Links, Roles
from simcore.frontends.hlo_step import VIEWS, Op, Step
from simcore.signature import Phase

_WRAPPED = re.compile(r"^(?:jvp|transpose|jit|vmap|checkpoint|remat|rematted_computation)\((.*)\)$")
_MARKS = re.compile(r"[\[\]'\"\\().]+")


def module_of(label: str) -> str:
    """Returns where in the model an op is, from its place in the program: ``Model.Dense_0``."""
    parts = label.split("/")[1:-1]
    found = []
    for part in parts:
        while wrapped := _WRAPPED.match(part):
            part = wrapped.group(1)  # noqa: PLW2901 - one wrapper less
        if part:
            found.append(part)
    return ".".join(found)


def input_names(step: Step) -> list[str]:
    """Returns unique names of the inputs: those of the source program, dotted; else ``arg0``."""
    taken: dict[str, int] = {}
    names = []
    for place, label in enumerate(step.labels):
        name = _MARKS.sub(".", label).strip(".") or f"arg{place}"
        count = taken[name] = taken.get(name, -1) + 1
        names.append(f"{name}.{count}" if count else name)
    return names


def piece_name(name: str, place: int, count: int) -> str:
    """Returns the name of a part of a parameter: ``blocks.w`` -> ``blocks.0.w``."""
    parent, _, leaf = name.rpartition(".")
    return sequence_of((parent, str(place), leaf)) if count > 1 else name


def bases_of(step: Step, roles: Roles) -> dict[int, int]:
    """Returns value -> the value whose elements it shows: through views and parts of parameters."""
    base = {
        value: piece.values[0]
        for update in roles.updates
        for piece in update.pieces
        for value in piece.values
    }
    for op in step.ops:
        if op.op in VIEWS and op.outputs[0] not in base:
            base[op.outputs[0]] = base.get(op.inputs[0], op.inputs[0])
    return base


def partners(step: Step, links: Links, roles: Roles, base: Mapping[int, int]) -> list[int]:
    """Returns for each op an earlier op whose unit it joins, itself where it begins one, [op]."""
    readers = _forward_readers(step, roles, base)
    wanted = _weights(step, roles, base)
    found = list(range(len(step.ops)))
    for number, op in enumerate(step.ops):
        if number in roles.dropped or roles.phases[number] == Phase.F:
            continue
        weight = next((wanted[v] for v in op.outputs if v in wanted), None)
        if weight in readers and readers[weight][0] < number:
            found[number] = readers[weight][0]
            continue
        counts: dict[int, int] = {}
        for value in {base.get(v, v) for v in op.inputs}:
            for reader in readers.get(value, ()):
                counts[reader] = counts.get(reader, 0) + (reader < number)
        counts = {reader: count for reader, count in counts.items() if count}
        if counts and op.op not in VIEWS:
            alike = {reader: step.ops[reader].op == op.op for reader in counts}
            found[number] = max(counts, key=lambda r: (counts[r], alike[r], r))
        else:
            found[number] = _first_maker(number, op, links, base, found)
    return found


def _first_maker(
    number: int, op: Op, links: Links, base: Mapping[int, int], found: Sequence[int]
) -> int:
    """Returns the earliest op with whose unit what an op reads was made: sums stand there."""
    made = [links.maker[base.get(v, v)] for v in op.inputs if base.get(v, v) in links.maker]
    return min((found[maker] for maker in made), default=number)


def _forward_readers(step: Step, roles: Roles, base: Mapping[int, int]) -> dict[int, list[int]]:
    """Returns value -> forward ops that read it, through views."""
    readers: dict[int, list[int]] = {}
    for number, op in enumerate(step.ops):
        is_forward = roles.phases[number] == Phase.F and number not in roles.dropped
        if is_forward and op.op not in VIEWS:
            for value in dict.fromkeys(base.get(v, v) for v in op.inputs):
                if value not in step.constants:
                    readers.setdefault(value, []).append(number)
    return readers


def _weights(step: Step, roles: Roles, base: Mapping[int, int]) -> dict[int, int]:
    """Returns gradient -> the parameter that it is of."""
    return {
        base.get(gradient, gradient): piece.values[0]
        for update in roles.updates
        for piece in update.pieces
        for gradient in piece.gradients
    }


def unique(name: str, taken: dict[str, int]) -> str:
    """Returns the name, with a number from its second use on."""
    count = taken[name] = taken.get(name, -1) + 1
    return unique(f"{name}.{count}", taken) if count else name


def sequence_of(labels: Sequence[str]) -> str:
    """Returns parts of a name joined by dots, without empty ones."""
    return ".".join(part for part in labels if part)
