"""``disco capture`` and ``disco calibrate``: from a training command to its step and to a profile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.cli import training
from disco_hlo.cli.inputs import open_named
from disco_hlo.cli.training import _facts, _print_profile
from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.read import read
from disco_hlo.profiler.profile import Contention, load
from disco_hlo.report.bundle import read_module
from tests.cli.conftest import Disco
from tests.e2e.jobs import QUICK_COMPILES
from tests.known_times import know_all
from tests.ports import free_port
from tests.report import plans

TRAIN = Path(__file__).with_name("train.py")
FILES = ["capture.json", "default.hlo.pb.gz", "profile.json", "unfused.hlo.pb.gz"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_SEARCH", "1")


def check(folder: Path) -> None:
    """The folder holds the step as XLA compiled it and without fusion, and can be searched."""
    assert sorted(path.name for path in folder.iterdir()) == FILES
    opened = open_named(folder)
    assert opened.source.graph.module_name == "jit_train_step"
    assert opened.profile is not None
    assert opened.profile.ops
    unfused = canonicalize(read_module(folder / "unfused.hlo.pb.gz"))
    assert unfused.graph.fingerprint == opened.source.graph.fingerprint
    assert read(unfused).groups == ()
    assert read(opened.source).groups != ()


def test_the_step_is_saved_while_the_script_runs_to_its_end(disco: Disco, tmp_path: Path) -> None:
    know_all(tmp_path / "plans", devices=2, processes=1)
    folder = tmp_path / "captured"
    outcome = disco("capture", "-o", folder, "--json", "--", sys.executable, TRAIN)
    assert outcome.code == 0, outcome
    assert outcome.json["module"] == "jit_train_step"
    assert outcome.json["files"] == FILES
    assert (outcome.json["device_count"], outcome.json["process_count"]) == (2, 1)
    check(folder)
    assert disco("simulate", folder, "--json").json["costs"][0].startswith("times from the profile of")


def test_a_command_without_a_training_step_is_told_apart(disco: Disco, tmp_path: Path) -> None:
    outcome = disco("capture", "-o", tmp_path / "captured", "--", sys.executable, "-c", "print('hello')")
    assert outcome.code == 1
    assert "compiled no training step" in outcome.err
    assert not (tmp_path / "captured").exists()


def test_a_failing_command_keeps_its_exit_code(disco: Disco, tmp_path: Path) -> None:
    outcome = disco("capture", "-o", tmp_path / "captured", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert outcome.code == 7


def test_of_a_command_that_was_interrupted_it_is_not_said_that_it_has_no_step(
    disco: Disco, tmp_path: Path
) -> None:
    # A suite that a shell runs in the background hands on an ignored SIGINT.
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    interrupted = f"import os, signal; {heard}; os.kill(os.getpid(), signal.SIGINT)"
    outcome = disco("capture", "-o", tmp_path / "captured", "--", sys.executable, "-c", interrupted)
    assert outcome.code == 130
    assert "disco: the command ended with exit code 130 and had saved no step" in outcome.err


def test_bad_input_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "no/such/command: no such command" in refused("capture", "-o", tmp_path, "--", "no/such/command")
    assert "Missing argument '-- COMMAND...'" in refused("capture", "-o", tmp_path)
    (tmp_path / "file").write_text("")
    assert "is a file; name a folder" in refused("capture", "-o", tmp_path / "file", "--", sys.executable)


def test_a_damaged_record_is_refused(disco: Disco, cpu_plan: Path, tmp_path: Path) -> None:
    shutil.copy(cpu_plan / "default.hlo.pb.gz", tmp_path)
    record = tmp_path / "capture.json"
    for content, reason in (
        ("{", "capture again"),
        ('{"format": "x", "version": 1, "target": {}, "versions": {}}', "missing required field"),
    ):
        record.write_text(content)
        with pytest.raises(DiscoError, match=reason):
            open_named(tmp_path)
    plan = json.loads((cpu_plan / "plan.json").read_text())
    plan["target"]["fingerprint"] = "0" * 64
    body = {"format": "disco-hlo capture", "version": 2, "target": plan["target"], "versions": {}}
    record.write_text(json.dumps(body))
    with pytest.raises(DiscoError, match="describes another module"):
        open_named(tmp_path)


@pytest.mark.mpi
@pytest.mark.slow
def test_two_ranks_capture_and_rank_0_writes(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    folder = tmp_path / "captured"
    know_all(tmp_path / "plans", devices=2, processes=2)
    environment = {
        **os.environ,
        "DISCO_DIR": str(tmp_path / "plans"),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {QUICK_COMPILES}",
    }
    train = ["mpiexec", "-n", "2", sys.executable, str(TRAIN), address]
    done = subprocess.run(
        [sys.executable, "-m", "disco_hlo.cli.main", "capture", "-o", str(folder), "--", *train],
        env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("disco: captured jit_train_step") == 1
    check(folder)
    record = json.loads((folder / "capture.json").read_text())
    assert (record["target"]["device_count"], record["target"]["process_count"]) == (2, 2)


def test_a_machine_is_measured_once_and_its_times_are_reused(disco: Disco, tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "profile.json", tmp_path / "b.json"
    outcome = disco("calibrate", "-o", first, "--json", "--", sys.executable, TRAIN)
    assert outcome.code == 0, outcome
    profile = load(first)
    assert profile.ops
    assert profile.all_reduce is not None
    assert outcome.json["ops"] == len(profile.ops)
    assert outcome.json["noise"] == profile.noise
    assert outcome.json["all_reduce"]["median_error"] == profile.all_reduce.median_error
    again = disco("calibrate", "-o", second, "--", sys.executable, TRAIN)
    assert load(second) == profile
    assert "its residuals" in again.out
    assert "noise of a step" in again.out


def test_what_slows_kernels_and_collectives_is_told_where_it_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(**measured: Any) -> tuple[str, dict[str, Any]]:
        profile = replace(plans.sockets_profile(), **measured)
        _print_profile(profile, aside=False)
        return capsys.readouterr().out, _facts(profile)

    out, facts = told()
    assert "wait of a collective" not in out
    assert "delay collectives" not in out
    assert (facts["contention"]["transfer_wait_ns"], facts["contention"]["products"]) == (0, None)
    out, facts = told(contention=Contention(1.25, 1.5, 32_500, products=4.0, others=1.0625))
    assert "wait of a collective during kernels" in out
    assert "32.5 µs" in out
    assert "matmuls 4.000, others 1.062" in out
    assert facts["contention"]["transfer_wait_ns"] == 32_500
    assert (facts["contention"]["products"], facts["contention"]["others"]) == (4.0, 1.0625)
    holds = {"dot": 0.75, "other dot": 0.85, "convolution": 0.0}
    out, facts = told(holds=holds)
    assert "2 of 3 kinds seen, 80 % of their time" in out
    assert facts["holds"] == holds
    out, _ = told(holds={"convolution": 0.0})
    assert "0 of 1 kind seen " in out
    assert "% of their time" not in out


def test_a_command_that_cannot_be_measured_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    output = tmp_path / "profile.json"
    message = refused("calibrate", "-o", output, "--", sys.executable, "-c", "raise SystemExit(7)")
    assert "ended with exit code 7 and compiled no training step" in message
    message = refused(
        "calibrate", "-o", output, "--seconds", "1", "--", sys.executable, "-c", "import time; time.sleep(60)"
    )
    assert "nothing was measured within 1 s" in message
    assert "no such command" in refused("calibrate", "-o", output, "--", "no/such/command")
    assert "is a folder; name a file" in refused("calibrate", "-o", tmp_path, "--", sys.executable)
    assert not output.exists()


@pytest.mark.parametrize("quiet", [False, True])
def test_what_a_command_prints_does_not_get_into_our_json(
    quiet: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    process = training._start([sys.executable, "-c", "print('loss 0.1')"], tmp_path, quiet=quiet)
    assert process.wait(60) == 0
    out, err = capfd.readouterr()
    assert ("loss 0.1" in out, "loss 0.1" in err) == (not quiet, quiet)


def test_a_command_is_started_though_stdout_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert training._start([sys.executable, "-c", ""], tmp_path, quiet=False).wait(60) == 0


@pytest.mark.parametrize("command", ["capture", "calibrate"])
def test_a_file_that_is_no_program_is_refused(
    command: str, refused: Callable[..., str], tmp_path: Path
) -> None:
    script = tmp_path / "train"
    script.write_text("import jax\n")
    script.chmod(0o755)
    message = refused(command, "-o", tmp_path / "out", "--", script)
    assert f"{script} cannot be started: Exec format error" in message
    script.chmod(0o644)
    message = refused(command, "-o", tmp_path / "out", "--", script)
    assert f"{script}: not an executable program; expected: disco {command} -o" in message


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    started = tmp_path / "started"
    touch = [sys.executable, "-c", f"open({str(started)!r}, 'w')"]
    message = refused("calibrate", "-o", tmp_path / "file" / "profile.json", "--", *touch)
    assert "is not a folder" in message
    assert not started.exists()
