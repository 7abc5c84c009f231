"""The backends of XLA that there are plans for."""

from collections.abc import Iterable

from disco_hlo.backends.base import Backend as Backend
from disco_hlo.backends.cpu import CPU
from disco_hlo.backends.gpu import GPU
from disco_hlo.errors import UnsupportedError

BACKENDS = {backend.name: backend for backend in (CPU, GPU)}
"""By ``Graph.backend``."""


def backend_of(platform: str) -> Backend:
    """The backend that JAX calls so; UnsupportedError where there are no plans for it."""
    for backend in BACKENDS.values():
        if platform in backend.platforms:
            return backend
    raise UnsupportedError(f"platform {platform} is not supported: expected {' or '.join(BACKENDS)}")


def backend_of_module(data: bytes, settings: Iterable[bytes]) -> Backend:
    """The backend that made a module; XLA:CPU's have no marks.

    Args:
        data: the module's bytes.
        settings: its instructions' backend configs.
    """
    marked = [backend for backend in BACKENDS.values() if backend.marks or backend.module_marks]
    for backend in marked:
        if any(mark in data for mark in backend.module_marks):
            return backend
    for one in settings:
        for backend in marked:
            if any(mark in one for mark in backend.marks):
                return backend
    return CPU
