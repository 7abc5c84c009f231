"""Plans to look at: of a step as XLA compiled it on two H200s, and of small steps captured here."""

from __future__ import annotations

import functools
import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.cost_model import Line
from disco_hlo.optimize.costs import costs_for
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import (
    Candidate,
    Measured,
    Plan,
    Prediction,
    SearchRecord,
    Strategy,
    Structure,
    Target,
    decode,
    encode,
)
from disco_hlo.plan.read import read
from disco_hlo.plan.variants import normal_form
from disco_hlo.plugin.xla import compiles
from disco_hlo.profiler.collectives import SweepPoint, fit
from disco_hlo.profiler.profile import Contention, Link, Platform, Profile, to_json
from disco_hlo.report.bundle import open_bundle
from disco_hlo.report.data import page_data
from tests.captured import DATA, captured, stored
from tests.made_plans import made_plan
from tests.steps import models
from tests.steps.intercept import intercept

H200 = DATA / "h200_transformer_default.hlo.pb.gz"
"""XLA's own module of a 12-layer transformer step, 5999 nodes in canonical form."""
VGG19 = DATA / "h200_models" / "vgg19.hlo.pb.gz"
"""Another, with 1571 nodes."""
SCANNED = DATA / "h100_llama" / "fsdp_scan.hlo.pb.gz"
"""Sharded parameters, 16 layers in a scan: a loop forward, a loop backward."""


def h200_module() -> bytes:
    return stored("h200_transformer_default")


def h200() -> CanonicalModule:
    return captured("h200_transformer_default")


@functools.cache
def cpu_module(name: str = "mlp") -> bytes:
    """XLA's own module of a step of ``tests/steps/models.py``, compiled for two CPU devices."""
    module: bytes = intercept(*getattr(models, name)(), compiles.capture)
    return module


@functools.cache
def cpu(name: str = "mlp") -> CanonicalModule:
    return canonicalize(cpu_module(name))


MEASURED = Measured(
    created="2026-01-02T03:04:05Z",
    candidates=(
        Candidate("XLA default", 122_000_000, 123_000_000, 800_000, 25),
        Candidate("plan", 98_000_000, 100_000_000, 500_000, 25),
        Candidate("no fusion", 215_000_000, 0, 0, 0, "out of memory"),
    ),
    all_reduce=(Line(0, 0.05, 30_000.0), Line(1 << 20, 0.04, 60_000.0)),
    profile_s=12.0,
    search_s=30.0,
    measure_s=8.0,
    evaluations_per_s=12_000.0,
)


def plan_of(
    source: CanonicalModule, strategy: Strategy, module: bytes, measured: Measured | None = MEASURED
) -> Plan:
    """A plan whose predictions and measurements are made up and whose strategy is ``strategy``."""
    graph = source.graph
    return made_plan(
        Target(graph.key, graph.fingerprint, graph.module_name, graph.backend, "NVIDIA H200", 2, 1),
        normal_form(graph, strategy),
        module,
        prediction=Prediction(98_000_000, 122_000_000, 215_000_000, 96_000_000, 97_000_000, 1 << 34),
        search=SearchRecord(
            "backtracking",
            {"alpha": 1.05, "beta": 10, "seed": 0},
            20_000,
            tuple((i * i, 122_000_000 - i * 400_000) for i in range(1, 60)),
        ),
        notes=("a note",),
        measured=measured,
    )


def save_plan(
    folder: Path,
    source: CanonicalModule,
    default_module: bytes,
    strategy: Strategy,
    *,
    measured: Measured | None = MEASURED,
    profile: Profile | None = None,
) -> Path:
    """A plan folder as a search leaves it; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    module = apply(strategy, source)
    (folder / "module.hlo.pb").write_bytes(module)
    (folder / "default.hlo.pb.gz").write_bytes(gzip.compress(default_module, 1))
    (folder / "plan.json").write_bytes(encode(plan_of(source, strategy, module, measured)))
    if profile is not None:
        (folder / "profile.json").write_text(to_json(profile))
    return folder


def save_restructured(folder: Path, source: CanonicalModule, default_module: bytes) -> Path:
    """A plan that chunks the step, on the module of ``source``; the default beside it is another."""
    save_plan(folder, source, default_module, early_collectives(source))
    plan = decode((folder / "plan.json").read_bytes(), "plan.json")
    move = {"move": "chunk", "instructions": [1, 2], "opcodes": ["dot", "all-reduce"], "parts": 2}
    structure = Structure("chunk-2", "c" * 64, source.graph.key, (move, move))
    other = Target("e" * 64, "f" * 64, "jit_train_step", "gpu", "NVIDIA H200", 2, 1)
    changed = structs.replace(plan, structure=structure, chosen="chunk-2", target=other)
    (folder / "plan.json").write_bytes(encode(changed))
    return folder


def slot(directory: Path, source: CanonicalModule) -> Path:
    """Where the store keeps a plan of this step."""
    return directory / source.graph.key[:16] / f"{source.graph.backend}-nvidia-h200-x2"


def early_collectives(source: CanonicalModule) -> Strategy:
    """XLA's kernels and buckets, but each bucket issued as soon as it can be."""
    return replace(read(source), order=())


def sockets_profile() -> Profile:
    """A profile without op times: two H200s that talk over sockets."""
    points = tuple(SweepPoint(1 << k, 40_000 + (1 << k) * 19 // 100, 2_000, 9) for k in range(10, 30))
    return Profile(
        platform=Platform("NVIDIA H200", "gpu", "580", "0.11.2", "0.11.2"),
        ops={},
        launch_ns=2000,
        memory_bandwidth=4e12,
        flops_per_s=4e14,
        all_reduce=fit(points),
        link=Link(2, 2, "sockets"),
        contention=Contention(1.05, 1.02),
        noise=0.004,
    )


def content(plan_file: Path) -> dict[str, Any]:
    """What the page of a plan shows."""
    bundle = open_bundle(plan_file)
    costs = None
    if bundle.source is not None:
        costs = costs_for(bundle.source, bundle.profile, None)
    return page_data(bundle, costs)
