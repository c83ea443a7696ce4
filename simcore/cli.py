"""The command line: finds the commands of the installed packages and runs one of them.

A command is an entry point of the group ``placewright.commands``: a function that adds one parser
to the given subparsers and sets its default ``run``, a function of the parsed arguments that
returns an `Answer`. The module of a command imports heavy packages inside ``run`` only, so help
stays fast.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points, version
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

from simcore.errors import InfeasibleError, PlacewrightError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130  # exit statuses
_GROUP = "placewright.commands"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command found, in both of its forms.

    Attributes:
        data: the object that ``--json`` prints; numpy values are fine, NaN becomes null.
        show: prints the same for a person, to standard output.
        status: exit status, 0 good, 1 infeasible or failed.
    """

    data: Mapping[str, Any]
    show: Callable[[], None]
    status: int = OK


class _Parser(argparse.ArgumentParser):
    """A parser with the options every command has, whose errors are `UsageError`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        # a suppressed default lets an option given before the command's name survive
        everywhere = self.add_argument_group("every command")
        everywhere.add_argument(
            "--json",
            action="store_true",
            default=argparse.SUPPRESS,
            help="print one JSON object to standard output; words go to standard error",
        )
        everywhere.add_argument(
            "--debug",
            action="store_true",
            default=argparse.SUPPRESS,
            help="show the traceback of an error",
        )

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name.

    Args:
        argv: arguments without the program's name; None takes them from the process.

    Returns:
        The exit status: 0 good, 1 infeasible or failed, 2 wrong usage, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json, debug = "--json" in arguments, "--debug" in arguments
    try:
        with _plain_warnings(), _any_name():
            status = _answer(arguments, as_json=as_json)
        if sys.stdout is not None:  # None: it was closed before the start
            sys.stdout.flush()  # so that a closed pipe is noticed here
    except BrokenPipeError:
        _close_stdout()
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        return _report(error, as_json=as_json)
    return status


def note(text: str) -> None:
    """Prints words to standard error, where they never mix with an answer."""
    print(text, file=sys.stderr, flush=True)


def make_console() -> Console:
    """Returns a console on standard output."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no edge to wrap at, and wants no blanks at line ends
        console = Console(highlight=False, width=200, file=cast(IO[str], _Trimmed(console.file)))
    return console


class _Trimmed:
    """A file whose lines lose the blanks at their ends; rich writes whole lines."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def write(self, text: str) -> int:
        self.file.write("\n".join(line.rstrip(" ") for line in text.split("\n")))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Container[int] | None = None
) -> None:
    """Prints a table to standard output.

    Args:
        columns: the headings.
        rows: the cells, as many per row as there are columns.
        right: columns that are aligned to the right; None is all but the first.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        is_right = index > 0 if right is None else index in right
        table.add_column(Text(column), justify="right" if is_right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: names may hold markup's brackets
    make_console().print(table)


def _answer(arguments: list[str], *, as_json: bool) -> int:
    parser = _parser(arguments)
    args = parser.parse_args(arguments)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        raise UsageError("no command given")
    with _stdout_to_stderr() if as_json else contextlib.nullcontext():
        answer: Answer = args.run(args)
    if as_json:
        print(json.dumps(_jsonable(answer.data), allow_nan=False))
    else:
        answer.show()
    return answer.status


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Returns the parser; only the command in the arguments is loaded if there is one."""
    parser: argparse.ArgumentParser = _Parser(
        prog="placewright",
        description="Finds where each operation of a neural network runs when it is trained on "
        "several devices, with a simulator instead of the cluster.",
    )
    parser.add_argument("--version", action="version", version=f"placewright {_version()}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    commands = {command.name: command for command in entry_points(group=_GROUP)}
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    if chosen in commands:
        _load(commands[chosen])(subparsers)
        return parser
    for name in sorted(commands):
        try:
            _load(commands[name])(subparsers)
        except PlacewrightError as error:  # one broken command must not hide the others
            note(f"placewright: warning: {error}")
    return parser


def _load(command: EntryPoint) -> Callable[[Subparsers], None]:
    try:
        register: Callable[[Subparsers], None] = command.load()
    except (ImportError, AttributeError) as error:
        raise PlacewrightError(f"command {command.name!r} cannot be loaded: {error}") from error
    return register


def _version() -> str:
    return version("placewright")


def _report(error: BaseException, *, as_json: bool) -> int:
    """Says in one line what went wrong, and returns the exit status."""
    message = _message(error)
    note(f"placewright: {message}" if _is_interrupt(error) else f"placewright: error: {message}")
    if as_json:
        data: dict[str, Any] = {"error": message, "type": type(error).__name__}
        if isinstance(error, InfeasibleError):
            data["feasible"] = False
        with contextlib.suppress(OSError):
            print(json.dumps(data), flush=True)
    if _is_interrupt(error):
        return INTERRUPTED
    return USAGE if isinstance(error, UsageError) else FAILED


def _message(error: BaseException) -> str:
    if isinstance(error, PlacewrightError):
        return str(error)
    if _is_interrupt(error):
        return "interrupted"
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError):
        return f"the Python package {error.name!r} is not installed"
    return f"internal error: {type(error).__name__}: {error} (--debug shows where)"


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt)


def _jsonable(value: Any) -> Any:
    """Returns the value with what JSON has: numpy values unpacked, NaN and infinities as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return value


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Prints warnings as one line on standard error, without the source line that raised them."""

    def show(message: Warning | str, *_: object) -> None:
        note(f"placewright: warning: {message}")

    with warnings.catch_warnings():
        setattr(warnings, "showwarning", show)  # noqa: B010 - mypy refuses the plain assignment
        yield


@contextlib.contextmanager
def _any_name() -> Iterator[None]:
    """Lets names be printed that standard output's encoding lacks, as escapes."""
    if not isinstance(sys.stdout, io.TextIOWrapper):
        yield
        return
    before = sys.stdout.errors
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        sys.stdout.reconfigure(errors=before)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Sends to standard error what is printed, also by programs that a model's factory starts."""
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as undo:
        with contextlib.suppress(OSError):  # closed descriptors
            own = os.dup(1)
            undo.callback(os.close, own)
            os.dup2(2, 1)
            undo.callback(os.dup2, own, 1)
        yield


def _close_stdout() -> None:
    """Points standard output at nothing, so that Python does not complain when it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
