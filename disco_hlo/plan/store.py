"""The plan directory: what a search found, kept so that no crash, rival or full disk can spoil it.

    <directory>/<key, 16 digits>/<backend>-<device kind>-x<devices>[-p<processes>]/
        plan.json            the plan; its field "module_sha256" names the module it goes with
        module.hlo.pb        the optimized HLO module (DisCo, section 5.1: what the master broadcasts)
        module.hlo.txt       the same, to read
        default.hlo.pb.gz    the module it was made from
        profile.json         the measured times it was made with (profiler/profile.py)
        timelines.json.gz    measured steps of XLA's default and the plan (profiler/timeline.py)
        compared.json        modules whose numbers an enacting run found to be the default's
        search.lock          a search is running (see files.py)
        compiling-<sha>.*    a plan or candidate is being tried (see bans.py)
        died-<sha>.*         a process died when it tried that

Files appear whole or not at all: written beside their place, synced, renamed, ``plan.json`` last. A
save that stopped between two renames is noticed by the digest. What a plan means is ``plan.py``'s.

A plan that a search measured was compared with XLA's default there, by the software that the plan names. One that was
made offline, that lies under another jax by now, or that is applied to a step with other constants, is compared when it
is first enacted; ``compared.json`` remembers that, so that later runs need not do it again.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import itertools
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from disco_hlo.errors import PlanError, why_unreadable
from disco_hlo.plan.bans import Ban, Bans
from disco_hlo.plan.files import Lock, read_bounded, remove_leftovers, replace_files
from disco_hlo.plan.plan import MAX_BYTES, Plan, Sha256, Target, Text

PLAN_NAME = "plan.json"
MODULE_NAME = "module.hlo.pb"
TEXT_NAME = "module.hlo.txt"
DEFAULT_NAME = "default.hlo.pb.gz"
PROFILE_NAME = "profile.json"
COMPARED_NAME = "compared.json"
MAX_MODULE_BYTES = (2 << 30) - 1
"""protobuf's own limit on one message."""
_MAX_COMPARED_BYTES = 1 << 20
NO_PLAN = "no plan was saved there"
"""What a list says of a folder that is known for its bans alone."""
_SAVE_WAIT_S = 30.0
_READ_ATTEMPTS = 5
_MAX_BESIDE = 32
"""How many plans are looked at for their steps' names: they may be many, on a slow file system."""
_COMPARED_FORMAT = "disco-hlo compared"
_COMPARED_VERSION = 1
_MOST_COMPARED = 64
"""Entries: a directory that is used under two versions in turn keeps both."""


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
    module_sha256: str = ""
    """Of the plan's module; empty where it cannot be used."""
    bans: tuple[Ban, ...] = ()
    """Modules that are not tried here: the plan's own, and others that a search would measure."""


class PlanStore:
    """A directory of plans, shared by any number of processes, also over NFS."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def slot(
        self, key: str, backend: str, device_kind: str, device_count: int, process_count: int = 1
    ) -> PlanSlot:
        """The place of the plan for the training steps of one key on one kind of machine. Nothing is created.

        A plan serves jobs of as many processes as it was made with, so each number has its own place: a search in
        one process does not take the plan away from a job of several.

        Raises:
            PlanError: an argument could not be part of a path.
        """
        if not re.fullmatch(r"[0-9a-f]{16,128}", key):
            raise PlanError(f"expected a key of 16 or more hex digits, got {key!r}")
        if not re.fullmatch(r"[a-z][a-z0-9]{0,15}", backend):
            raise PlanError(f"expected a backend like cpu or gpu, got {backend!r}")
        if device_count < 1 or process_count < 1:
            raise PlanError(
                f"expected at least one device and one process, got {device_count} and {process_count}"
            )
        kind = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")[:48] or "unknown"
        name = f"{backend}-{kind}-x{device_count}"
        name += f"-p{process_count}" if process_count > 1 else ""
        return PlanSlot(self.directory, self.directory / key[:16] / name)

    def names_on_one_device(self) -> frozenset[str]:
        """Of the steps on one device that there are plans for; what cannot be read has none."""
        with contextlib.suppress(OSError):
            folders = [path.parent for path in self.directory.glob(f"*/*-x1/{PLAN_NAME}")]
            return frozenset(_module_name(PlanSlot(self.directory, one)) for one in folders)
        return frozenset()

    def list_plans(self) -> list[Listed]:
        """Every plan in the store, by path; damaged ones with the reason, and folders that have bans alone.

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
        slots = [
            PlanSlot(self.directory, one) for one in folders if re.fullmatch(r"[0-9a-f]{16}", one.parent.name)
        ]
        return [found for slot in slots if (found := _listed(slot)) is not None]


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

    @property
    def bans(self) -> Bans:
        """Which modules must not be tried again; where a module is tried, that is said to it.

        Raises:
            PlanError: the folder is a link.
        """
        self._refuse_links()
        return Bans(self.path)

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


def module_digest(plan_json: bytes, where: Path) -> str:
    """The ``module_sha256`` that a plan names.

    Raises:
        PlanError: this is not a JSON object with such a field.
    """
    try:
        fields = json.loads(plan_json)
    except (ValueError, RecursionError) as error:
        why = why_unreadable(error)
        raise PlanError(
            f"{where}: expected a plan as JSON: {why}; delete its folder and search again"
        ) from error
    digest = fields.get("module_sha256") if isinstance(fields, dict) else None
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise PlanError(f"{where} is not a plan: expected an object with module_sha256, 64 hex digits")
    return digest


def _may_hold_a_plan(folder: Path) -> bool:
    """Whether there is one, or nobody may look."""
    try:
        os.stat(folder / PLAN_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _listed(slot: PlanSlot) -> Listed | None:
    """What a list says of a folder; None where there is neither a plan nor a ban."""
    try:
        bans = tuple(slot.bans.all())
        if not _may_hold_a_plan(slot.path):
            return Listed(slot.path, b"", NO_PLAN, "", bans) if bans else None
        stored = slot.load()
    except PlanError as error:
        return Listed(slot.path, b"", str(error)) if _may_hold_a_plan(slot.path) else None
    if stored is None:
        return Listed(slot.path, b"", "removed meanwhile", "", bans)
    return Listed(slot.path, stored.plan_json, "", stored.module_sha256, bans)


def _module_name(slot: PlanSlot) -> str:
    """Of the step that a plan is for; empty where that cannot be read."""
    try:
        return msgspec.json.decode(slot._read(PLAN_NAME, MAX_BYTES) or b"", type=_Named).target.module_name
    except (PlanError, msgspec.MsgspecError, RecursionError):
        return ""


# Modules that were compared ---------------------------------------------------------------------


class Compared(Struct, frozen=True, forbid_unknown_fields=True):
    """One module, and what it was compared with."""

    module_sha256: Sha256
    versions: dict[Text, Text]
    """jax, jaxlib, disco_hlo and, on GPU, the driver's runtime."""


class _ComparedRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """What ``compared.json`` holds, the latest last."""

    format: str
    version: int
    entries: Annotated[tuple[Compared, ...], Meta(max_length=_MOST_COMPARED)]


def compared_modules(data: bytes | None) -> tuple[Compared, ...]:
    """The entries of a record; none where it is missing, damaged or of another version: then is compared again."""
    try:
        record = msgspec.json.decode(data or b"", type=_ComparedRecord)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ()
    return record.entries if (record.format, record.version) == (_COMPARED_FORMAT, _COMPARED_VERSION) else ()


def was_measured(plan: Plan, module_sha256: str, versions: Mapping[str, str]) -> bool:
    """Whether the search that made the plan compared this module on its devices, under this very software."""
    if plan.measured is None or plan.module_sha256 != module_sha256 or dict(plan.versions) != dict(versions):
        return False
    return plan.chosen in plan.measured.results


def was_compared(slot: PlanSlot, module_sha256: str, versions: Mapping[str, str]) -> bool:
    """Whether a module was compared under this very software by an earlier run."""
    try:
        return Compared(module_sha256, dict(versions)) in compared_modules(_compared_record(slot))
    except PlanError:
        return False


def note_compared(slot: PlanSlot, module_sha256: str, versions: Mapping[str, str]) -> None:
    """Remember that a module was; the oldest are forgotten where they are too many.

    Raises:
        PlanError: it cannot be written down, as in a directory that is read-only.
    """
    entry = Compared(module_sha256, dict(versions))
    entries = (*(one for one in compared_modules(_compared_record(slot)) if one != entry), entry)
    record = _ComparedRecord(_COMPARED_FORMAT, _COMPARED_VERSION, entries[-_MOST_COMPARED:])
    text = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1)
    replace_files(slot.path, {COMPARED_NAME: text + b"\n"})


def _compared_record(slot: PlanSlot) -> bytes | None:
    return slot._read(COMPARED_NAME, _MAX_COMPARED_BYTES)
