"""What several subcommands are given: arguments, options, and a step with what is known of where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from disco_hlo.errors import DiscoError, ModuleError
from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.plan.files import read_bounded
from disco_hlo.plan.plan import MAX_BYTES, Plan, Target, decode
from disco_hlo.plan.store import DEFAULT_NAME, PLAN_NAME, PROFILE_NAME
from disco_hlo.plugin.phases.capture_record import RECORD_NAME, CaptureRecord
from disco_hlo.plugin.phases.capture_record import load as load_record
from disco_hlo.profiler.profile import Profile
from disco_hlo.report.bundle import load_beside, named_file, open_module

_PLAN_HELP = "A plan, its folder, or the start of its key."

PlanName = Annotated[str, typer.Argument(metavar="PLAN", help=_PLAN_HELP)]
ModulePath = Annotated[
    Path, typer.Argument(metavar="MODULE", help="A serialized HloModuleProto, or a captured folder.")
]
ProfilePath = Annotated[
    Path | None, typer.Option("--profile", help="Measured times; by default those beside the module.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RegionName = Annotated[
    str,
    typer.Option("--region", metavar="NAME", help="One region of the step: entry, loop1, branch2, call3."),
]


@dataclass(frozen=True)
class Opened:
    """A module with what lies beside it."""

    path: Path
    source: CanonicalModule
    target: Target | None
    """Where the step runs, if a capture or a plan beside the module says so."""
    versions: Mapping[str, str]
    profile: Profile | None
    missing: tuple[str, ...]

    @property
    def device_kind(self) -> str | None:
        """What the step runs on, where that is known."""
        return None if self.target is None else self.target.device_kind


def open_named(name: Path) -> Opened:
    """A module file, or a folder that ``disco capture`` or a search wrote.

    Raises:
        ModuleError: there is none, or it cannot be read.
        DiscoError: the record beside it is damaged or speaks of another module.
    """
    path = name / DEFAULT_NAME if name.is_dir() else named_file(name)
    if name.is_dir() and not path.exists():
        raise ModuleError(f"{name} has no {DEFAULT_NAME}; name a module file or a captured folder")
    source = open_module(path)
    prefix = path.name.removesuffix(DEFAULT_NAME) if path.name.endswith(DEFAULT_NAME) else ""
    record = _record(path, f"{prefix}{PLAN_NAME}") if path.name.endswith(DEFAULT_NAME) else None
    if record is not None and record.target.fingerprint != source.graph.fingerprint:
        raise DiscoError(f"what lies beside {path} describes another module; capture or search again")
    missing: list[str] = []
    profile = load_beside(path.with_name(f"{prefix}{PROFILE_NAME}"), missing)
    target, versions = (None, {}) if record is None else (record.target, record.versions)
    return Opened(path, source, target, versions, profile, tuple(missing))


def _record(module: Path, plan_name: str) -> CaptureRecord | Plan | None:
    captured = load_record(module.with_name(RECORD_NAME))
    if captured is not None:
        return captured
    data = read_bounded(module.with_name(plan_name), MAX_BYTES)
    return None if data is None else decode(data, str(module.with_name(plan_name)))
