"""Compiled code and large graphs inside somebody's Python: how it interrupts the one, and collects around the other.

Python handles a Ctrl-C between two steps of its own in the main thread, so a main thread that is inside compiled code
notices nothing. Compiled code of ours holds no lock of Python's: it runs in a thread beside, and looks at a cell of an
array each time round, which somebody sets who looks at the clock and at the user.

A step of 20,000 ops is read into millions of small objects that all live on. Each full collection looks at every
one of them, and at all that the user's program holds, to find nothing: up to a third of the time before the first
candidate.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from disco_hlo.compiled import Ints

_LOOK_S = 0.05
"""From one look at the clock to the next."""
Result = TypeVar("Result")
Halted = Callable[[], bool] | None
"""Asked a few times a second whether to end; None: nobody asks."""


def interruptible(function: Callable[[], Result], control: Ints, cell: int, halted: Halted) -> Result:
    """What ``function`` returns, which ends soon once ``control[cell]`` is not 0.

    Args:
        halted: the cell is set once it answers True. Where nobody asks nothing is begun beside.
    """
    if halted is None:
        return function()
    found: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:  # noqa: BLE001  it is raised again where somebody waits
            failed.append(error)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    try:
        while worker.is_alive():
            worker.join(_LOOK_S)
            if halted():
                control[cell] = 1
    except BaseException:  # Ctrl-C: what the code works on must be left alone before anything goes on
        control[cell] = 1
        worker.join()
        raise
    if failed:
        raise failed[0]
    return found[0]


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
