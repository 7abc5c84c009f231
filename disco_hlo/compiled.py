"""How inner loops are compiled: by numba, arrays handed down as pointers, with a cache that cannot go stale.

Numba's own cache notices a change in the file of the compiled function, not in the files of the functions it calls, so
a search that calls the engine would go on running an old engine. Here the cache directory is named after the text of
all files of the function's package and of every package with compiled functions, whose code may be part of its own. It
lies in ``NUMBA_CACHE_DIR`` or the user's cache directory, never in the package, which may be read-only.

A numba function that takes an array takes nine machine words and counts references to it, which costs more than what
many inner functions do. So what Python calls makes pointers of its arrays once, and hands these down.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding
from numba import extending, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from disco_hlo.errors import DiscoError

Function = TypeVar("Function", bound=Callable[..., Any])
Int = int | np.int64
Ints = NDArray[np.int64]

_KNOWN_NUMBA = ((0, 61), (0, 68))
"""Of these versions the parts are known that ``inner_code`` and the cache's files are made of; of another one none are
asked for."""
_COMPILING = ("core", "estimator", "profiler", "search", "simulator")
"""Packages whose functions are compiled, also into each other's code."""
_INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "nogil": True}


def compiled(function: Function) -> Function:
    """``function`` compiled by numba at its first call, cached where a cache can be written.

    Importing a module that uses this compiles nothing. The result can be called from Python and
    from other compiled functions.

    Raises:
        DiscoError: the user has told numba to compile nothing.
    """
    _refuse_a_numba_that_compiles_nothing()
    directory = _cache_directory(_package_of(Path(function.__code__.co_filename)))
    # Its types know less than it does.
    njit: Any = functools.partial(numba.njit, nogil=True, no_cfunc_wrapper=True, **_pipeline("OuterCompiler"))
    if directory is None:
        return cast(Function, _of_any_value(njit()(function)))
    settings: Any = numba.config  # its names are made at run time
    previous = settings.CACHE_DIR
    settings.CACHE_DIR = str(directory)
    try:
        return cast(Function, _of_any_value(_uncached_where_that_fails(njit(cache=True)(function))))
    except RuntimeError:  # numba found no place that it can write to
        return cast(Function, _of_any_value(njit()(function)))
    finally:
        settings.CACHE_DIR = previous


def inner(function: Function) -> Function:
    """``function`` for compiled functions alone to call: nothing is made for Python, and what calls it is cached."""
    _refuse_a_numba_that_compiles_nothing()
    njit: Any = numba.njit
    return cast(Function, _of_any_value(njit(**_INNER, **_pipeline("InnerCompiler"))(function)))


def shared(module: ModuleType) -> None:
    """Let compiled functions call the functions of a module, which are plain Python and stay so for Python."""
    for function in vars(module).values():
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            extending.register_jitable(**_INNER, **_pipeline("InnerCompiler"))(function)


def _refuse_a_numba_that_compiles_nothing() -> None:
    settings: Any = numba.config
    if settings.DISABLE_JIT:
        raise DiscoError(
            "NUMBA_DISABLE_JIT is set: numba compiles nothing, and a search's inner loops do not run without. Unset it."
        )


def _pipeline(name: str) -> dict[str, Any]:
    """Numba's option for a pipeline of ``inner_code``; none where numba is not known to have what that needs."""
    if not _is_known_numba():
        return {}
    from disco_hlo import inner_code

    return {"pipeline_class": getattr(inner_code, name)}


def _is_known_numba() -> bool:
    short: tuple[int, int] = numba.version_info.short
    first, last = _KNOWN_NUMBA
    return first <= short <= last


def is_cached(module: str) -> bool:
    """Whether compiled code of the folder in which an imported module lies is in the cache."""
    directory, source = _directory_of(module), Path(str(sys.modules[module].__file__))
    return directory is not None and any(directory.glob(f"{source.parent.name}_*/*.nbc"))  # numba's own names


def is_ready(module: str, what: str) -> bool:
    """Whether all that ``what`` of a package needs is in the cache (:func:`note_ready`)."""
    mark = _ready_mark(module, what)
    return mark is not None and mark.exists()


def note_ready(module: str, what: str) -> None:
    """Note that all code that ``what`` needs, of the package that an imported module belongs to, has been compiled."""
    mark = _ready_mark(module, what)
    if mark is not None:
        with contextlib.suppress(OSError):
            mark.touch()


def can_be_ready(module: str) -> bool:
    """Whether what is compiled is kept, so that another process has it."""
    return _ready_mark(module, "") is not None


def _directory_of(module: str) -> Path | None:
    """Where the compiled code of an imported module's package lies; None where nothing can be written."""
    source = sys.modules[module].__file__
    return None if source is None else _cache_directory(_package_of(Path(source)))


def _ready_mark(module: str, what: str) -> Path | None:
    """An empty file beside the code; numba keeps code by where its source lies and for the processor, too."""
    directory = _directory_of(module)
    if directory is None:
        return None
    source = Path(str(sys.modules[module].__file__))
    kept_for = f"{source.resolve()} {source.stat().st_mtime_ns} {binding.get_host_cpu_name()} {what}"
    return directory / f"ready-{hashlib.sha256(kept_for.encode()).hexdigest()[:16]}"


def _name_files_by_types(file: Any) -> None:
    """Name the files of a function's compiled code after the types that it is for, and write each before the index
    names it.

    Numba numbers them. Where two processes compile a function for different types at once, both may take one number;
    who then asks for one of these gets the code for the other, which writes where it should not.
    """

    def save(key: object, data: object) -> None:
        digest = hashlib.sha256(repr(key).encode()).digest()
        name = file._data_name(int.from_bytes(digest[:7], "big"))
        file._save_data(name, data)
        file._save_index({**file._load_index(), key: name})

    file.save = save


def _uncached_where_that_fails(dispatcher: Any) -> Any:
    """The same function, compiled anew where what is cached is damaged, and not cached where the disk is full."""
    cache = dispatcher._cache
    if _is_known_numba():
        _name_files_by_types(cache._cache_file)
    load, save = cache.load_overload, cache.save_overload

    def load_or_none(signature: Any, target: Any) -> Any:
        try:
            return load(signature, target)
        except Exception:  # noqa: BLE001  pickle says of half a file what it likes
            with contextlib.suppress(OSError):
                cache.flush()
            return None

    def save_if_possible(signature: Any, made: Any) -> None:
        with contextlib.suppress(OSError):
            save(signature, made)

    cache.load_overload, cache.save_overload = load_or_none, save_if_possible
    return dispatcher


def _of_any_value(dispatcher: Any) -> Any:
    """The same function, compiled once for a type and not again for each constant it is called with."""
    template = dispatcher.get_call_template
    type_of: Any = numba.types.unliteral

    def without_values(arguments: Iterable[Any], named: Mapping[str, Any]) -> Any:
        plain = {name: type_of(value) for name, value in named.items()}
        return template(tuple(map(type_of, arguments)), plain)

    dispatcher.get_call_template = without_values
    return dispatcher


def _package_of(source: Path) -> Path:
    """The folder of the outermost package below ``disco_hlo`` that a file belongs to."""
    folder = source.parent
    while (folder.parent / "__init__.py").exists() and folder.parent.name != "disco_hlo":
        folder = folder.parent
    return folder


@functools.cache
def _cache_directory(package: Path) -> Path | None:
    """Where compiled functions of a package lie; None where nothing can be written."""
    digest = hashlib.sha256()
    try:
        for file in _sources(package):
            digest.update(file.read_bytes())
        directory = _base_directory() / digest.hexdigest()[:16]
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        return None
    return directory


def _sources(package: Path) -> list[Path]:
    """Every file that compiled code of the package may come from: its own, and those of all that compile."""
    here = Path(__file__).parent
    files = {Path(__file__), *(here / name for name in ("inner_code.py", "hlo/cost_model.py"))}
    for folder in (package, *map(_folder_of, _COMPILING)):
        files |= {*folder.rglob("*.py")}
    return sorted(files)


def _folder_of(name: str) -> Path:
    """Of a package of ours, which need not lie in the folder of ``disco_hlo``."""
    found = importlib.util.find_spec(f"disco_hlo.{name}")
    if found is None or found.origin is None:
        raise RuntimeError(f"disco_hlo.{name} has no folder")
    return Path(found.origin).parent


def _base_directory() -> Path:
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    if chosen:
        return Path(chosen)
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "disco_hlo" / "kernels"


class Row(Protocol):
    """64-bit integers by their places: an array, or a pointer to one."""

    def __getitem__(self, place: int, /) -> int:
        """What stands there."""

    def __setitem__(self, place: int, value: Int, /) -> None:
        """Write it."""


@intrinsic
def pointer_to(context: Any, address: Any) -> Any:
    """The 64-bit integers at an address."""
    del context, address

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def address_of(context: Any, pointer: Any) -> Any:
    """The address a pointer holds."""
    del context

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], context.get_value_type(signature.return_type))

    return types.int64(pointer), generate
