"""Modules that somebody waits for JAX to load, to watch their calls. Every process that enacts plans imports this."""

from __future__ import annotations

import threading

from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.logs import LOGGER, one_line
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.jaxlink import CompileRequest, Execute, LoadedModule

_watching = threading.Event()


def watch() -> None:
    """Have JAX show what it loads, from before its first call on: later a call could be seen too late."""
    try:
        jaxlink.watch_calls(_observe)
        _watching.set()
    except UnsupportedError as error:
        LOGGER.debug("calls cannot be watched: %s", one_line(error))


def refuse_unwatched(request: CompileRequest) -> None:
    """Refuse what needs ``CompileRequest.on_load``.

    Raises:
        UnsupportedError: JAX does not show what it loads, or would compile it anew by a profile of its own.
    """
    import jax

    if not _watching.is_set():
        raise UnsupportedError("calls are not watched")
    with request.as_user():
        anew = jax.config.jax_enable_pgle
    if anew:
        raise UnsupportedError("JAX compiles the step anew by a profile of its own (jax_enable_pgle)")


def _observe(module: LoadedModule) -> Execute | None:
    begin = module.request.on_load
    return None if begin is None else begin(module)
