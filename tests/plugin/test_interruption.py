"""Ctrl-C during a search: who takes it, who hears of it, and what a second one does."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from disco_hlo.errors import ActivationError
from disco_hlo.plugin import session
from disco_hlo.plugin.session import Interruption


class Board:
    """Notes that all ranks of this test see."""

    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone
        self.asked = 0
        self.left = threading.Event()

    def leave(self) -> None:
        if self.gone:
            raise ActivationError("rank 0's process does not answer")
        self.left.set()

    def found(self) -> bool:
        self.asked += 1
        if self.gone:
            raise ActivationError("rank 0's process does not answer")
        return self.left.is_set()


@pytest.fixture(autouse=True)
def _python_takes_ctrl_c() -> Iterator[None]:
    """A suite in the background of a shell hands its processes SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LOOK_S", 0.0)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def told_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "disco-interrupted":
            thread.join()


def test_rank_0_hears_of_another_ranks_ctrl_c() -> None:
    board = Board()
    first, second = Interruption(board), Interruption(board, leads=False)
    with first.watched():
        assert not first
    with second.watched():
        assert not second
        press()
        assert second
        assert board.left.wait(10)
    assert first
    assert first.wanted


def test_rank_0_leaves_no_note_of_its_own_and_asks_for_none_once_it_knows() -> None:
    board = Board()
    stop = Interruption(board)
    with stop.watched():
        press()
    assert stop
    told_threads()
    assert not board.left.is_set()
    assert board.asked == 0


def test_it_looks_for_notes_now_and_then_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LOOK_S", 1000.0)
    board = Board()
    stop = Interruption(board)
    assert [bool(stop) for _ in range(5)] == [False] * 5
    assert board.asked == 1


def test_a_second_ctrl_c_ends_the_program() -> None:
    with Interruption(Board(), leads=False).watched():
        press()
        with pytest.raises(KeyboardInterrupt):
            press()


def test_a_handler_that_is_not_pythons_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a program in another language, with a handler of its own, embeds Python."""
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    with Interruption().watched() as stop, pytest.raises(KeyboardInterrupt):
        press()
    assert not stop


def test_where_nobody_takes_the_note_one_line_says_so_and_nothing_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop = Interruption(Board(gone=True), leads=False)
    with caplog.at_level(logging.INFO, "disco_hlo"):
        with stop.watched():
            press()
        told_threads()
    assert [record.getMessage() for record in caplog.records] == [
        "interrupted: the search is ended; another Ctrl-C ends the program",
        "rank 0 cannot be told of the interruption: rank 0's process does not answer",
    ]
    assert not Interruption(Board(gone=True))


def test_in_one_process_there_is_nobody_to_tell() -> None:
    stop = Interruption()
    with stop.watched():
        assert not stop
        press()
        assert stop
