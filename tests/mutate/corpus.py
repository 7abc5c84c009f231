"""Files as the commands leave them, of small steps, to be changed; nothing here needs a device."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

from disco_hlo.estimator.dataset import Dataset, Measurement
from disco_hlo.estimator.samples import FusedOp
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.cost_model import Line
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import (
    FORMAT,
    VERSION,
    Candidate,
    Measured,
    Plan,
    Prediction,
    SearchRecord,
    Target,
    by_region,
    encode,
)
from disco_hlo.plan.read import read
from disco_hlo.plan.variants import normal_form
from disco_hlo.plugin.phases.capture_record import CaptureRecord
from disco_hlo.plugin.phases.capture_record import encode as encode_record
from disco_hlo.profiler.allreduce import SweepPoint, fit
from disco_hlo.profiler.profile import Contention, Link, OpTime, Platform, Profile, to_json
from disco_hlo.profiler.store import ProfileStore, StepTime
from disco_hlo.profiler.timeline import MeasuredStep
from disco_hlo.profiler.timeline import encode as encode_timelines

_DATA = Path(__file__).parents[1] / "data"
CPU_MODULE = _DATA / "cases" / "search_never_returns.hlo.pb"
"""85 instructions."""
GPU_MODULE = _DATA / "h200_models" / "rnnlm.hlo.pb.gz"
"""2765 instructions, of which 1450 are left in canonical form."""
WEIGHTS = Path("disco_hlo") / "data" / "weights" / "cpu.safetensors"


def build(folder: Path) -> None:
    """Everything that a case may change, in folders by what lies beside what."""
    _plan_folder(folder / "cpu", CPU_MODULE.read_bytes())
    _plan_folder(folder / "gpu", gzip.decompress(GPU_MODULE.read_bytes()))
    source = canonicalize(CPU_MODULE.read_bytes())
    _capture_folder(folder / "captured", source)
    _stores(folder / "stores", source)
    (folder / "stores" / "weights.safetensors").write_bytes(
        (Path(__file__).parents[2] / WEIGHTS).read_bytes()
    )
    (folder / "stores" / "disco.toml").write_text('budget_s = 5\nseed = 1\nchannel = "auto"\nalpha = 1.1\n')


def _target(source: CanonicalModule) -> Target:
    graph = source.graph
    kind = "NVIDIA H200" if graph.backend == "gpu" else "cpu"
    return Target(graph.key, graph.fingerprint, graph.module_name, graph.backend, kind, 2, 1)


def _plan_folder(folder: Path, data: bytes) -> None:
    """What a search leaves: plan, modules, profile, measured steps."""
    folder.mkdir(parents=True)
    source = canonicalize(data)
    strategy = normal_form(source.graph, replace(read(source), order=()))
    module = apply(strategy, source)
    sha256 = hashlib.sha256(module).hexdigest()
    plan = Plan(
        format=FORMAT,
        version=VERSION,
        target=_target(source),
        versions={"disco_hlo": "0.1.0", "jax": "0.11.2", "jaxlib": "0.11.2"},
        strategies=by_region(strategy),
        chosen="plan",
        prediction=Prediction(98_000, 122_000, 215_000, 96_000, 97_000, 1 << 24),
        search=SearchRecord("joint", {"alpha": 1.05, "seed": 0}, 2000, ((1, 122_000), (900, 98_000))),
        module_sha256=sha256,
        notes=("a note",),
        measured=Measured(
            created="2026-01-02T03:04:05Z",
            candidates=(
                Candidate("XLA default", 122_000, 123_000, 800, 25), Candidate("plan", 98_000, 100_000, 500, 25),
            ),
            all_reduce=(Line(0, 0.05, 30_000.0), Line(1 << 20, 0.04, 60_000.0)),
            profile_s=12.0, search_s=30.0, measure_s=8.0, evaluations_per_s=12_000.0,
        ),
    )  # fmt: skip
    (folder / "plan.json").write_bytes(encode(plan))
    (folder / "module.hlo.pb").write_bytes(module)
    (folder / "default.hlo.pb.gz").write_bytes(gzip.compress(data, 1, mtime=0))
    (folder / "profile.json").write_text(to_json(profile_of(source)))
    op = source.origins[0].name
    step = MeasuredStep(
        "plan", 1000, ("compute", "communication"), ((op, 0), ("x", -1)), ((0, 0, 10, 0), (1, 5, 9, 1))
    )
    (folder / "timelines.json.gz").write_bytes(encode_timelines(sha256, [step]))


def profile_of(source: CanonicalModule) -> Profile:
    """Every op measured, an all-reduce line, contention."""
    graph = source.graph
    kind = "NVIDIA H200" if graph.backend == "gpu" else "some cpu, 2 cores"
    points = tuple(SweepPoint(1 << k, 40_000 + (1 << k) * 19 // 100, 2_000, 9) for k in range(10, 30))
    keys = [*dict.fromkeys(node.key for node in graph.nodes)][:40]
    return Profile(
        platform=Platform(kind, graph.backend, "580", "0.11.2", "0.11.2"),
        ops={key: OpTime(1000 + 10 * i, 7, 9) for i, key in enumerate(keys)},
        launch_ns=2000,
        memory_bandwidth=4e11,
        flops_per_s=4e12,
        all_reduce=fit(points),
        link=Link(2, 2, "sockets"),
        contention=Contention(1.05, 1.02, 500, 1.1, 1.01, 0.2),
        holds=dict.fromkeys(keys[:3], 0.5),
        noise=0.004,
    )


def _capture_folder(folder: Path, source: CanonicalModule) -> None:
    folder.mkdir()
    (folder / "default.hlo.pb.gz").write_bytes(gzip.compress(CPU_MODULE.read_bytes(), 1, mtime=0))
    (folder / "profile.json").write_text(to_json(profile_of(source)))
    record = CaptureRecord("disco-hlo capture", 1, _target(source), {"jax": "0.11.2"})
    (folder / "capture.json").write_bytes(encode_record(record))


PLATFORM = Platform("some cpu, 2 cores", "cpu", "", "0.11.2", "0.11.2")
LINK = Link(2, 1, "")


def _stores(folder: Path, source: CanonicalModule) -> None:
    folder.mkdir()
    with ProfileStore(folder / "times.sqlite") as store:
        times = {f"key{i}": OpTime(1000 + i, 5, 3) for i in range(4)}
        store.add_ops(PLATFORM, times)
        store.add_ops(PLATFORM, times)
        store.add_sweep(PLATFORM, LINK, [SweepPoint(1 << k, 1000 + k, 5, 3) for k in range(4)])
        store.add_step(PLATFORM, "f00d", StepTime("default", OpTime(5000, 20, 9)))
    with Dataset(folder / "samples.sqlite") as data:
        config = {"bandwidth": 1e10, "flops": 1e11}
        data.describe(
            {"device_kind": "cpu", "backend": "cpu", "versions": {"jax": "0.11.2"}, "config": config}
        )
        given = data.add_source("step", "step/0", source.graph.fingerprint, CPU_MODULE.read_bytes())
        groups = [origin for origin in source.origins if origin.role == "fusion"]
        ops = {f"k{i}": FusedOp(one.nodes, one.results, "loop", "") for i, one in enumerate(groups)}
        data.add_samples(given, ops)
        *measured, last = data.samples()
        data.record(data.begin(measured), {one.id: Measurement(900, 1000, 20, 9, 0.5) for one in measured})
        data.fail(last, "too large")
    for name in ("times.sqlite", "samples.sqlite"):  # what is beside it must be in it
        path = folder / name
        shutil.copy(path, path.with_suffix(".copy"))
