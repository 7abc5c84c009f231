"""The training command that ``capture`` and ``calibrate`` start, told by its environment to capture its step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from disco_hlo.errors import DiscoError
from disco_hlo.plugin.phases.capture_record import VARIABLE

NO_STEP = (
    "compiled no training step: no module on several devices with an all-reduce of a computed value "
    "(DISCO_MODULE=name names one)"
)
"""What to say of a command that left no capture."""


def require(command: list[str], example: str) -> None:
    """Refuse a command that does not exist.

    Raises:
        DiscoError: it is not on the path, or may not be executed.
    """
    if shutil.which(command[0]) is None:
        what = "not an executable program" if Path(command[0]).exists() else "no such command"
        raise DiscoError(f"{command[0]}: {what}; expected: {example}")


def start(
    command: list[str], folder: Path, *, quiet: bool, own_group: bool = False
) -> subprocess.Popen[bytes]:
    """Start ``command``, which captures its step in ``folder``.

    Args:
        command: what to run.
        folder: where the capture goes.
        quiet: stdout is for something of ours; what the command prints goes to stderr.
        own_group: a process group of its own, which a signal reaches as a whole.

    Raises:
        DiscoError: the system cannot execute it.
    """
    environment = {**os.environ, VARIABLE: str(folder)}
    environment.pop("ENABLE_SEARCH", None)
    if sys.stdout is not None:  # closed by the shell (>&-)
        sys.stdout.flush()
    try:
        return subprocess.Popen(
            command, env=environment, stdout=2 if quiet else None, start_new_session=own_group
        )
    except OSError as error:
        raise DiscoError(f"{command[0]} cannot be started: {error.strerror or error}") from error
