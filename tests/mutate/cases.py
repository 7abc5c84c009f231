"""Files of small steps as the commands leave them, what is changed in them, and who reads them afterwards."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from disco_hlo.estimator.dataset import Dataset, Measurement, load
from disco_hlo.estimator.samples import FusedOp
from disco_hlo.estimator.weights import load_file
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.cost_model import Line
from disco_hlo.plan.apply import apply
from disco_hlo.plan.plan import (
    Candidate,
    Measured,
    Prediction,
    Target,
    encode,
)
from disco_hlo.plan.read import read
from disco_hlo.plan.variants import normal_form
from disco_hlo.plugin.phases.capture_record import CaptureRecord
from disco_hlo.plugin.phases.capture_record import encode as encode_record
from disco_hlo.plugin.settings import Settings
from disco_hlo.profiler.collectives import SweepPoint, fit
from disco_hlo.profiler.profile import Contention, Link, OpTime, Platform, Profile, to_json
from disco_hlo.profiler.store import ProfileStore
from disco_hlo.profiler.timeline import MeasuredStep
from disco_hlo.profiler.timeline import encode as encode_timelines
from tests.captured import CPU_MODULE, stored
from tests.made_plans import made_plan
from tests.mutate import mutations as change

WEIGHTS = Path("disco_hlo") / "data" / "weights" / "cpu.safetensors"
PLATFORM = Platform("some cpu, 2 cores", "cpu", "", "0.11.2", "0.11.2")
LINK = Link(2, 1, "")


def build(folder: Path) -> None:
    """Everything that a case may change, in folders by what lies beside what."""
    _plan_folder(folder / "cpu", CPU_MODULE.read_bytes())
    _plan_folder(folder / "gpu", stored("h200_models/rnnlm"))  # 2765 instructions, 1450 in canonical form
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
    plan = made_plan(
        _target(source), strategy, module,
        prediction=Prediction(98_000, 122_000, 215_000, 96_000, 97_000, 1 << 24),
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
    (folder / "timelines.json.gz").write_bytes(encode_timelines(plan.module_sha256, [step]))


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


def _stores(folder: Path, source: CanonicalModule) -> None:
    folder.mkdir()
    with ProfileStore(folder / "times.sqlite") as store:
        times = {f"key{i}": OpTime(1000 + i, 5, 3) for i in range(4)}
        store.add_ops(PLATFORM, times)
        store.add_ops(PLATFORM, times)
        store.add_sweep(PLATFORM, LINK, [SweepPoint(1 << k, 1000 + k, 5, 3) for k in range(4)])
        store.add_step(PLATFORM, "f00d", OpTime(5000, 20, 9))
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


# Cases ------------------------------------------------------------------------------------------


Reader = Callable[[Path], object]
_SEARCH = ("--evaluations", "40", "--seeds", "1", "--seconds", "5")


@dataclass(frozen=True)
class Kind:
    """A file that is changed in a folder of the corpus."""

    name: str
    folder: str
    file: str
    mutation: change.Mutation
    weight: int
    commands: Sequence[Sequence[str]] = ()
    """Of ``disco``; ``@`` is the folder with the changed file, ``@out`` one for what is written."""
    reader: Reader | None = None
    """What reads the file where no command of one process does."""


def _read_store(path: Path) -> None:
    with ProfileStore(path) as store:
        store.ops(PLATFORM)
        store.sweep(PLATFORM, LINK)
        store.step(PLATFORM, "f00d")


def _read_samples(path: Path) -> None:
    with Dataset(path) as data:
        data.about()
        data.samples()
        data.measurements()
        data.failures()
        data.interrupted()
        for source in data.sources():
            data.module(source)
        load(data)


def _read_settings(path: Path) -> None:
    Settings.from_environment({"DISCO_CONFIG": str(path), "ENABLE_SEARCH": "1", "HOME": str(path.parent)})


def _of_plan(folder: str) -> tuple[tuple[str, ...], ...]:
    """Commands that read a plan with what lies beside it."""
    return (
        ("inspect", "@"), ("inspect", "@", "--json"), ("diff", "@", "--default"), ("diff", "@", f"@corpus/{folder}"),
        ("report", "@", "-o", "@out/page.html"), ("simulate", f"@corpus/{folder}/default.hlo.pb.gz", "--plan", "@"),
        ("list",), ("list", "--json"),
    )  # fmt: skip


_OF_MODULE = (
    ("simulate", "@/default.hlo.pb.gz"),
    ("simulate", "@/default.hlo.pb.gz", "--json"),
    ("simulate", "@/default.hlo.pb.gz", "--gpus", "64", "--bandwidth", "12.5"),
    ("simulate", "@/default.hlo.pb.gz", "--trace", "@out/trace.json"),
    ("search", "@/default.hlo.pb.gz", "-o", "@out/found", *_SEARCH),
    ("search", "@/default.hlo.pb.gz", "-o", "@out/found", "--method", "backtracking", *_SEARCH),
)
_ALONE = tuple((*command[:1], "@", *command[2:]) for command in _OF_MODULE)
_NAMED = tuple((*command, "--profile", "@/profile.json") for command in _ALONE)
_MODULE = change.inside_gzip(change.mostly(change.of_module))
_JSON = change.mostly(change.of_json)
KINDS = (
    Kind("module, cpu", "captured", "default.hlo.pb.gz", _MODULE, 30, _ALONE),
    Kind("module, gpu", "gpu", "default.hlo.pb.gz", _MODULE, 4, _OF_MODULE),
    Kind("module of a plan", "cpu", "default.hlo.pb.gz", _MODULE, 8, _of_plan("cpu")),
    Kind("plan, cpu", "cpu", "plan.json", _JSON, 20, _of_plan("cpu")),
    Kind("plan, gpu", "gpu", "plan.json", _JSON, 2, _of_plan("gpu")),
    Kind("profile", "captured", "profile.json", _JSON, 14, (*_ALONE, *_NAMED)),
    Kind("profile, gpu", "gpu", "profile.json", _JSON, 2, (*_OF_MODULE, *_of_plan("gpu"))),
    Kind("record", "captured", "capture.json", _JSON, 4, _ALONE),
    Kind("timelines", "cpu", "timelines.json.gz", change.inside_gzip(_JSON), 5, _of_plan("cpu")),
    Kind("times", "stores", "times.sqlite", change.mostly(change.of_sqlite), 6, reader=_read_store),
    Kind("samples", "stores", "samples.sqlite", change.mostly(change.of_sqlite), 6, reader=_read_samples),
    Kind("weights", "stores", "weights.safetensors", change.mostly(change.of_weights), 6, reader=load_file),
    Kind("settings", "stores", "disco.toml", change.of_bytes, 2, reader=_read_settings),
)
