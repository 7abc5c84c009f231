"""The record of one cell (model, link, devices): a JSON file that is whole after every step of the work."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = "disco-hlo evaluation"
VERSION = 1
OK, FAILED, ABSENT, NO_TIME, WORKING = "ok", "failed", "not on this backend", "no time", "working"
"""Status of a row. One that is ``working`` when the process ends is tried once more."""
ALONE_XLA = "transfers alone (XLA's kernels)"
"""The row in which nothing runs beside transfers."""
_ATTEMPTS = 2
_HANGS_S = 30.0
MAXIMUM_BYTES = 64 << 20


class RecordError(Exception):
    """A file that is no record of this cell; the message says what was expected."""


@dataclass(frozen=True, slots=True)
class CellName:
    """What a record is about."""

    model: str
    size: str
    link: str
    devices: int

    @property
    def stem(self) -> str:
        """Name of its file, without suffix."""
        return f"{self.model}-{self.size}-{self.link}-{self.devices}"


class Record:
    """The content of a cell's file. Whatever changes it writes it: a kill loses at most what was under way."""

    def __init__(self, path: Path, cell: CellName, data: dict[str, Any]) -> None:
        self.path = path
        self.cell = cell
        self.data = data
        self._lock = threading.RLock()

    @classmethod
    def open(cls, folder: Path, cell: CellName) -> Record:
        """The record in ``folder``, begun where there is none. Rows that were being worked on when the process
        ended, for the second time, fail.

        Raises:
            RecordError: the file there is of another kind, or of another cell.
        """
        path = folder / f"{cell.stem}.json"
        if not path.exists():
            fresh = {"format": FORMAT, "version": VERSION, "cell": asdict(cell), "facts": {}, "rows": {}}
            return cls(path, cell, fresh)
        data = read(path)
        if data["cell"] != asdict(cell):
            raise RecordError(f"{path} is about {data['cell']}, expected {asdict(cell)}")
        for row in data["rows"].values():
            if row.get("status") == WORKING and row.get("attempts", 0) >= _ATTEMPTS:
                reason = f"the process ended {_ATTEMPTS} times while it was compiled or run"
                row.update(status=FAILED, reason=reason)
        return cls(path, cell, data)

    def note(self, **facts: Any) -> None:
        """Keep facts about the cell."""
        with self._lock:
            self.data["facts"].update(facts)
            self._write()

    def fact(self, name: str) -> Any:
        """A fact about the cell; None where it is not known."""
        return self.data["facts"].get(name)

    @contextlib.contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Note how long what is done in this context takes, as ``<stage>_s``."""
        started = time.monotonic()
        yield
        self.note(**{f"{stage}_s": round(time.monotonic() - started, 3)})

    def row(self, name: str) -> dict[str, Any]:
        """What is known of a row; empty where it was never begun."""
        row: dict[str, Any] = self.data["rows"].get(name, {})
        return row

    def update(self, name: str, **values: Any) -> None:
        """Change a row and write."""
        self.update_all({name: values})

    def update_all(self, changes: dict[str, dict[str, Any]]) -> None:
        """Change several rows and write once."""
        with self._lock:
            for name, values in changes.items():
                self.data["rows"].setdefault(name, {}).update(values)
            self._write()

    def begin(self, name: str, kind: str) -> None:
        """Say that a row is being worked on, for the case that it kills the process."""
        attempts = self.row(name).get("attempts", 0) + 1
        self.update(name, kind=kind, status=WORKING, attempts=attempts)

    def stop(self, reason: str) -> None:
        """Rows that are still being worked on have no time left; they may be tried again, but for one whose
        first run has been under way so long that its devices must be waiting for each other."""
        now = time.time()
        changes: dict[str, dict[str, Any]] = {}
        for name, row in self.data["rows"].items():
            if row.get("status") == WORKING and now - (row.get("first_run_began") or now) > _HANGS_S:
                changes[name] = {"status": FAILED, "reason": "its first run did not end"}
            elif row.get("status") == WORKING:
                changes[name] = {"status": NO_TIME, "reason": reason, "attempts": 0}
        self.update_all(changes)

    def finished(self, name: str) -> bool:
        """Whether there is nothing left to do for a row."""
        return self.row(name).get("status") in (OK, FAILED, ABSENT)

    def _write(self) -> None:
        write_atomically(self.path, (json.dumps(self.data, indent=1) + "\n").encode())


def read(path: Path) -> dict[str, Any]:
    """A record's content.

    Raises:
        RecordError: it cannot be read, or is of another kind or version.
    """
    try:
        if path.stat().st_size > MAXIMUM_BYTES:
            raise RecordError(f"{path} is larger than {MAXIMUM_BYTES >> 20} MiB")
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
        raise RecordError(f"{path} is no {FORMAT} of version {VERSION}")
    for name in ("cell", "facts", "rows"):
        if not isinstance(data.get(name), dict):
            raise RecordError(f"{path}: {name} is {type(data.get(name)).__name__}, expected an object")
    return data


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside ``path``, then rename."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
