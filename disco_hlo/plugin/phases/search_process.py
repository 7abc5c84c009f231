"""The search in a process of its own, beside a training that goes on (DisCo, section 4.5: no device is needed).

It runs at low priority, without devices, and ends with the training. What goes in and comes out are files, and
what comes out is checked: JSON of known fields, whose strategies are checked like those of any plan.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.files import read_bounded, replace_files
from disco_hlo.plan.plan import MAX_BYTES
from disco_hlo.plan.read import read
from disco_hlo.plan.store import MAX_MODULE_BYTES, PROFILE_NAME
from disco_hlo.plugin.interruption import Interruption
from disco_hlo.plugin.logs import LOGGER, configure
from disco_hlo.plugin.phases.finding import COMPILE_S, FoundPlans, find
from disco_hlo.plugin.settings import Settings
from disco_hlo.profiler.profile import Profile, load, to_json

_MODULE, _ASKED, _FOUND = "module.hlo.pb", "asked.json", "found.json"
_MOST_PLANS = 128
"""So many times what one plan may take, for all that are to be measured."""
_AROUND_S = 300.0
"""What reading the step and ranking what was found may take besides."""
_LOOK_S = 0.2
_NICENESS = 10
"""Of two that want the same core, this process gets a tenth: a training on two CPU cores slows down by as much."""


@dataclass(frozen=True)
class _Asked:
    """What the search is told beside the step and its profile."""

    settings: Settings
    room_bytes: int | None

    def say(self, message: str, *values: object) -> None:
        LOGGER.info(message, *values)


def longest_s(settings: Settings) -> float:
    """How long the search may take before it is given up."""
    return settings.budget_s + COMPILE_S + _AROUND_S


def search_apart(
    settings: Settings, module: bytes, profile: Profile, room_bytes: int | None, stop: Interruption
) -> FoundPlans:
    """Search in a process of its own, which is killed at the end, after too long, or once ``stop`` says so.

    Raises:
        DiscoError: it found nothing: it died, or was killed.
        OSError: it cannot be started.
    """
    asked = {**settings.as_dict(), "room_bytes": room_bytes}
    with tempfile.TemporaryDirectory(prefix="disco-search-") as name:
        folder = Path(name)
        files = {_MODULE: module, PROFILE_NAME: to_json(profile).encode(), _ASKED: msgspec.json.encode(asked)}
        replace_files(folder, files)
        _run(folder, longest_s(settings), stop)
        found = read_bounded(folder / _FOUND, _MOST_PLANS * MAX_BYTES)
    try:
        return msgspec.json.decode(found or b"", type=FoundPlans)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DiscoError(f"what the search's process found is not readable: {error}") from None


def _run(folder: Path, longest: float, stop: Interruption) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("ENABLE_SEARCH", "DISCO_CAPTURE")
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(folder), str(os.getpid())],
        env={**environment, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is the training's
    )
    end = time.monotonic() + longest
    try:
        while process.poll() is None:
            if stop:
                raise DiscoError("the training ended before the search")
            if time.monotonic() > end:
                raise DiscoError(f"the search's process has not ended after {longest:.0f} s")
            time.sleep(_LOOK_S)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise DiscoError(f"the search's process ended with {process.returncode} and found nothing")


# --- in that process ----------------------------------------------------------------------------------


def main(folder: Path, parent: int) -> None:
    """Search for what lies in ``folder``, and leave there what was found; end with the process ``parent``."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(_NICENESS)
    asked = _asked(folder)
    configure(asked.settings.log_level)
    source = canonicalize(read_bounded(folder / _MODULE, MAX_MODULE_BYTES) or b"")
    profile = load(folder / PROFILE_NAME)
    found = find(asked, source, read(source), profile, Interruption(), room_bytes=asked.room_bytes)
    replace_files(folder, {_FOUND: msgspec.json.encode(found.plans(asked.settings))})


def _asked(folder: Path) -> _Asked:
    values = msgspec.json.decode(read_bounded(folder / _ASKED, MAX_BYTES) or b"")
    room_bytes = values.pop("room_bytes")
    return _Asked(Settings(**{**values, "directory": Path(values["directory"])}), room_bytes)


def _end_with(parent: int) -> None:
    """A training that is killed kills nobody."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
