"""Candidates that hang in a call of the training, and what would end the process."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from disco_hlo.plugin import hangs
from disco_hlo.plugin.calls import hanging
from disco_hlo.plugin.calls.trial import Trial
from disco_hlo.plugin.xla import executables

PLACES = ("in the call", "behind it")
"""A call does not return, as where the host computes; or it does, and what it returns is never ready."""


def end_where_it_hangs(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let calls hang soon; the event: the process would have ended."""
    ended = threading.Event()

    def end(_: int) -> None:
        ended.set()
        sys.exit()  # of the thread alone

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(hanging, "LOOK_S", 0.01)
    monkeypatch.setattr(hangs, "_HANGS_S", 0.2)
    monkeypatch.setattr(hangs, "_CALLS", 0)
    return ended


class _NeverReady:
    """In the place of an execution's token."""

    def __init__(self, until: Callable[[], object]) -> None:
        self.block_until_ready = until


class _Results:
    """Of an execution that does not end."""

    def __init__(self, results: Any, until: Callable[[], object]) -> None:
        self._results = results
        self._until = until

    def consume_token(self) -> Any:
        self._results.consume_token()
        return _NeverReady(self._until)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._results, name)


def hang(number: int, place: str, until: Callable[[], object]) -> Callable[[], None]:
    """Have the call of this number, of those that candidates run, hang at this place ``until`` that returns; what comes
    back ends it."""
    tried: list[Any] = []
    calls = 0
    offer, execute = Trial.offer, executables.execute

    def noted(trial: Trial, name: str, executable: Any, *args: Any, **kwargs: Any) -> None:
        tried.append(executable)
        offer(trial, name, executable, *args, **kwargs)

    def executed(executable: Any, arguments: Any) -> Any:
        nonlocal calls
        calls += any(executable is one for one in tried)
        if calls != number or not any(executable is one for one in tried):
            return execute(executable, arguments)
        if place == PLACES[0]:
            until()
        results = execute(executable, arguments)
        return _Results(results, until) if place == PLACES[1] else results

    Trial.offer, executables.execute = noted, executed  # type: ignore[method-assign]

    def restore() -> None:
        Trial.offer, executables.execute = offer, execute  # type: ignore[method-assign]

    return restore


@contextlib.contextmanager
def hanging_after(number: int, place: str, until: threading.Event) -> Iterator[None]:
    """As :func:`hang`, for the body, and until the process would have ended."""
    restore = hang(number, place, lambda: until.wait(60))
    try:
        yield
        assert until.wait(60)
    finally:
        restore()
