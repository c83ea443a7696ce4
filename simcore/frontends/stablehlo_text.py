"""StableHLO text -> Program: what ``jax.jit(step).lower(...).as_text()`` prints.

The text is read here, not by jaxlib's MLIR bindings, so that who plans need not have jax, and a
file of another version of jax can be read: only the statements' own syntax is needed, and what is
unknown in a statement is skipped. Statements end with a line outside of brackets; blocks inside
them are functions of their own.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from simcore.errors import GraphError
from simcore.frontends.hlo_program import (
    TOKEN,
    Function,
    Kind,
    Program,
    Statement,
    array,
    closing,
    split_top,
)
from simcore.frontends.stablehlo_attributes import attributes_of, hlo_name

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_LOCATION = re.compile(r"\s*loc\((#?\w+|\"(?:[^\"\\]|\\.)*\"(?:\(.*\))?|.*)\)\s*$")
_LOCATION_LINE = re.compile(r'^(#loc\w*)\s*=\s*loc\("((?:[^"\\]|\\.)*)"')
_RESULTS = re.compile(r"^((?:%[\w.$-]+(?::\d+)?\s*,?\s*)+)=\s*")
_RESULT = re.compile(r"%([\w.$-]+)(?::(\d+))?")
_OP = re.compile(r'^(?:"([\w.]+)"|([\w.]+))')
_OPERAND = re.compile(r"%([\w.$-]+(?:#\d+)?)")
_FUNCTION = re.compile(r"^func\.func\s+(?:(public|private|nested)\s+)?@(\"[^\"]+\"|[\w.$-]+)\s*\(")
_CALLEE = re.compile(r"@(\"[^\"]+\"|[\w.$-]+)")
_ALIAS = re.compile(r"tf\.aliasing_output\s*=\s*(\d+)")
_TENSOR = re.compile(r"^tensor<((?:[\d?]+x)*)(.+)>$")
_BEFORE_BODY = re.compile(r"\b(cond|do|reducer\(.*\))\s*$", re.DOTALL)
_CONTINUED = re.compile(r"^(cond|do|reducer|attributes)\b")


class _Line(NamedTuple):
    """One statement with everything between its brackets."""

    text: str
    number: int  # line of the file where it begins


def decode_stablehlo(text: str, source: str) -> Program:
    """Returns the program of StableHLO text.

    Args:
        text: a module of functions.
        source: path, for messages.

    Raises:
        GraphError: it breaks the grammar; names file, line and op.
    """
    return _Reader(source).read(text)


class _Reader:
    """Reads one file."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.locations: dict[str, str] = {}
        self.functions: dict[str, Function] = {}
        self.aliases: dict[int, int] = {}
        self.labels: tuple[str, ...] = ()

    def read(self, text: str) -> Program:
        """Reads all functions; the entry is ``main``, else the only public one, else the first."""
        self.locations = {
            found.group(1): found.group(2)
            for line in text.splitlines() if (found := _LOCATION_LINE.match(line))
        }  # fmt: skip
        public: list[str] = []
        for name, is_public, line in self._function_lines(text):
            self.functions[name] = self._function(name, line)
            if is_public:
                public.append(name)
        if not self.functions:
            raise GraphError(f"{self.source}: no func.func in it: the file is cut short")
        entry = "main" if "main" in self.functions else (public or list(self.functions))[0]
        self._read_signature(text, entry)
        return Program(self.source, self.functions, entry, self.aliases, self.labels)

    def _function_lines(self, text: str) -> Iterator[tuple[str, bool, _Line]]:
        for line in self._statements(text, 1):
            if line.text.startswith("module"):
                brace = _body_start(line.text)
                inner = line.text[brace + 1 : closing(line.text, brace)]
                number = line.number + line.text.count("\n", 0, brace + 1)
                yield from self._function_lines_of(inner, number)
            elif line.text.startswith("func.func"):
                yield self._named(line)

    def _function_lines_of(self, text: str, number: int) -> Iterator[tuple[str, bool, _Line]]:
        for line in self._statements(text, number):
            if line.text.startswith("func.func"):
                yield self._named(line)

    def _named(self, line: _Line) -> tuple[str, bool, _Line]:
        found = _FUNCTION.match(line.text)
        if found is None:
            raise GraphError(f"{self.source}: line {line.number}: a function without a name")
        return found.group(2).strip('"'), found.group(1) == "public", line

    def _read_signature(self, text: str, entry: str) -> None:
        """Notes what the entry's parameters are called, and which results take their memory."""
        start = re.search(rf"func\.func\s+(?:\w+\s+)?@\"?{re.escape(entry)}\"?\s*(\()", text)
        if start is None:
            return
        end = closing(text, start.start(1))
        labels = []
        for number, part in enumerate(split_top(text[start.start(1) + 1 : end])):
            if alias := _ALIAS.search(part):
                self.aliases[number] = int(alias.group(1))
            labels.append(self._label(part)[1])
        self.labels = tuple(labels)

    def _statements(self, text: str, number: int) -> Iterator[_Line]:
        """Yields statements with the lines where they begin."""
        held: list[str] = []
        depth, first = 0, number
        lines = text.split("\n")
        for offset, line in enumerate(lines):
            stripped = line.strip()
            if not held:
                if not stripped or stripped.startswith(("//", "#", "^", "{-#")):
                    continue
                first = number + offset
            held.append(line)
            bare = _QUOTED.sub("", line)
            depth += sum(map(bare.count, "([{")) - sum(map(bare.count, ")]}"))
            if depth < 0:
                raise GraphError(f"{self.source}: line {number + offset}: a bracket too many")
            follows = next((n.strip() for n in lines[offset + 1 : offset + 2]), "")
            if depth == 0 and not _CONTINUED.match(follows):
                yield _Line("\n".join(held).strip(), first)
                held = []
        if held:
            raise GraphError(
                f"{self.source}: line {first}: {held[0].strip()[:50]!r} is not closed: the file is "
                "cut short"
            )

    def _function(self, name: str, line: _Line) -> Function:
        text = line.text
        start = text.index("(")
        end = closing(text, start)
        brace = _body_start(text, end)
        if brace < 0:
            raise GraphError(f"{self.source}: line {line.number}: function {name!r} has no body")
        inner = text[brace + 1 : closing(text, brace)]
        number = line.number + text.count("\n", 0, brace + 1)
        return self._block(name, text[start + 1 : end], inner, number)

    def _block(self, name: str, parameters: str, body: str, number: int) -> Function:
        """Returns a function, given its parameters as ``%name: type`` parted by commas."""
        names, kinds = [], []
        for part in split_top(parameters):
            label, _, kind = part.partition(":")
            names.append(label.strip().lstrip("%"))
            kinds.append(self._kind(_bare_type(kind), number))
        results: tuple[str, ...] = ()
        statements = []
        for line in self._statements(body, number):
            statement = self._statement(line)
            if statement.op == "return":
                results = statement.operands
            else:
                statements.append(statement)
        return Function(name, tuple(names), tuple(kinds), tuple(statements), results)

    def _label(self, text: str) -> tuple[str, str]:
        """Returns a text without its location, and where the location says it comes from."""
        found = _LOCATION.search(text)
        if found is None:
            return text, ""
        inside = found.group(1)
        quoted = re.match(r'"((?:[^"\\]|\\.)*)"', inside)
        label = quoted.group(1) if quoted else self.locations.get(inside, "")
        return text[: found.start()], label

    def _statement(self, line: _Line) -> Statement:
        text, label = self._label(line.text)
        made = _RESULTS.match(text)
        names: tuple[str, ...] = ()
        if made:
            names = tuple(_result_names(made.group(1)))
            text = text[made.end() :]
        opened = _OP.match(text)
        if opened is None:
            raise GraphError(f"{self.source}: line {line.number}: {text[:50]!r} is no op")
        full = opened.group(1) or opened.group(2)
        rest = text[opened.end() :]
        where = f"{self.source}: line {line.number}: {full}"
        bodies, plain = self._bodies(rest, line)
        head, kinds = self._signature(plain, line.number)
        op = hlo_name(full)
        reducer = re.search(r"\bapplies\s+\w+\.(\w+)", head)
        if op == "custom_call" or not (callee := _CALLEE.search(_QUOTED.sub("", head))):
            called: tuple[Any, ...] = tuple(bodies)
        else:
            called = (callee.group(1).strip('"'),)
        if decomposed := re.search(r"decomposition\s*=\s*@([\w.$-]+)", head):
            called = (decomposed.group(1),)
        attributes = dict(attributes_of(op, head, where))
        if reducer:
            attributes["reducer"] = hlo_name(reducer.group(1))
        if len(names) > 1 and len(kinds) == 1:
            kinds = kinds * len(names)
        if len(kinds) != len(names) and op != "return":
            kinds = kinds[len(kinds) - len(names) :]
        if len(kinds) < len(names):
            raise GraphError(f"{where}: {len(names)} results, but {len(kinds)} types")
        operands = _operands(op, head)
        return Statement(
            op, names, tuple(kinds[: len(names)]), operands, attributes, called, label, line.number
        )

    def _signature(self, text: str, number: int) -> tuple[str, list[Kind]]:
        """Returns what stands before the types, and the types of the results."""
        head, _, types = _cut_types(text)
        before, arrow, after = types.rpartition("->")
        results = after if arrow else before or types
        results = results.strip()
        if results.startswith("(") and closing(results, 0) == len(results) - 1:
            results = results[1:-1]
        return head, [self._kind(_bare_type(part), number) for part in split_top(results)]

    def _bodies(self, text: str, line: _Line) -> tuple[list[Function], str]:
        """Returns the blocks inside a statement, and its text without them."""
        found: list[Function] = []
        kept, place = [], 0
        offset = line.text.index(text) if text else 0
        for opened in re.finditer(r"\{[ \t]*(?:loc\([^\n]*\))?\n", text):
            start = opened.start()
            if start < place:
                continue
            end = closing(text, start)
            number = line.number + line.text.count("\n", 0, offset + start)
            found.append(self._body(text[start + 1 : end], text, start, number))
            kept.append(_BEFORE_BODY.sub("", text[place:start]))
            place = end + 1
        kept.append(text[place:])
        return found, " ".join("".join(kept).split())

    def _body(self, inner: str, text: str, start: int, number: int) -> Function:
        """Returns a block; its parameters stand in its ``^bb0(...)``, or in the loop's head."""
        named = re.search(r"\^\w+\(", inner)
        if named:
            end = closing(inner, named.end() - 1)
            return self._block("", inner[named.end() : end], inner, number)
        assigned = re.findall(r"%(iterArg[\w]*)\s*=", text[:start])
        function = self._block("", "", inner, number)
        return function._replace(parameters=tuple(assigned))

    def _kind(self, text: str, number: int) -> Kind:
        where = f"{self.source}: line {number}"
        if text in {"!stablehlo.token", "token"}:
            return TOKEN
        if text.startswith("tuple<"):
            return tuple(self._kind(part, number) for part in split_top(text[6:-1]))
        found = _TENSOR.match(text)
        if found is None:
            raise GraphError(f"{where}: {text[:50]!r} is no tensor type")
        dtype = split_top(found.group(2))[0]
        return array(found.group(1), dtype, where)


def _result_names(text: str) -> Iterator[str]:
    for name, count in _RESULT.findall(text):
        if count:
            yield from (f"{name}#{index}" for index in range(int(count)))
        else:
            yield name


def _operands(op: str, head: str) -> tuple[str, ...]:
    if op == "while":  # %iterArg = %value
        return tuple(re.findall(r"=\s*%([\w.$-]+(?:#\d+)?)", head))
    return tuple(_OPERAND.findall(_QUOTED.sub("", head)))


def _cut_types(text: str) -> tuple[str, str, str]:
    """Parts a statement at the last colon outside of brackets."""
    depth, found = 0, -1
    for place, letter in enumerate(text):
        if letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == ":" and depth == 0 and text[place + 1 : place + 2] == " ":
            found = place
    if found < 0:
        return text, "", ""
    return text[:found], ":", text[found + 1 :]


def _bare_type(text: str) -> str:
    """Returns a type without attributes and location after it."""
    text = text.strip()
    return text.partition("{")[0].partition(" loc(")[0].strip()


def _body_start(text: str, start: int = 0) -> int:
    """Returns the place of the brace that opens a block: the first one that ends its line."""
    found: Sequence[re.Match[str]] = list(re.finditer(r"\{[ \t]*\n", text[start:]))
    return start + found[0].start() if found else -1
