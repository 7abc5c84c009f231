"""A function called in a fresh interpreter: Python that runs for seconds would hold up every thread of this one. What
must run here gives way soon (:func:`quick_switches`).

A fresh one, as no fork goes well beside the threads of a training, and ``multiprocessing`` would run the user's script
again. Both ends are ours, so pickle is safe here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, Protocol, TypeVar

from disco_hlo.errors import DiscoError

LOGGER = logging.getLogger("disco_hlo")
_BEGIN = (
    "import importlib, json, sys; paths, name, *numbers = sys.argv[1:]; "
    "sys.path += [one for one in json.loads(paths) if one not in sys.path]; "
    "importlib.import_module(name).main(*map(int, numbers))"
)
_LOOK_S = 0.2
NICENESS = 10
"""Of two that want the same core, this process gets a tenth: a training on two CPU cores slows down by as much."""
_SWITCH_S = 0.5e-3
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Run(Protocol):
    """Calls a function, somewhere."""

    def __call__(self, function: Callable[_P, _T], /, *arguments: _P.args, **named: _P.kwargs) -> _T:
        """What it returns."""


def here(function: Callable[_P, _T], /, *arguments: _P.args, **named: _P.kwargs) -> _T:
    """What the function returns, called in this interpreter."""
    return function(*arguments, **named)


def elsewhere(function: Callable[_P, _T], /, *arguments: _P.args, **named: _P.kwargs) -> _T:
    """What the function returns, called in a fresh interpreter; here where that gives no answer, as when it is killed:
    a rank that went on without what the others have would let them wait.

    Args:
        function: of a module that can be imported; needs no device, and changes nothing.

    Raises:
        What the function raises.
    """
    try:
        result, error = _answer((function, arguments, named), quiet=True)
    except Exception as why:  # noqa: BLE001  pickle says of what it cannot take or read what it likes
        LOGGER.debug("%s is called here, another interpreter gave no answer: %s", function, why)
        return function(*arguments, **named)
    if error is not None:
        raise error
    found: _T = result
    return found


def apart(
    function: Callable[..., _T], /, *arguments: object, longest_s: float, stop: Callable[[], object]
) -> _T:
    """What the function returns, called in a fresh interpreter of low priority and without devices beside a training.
    It is killed after too long, or once ``stop`` says so.

    Args:
        function: as for :func:`elsewhere`.

    Raises:
        DiscoError: it gave no answer, or the function raises it.
        OSError: it cannot be started.
    """
    alone = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    try:
        result, error = _answer((function, arguments, {}), alone, NICENESS, longest_s, stop)
    except (pickle.PickleError, AttributeError, EOFError, ImportError, TypeError) as why:
        raise DiscoError(f"what the search's process found is not readable: {why}") from None
    if error is not None:
        raise error
    found: _T = result
    return found


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Threads of this interpreter have Python back soon after they ask for it, which by default takes 5 ms for each
    other one that is busy. A thread that asks often, as a training and a search do, hardly gets on: beside one such
    thread a step of 3 ms had a third of its throughput, beside four a search of 6,021 ops came to 300 candidates in
    12 s, and to 24,000 with this."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _SWITCH_S))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _answer(
    task: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    variables: Mapping[str, str] = MappingProxyType({}),
    niceness: int = 0,
    longest_s: float = math.inf,
    stop: Callable[[], object] = bool,
    *,
    quiet: bool = False,
) -> tuple[Any, DiscoError | None]:
    """What a function called with these arguments returned, or the error of ours that it raised."""
    # Files without a name, which a fork of the training leaves alone at its own end.
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as answer:
        pickle.dump(task, asked)
        asked.seek(0)
        process = subprocess.Popen(
            command(__name__, os.getpid(), niceness),
            stdin=asked,
            stdout=answer,
            stderr=subprocess.DEVNULL if quiet else None,
            env={**environment(), **variables},
            start_new_session=True,  # a Ctrl-C is the training's
        )
        end = time.monotonic() + longest_s
        try:
            while process.poll() is None:
                if stop():
                    raise DiscoError("the search was stopped")
                if time.monotonic() > end:
                    raise DiscoError(f"the search's process has not ended after {longest_s:.0f} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_LOOK_S)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise DiscoError(f"the search's process ended with {process.returncode} and found nothing")
        answer.seek(0)
        found: tuple[Any, DiscoError | None] | str = pickle.load(answer)  # noqa: S301  our own child
        if isinstance(found, str):
            raise DiscoError(f"the search's process failed: {found}")
        return found


def command(module: str, *numbers: int) -> tuple[str, ...]:
    """Of a fresh interpreter that calls ``main(*numbers)`` of one of our modules.

    It begins as any other, and then also finds modules where this one does: last, as the script's folder may hold a
    ``types.py`` that nobody has missed so far, and none of its modules is needed.
    """
    # Scripts add pathlib's paths, which Python skips.
    paths = [path for path in sys.path if path and isinstance(path, str)]
    return (sys.executable, "-P", "-c", _BEGIN, json.dumps(paths), module, *map(str, numbers))


def environment() -> dict[str, str]:
    """Of a fresh interpreter that is not to search itself."""
    return {
        name: value for name, value in os.environ.items() if name not in ("ENABLE_SEARCH", "DISCO_CAPTURE")
    }


def _end_with(parent: int) -> None:
    """End this process with the process ``parent``: one that is killed kills nobody."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=look, name="disco-parent", daemon=True).start()


def main(parent: int, niceness: int) -> None:
    """Call the function that comes in; what it returns or raises goes out. End with the process ``parent``."""
    _end_with(parent)
    os.nice(niceness)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # what anything prints here is no answer
        function, arguments, named = pickle.load(sys.stdin.buffer)  # noqa: S301  our own parent
        answer: tuple[Any, DiscoError | None] | str
        try:
            answer = function(*arguments, **named), None
        except DiscoError as error:
            answer = None, error
        except Exception as error:
            LOGGER.debug("the search's process failed", exc_info=True)
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, out)
