"""Checkpoints: tensors, numbers and strings in a file that is whole or not there."""

import io
import os
import secrets
from pathlib import Path
from typing import Any

import torch

from simcore.errors import PlacewrightError


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes a state; whatever happens, the file is either the old or the new one."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    replace_file(path, buffer.getvalue())


def load(path: Path) -> dict[str, Any]:
    """Reads a state; a checkpoint can hold data only, so nothing in it is executed.

    Raises:
        PlacewrightError: there is no such file, or it is not a checkpoint.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise PlacewrightError(f"{path}: there is no such checkpoint") from None
    except OSError:
        raise
    except Exception as error:  # a damaged file breaks torch in many ways
        reason = str(error).partition("\n")[0][:120]
        raise PlacewrightError(f"{path}: not a checkpoint ({reason})") from None
    if not isinstance(state, dict):
        raise PlacewrightError(f"{path}: not a checkpoint (it holds a {type(state).__name__})")
    return state


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file beside and moves it into place, once it is on the disk."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
