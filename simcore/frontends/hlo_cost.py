"""Memory traffic of the ops of a step: pointwise ops are fused into those that read them.

XLA computes chains of pointwise ops in one kernel. A pointwise result that only pointwise ops and
reductions of the same phase read is not written; those read what it was computed from. Such an op
launches no kernel and moves no bytes. This is a model of the compiler, made before it has run.
"""

from collections.abc import Sequence
from typing import NamedTuple

from simcore.frontends.hlo_batch import Growth
from simcore.frontends.hlo_roles import Links, Roles
from simcore.frontends.hlo_step import POINTWISE, VIEWS, Op, Step
from simcore.signature import Affine

_FUSING = POINTWISE | {"reduce"}


class Cost(NamedTuple):
    """What an op moves."""

    traffic: Affine  # bytes
    kernels: int


def costs_of(step: Step, links: Links, roles: Roles, growth: Growth) -> list[Cost]:
    """Returns the traffic of every op, [op]."""
    gradients = {value for update in roles.updates for value in update.gradients}
    kept = gradients | set(step.results)
    outside: dict[
        int, tuple[int, ...]
    ] = {}  # value that is not in memory as such -> what it is made of
    found = []
    for number, op in enumerate(step.ops):
        reads: dict[int, None] = {}
        for value in op.inputs:
            if value not in step.constants:
                reads.update(dict.fromkeys(outside.get(value, (value,))))
        if op.op in VIEWS and (op.op != "slice" or op.inputs[0] in outside):
            outside[op.outputs[0]] = tuple(reads)
        is_inner = op.op in POINTWISE and _is_read_by_fusing(number, step, links, roles, kept)
        if is_inner:
            outside.update(dict.fromkeys(op.outputs, tuple(reads)))
        found.append(Cost((0, 0), 0) if is_inner else Cost(_traffic(op, list(reads), growth), 1))
    return found


def _is_read_by_fusing(number: int, step: Step, links: Links, roles: Roles, kept: set[int]) -> bool:
    """Whether all that read an op, through views that copy nothing, take it into their kernel."""
    pending = list(step.ops[number].outputs)
    seen = False
    while pending:
        value = pending.pop()
        if value in kept:
            return False
        for user in links.users.get(value, ()):
            op = step.ops[user]
            if user in roles.dropped or roles.phases[user] != roles.phases[number]:
                return False
            if op.op in {"broadcast", "reshape", "bitcast"}:
                pending += op.outputs
            elif op.op not in _FUSING:
                return False
            seen = True
    return seen


def _traffic(op: Op, reads: Sequence[int], growth: Growth) -> Affine:
    """Returns bytes read and written; of a table, only the rows that are picked."""
    written = [growth.num_bytes(value) for value in op.outputs]
    if op.op in {"gather", "dynamic_slice"}:
        read = [*written, *(growth.num_bytes(value) for value in op.inputs[1:2])]
    elif op.op == "dynamic_update_slice":
        read = written = [growth.num_bytes(op.inputs[1])]
    else:
        read = [growth.num_bytes(value) for value in reads]
    total = [*read, *written]
    return sum(pair[0] for pair in total), sum(pair[1] for pair in total)
