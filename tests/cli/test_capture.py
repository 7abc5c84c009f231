from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_hlo.cli.inputs import open_named
from disco_hlo.errors import DiscoError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.read import read
from disco_hlo.report.bundle import read_module
from tests.cli.conftest import Disco
from tests.e2e.jobs import QUICK_COMPILES
from tests.known_times import know_all
from tests.ports import free_port

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
