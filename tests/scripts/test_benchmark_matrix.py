"""Many runs side by side: who starts when, on which GPUs, and what becomes of those that fail or take too long."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import benchmark_matrix
import pytest
from benchmark_matrix import DONE, FAILED, OUT_OF_TIME, Machine, Matrix, Run, matrix_in, next_run, run_all
from evaluation.rows import chosen_names

ROOT = Path(__file__).parents[2]
SMALL, OTHER = Run("small", (), gpus=1), Run("other", (), gpus=1)
PAIR, ALONE = Run("pair", (), gpus=2), Run("alone", (), gpus=1, alone=True)


@pytest.mark.parametrize(
    ("busy", "waiting", "expected"),
    [
        ({}, [PAIR, SMALL], (PAIR, (0, 1))),
        ({0: OTHER}, [PAIR, SMALL], (SMALL, (1,))),
        ({0: OTHER}, [ALONE, SMALL], None),
        ({}, [ALONE, SMALL], (ALONE, (0,))),
        ({0: ALONE}, [SMALL], None),
        ({0: OTHER, 1: SMALL}, [PAIR], None),
        ({}, [], None),
    ],
)
def test_what_starts_next(
    busy: dict[int, Run], waiting: list[Run], expected: tuple[Run, tuple[int, ...]] | None
) -> None:
    assert next_run(waiting, Machine((0, 1), (0, 1, 2, 3), busy)) == expected


def test_each_gpu_has_its_share_of_the_cores() -> None:
    machine = Machine((0, 1), (4, 5, 6, 7, 8))
    assert (machine.cores_of((0,)), machine.cores_of((1,))) == ({4, 5}, {6, 7})
    assert machine.cores_of((0, 1)) == {4, 5, 6, 7}
    assert Machine((0, 1, 2), (9,)).cores_of((2,)) == {9}


def test_the_matrix_that_ships_asks_for_rows_and_options_that_exist() -> None:
    benchmark = pytest.importorskip("benchmark")
    for run in matrix_in(ROOT / "configs" / "evaluation" / "h200.toml").runs:
        if run.script == "benchmark.py":
            options = [*run.arguments, "--devices", str(run.gpus), "--out", "nowhere"]
            assert chosen_names(benchmark.arguments(options).rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runs = 3", "Expected `array`, got `int`"),
        ("[[runs]]\nname = 'a'\narguments = []\ngpu = 1", "unknown field `gpu`"),
        ("[[runs]]\nname = 'a'\narguments = []\n" * 2, "two runs are called 'a'"),
        ("[[runs]]\nname = 'a'\narguments = []\ngpus = 0", "a: expected gpus of at least 1, came 0"),
        ("[[runs]]\nname = 'a'\narguments = []\nscript = 'no.py'", "a: there is no scripts/no.py"),
        ("not toml", "Expected '='"),
    ],
)
def test_a_matrix_that_cannot_be_run_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "matrix.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}.*{message}"):
        matrix_in(path)


def test_runs_get_their_gpus_and_one_that_outlives_its_time_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "tell.py").write_text("import os\nprint('GPUs', os.environ['CUDA_VISIBLE_DEVICES'])\n")
    (scripts / "fail.py").write_text("raise SystemExit(1)\n")
    (scripts / "hang.py").write_text(
        "import subprocess, sys\nsleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleep)\nprint(child.pid, flush=True)\nchild.wait()\n"
    )
    monkeypatch.setattr(benchmark_matrix, "SCRIPTS", scripts)
    monkeypatch.setattr(benchmark_matrix, "GRACE_S", 0.0)
    monkeypatch.setattr(benchmark_matrix, "LEAST_S", 0.0)
    said: list[str] = []
    machine = Machine((0, 1), tuple(sorted(os.sched_getaffinity(0))))

    def run(*runs: Run, seconds: float = 60.0) -> int:
        began = time.monotonic()
        return run_all(
            Matrix(runs), machine, tmp_path, lambda: seconds - (time.monotonic() - began), said.append
        )

    tell = Run("tell", (), gpus=2, script="tell.py")
    assert run(tell, Run("large", (), gpus=4)) == DONE
    assert (tmp_path / "tell.log").read_text() == "GPUs 0,1\n"
    assert "large: left out, needs 4 GPUs, the machine has 2" in said
    assert run(Run("fail", (), gpus=1, script="fail.py"), tell) == FAILED
    assert run(Run("hang", (), gpus=1, script="hang.py"), seconds=2.0) == OUT_OF_TIME
    child = int((tmp_path / "hang.log").read_text())
    for _ in range(100):
        if not _lives(child):
            break
        time.sleep(0.1)
    assert not _lives(child), "what a run had started ends with it"
    assert said[-1] == "the time is up; run again to go on with hang"


def _lives(process: int) -> bool:
    """Whether it runs; a zombie nobody waits for does not."""
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--gpus", "0"], "--gpus of at least 1"), (["--only", "nosuch"], "no run has 'nosuch' in its name")],
)
def test_bad_arguments_end_with_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    matrix = str(ROOT / "configs" / "evaluation" / "h200.toml")
    monkeypatch.setattr(
        sys, "argv", ["benchmark_matrix.py", matrix, *options, "--out", str(tmp_path / "out")]
    )
    try:
        status = benchmark_matrix.main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
