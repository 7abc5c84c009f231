"""Wiring: environment -> settings -> the wrapped compile -> search or enactment phase."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from disco_hlo.plugin import jaxlink
from disco_hlo.plugin.jaxlink import CompileRequest, LoadedExecutable
from disco_hlo.plugin.logs import configure
from disco_hlo.plugin.settings import Settings

_one_at_a_time = threading.Lock()


def install_from_environment() -> None:
    """Install the phase that ``ENABLE_SEARCH`` names, or capturing (``DISCO_CAPTURE``). Imports no phase yet.

    Raises:
        SettingsError: a ``DISCO_*`` variable or the config file has a value that cannot be used.
        UnsupportedError: this jax is not supported.
    """
    capture = os.environ.get("DISCO_CAPTURE", "").strip()
    settings = Settings.from_environment({**os.environ, "ENABLE_SEARCH": "0"} if capture else None)
    configure(settings.log_level)
    jaxlink.install(lambda request: _handle(request, settings, capture))


def _handle(request: CompileRequest, settings: Settings, capture: str) -> LoadedExecutable | None:
    if len(request.devices) < 2 and not settings.names(request.module_name):
        return None
    if capture:
        from disco_hlo.plugin.capture_phase import capture_in

        handle = capture_in(Path(capture))
    elif settings.search:
        from disco_hlo.plugin.search_phase import handle
    else:
        from disco_hlo.plugin.enact_phase import handle
    with _one_at_a_time:
        return handle(request, settings)
