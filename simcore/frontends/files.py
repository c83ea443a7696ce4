"""Reading a graph file: bytes and numbers, each refusal a `GraphError` that names the file."""

from pathlib import Path

from simcore.errors import GraphError
from simcore.units import GiB, format_bytes

MAX_FILE = GiB  # bytes; a graph file beyond this is a mistake, not a graph
MAX_NUMBER = 2**53  # beyond this a float no longer counts bytes


def read_bytes(path: str | Path) -> bytes:
    """Returns a file's content.

    Raises:
        GraphError: it cannot be read, is empty or is larger than `MAX_FILE`.
    """
    try:
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE + 1)
    except OSError as error:
        raise GraphError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise GraphError(f"{path!r}: {error}") from None
    if len(content) > MAX_FILE:
        raise GraphError(f"{path}: larger than {format_bytes(MAX_FILE)}")
    if not content.strip():
        raise GraphError(f"{path}: the file is empty")
    return content


def decode_text(content: bytes, source: str) -> str:
    """Returns the text of UTF-8 bytes; raises GraphError, naming the source, where they are not."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise GraphError(f"{source}: not text (byte {error.start} is not UTF-8)") from None


def parse_number(text: str, what: str) -> float:
    """Returns a finite number that is at least 0.

    Args:
        text: the number as written.
        what: names file, line and field in the error.

    Raises:
        GraphError: not a number, negative, NaN or infinite.
    """
    try:
        value = float(text)
    except ValueError:
        raise GraphError(f"{what}: {text.strip()!r} is not a number") from None
    return check_number(value, what)


def check_number(value: float, what: str) -> float:
    """Returns the value if it is finite, at least 0 and at most 2**53; else raises GraphError."""
    if not 0 <= value <= MAX_NUMBER:
        reason = "negative" if value < 0 else "not finite" if value - value != 0 else "too large"
        raise GraphError(f"{what}: {value} is {reason}")
    return value
