from __future__ import annotations

import threading

from disco_hlo.plugin.calls.watch import DeviceTimes, device_ns


def test_time_begins_with_the_dispatch_or_with_the_end_of_the_one_before() -> None:
    assert device_ns(500, 300, {}, [0, 1]) == 200
    assert device_ns(500, 300, {0: 100, 1: 200}, [0, 1]) == 200
    assert device_ns(500, 300, {0: 400, 1: 350}, [0, 1]) == 100
    assert device_ns(500, 300, {0: 400, 1: 350}, [1]) == 150


class Token:
    """Ready when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended = threading.Event()
        self.error = error

    def block_until_ready(self) -> None:
        assert self.ended.wait(60)
        if self.error is not None:
            raise self.error


def test_executions_are_reported_in_order_and_a_failed_one_as_such() -> None:
    times = DeviceTimes()
    reported: list[tuple[str, bool]] = []
    tokens = [Token(), Token(ValueError("died")), Token()]
    for name, token in zip("abc", tokens, strict=True):
        times.note(token, 0, [0], lambda ns, name=name: reported.append((name, ns is not None)))
    for token in reversed(tokens):
        assert reported == []
        token.ended.set()
    times.drain()
    assert reported == [("a", True), ("b", False), ("c", True)]
    assert times.total_ns > 0
    times.close()
    times.close()


def test_a_clock_that_was_closed_starts_again() -> None:
    times = DeviceTimes()
    for _ in range(2):
        token = Token()
        token.ended.set()
        times.note(token, 0, [0], lambda _: None)
        times.drain()
        times.close()
    assert times._thread is None
