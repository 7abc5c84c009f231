"""What the devices run and may never end: nothing can call them back, so the job ends in its place."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from disco_hlo.activation.kvstore import HANGS, LongWait
from disco_hlo.hlo.attributes import is_callback
from disco_hlo.hlo.proto import parse
from disco_hlo.hlo.regions import trip_count
from disco_hlo.plan.bans import note_hang, withdraw_marks
from disco_hlo.plugin.logs import LOGGER
from disco_hlo.plugin.xla.jaxlink import CompileRequest

Guard = Callable[[], contextlib.AbstractContextManager[None]]

_ENDLESS_S = 600.0
"""No step takes so long. A loop of it may end with the training's numbers, and not with made-up ones."""
_HANGS_S, _CALLS = 54.0, 18
"""Nor so long, nor as long as so many calls of its training, where these are timed: with what ranks need to tell each
other it has ended within a minute, if a call takes no longer than three seconds."""
_OPEN = frozenset({"conditional", "infeed", "outfeed"})
"""Ops that may take any time."""
_PIECES = 60
_LOOPS = "it may have a loop that ends only with the training's own inputs"
_LAST_S = 0.2
"""Until all ranks have heard that they end: the others' connections to the first one that does break."""


def long_s(call_ns: int) -> float:
    """After so many seconds what the devices run hangs, where a call takes so long."""
    return max(_HANGS_S, _CALLS * call_ns / 1e9)


def lasts_alike(module: bytes) -> bool:
    """Whether all runs of a serialized module take about as long: none has a loop or a branch by its inputs, nor what
    waits for the script."""
    return not any(
        trip_count(one) is None or one.opcode in _OPEN or is_callback(one)
        for body in parse(module).computations
        for one in body.instructions
    )


def coming_back(
    request: CompileRequest, went: str | None = None
) -> contextlib.AbstractContextManager[object]:
    """Around one run of a step that may never end, as of :func:`ending_hangs`: long is what is long beside a call of
    its training, or beside a run of XLA's default on the same inputs. Before any of these nobody knows, and it may take
    ten minutes.

    Args:
        went: why the run failed here, or empty, where this rank waits to hear of the others' runs.
    """
    wait = None if request.wait is None or not request.call_ns else request.wait(went)
    if wait is None and went is not None:
        return contextlib.nullcontext()
    alone = len(request.process_indices) == 1
    call_ns = request.call_ns if alone or wait is not None else 0
    return ending_hangs(f"a run of {request.module_name}", call_ns, wait, went)


@contextlib.contextmanager
def ending_hangs(
    what: str,
    call_ns: int,
    wait: LongWait | None,
    went: str | None = None,
    *,
    longest_s: float | None = None,
    mark: Guard = contextlib.nullcontext,
) -> Iterator[threading.Thread]:
    """Around what the devices run, and may never end: nothing can call them back, so the job ends in its place. Time
    for which the process itself was stopped does not count.

    A rank that stands still keeps the others in its collectives, which is no fault of what they run. So each says when
    it has waited for so long, and it hangs once all are in it so or have come back.

    Args:
        what: it is, in words.
        call_ns: what a call takes; 0 where nobody knows.
        wait: of this rank; None: there is no other, or none can be told.
        went: None in it. Else this rank is out of it, and why it failed here, or empty.
        longest_s: after which the job ends in any case; ten minutes, if None.
        mark: where it hangs, around the end of the process, which bans what it marks.

    Yields:
        What waits beside, and may do so for a sixtieth of that time more.
    """
    most_s = _ENDLESS_S if longest_s is None else longest_s
    lasts_s = long_s(call_ns) if call_ns else most_s
    piece_s, first = lasts_s / _PIECES, _PIECES if went is None else 1
    has_ended = threading.Event()

    def watch() -> None:
        if any(has_ended.wait(piece_s) for _ in range(first)):
            return
        for pieces in itertools.count(first):
            verdict = HANGS if wait is None else wait.verdict(piece_s)
            if has_ended.is_set() and not verdict:
                return
            if verdict or (went is None and pieces * piece_s >= most_s):
                waited_s = max(pieces * piece_s, lasts_s)
                with mark() if verdict == HANGS else contextlib.nullcontext():
                    _end_endless(what, waited_s, verdict if call_ns else _LOOPS, wait)
                return

    thread = threading.Thread(target=watch, name="disco-endless", daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        has_ended.set()
        if wait is not None:
            wait.end()


def _end_endless(what: str, waited_s: float, why: str, wait: LongWait | None) -> None:
    leads = wait is None or wait.rank == 0
    banned = why == HANGS and note_hang()
    LOGGER.log(
        logging.ERROR if leads or not why else logging.DEBUG,
        "%s has not ended after %g s: %s; it cannot be interrupted, so the job ends; %s",
        what, waited_s, why or "another rank stands still",
        "the candidate is banned, and the next job goes on without it" if banned
        else "start it again without ENABLE_SEARCH",
    )  # fmt: skip
    if why not in (HANGS, _LOOPS):
        withdraw_marks()
    if wait is not None:
        time.sleep(_LAST_S)
    end_now()


def end_now() -> NoReturn:
    """End the process, whatever its other threads are at."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # one may be closed, or None
            stream.flush()
    # An exit in order would wait for the other ranks (jax.distributed shuts down at a barrier).
    os._exit(1)
