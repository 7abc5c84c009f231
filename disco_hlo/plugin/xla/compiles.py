"""Compiles of our own: with a module of ours in the place of XLA's, or ended once XLA's is seen.

(DisCo, section 5: the module that enacts the optimized strategy inside the framework's compiler.)
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from concurrent import futures
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from disco_hlo.backends import backend_of
from disco_hlo.errors import UnsupportedError, XlaRefusalError
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.xla import hook
from disco_hlo.plugin.xla.executables import LoadedExecutable, read_executable
from disco_hlo.plugin.xla.hook import OwnCompile
from disco_hlo.plugin.xla.jaxlink.requests import (
    EARLY,
    LATE,
    CompileOptionValue,
    CompileRequest,
    compile_past_cache,
    register_hook,
    renamed,
    unsupported,
)
from disco_hlo.plugin.xla.job import peak_told

_PASSES_OFF = "xla_disable_hlo_passes"
_COMPILE = "a compile"
_REMATERIALIZATION = "rematerialization"
"""The one pass of XLA:GPU's behind the hook that changes what is computed when: short of memory, it moves and repeats
ops, and nobody checks any more which value lies in which buffer."""


def capture(
    request: CompileRequest,
    structure: bytes | None = None,
    extra_options: Mapping[str, CompileOptionValue] | None = None,
) -> bytes:
    """The module XLA would run by default: a serialized, scheduled HloModuleProto. Generates no code.

    The compile is ended from inside the hook. Costs XLA's HLO passes (and, on GPU, its autotuning). The bytes
    depend on the request alone: the number XLA gives each module it compiles is left out. With ``structure`` in the
    place of the module that :func:`capture_structure` gives, what XLA makes of that is captured. ``extra_options`` are
    as of :func:`compile_module`.

    Raises:
        UnsupportedError: the hook was not called.
        XlaRefusalError: XLA refused ``structure``.
        jax.errors.JaxRuntimeError: XLA cannot compile the user's module.
    """
    own = OwnCompile(hook.end, _put(structure), is_ours=structure is not None)
    try:
        _own_compile(request, own, extra_options or {})
    except Exception as error:  # ending a compile from inside the hook is an XLA error; told apart here
        if own.seen is None and structure is not None and own.seen_early is not None:
            raise _refused(request, error, "restructured") from error
        if own.seen is None:
            raise
    _check_early_stage(request, own)
    return _seen(request, own.seen)


def capture_structure(request: CompileRequest) -> bytes:
    """The module before XLA lays out, fuses, combines and orders: what structural moves are made on. A serialized
    HloModuleProto without a schedule, of one device's part of the program (after sharding). The compile is ended
    there. Raises as :func:`capture`."""
    own = OwnCompile(early=hook.end)
    try:
        _own_compile(request, own, {})
    except Exception:  # as in :func:`capture`
        if own.seen_early is None:
            raise
    return _seen(request, own.seen_early)


def compile_module(
    request: CompileRequest,
    module: bytes | None,
    extra_options: Mapping[str, CompileOptionValue] | None = None,
    structure: bytes | None = None,
) -> LoadedExecutable:
    """Compile the request past the persistent cache, with ``module`` in the place of XLA's own. XLA:GPU leaves it, and
    what it makes of ``structure``, as it is: its rematerialization, which comes after the hook, is off.

    Args:
        module: a serialized, scheduled HloModuleProto of the same entry signature; None leaves XLA's own.
        extra_options: debug options for this compile alone: ``{"xla_gpu_enable_command_buffer": ""}``.
        structure: takes the place of the early module, as in :func:`capture`.

    Raises:
        UnsupportedError: the hook was not called.
        XlaRefusalError: XLA refused ``module`` or ``structure``.
        jax.errors.JaxRuntimeError: XLA cannot compile the user's own module.
    """
    if module is None and structure is None:
        with hook.ordinary_compile(request.module_name), peak_told(request, _COMPILE):
            return compile_past_cache(request, request.mlir_module, extra_options or {})
    own = OwnCompile(_put(module) or hook.leave, _put(structure), is_ours=True)
    return _compiled(request, own, extra_options)


def compile_seen(
    request: CompileRequest,
    extra_options: Mapping[str, CompileOptionValue] | None = None,
    structure: bytes | None = None,
) -> tuple[LoadedExecutable, bytes]:
    """Compile the request past the persistent cache as XLA would; returns the executable, and what :func:`capture`
    gives. Raises as :func:`compile_module`."""
    own = OwnCompile(early=_put(structure), is_ours=structure is not None)
    executable = _compiled(request, own, extra_options)
    return executable, _seen(request, own.seen)


class Halted:
    """A compile past the persistent cache that waits, XLA's module at hand, for what to put in its place.

    So that module is read and a plan found for it within the one compile that enacts the plan; on GPU XLA's passes and
    autotuning, which come before, take longer than the code that follows. Where the plan changes the step's structure
    the compile waits at the early stage, too.
    """

    def __init__(
        self,
        request: CompileRequest,
        pool: Executor,
        extra_options: Mapping[str, CompileOptionValue],
        *,
        early: bool = False,
    ) -> None:
        self._request, self._pool, self._options = request, pool, extra_options
        self._seen_early: Future[bytes] = Future()
        self._structure: Future[bytes | None] = Future()
        self._seen: Future[bytes] = Future()
        self._answer: Future[bytes | None] = Future()
        asked = functools.partial(_tell_and_wait, self._seen_early, self._structure)
        self._own = OwnCompile(
            functools.partial(_tell_and_wait, self._seen, self._answer),
            asked if early else None,
            is_ours=early,
        )
        self._compiling: Future[LoadedExecutable] | None = None

    def early_module(self) -> bytes:
        """What :func:`capture_structure` gives, with what it raises; the compile begins. It goes on with
        :meth:`restructured`."""
        return self._wait_for(self._seen_early)

    def restructured(self, structure: bytes) -> bytes:
        """Go on with ``structure`` in the place of the early module; what :func:`capture` gives of it, with what it
        raises. After :meth:`early_module`."""
        self._structure.set_result(structure)
        try:
            return self._wait_for(self._seen)
        except UnsupportedError:
            raise
        except Exception as error:
            raise _refused(self._request, error, "restructured") from error

    def module(self) -> bytes:
        """What :func:`capture` gives, with what it raises; the compile begins with the first call."""
        return self._wait_for(self._seen)

    def _wait_for(self, seen: Future[bytes]) -> bytes:
        if self._compiling is None:
            self._compiling = self._pool.submit(_own_compile, self._request, self._own, self._options)
        # A compile that comes to the late stage alone waits there, and has no early one.
        futures.wait((seen, self._seen, self._compiling), return_when=futures.FIRST_COMPLETED)
        if not seen.done() and not self._seen.done():
            self._compiling.result()
        return _seen(self._request, seen.result() if seen.done() else None)

    def finish(self, module: bytes) -> LoadedExecutable:
        """Go on with ``module``, once; as :func:`compile_module` with what it raises. After :meth:`module`, or
        :meth:`restructured`.

        A compile without an early stage began with the user's options, since it may go on with XLA's module. Where
        XLA:GPU rematerialized ``module``, it is compiled anew without.
        """
        assert self._compiling is not None
        self._answer.set_result(module)
        try:
            executable = self._compiling.result()
        except Exception as error:
            raise _refused(self._request, error) from error
        rematerializes = backend_of(self._request.backend.platform).rematerializes
        if rematerializes and self._own.early is None and is_rematerialized(module, executable):
            LOGGER.info("%s is compiled anew without rematerialization", self._request.module_name)
            return compile_module(self._request, module)
        return executable

    def go_on(self) -> LoadedExecutable | None:
        """Go on with XLA's module; None where the compile was not begun, went on with another, or failed."""
        if self._compiling is None or self._answer.done():
            return None
        with contextlib.suppress(Exception):  # JAX's own compile will say what is wrong
            self._answer.set_result(self._seen.result(timeout=0))
            return self._compiling.result()
        return None

    def end(self) -> None:
        """Go no further; nothing where the compile has ended."""
        for answer in (self._structure, self._answer):
            if not answer.done():
                answer.set_result(None)


def _tell_and_wait(seen: Future[bytes], answer: Future[bytes | None], module: bytes) -> bytes | None:
    if not seen.done():
        seen.set_result(module)
    return answer.result()


@contextlib.contextmanager
def halted(
    request: CompileRequest,
    extra_options: Mapping[str, CompileOptionValue] | None = None,
    *,
    early: bool = False,
) -> Iterator[Halted]:
    """A compile of ``request`` that waits for what is to be run, and where ``early`` for its structure; ended with the
    block where nobody said. ``extra_options`` are as of :func:`compile_module`."""
    # The compile has a thread of its own: the hook waits in it, and the ranks agree in this one, which MPI knows.
    with ThreadPoolExecutor(1, "disco-compile") as pool:
        waiting = Halted(request, pool, extra_options or {}, early=early)
        try:
            yield waiting
        finally:
            waiting.end()


def _compiled(
    request: CompileRequest, own: OwnCompile, extra_options: Mapping[str, CompileOptionValue] | None
) -> LoadedExecutable:
    try:
        executable = _own_compile(request, own, extra_options or {})
    except Exception as error:
        if own.seen is None and own.seen_early is None:
            raise
        raise _refused(request, error) from error
    _seen(request, own.seen)
    _check_early_stage(request, own)
    return executable


def _put(module: bytes | None) -> hook.Decide | None:
    return None if module is None else lambda _: module


def _seen(request: CompileRequest, module: bytes | None) -> bytes:
    """A module that the hook was shown, under its own name and without its number."""
    if module is None:
        raise UnsupportedError(
            unsupported(f"XLA did not call the HLO hook while compiling {request.module_name}")
        )
    return hook.named(hook.without_id(module), request.module_name)


def _refused(request: CompileRequest, error: Exception, what: str = "rewritten") -> XlaRefusalError:
    return XlaRefusalError(f"XLA refused the {what} {request.module_name}: {error}")


def _check_early_stage(request: CompileRequest, own: OwnCompile) -> None:
    if own.early is not None:
        _seen(request, own.seen_early)


def _own_compile(
    request: CompileRequest, own: OwnCompile, extra: Mapping[str, CompileOptionValue]
) -> LoadedExecutable:
    """Compile the request's module under a name that the hook knows as ours."""
    register_hook(request.backend, LATE)
    if own.early is not None:
        register_hook(request.backend, EARLY)
        extra = _early_options(request, extra)
    # A structure, too: what it keeps would be computed again, and seem to need less memory than in a plan.
    if own.is_ours and backend_of(request.backend.platform).rematerializes:
        extra = _with_passes_off(request, extra, _REMATERIALIZATION)
    with hook.own_compile(request.module_name, own, apart=request.trains) as name:
        module = request.mlir_module if name == request.module_name else renamed(request.stablehlo, name)
        try:
            with peak_told(request, _COMPILE):
                return compile_past_cache(request, module, extra)
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
    Nor does it hold on CPU that a library takes matmuls and sums, whoever says so: moves would not see them.
    """
    users = dict(request.options.env_option_overrides)
    backend = backend_of(request.backend.platform)
    if backend.combiners:
        off = tuple(name for name in backend.combiners if name not in users)
        if request.backend.process_index() == 0:
            _say_what_does_not_hold(off)
        return {**dict.fromkeys(off, 0), **extra}
    return {**_with_passes_off(request, extra, backend.passes_off), **backend.early_options}


def _with_passes_off(
    request: CompileRequest, extra: Mapping[str, CompileOptionValue], passes: str
) -> Mapping[str, CompileOptionValue]:
    """``extra`` with ``passes`` off beside those that the user or ``extra`` turned off."""
    users = dict(request.options.env_option_overrides)
    flags = getattr(request.options.executable_build_options.debug_options, _PASSES_OFF, "")  # XLA_FLAGS
    named_already = [str(one) for one in (flags, users.get(_PASSES_OFF), extra.get(_PASSES_OFF)) if one]
    return {**extra, _PASSES_OFF: ",".join([*named_already, passes])}


def is_rematerialized(module: bytes, executable: LoadedExecutable) -> bool:
    """Whether XLA repeated, compressed or moved to the host any value of ``module``; True where that cannot be seen."""
    try:
        executed = read_executable(executable)
    except UnsupportedError:
        return True
    return any(executed.count(mark) > module.count(mark) for mark in (b".remat", b"copy-start"))


def may_compute_finer(request: CompileRequest) -> bool:
    """Whether XLA may compute in more digits than the program says, as it does unless the user forbids it."""
    said = _flags() | dict(request.options.env_option_overrides)
    return str(said.get("xla_allow_excess_precision", True)).lower() not in ("false", "0")


def _flags() -> dict[str, CompileOptionValue]:
    """What ``XLA_FLAGS`` set."""
    named = (flag.lstrip("-").partition("=") for flag in os.environ.get("XLA_FLAGS", "").split())
    return {name: value for name, _, value in named}


@functools.cache
def _say_what_does_not_hold(options: tuple[str, ...]) -> None:
    """Say once a process which of these, turned off here, ``XLA_FLAGS`` set."""
    flags = _flags()
    overruled = [option for option in options if option in flags]
    if overruled:
        LOGGER.info(
            "a step whose structure is changed is compiled without %s of XLA_FLAGS: the plan decides",
            ", ".join(overruled),
        )
