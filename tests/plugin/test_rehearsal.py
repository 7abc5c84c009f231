"""The search's code is compiled while a GPU's step is profiled, and nobody notices if that fails."""

from __future__ import annotations

import gzip
import io
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from disco_hlo.optimize import rehearsal
from disco_hlo.plugin.interruption import Interruption
from disco_hlo.plugin.phases.finding import Found
from disco_hlo.plugin.session import Session
from disco_hlo.plugin.step import Step

MODULE = Path(__file__).parents[1] / "data" / "h200_models" / "rnnlm.hlo.pb.gz"
STEP = cast(Step, SimpleNamespace(module=b"a module"))


def session(backend: str, *, leads: bool = True) -> Session:
    facts = SimpleNamespace(backend=backend, device_kind="NVIDIA H200")
    return cast(Session, SimpleNamespace(leads=leads, facts=facts))


def command(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the rehearsal be this program, on a machine that never searched."""
    monkeypatch.setattr(rehearsal, "_COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(rehearsal, "is_cached", lambda module: False)


def test_a_rehearsal_searches_the_step_as_one_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Found] = []
    find = rehearsal.find

    def noting(*args: Any, **options: Any) -> Found:
        found.append(find(*args, **options))
        return found[0]

    monkeypatch.setattr(rehearsal, "find", noting)
    # On a busy machine compiling takes all of its own time. The search ends by itself.
    monkeypatch.setattr(rehearsal, "_SEARCH_S", 60.0)
    monkeypatch.setattr(sys, "argv", ["rehearsal", "NVIDIA H200"])
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(buffer=io.BytesIO(gzip.decompress(MODULE.read_bytes())))
    )
    rehearsal.main()
    assert (found[0].profile.platform.backend, found[0].profile.platform.device_kind) == (
        "gpu",
        "NVIDIA H200",
    )
    assert found[0].result.evaluations > 0


def test_the_search_waits_for_its_rehearsal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command(
        monkeypatch,
        "import os, sys, time; from pathlib import Path\n"
        "time.sleep(0.3)\n"
        f"given = [sys.stdin.read(), sys.argv[1], str(os.environ.get('ENABLE_SEARCH'))]\n"
        f"Path({str(tmp_path / 'done')!r}).write_text(' | '.join(given))",
    )
    monkeypatch.setenv("ENABLE_SEARCH", "1")
    with rehearsal.rehearsed(session("gpu"), STEP) as wait:
        wait(Interruption())
        assert (tmp_path / "done").read_text() == "a module | NVIDIA H200 | None"


@pytest.mark.parametrize("ended_by", ["interruption", "end of the block"])
def test_a_rehearsal_lasts_no_longer_than_it_is_wanted(
    ended_by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    beat = tmp_path / "beat"
    command(
        monkeypatch,
        "import time; from pathlib import Path\n"
        f"while True: Path({str(beat)!r}).write_text(str(time.time())); time.sleep(0.02)",
    )
    stop = Interruption()
    with rehearsal.rehearsed(session("gpu"), STEP) as wait:
        while not beat.exists():
            time.sleep(0.02)
        if ended_by == "interruption":
            stop.wanted = True
            wait(stop)
    last = beat.read_text()
    time.sleep(0.3)
    assert beat.read_text() == last


@pytest.mark.parametrize(
    ("backend", "leads", "cached"), [("cpu", True, False), ("gpu", False, False), ("gpu", True, True)]
)
def test_where_it_would_not_help_nothing_is_rehearsed(
    backend: str, leads: bool, cached: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command(monkeypatch, f"from pathlib import Path; Path({str(tmp_path / 'ran')!r}).touch()")
    monkeypatch.setattr(rehearsal, "is_cached", lambda module: cached)
    with rehearsal.rehearsed(session(backend, leads=leads), STEP) as wait:
        wait(Interruption())
    assert not (tmp_path / "ran").exists()


def test_a_rehearsal_that_fails_is_nobodys_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, "raise SystemExit(1)")
    with rehearsal.rehearsed(session("gpu"), STEP) as wait:
        wait(Interruption())
    monkeypatch.setattr(rehearsal, "_COMMAND", ("/no/such/interpreter",))
    with rehearsal.rehearsed(session("gpu"), STEP) as wait:
        wait(Interruption())
