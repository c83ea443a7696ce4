"""Where profiles, curves and cluster files lie: the user's folder first, then the shipped ones.

The user's folder is ``$PLACEWRIGHT_HOME`` if set, else ``~/.local/share/placewright``;
``placewright calibrate collect`` writes there. A file in it hides a shipped one of the same name.
A user's file that changes while the program runs is read again; a shipped one is read once.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, TypeAlias

from simcore.errors import ProfileError
from simcore.profile import (
    HardwareProfile,
    LinkProfile,
    parse_link,
    parse_profile,
    suggestion,
)

SHIPPED = Path(__file__).parent / "profiles"
HOME_VARIABLE = "PLACEWRIGHT_HOME"

Part: TypeAlias = Literal["devices", "links", "curves", "clusters"]
_Stamp: TypeAlias = tuple[int, int]  # modified at (ns), bytes

_chosen: ContextVar[str | None] = ContextVar("chosen", default=None)
_SHIPPED_FOLDERS: dict[Part, Path] = {
    "devices": SHIPPED / "devices",
    "links": SHIPPED / "links",
    "curves": SHIPPED / "curves",
    "clusters": Path(__file__).parent / "clusters",
}


def home() -> Path:
    """Returns the user's folder; it need not exist."""
    return Path(_home())


@contextmanager
def home_at(folder: Path) -> Iterator[None]:
    """Takes another folder for the user's while active."""
    token = _chosen.set(str(folder))
    try:
        yield
    finally:
        _chosen.reset(token)


def _home() -> str:
    chosen = _chosen.get() or os.environ.get(HOME_VARIABLE)
    return chosen or str(Path.home() / ".local" / "share" / "placewright")


def folders(part: Part) -> tuple[Path, Path]:
    """Returns the two folders that are searched for files of a part, the user's first."""
    return home() / part, _SHIPPED_FOLDERS[part]


def file_names(part: Part, suffix: str = ".json") -> list[str]:
    """Returns the names of the files of a part in either folder, without suffix, sorted."""
    return sorted({path.stem for folder in folders(part) for path in folder.glob(f"*{suffix}")})


def find_file(part: Part, file_name: str) -> Path:
    """Returns the path of a file of a part: the user's if there is one, else the shipped one's."""
    mine, shipped = folders(part)
    return mine / file_name if (mine / file_name).is_file() else shipped / file_name


def device_kinds() -> list[str]:
    """Returns the device kinds that have a profile, sorted."""
    return file_names("devices")


def link_kinds() -> list[str]:
    """Returns the link kinds that have a profile, sorted."""
    return file_names("links")


def load_profile(kind: str) -> HardwareProfile:
    """Returns the profile of a device kind.

    Raises:
        ProfileError: no such kind (the message lists them), or a malformed file.
    """
    return _load_profile(kind, *_place("devices", kind))


def load_link(kind: str) -> LinkProfile:
    """Returns the profile of a link kind.

    Raises:
        ProfileError: no such kind (the message lists them), or a malformed file.
    """
    return _load_link(kind, *_place("links", kind))


def _place(part: Part, kind: str) -> tuple[str, _Stamp | None]:
    """Returns the folder in which the kind's file is looked for, and the version of a user's file.

    Profiles are asked for in loops, so this costs one look at the disk and builds no `Path`.
    """
    mine = f"{_home()}/{part}"
    try:
        state = os.stat(f"{mine}/{kind}.json")
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return str(_SHIPPED_FOLDERS[part]), None
    return mine, (state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=256)
def _load_profile(kind: str, folder: str, _stamp: _Stamp | None) -> HardwareProfile:
    path = _known(kind, device_kinds(), folder, "device")
    return parse_profile(_content(path), path.name)


@functools.lru_cache(maxsize=256)
def _load_link(kind: str, folder: str, _stamp: _Stamp | None) -> LinkProfile:
    path = _known(kind, link_kinds(), folder, "link")
    return parse_link(_content(path), path.name)


def _known(kind: str, known: list[str], folder: str, what: str) -> Path:
    """Returns the path of a kind's file; refuses names that only the file system would accept."""
    if kind not in known:
        raise ProfileError(
            f"unknown {what} kind {kind!r}{suggestion(kind, known)}; known: {', '.join(known)}"
        )
    return Path(folder) / f"{kind}.json"


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from None
