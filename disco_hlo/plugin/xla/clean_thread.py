"""A thread without what the user's code has set on its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from disco_hlo.plugin.xla import jaxlink

Result = TypeVar("Result")


def in_clean_thread(work: Callable[[], Result]) -> Result:
    """Run ``work`` without the mesh, guards and precision that the user's code may have set on its thread, and without
    the guard that it may have set on all."""
    import jax

    def marked() -> Result:
        with jaxlink.ours(), jax.transfer_guard("allow"):
            return work()

    with ThreadPoolExecutor(1, "disco-compile") as clean:
        return clean.submit(marked).result()
