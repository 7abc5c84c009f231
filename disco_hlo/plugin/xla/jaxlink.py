"""Where the plugin meets JAX: the one file that touches private jax names.

Four things of stock JAX are used, without a fork:

* ``jax._src.compiler.compile_or_get_cached``, which every ``jit``, ``shard_map`` and ``pmap`` compile goes
  through, is wrapped: a compile becomes a :class:`CompileRequest`, handed to the plugin's handler.
* the HLO hook (``jax.extend.xla``, stage POST_SCHEDULER) shows a module just before code generation and may
  replace it. It does nothing except during a compile of ours (``compiles``). Where the structure of a step is to
  change, it is also registered at stage PRE_SCHEDULER: on GPU after sharding and before layouts and fusion, on CPU
  after the last pass, so that there the fusing and combining passes are off for such compiles alone.
* ``compiler.backend_compile_and_load`` compiles past the persistent compilation cache, whose key knows
  nothing of hooks.
* ``pxla.UnloadedMeshExecutable.load`` gives what JAX will call. Only where calls are watched (:func:`watch_calls`), a
  stand-in for its executable sees each call; how that is kept off JAX's C++ path, and given back to it, is told in
  ``docs/calls.md``.

(DisCo, section 5: the module that enacts the optimized strategy inside the framework's compiler.)
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import io
import logging
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from disco_hlo.errors import UnsupportedError, is_shared
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.xla import hook
from disco_hlo.plugin.xla.executables import LoadedExecutable

Handler = Callable[["CompileRequest"], LoadedExecutable | None]
CompileOptionValue = str | bool | int | float

_HOOK_NAME = "disco-hlo"
_WRAPPED = "_disco_hlo_original"
_REQUEST_ARGUMENTS = (
    "backend",
    "computation",
    "devices",
    "compile_options",
    "host_callbacks",
    "executable_devices",
)
EARLY, LATE = "PRE_SCHEDULER", "POST_SCHEDULER"
"""Stages of the hook: before XLA lays out, fuses and orders; when all is decided."""
_joining = threading.Lock()
_job: DistributedJob | None = None
"""The last one, kept to tell a client from that of the next job."""
_registering = threading.Lock()
_registered: set[tuple[str, str]] = set()
_COMPILE_ARGUMENTS = ("backend", "module", "executable_devices", "options", "host_callbacks")


@dataclass(eq=False)
class CompileRequest:
    """One compile that JAX asked for: what it would compile, on which devices, and how."""

    module_name: str
    """Name of the module, for instance ``jit_train_step``."""
    backend: Any
    """The PJRT client."""
    mlir_module: Any
    """The StableHLO module. Never changed."""
    devices: tuple[Any, ...]
    """Every device the module runs on, in partition order, those of other processes included."""
    options: Any
    """jaxlib CompileOptions. Never changed; copies are."""
    host_callbacks: Sequence[Any]
    executable_devices: Any
    """jaxlib DeviceList."""
    _compile_default: Callable[[], LoadedExecutable] = field(repr=False)
    positive: frozenset[int] | None = None
    """Entry parameters whose made-up values have to be positive; None: all. Whoever runs the step sets it, before the
    first run, to what the step's graph says, and the same on every rank."""
    index_bounds: Mapping[int, int] = field(default_factory=dict)
    """Below what the made-up values must stay of each entry parameter that is read as an index; other integers are 0
    or 1. Set together with :attr:`positive`."""
    equal: frozenset[int] = frozenset()
    """Entry parameters whose made-up values have to be equal on all devices. Set together with :attr:`positive`."""
    tuner_results: Path | None = None
    """Where compiles of our own keep what XLA:GPU's autotuner picked, and find it again; None: nowhere."""
    _default: LoadedExecutable | None = field(default=None, init=False, repr=False)

    @functools.cached_property
    def stablehlo(self) -> bytes:
        """``mlir_module`` as MLIR bytecode."""
        written = io.BytesIO()
        self.mlir_module.operation.write_bytecode(written)
        return written.getvalue()

    @functools.cached_property
    def digest(self) -> str:
        """Of what is compiled, for which devices, by which options of the script's; not of where the script has it."""
        options = sorted((name, str(value)) for name, value in self.options.env_option_overrides)
        text = f"{[device.id for device in self.devices]} {options} {self.mlir_module}"
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def local_devices(self) -> tuple[Any, ...]:
        """The devices of this process, in partition order."""
        here = self.backend.process_index()
        return tuple(device for device in self.devices if device.process_index == here)

    @property
    def process_indices(self) -> tuple[int, ...]:
        """Process indices that take part, ascending."""
        return tuple(sorted({device.process_index for device in self.devices}))

    def call_default(self) -> LoadedExecutable:
        """Compile as JAX would without us, persistent cache included. Later calls return the same."""
        if self._default is None:
            with hook.ordinary_compile(self.module_name):
                self._default = self._compile_default()
        return self._default


# --- interception ---------------------------------------------------------------------------------


class _Ours(threading.local):
    depth = 0


_ours = _Ours()


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Mark what this thread compiles as the plugin's own, so that it is not intercepted.

    The handler's thread is marked already; a thread that the handler starts must mark itself.
    """
    _ours.depth += 1
    try:
        yield
    finally:
        _ours.depth -= 1


def install(handler: Handler) -> None:
    """Hand every compile of this process to ``handler``: it returns an executable, or None for XLA's default.

    An exception of the handler is logged and the default compiled. Installing again replaces the handler.

    Raises:
        UnsupportedError: this jax lacks the hook or compiles by other functions than those known here.
    """
    compiler = compiler_module()
    _hook_extension()
    uninstall()
    original = compiler.compile_or_get_cached
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile_or_get_cached(*args: Any, **kwargs: Any) -> LoadedExecutable:
        if _ours.depth:
            return original(*args, **kwargs)
        try:
            arguments = signature.bind(*args, **kwargs).arguments
            request = _request(arguments, lambda: original(*args, **kwargs))
        except Exception as error:  # a compile that we do not understand is JAX's alone
            LOGGER.warning("a module runs as XLA compiles it: %s", one_line(error))
            return original(*args, **kwargs)
        executable = _ask(handler, request)
        if executable is None:
            executable = request.call_default()
        if _observer is not None:
            _compiled.last = (executable, request)
        return executable

    setattr(compile_or_get_cached, _WRAPPED, original)
    compiler.compile_or_get_cached = compile_or_get_cached


def uninstall() -> None:
    """Give JAX its own compile function back. Does nothing if it was not wrapped."""
    compiler = compiler_module()
    compiler.compile_or_get_cached = getattr(
        compiler.compile_or_get_cached, _WRAPPED, compiler.compile_or_get_cached
    )


def only_compiles() -> bool:
    """Whether JAX does no more than compile: neither keeps the executable nor compiles anew by a profile of its own."""
    import jax

    return not jax.config.jax_compilation_cache_dir and not jax.config.jax_enable_pgle


def _ask(handler: Handler, request: CompileRequest) -> LoadedExecutable | None:
    try:
        with ours():
            return handler(request)
    except Exception as error:  # no failure of ours may stop the training
        told = is_shared(error) and request.backend.process_index() != request.process_indices[0]
        level = logging.DEBUG if told else logging.WARNING
        LOGGER.log(
            level, "%s runs as XLA compiles it: %s", request.module_name, one_line(error), exc_info=True
        )
        return None


def _request(arguments: Mapping[str, Any], compile_default: Callable[[], LoadedExecutable]) -> CompileRequest:
    module = arguments["computation"]
    return CompileRequest(
        module_name=str(module.operation.attributes["sym_name"].value),
        backend=arguments["backend"],
        mlir_module=module,
        devices=tuple(np.asarray(arguments["devices"]).flatten()),
        options=arguments["compile_options"],
        host_callbacks=arguments["host_callbacks"],
        executable_devices=arguments["executable_devices"],
        _compile_default=compile_default,
    )


def compiler_module() -> Any:
    """jax's own module of compile functions. Raises :class:`UnsupportedError` where they are not those known here."""
    from jax._src import compiler

    expected = {"compile_or_get_cached": _REQUEST_ARGUMENTS, "backend_compile_and_load": _COMPILE_ARGUMENTS}
    for name, wanted in expected.items():
        function = getattr(compiler, name, None)
        if function is None:
            raise UnsupportedError(unsupported(f"jax._src.compiler.{name} is missing"))
        missing = set(wanted) - set(inspect.signature(function).parameters)
        if missing:
            lacking = ", ".join(sorted(missing))
            raise UnsupportedError(unsupported(f"jax._src.compiler.{name} takes no {lacking}"))
    return compiler


def unsupported(what: str) -> str:
    """What an error says of a jax that lacks ``what``."""
    import jax

    return f"jax {jax.__version__} is not supported: {what}; use jax 0.10.2 to 0.12"


# --- the HLO hook ---------------------------------------------------------------------------------


def _hook_extension() -> Any:
    try:
        import jax.extend.xla as extension
    except ImportError as error:
        raise UnsupportedError(unsupported("jax.extend.xla is missing")) from error
    if not hasattr(extension, "register_hlo_module_transformation"):
        raise UnsupportedError(unsupported("jax.extend.xla.register_hlo_module_transformation is missing"))
    return extension


def register_hook(backend: Any, stage_name: str) -> None:
    """Register the hook for the platform of ``backend``, once. That exists by now: nothing can deadlock."""
    platform = {"gpu": "cuda"}.get(backend.platform, backend.platform)
    with _registering:
        if (platform, stage_name) in _registered:
            return
        if platform not in ("cpu", "cuda"):
            raise UnsupportedError(f"platform {platform} is not supported: expected cpu or cuda")
        extension = _hook_extension()
        stage = extension.PipelineStage[stage_name]
        callback = hook.on_module if stage_name == LATE else hook.on_early_module
        # Each stage has a name of its own: early versions of the hook keep one callback per name.
        name = _HOOK_NAME if stage_name == LATE else f"{_HOOK_NAME}-structure"
        if platform == "cuda" and _jax_version() < (0, 11):
            import jaxlib._xla as _xla

            _xla.register_xla_transform_c_api(backend, name, stage.value, callback)
        else:
            extension.register_hlo_module_transformation(callback, name=name, stage=stage, platforms=platform)
        _registered.add((platform, stage_name))


# --- a compile past the cache ---------------------------------------------------------------------


def compile_past_cache(
    request: CompileRequest, module: Any, extra: Mapping[str, CompileOptionValue]
) -> LoadedExecutable:
    """Compile ``module`` as the request would be, with debug options for this compile alone."""
    compiler = compiler_module()
    options = copy.deepcopy(request.options)
    options.env_option_overrides = [*options.env_option_overrides, *extra.items()]
    if request.tuner_results is not None:
        _keep_tuner_results(options.executable_build_options.debug_options, request.tuner_results)
    with ours():
        return compiler.backend_compile_and_load(
            backend=request.backend,
            module=module,
            executable_devices=request.executable_devices,
            options=options,
            host_callbacks=request.host_callbacks,
        )


def _keep_tuner_results(debug_options: Any, directory: Path) -> None:
    """As ``XLA_FLAGS=--xla_gpu_per_fusion_autotune_cache_dir``. The user's own directory stays, unless this rank may
    only read it, as JAX has it on all ranks but the first: each rank tunes a share, and nobody else keeps that."""
    from jaxlib.xla_client import AutotuneCacheMode

    option, mode = "xla_gpu_per_fusion_autotune_cache_dir", "xla_gpu_experimental_autotune_cache_mode"
    if getattr(debug_options, option) and getattr(debug_options, mode) != AutotuneCacheMode.READ:
        return
    setattr(debug_options, option, str(directory))
    writable = os.access(directory, os.W_OK)
    setattr(debug_options, mode, AutotuneCacheMode.UPDATE if writable else AutotuneCacheMode.READ)


def renamed(stablehlo: bytes, name: str) -> Any:
    """A copy of a module, in an MLIR context of its own: several threads may compile theirs at once."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    with mlir.make_ir_context() as context:
        module = ir.Module.parse(stablehlo, context=context)
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
    return module


def array_handler(like: Any) -> Any:
    """What makes an array like this one, over all its devices, of an output that an execution leaves."""
    from jax._src.interpreters.pxla import global_aval_to_result_handler

    return global_aval_to_result_handler(like.aval, like.sharding, True)


# --- calls ----------------------------------------------------------------------------------------

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
}
_observer: Observer | None = None


class _Compiled(threading.local):
    last: tuple[LoadedExecutable, CompileRequest] | None = None


_compiled = _Compiled()
"""The last compile of this thread, until JAX loads what came of it."""

ArrayFacts = tuple[tuple[int, ...], str, int]
"""Shape, element type and size in bytes."""


def _facts(avals: Iterable[Any]) -> list[ArrayFacts]:
    arrays = [aval for aval in avals if hasattr(aval, "shape") and hasattr(aval, "dtype")]
    return [
        (tuple(aval.shape), str(aval.dtype), int(np.prod(aval.shape, dtype=np.int64)) * aval.dtype.itemsize)
        for aval in arrays
    ]


class LoadedModule:
    """What JAX loaded of one compile, to call it. While it is watched, its calls go through Python."""

    def __init__(self, request: CompileRequest, mesh_executable: Any) -> None:
        self.request = request
        self.executable: LoadedExecutable = mesh_executable.xla_executable
        """What JAX would call."""
        self.takes = _facts(mesh_executable.in_avals)
        self.returns = _facts(mesh_executable.out_avals)
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


class _Unfinished:
    """As JAX's own profiler (PGLE) while it is at work: JAX drops the C++ entry of a call that comes with one."""

    def is_enabled(self) -> bool:
        return True

    def is_fdo_consumed(self) -> bool:
        return False


def watch_calls(observer: Observer) -> None:
    """Show ``observer`` what JAX loads from now on, of compiles that :func:`install` sees. Again: replaces it.

    What JAX itself compiles anew by a profile (PGLE) is left alone.

    Raises:
        UnsupportedError: this jax calls executables in another way than those known here.
    """
    global _observer
    pxla, pjit, stages = _call_modules()
    unwatch_calls()
    _observer = observer
    unfinished = _Unfinished()

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
            profiler = unfinished
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
    global _observer
    _observer = None
    pxla, pjit, stages = _call_modules()
    for owner, name in (
        (pxla.UnloadedMeshExecutable, "load"),
        (pjit, "_pjit_call_impl_python"),
        (pxla.MeshExecutable, "create_cpp_call"),
        (stages.Compiled, "__init__"),
    ):
        function = getattr(owner, name)
        setattr(owner, name, getattr(function, _WRAPPED, function))
    for module in list(_watched_modules):
        module.settle(module.executable)


def _show(observer: Observer, mesh_executable: Any) -> None:
    last, _compiled.last = _compiled.last, None
    if _ours.depth or last is None or last[0] is not mesh_executable.xla_executable:
        return
    try:
        call = mesh_executable.unsafe_call
        module = LoadedModule(last[1], mesh_executable)
        execute = observer(module)
        if execute is not None:
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

    setattr(wrapped, _WRAPPED, original)
    setattr(owner, name, wrapped)


def _call_modules() -> tuple[Any, Any, Any]:
    from jax._src import pjit, stages
    from jax._src.interpreters import pxla

    modules = {"pxla": pxla, "pjit": pjit, "stages": stages}
    for owner, names in _CALL_NAMES.items():
        module, _, class_name = owner.partition(".")
        where = getattr(modules[module], class_name, None) if class_name else modules[module]
        for name in names:
            if not hasattr(where, name):
                raise UnsupportedError(unsupported(f"{owner}.{name} is missing"))
    return pxla, pjit, stages


# --- what this jax does ------------------------------------------------------------------------------


def keeps_donation() -> bool:
    """Whether a module that the hook replaces keeps its donated arguments (jax 0.11 and later)."""
    return _jax_version() >= (0, 11)


def _jax_version() -> tuple[int, ...]:
    import jax

    return tuple(jax.__version_info__)


# --- the job --------------------------------------------------------------------------------------


def jit_is_disabled() -> bool:
    """Whether ``jax_disable_jit`` is on for the whole process. (JAX switches it off for the thread that compiles an op,
    so nobody sees here what the script has set for a thread.)"""
    from jax._src import config

    switch = getattr(config, "disable_jit", None)
    return bool(getattr(switch, "get_global", bool)())


def profiler_runs() -> bool:
    """Whether the script's own ``jax.profiler`` trace is under way; False where this jax does not say."""
    from jax._src import profiler

    state = getattr(profiler, "_profile_state", None)
    # The first is jax 0.12's name.
    return any(getattr(state, name, None) is not None for name in ("session", "profile_session"))


@dataclass(frozen=True)
class DistributedJob:
    """This process's part in one ``jax.distributed`` job."""

    client: Any
    """Of its coordination service."""
    address: str
    """Of its coordinator; the next job of these processes may have the same."""
    number: int
    """1, 2, ... in the order in which this process joined them: who initializes again is in another job."""


def distributed_job() -> DistributedJob | None:
    """The ``jax.distributed`` job that this process is in now, or None where there is none."""
    from jax._src import distributed

    global _job
    state = distributed.global_state
    with _joining:
        if state.client is None:
            return None
        if _job is None or _job.client is not state.client:
            number = 1 if _job is None else _job.number + 1
            _job = DistributedJob(state.client, str(state.coordinator_address), number)
        return _job


def job_number() -> int:
    """Of the job that this process is in now; 0 where it is in none. What ranks have agreed on ends with their job."""
    job = distributed_job()
    return 0 if job is None else job.number


def process_count() -> int:
    """Processes of the job, whose devices JAX knows by now."""
    import jax

    return int(jax.process_count())
