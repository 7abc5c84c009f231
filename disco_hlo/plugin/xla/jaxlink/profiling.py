"""A profiler trace of our own, which gives way to the script.

There is one profiler, and the script may want it between two calls that are traced: JAX takes a lock before it begins
a trace. Ours ends where somebody takes that lock. It stays in memory: JAX's own stop writes it to a folder, and once
more as JSON, which takes twice as long as all the rest.
"""

from __future__ import annotations

import threading
from typing import Any

from disco_hlo.errors import ProfileError
from disco_hlo.plugin.xla.jaxlink.requests import profiler_runs


class OwnTrace:
    """As :class:`~disco_hlo.profiler.trace.Profiler`; over calls of the script begun and ended in its thread."""

    def __init__(self) -> None:
        self._session: Any = None
        self._state: Any = None
        self._lock: Any = None
        """JAX's own."""
        self._ending = threading.Lock()

    def start(self, options: Any) -> None:
        """Begin it, with ``jax.profiler.ProfileOptions``.

        Raises:
            ProfileError: the script has a trace of its own under way, or this jax has another profiler.
        """
        try:
            from jax._src import profiler
            from jax._src.lib import _profiler

            self._state, self._lock = profiler._profile_state, profiler._profile_state.lock
            session_of = _profiler.ProfilerSession
        except (AttributeError, ImportError) as error:
            raise ProfileError(f"this jax has another profiler: {error}") from error
        with self._lock:
            if profiler_runs():
                raise ProfileError("the script's own profiler trace is under way")
            self._session = session_of(options)
            self._state.lock = _GivesWay(self)

    def stop(self) -> bytes:
        """End it; a serialized ``XSpace``, empty where it had ended before."""
        with self._ending:
            session, self._session = self._session, None
            if session is None:
                return b""
            try:
                return bytes(session.stop())
            finally:  # XLA's profiler is taken until then: a trace that the script began meanwhile would fail
                self._state.lock = self._lock


class _GivesWay:
    """In the place of JAX's lock while a trace of ours is under way."""

    def __init__(self, trace: OwnTrace) -> None:
        self._trace = trace

    def __enter__(self) -> None:
        self._trace.stop()
        self._trace._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._trace._lock.release()
