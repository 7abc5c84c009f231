from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from disco_hlo.plugin import logs


@pytest.fixture(autouse=True)
def logger_as_it_was() -> Iterator[None]:
    before = (logs.LOGGER.level, logs.LOGGER.propagate, list(logs.LOGGER.handlers))
    yield
    logs.LOGGER.level, logs.LOGGER.propagate, logs.LOGGER.handlers = before
    logs.LOGGER.setLevel(before[0])


def test_a_phase_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    logs.configure("info")
    logs.LOGGER.info("profiled %d instructions\nin %.1f s", 12, 3.14)
    logs.LOGGER.warning("the plan is stale")
    logs.LOGGER.debug("not shown")
    captured = capsys.readouterr()
    assert captured.err == "disco: profiled 12 instructions in 3.1 s\ndisco: warning: the plan is stale\n"
    assert captured.out == ""


def test_a_traceback_is_shown_only_for_debugging(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        try:
            raise ValueError("broken")
        except ValueError as error:
            logs.LOGGER.error("gave up: %s", error, exc_info=True)

    logs.configure("info")
    fail()
    assert capsys.readouterr().err == "disco: error: gave up: broken\n"
    logs.configure("debug")
    fail()
    assert "Traceback (most recent call last)" in capsys.readouterr().err


class Closed:
    def write(self, text: str) -> int:
        raise ValueError("I/O operation on closed file")

    def isatty(self) -> bool:
        raise ValueError("I/O operation on closed file")


class Half:
    """As scripts put in the place of stderr: what is not called in their own tests is not there."""

    def write(self, text: str) -> int:
        return len(text)


@pytest.mark.parametrize("stream", [None, Closed(), Half()], ids=["none", "closed", "half"])
def test_a_stderr_that_takes_no_line_does_not_stop_the_training(
    stream: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs.configure("info")
    monkeypatch.setattr(sys, "stderr", stream)
    logs.LOGGER.info("nobody reads this")
    assert logs.progress_wanted() is False


def test_progress_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.configure("info")
    assert logs.progress_wanted() is False
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert logs.progress_wanted() is True
    logs.configure("warning")
    assert logs.progress_wanted() is False


def test_the_logger_is_the_projects_own() -> None:
    assert logs.LOGGER is logging.getLogger("disco_hlo")


def test_what_is_slower_is_not_called_less_than_once_as_fast() -> None:
    assert logs.compared(100.0, 80.0) == "1.25x faster"
    assert logs.compared(100.0, 110.0) == "1.10x slower"


def test_what_is_less_than_a_hundredth_is_not_called_a_gain() -> None:
    """A plan that was taken whatever the clock said was announced as 1.00x faster."""
    assert [logs.compared(100.0, after) for after in (99.5, 100.0, 100.5)] == ["no faster"] * 3
    assert logs.compared(100.0, 98.9) == "1.01x faster"
