"""Wiring: environment -> settings -> the wrapped compile -> search or enactment phase."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from disco_hlo.plugin.logs import LOGGER, configure
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.executables import LoadedExecutable
from disco_hlo.plugin.xla.jaxlink import CompileRequest

_one_at_a_time = threading.Lock()
_compiled: dict[str, None] = {}
"""Names of the modules that rank 0 compiled."""
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
    if settings.search and settings.when == "training":
        from disco_hlo.plugin.phases.training_phase import observe

        observe(settings)
    elif not settings.search and not capture:
        from disco_hlo.plugin.calls.loading import watch

        watch()
    if not capture:
        atexit.unregister(_say_if_nothing_was_found)
        atexit.register(_say_if_nothing_was_found, settings)


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
    if leads:
        _compiled[request.module_name] = None
    if len(request.devices) < 2 and not settings.names(request.module_name):
        return None
    from disco_hlo.plugin import tuner_results
    from disco_hlo.plugin.session import leave

    handle: Callable[[CompileRequest, Settings], LoadedExecutable | None]
    if capture:
        from disco_hlo.plugin.phases import capture_phase

        handle = functools.partial(capture_phase.handle, folder=Path(capture))
    elif settings.search and settings.when == "training":
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


def _say_if_nothing_was_found(settings: Settings) -> None:
    """At the end of a training that compiled something, but nothing that the phase could act on."""
    if not _compiled or _is_helper():
        return
    if settings.module is not None and not settings.may_be_key:
        reason = _named_module_missing(settings)
    elif "disco_hlo.plugin.step" not in sys.modules:
        reason = _nothing_on_several_devices()
    else:
        from disco_hlo.plugin.step import why_none

        reason = why_none(settings)
    if reason:
        LOGGER.warning("no training step was found: %s", reason)


def _is_helper() -> bool:
    """Whether this process is a child of another one's ``multiprocessing`` and saw nothing to train: a data loader."""
    from multiprocessing import parent_process

    if parent_process() is None or "disco_hlo.plugin.step" in sys.modules:
        return False
    return jaxlink.distributed_job() is None


def _nothing_on_several_devices() -> str:
    from disco_hlo.activation.choose import mpi_world_size

    world = mpi_world_size(os.environ) or 1
    if world > 1 and jaxlink.distributed_job() is None:
        return (
            f"{world} processes were started together, but their script does not call "
            "jax.distributed.initialize(): each trains for itself"
        )
    return "nothing was compiled for more than one device (DISCO_MODULE=name takes a step on one)"


def _named_module_missing(settings: Settings) -> str:
    if any(map(settings.names, _compiled)):
        return ""
    first = ", ".join(list(_compiled)[:8])
    return f"no module is called {settings.module} (DISCO_MODULE); compiled were {first}"
