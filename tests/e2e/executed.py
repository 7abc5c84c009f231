"""What a run executed, held against what it should have."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.plan import plan as plans
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import Plan, Strategy, by_region
from disco_hlo.plan.read import describe_difference, read
from disco_hlo.plugin.xla.hook import without_id
from tests.e2e.jobs import Run


def slot_of(directory: Path) -> Path:
    """The folder of the one plan in a plan directory."""
    [slot] = directory.glob("*/cpu-*")
    return slot


def copies(directory: Path, into: Path, spoils: Mapping[str, Callable[[Path], object]]) -> Path:
    """``into``, where ``directory`` is now once under each name, the plan in it spoiled in its way."""
    for name, spoil in spoils.items():
        shutil.copytree(directory, into / name)
        spoil(slot_of(into / name))
    return into


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes a plan's JSON."""

    def spoil(slot: Path) -> None:
        plan = json.loads((slot / "plan.json").read_text())
        change(plan)
        (slot / "plan.json").write_text(json.dumps(plan))

    return spoil


def put_plan(slot: Path, made: Callable[[CanonicalModule], Strategy]) -> None:
    """Put another plan into a slot: what is ``made`` of the step as XLA compiled it."""
    source = canonicalize(gzip.decompress((slot / "default.hlo.pb.gz").read_bytes()))
    module = apply(made(source), source)
    (slot / "module.hlo.pb").write_bytes(module)
    said = {
        "strategy": msgspec.to_builtins(by_region(read(canonicalize(module)))),
        "module_sha256": hashlib.sha256(module).hexdigest(),
    }
    edited(lambda plan: plan.update(said))(slot)


def plan_in(directory: Path) -> Plan:
    return plans.decode((slot_of(directory) / "plan.json").read_bytes(), str(directory))


def difference(run: Run, directory: Path, strategy: Strategy) -> str | None:
    """How what ``run`` executed, also in loops and branches, differs from ``strategy`` of the step whose plan is in
    ``directory``."""
    source = canonicalize(gzip.decompress((slot_of(directory) / "default.hlo.pb.gz").read_bytes()))
    planned = dict(strategy.regions)
    for module in run.modules:
        ran = canonicalize(module)
        found = [describe_difference(source.graph, read(ran), strategy)]
        for mine, theirs in zip(source.regions, ran.regions, strict=True):
            wanted = planned.get(mine.name) or read(mine.source)
            found.append(describe_difference(mine.source.graph, read(theirs.source), wanted))
        if any(found):
            return "; ".join(filter(None, found))
    return None


def digest(run: Run) -> str:
    """Of the one module that a run executed as its step, whatever number XLA gave it."""
    [module] = run.modules
    return hashlib.sha256(without_id(module)).hexdigest()


def is_ours(run: Run) -> bool:
    """Whether the run executed what we wrote: kernels and buckets are called after units of a strategy, g0,
    b1 or n2. Fails where it executed both."""
    [ours] = set(map(_is_ours, run.modules))
    return ours


def _is_ours(serialized: bytes) -> bool:
    module = proto.parse(serialized)
    [entry] = [one for one in module.computations if one.id == module.entry_computation_id]
    names = [one.name for one in entry.instructions if one.opcode in ("fusion", "all-reduce")]
    return bool(names) and all(re.match(r"[gbn]\d+_", name) for name in names)


def assert_defaults(runs: Sequence[Run], defaults: Sequence[Run]) -> None:
    """Each rank executed what it does without us, with the same losses."""
    for run, default in zip(runs, defaults, strict=True):
        assert digest(run) == digest(default)
        assert_same_losses(run, default)


def assert_same_losses(run: Run, other: Run) -> None:
    np.testing.assert_allclose(run.losses, other.losses, rtol=2e-5)
    assert len(run.losses) == 4
