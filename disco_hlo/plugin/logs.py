"""What a user sees while training: one calm line per phase on stderr, each beginning with ``disco:``."""

from __future__ import annotations

import contextlib
import logging
import sys

from disco_hlo.errors import DiscoError
from disco_hlo.optimize.select import LEAST_GAIN
from disco_hlo.printable import printable

LOGGER = logging.getLogger("disco_hlo")
LEVELS = ("debug", "info", "warning", "error")


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        severity = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = " ".join(record.getMessage().split())
        text = printable(text, len(text))
        if record.exc_info and LOGGER.isEnabledFor(logging.DEBUG):
            text = f"{text}\n{self.formatException(record.exc_info)}"
        return f"disco: {severity}{text}"


class _StderrHandler(logging.Handler):
    """Writes to whatever ``sys.stderr`` is when the line is written, so that redirection works."""

    def emit(self, record: logging.LogRecord) -> None:
        # It may be closed, None, or an object of the script's that can do half of this: no line is worth the training.
        with contextlib.suppress(Exception):
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


def one_line(error: BaseException) -> str:
    """What an error says, on one line: our own errors explain themselves, others are named by their type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, DiscoError) and text else f"{type(error).__name__}: {text}"


def configure(level: str) -> None:
    """Send the ``disco_hlo`` logger to stderr at ``level`` (one of :data:`LEVELS`). Repeatable."""
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False
    if any(isinstance(handler, _StderrHandler) for handler in LOGGER.handlers):
        return
    handler = _StderrHandler()
    handler.setFormatter(_PlainFormatter())
    LOGGER.addHandler(handler)


def progress_wanted() -> bool:
    """Whether a progress bar may be drawn: stderr is a terminal and lines below ``warning`` are shown."""
    try:
        return sys.stderr.isatty() and LOGGER.isEnabledFor(logging.INFO)
    except (AttributeError, ValueError):  # None, closed, or an object of the script's
        return False


def compared(ratio: float) -> str:
    """A time over another as ``1.25x faster``, ``no faster`` or, where a plan is forced on a step, ``1.10x slower``."""
    if abs(1 - ratio) < LEAST_GAIN:
        return "no faster"
    return f"{ratio:.2f}x slower" if ratio > 1 else f"{1 / ratio:.2f}x faster"
