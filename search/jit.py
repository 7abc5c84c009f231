"""How the search compiles its inner loops: numba, cached on disk under the text of all it is made of.

Numba's cache looks at the file of the compiled function alone. A move calls functions of other
files, so the cache directory is named after all files of the search and the simulator.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

import disco_hlo.simulator as simulator

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """``function`` compiled by numba at its first call, cached where a cache can be written."""
    directory = _cache_directory()
    if directory is None:
        return cast(Function, numba.njit(nogil=True)(function))
    previous = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(directory)
    try:
        return cast(Function, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba found no place that it can write to
        return cast(Function, numba.njit(nogil=True)(function))
    finally:
        numba.config.CACHE_DIR = previous


@cache
def _cache_directory() -> Path | None:
    digest = hashlib.sha256()
    try:
        for package in (Path(__file__).parent, Path(str(simulator.__file__)).parent):
            for file in sorted(package.rglob("*.py")):
                digest.update(file.read_bytes())
        directory = _base_directory() / digest.hexdigest()[:16]
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    return directory


def _base_directory() -> Path:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "disco_hlo" / "kernels"
