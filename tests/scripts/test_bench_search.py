"""The benchmark of the search's speed: what it prints, and that another checkout's package is what runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_search
import pytest


def runs(joint: float, backtracking: float, predicted_ns: int) -> list[dict[str, Any]]:
    rates = {"joint": joint, "backtracking": backtracking}
    return [
        {"step": "vgg19", "method": method, "per_s": rate, "predicted_ns": predicted_ns}
        for method, rate in rates.items()
    ]


def test_the_median_of_the_seeds_counts() -> None:
    own = [*runs(10_000.4, 900.0, 5), *runs(20_000.0, 100.0, 5), *runs(15_000.0, 300.0, 5)]
    assert bench_search.table([own]) == (
        "| step | method | candidates a second |\n"
        "| --- | --- | ---: |\n"
        "| vgg19 | joint | 15,000 |\n"
        "| vgg19 | backtracking | 300 |"
    )


def test_two_checkouts_are_compared_in_speed_and_in_what_they_predict() -> None:
    lines = bench_search.table([runs(9_000.0, 500.0, 5), runs(10_000.0, 400.0, 5)]).splitlines()
    assert lines[2:] == [
        "| vgg19 | joint | 9,000 | 10,000 | 0.90 | yes |",
        "| vgg19 | backtracking | 500 | 400 | 1.25 | yes |",
    ]
    assert bench_search.table([runs(1.0, 1.0, 5), runs(1.0, 1.0, 6)]).count("| no |") == 2


def test_checkouts_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, str]] = []

    def run(command: list[str], **_options: object) -> Any:
        asked.append((Path(command[command.index("--run") + 1]).name, command[command.index("--seed") + 1]))
        out = '{"step": "vgg19", "method": "joint", "per_s": 100.0, "predicted_ns": 1}\n'
        return subprocess.CompletedProcess(command, 0, out)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench_search.py", "--seeds", "2", "--against", str(bench_search.ROOT)])
    assert bench_search.main() == 0
    own = bench_search.ROOT.name
    assert asked == [(own, "0"), (own, "0"), (own, "1"), (own, "1")]
    assert capsys.readouterr().out.splitlines()[-1] == "| vgg19 | joint | 100 | 100 | 1.00 | yes |"


def test_a_run_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_search.py"])
    monkeypatch.setattr(sys, "executable", "false")
    assert bench_search.main() == 1
    assert "a run ended with exit status 1" in capsys.readouterr().err


def test_the_package_is_the_checkouts_whatever_is_installed(tmp_path: Path) -> None:
    (tmp_path / "disco_hlo").mkdir()
    (tmp_path / "disco_hlo" / "__init__.py").write_text("")
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "__init__.py").write_text("")
    program = f"""
import sys; sys.path.insert(0, {str(bench_search.ROOT / "scripts")!r})
from pathlib import Path
import bench_search
bench_search.load_package(Path({str(tmp_path)!r}))
import disco_hlo.search
print(disco_hlo.search.__file__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "search" / "__init__.py")
