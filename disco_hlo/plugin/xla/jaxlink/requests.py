"""Compiles that JAX asks for: taken over, shown by the hook, and carried out anew; and the process and job that ask."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import io
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from disco_hlo.activation.kvstore import LongWait
from disco_hlo.backends import backend_of
from disco_hlo.errors import UnsupportedError, is_shared
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.xla import hook
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import contexts
from disco_hlo.plugin.xla.jaxlink.contexts import ThreadContext

Handler = Callable[["CompileRequest"], LoadedExecutable | None]
CompileOptionValue = str | bool | int | float
_HOOK_NAME = "disco-hlo"
_WRAPPED = "_disco_hlo_original"
"""The attribute of a wrapper that is JAX's own function."""
_REQUEST_ARGUMENTS = {
    "backend", "computation", "devices", "compile_options", "host_callbacks", "executable_devices"
}  # fmt: skip
_COMPILE_ARGUMENTS = {"backend", "module", "executable_devices", "options", "host_callbacks"}
_ADDRESS, _NO_ADDRESS = re.compile(r'backend_config = "\d{6,}"'), 'backend_config = ""'
"""JAX writes where a Python function lies as a number in decimal, and nothing else of a custom call so."""
_MOST_ELEMENTS, _LEFT_OUT = 1024, "__elided__"
"""Of a constant that is written down in a module's text, and what stands there in its place otherwise."""
EARLY, LATE = "PRE_SCHEDULER", "POST_SCHEDULER"
"""Stages of the hook: before XLA lays out, fuses and orders; when all is decided."""
_registering = threading.Lock()
_registered: set[tuple[str, str]] = set()
_are_watched = threading.Event()
"""Whether somebody asks for the last compile."""
_joining = threading.Lock()
_job: DistributedJob | None = None
"""The last one, kept to tell a client from that of the next job."""


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
    """Python functions that the module calls, by the number that it has for each."""
    executable_devices: Any
    """jaxlib DeviceList."""
    _compile_default: Callable[[], LoadedExecutable] = field(repr=False)
    _context: ThreadContext = field(repr=False)
    """Of the user's code, where it asked for the compile."""
    positive: frozenset[int] | None = None
    """Entry parameters whose made-up values have to be positive; None: all. Whoever runs the step sets it, before the
    first run, to what the step's graph says, and the same on every rank."""
    index_bounds: Mapping[int, int] = field(default_factory=dict)
    """Below what the made-up values must stay of each entry parameter that is read as an index; other integers are 0
    or 1. Set together with :attr:`positive`."""
    equal: frozenset[int] = frozenset()
    """Entry parameters whose made-up values have to be equal on all devices. Set together with :attr:`positive`."""
    trains: bool = False
    """Whether a training goes on: programs of ours over several of its devices must not begin while one of its own
    may."""
    training_peaks_bytes: tuple[int, ...] = ()
    """The most memory that it had in use on each local device, before anything of ours was there."""
    call_ns: int = 0
    """What a call of it takes the devices, or a run of XLA's default on made-up inputs; 0 where nobody knows."""
    wait: Callable[[str | None], LongWait] | None = field(default=None, repr=False)
    """Tells other ranks of a run that takes long, or how it went here; None: nothing does."""
    silent: threading.Event = field(default_factory=threading.Event)
    """Set while executables of this request run for us, beside the training: its Python functions are not called."""
    on_load: Callable[[Any], Any] | None = field(default=None, repr=False)
    """Says what runs the calls of each ``LoadedModule`` of it; None: nobody waits for JAX to load it."""
    tuner_results: Path | None = None
    """Where compiles of our own keep what XLA:GPU's autotuner picked, and find it again; None: nowhere."""
    _partitioners: tuple[Any, ...] = field(default=(), repr=False)
    """What XLA calls while it partitions ops of `custom_partitioning` (cuDNN's attention is one). JAX forgets them with
    the traced function, and a compile of ours may come later."""
    _default: LoadedExecutable | None = field(default=None, init=False, repr=False)

    @functools.cached_property
    def stablehlo(self) -> bytes:
        """``mlir_module`` as MLIR bytecode."""
        written = io.BytesIO()
        self.mlir_module.operation.write_bytecode(written)
        return written.getvalue()

    @property
    def script_options(self) -> tuple[tuple[str, str], ...]:
        """Options of XLA that the script gives this very step (``compiler_options``), by name."""
        return tuple(sorted((name, str(value)) for name, value in self.options.env_option_overrides))

    @property
    def digest(self) -> str:
        """Of what is compiled, for which devices, by which options of the script's; not of where the script has it.
        The same on all ranks."""
        return self._digest_and_addresses[0]

    @property
    def holds_addresses(self) -> bool:
        """Whether the module names Python functions: those that it calls by number, those that partition its custom
        calls (cuDNN's attention has such) by address. The digest is without: other ranks have them elsewhere, and a
        later module may have another function there."""
        return self._digest_and_addresses[1] or bool(self.host_callbacks)

    @functools.cached_property
    def _digest_and_addresses(self) -> tuple[str, bool]:
        options = list(self.script_options)
        text, numbers = _told_apart(self.mlir_module)
        without, count = _ADDRESS.subn(_NO_ADDRESS, text)
        found = hashlib.sha256(f"{[device.id for device in self.devices]} {options} {without}".encode())
        for one in numbers:
            found.update(one)
        return found.hexdigest(), count > 0

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
            with hook.ordinary_compile(self.module_name), self.as_user():
                self._default = self._compile_default()
        return self._default

    def as_user(self) -> contextlib.AbstractContextManager[None]:
        """For the body, what the user's code has set for its own thread holds in this one."""
        return contexts.entered(self._context)


def _told_apart(module: Any) -> tuple[str, list[Any]]:
    """A module in words, without the numbers of large constants, and these: a step that closes over a table of 100 MiB
    would come a second later where we have it written down."""
    text = module.operation.get_asm(large_elements_limit=_MOST_ELEMENTS)
    left_out = text.count(_LEFT_OUT)
    if not left_out:
        return text, []
    try:
        values = [one.attributes["value"] for one in _constants(module.operation)]
    except TypeError:  # MLIR has none in Python for complex numbers
        return str(module), []
    large = [one for one in values if not one.is_splat and len(one) > _MOST_ELEMENTS]
    if len(large) != left_out:  # other ops have some
        return str(module), []
    return text, [_numbers(one) for one in large]


def _numbers(constant: Any) -> Any:
    try:
        return np.ascontiguousarray(constant).view(np.uint8)
    except TypeError:  # of a type that numpy lacks, as bfloat16
        return str(constant).encode()


def _constants(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name == "stablehlo.constant":
                    yield inner.operation
                yield from _constants(inner.operation)


class _Thread(threading.local):
    ours = 0
    """How deep it is in compiles of our own."""
    last: tuple[LoadedExecutable, CompileRequest] | None = None
    """Its last compile, until JAX loads what came of it; None unless calls are watched."""


_thread = _Thread()


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Mark what this thread compiles as the plugin's own, so that it is not intercepted; and keep off it what the
    user's code has set in JAX for this thread.

    So is the handler's thread already; a thread that the handler starts must mark itself.
    """
    _thread.ours += 1
    try:
        with contexts.cleared():
            yield
    finally:
        _thread.ours -= 1


def install(handler: Handler) -> None:
    """Hand every compile of this process to ``handler``: it returns an executable, or None for XLA's default. An
    exception of the handler is logged and the default compiled. Installing again replaces the handler.

    Raises:
        UnsupportedError: this jax lacks the hook, compiles by other functions than those known here, or keeps
            elsewhere what a thread has set.
    """
    compiler = compiler_module()
    _hook_extension()
    if lacking := contexts.lacking():
        raise UnsupportedError(unsupported(f"what threads set lies elsewhere, without {', '.join(lacking)}"))
    uninstall()
    original = compiler.compile_or_get_cached
    signature = inspect.signature(original)

    @functools.wraps(original)
    def compile_or_get_cached(*args: Any, **kwargs: Any) -> LoadedExecutable:
        if _thread.ours:
            return original(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
            request = _request(bound.arguments, lambda: original(*bound.args, **bound.kwargs))
        except Exception as error:  # a compile that we do not understand is JAX's alone
            LOGGER.warning("a module runs as XLA compiles it: %s", one_line(error))
            return original(*args, **kwargs)
        executable = _ask(handler, request)
        if executable is None:
            executable = request.call_default()
        if _are_watched.is_set():
            _thread.last = (executable, request)
        return executable

    setattr(compile_or_get_cached, _WRAPPED, original)
    compiler.compile_or_get_cached = compile_or_get_cached


def watch_compiles(*, watched: bool) -> None:
    """From now on keep the last compile of each thread for :func:`last_compile`, or keep none."""
    (_are_watched.set if watched else _are_watched.clear)()


def last_compile() -> tuple[LoadedExecutable, CompileRequest] | None:
    """The last compile of this thread, once, unless it is the plugin's own."""
    last, _thread.last = _thread.last, None
    return None if _thread.ours else last


def uninstall() -> None:
    """Give JAX its own functions back. Does nothing if they were not wrapped."""
    compiler, state = compiler_module(), _state_class()
    compiler.compile_or_get_cached = getattr(
        compiler.compile_or_get_cached, _WRAPPED, compiler.compile_or_get_cached
    )
    state.initialize = getattr(state.initialize, _WRAPPED, state.initialize)


def only_compiles(request: CompileRequest) -> bool:
    """Whether JAX does no more than compile: neither keeps the executable nor compiles anew by a profile of its own."""
    import jax

    with request.as_user():
        return not jax.config.jax_compilation_cache_dir and not jax.config.jax_enable_pgle


def _ask(handler: Handler, request: CompileRequest) -> LoadedExecutable | None:
    try:
        with ours():
            return handler(request)
    except Exception as error:  # no failure of ours may stop the training
        told = is_shared(error) and request.backend.process_index() != request.process_indices[0]
        level = logging.DEBUG if told else logging.WARNING
        text = "%s runs as XLA compiles it: %s"
        LOGGER.log(level, text, request.module_name, one_line(error), exc_info=True)
        return None


def _request(
    arguments: MutableMapping[str, Any], compile_default: Callable[[], LoadedExecutable]
) -> CompileRequest:
    from jax._src import custom_partitioning

    module, silent = arguments["computation"], threading.Event()
    arguments["host_callbacks"] = [_unless(silent, one) for one in arguments["host_callbacks"]]
    return CompileRequest(
        module_name=str(module.operation.attributes["sym_name"].value),
        backend=arguments["backend"],
        mlir_module=module,
        devices=tuple(np.asarray(arguments["devices"]).flatten()),
        options=arguments["compile_options"],
        host_callbacks=arguments["host_callbacks"],
        executable_devices=arguments["executable_devices"],
        silent=silent,
        _compile_default=compile_default,
        _context=contexts.context_of_thread().to_enter(),
        _partitioners=tuple(getattr(custom_partitioning, "_sharding_callbacks", {}).values()),
    )


def _unless(silent: threading.Event, callback: Any) -> Any:
    if not callable(callback):  # on TPU it is a handle of the runtime's
        return callback
    return lambda *arguments: () if silent.is_set() else callback(*arguments)


def compiler_module() -> Any:
    """jax's own module of compile functions. Raises :class:`UnsupportedError` where they are not those known here."""
    from jax._src import compiler

    expected = {"compile_or_get_cached": _REQUEST_ARGUMENTS, "backend_compile_and_load": _COMPILE_ARGUMENTS}
    for name, wanted in expected.items():
        function = getattr(compiler, name, None)
        if function is None:
            raise UnsupportedError(unsupported(f"jax._src.compiler.{name} is missing"))
        missing = wanted - set(inspect.signature(function).parameters)
        if missing:
            lacking = ", ".join(sorted(missing))
            raise UnsupportedError(unsupported(f"jax._src.compiler.{name} takes no {lacking}"))
    return compiler


def unsupported(what: str) -> str:
    """What an error says of a jax that lacks ``what``."""
    import jax

    return f"jax {jax.__version__} is not supported: {what}; use jax 0.10.2 to 0.12"


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
    known = backend_of(backend.platform)
    with _registering:
        if (known.name, stage_name) in _registered:
            return
        extension = _hook_extension()
        stage = extension.PipelineStage[stage_name]
        callback = hook.on_module if stage_name == LATE else hook.on_early_module
        # Each stage has a name of its own: early versions of the hook keep one callback per name.
        name = _HOOK_NAME if stage_name == LATE else f"{_HOOK_NAME}-structure"
        if known.is_plugin and _jax_version() < (0, 11):
            import jaxlib._xla as _xla

            _xla.register_xla_transform_c_api(backend, name, stage.value, callback)
        else:
            extension.register_hlo_module_transformation(
                callback, name=name, stage=stage, platforms=known.platforms[0]
            )
        _registered.add((known.name, stage_name))


def compile_past_cache(
    request: CompileRequest, module: Any, extra: Mapping[str, CompileOptionValue]
) -> LoadedExecutable:
    """Compile ``module`` as the request would be, with debug options for this compile alone."""
    compiler = compiler_module()
    options = copy.deepcopy(request.options)
    options.env_option_overrides = [*options.env_option_overrides, *extra.items()]
    keep_tuner_results(request, options)
    # Functions that partition the module's ops are traced in there.
    with ours(), request.as_user():
        return compiler.backend_compile_and_load(
            backend=request.backend,
            module=module,
            executable_devices=request.executable_devices,
            options=options,
            host_callbacks=request.host_callbacks,
        )


def keep_tuner_results(request: CompileRequest, options: Any = None) -> None:
    """Have a compile by these options, by default JAX's own of the request, keep what the autotuner picks and find it
    again, as ``XLA_FLAGS=--xla_gpu_per_fusion_autotune_cache_dir``. JAX leaves that out of the key of its cache. In one
    process XLA tunes once, so what JAX's compile did not keep no later one does.

    The user's own directory stays, unless this rank may only read it, as JAX has it on all ranks but the first: each
    rank tunes a share, and nobody else keeps that."""
    if request.tuner_results is None:
        return
    from jaxlib.xla_client import AutotuneCacheMode

    debug_options = (request.options if options is None else options).executable_build_options.debug_options
    option, mode = "xla_gpu_per_fusion_autotune_cache_dir", "xla_gpu_experimental_autotune_cache_mode"
    if getattr(debug_options, option) and getattr(debug_options, mode) != AutotuneCacheMode.READ:
        return
    setattr(debug_options, option, str(request.tuner_results))
    writable = os.access(request.tuner_results, os.W_OK)
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


def keeps_donation() -> bool:
    """Whether a module that the hook replaces keeps its donated arguments (jax 0.11 and later)."""
    return _jax_version() >= (0, 11)


def _jax_version() -> tuple[int, ...]:
    import jax

    return tuple(jax.__version_info__)


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
    rank: int
    """Of this process."""


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
            _job = DistributedJob(state.client, str(state.coordinator_address), number, state.process_id)
        return _job


def on_joining(do: Callable[[], None]) -> None:
    """Call ``do`` in each job that this process joins, the one that it is in included, before JAX knows its devices."""
    state = _state_class()
    original = getattr(state.initialize, _WRAPPED, state.initialize)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        do()

    setattr(initialize, _WRAPPED, original)
    state.initialize = initialize
    do()


def _state_class() -> Any:
    from jax._src.distributed import State

    return State


def job_number() -> int:
    """Of the job that this process is in now; 0 where it is in none. What ranks have agreed on ends with their job."""
    job = distributed_job()
    return 0 if job is None else job.number


def process_count() -> int:
    """Processes of the job, whose devices JAX knows by now."""
    import jax

    return int(jax.process_count())
