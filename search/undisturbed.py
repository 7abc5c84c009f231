"""Preparing a search without Python's collector walking through it.

A step of 20,000 ops is read into millions of small objects that all live on. Each full collection looks at every
one of them, and at all that the user's program holds, to find nothing: up to a third of the time before the first
candidate.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Let no cyclic garbage be collected meanwhile. What is freed by its last reference still is."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
