"""What a script has switched on in JAX that no search can work with: said before the work starts, with the way out."""

from __future__ import annotations

from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.xla import jaxlink

_NO_JIT = (
    "jax_disable_jit is on: JAX runs every op by itself, so there is no training step to search or to run by a plan; "
    "switch it off (JAX_DISABLE_JIT=0)"
)
_told: set[str] = set()


def compiles_no_step(leads: bool) -> bool:
    """Whether JAX compiles op by op here; rank 0 says so, once."""
    if not jaxlink.jit_is_disabled():
        return False
    if leads and _NO_JIT not in _told:
        _told.add(_NO_JIT)
        LOGGER.warning(_NO_JIT)
    return True


def switched_on() -> str:
    """What makes another step of the script's own, and the way out; empty where nothing does."""
    import jax

    if jax.config.jax_debug_nans:
        return (
            "jax_debug_nans is on, with which JAX donates no buffers: that is another step, with a plan of its own; "
            "switch it off (JAX_DEBUG_NANS=0)"
        )
    return ""


def refuse_switched_on() -> None:
    """Refuse to search a step that is not the one that trains, or while the script takes a trace of its own.

    Raises:
        UnsupportedError: naming the switch, and the way out.
    """
    if jaxlink.profiler_runs():
        raise UnsupportedError(
            "the script's own profiler trace (jax.profiler) is under way, and there is one profiler, which the search "
            "needs: start the trace after the first step, or train without ENABLE_SEARCH"
        )
    if reason := switched_on():
        raise UnsupportedError(reason)
