"""The backends of XLA that there are plans for."""

from disco_hlo.backends.base import Backend as Backend
from disco_hlo.backends.cpu import CPU
from disco_hlo.backends.gpu import GPU

BACKENDS = {backend.name: backend for backend in (CPU, GPU)}
"""By ``Graph.backend``."""
