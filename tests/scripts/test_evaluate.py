"""The evaluation by one command: what it runs, in which order, and what it says of the rest."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import evaluate
import pytest
from evaluation.record import CellName


def kept(out: Path, cell: CellName, rows: dict[str, dict[str, Any]]) -> None:
    """A record as scripts/benchmark.py leaves one."""
    facts = {"bounds": {"full_overlap_ms": 1.0, "bound_ms": 1.0}, "date": "2026-11-29", "backend": "gpu"}
    data = {
        "format": "disco-hlo evaluation", "version": 1,
        "cell": {"model": cell.model, "size": cell.size, "link": cell.link, "devices": cell.devices},
        "facts": facts, "rows": rows,
    }  # fmt: skip
    (out / f"{cell.stem}.json").write_text(json.dumps(data))


def timed(of_default: float, kind: str = "baseline") -> dict[str, Any]:
    return {
        "status": "ok", "kind": kind, "median_ms": 10 * of_default, "spread_ms": 0.1, "of_default": of_default,
        "of_default_noise": 0.01, "predicted": {"step_ms": 10.0}, "memory": {"total_bytes": 1 << 20},
    }  # fmt: skip


STAGED = {
    "XLA default": timed(1.0), "plan": timed(0.7, "plan"), "PGLE": timed(0.9), "O1": timed(1.1),
    "threshold 4 MiB": timed(0.85), "PGLE with the best threshold": timed(0.8), "threshold 1 MiB": timed(0.95),
    "no op fusion": {"status": "failed", "kind": "baseline", "reason": "too large"},
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The cells that were run, each measured at once; rnnlm over sockets runs out of time."""
    found: list[list[str]] = []

    def run(command: list[str], **_options: object) -> Any:
        values = command[2:]
        found.append(values)
        link, out = values[values.index("--link") + 1], Path(values[values.index("--out") + 1])
        kept(out, CellName(values[0], "full", link, 2), STAGED)
        return subprocess.CompletedProcess(command, 3 if (values[0], link) == ("rnnlm", "sockets") else 0)

    monkeypatch.setattr(subprocess, "run", run)
    return found


def run(out: Path, *options: str) -> int:
    args = evaluate.arguments(["--out", str(out), "--steps", "rnnlm,llama-dp-scan", *options])
    return evaluate.evaluate(args, evaluate.time.monotonic())


def rows_asked(values: list[str]) -> list[str]:
    return values[values.index("--rows") + 1].split(",")


def test_cells_run_one_after_the_other_and_the_rest_is_named(
    asked: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 3
    cells = [(values[0], values[values.index("--link") + 1]) for values in asked]
    assert cells == [
        ("rnnlm", "staged"), ("rnnlm", "staged"), ("llama-dp-scan", "staged"), ("llama-dp-scan", "staged"),
        ("rnnlm", "nvlink"), ("llama-dp-scan", "nvlink"), ("rnnlm", "sockets"), ("llama-dp-scan", "sockets"),
    ], "PGLE with the best threshold takes a second run"  # fmt: skip
    assert rows_asked(asked[0]) == ["all"]
    assert rows_asked(asked[2]) == ["form", "xla", "plan of Algorithm 1", "plan by analytical estimates"]
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("cells left: 6 of 6, which takes about 0.4 hours")
    assert "rnnlm-full-sockets-2: in part" in out
    assert "llama-dp-scan-full-nvlink-2: no op fusion: failed: too large" in out
    assert (tmp_path / "tables.md").exists()

    asked.clear()
    assert run(tmp_path) == 3
    assert [values[0] for values in asked] == ["rnnlm"], "what is done is not run again"


def test_over_other_links_the_three_run_that_were_fastest_over_staged_ones(
    asked: list[list[str]], tmp_path: Path
) -> None:
    run(tmp_path)
    assert rows_asked(asked[4])[-3:] == ["PGLE", "threshold 4 MiB", "threshold 1 MiB"]
    assert "plan of Algorithm 1" in rows_asked(asked[4])
    asked.clear()
    other = tmp_path / "other"
    run(other, "--links", "nvlink")
    assert rows_asked(asked[0])[-3:] == ["PGLE", "no all-reduce combining", "threshold everything"]


def test_what_is_left_is_listed_with_its_time_and_nothing_runs(
    asked: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "new", "--list", "--links", "sockets") == 0
    assert capsys.readouterr().out.splitlines() == [
        "cells left: 2 of 2, which takes about 0.1 hours",
        "rnnlm-full-sockets-2", "llama-dp-scan-full-sockets-2",
    ]  # fmt: skip
    assert asked == []
    assert not (tmp_path / "new").exists()


def test_no_cell_begins_that_has_no_time(
    asked: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--seconds", "30") == 3
    assert asked == []
    assert "rnnlm-full-staged-2: not reached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value"), [("--steps", "rnnlm,nothing"), ("--links", ","), ("--seconds", "0")]
)
def test_bad_options_end_with_2(option: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        evaluate.arguments(["--out", str(tmp_path), option, value])
    assert ended.value.code == 2


def test_a_damaged_list_of_what_is_done_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / evaluate.DONE_FILE).write_bytes(b"\xff\xfe")
    monkeypatch.setattr("sys.argv", ["evaluate.py", "--out", str(tmp_path), "--list"])
    assert evaluate.main() == 2
    assert capsys.readouterr().err.startswith("evaluate.py: 'utf-8' codec can't decode")
