"""The plan directory: what a search found, kept so that no crash, rival or full disk can spoil it.

    <directory>/<fingerprint, 16 digits>/<backend>-<device kind>-x<devices>[-p<processes>]/
        plan.json            the plan; its field "module_sha256" names the module it goes with
        module.hlo.pb        the optimized HLO module (DisCo, section 5.1: what the master broadcasts)
        module.hlo.txt       the same, to read
        default.hlo.pb.gz    the module it was made from
        profile.json         the measured times it was made with (profiler/profile.py)
        timelines.json.gz    measured steps of XLA's default and the plan (profiler/timeline.py)
        compared.json        modules whose numbers an enacting run found to be the default's (compared.py)
        search.lock          a search is running (see locks.py)
        compiling-<sha>.*    a plan or candidate is being tried; left behind, it killed its process
        banned-<sha>         a plan that killed a process

Files appear whole or not at all: written beside their place, synced, renamed, ``plan.json`` last. A
save that stopped between two renames is noticed by the digest. This file deals in bytes and paths;
what a plan means is ``plan.py``'s.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from disco_hlo.errors import PlanError
from disco_hlo.plan.files import read_bounded, remove_leftovers, replace_files
from disco_hlo.plan.locks import Lock, OwnedFile
from disco_hlo.plan.plan import MAX_BYTES, Target

PLAN_NAME = "plan.json"
MODULE_NAME = "module.hlo.pb"
TEXT_NAME = "module.hlo.txt"
DEFAULT_NAME = "default.hlo.pb.gz"
PROFILE_NAME = "profile.json"
COMPARED_NAME = "compared.json"
MAX_MODULE_BYTES = (2 << 30) - 1
"""protobuf's own limit on one message."""
_MAX_REASON_BYTES = 1 << 16
_MAX_COMPARED_BYTES = 1 << 20
_SAVE_WAIT_S = 30.0
_READ_ATTEMPTS = 5
_MAX_BESIDE = 32
"""How many plans are looked at for their steps' names: they may be many, on a slow file system."""

log = logging.getLogger(__name__)
_unguarded: set[Path] = set()
"""Folders of which this process has said that marks cannot be written there: a search would write a dozen."""


class _Named(msgspec.Struct, frozen=True):
    """As much of a plan as says what it was made for."""

    target: Target


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """One plan as it lies in the store, module checked against plan."""

    path: Path
    """The plan's folder."""
    plan_json: bytes
    module: bytes
    """Serialized ``HloModuleProto``."""
    module_sha256: str


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of :meth:`PlanStore.list_plans`."""

    path: Path
    plan_json: bytes
    """Empty where it cannot be used."""
    problem: str
    """Why it cannot be used; empty if it can."""


class PlanStore:
    """A directory of plans, shared by any number of processes, also over NFS."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def slot(
        self, fingerprint: str, backend: str, device_kind: str, device_count: int, process_count: int = 1
    ) -> PlanSlot:
        """The place of the plan for one training step on one kind of machine. Nothing is created.

        A plan serves jobs of as many processes as it was made with, so each number has its own place: a search in
        one process does not take the plan away from a job of several.

        Raises:
            PlanError: an argument could not be part of a path.
        """
        if not re.fullmatch(r"[0-9a-f]{16,128}", fingerprint):
            raise PlanError(f"expected a fingerprint of 16 or more hex digits, got {fingerprint!r}")
        if not re.fullmatch(r"[a-z][a-z0-9]{0,15}", backend):
            raise PlanError(f"expected a backend like cpu or gpu, got {backend!r}")
        if device_count < 1 or process_count < 1:
            raise PlanError(
                f"expected at least one device and one process, got {device_count} and {process_count}"
            )
        name = f"{backend}-{_slug(device_kind)}-x{device_count}"
        name += f"-p{process_count}" if process_count > 1 else ""
        return PlanSlot(self.directory, self.directory / fingerprint[:16] / name)

    def list_plans(self) -> list[Listed]:
        """Every plan in the store, by path; damaged ones with the reason.

        Raises:
            PlanError: the directory exists but cannot be read.
        """
        try:
            os.listdir(self.directory)  # what cannot be read has nothing in it for glob
            folders = sorted(self.directory.glob("*/*"))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise PlanError(f"cannot read the plan directory {self.directory}: {error.strerror}") from error
        return [
            _listed(PlanSlot(self.directory, folder))
            for folder in folders
            if re.fullmatch(r"[0-9a-f]{16}", folder.parent.name) and _may_hold_a_plan(folder)
        ]


def _may_hold_a_plan(folder: Path) -> bool:
    """Whether there is one, or nobody may look."""
    try:
        os.stat(folder / PLAN_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _listed(slot: PlanSlot) -> Listed:
    try:
        stored = slot.load()
    except PlanError as error:
        return Listed(slot.path, b"", str(error))
    return Listed(slot.path, stored.plan_json if stored else b"", "" if stored else "removed meanwhile")


@dataclass(frozen=True, slots=True)
class PlanSlot:
    """The folder of one plan."""

    root: Path
    """The plan directory; nothing outside it is touched."""
    path: Path

    def load(self) -> StoredPlan | None:
        """The plan and its module; None where there is none.

        Raises:
            PlanError: they are unreadable, too large, not a plan, or not from one save.
        """
        for attempt in range(_READ_ATTEMPTS):
            plan_json = self._read(PLAN_NAME, MAX_BYTES)
            if plan_json is None:
                return None
            expected = module_digest(plan_json, self.path / PLAN_NAME)
            module = self._read(MODULE_NAME, MAX_MODULE_BYTES)
            if module is not None and hashlib.sha256(module).hexdigest() == expected:
                return StoredPlan(self.path, plan_json, module, expected)
            # Somebody may be between the two renames of a save.
            time.sleep(0.02 * (attempt + 1))
        problem = f"is not the module that {PLAN_NAME} was saved with (interrupted or edited)"
        if module is None:
            problem = f"is missing beside {PLAN_NAME}"
        raise PlanError(f"{self.path}: {MODULE_NAME} {problem}; delete the folder and search again")

    def beside(self, module_name: str) -> int:
        """How many plans in the same directory are for a step of this name on as many devices of this kind; not more
        than a few dozen are looked at, and what cannot be read does not count."""
        name = re.sub(r"-p\d+$", "", self.path.name)
        found = 0
        with contextlib.suppress(OSError):
            for path in itertools.islice(self.root.glob(f"*/{name}*/{PLAN_NAME}"), _MAX_BESIDE):
                folder = path.parent
                if folder != self.path and re.fullmatch(rf"{re.escape(name)}(-p\d+)?", folder.name):
                    found += _module_name(PlanSlot(self.root, folder)) == module_name
        return found

    def save(
        self, plan_json: bytes, module: bytes, module_text: str = "", default_module: bytes = b""
    ) -> None:
        """Replace the plan in this slot; on any error what was there stays.

        Args:
            plan_json: a JSON object whose ``module_sha256`` is the digest of ``module``.
            module: the optimized module as a serialized proto.
            module_text: the same as text.
            default_module: the module the plan was made from.

        Raises:
            PlanError: the disk is full, the directory read-only, or plan and module do not belong together.
        """
        digest = hashlib.sha256(module).hexdigest()
        if module_digest(plan_json, self.path / PLAN_NAME) != digest:
            raise PlanError(
                f"the plan to save in {self.path} names another module than the one beside it ({digest})"
            )
        files = {
            MODULE_NAME: module,
            TEXT_NAME: module_text.encode(),
            DEFAULT_NAME: gzip.compress(default_module, 6, mtime=0),
            PLAN_NAME: plan_json,
        }
        self._make_folder()
        with Lock(self.path / "save.lock", "save").held(_SAVE_WAIT_S):
            replace_files(self.path, files)

    def search_lock(self) -> Lock:
        """The lock that one search at a time holds on this slot; it creates the folder.

        Raises:
            PlanError: the folder cannot be created.
        """
        self._make_folder()
        remove_leftovers(self.path)
        return Lock(self.path / "search.lock", "search")

    @contextlib.contextmanager
    def compiling(self, module_sha256: str) -> Iterator[None]:
        """Stand around a compile or a first run: if it kills the process, :meth:`is_banned` will know the
        module.

        Where nothing can be written (a plan directory shared read-only) the compile goes unguarded; so
        it does where there is no folder, on a rank that has its plan from another's directory.
        """
        digest = _checked_digest(module_sha256)
        prefix = f"compiling-{digest}."
        if not self.path.is_dir():
            yield
            return
        try:
            marker = OwnedFile.create_unique(self.path, prefix)
        except PlanError as error:
            if self.path not in _unguarded:
                _unguarded.add(self.path)
                log.warning("plans are compiled without marks that would ban them if they crashed: %s", error)
            yield
            return
        try:
            yield
        finally:
            marker.remove()
            self._acquit(digest)

    def suspects(self) -> bool:
        """Whether a process died while it tried several modules at once, so that any of them may have
        killed it. They are to be tried again one at a time: then a mark that is left behind tells."""
        return any(self._accomplices(marker) for marker in self._dead_markers())

    def _accomplices(self, marker: OwnedFile) -> list[OwnedFile]:
        """Marks of other modules that the same dead process left behind."""
        digest = marker.path.name.split(".")[0]
        return [
            other
            for other in self._dead_markers()
            if other.path.name.split(".")[0] != digest and other.same_owner(marker)
        ]

    def _acquit(self, digest: str) -> None:
        """A module that was tried and killed nobody was not the one that did."""
        for marker in self._dead_markers(digest):
            if self._accomplices(marker):
                with contextlib.suppress(OSError):
                    marker.path.unlink(missing_ok=True)

    def ban(self, module_sha256: str, reason: str) -> None:
        """Never compile this module from this slot again.

        Raises:
            PlanError: that cannot be written down.
        """
        self._make_folder()
        readable = reason.encode(errors="backslashreplace")
        replace_files(self.path, {f"banned-{_checked_digest(module_sha256)}": readable})

    def is_banned(self, module_sha256: str) -> str:
        """Why this module must not be compiled; empty if it may.

        A marker of a compile whose process is gone becomes a ban, unless the process tried other modules
        at the same time (see :meth:`suspects`).
        """
        digest = _checked_digest(module_sha256)
        ban = self.path / f"banned-{digest}"
        for marker in self._dead_markers(digest):
            if self._accomplices(marker):
                continue
            reason = f"trying it killed a process ({marker.owner_text()})"
            # Where that cannot be written the marker itself stays, and bans as well.
            with contextlib.suppress(PlanError, OSError):
                self.ban(digest, reason)
                marker.path.unlink(missing_ok=True)
            return f"{reason}; to try it again delete {ban}"
        reason_bytes = self._read(ban.name, _MAX_REASON_BYTES)
        if reason_bytes is None:
            return ""
        return f"{reason_bytes.decode(errors='replace')}; to try it again delete {ban}"

    def read_compared(self) -> bytes | None:
        """What lies here of modules that were compared (``compared.py``); None where nothing does.

        Raises:
            PlanError: it cannot be read, or is too large.
        """
        return self._read(COMPARED_NAME, _MAX_COMPARED_BYTES)

    def write_compared(self, record: bytes) -> None:
        """Replace what :meth:`read_compared` gives.

        Raises:
            PlanError: the disk is full or the directory read-only.
        """
        self._refuse_links()
        replace_files(self.path, {COMPARED_NAME: record})

    def _dead_markers(self, digest: str = "") -> list[OwnedFile]:
        try:
            names = sorted(os.listdir(self.path))
        except OSError:
            return []
        prefix = f"compiling-{digest}." if digest else "compiling-"
        found = [OwnedFile(self.path / name) for name in names if name.startswith(prefix)]
        return [marker for marker in found if not marker.is_alive()]

    def _read(self, name: str, limit_bytes: int) -> bytes | None:
        self._refuse_links()
        return read_bounded(self.path / name, limit_bytes)

    def _refuse_links(self) -> None:
        for folder in (self.path.parent, self.path):
            # Path.is_symlink raises where the folder cannot be looked at, before Python 3.13.
            if os.path.islink(folder):
                raise PlanError(
                    f"{folder} is a symbolic link; plans are read and written inside {self.root} only"
                )

    def _make_folder(self) -> None:
        self._refuse_links()
        try:
            for folder in (self.root, self.path.parent, self.path):
                folder.mkdir(mode=0o700, parents=folder == self.root, exist_ok=True)
        except OSError as error:
            raise PlanError(f"cannot create the plan folder {self.path}: {error.strerror}") from error


def _module_name(slot: PlanSlot) -> str:
    """Of the step that a plan is for; empty where that cannot be read."""
    try:
        return msgspec.json.decode(slot._read(PLAN_NAME, MAX_BYTES) or b"", type=_Named).target.module_name
    except (PlanError, msgspec.MsgspecError, RecursionError):
        return ""


def module_digest(plan_json: bytes, where: Path) -> str:
    """The ``module_sha256`` that a plan names.

    Raises:
        PlanError: this is not a JSON object with such a field.
    """
    try:
        fields = json.loads(plan_json)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where} is not JSON ({error}); delete its folder and search again") from error
    digest = fields.get("module_sha256") if isinstance(fields, dict) else None
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise PlanError(f"{where} is not a plan: expected an object with module_sha256, 64 hex digits")
    return digest


def _slug(device_kind: str) -> str:
    text = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    return text[:48] or "unknown"


def _checked_digest(digest: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise PlanError(f"expected a SHA-256 of 64 hex digits, got {digest!r}")
    return digest
