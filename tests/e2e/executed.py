"""What a run executed, held against what it should have."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import numpy as np

from disco_hlo.hlo import proto
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan import plan as plans
from disco_hlo.plan.plan import Plan
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.verify import describe_difference
from disco_hlo.plugin.hook import without_id
from tests.e2e.jobs import Run


def slot_of(directory: Path) -> Path:
    """The folder of the one plan in a plan directory."""
    [slot] = directory.glob("*/cpu-*")
    return slot


def plan_in(directory: Path) -> Plan:
    return plans.decode((slot_of(directory) / "plan.json").read_bytes(), str(directory))


def difference(run: Run, directory: Path, strategy: Strategy) -> str | None:
    """How what ``run`` executed differs from ``strategy`` of the step whose plan is in ``directory``."""
    source = canonicalize(gzip.decompress((slot_of(directory) / "default.hlo.pb.gz").read_bytes()))
    return describe_difference(source.graph, read(canonicalize(run.module)), strategy)


def xlas_own(run: Run) -> Strategy:
    """The strategy that a run executed."""
    return read(canonicalize(run.module))


def digest(run: Run) -> str:
    """Of the module that a run executed, whatever number XLA gave it."""
    return hashlib.sha256(without_id(run.module)).hexdigest()


def is_ours(run: Run) -> bool:
    """Whether the module was written by us: its kernels and buckets are called after the units of a strategy,
    g0, b1 or n2."""
    module = proto.parse(run.module)
    [entry] = [one for one in module.computations if one.id == module.entry_computation_id]
    names = [one.name for one in entry.instructions if one.opcode in ("fusion", "all-reduce")]
    return bool(names) and all(re.match(r"[gbn]\d+_", name) for name in names)


def assert_same_losses(run: Run, other: Run) -> None:
    np.testing.assert_allclose(run.losses, other.losses, rtol=2e-5)
    assert len(run.losses) == 4
