"""Trace files of any size: the values of a JSON document one by one, in bounded memory.

Chrome traces are an object whose ``traceEvents`` is a long list, or that list alone. Values are
decoded one at a time from a window over the file; what is wrong is named with its byte offset. Raw
control characters inside strings are a known fault of profilers and are read as they are.

The window is decoded as Latin-1, so that a character is a byte; `text_of` gives the real text.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from simcore.errors import MeasurementError

CHUNK = 1 << 20  # bytes read at once
LARGEST = 64 << 20  # bytes of one value; no event is near it
_SPACE = " \t\r\n"
EVENTS = "traceEvents"


def text_of(latin: str) -> str:
    """Returns the text of a string that was decoded as Latin-1."""
    return latin.encode("latin-1", "replace").decode("utf-8", "replace")


def stream_trace(
    path: Path, progress: Callable[[int], None] = lambda _: None
) -> Iterator[tuple[str, Any]]:
    """Yields (key, value) of a trace: each event with the key ``traceEvents``, others once.

    Args:
        path: the file; one that ends in ``.gz`` is unpacked on the way.
        progress: told the bytes read so far, after each chunk.

    Raises:
        MeasurementError: naming the file, the byte offset and what is wrong.
    """
    try:
        with _opened(path) as file:
            yield from _Window(file, str(path), progress).document()
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise MeasurementError(f"{path}: cannot be read: {reason}") from None


def _opened(path: Path) -> IO[bytes]:
    """Opens a file; of a gzipped one, bytes are counted in what it unpacks to."""
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


class _Window:
    """A part of the file, decoded, and a place in it."""

    def __init__(self, file: IO[bytes], name: str, progress: Callable[[int], None]) -> None:
        self._file, self._name, self._progress = file, name, progress
        self._text = ""
        self._at = 0
        self._before = 0  # bytes of the file before the window
        self._ended = False
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def document(self) -> Iterator[tuple[str, Any]]:
        first = self._next()
        if first == "[":
            yield from self._list()
        elif first == "{":
            yield from self._object()
        else:
            raise self._error("a trace begins with { or [", back=len(first))
        if self._peek():
            raise self._error("more after the end of the trace; was it written twice?")

    def _object(self) -> Iterator[tuple[str, Any]]:
        if self._peek() == "}":
            self._at += 1
            return
        while True:
            key = self._value()
            if not isinstance(key, str):
                raise self._error("a key must be a string")
            self._expect(":")
            if key == EVENTS and self._peek() == "[":
                self._at += 1
                yield from self._list()
            else:
                yield key, self._value()
            if self._expect(",}") == "}":
                return

    def _list(self) -> Iterator[tuple[str, Any]]:
        if self._peek() == "]":
            self._at += 1
            return
        while True:
            if self._peek() not in ("{", ""):
                raise self._error("an event must be an object")
            yield EVENTS, self._value()
            if self._expect(",]") == "]":
                return

    def _value(self) -> Any:
        """Decodes one value; reads on as long as more text moves the fault."""
        self._peek()
        fault = -1
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except (json.JSONDecodeError, RecursionError) as error:
                position = getattr(error, "pos", self._at)
                stuck = position == fault and position < len(self._text) - CHUNK
                if self._ended or stuck or len(self._text) - self._at > LARGEST:
                    raise self._fault(error, position) from None
                fault = position
                self._read()
                continue
            if end == len(self._text) and not self._ended:
                self._read()  # a number may go on
                continue
            self._at = end
            return value

    def _fault(self, error: Exception, position: int) -> MeasurementError:
        reason = getattr(error, "msg", "nested too deeply")
        near_end = position >= len(self._text.rstrip()) or reason.startswith("Unterminated")
        if self._ended and near_end:
            return self._error(f"cut off ({reason}, begun at byte {self._before + self._at})",
                               at=position)  # fmt: skip
        return self._error(f"{reason}: damaged or written by two processes at once", at=position)

    def _expect(self, allowed: str) -> str:
        found = self._next()
        if not found:
            raise self._error(f"cut off: {' or '.join(allowed)} is missing")
        if found not in allowed:
            wanted = " or ".join(allowed)
            raise self._error(
                f"{wanted} expected, not {found!r}: damaged or written by two processes at once",
                back=1,
            )
        return found

    def _next(self) -> str:
        found = self._peek()
        self._at += len(found)
        return found

    def _peek(self) -> str:
        """Returns the next character that is no space, "" at the end."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if self._ended:
                return ""
            self._read()

    def _read(self) -> None:
        chunk = self._file.read(CHUNK)
        self._ended = not chunk
        self._before += self._at
        self._text = self._text[self._at :] + chunk.decode("latin-1")
        self._at = 0
        self._progress(self._before + len(self._text))

    def _error(self, reason: str, *, at: int | None = None, back: int = 0) -> MeasurementError:
        offset = self._before + (self._at if at is None else at) - back
        return MeasurementError(f"{self._name}: byte {offset}: {reason}")
