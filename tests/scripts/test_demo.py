"""The demo with jobs that only pretend to train: what it prints, keeps and refuses, and how it ends jobs."""

import json
import math
import os
import sys
import time
from pathlib import Path

import demo
import demo_job
import pytest

from disco_hlo.hlo.cost_model import Line
from disco_hlo.plan import plan as plans
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.store import PlanStore
from tests.made_plans import made_plan

MODULE = b"module"
BEST = "plan 2"
MEASURED = (
    ("XLA default", 100_000_000, 3_000_000, 98_000_000),
    ("no fusion", 125_000_000, 4_000_000, 120_000_000),
    ("one bucket, XLA's op fusion", 80_000_000, 2_000_000, 81_000_000),
    ("plan's buckets, XLA's op fusion", 75_000_000, 2_000_000, 0),
    ("plan", 55_000_000, 1_000_000, 49_000_000),
    ("plan 2", 50_000_000, 1_500_000, 49_000_001),
)


def plan_of(chosen: str = BEST, left_out: str = "", failed: str = "") -> plans.Plan:
    candidates = [
        plans.Candidate(name, predicted, 0, 0, 0, "no memory")
        if name == failed
        else plans.Candidate(name, predicted, median, spread, 25)
        for name, median, spread, predicted in MEASURED
        if name != left_out
    ]
    lines = (Line(0, 0.5, 200_000.0), Line(1_048_576, 0.25, -62_144.0))
    return made_plan(
        plans.Target("ab" * 32, "ab" * 32, "jit_train_step", "cpu", "cpu", 2, 2),
        Strategy(),
        MODULE,
        chosen=chosen,
        prediction=plans.Prediction(49_000_001, 98_000_000, 120_000_000, 40_000_000, 45_000_000),
        search=plans.SearchRecord("backtracking", {}, 6561, ()),
        measured=plans.Measured("2026-01-01", tuple(candidates), lines, 20.4, 7.5, 43.2, 874.8),
    )


def runs_of(enacted_losses: tuple[float, ...] = (5.5, 5.0, 4.0)) -> dict[str, demo.Run]:
    return {
        "default": demo.Run(0.1, [5.5, 5.0, 4.0], 12.0),
        "search": demo.Run(0.05, [5.5, 5.0, 4.0], 80.0),
        "enacted": demo.Run(0.04, list(enacted_losses), 10.0),
    }


# --- table ----------------------------------------------------------------------------------------


def test_markdown_holds_the_table_and_the_facts() -> None:
    result = demo.result_of(plan_of(), "out/demo/plans/ab", runs_of(), 0.25)
    assert demo.what_next(result).endswith("report out/demo/plans/ab -o out/demo/plans/ab/report.html")
    assert demo.markdown(result).splitlines()[:-1] == [
        "|  | step time | spread | vs default | predicted |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| XLA default | 100.0 ms | ± 3.0 ms | 1.00x | 98.0 ms |",
        "| no fusion | 125.0 ms | ± 4.0 ms | 0.80x | 120.0 ms |",
        "| one bucket, XLA's op fusion | 80.0 ms | ± 2.0 ms | 1.25x | 81.0 ms |",
        "| plan's buckets, XLA's op fusion | 75.0 ms | ± 2.0 ms | 1.33x | - |",
        "| the plan | 50.0 ms | ± 1.5 ms | 2.00x | 49.0 ms |",
        "",
        "- training runs, 3 steps each: 100.0 ms per step with XLA's default, 40.0 ms with the plan (2.50x); "
        "50.0 ms in the searching run, once it had searched",
        "- loss curves: 0.0e+00 apart at most, relative (1e-04 is allowed)",
        "- all-reduce: latency 0.200 ms, bandwidth 2.00 GB/s (T = C x + D, C = 0.5 ns/byte)",
        "- all-reduce from 1048576 bytes: offset -0.062 ms, bandwidth 4.00 GB/s "
        "(T = C x + D, C = 0.25 ns/byte)",
        "- search: profiled in 20 s, 6561 candidates simulated in 8 s, "
        "finalists compiled and measured in 43 s",
    ]


@pytest.mark.parametrize("chosen", ["XLA default", "one bucket, XLA's op fusion"])
def test_where_a_baseline_won_the_last_row_is_the_best_that_was_searched(chosen: str) -> None:
    result = demo.result_of(plan_of(chosen), "p", runs_of(), 0.0)
    row = demo.rows_of(result.plan)["the plan"]
    assert row is not None
    assert row.name == "plan"
    assert f'nothing searched was faster than "{chosen}", which is what the plan holds' in demo.facts(result)


def test_a_candidate_that_did_not_run_has_no_time() -> None:
    row = demo.rows_of(plan_of(failed="no fusion"))["no fusion"]
    assert demo.cells("no fusion", row, 1) == ("no fusion", "failed", "-", "-", "120.0 ms")


@pytest.mark.parametrize("name", ["XLA default", "plan 2"])
def test_a_plan_without_a_row_is_refused(name: str) -> None:
    with pytest.raises(demo.DemoError, match=f"no measurement of '{name}'"):
        demo.rows_of(plan_of(left_out=name))


def test_a_baseline_that_is_no_legal_strategy_has_an_empty_row() -> None:
    name = "plan's buckets, XLA's op fusion"
    row = demo.rows_of(plan_of(left_out=name))[name]
    assert demo.cells(name, row, 1) == (name, "left out", "-", "-", "-")


@pytest.mark.parametrize(
    ("expected", "got", "difference"),
    [
        ([4.0, 2.0], [4.0, 2.0], 0.0),
        ([4.0, 2.0], [4.0, 2.5], 0.25),
        ([4.0, 2.0], [4.0], math.inf),
        ([4.0, 2.0], [4.0, math.nan], math.inf),
        ([math.nan], [math.nan], math.inf),
    ],
)
def test_loss_difference(expected: list[float], got: list[float], difference: float) -> None:
    assert demo.loss_difference(expected, got) == difference


# --- jobs -----------------------------------------------------------------------------------------


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_job_that_takes_too_long_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    argv = ["sh", "-c", "sleep 300 & echo $!; wait"]

    def until_it_runs(_log: Path) -> None:
        while not log.read_text().endswith("\n"):
            time.sleep(0.01)

    assert demo_job.run_job(argv, dict(os.environ), log, 1.0, until_it_runs) is None
    child = int(log.read_text())
    deadline = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)


def test_what_a_job_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    argv = ["sh", "-c", "trap '' TERM; sleep 300 & echo $!; exit 3"]
    assert demo_job.run_job(argv, dict(os.environ), log, 60.0, lambda _log: None) == 3
    child = int(log.read_text())
    deadline = time.monotonic() + 60
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(child)


def test_a_log_is_shown_without_what_a_terminal_obeys(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"first\n\n\x1b[2Jsecond\xff\nthird\n")
    assert demo_job.last_lines(log, 2) == [" [2Jsecond\ufffd", "third"]
    assert demo_job.log_tail(log).endswith(":\n  | first\n  |  [2Jsecond\ufffd\n  | third")


def test_nothing_of_the_user_makes_the_runs_differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ENABLE_SEARCH", "DISCO_SEED", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS"):
        monkeypatch.setenv(name, "1")
    default, search, enacted = (demo.environment(phase, tmp_path, 60, 4321) for phase in demo.PHASES)
    assert not {"ENABLE_SEARCH", "DISCO_SEED", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS"} & set(default)
    assert search == default | {"ENABLE_SEARCH": "1", "DISCO_WHEN": "compile", "DISCO_EXPLAIN": "1"}
    assert enacted == search | {"ENABLE_SEARCH": "0"}
    assert default["DISCO_DIR"] == str(tmp_path / "plans")
    assert default["JAX_COORDINATOR_PORT"] == "4321"


# --- the whole, with jobs that pretend ------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "a folder"


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, **codes: str) -> None:
    """Replace each job by Python code that writes a record, or by the code given under its phase's name."""
    store = folder.parent / "found"
    slot = PlanStore(store).slot("ab" * 32, "cpu", "cpu", 2)
    slot.save(plans.encode(plan_of()), MODULE)

    def command(phase: demo.Phase, out: Path, steps: int, seed: int) -> list[str]:
        record = {"losses": [5.0] * steps, "step_s": [0.1] * steps, "median_step_s": 0.1}
        code = f"open({str(out / phase.name) + '.json'!r}, 'w').write({json.dumps(record)!r})"
        if phase.name == "search":
            code += f"; import shutil; shutil.copytree({str(store)!r}, {str(out / 'plans')!r})"
        if phase.name == "enacted":
            code += "; print('disco: enacts the plan of jit_train_step')"
        return [sys.executable, "-c", codes.get(phase.name, code).replace("CODE", repr(code))]

    monkeypatch.setattr(demo, "command", command)


def test_three_runs_give_table_and_files(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, folder)
    assert demo.main(["--out", str(folder), "--steps", "3"]) == 0
    printed = capsys.readouterr().out
    assert "3/3  the same script with ENABLE_SEARCH=0: " in printed
    assert "± 1.5 ms" in printed
    assert "| the plan | 50.0 ms |" in (folder / "demo.md").read_text()
    record = json.loads((folder / "demo.json").read_text())
    assert record["plan"]["chosen"] == BEST
    assert record["plan"]["measured"]["candidates"][-1]["median_ns"] == 50_000_000
    assert record["loss_difference"] == 0.0
    # A second demo begins anew.
    (folder / "plans" / "old").touch()
    assert demo.main(["--out", str(folder), "--steps", "3"]) == 0
    assert not (folder / "plans" / "old").exists()


@pytest.mark.parametrize(
    ("phase", "code", "message"),
    [
        ("default", "import sys; sys.exit('rank 1 died')", "training with XLA's default: failed with exit"),
        ("default", "print('no record')", "its record cannot be read"),
        ("search", "exec(CODE.split(';')[0]); print('disco: nobody home')", "the search saved no plan"),
        ("enacted", "exec(CODE.split(';')[0]); print('disco: other')", "the last run did not execute the plan"),
    ],
)  # fmt: skip
def test_a_run_that_fails_ends_the_demo_with_the_end_of_its_log(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    phase: str,
    code: str,
    message: str,
) -> None:
    pretend(monkeypatch, folder, **{phase: code})
    assert demo.main(["--out", str(folder), "--steps", "3"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("demo: ")
    assert message in said
    assert "\n  | " in said
    assert "Traceback" not in said
    assert not (folder / "demo.json").exists()


def test_losses_that_disagree_fail_the_demo_after_its_table(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, folder, enacted="exec(CODE.replace('5.0', '5.001', 1))")
    assert demo.main(["--out", str(folder), "--steps", "3"]) == 1
    captured = capsys.readouterr()
    assert "± 1.5 ms" in captured.out
    assert "the loss curves differ by 2.0e-04, more than 1e-04" in captured.err


def test_a_folder_with_other_peoples_files_is_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "plans").mkdir(parents=True)
    (folder / "plans" / "mine").touch()
    assert demo.main(["--out", str(folder)]) == 1
    assert "holds files that this demo did not make" in capsys.readouterr().err
    assert (folder / "plans" / "mine").exists()
