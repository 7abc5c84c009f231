"""A function called in a fresh interpreter: Python that runs for seconds would hold up every thread of this one.

A fresh one, as no fork goes well beside the threads of a training, and ``multiprocessing`` would run the user's script
again. Both ends are ours, so pickle is safe here.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

from disco_hlo.errors import DiscoError

_COMMAND = (sys.executable, "-P", "-m", "disco_hlo.elsewhere")
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
    """What the function returns, called in a fresh interpreter; here where none can be started or told.

    Args:
        function: of a module that can be imported; needs no device.

    Raises:
        DiscoError: the interpreter ended without an answer. What the function raises passes through.
    """
    try:
        task = pickle.dumps((function, arguments, named))
        done = subprocess.run(_COMMAND, input=task, capture_output=True, env=environment(), check=False)
    except (pickle.PicklingError, AttributeError, TypeError, OSError):
        return function(*arguments, **named)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        said = lines[-1] if lines else f"exit status {done.returncode}"
        raise DiscoError(f"the interpreter that was started for {function.__name__} ended early: {said}")
    result, error = pickle.loads(done.stdout)  # noqa: S301  our own child
    if error is not None:
        raise error
    found: _T = result
    return found


def environment() -> dict[str, str]:
    """What a fresh interpreter needs to import what this one does, and not to search itself."""
    kept = {name: value for name, value in os.environ.items() if name != "ENABLE_SEARCH"}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def main() -> None:
    """Call the function that comes in; what it returns or raises goes out."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints here is no answer
    function, arguments, named = pickle.load(sys.stdin.buffer)  # noqa: S301  our own parent
    answer: tuple[Any, DiscoError | None]
    try:
        answer = function(*arguments, **named), None
    except DiscoError as error:
        answer = None, error
    pickle.dump(answer, out)
    out.flush()


if __name__ == "__main__":
    main()
