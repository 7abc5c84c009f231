"""The search's code is compiled while a GPU's script makes its state, and nobody notices if that fails."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.optimize import rehearsal
from disco_hlo.plugin.phases import search_phase

COMPILED_ALREADY = """
import gzip, sys
from pathlib import Path
from numba.core import event
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.optimize import rehearsal
from disco_hlo.optimize.costs import costs_of
from disco_hlo.optimize.pipeline import Budget, Case, optimize
from disco_hlo.plan.read import read
from disco_hlo.profiler.profile import load
from disco_hlo.search.api import SearchSettings

for part in rehearsal.PARTS.values():
    part()
names = []

class Listener(event.Listener):
    def on_start(self, event):
        names.append(event.data["dispatcher"].py_func.__name__)
    def on_end(self, event):
        pass

event.register("numba:compile", Listener())
root = Path(sys.argv[1])
source = canonicalize(gzip.decompress((root / "tests/data/h200_models/rnnlm.hlo.pb.gz").read_bytes()))
xla = read(source)
profile = load(root / "disco_hlo/data/profiles/nvidia-h200-staged.json")
case = Case(source, xla, costs_of(profile, source, [xla]))
case.prediction(optimize(case, SearchSettings(evaluations=500), Budget.of(60.0, 600.0)).best)
print(sorted({*names} & {"climb", "times_ns", "kernels_ns", "look_up", "run_order", "evaluate"}))
"""


@pytest.fixture(autouse=True)
def _begin_anew() -> Iterator[None]:
    rehearsal.begin.cache_clear()
    yield
    rehearsal.begin.cache_clear()


def command(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the rehearsal be this program, on a machine that never searched."""
    monkeypatch.setattr(rehearsal, "_COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(rehearsal, "is_cached", lambda module: False)


def test_a_search_compiles_nothing_large_that_its_rehearsal_had_not() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILED_ALREADY, str(Path(__file__).parents[2])],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_search_waits_for_its_rehearsal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command(
        monkeypatch,
        "import os, sys, time; from pathlib import Path\n"
        "time.sleep(0.3)\n"
        f"(Path({str(tmp_path)!r}) / sys.argv[1]).write_text(str(os.environ.get('ENABLE_SEARCH')))",
    )
    monkeypatch.setenv("ENABLE_SEARCH", "1")
    rehearsal.begin()
    rehearsal.begin()
    rehearsal.wait(lambda: False)
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {"predict": "None", "search": "None"}


def test_an_interruption_waits_for_no_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, "import time; time.sleep(100)")
    begun = rehearsal.begin()
    started = time.monotonic()
    rehearsal.wait(lambda: True)
    assert time.monotonic() - started < 10
    for process in begun:
        process.kill()
        process.wait()


def test_what_is_compiled_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command(monkeypatch, f"from pathlib import Path; Path({str(tmp_path / 'ran')!r}).touch()")
    monkeypatch.setattr(rehearsal, "is_cached", lambda module: True)
    rehearsal.wait(lambda: False)
    assert not (tmp_path / "ran").exists()


def test_a_rehearsal_that_fails_is_nobodys_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, "raise SystemExit(1)")
    rehearsal.wait(lambda: False)
    rehearsal.begin.cache_clear()
    monkeypatch.setattr(rehearsal, "_COMMAND", ("/no/such/interpreter",))
    rehearsal.wait(lambda: False)


@pytest.mark.parametrize(
    ("platform", "devices", "rank", "begun"),
    [
        ("gpu", 2, 0, True),
        ("gpu", 2, 1, False),
        ("gpu", 1, 0, False),
        ("cpu", 2, 0, False),
        ("tpu", 2, 0, False),
    ],
)
def test_it_begins_with_the_first_program_of_several_gpus_on_rank_0(
    platform: str, devices: int, rank: int, begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(rehearsal, "begin", lambda: calls.append(1))
    backend = SimpleNamespace(platform=platform, process_index=lambda: rank)
    request: Any = SimpleNamespace(backend=backend, devices=range(devices))
    search_phase._compile_ahead(request)
    assert bool(calls) is begun
