"""The one place that knows numba's options, and the folder its machine code is cached in.

numba's disk cache does not notice an edit in another file's compiled function, so the folder is
named by a hash of all sources of this package: an edit anywhere gives a new folder.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])

# _nrt=False: no reference counts. The kernel allocates nothing, and counting references of the
# records it passes around made it ten times slower.
_OPTIONS: dict[str, Any] = {
    "cache": True,
    "nogil": True,
    "fastmath": False,
    "error_model": "numpy",
    "forceinline": True,
    "_nrt": False,
}


_INSIDE = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(function: Function) -> Function:
    """Compiles a function that only compiled code calls; typed as the function it is given.

    It is inlined, and has no entry from Python, which would take longer to compile than the rest;
    called from Python it ends the process.
    """
    return cast(Function, numba.njit(**_INSIDE)(function))


def compiled_apart(function: Function) -> Function:
    """Compiles a large function once for all its callers, which call it instead of inlining it."""
    return cast(Function, numba.njit(**_INSIDE | {"forceinline": False})(function))


def compiled_entry(function: Function) -> Function:
    """Compiles a function that Python calls, at its first call."""
    return cast(Function, numba.njit(**_OPTIONS)(function))


_HERE = Path(__file__).parent


def cache_folder() -> Path:
    """Returns the folder for this version of the kernel, inside numba's own where one is set."""
    digest = hashlib.sha256()
    for source in sorted(_HERE.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = f"placewright-kernel-{digest.hexdigest()[:16]}"
    base = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    if base:
        return Path(base) / folder
    beside = _HERE / "__pycache__"
    if os.access(beside if beside.exists() else _HERE, os.W_OK):
        return beside / folder
    return Path(tempfile.gettempdir()) / f"placewright-{os.getuid()}" / folder


@contextmanager
def keyed_cache() -> Iterator[None]:
    """Sets numba's cache folder while the kernel's functions are defined, and restores it after."""
    before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
    numba.config.CACHE_DIR = str(cache_folder())  # type: ignore[attr-defined]
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before  # type: ignore[attr-defined]
