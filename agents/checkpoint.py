"""Checkpoints: tensors, numbers and strings in a file that is whole or not there."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from simcore.atomic import write_whole
from simcore.errors import PlacewrightError, UsageError

FILE = "checkpoint.pt"
_FORMAT = "placewright-checkpoint/1"


def save(folder: Path, identity: Mapping[str, str], state: Mapping[str, Any]) -> None:
    """Writes a state; whatever happens, the file is either the old or the new one.

    Args:
        folder: where the file lies.
        identity: what the state belongs to; `load` compares it.
        state: tensors, numbers, strings, and lists and dictionaries of them.
    """
    buffer = io.BytesIO()
    torch.save({"format": _FORMAT, "identity": dict(identity), "state": dict(state)}, buffer)
    write_whole(folder / FILE, buffer.getvalue())


def load(folder: Path | None, identity: Mapping[str, str]) -> dict[str, Any]:
    """Reads a state; a checkpoint holds data only, so nothing in it is executed.

    Raises:
        PlacewrightError: there is no such file, it is not a checkpoint, or it is of something else.
    """
    if folder is None:
        raise UsageError("there is no folder to resume from")
    path = folder / FILE
    try:
        whole = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise PlacewrightError(f"{path}: there is no such checkpoint") from None
    except Exception as error:  # a damaged file breaks torch in many ways
        raise PlacewrightError(f"{path}: not a checkpoint: {type(error).__name__}") from None
    if not isinstance(whole, dict) or whole.get("format") != _FORMAT:
        raise PlacewrightError(f"{path}: not a checkpoint of the format {_FORMAT}")
    for name, value in identity.items():
        if whole.get("identity", {}).get(name) != value:
            raise PlacewrightError(f"{path}: its {name} is not that of this run")
    state: dict[str, Any] = whole.get("state", {})
    return state
