"""Checkpoints: tensors, numbers and strings in a file that is whole or not there."""

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from simcore.atomic import write_whole
from simcore.errors import PlacewrightError, UsageError

FILE = "checkpoint.pt"
_FORMAT = "placewright-checkpoint/1"


def write(path: Path, identity: Mapping[str, str], state: Mapping[str, Any]) -> None:
    """Writes a state; whatever happens, the file is either the old or the new one.

    Args:
        path: of the file.
        identity: what the state belongs to.
        state: tensors, numbers, strings, and lists and dictionaries of them.
    """
    buffer = io.BytesIO()
    torch.save({"format": _FORMAT, "identity": dict(identity), "state": dict(state)}, buffer)
    write_whole(path, buffer.getvalue())


def read(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns (identity, state); a checkpoint holds data only, so nothing in it is executed.

    Raises:
        PlacewrightError: there is no such file, it is damaged, or it is not a checkpoint.
    """
    try:
        content = io.BytesIO(path.read_bytes())
        with zipfile.ZipFile(content) as archive:
            damaged = archive.testzip()  # torch writes checksums, and does not read them
        content.seek(0)
        whole = None if damaged else torch.load(content, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise PlacewrightError(f"{path}: there is no such checkpoint") from None
    except Exception as error:  # a damaged file breaks torch in many ways
        raise PlacewrightError(f"{path}: not a checkpoint: {type(error).__name__}") from None
    if damaged:
        raise PlacewrightError(f"{path}: damaged: {damaged} is not what was written")
    if not isinstance(whole, dict) or whole.get("format") != _FORMAT:
        raise PlacewrightError(f"{path}: not a checkpoint of the format {_FORMAT}")
    identity, state = whole.get("identity", {}), whole.get("state", {})
    if not (isinstance(identity, dict) and isinstance(state, dict)):
        raise PlacewrightError(f"{path}: not a checkpoint: its identity or state is no dictionary")
    return identity, state


def save(folder: Path, identity: Mapping[str, str], state: Mapping[str, Any]) -> None:
    """Writes the checkpoint of a run into its folder; `load` compares the identity."""
    write(folder / FILE, identity, state)


def load(folder: Path | None, identity: Mapping[str, str]) -> dict[str, Any]:
    """Reads the checkpoint of a run.

    Raises:
        PlacewrightError: there is no such file, it is not a checkpoint, or it is of something else.
    """
    if folder is None:
        raise UsageError("there is no folder to resume from")
    path = folder / FILE
    known, state = read(path)
    for name, value in identity.items():
        if known.get(name) != value:
            fields = _differing(known.get(name, ""), value)
            raise PlacewrightError(f"{path}: its {name} is not that of this run{fields}")
    return state


def _differing(known: str, wanted: str) -> str:
    """Names the fields of two JSON objects that differ; empty where they are none."""
    try:
        a, b = json.loads(known), json.loads(wanted)
    except ValueError:
        return ""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return ""
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return f": {', '.join(f'{n} {a.get(n)}, now {b.get(n)}' for n in names)}"
