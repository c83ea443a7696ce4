"""The one place that knows numba's options, and the folder its machine code is cached in.

numba's disk cache does not notice an edit in another file's compiled function, so the folder is
named by a hash of all sources of this package: an edit anywhere gives a new folder.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numba

compiled = numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")

_HERE = Path(__file__).parent


def cache_folder() -> Path:
    """Returns the folder for this version of the kernel, inside numba's own where one is set."""
    digest = hashlib.sha256()
    for source in sorted(_HERE.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = f"placewright-kernel-{digest.hexdigest()[:16]}"
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR) / folder
    beside = _HERE / "__pycache__"
    if os.access(beside if beside.exists() else _HERE, os.W_OK):
        return beside / folder
    return Path(tempfile.gettempdir()) / f"placewright-{os.getuid()}" / folder


@contextmanager
def keyed_cache() -> Iterator[None]:
    """Sets numba's cache folder while the kernel's functions are defined, and restores it after."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_folder())
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before
