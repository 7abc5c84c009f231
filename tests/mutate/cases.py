"""What is changed, how, and who reads it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from disco_hlo.estimator.dataset import Dataset, load
from disco_hlo.estimator.weights import load_file
from disco_hlo.plugin.settings import Settings
from disco_hlo.profiler.store import ProfileStore
from tests.mutate import mutations as change
from tests.mutate.corpus import LINK, PLATFORM

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
        store.steps(PLATFORM, "f00d")


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
