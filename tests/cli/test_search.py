from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from disco_hlo.cli import search
from disco_hlo.cli.output import write_files
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.plan import decode
from disco_hlo.plan.read import verify
from disco_hlo.profiler.profile import to_json
from disco_hlo.report.bundle import open_bundle
from tests.cli.conftest import Disco
from tests.report import plans

BUDGET = ("--evaluations", "200")


def test_a_plan_is_found_and_saved_whole(disco: Disco, cpu_module_file: Path, tmp_path: Path) -> None:
    outcome = disco("search", cpu_module_file, "-o", tmp_path / "found", *BUDGET, "--seed", "7", "--json")
    assert outcome.code == 0
    found = outcome.json
    assert found["evaluations"] == 200
    assert 0 < found["distinct_evaluations"] <= 201
    assert found["evaluations_per_s"] > 0
    assert found["wall_s"] > 0
    assert found["stopped"] == "evaluations"
    assert found["settings"]["seed"] == 7
    predicted = found["predicted"]
    assert predicted["bound_ns"] <= predicted["plan_ns"] <= predicted["default_ns"]
    bundle = open_bundle(tmp_path / "found" / "plan.json")
    assert bundle.missing == ()
    assert bundle.plan.prediction.plan_ns == predicted["plan_ns"]
    assert bundle.plan.measured is None
    module = (tmp_path / "found" / "module.hlo.pb").read_bytes()
    verify(plans.cpu(), module, bundle.plan.strategy)
    assert canonicalize(module).graph.fingerprint == bundle.plan.target.fingerprint


def test_where_a_module_runs_is_taken_from_the_profile(
    disco: Disco, cpu_module_file: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    measured = plans.sockets_profile()
    cpu = replace(measured, platform=replace(measured.platform, device_kind="a CPU, 2 cores", backend="cpu"))
    profile.write_text(to_json(cpu))
    disco("search", cpu_module_file, "--profile", profile, "-o", tmp_path / "a", *BUDGET)
    target = open_bundle(tmp_path / "a" / "plan.json").plan.target
    assert (target.device_kind, target.device_count) == ("a CPU, 2 cores", 2)
    disco("search", cpu_module_file, "-o", tmp_path / "b", *BUDGET)
    assert open_bundle(tmp_path / "b" / "plan.json").plan.target.device_kind == "unknown"
    for name in ("a", "b"):
        assert disco("report", tmp_path / name, "-o", tmp_path / "page.html").code == 0


def test_a_plan_file_may_have_a_name(disco: Disco, cpu_module_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my plans"
    outcome = disco("search", cpu_module_file, "-o", folder / "mine.json", *BUDGET)
    assert f"look at it with: disco inspect '{folder / 'mine.json'}'\n" in outcome.out
    assert sorted(path.name for path in folder.iterdir()) == [
        "mine.default.hlo.pb.gz", "mine.json", "mine.module.hlo.pb",
    ]  # fmt: skip
    assert disco("inspect", folder / "mine.json").err == ""


def test_a_plan_can_be_searched_again_from_its_folder(disco: Disco, cpu_plan: Path, tmp_path: Path) -> None:
    disco("search", cpu_plan, "-o", tmp_path / "again", *BUDGET)
    again = open_bundle(tmp_path / "again" / "plan.json").plan
    assert again.target == open_bundle(cpu_plan / "plan.json").plan.target
    assert again.versions["jax"] == "0.11.2"


def test_bad_input_is_refused_and_leaves_nothing(
    refused: Callable[..., str], cpu_module_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "found"
    assert "Search method 'clever'" in refused("search", cpu_module_file, "-o", out, "--method", "clever")
    for option, value in (("--alpha", "0.5"), ("--alpha", "inf"), ("--seconds", "inf"), ("--seconds", "nan")):
        message = refused("search", cpu_module_file, "-o", out, option, value)
        assert f"Invalid value for '{option}'" in message
    assert "no such file" in refused("search", tmp_path / "nothing", "-o", out)
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refused("search", cpu_module_file, "-o", tmp_path / "file" / "found")
    assert not out.exists()


@pytest.mark.slow
def test_ctrl_c_keeps_the_best_plan(cpu_module_file: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "disco_hlo.cli.main", "search", str(cpu_module_file),
        "-o", str(tmp_path / "found"), "--patience", str(10**9), "--json",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stderr is not None
    # The line is said once Ctrl-C is taken care of.
    assert process.stderr.readline().startswith("disco: no profile")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["stopped"] == "interrupted"
    assert open_bundle(tmp_path / "found" / "plan.json").plan.prediction.plan_ns > 0


def test_the_best_plan_so_far_is_saved_while_the_search_goes_on(
    disco: Disco, cpu_module_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[bytes] = []

    def write_and_look(folder: Path, files: dict[str, bytes]) -> None:
        write_files(folder, files)
        saved.append((folder / "plan.json").read_bytes())

    monkeypatch.setattr(search, "SAVED_EVERY_S", 0.0)
    monkeypatch.setattr(search, "write_files", write_and_look)
    disco("search", cpu_module_file, "-o", tmp_path / "found", *BUDGET)
    times = [decode(plan, "saved").prediction.plan_ns for plan in saved]
    assert len(times) > 1
    assert times == sorted(times, reverse=True)
