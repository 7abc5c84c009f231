"""Steps that call back into Python, which must not happen on made-up inputs."""

from __future__ import annotations

import re

from disco_hlo.errors import UnsupportedError, shared

_PYTHON_CALLBACK = re.compile(rb"xla(?:_ffi)?(?:_partitioned)?_python_[a-z]+_callback")


def calls_python(module: bytes) -> bool:
    """Whether a serialized module calls back into Python (``jax.debug.print``, ``io_callback``, ...)."""
    return _PYTHON_CALLBACK.search(module) is not None


def refuse_callbacks(module: bytes, name: str) -> None:
    """Raise UnsupportedError where :func:`calls_python`: such a step is not run on made-up inputs."""
    if calls_python(module):
        raise shared(
            UnsupportedError(
                f"{name} calls back into Python (jax.debug.print, io_callback): made-up inputs could have effects "
                "there; search it without that call"
            )
        )
