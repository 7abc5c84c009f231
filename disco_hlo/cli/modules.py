"""Find the module that ``simulate`` and ``search`` are to work on, and what is known of where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from disco_hlo.errors import DiscoError, ModuleError, PlanError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plan.files import read_bounded
from disco_hlo.plan.plan import Target
from disco_hlo.plan.store import DEFAULT_NAME
from disco_hlo.profiler.profile import Profile
from disco_hlo.report.bundle import open_module, profile_beside

CAPTURE_NAME = "capture.json"
CAPTURE_FORMAT = "disco-hlo capture"


class CaptureRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``capture.json`` says: where the step beside it runs."""

    format: str
    version: int
    target: Target
    versions: dict[str, str]


@dataclass(frozen=True)
class Opened:
    """A module with what lies beside it."""

    path: Path
    source: CanonicalModule
    capture: CaptureRecord | None
    profile: Profile | None
    missing: tuple[str, ...]

    @property
    def device_kind(self) -> str | None:
        """What the step was captured on, where that is known."""
        return None if self.capture is None else self.capture.target.device_kind


def open_named(name: Path) -> Opened:
    """A module file, or a folder that ``disco capture`` or a search wrote.

    Raises:
        ModuleError: there is none, or it cannot be read.
        DiscoError: the record beside it is damaged or speaks of another module.
    """
    path = name / DEFAULT_NAME if name.is_dir() else name
    if name.is_dir() and not path.exists():
        raise ModuleError(
            f"{name} is a folder without {DEFAULT_NAME}; name a module file or a captured folder"
        )
    source = open_module(path)
    missing: list[str] = []
    capture = _capture(path.with_name(CAPTURE_NAME)) if path.name == DEFAULT_NAME else None
    if capture is not None and capture.target.fingerprint != source.graph.fingerprint:
        raise DiscoError(
            f"{path.with_name(CAPTURE_NAME)} describes another module than {path.name}; capture again"
        )
    plan_file = path.with_name(path.name.removesuffix(DEFAULT_NAME) + "plan.json")
    profile = profile_beside(plan_file, missing)
    return Opened(path, source, capture, profile, tuple(missing))


def _capture(path: Path) -> CaptureRecord | None:
    try:
        data = read_bounded(path, 1 << 20)
        if data is None:
            return None
        record = msgspec.json.decode(data, type=CaptureRecord)
    except (PlanError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DiscoError(f"{path}: {error}; capture again") from None
    if (record.format, record.version) != (CAPTURE_FORMAT, 1):
        raise DiscoError(
            f"{path}: format {record.format!r} version {record.version}; this reads {CAPTURE_FORMAT!r} 1"
        )
    return record
