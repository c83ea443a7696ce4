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
import numpy as np
from numba.core import types
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import intrinsic

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


@intrinsic
def _promise_no_alias(_: Any) -> tuple[Any, Any]:
    def write(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        for argument in builder.function.args:
            if argument.type.is_pointer and "noalias" not in argument.attributes:
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.none(), write


def _promise_nothing() -> None:
    """Stands for the promise where nothing is compiled."""


def _find_lowest_bit(bits: np.uint64) -> int:
    """Stands for the processor's instruction where nothing is compiled."""
    return (int(bits) & -int(bits)).bit_length() - 1


_IS_PLAIN = bool(numba.config.DISABLE_JIT)  # type: ignore[attr-defined]

# Called first in a function: the arrays it is given do not overlap, as with C's restrict. Without
# that LLVM turns few of its loops into vector instructions.
no_alias: Any = _promise_nothing if _IS_PLAIN else _promise_no_alias

# Returns the place of the lowest bit that is set, of an unsigned number.
lowest_bit: Any = _find_lowest_bit if _IS_PLAIN else trailing_zeros


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
