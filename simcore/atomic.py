"""Bytes -> a file that is either the old one or the whole new one, never a part."""

import os
import secrets
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a file; interrupted, it leaves the old one as it was and nothing else.

    What is there and no file, such as ``/dev/null`` or a pipe, is written into, not replaced.

    Raises:
        OSError: it cannot be written.
        ValueError: a NUL in the path, or no name.
    """
    if Path(path).exists() and not Path(path).is_file():
        Path(path).write_bytes(content)
        return
    target = Path(os.path.realpath(path))  # through a symbolic link, not instead of it
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
