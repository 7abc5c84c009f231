"""Benchmarks refuse arguments they cannot use at once, with one line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("bench_memory missing.py", "there is no script missing.py"),
        ("bench_search --against missing", "holds no folder disco_hlo"),
        ("bench_search --seeds 0", "expected --candidates and --seeds of at least 1"),
        ("benchmark nosuch --link nvlink --out o", "invalid choice: 'nosuch'"),
        ("benchmark bert --link nvlink --rounds 1 --out o", "--rounds of at least 2"),
        ("benchmark bert --link carrier-pigeon --out o", "invalid choice: 'carrier-pigeon'"),
        ("benchmark adam-99 --link nvlink --out o", "invalid choice: 'adam-99'"),
        ("benchmark bert adam-9 --link nvlink --out o", "need a command of their own"),
        ("benchmark llama-tp-scan --link nvlink --out o", "invalid choice: 'llama-tp-scan'"),
        ("benchmark bert --link nvlink", "the following arguments are required: --out"),
        (f"benchmark bert --link nvlink --out {__file__}", "is not a directory"),
        ("benchmark bert --link gloo --out o", "expected one model, in a job"),
        ("demo --steps 2", "expected a whole number, 3 or more, got '2'"),
        ("demo --budget x", "expected a whole number, 1 or more, got 'x'"),
        ("train_in_turn --out o --runs 0 -- true", "expected --runs of at least 1"),
        ("train_in_turn --out o", "the following arguments are required: command"),
        (
            f"train_in_turn --out {Path(__file__).parent} -- true",
            "expected --out to be a new or an empty folder",
        ),
        ("train_stranger gemma", "the following arguments are required: --sources"),
        ("train_stranger gemma --sources o --steps 4", "expected --steps of more than 4"),
        ("ship_profile profile.json --name ../x", "expected lower-case words joined by dashes"),
    ],
)
def test_a_bad_argument_is_refused_before_any_work(
    command: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, *arguments = command.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    with pytest.raises(SystemExit) as refused:
        importlib.import_module(script).main()
    assert refused.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{script}.py: error: ")
    assert said in last
    assert list(tmp_path.iterdir()) == []
