"""Which modules must not be tried again, since trying them ended the process.

    compiling-<sha>.<pid>-<random>   the module is being compiled, or run for the first time: a *mark*
    died-<sha>.<pid>-<random>        the same file, once its process is dead and its end speaks against the module

A mark names its process, and the process notes in it how it ends (``endings.py``). Whoever finds a mark of a dead
process judges it, by these rules:

* A process that was told to end (SIGTERM, Ctrl-C, a scheduler's warning) says nothing of the module. Neither does an
  abort in a thread of the coordination service's in a job of several processes: a peer died.
* A fatal signal of its own is a crash, and bans the module. In a first run of a job of several processes it may be what
  a peer's death does to a collective, so there it is one death.
* A process that ended itself since what it ran hung says so, which bans the module.
* An end that left no note (SIGKILL, out of memory, ``_exit``) is one death.
* Three deaths ban. A compile that succeeds takes back the deaths of compiles, a run that succeeds all of them.
* Where a process died in several modules at once none is banned; each is tried alone the next time.

A record that cannot be read bans nothing, and is removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shlex
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from disco_hlo.errors import PlanError
from disco_hlo.plan.endings import Places, told, watched
from disco_hlo.plan.files import OwnedFile, RenewedFile, read_bounded, replace_files, this_process

Stage = Literal["compile", "run"]
DEATHS = 3
"""So many without a success between them ban a module."""

_MARK, _DIED = "compiling-", "died-"
_NAME = re.compile(rf"(?:{_MARK}|{_DIED})(?P<module>[0-9a-f]{{64}})\.[0-9]{{1,10}}-[0-9a-f]{{1,12}}")
"""Of files that are ours. Others are left alone: a plan may be kept in any folder."""
_MAX_BYTES = 4096
_KEPT_S = 30 * 86400.0
"""How long a death that bans nothing is remembered."""
_NONE, _HUNG = "00", "99"
_WHEN: dict[str, str] = {"compile": "compiled", "run": "first run"}

log = logging.getLogger(__name__)
_unguarded: set[Path] = set()
"""Folders of which this process has said that marks cannot be written there: a search would write a dozen."""
_held: dict[Path, Stage] = {}
"""Marks of this process."""
_discarded: set[Path] = set()
"""Files of which this process has said that they are no records."""

_Digits = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{2}$")]
_Text = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{0,300}$")]


class _Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mark's content. The first three are overwritten in place, by the handler of ``endings.py``."""

    fatal: _Digits
    told: _Digits
    ours: Annotated[str, msgspec.Meta(pattern=r"^[01]$")]
    version: Literal[1]
    module: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    stage: Stage
    processes: Annotated[int, msgspec.Meta(ge=1)]
    """Of the job, which can die without this one's doing."""
    host: _Text
    machine: _Text
    pid: Annotated[int, msgspec.Meta(ge=1)]
    started: _Text
    nonce: _Text
    since: _Text

    def is_crash(self) -> bool:
        """Whether the module itself ended the process, for certain."""
        return self.fatal == _HUNG or (
            self.fatal != _NONE and (self.processes == 1 or self.stage == "compile")
        )

    def speaks(self) -> bool:
        """Whether the end of the process says anything of the module."""
        by_a_peer = self.fatal not in (_NONE, _HUNG) and self.processes > 1 and self.ours == "0"
        return self.told == _NONE and not by_a_peer

    def text(self) -> str:
        """What happened, as a sentence's end."""
        by = "" if self.fatal == _NONE else f" by {_signal_name(int(self.fatal))}"
        how = (
            "hung while it was run" if self.fatal == _HUNG else f"ended{by} while it was {_WHEN[self.stage]}"
        )
        return f"process {self.pid} on {self.host} {how} ({self.since})"


_PLACES = Places(
    fatal=len('{"fatal":"'),
    told=len('{"fatal":"00","told":"'),
    ours=len('{"fatal":"00","told":"00","ours":"'),
)


@dataclass(frozen=True, slots=True)
class Ban:
    """A module that is not tried."""

    module: str
    """SHA-256 in hex."""
    reason: str


@dataclass(frozen=True, slots=True)
class _Record:
    path: Path
    mark: _Mark


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class Bans:
    """Marks and deaths in the folder of one plan."""

    folder: Path

    @contextlib.contextmanager
    def trying(self, module: str, stage: Stage, processes: int) -> Iterator[None]:
        """Stand around a compile or a first run; whoever comes later knows of it where it ends the process.

        Where nothing can be written (a plan directory shared read-only) it goes unguarded; so it does where there is
        no folder, on a rank that has its plan from another's directory.
        """
        mark = self._marked(module, stage, processes) if self.folder.is_dir() else None
        if mark is None:
            yield
            return
        renewed, file = mark
        try:
            with watched(file, _PLACES):
                yield
            self._acquit(module, stage)
        finally:
            _held.pop(renewed.path, None)
            os.close(file)
            renewed.remove()

    def _marked(self, module: str, stage: Stage, processes: int) -> tuple[RenewedFile, int] | None:
        content = _Mark(_NONE, f"{told(_PLACES):02}", "0", 1, module, stage, processes, **this_process())
        data = msgspec.json.encode(content)
        name = f"{_MARK}{module}.{os.getpid()}-{os.urandom(6).hex()}"
        try:
            replace_files(self.folder, {name: data})
            # It is written to by the handler alone, which can open nothing.
            file = os.open(self.folder / name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (PlanError, OSError) as error:
            if self.folder not in _unguarded:
                _unguarded.add(self.folder)
                log.warning("plans are compiled without marks that would ban them if they crashed: %s", error)
            return None
        _held[self.folder / name] = stage
        return RenewedFile(self.folder / name), file

    def reason(self, module: str) -> str:
        """Why this module must not be tried; empty if it may."""
        return next((ban.reason for ban in self.all() if ban.module == module), "")

    def all(self) -> list[Ban]:
        """Every banned module of this folder. Marks of dead processes are judged on the way."""
        records = self._judged()
        alone = defaultdict[str, list[_Record]](list)
        for record in records:
            if not _others_of(record, records):
                alone[record.mark.module].append(record)
        bans = {module: self._verdict(found) for module, found in sorted(alone.items())}
        self._forget_old(record for record in records if not bans.get(record.mark.module))
        return [Ban(module, reason) for module, reason in bans.items() if reason]

    def suspects(self, module: str) -> bool:
        """Whether a process died while it tried this module and others at once, so that any of them may have ended it.
        They are to be tried one at a time: then a mark that is left behind tells."""
        records = self._judged()
        return any(record.mark.module == module and _others_of(record, records) for record in records)

    def forgive(self) -> int:
        """Forget every death; how many modules were banned.

        Raises:
            PlanError: that cannot be written.
        """
        count = len(self.all())
        for path in self._named(_DIED):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise PlanError(f"cannot remove {path}: {error.strerror}") from error
        return count

    def _verdict(self, records: list[_Record]) -> str:
        deaths = sorted((one.mark for one in records), key=lambda mark: mark.since)
        crashes = [mark for mark in deaths if mark.is_crash()]
        if not crashes and len(deaths) < DEATHS:
            return ""
        last = (crashes or deaths)[-1].text()
        why = last if crashes else f"{len(deaths)} processes ended, the last: {last}"
        return f"{why}; to try it again: disco forgive {shlex.quote(str(self.folder))}"

    def _acquit(self, module: str, stage: Stage) -> None:
        """What was tried and ended nobody."""
        for record in self._judged():
            if record.mark.module == module and stage in ("run", record.mark.stage):
                _remove(record.path)

    # --- what lies there --------------------------------------------------------------------------

    def _judged(self) -> list[_Record]:
        """The deaths; marks of dead processes among them become such, or are removed."""
        records = []
        for path in self._named(_MARK, _DIED):
            name = _NAME.fullmatch(path.name)
            is_mark = path.name.startswith(_MARK)
            if is_mark and OwnedFile(path).is_alive():
                continue
            mark = _decoded(path)
            if mark is None and not os.path.lexists(path):
                continue  # its owner has taken it back since its name was read
            if name is None or mark is None or mark.module != name["module"]:
                _discard(path)
            elif not mark.speaks():
                _remove(path)
            else:
                records.append(_Record(_kept(path) if is_mark else path, mark))
        return records

    def _named(self, *prefixes: str) -> list[Path]:
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:
            return []
        return [self.folder / name for name in names if name.startswith(prefixes) and _NAME.fullmatch(name)]

    def _forget_old(self, records: Iterator[_Record]) -> None:
        now = time.time()
        for record in records:
            with contextlib.suppress(OSError):
                if now - record.path.lstat().st_mtime > _KEPT_S:
                    _remove(record.path)


def withdraw_marks() -> None:
    """Before this process ends itself for a reason that is no module's: its marks say nothing."""
    for path in list(_held):
        _remove(path)


def note_hang() -> bool:
    """Before this process ends itself, as what it runs does not come back: that bans what runs, and nothing that is
    compiled meanwhile. Whether anything is banned."""
    banned = False
    for path, stage in list(_held.items()):
        if stage != "run":
            _remove(path)
            continue
        with contextlib.suppress(OSError), path.open("r+b") as file:
            file.seek(_PLACES.fatal)
            file.write(_HUNG.encode())
            _kept(path)  # what runs may fail before the process has ended, and would take a mark back
            banned = True
    return banned


def _others_of(record: _Record, records: list[_Record]) -> bool:
    """Whether the same process died in another module as well."""
    mine = record.mark
    return any(
        one.mark.module != mine.module
        and (one.mark.machine, one.mark.pid, one.mark.started) == (mine.machine, mine.pid, mine.started)
        for one in records
    )


def _decoded(path: Path) -> _Mark | None:
    try:
        return msgspec.json.decode(read_bounded(path, _MAX_BYTES) or b"", type=_Mark)
    except (PlanError, msgspec.MsgspecError, RecursionError):
        return None


def _kept(path: Path) -> Path:
    """A dead process's mark under the name of a death; under its own where nothing can be written."""
    place = path.with_name(_DIED + path.name.removeprefix(_MARK))
    try:
        os.rename(path, place)
    except OSError:
        return path
    return place


def _discard(path: Path) -> None:
    """What is no record of this version. It is removed; where it cannot be, it still counts for nothing."""
    if path not in _discarded:
        _discarded.add(path)
        log.warning("%s is no readable record of a crash: it bans nothing, and is removed", path)
    _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
