"""Where the plugin meets JAX: the one file that touches private jax names.

Three things of stock JAX are used, without a fork:

* ``jax._src.compiler.compile_or_get_cached``, which every ``jit``, ``shard_map`` and ``pmap`` compile goes
  through, is wrapped: a compile becomes a :class:`CompileRequest`, handed to the plugin's handler.
* the HLO hook (``jax.extend.xla``, stage POST_SCHEDULER) shows a module just before code generation and may
  replace it. It does nothing except during a compile made here. Where the structure of a step is to change, it
  is also registered at stage PRE_SCHEDULER: on GPU after sharding and before layouts and fusion, on CPU after
  the last pass, so that there the fusing and combining passes are off for such compiles alone.
* ``compiler.backend_compile_and_load`` compiles past the persistent compilation cache, whose key knows
  nothing of hooks.

(DisCo, section 5: the module that enacts the optimized strategy inside the framework's compiler.)
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from disco_hlo.errors import IllegalStrategyError, UnsupportedError
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.xla import hook
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.hook import OwnCompile

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
_EARLY = "PRE_SCHEDULER"
_LATE = "POST_SCHEDULER"
_CPU_PASSES_OFF = (
    "fusion,fusion-wrapper,multi_output_fusion,cpu-all-reduce-combiner,dot-library-rewriter,"
    "simplification after layout assignment"
)
"""What XLA:CPU does before its early stage, and what there would hide the ops that moves are about. The last must
go with the others: on ops that are in no fusion it drops copies between layouts, and the numbers are wrong
(jax 0.10.2 to 0.12: ``einsum("bsd,dthe->btshe", x, w)`` with ``fusion,fusion-wrapper`` off)."""
_GPU_COMBINERS = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_all_reduce_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)
"""XLA:GPU's thresholds up to which it puts parts that shall travel apart together again."""
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
    _default: LoadedExecutable | None = field(default=None, init=False, repr=False)

    @functools.cached_property
    def stablehlo(self) -> bytes:
        """``mlir_module`` as MLIR bytecode."""
        written = io.BytesIO()
        self.mlir_module.operation.write_bytecode(written)
        return written.getvalue()

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
    compiler = _compiler_module()
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
        return request.call_default() if executable is None else executable

    setattr(compile_or_get_cached, _WRAPPED, original)
    compiler.compile_or_get_cached = compile_or_get_cached


def uninstall() -> None:
    """Give JAX its own compile function back. Does nothing if it was not wrapped."""
    compiler = _compiler_module()
    compiler.compile_or_get_cached = getattr(
        compiler.compile_or_get_cached, _WRAPPED, compiler.compile_or_get_cached
    )


def _ask(handler: Handler, request: CompileRequest) -> LoadedExecutable | None:
    try:
        with ours():
            return handler(request)
    except Exception as error:  # no failure of ours may stop the training
        LOGGER.warning("%s runs as XLA compiles it: %s", request.module_name, one_line(error), exc_info=True)
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


def _compiler_module() -> Any:
    from jax._src import compiler

    expected = {"compile_or_get_cached": _REQUEST_ARGUMENTS, "backend_compile_and_load": _COMPILE_ARGUMENTS}
    for name, wanted in expected.items():
        function = getattr(compiler, name, None)
        if function is None:
            raise UnsupportedError(_unsupported(f"jax._src.compiler.{name} is missing"))
        missing = set(wanted) - set(inspect.signature(function).parameters)
        if missing:
            lacking = ", ".join(sorted(missing))
            raise UnsupportedError(_unsupported(f"jax._src.compiler.{name} takes no {lacking}"))
    return compiler


def _unsupported(what: str) -> str:
    import jax

    return f"jax {jax.__version__} is not supported: {what}; use jax 0.10.2 to 0.12"


# --- the HLO hook ---------------------------------------------------------------------------------


def _hook_extension() -> Any:
    try:
        import jax.extend.xla as extension
    except ImportError as error:
        raise UnsupportedError(_unsupported("jax.extend.xla is missing")) from error
    if not hasattr(extension, "register_hlo_module_transformation"):
        raise UnsupportedError(_unsupported("jax.extend.xla.register_hlo_module_transformation is missing"))
    return extension


def _register_hook(backend: Any, stage_name: str) -> None:
    """Register the hook for the platform of ``backend``, once. That exists by now: nothing can deadlock."""
    platform = "cuda" if backend.platform == "gpu" else backend.platform
    with _registering:
        if (platform, stage_name) in _registered:
            return
        if platform not in ("cpu", "cuda"):
            raise UnsupportedError(f"platform {platform} is not supported: expected cpu or cuda")
        extension = _hook_extension()
        stage = extension.PipelineStage[stage_name]
        callback = hook.on_module if stage_name == _LATE else hook.on_early_module
        # Each stage has a name of its own: early versions of the hook keep one callback per name.
        name = _HOOK_NAME if stage_name == _LATE else f"{_HOOK_NAME}-structure"
        if platform == "cuda" and _jax_version() < (0, 11):
            import jaxlib._xla as _xla

            _xla.register_xla_transform_c_api(backend, name, stage.value, callback)
        else:
            extension.register_hlo_module_transformation(callback, name=name, stage=stage, platforms=platform)
        _registered.add((platform, stage_name))


# --- compiles of ours -----------------------------------------------------------------------------


def capture(request: CompileRequest, structure: bytes | None = None) -> bytes:
    """The module XLA would run by default: a serialized, scheduled HloModuleProto. Generates no code.

    The compile is ended from inside the hook. Costs XLA's HLO passes (and, on GPU, its autotuning). The bytes
    depend on the request alone: the number XLA gives each module it compiles is left out.

    Args:
        structure: what to put in the place of the module that :func:`capture_structure` gives; what XLA makes
            of that is captured.

    Raises:
        UnsupportedError: the hook was not called.
        IllegalStrategyError: XLA refused ``structure``.
        jax.errors.JaxRuntimeError: XLA cannot compile the user's module.
    """
    own = OwnCompile(stop=True, structure=structure)
    try:
        _own_compile(request, own, {})
    except Exception as error:  # ending a compile from inside the hook is an XLA error; told apart below
        if own.seen is None and structure is not None and own.seen_early is not None:
            raise IllegalStrategyError(
                f"XLA refused the restructured {request.module_name}: {error}"
            ) from error
        if own.seen is None:
            raise
    if own.seen is None:
        raise UnsupportedError(_silent_hook(request))
    _check_early_stage(request, own)
    return hook.named(hook.without_id(own.seen), request.module_name)


def capture_structure(request: CompileRequest) -> bytes:
    """The module before XLA lays out, fuses, combines and orders: what structural moves are made on.

    A serialized HloModuleProto without a schedule, of one device's part of the program (after sharding). The
    compile is ended there.

    Raises:
        UnsupportedError: the hook was not called.
        jax.errors.JaxRuntimeError: XLA cannot compile the user's module.
    """
    own = OwnCompile(stop_early=True)
    try:
        _own_compile(request, own, {})
    except Exception:  # as in :func:`capture`
        if own.seen_early is None:
            raise
    if own.seen_early is None:
        raise UnsupportedError(_silent_hook(request))
    return hook.named(hook.without_id(own.seen_early), request.module_name)


def compile_module(
    request: CompileRequest,
    module: bytes | None,
    extra_options: Mapping[str, CompileOptionValue] | None = None,
    structure: bytes | None = None,
) -> LoadedExecutable:
    """Compile the request past the persistent cache, with ``module`` in the place of XLA's own.

    ``module`` is a serialized, scheduled HloModuleProto of the same entry signature; None leaves XLA's own.
    ``extra_options`` are debug options for this compile alone: ``{"xla_gpu_enable_command_buffer": ""}``.
    ``structure`` takes the place of the early module, as in :func:`capture`.

    Raises:
        UnsupportedError: the hook was not called.
        IllegalStrategyError: XLA refused ``module`` or ``structure``.
        jax.errors.JaxRuntimeError: XLA cannot compile the user's own module.
    """
    if module is None and structure is None:
        with hook.ordinary_compile(request.module_name):
            return _compile(request, request.mlir_module, extra_options or {})
    return _compiled(request, OwnCompile(replacement=module, structure=structure), extra_options)


def compile_seen(
    request: CompileRequest,
    extra_options: Mapping[str, CompileOptionValue] | None = None,
    structure: bytes | None = None,
) -> tuple[LoadedExecutable, bytes]:
    """Compile the request past the persistent cache as XLA would, and capture what it runs on the way.

    Returns:
        The executable, and what :func:`capture` gives.

    Raises:
        As :func:`compile_module`.
    """
    own = OwnCompile(structure=structure)
    executable = _compiled(request, own, extra_options)
    assert own.seen is not None
    return executable, hook.named(hook.without_id(own.seen), request.module_name)


def _compiled(
    request: CompileRequest, own: OwnCompile, extra_options: Mapping[str, CompileOptionValue] | None
) -> LoadedExecutable:
    try:
        executable = _own_compile(request, own, extra_options or {})
    except Exception as error:
        if own.seen is None and own.seen_early is None:
            raise
        raise IllegalStrategyError(f"XLA refused the rewritten {request.module_name}: {error}") from error
    if own.seen is None:
        raise UnsupportedError(_silent_hook(request))
    _check_early_stage(request, own)
    return executable


def _check_early_stage(request: CompileRequest, own: OwnCompile) -> None:
    if own.structure is not None and own.seen_early is None:
        raise UnsupportedError(_silent_hook(request))


def _own_compile(
    request: CompileRequest, own: OwnCompile, extra: Mapping[str, CompileOptionValue]
) -> LoadedExecutable:
    """Compile the request's module under a name that the hook knows as ours."""
    _register_hook(request.backend, _LATE)
    if own.structure is not None or own.stop_early:
        _register_hook(request.backend, _EARLY)
        extra = _early_options(request, extra)
    with hook.own_compile(request.module_name, own) as name:
        module = request.mlir_module if name == request.module_name else _renamed(request.stablehlo, name)
        try:
            return _compile(request, module, extra)
        except Exception:  # Ctrl-C inside the hook reaches us as an XLA error
            if own.interrupt is not None:
                raise own.interrupt from None
            raise


def _early_options(
    request: CompileRequest, extra: Mapping[str, CompileOptionValue]
) -> Mapping[str, CompileOptionValue]:
    """``extra`` for a compile with an early stage: what would undo or hide moves is off.

    What the user said of this very step (``compiler_options``) holds. Of what ``XLA_FLAGS`` say of all steps the
    passes that are off stay off; the thresholds of the combiners, chosen for XLA's plan, not for this one, do not hold.
    """
    users = dict(request.options.env_option_overrides)
    if request.backend.platform != "cpu":
        off = tuple(name for name in _GPU_COMBINERS if name not in users)
        if request.backend.process_index() == 0:
            _say_what_does_not_hold(off)
        return {**dict.fromkeys(off, 0), **extra}
    option = "xla_disable_hlo_passes"
    flags = getattr(request.options.executable_build_options.debug_options, option, "")  # XLA_FLAGS
    named_already = [str(one) for one in (flags, users.get(option), extra.get(option)) if one]
    return {**extra, option: ",".join([*named_already, _CPU_PASSES_OFF])}


@functools.cache
def _say_what_does_not_hold(options: tuple[str, ...]) -> None:
    """Say once a process which of these, turned off here, ``XLA_FLAGS`` set."""
    flags = {flag.lstrip("-").partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    overruled = [option for option in options if option in flags]
    if overruled:
        LOGGER.info(
            "a step whose structure is changed is compiled without %s of XLA_FLAGS: the plan decides",
            ", ".join(overruled),
        )


def _compile(
    request: CompileRequest, module: Any, extra: Mapping[str, CompileOptionValue]
) -> LoadedExecutable:
    compiler = _compiler_module()
    options = copy.deepcopy(request.options)
    options.env_option_overrides = [*options.env_option_overrides, *extra.items()]
    with ours():
        return compiler.backend_compile_and_load(
            backend=request.backend,
            module=module,
            executable_devices=request.executable_devices,
            options=options,
            host_callbacks=request.host_callbacks,
        )


def _renamed(stablehlo: bytes, name: str) -> Any:
    """A copy of a module, in an MLIR context of its own: several threads may compile theirs at once."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    with mlir.make_ir_context() as context:
        module = ir.Module.parse(stablehlo, context=context)
        module.operation.attributes["sym_name"] = ir.StringAttr.get(name)
    return module


def _silent_hook(request: CompileRequest) -> str:
    return _unsupported(f"XLA did not call the HLO hook while compiling {request.module_name}")


# --- what this jax does ------------------------------------------------------------------------------


def keeps_donation() -> bool:
    """Whether a module that the hook replaces keeps its donated arguments (jax 0.11 and later)."""
    return _jax_version() >= (0, 11)


def _jax_version() -> tuple[int, ...]:
    import jax

    return tuple(jax.__version_info__)


# --- the job --------------------------------------------------------------------------------------


def distributed_job() -> tuple[Any, str] | None:
    """Client and coordinator address of the ``jax.distributed`` job, or None where there is none."""
    from jax._src import distributed

    state = distributed.global_state
    return None if state.client is None else (state.client, str(state.coordinator_address))
