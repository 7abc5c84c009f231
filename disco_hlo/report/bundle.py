"""A plan together with what lies beside it: the module it was made from and the profile it was made with.

    plan.json  module.hlo.pb  module.hlo.txt  default.hlo.pb.gz  profile.json  timelines.json.gz

A plan by itself speaks of nodes by number; the module says what they are. A plan file of another
name, ``mine.json``, has ``mine.default.hlo.pb.gz`` and so on beside it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from msgspec import UNSET, structs

from disco_hlo.backends import BACKENDS
from disco_hlo.errors import DiscoError, ModuleError, PlanError, ProfileError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.regions import ENTRY
from disco_hlo.plan.apply import attested_groups
from disco_hlo.plan.files import read_bounded
from disco_hlo.plan.legal import check_order, check_strategy
from disco_hlo.plan.plan import MAX_BYTES, Plan, RegionStrategy, Strategy, by_region, decode
from disco_hlo.plan.read import read
from disco_hlo.plan.store import DEFAULT_NAME, MAX_MODULE_BYTES, MODULE_NAME, PLAN_NAME, PROFILE_NAME
from disco_hlo.plan.units import unit_graph
from disco_hlo.plan.variants import normal_form
from disco_hlo.profiler.profile import Profile
from disco_hlo.profiler.profile import load as load_profile
from disco_hlo.profiler.timeline import FILE_NAME as TIMELINES_NAME
from disco_hlo.profiler.timeline import MAX_BYTES as MAX_TIMELINES_BYTES
from disco_hlo.profiler.timeline import MeasuredStep
from disco_hlo.profiler.timeline import decode as decode_timelines
from disco_hlo.regular_file import unzipped
from disco_hlo.report.regions import check_region, region_names

_GZIP = b"\x1f\x8b"
_TOKEN = re.compile(r"([gbn])(\d{1,9})(?:\.(?:start|done))?")


@dataclass(frozen=True)
class Bundle:
    """A plan and what lies beside it, checked against each other."""

    path: Path
    """Of the plan file."""
    plan: Plan
    source: CanonicalModule | None
    """The module it was made from; None where that is missing or is another one."""
    profile: Profile | None
    missing: tuple[str, ...]
    """What could not be used, and why."""
    timelines: tuple[MeasuredStep, ...] = ()
    """Measured steps of XLA's default and of the plan; empty where none were taken."""

    @cached_property
    def strategy(self) -> Strategy:
        """The plan's strategy, in normal form where the module is at hand."""
        if self.source is None:
            return self.plan.strategy
        return normal_form(self.source.graph, self.plan.strategy)

    @cached_property
    def default(self) -> Strategy | None:
        """XLA's own plan for the same step; None where the plan changes the step's structure, so that its ops
        are not XLA's."""
        return None if self.source is None or self.plan.structure is not UNSET else read(self.source)

    @property
    def region_names(self) -> tuple[str, ...]:
        """The entry and the step's other regions; without the module those that the plan names."""
        named = tuple(region.computation for region in self.plan.strategies.regions)
        return named if self.source is None else region_names(self.source)

    def of_region(self, name: str) -> Bundle:
        """The plan's part for one region, as if that were the step; what the plan does not name is XLA's own.

        Raises:
            DiscoError: there is no such region.
        """
        if name == ENTRY:
            return self
        check_region(name, self.region_names)
        source = None
        if self.source is not None:
            source = next(region.source for region in self.source.regions if region.name == name)
        own = dict(self.plan.strategy.regions).get(name)
        if own is None:
            assert source is not None  # without a module only what the plan names has a name
            own = read(source)
        plan = structs.replace(self.plan, strategies=by_region(own))
        return replace(self, plan=plan, source=source, timelines=())


def locate(name: str, directory: Path) -> Path:
    """The plan file that ``name`` means: a file, its folder, or the start of a key in the store.

    Args:
        directory: the plan store (``DISCO_DIR``).

    Raises:
        PlanError: there is none, or a key fits several plans.
    """
    path = Path(name)
    if path.is_dir():
        if not (path / PLAN_NAME).exists():
            raise PlanError(f"{path} is a folder without {PLAN_NAME}; name a plan or its folder")
        return path / PLAN_NAME
    if path.exists():
        return named_file(path)
    if not re.fullmatch(r"[0-9a-f]{1,64}", name):
        raise PlanError(f"{name}: no such file or folder, and not the start of a key")
    found = sorted(plan for plan in directory.glob(f"{name[:16]}*/*/{PLAN_NAME}") if plan.is_file())
    if len(name) > 16:
        found = [plan for plan in found if _key(plan).startswith(name)]
    return only([plan.parent for plan in found], name, directory) / PLAN_NAME


def only(folders: Sequence[Path], key: str, directory: Path) -> Path:
    """The folder of the one plan in ``directory`` whose key begins so.

    Raises:
        PlanError: there is none, or several.
    """
    if not folders:
        raise PlanError(f"no plan in {directory} has a key that starts with {key}; see: disco list")
    if len(folders) > 1:
        listed = "".join(f"\n  {folder}" for folder in folders[:8])
        raise PlanError(f"{key} fits {len(folders)} plans; name one of these folders:{listed}")
    return folders[0]


def open_bundle(path: Path, source: CanonicalModule | None = None) -> Bundle:
    """Read a plan file and what lies beside it.

    Args:
        source: the module to read it with, in the place of the one beside it.

    Raises:
        PlanError: the plan cannot be read, or is illegal on the module beside it. What else is wrong
            beside it goes into ``missing``.
    """
    data = read_bounded(path, MAX_BYTES)
    if data is None:
        raise PlanError(f"{path}: no such file")
    plan = decode(data, str(path))
    for region in plan.strategies.regions:
        _check_tokens(region, path)
    missing: list[str] = []
    if source is None:
        source = _source_beside(path, plan, missing)
    elif source.graph.key != plan.ops_key:
        source = None
        missing.append("the module at hand is of another plan")
    profile = load_beside(beside(path, PROFILE_NAME), missing)
    if source is not None:
        _check(source, plan, path)
    timelines = _timelines_beside(path, plan, missing)
    return Bundle(path, plan, source, profile, tuple(missing), timelines)


def beside(plan_file: Path, name: str) -> Path:
    """Where the file called ``name`` of a plan lies."""
    return plan_file.with_name(name if plan_file.name == PLAN_NAME else f"{plan_file.stem}.{name}")


def named_file(path: Path) -> Path:
    """The file that somebody named, which a link leads to: what belongs to it lies beside the file, not the link.

    A link that is found in a folder is another matter (see :func:`~disco_hlo.plan.files.read_bounded`).
    """
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def read_module(path: Path) -> bytes:
    """A serialized HloModuleProto from a file, gzipped or not.

    Raises:
        ModuleError: the file is missing, empty, too large or damaged.
    """
    try:
        data = read_bounded(path, MAX_MODULE_BYTES)
    except PlanError as error:
        raise ModuleError(str(error)) from error
    if data is None:
        raise ModuleError(f"{path}: no such file")
    if data[:2] == _GZIP:
        try:
            data = unzipped(data, MAX_MODULE_BYTES)
        except OSError as error:
            raise ModuleError(f"{path}: {error.strerror}") from error
    if not data:
        raise ModuleError(f"{path} is empty; expected a serialized HloModuleProto")
    return data


def open_module(path: Path) -> CanonicalModule:
    """The canonical form of the module in a file.

    Raises:
        ModuleError: it is no module; names the file.
    """
    data = read_module(path)
    try:
        return canonicalize(data)
    except ModuleError as error:
        text = " It looks like HLO text; the serialized proto is needed." if data[:9] == b"HloModule" else ""
        raise ModuleError(f"{path}: {error}.{text}") from error


def load_beside(place: Path, missing: list[str]) -> Profile | None:
    """The profile in a file that need not be there; why it cannot be used goes into ``missing``."""
    if not place.exists():
        return None
    try:
        return load_profile(place)
    except ProfileError as error:
        missing.append(str(error))
        return None


def _timelines_beside(path: Path, plan: Plan, missing: list[str]) -> tuple[MeasuredStep, ...]:
    place = beside(path, TIMELINES_NAME)
    try:
        data = read_bounded(place, MAX_TIMELINES_BYTES)
        found = None if data is None else decode_timelines(data, str(place))
    except DiscoError as error:
        missing.append(str(error))
        return ()
    if found is None:
        return ()
    if found.module_sha256 != plan.module_sha256:
        missing.append(f"{place} holds measured steps of another plan")
        return ()
    return found.steps


def _source_beside(path: Path, plan: Plan, missing: list[str]) -> CanonicalModule | None:
    """The module whose ops the plan's strategy speaks of: XLA's, or with another structure the plan's own."""
    structured = plan.structure is not UNSET
    name = MODULE_NAME if structured else DEFAULT_NAME
    place = beside(path, name)
    if not place.exists():
        missing.append(f"{name} does not lie beside the plan: ops are known by number alone")
        return None
    try:
        source = open_module(place)
    except DiscoError as error:
        missing.append(str(error))
        return None
    if source.graph.key != plan.ops_key:
        missing.append(f"{place} is the module of another plan (key {source.graph.key[:16]})")
        return None
    return source


def _check_tokens(strategy: RegionStrategy, path: Path) -> None:
    limits = {"g": len(strategy.groups), "b": len(strategy.buckets), "n": 1 << 31}
    for token in strategy.order:
        match = _TOKEN.fullmatch(token)
        if match is None or int(match[2]) >= limits[match[1]]:
            raise PlanError(f"{path}: the order names {token[:80]!r}, which is no unit of this plan")


def _check(source: CanonicalModule, plan: Plan, path: Path) -> None:
    sources = source.computations
    try:
        for name, strategy in ((ENTRY, plan.strategy), *plan.strategy.regions):
            check_region(name, sources)
            graph = sources[name].graph
            units = unit_graph(graph, strategy)
            check_strategy(graph, strategy, units, attested_groups(sources[name]))
            if strategy.order:
                check_order(units, strategy.order, BACKENDS[graph.backend].asynchronous)
    except DiscoError as error:
        raise PlanError(f"{path} is illegal on the module beside it: {error}") from error


def _key(plan_file: Path) -> str:
    try:
        fields = json.loads(read_bounded(plan_file, MAX_BYTES) or b"")
        return str(fields["target"]["key"])
    except (PlanError, ValueError, RecursionError, KeyError, TypeError):
        return ""
