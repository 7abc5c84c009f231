"""Wiring: environment -> settings -> the wrapped compile -> search or enactment phase."""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.logs import LOGGER, configure
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.switched import announce, is_alone, lacks_ranks, said
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest

_one_at_a_time = threading.Lock()
_compiled: dict[str, bool] = {}
"""Names of the modules that rank 0 compiled, and whether a phase has looked at one of this name."""
_NO_JIT = (
    "jax_disable_jit is on: JAX runs every op by itself, so there is no training step to search or to run by a plan; "
    "switch it off (JAX_DISABLE_JIT=0)"
)
_told: set[str] = set()


def install_from_environment() -> None:
    """Install the phase that ``ENABLE_SEARCH`` names, or capturing (``DISCO_CAPTURE``). Imports no more than it needs.

    Raises:
        SettingsError: a ``DISCO_*`` variable or the config file has a value that cannot be used.
        UnsupportedError: this jax is not supported.
    """
    capture = os.environ.get("DISCO_CAPTURE", "").strip()
    settings = Settings.from_environment({**os.environ, "ENABLE_SEARCH": "0"} if capture else None)
    configure(settings.log_level)
    jaxlink.install(lambda request: _handle(request, settings, capture))
    if settings.search:
        settings = _with_calls_observed(settings)
    elif not capture:
        from disco_hlo.plugin.calls.loading import watch

        watch()
    jaxlink.on_joining(announce)
    if not capture:
        atexit.unregister(_say_if_nothing_was_found)
        atexit.register(_say_if_nothing_was_found, settings, os.getpid())


def when_to_search(settings: Settings) -> str:
    """What ``DISCO_WHEN=auto`` is in this process, by rule: ``training`` where a search beside it can do what is asked.

    A jax that loses donation in a rewritten step, or that compiles the step anew by a profile of its own, lets no other
    step take a call over; and what ``DISCO_EXPLAIN`` asks for is measured before the first step alone.
    """
    import jax

    if settings.when != "auto":
        return settings.when
    can = jaxlink.keeps_donation() and not jax.config.jax_enable_pgle and not settings.explain
    return "training" if can else "compile"


def _watches(settings: Settings) -> bool:
    return settings.search and settings.when == "training"


def _with_calls_observed(settings: Settings) -> Settings:
    """The settings with ``when`` decided; where that is ``training``, calls are watched from now on."""
    decided = replace(settings, when=when_to_search(settings))
    if decided.when == "training":
        from disco_hlo.plugin.phases.training_phase import observe

        try:
            observe(decided)
        except UnsupportedError:
            if settings.when != "auto":
                raise
            return replace(settings, when="compile")
    return decided


def compiles_no_step(leads: bool) -> bool:
    """Whether JAX compiles op by op here; rank 0 says so, once."""
    if not jaxlink.jit_is_disabled():
        return False
    if leads and _NO_JIT not in _told:
        _told.add(_NO_JIT)
        LOGGER.warning(_NO_JIT)
    return True


def _handle(request: CompileRequest, settings: Settings, capture: str) -> LoadedExecutable | None:
    leads = request.backend.process_index() == 0
    if compiles_no_step(leads):
        return None
    may_be_step = _may_be_step(request, settings)
    if leads:
        _compiled[request.module_name] = may_be_step or _compiled.get(request.module_name, False)
    if not may_be_step or lacks_ranks(request):
        return None
    from disco_hlo.plugin import tuner_results
    from disco_hlo.plugin.session import leave

    handle: Callable[[CompileRequest, Settings], LoadedExecutable | None]
    if capture:
        from disco_hlo.plugin.phases import capture_phase

        handle = functools.partial(capture_phase.handle, folder=Path(capture))
    elif _watches(settings):
        from disco_hlo.plugin.phases.training_phase import handle
    elif settings.search:
        from disco_hlo.plugin.phases.search_phase import handle
    else:
        from disco_hlo.plugin.phases.enact_phase import handle
    with _one_at_a_time:
        request.tuner_results = tuner_results.folder_of(request, settings.directory, settings.timeout_s)
        try:
            return handle(request, settings)
        finally:
            leave()


def _may_be_step(request: CompileRequest, settings: Settings) -> bool:
    """Whether a phase shall look at a module: of those on one device at what is watched, named, or planned."""
    name = request.module_name
    if len(request.devices) > 1 or settings.names(name):
        return True
    if not is_alone():
        return False
    return _watches(settings) if settings.search else name in _planned_on_one_device(settings.directory)


@functools.cache
def _planned_on_one_device(directory: Path) -> frozenset[str]:
    from disco_hlo.plan.store import PlanStore

    return PlanStore(directory).names_on_one_device()


def _say_if_nothing_was_found(settings: Settings, process: int) -> None:
    """At the end of a training that compiled something, but nothing that the phase could act on; not of its forks."""
    if not _compiled or said() or _is_helper() or os.getpid() != process:
        return
    reason = ""
    if settings.module is not None and not settings.may_be_key:
        reason = _named_module_missing(settings)
    elif not any(_compiled.values()):
        reason = _nothing_on_several_devices(settings)
    elif not _watches(settings):
        from disco_hlo.plugin.step import why_none

        reason = why_none(settings)
    if reason:
        LOGGER.warning("no training step was found: %s", reason)
    elif _watches(settings):
        from disco_hlo.plugin.phases.training_phase import say_if_not_begun

        say_if_not_begun(settings)


def _is_helper() -> bool:
    """Whether this process is a child of another one's ``multiprocessing`` and saw nothing to train: a data loader."""
    from multiprocessing import parent_process

    if parent_process() is None or any(_compiled.values()):
        return False
    return jaxlink.distributed_job() is None


def _nothing_on_several_devices(settings: Settings) -> str:
    from disco_hlo.activation.choose import mpi_world_size

    world = mpi_world_size(os.environ) or 1
    if world > 1 and jaxlink.distributed_job() is None:
        return (
            f"{world} processes were started together, but their script does not call "
            "jax.distributed.initialize(): each trains for itself"
        )
    if settings.search:
        return "nothing was compiled for more than one device (DISCO_MODULE=name takes a step on one)"
    return f"nothing was compiled for more than one device, and no plan in {settings.directory} is for a step on one"


def _named_module_missing(settings: Settings) -> str:
    if any(map(settings.names, _compiled)):
        return ""
    first = ", ".join(list(_compiled)[:8])
    return f"no module is called {settings.module} (DISCO_MODULE); compiled were {first}"
