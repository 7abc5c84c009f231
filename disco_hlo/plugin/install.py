"""Wiring: environment -> settings -> the wrapped compile -> search or enactment phase."""

from __future__ import annotations

import threading

from disco_hlo.plugin import jaxlink
from disco_hlo.plugin.jaxlink import CompileRequest, LoadedExecutable
from disco_hlo.plugin.logs import configure
from disco_hlo.plugin.settings import Settings

_one_at_a_time = threading.Lock()


def install_from_environment() -> None:
    """Install the phase that ``ENABLE_SEARCH`` names. Imports no phase yet.

    Raises:
        SettingsError: a ``DISCO_*`` variable or the config file has a value that cannot be used.
        UnsupportedError: this jax is not supported.
    """
    settings = Settings.from_environment()
    configure(settings.log_level)
    jaxlink.install(lambda request: _handle(request, settings))


def _handle(request: CompileRequest, settings: Settings) -> LoadedExecutable | None:
    if len(request.devices) < 2 and not settings.names(request.module_name):
        return None
    if settings.search:
        from disco_hlo.plugin.search_phase import handle
    else:
        from disco_hlo.plugin.enact_phase import handle
    with _one_at_a_time:
        return handle(request, settings)
