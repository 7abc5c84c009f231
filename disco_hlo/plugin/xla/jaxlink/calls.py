"""Calls of what JAX compiled: watched in Python, at JAX's own speed where they are like those before."""

from __future__ import annotations

import functools
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink.requests import (
    CompileRequest,
    last_compile,
    unsupported,
    watch_compiles,
)

Execute = Callable[[Sequence[Any]], tuple[Any, Any]]
"""Runs one call: from its arguments to its results, and the token that is ready when the devices are done."""
Observer = Callable[["LoadedModule"], Execute | None]
"""Asked of every module that JAX loads to call it: what runs its calls, or None to leave it alone."""

_CALL_NAMES = {
    "pxla.UnloadedMeshExecutable": ("load",),
    "pxla.MeshExecutable": ("create_cpp_call", "unsafe_call"),
    "pxla.ExecuteReplicated": ("__call__",),
    "pjit": (
        "_pjit_call_impl_python",
        "_need_to_rebuild_with_fdo",
        "_cpp_pjit_cache_fun_only",
        "_cpp_pjit_cache_explicit_attributes",
    ),
    "stages.Compiled": ("__init__", "call"),
    "source_info_util": ("register_exclusion",),
}


@dataclass(frozen=True, slots=True)
class ArrayType:
    """An argument or result, over all devices."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int

    @property
    def is_number(self) -> bool:
        """Whether it is a single one, as a loss is, or a count of steps."""
        return math.prod(self.shape) == 1


def _types(avals: Iterable[Any]) -> list[ArrayType]:
    arrays = [aval for aval in avals if hasattr(aval, "shape") and hasattr(aval, "dtype")]
    return [
        ArrayType(tuple(one.shape), str(one.dtype), math.prod(one.shape) * one.dtype.itemsize)
        for one in arrays
    ]


class LoadedModule:
    """What JAX loaded of one compile, to call it. While it is watched, its calls go through Python."""

    def __init__(self, request: CompileRequest, mesh_executable: Any) -> None:
        self.request = request
        self.executable: LoadedExecutable = mesh_executable.xla_executable
        """What JAX would call."""
        self.takes = _types(mesh_executable.in_avals)
        self.returns = _types(mesh_executable.out_avals)
        self._mesh_executable = weakref.ref(mesh_executable)  # which owns us, by the stand-in
        self._ahead_of_time: weakref.WeakSet[Any] = weakref.WeakSet()
        self._raised = False

    def settle(self, executable: LoadedExecutable) -> None:
        """From the next call on JAX runs ``executable``, which has the same signature, by itself, as fast as stock."""
        _watched_modules.discard(self)
        mesh_executable = self._mesh_executable()
        if mesh_executable is None:
            return
        mesh_executable.xla_executable = executable
        mesh_executable.unsafe_call.xla_executable = executable
        if isinstance(inputs := mesh_executable.unsafe_call.in_handler, _Inputs):
            mesh_executable.unsafe_call.in_handler = inputs._original
        with _noting:
            if executable is not self.executable:
                _loaded.pop(mesh_executable, None)  # else that would keep what nobody runs any more
            for jaxpr in [
                one for one, known in _known_calls.items() if known.executable() is mesh_executable
            ]:
                del _known_calls[jaxpr]
        for compiled in list(self._ahead_of_time):
            compiled._call = None  # JAX makes another, now in C++
        if self._raised:
            # A call that raised has pinned its entry in these caches to Python.
            _, pjit, _ = _call_modules()
            pjit._cpp_pjit_cache_fun_only.clear()
            pjit._cpp_pjit_cache_explicit_attributes.clear()


_watched_modules: weakref.WeakSet[LoadedModule] = weakref.WeakSet()
_Loaded = tuple[LoadedExecutable, CompileRequest]
_loaded: weakref.WeakKeyDictionary[Any, _Loaded] = weakref.WeakKeyDictionary()
"""What each watched mesh executable was loaded with, and of which compile that is. JAX loads it once more without a
compile where arguments have the same shardings in other words: those of a script's arrays, and of a step's results."""
_wrapped: list[tuple[Any, str, Any]] = []
"""Functions of JAX's that ours are in the place of: whose, by which name, and the function."""


# JAX's Python path asks of every argument of every call where it lies and in which layout, and copies its handle: a
# millisecond for 100 of them. A call of a watched module needs neither where its arguments are like those before.

Facts = tuple[tuple[Any, ...], ...]
"""Of each argument all that JAX's choice of an executable depends on, besides its shape and element type."""


@dataclass(frozen=True)
class _KnownCall:
    """How JAX resolved a call of a watched module."""

    params: tuple[Any, ...]
    context: Any
    facts: Facts
    executable: weakref.ref[Any]
    constants: Sequence[Any]
    others: tuple[int, ...]
    """Arguments that do not lie as the executable takes them: typed keys, numpy arrays, what has to be moved."""


class _Arguments(threading.local):
    known: _KnownCall | None = None


_arguments = _Arguments()
_known_calls: weakref.WeakKeyDictionary[Any, _KnownCall] = weakref.WeakKeyDictionary()
"""By the jaxpr."""
_noting = threading.Lock()
_PLAIN = (np.ndarray, np.generic, bool, int, float, complex)


class _Inputs:
    """In the place of what brings arguments to where a watched executable takes them."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        known, _arguments.known = _arguments.known, None
        if known is None:
            return self._original(arguments)  # type: ignore[no-any-return]
        brought = list(arguments)
        if known.others:
            takes = (self._original.in_shardings, self._original.in_layouts)
            handler = type(self._original)(*([of[i] for i in known.others] for of in takes))
            for index, one in zip(known.others, handler([arguments[i] for i in known.others]), strict=True):
                brought[index] = one
        return brought

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _known_call(
    args: Sequence[Any], params: Mapping[str, Any], facts: Facts | None
) -> tuple[Any, Any, None, Sequence[Any]] | None:
    """What a call gives that is like the one before of the same watched module; None where it is not."""
    known = _known_calls.get(params["jaxpr"])
    if known is None or (executable := known.executable()) is None or _watched(executable) is None:
        return None
    if not all(map(operator.is_, known.params, _other_params(params))):
        return None
    if known.context != _trace_context() or known.facts != facts:
        return None
    _arguments.known = known
    try:
        return executable.unsafe_call(*known.constants, *args), executable, None, known.constants
    finally:
        _arguments.known = None


def _note_call(
    args: Sequence[Any],
    params: Mapping[str, Any],
    facts: Facts | None,
    executable: Any,
    constants: Sequence[Any],
) -> None:
    inputs = executable.unsafe_call.in_handler
    if facts is None or executable.unsafe_call.mut is not None or not isinstance(inputs, _Inputs):
        return
    kept = [one for i, one in enumerate((*constants, *args)) if i in executable.unsafe_call.kept_var_idx]
    takes = zip(kept, inputs.in_shardings, inputs.in_layouts, strict=True)
    others = tuple(i for i, one in enumerate(takes) if not _lies_so(*one))
    own = weakref.ref(executable)
    noted = _KnownCall(_other_params(params), _trace_context(), facts, own, constants, others)
    with _noting:
        _known_calls[params["jaxpr"]] = noted


def _other_params(params: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(value for name, value in params.items() if name != "jaxpr")


def _facts_of(args: Sequence[Any]) -> Facts | None:
    """The facts of arguments; None where there are some that we do not know."""
    array = _array_type()
    try:
        return tuple([
            (one.sharding, one._committed, one._pjrt_layout) if type(one) is array else _fact_of_other(one)
            for one in args
        ])  # fmt: skip
    except (AttributeError, RuntimeError):  # of another kind, or deleted: JAX says so
        return None


def _fact_of_other(argument: Any) -> tuple[Any, ...]:
    if isinstance(argument, _PLAIN):
        return (type(argument),)
    base = argument._base_array  # of a typed key
    return (type(argument), base.sharding, base._committed, base._pjrt_layout)


@functools.cache
def _array_type() -> Any:
    from jaxlib import _jax

    return _jax.ArrayImpl


def _trace_context() -> Any:
    from jax._src import config

    return config.trace_context(), config.enable_pgle.value


def shards_of(argument: Any) -> list[Any]:
    """The shards of a call's argument on local devices, as they are now.

    An array keeps the list that it made when it was first asked. That of a ``jax.Ref`` has other buffers after each
    call that writes to it, and its list would be of those that are gone, for us as for the script after us.
    """
    own = _of_one_device(argument)
    own.__dict__.pop("addressable_shards", None)
    try:
        return list(own.addressable_shards)
    finally:
        own.__dict__.pop("addressable_shards", None)


def _of_one_device(argument: Any) -> Any:
    """The same array over the one device that it is on, where JAX only says that it is on those of other processes,
    too: what it brings from a process's own device to the only one there, a key or a number that every process makes
    for itself, gets a sharding over all of them, and then has no shards by JAX's own function."""
    from jax.core import ShapedArray
    from jax.sharding import SingleDeviceSharding

    sharding, arrays = argument.sharding, argument._arrays
    if sharding.num_devices == 1 or len(arrays) != 1 or arrays[0].sharding.num_devices == 1:
        return argument
    [device] = sharding.addressable_devices
    of_shard = ShapedArray(sharding.shard_shape(argument.shape), argument.dtype)
    return type(argument)(
        of_shard, SingleDeviceSharding(device), [argument], committed=True, _skip_checks=True
    )


def _lies_so(argument: Any, sharding: Any, layout: Any) -> bool:
    return layout is None and type(argument) is _array_type() and argument.sharding == sharding


class _StandIn:
    """In the place of an executable that is watched, for ``ExecuteReplicated``, which calls this one method of it."""

    def __init__(self, module: LoadedModule, execute: Execute) -> None:
        self.module = module
        self._execute = execute

    def execute_sharded(self, arguments: Sequence[Any], with_tokens: bool = False) -> Any:
        results, token = self._execute(arguments)
        return _ResultsWithToken(results, token) if with_tokens else results

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module.executable, name)


@dataclass(frozen=True)
class _ResultsWithToken:
    """Results whose token was taken before JAX takes it."""

    results: Any
    token: Any

    def consume_token(self) -> Any:
        return self.token

    def consume_with_handlers(self, *args: Any, **kwargs: Any) -> Any:
        return self.results.consume_with_handlers(*args, **kwargs)


_UNFINISHED = SimpleNamespace(is_enabled=lambda: True, is_fdo_consumed=lambda: False)
"""As JAX's own profiler (PGLE) while it is at work: JAX drops the C++ entry of a call that comes with one."""


def watch_calls(observer: Observer) -> None:
    """Show ``observer`` what JAX loads from now on, of compiles that ``install`` sees. Again: replaces it.

    What JAX itself compiles anew by a profile (PGLE) is left alone.

    Raises:
        UnsupportedError: this jax calls executables in another way than those known here.
    """

    pxla, pjit, stages = _call_modules()
    unwatch_calls()
    watch_compiles(watched=True)
    _leave_out_our_frames()

    def load(original: Callable[..., Any], unloaded: Any) -> Any:
        mesh_executable = original(unloaded)
        if unloaded.pgle_profiler is None:
            _show(observer, mesh_executable)
        return mesh_executable

    def call_in_python(original: Callable[..., Any], *args: Any, **params: Any) -> Any:
        try:
            facts = _facts_of(args)  # before the call, which may take the arguments over
            known = _known_call(args, params, facts)
            results, executable, profiler, constants = known or original(*args, **params)
        except BaseException:
            for module in list(_watched_modules):
                module._raised = True
            raise
        if profiler is None and _watched(executable) is not None:
            profiler = _UNFINISHED
            if known is None:
                _note_call(args, params, facts, executable, constants)
        return results, executable, profiler, constants

    def create_cpp_call(original: Callable[..., Any], executable: Any, params: Any) -> Any:
        return None if _watched(executable) else original(executable, params)

    def made_ahead_of_time(
        original: Callable[..., Any], compiled: Any, executable: Any, *a: Any, **kw: Any
    ) -> None:
        original(compiled, executable, *a, **kw)
        if (module := _watched(executable)) is not None:
            module._ahead_of_time.add(compiled)

    _wrap(pxla.UnloadedMeshExecutable, "load", load)
    _wrap(pjit, "_pjit_call_impl_python", call_in_python)
    _wrap(pxla.MeshExecutable, "create_cpp_call", create_cpp_call)
    _wrap(stages.Compiled, "__init__", made_ahead_of_time)


def unwatch_calls() -> None:
    """Give JAX its own functions back; what is still watched goes on with its own executable. May be repeated."""
    watch_compiles(watched=False)
    while _wrapped:
        setattr(*_wrapped.pop())
    for module in list(_watched_modules):
        module.settle(module.executable)


@functools.cache
def _leave_out_our_frames() -> None:
    """Have JAX name none of our lines where it says which of the user's a traced op is from: a call that is watched
    is traced inside of ours, and a module is to be the same with and without us."""
    from jax._src import source_info_util

    source_info_util.register_exclusion(str(Path(__file__).parents[2]) + os.sep)


def _show(observer: Observer, mesh_executable: Any) -> None:
    executable, last = mesh_executable.xla_executable, last_compile()
    with _noting:
        known = [*_loaded.values()] if last is None or last[0] is not executable else [last]
        last = next((one for one in known if one[0] is executable), None)
    if last is None:
        return
    try:
        call = mesh_executable.unsafe_call
        module = LoadedModule(last[1], mesh_executable)
        execute = observer(module)
        if execute is not None:
            with _noting:  # of others the request would keep XLA's default
                _loaded[mesh_executable] = last
            call.xla_executable = _StandIn(module, execute)
            call.in_handler = _Inputs(call.in_handler)
            _watched_modules.add(module)
    except Exception as error:  # no failure of ours may stop the training
        LOGGER.warning("calls of %s are not watched: %s", last[1].module_name, one_line(error))


def _watched(mesh_executable: Any) -> LoadedModule | None:
    stand_in = getattr(getattr(mesh_executable, "_unsafe_call", None), "xla_executable", None)
    return stand_in.module if isinstance(stand_in, _StandIn) else None


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Put ``wrapper``, which takes the original before its arguments, in the place of a function of JAX's."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, wrapped)
    _wrapped.append((owner, name, original))


def _call_modules() -> tuple[Any, Any, Any]:
    from jax._src import pjit, source_info_util, stages
    from jax._src.interpreters import pxla

    modules = {"pxla": pxla, "pjit": pjit, "stages": stages, "source_info_util": source_info_util}
    for owner, names in _CALL_NAMES.items():
        module, _, class_name = owner.partition(".")
        where = getattr(modules[module], class_name, None) if class_name else modules[module]
        for name in names:
            if not hasattr(where, name):
                raise UnsupportedError(unsupported(f"{owner}.{name} is missing"))
    return pxla, pjit, stages
