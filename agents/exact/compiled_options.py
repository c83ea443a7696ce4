"""How numba compiles the exact planners: cached on disk, without the interpreter's lock."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compiles a function at its first call; typed as the function it is given.

    A file of compiled functions calls no other file's: numba's disk cache would miss an edit there.
    """
    return cast(
        Function, numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function)
    )
