"""The cores of this machine."""

from __future__ import annotations

import os


def own_cores() -> list[int]:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
