"""How the estimator compiles its inner loops: numba, cached on disk under the text of all its files.

Numba's own cache looks at the file of the compiled function alone, and would go on running an old version of
what it calls. So the cache directory is named after the text of the whole package.
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

Function = TypeVar("Function", bound=Callable[..., Any])

_FAST = {"reassoc", "contract", "nsz", "arcp"}


def compiled(function: Function) -> Function:
    """``function`` compiled by numba at its first call, cached where a cache can be written."""
    return _jit(function, fastmath=False)


def compiled_fast(function: Function) -> Function:
    """The same, with sums taken in any order (the same one every time): many numbers at once instead of one."""
    return _jit(function, fastmath=_FAST)


def _jit(function: Function, **options: Any) -> Function:
    directory = _cache_directory()
    if directory is None:
        return cast(Function, numba.njit(**options)(function))
    settings: Any = numba.config  # its names are made at run time
    previous = settings.CACHE_DIR
    settings.CACHE_DIR = str(directory)
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # numba found no place that it can write to
        return cast(Function, numba.njit(**options)(function))
    finally:
        settings.CACHE_DIR = previous


@cache
def _cache_directory() -> Path | None:
    digest = hashlib.sha256()
    try:
        for file in sorted(Path(__file__).parent.glob("*.py")):
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
