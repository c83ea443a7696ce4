"""What the inputs and ops of a step are: parameters, optimizer states, updates, phases.

The text of a step says none of this. A result that comes from an input of its shape through
pointwise ops alone is that input's new value. Such an input is a parameter where other ops read it
too, and an optimizer state where only updates do. The ops on these ways are the update; what they
read from outside is the gradient. The forward is what the loss needs: the first result that is one
number and no new value of an input; where the step returns none, what the gradients of all
parameters need. Where the text names the ops of JAX (``jvp``, ``transpose``), these names decide.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from simcore.errors import GraphError
from simcore.frontends.hlo_program import FLOATS
from simcore.frontends.hlo_step import POINTWISE, Op, Step
from simcore.signature import Phase

_THROUGH = POINTWISE | {"reshape", "transpose", "bitcast"}


class Piece(NamedTuple):
    """What is updated at once: a parameter, or the part of it that one round of a loop uses."""

    values: tuple[int, ...]  # that are it
    gradients: tuple[int, ...]


class Update(NamedTuple):
    """The update of one parameter.

    Attributes:
        parameter: value of the input.
        pieces: one, or those of a parameter that stacks the layers of a scan.
        scalars: numbers that other ops compute for it (a norm of all gradients).
        states: values of the optimizer's inputs for it.
    """

    parameter: int
    pieces: tuple[Piece, ...]
    scalars: tuple[int, ...]
    states: tuple[int, ...]

    @property
    def gradients(self) -> tuple[int, ...]:
        """All gradients."""
        return tuple(value for piece in self.pieces for value in piece.gradients)


class Roles(NamedTuple):
    """What is what.

    Attributes:
        updates: of all parameters that are trained.
        dropped: ops, by place, that are part of an update, or cut and join a stack of layers.
        phases: of all ops.
        states: inputs that only updates read.
        carried: other inputs that have a new value among the results (running statistics).
    """

    updates: tuple[Update, ...]
    dropped: frozenset[int]
    phases: tuple[Phase, ...]
    states: frozenset[int]
    carried: frozenset[int]


class _Way(NamedTuple):
    """The pointwise ways that lead to one result."""

    result: int
    ops: frozenset[int]
    inputs: frozenset[int]  # of the result's size


class Links(NamedTuple):
    """Who makes and who reads each value."""

    maker: Mapping[int, int]
    users: Mapping[int, list[int]]


def links_of(ops: Sequence[Op]) -> Links:
    """Returns the op that makes each value, and those that read it."""
    users: dict[int, list[int]] = defaultdict(list)
    for number, op in enumerate(ops):
        for value in dict.fromkeys(op.inputs):
            users[value].append(number)
    return Links({v: number for number, op in enumerate(ops) for v in op.outputs}, users)


def find_roles(step: Step) -> Roles:
    """Returns what the inputs and ops of a step are.

    Raises:
        GraphError: no parameter is updated in it.
    """
    links = links_of(step.ops)
    ways = [_way(step, links, result) for result in dict.fromkeys(step.results)]
    new_value = _paired(step, [way for way in ways if way.inputs])
    paired = {way.result: held for held, way in new_value.items()}
    region = _region(step, links, new_value)
    parameters = [held for held in new_value if set(links.users[held]) - region]
    updates = [_update(step, links, held, new_value, region) for held in parameters]
    updates = [update for update in updates if update.gradients]
    if not updates:
        raise GraphError(
            f"{step.source}: no result is the new value of a parameter: the step must return the "
            "updated parameters (new = old - rate * gradient), not only the loss or gradients"
        )
    dropped = set(region)
    updates = [unstacked(step, links, update, dropped) for update in updates]
    trained = {update.parameter for update in updates}
    states = {state for update in updates for state in update.states} - trained
    return Roles(
        tuple(updates), frozenset(dropped), _phases(step, links, updates, set(paired)),
        frozenset(states), frozenset(new_value) - trained - states,
    )  # fmt: skip


def _size(step: Step, value: int) -> int:
    return prod(step.values[value].shape)


def _way(step: Step, links: Links, result: int) -> _Way:
    """Walks back from a result, as long as ops are pointwise on values of its size or scalars."""
    size, inputs = _size(step, result), set(step.inputs)
    ops: set[int] = set()
    found: set[int] = set()
    pending, seen = [result], {result}
    while pending:
        value = pending.pop()
        if value in inputs:
            if _size(step, value) == size:
                found.add(value)
            continue
        maker = links.maker.get(value)
        if maker is None:
            continue
        op = step.ops[maker]
        spreads = op.op == "broadcast" and _size(step, op.inputs[0]) == 1
        if op.op not in _THROUGH and not spreads:
            continue
        ops.add(maker)
        for read in op.inputs:
            if read not in seen and _size(step, read) in (1, size):
                seen.add(read)
                pending.append(read)
    floats = (value for value in found if step.values[value].dtype in FLOATS)
    return _Way(result, frozenset(ops), frozenset(floats) - {result})


def _paired(step: Step, ways: Sequence[_Way]) -> dict[int, _Way]:
    """Returns input -> the way to its new value; a way to few inputs chooses first."""
    donated = {
        step.inputs[i]: step.results[j]
        for i, j in step.aliases.items()
        if i < len(step.inputs) and j < len(step.results)
    }
    order = {value: place for place, value in enumerate(step.inputs)}
    chosen: dict[int, _Way] = {}
    for way in sorted(ways, key=lambda way: len(way.inputs)):
        kind = step.values[way.result][:2]
        free = [v for v in way.inputs if v not in chosen and step.values[v][:2] == kind]
        free.sort(key=lambda value: (donated.get(value) != way.result, order[value]))
        if free:
            chosen[free[0]] = way
    return {value: chosen[value] for value in sorted(chosen, key=order.__getitem__)}


def _region(step: Step, links: Links, new_value: Mapping[int, _Way]) -> frozenset[int]:
    """Returns the ops of all updates.

    Those on a way that begins at a parameter or state; and pointwise ops before them that only
    updates read and that work on one value (a gradient times the rate).
    """
    region: set[int] = set()
    candidates: set[int] = set()
    for way in new_value.values():
        held = {value for value in way.inputs if value in new_value}
        for number in sorted(way.ops):
            op = step.ops[number]
            if held.intersection(op.inputs):
                region.add(number)
                held.update(op.outputs)
        candidates |= way.ops
    results = set(step.results)
    roots = _roots(step, links, sorted(candidates - region))
    for number in sorted(candidates - region, reverse=True):
        op = step.ops[number]
        users = {user for value in op.outputs for user in links.users.get(value, ())}
        is_own = op.op in POINTWISE or op.op == "broadcast"
        kept = not results.intersection(op.outputs)
        if is_own and kept and users and users <= region and len(roots[number]) < 2:
            region.add(number)
    return frozenset(region)


def _roots(step: Step, links: Links, numbers: Sequence[int]) -> dict[int, frozenset[int]]:
    """Returns the values that each of some ops works on, through pointwise ops of one value."""
    root: dict[int, int] = {}
    found: dict[int, frozenset[int]] = {}
    for number in numbers:
        op = step.ops[number]
        large = {v for v in op.inputs if v not in step.constants and _size(step, v) > 1}
        roots = {root.get(v, v) for v in large if not _is_spread(step, links, v)}
        found[number] = frozenset(roots)
        if len(roots) == 1 and op.op in POINTWISE:
            root.update(dict.fromkeys(op.outputs, next(iter(roots))))
    return found


def _is_spread(step: Step, links: Links, value: int) -> bool:
    """Whether a value is one number, broadcast."""
    maker = links.maker.get(value)
    if maker is None:
        return False
    op = step.ops[maker]
    return op.op == "broadcast" and _size(step, op.inputs[0]) == 1


def _update(
    step: Step, links: Links, held: int, new_value: Mapping[int, _Way], region: frozenset[int]
) -> Update:
    """Returns the update of one parameter: what its way, and those of its states, read."""
    way = new_value[held]
    states = {value for value in way.inputs if value in new_value} - {held}
    ops = set(way.ops).union(*(new_value[state].ops for state in states))
    inputs = set(step.inputs)
    outside = dict.fromkeys(
        value
        for number in sorted(ops & region)
        for value in step.ops[number].inputs
        if links.maker.get(value, -1) not in region and value not in step.constants | inputs
    )
    is_number = [_size(step, value) == 1 < _size(step, held) for value in outside]
    pairs = list(zip(outside, is_number, strict=True))
    return Update(
        held,
        (Piece((held,), tuple(value for value, small in pairs if not small)),),
        tuple(value for value, small in pairs if small),
        tuple(sorted(states)),
    )


def unstacked(step: Step, links: Links, update: Update, dropped: set[int]) -> Update:
    """Returns the update of a stack of layers as one of each layer.

    A scan reads its parameters in slices along the first dimension, and writes the slices of their
    gradients one after the other: each layer then has a parameter and a gradient of its own.

    Args:
        step: the step.
        links: of its ops.
        update: of one parameter.
        dropped: ops that are left out; those that cut and join the stack are added.
    """
    held = update.parameter
    layers = (*step.values[held].shape, 0)[0]
    readers = [number for number in links.users[held] if number not in dropped]
    if not 2 <= layers <= len(readers):  # no list of all rows: an embedding has millions
        return update
    values: dict[int, list[int]] = {layer: [] for layer in range(layers)}
    for number in readers:
        layer = _layer(step, number, held)
        if layer is None:
            return update
        values[layer].append(step.ops[number].outputs[0])
    written, chain = _written(step, links, update.gradients, dropped)
    if set(written) != set(values) or not all(values.values()):
        return update
    dropped.update(readers, chain)
    pieces = tuple(Piece(tuple(values[layer]), (written[layer],)) for layer in range(layers))
    return update._replace(pieces=pieces)


def _layer(step: Step, number: int, held: int) -> int | None:
    """Returns which layer of a stack an op cuts out, None where it does something else."""
    op, shape = step.ops[number], step.values[held].shape
    if op.op != "slice" or step.values[op.outputs[0]].shape != (1, *shape[1:]):
        return None
    return int(op.attributes["start"][0])


def _written(
    step: Step, links: Links, gradients: Sequence[int], dropped: set[int]
) -> tuple[dict[int, int], list[int]]:
    """Returns layer -> what is written there, and the ops that write it."""
    found: dict[int, int] = {}
    chain: list[int] = []
    value = gradients[0]
    while len(gradients) == 1 and value in links.maker:
        number = links.maker[value]
        op = step.ops[number]
        users = set(links.users.get(value, ())) - dropped - set(chain)
        start = op.attributes.get("start", ())
        layer = step.values[op.inputs[1]].shape if len(op.inputs) > 1 else ()
        is_layer = layer == (1, *step.values[value].shape[1:]) and not any(start[1:])
        if op.op != "dynamic_update_slice" or users or not start or not is_layer:
            return {}, []
        found.setdefault(start[0], op.inputs[1])
        chain.append(number)
        value = op.inputs[0]
    return (found, chain) if value in step.constants else ({}, [])


def _phases(
    step: Step, links: Links, updates: Iterable[Update], new_values: set[int]
) -> tuple[Phase, ...]:
    losses = [
        value
        for value in step.results
        if value not in new_values
        and _size(step, value) == 1
        and step.values[value].dtype in FLOATS
    ]
    if losses:
        forward = _ancestors(step, links, losses[:1])
    else:
        needed = [_ancestors(step, links, update.gradients) for update in updates]
        forward = frozenset.intersection(*needed)
    return tuple(_phase(op, number in forward) for number, op in enumerate(step.ops))


def _phase(op: Op, needed: bool) -> Phase:
    if "transpose(" in op.label:
        return Phase.B
    return Phase.F if needed or "jvp(" in op.label else Phase.B


def _ancestors(step: Step, links: Links, values: Iterable[int]) -> frozenset[int]:
    """Returns the ops that values need."""
    found: set[int] = set()
    pending = [links.maker[value] for value in values if value in links.maker]
    while pending:
        number = pending.pop()
        if number not in found:
            found.add(number)
            pending += [links.maker[v] for v in step.ops[number].inputs if v in links.maker]
    return frozenset(found)
