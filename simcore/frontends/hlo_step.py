"""A program of XLA ops, laid out flat: calls and fusions opened, loops of known length unrolled.

What no input decides (constants, ranges, and what is computed from them alone, such as a causal
mask) is no op of the step: compilers fold it, or compute it anew in every kernel that needs it.
Whole numbers are followed, so that the counter of a loop (a scan) is known, how often it runs, and
which slice each round reads.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from simcore.errors import GraphError
from simcore.frontends.hlo_fold import FOLDED, folded
from simcore.frontends.hlo_program import TOKEN, Array, Function, Kind, Program, Statement

MAX_OPS = 200_000  # beyond it an unrolled step is refused
Item = int | tuple["Item", ...]  # a value, or a tuple of them
_Names = ChainMap[str, Item]

POINTWISE = frozenset((
    "abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "complex", "convert",
    "cosine", "count_leading_zeros", "cosh", "acos", "acosh", "asin", "asinh", "atan", "atanh",
    "sinh", "divide", "erf", "exponential", "exponential_minus_one", "floor", "imag", "is_finite",
    "log", "log_plus_one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or",
    "popcnt", "population_count", "power", "real", "reduce_precision", "remainder",
    "round_nearest_afz", "round_nearest_even", "rsqrt", "select", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sine", "sqrt", "subtract", "tan",
    "tanh", "xor", "square", "lgamma", "digamma", "erf_inv",
))  # fmt: skip
VIEWS = frozenset({"broadcast", "reshape", "transpose", "bitcast", "slice"})
_SAME = frozenset({"copy", "opt_barrier", "copy_start", "copy_done", "domain", "bitcast_convert",
                   "create_token", "after_all"})  # fmt: skip
_SAME_CALLS = frozenset({"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape",
                         "annotate_device_placement", "LayoutConstraint"})  # fmt: skip
_COLLECTIVES = frozenset({"all_reduce", "all_gather", "all_to_all", "reduce_scatter",
                          "collective_permute", "all_reduce_start",
                          "all_gather_start"})  # fmt: skip
_STAYING = POINTWISE | VIEWS | {"reduce", "pad", "concatenate", "reverse"}


class Op(NamedTuple):
    """One op of the step."""

    op: str
    inputs: tuple[int, ...]  # values, as often as they are read
    outputs: tuple[int, ...]
    attributes: Mapping[str, Any]
    label: str
    line: int
    name: str  # what the file calls its first result


class Step(NamedTuple):
    """One training step.

    Attributes:
        source: path of the file.
        values: types.
        constants: values that no input decides.
        ops: in program order.
        inputs: values of the entry's parameters.
        results: values of its results.
        aliases: input -> result whose memory it gives, both by position.
        labels: what the source program calls the inputs, "" = unknown, [input].
    """

    source: str
    values: tuple[Array, ...]
    constants: frozenset[int]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    results: tuple[int, ...]
    aliases: Mapping[int, int]
    labels: tuple[str, ...]


def lay_out(program: Program) -> Step:
    """Returns the step that a program's entry is.

    Raises:
        GraphError: a value or function that is not there, a step for several devices, or one that
            is too long when unrolled.
    """
    walk = _Walk(program)
    entry = program.functions[program.entry]
    inputs = tuple(walk.fresh(kind) for kind in entry.kinds)
    names: _Names = ChainMap(dict(zip(entry.parameters, inputs, strict=True)))
    results = walk.run(entry, names)
    if len(results) == 1 and isinstance(results[0], tuple):
        results = results[0]
    flat = _flat(inputs)
    labels = program.parameter_labels
    return Step(
        program.source,
        tuple(walk.values),
        frozenset(walk.constants),
        tuple(_live(walk.ops, _flat(results))),
        flat,
        _flat(results),
        program.aliases,
        labels if len(labels) == len(flat) else ("",) * len(flat),
    )


def _flat(items: Sequence[Item]) -> tuple[int, ...]:
    found: list[int] = []
    for item in items:
        found += _flat(item) if isinstance(item, tuple) else (item,)
    return tuple(found)


def _live(ops: Sequence[Op], results: Sequence[int]) -> list[Op]:
    """Returns the ops that a result needs."""
    needed = set(results)
    kept = []
    for op in reversed(ops):
        if needed.intersection(op.outputs):
            needed.update(op.inputs)
            kept.append(op)
    return kept[::-1]


class _Walk:
    """Runs through the program once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values: list[Array] = []
        self.constants: set[int] = set()
        self.number: dict[int, int] = {}  # value -> the whole number that it is
        self.chunks: dict[int, dict[tuple[int, ...], int]] = {}  # value -> start -> what is there
        self.ops: list[Op] = []

    def fresh(self, kind: Kind) -> Item:
        """Returns a new value, or a tuple of new ones."""
        if not isinstance(kind, Array):
            return tuple(self.fresh(part) for part in kind)
        self.values.append(kind)
        return len(self.values) - 1

    def run(self, function: Function, names: _Names) -> tuple[Item, ...]:
        """Runs a function whose parameters have values; returns those of its results."""
        for statement in function.statements:
            if statement.op != "parameter":
                made = self._checked(statement, names)
                names.update(zip(statement.names, made, strict=True))
        where = f"{self.program.source}: {function.name or 'block'}"
        return tuple(self._look_up(name, names, where) for name in function.results)

    def _checked(self, statement: Statement, names: _Names) -> tuple[Item, ...]:
        try:
            made = self._statement(statement, names)
        except (IndexError, KeyError, TypeError, ValueError):
            made = ()
        if len(made) != len(statement.names):
            raise GraphError(f"{self._where(statement)}: its operands or attributes do not fit it")
        return made

    def _look_up(self, name: str, names: _Names, where: str) -> Item:
        for key in (name, f"{name}#0", name.partition("#")[0]):
            if key in names:
                return names[key]
        raise GraphError(f"{where}: reads {name!r}, which is not defined before")

    def _where(self, statement: Statement) -> str:
        return f"{self.program.source}: line {statement.line}: {statement.op}"

    def _called(self, statement: Statement, index: int) -> Function:
        body = statement.bodies[index] if index < len(statement.bodies) else ""
        if isinstance(body, Function):
            return body
        found = self.program.functions.get(body)
        if found is None:
            raise GraphError(f"{self._where(statement)}: there is no function {body!r}")
        return found

    def _call(
        self, function: Function, items: Sequence[Item], names: _Names, where: str
    ) -> tuple[Item, ...]:
        """Runs a function in names of its own; a block also sees those around it."""
        if len(items) != len(function.parameters):
            raise GraphError(
                f"{where}: {len(items)} arguments for {len(function.parameters)} parameters"
            )
        own = dict(zip(function.parameters, items, strict=True))
        inner: _Names = ChainMap(own) if function.name else names.new_child(own)
        return self.run(function, inner)

    def _statement(self, statement: Statement, names: _Names) -> tuple[Item, ...]:
        where = self._where(statement)
        items = [self._look_up(name, names, where) for name in statement.operands]
        op = statement.op
        if op in _COLLECTIVES:
            raise GraphError(f"{where}: the step is for several devices; lower it for one")
        if op in {"while", "call", "fusion", "async_start", "conditional"}:
            return self._results(statement, self._nested(statement, items, names))
        if op == "tuple":
            return (tuple(items),)
        if op == "get_tuple_element":
            held = items[0]
            if not isinstance(held, tuple):
                raise GraphError(f"{where}: its operand is no tuple")
            return (held[statement.attributes["index"]],)
        target = statement.attributes.get("custom_call_target", "")
        if (op in _SAME or target in _SAME_CALLS) and items:
            return tuple(items) if len(items) == len(statement.names) else (items[0],)
        return self._plain(statement, _flat(items))

    def _nested(
        self, statement: Statement, items: Sequence[Item], names: _Names
    ) -> tuple[Item, ...]:
        """Runs what has functions of its own."""
        if statement.op == "while":
            return self._loop(statement, items, names)
        if statement.op == "conditional":
            return self._branch(statement, items, names)
        return self._call(self._called(statement, 0), items, names, self._where(statement))

    def _results(self, statement: Statement, made: tuple[Item, ...]) -> tuple[Item, ...]:
        """Fits the results of a call to the names: a call of several may make one tuple."""
        if len(made) == len(statement.names):
            return made
        if len(statement.names) == 1:
            return (made,)
        only = made[0]
        return only if isinstance(only, tuple) else made

    def _branch(
        self, statement: Statement, items: Sequence[Item], names: _Names
    ) -> tuple[Item, ...]:
        """Takes the longest branch."""
        branches = [self._called(statement, i) for i in range(len(statement.bodies))]
        chosen = max(range(len(branches)), key=lambda i: len(branches[i].statements))
        held = [items[1 + chosen]] if len(items) > 1 + chosen else []
        return self._call(branches[chosen], held, names, self._where(statement))

    def _loop(self, statement: Statement, items: Sequence[Item], names: _Names) -> tuple[Item, ...]:
        """Unrolls a loop while its condition is known; runs the body once where it never is."""
        where = self._where(statement)
        condition, body = self._called(statement, 0), self._called(statement, 1)
        state: tuple[Item, ...] = tuple(items)
        rounds = 0
        while True:
            before = len(self.ops)
            (go_on,) = _flat(self._call(condition, state, names, where))
            del self.ops[before:]
            known = self.number.get(go_on)
            if known == 0 or (known is None and rounds > 0):
                return state
            state = self._call(body, state, names, where)
            rounds += 1
            if len(self.ops) > MAX_OPS:
                raise GraphError(
                    f"{where}: after {rounds} rounds the step has over {MAX_OPS} ops; shorten "
                    "the loop"
                )

    def _plain(self, statement: Statement, inputs: tuple[int, ...]) -> tuple[Item, ...]:
        op, attributes = statement.op, statement.attributes
        if op in VIEWS and len(inputs) != 1:
            raise ValueError(op)
        items = tuple(self.fresh(kind) for kind in statement.kinds)
        outputs = _flat(items)
        if op in FOLDED and len(outputs) == 1:
            value = folded(op, attributes, [self.number.get(i) for i in inputs])
            if value is not None and not self.values[outputs[0]].shape:
                self.number[outputs[0]] = value
        is_constant = op in {"constant", "iota"}
        stays = op in _STAYING and all(i in self.constants for i in inputs) and len(inputs) > 0
        if is_constant or stays or all(self.values[o] == TOKEN for o in outputs):
            self.constants.update(outputs)
            return items
        if op in {"dynamic_slice", "dynamic_update_slice"}:
            starts = self._starts(op, inputs)
            if op == "dynamic_slice" and starts is not None:
                return (self._sliced(statement, inputs[0], starts, outputs[0]),)
            if starts is not None:
                held = self.chunks.get(inputs[0], {})
                self.chunks[outputs[0]] = {**held, starts: inputs[1]}
                attributes = {**attributes, "start": starts}
        if statement.bodies and "reducer" not in attributes:
            attributes = {**attributes, "reducer": self._reducer(statement)}
        self.ops.append(
            Op(op, inputs, outputs, attributes, statement.label, statement.line, statement.names[0])
        )
        return items

    def _starts(self, op: str, inputs: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns where a slice begins, None where that is not known."""
        places = inputs[1 if op == "dynamic_slice" else 2 :]
        known = [self.number.get(place) for place in places]
        return tuple(value for value in known if value is not None) if None not in known else None

    def _sliced(self, statement: Statement, source: int, starts: tuple[int, ...], out: int) -> int:
        """Returns a slice at a known place: what was written there, else a plain slice.

        So one round of a loop reads what another wrote, not a part of what all rounds wrote.
        """
        written = self.chunks.get(source, {}).get(starts)
        shape = self.values[out].shape
        if written is not None and self.values[written].shape == shape:
            return written
        limit = tuple(start + size for start, size in zip(starts, shape, strict=True))
        attributes = {"start": starts, "limit": limit, "stride": (1,) * len(shape)}
        name, label, line = statement.names[0], statement.label, statement.line
        self.ops.append(Op("slice", (source,), (out,), attributes, label, line, name))
        return out

    def _reducer(self, statement: Statement) -> str:
        """Returns the op by which elements are reduced, "" where it is not a single one."""
        function = self._called(statement, len(statement.bodies) - 1)
        steps = [s.op for s in function.statements if s.op != "parameter"]
        return steps[0] if len(steps) == 1 else ""
