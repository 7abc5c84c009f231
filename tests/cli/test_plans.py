"""``disco list`` and ``disco forgive``: plans and bans as they are shown and lifted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from disco_hlo.plan.bans import Bans
from tests.cli.conftest import Disco
from tests.report import plans


@pytest.fixture
def store(tmp_path: Path, cpu_plan: Path) -> Path:
    directory = tmp_path / "plans"
    shutil.copytree(cpu_plan, plans.slot(directory, plans.cpu()))
    return directory


def test_an_empty_store_says_how_to_fill_it(disco: Disco) -> None:
    assert "ENABLE_SEARCH=1" in disco("list").out
    assert disco("list", "--json").json["plans"] == []


def test_plans_are_listed_with_what_they_gain(disco: Disco, store: Path) -> None:
    outcome = disco("list")
    assert outcome.code == 0
    line = " ".join(outcome.out.splitlines()[1].split())
    key = plans.cpu().graph.key[:16]
    assert line == f"{key} jit_mlp_step 2 x NVIDIA H200 123 ms 100 ms 1.23x measured"
    (row,) = disco("list", "--json").json["plans"]
    assert (row["key"], row["speedup"], row["measured"]) == (key, 1.23, True)
    assert row["path"] == str(plans.slot(store, plans.cpu()))


def test_a_narrow_terminal_cuts_no_number(disco: Disco, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "36")
    line = disco("list").out.splitlines()[1].split()
    assert line == [plans.cpu().graph.key[:16], "123", "ms", "100", "ms", "1.23x"]


def test_damaged_plans_are_listed_with_the_reason(disco: Disco, store: Path) -> None:
    slot = plans.slot(store, plans.cpu())
    (slot / "module.hlo.pb").write_bytes(b"another")
    outcome = disco("list")
    assert outcome.code == 0
    assert "cannot be used" in outcome.out
    assert outcome.out.count(str(slot)) == 1
    assert "delete the folder and search again" in disco("list", "--json").json["plans"][0]["problem"]
    (slot / "plan.json").write_text("{")
    assert "expected a plan as JSON" in disco("list").out


def test_a_plan_beyond_what_python_reads_is_told_in_plain_words(disco: Disco, store: Path) -> None:
    """ "use sys.set_int_max_str_digits() to increase the limit" is no advice to whoever has such a file."""
    plan = plans.slot(store, plans.cpu()) / "plan.json"
    for text, why in [
        ('{"version": ' + "9" * 6000 + "}", "a number in it has thousands of digits"),
        ("[" * 100_000, "something in it is nested too deep"),
    ]:
        plan.write_text(text)
        said = " ".join(disco("list").out.split())
        assert f"{plan}: expected a plan as JSON: {why}; delete its folder and search again" in said


def test_plans_for_several_processes_are_told_apart_and_a_piped_row_is_one_line(
    disco: Disco, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = plans.slot(store, plans.cpu()) / "plan.json"
    plan = json.loads(file.read_text())
    plan["target"] |= {"process_count": 2, "module_name": "jit_" + "long_" * 30}
    file.write_text(json.dumps(plan))
    assert len(disco("list").out.splitlines()) > 2
    monkeypatch.delenv("COLUMNS")
    assert len(disco("list").out.splitlines()) == 2
    assert "2 x NVIDIA H200, 2 processes" in disco("list").out


def crash(folder: Path, module: str) -> None:
    """A process crashes while it compiles ``module``."""
    code = (
        "import os, sys; from pathlib import Path; from disco_hlo.plan.bans import Bans\n"
        "with Bans(Path(sys.argv[1])).trying(sys.argv[2], 'compile', 1): os.abort()"
    )
    assert (
        subprocess.run([sys.executable, "-c", code, folder, module], check=False).returncode
        == -signal.SIGABRT
    )


@pytest.fixture
def slot(store: Path) -> Path:
    """A plan's folder in the store, with the plan's module banned and another one."""
    folder = plans.slot(store, plans.cpu())
    crash(folder, json.loads((folder / "plan.json").read_text())["module_sha256"])
    crash(folder, "f" * 64)
    return folder


def test_bans_are_shown_and_lifted(disco: Disco, slot: Path) -> None:
    key = plans.cpu().graph.key[:16]
    outcome = disco("list")
    row, own, other = outcome.out.splitlines()[1:]
    assert row.split()[-1] == "banned"
    assert own.startswith(f"banned: the plan {key} is not enacted: process ")
    assert " ended by SIGABRT while it was compiled (" in own
    assert own.endswith(f"; to try it again: disco forgive {slot}")
    assert other.startswith(f"banned: a candidate in {slot} is not tried: process ")
    (listed,) = disco("list", "--json").json["plans"]
    assert listed["banned"] in own
    assert {ban["module"] for ban in listed["bans"]} >= {"f" * 64}
    assert "banned, and not enacted: process " in disco("inspect", key).out
    assert disco("inspect", slot, "--json").json["banned"] == listed["banned"]

    assert disco("forgive", key[:6]).out == f"lifted 2 bans in {slot}\n"
    assert disco("list").out.splitlines()[1].split()[-1] == "measured"
    assert disco("list", "--json").json["plans"][0]["bans"] == []
    assert "banned" not in disco("inspect", key).out
    assert disco("inspect", slot, "--json").json["banned"] == ""
    assert disco("forgive", slot).out == f"nothing in {slot} was banned\n"


def test_bans_of_a_search_that_saved_no_plan_are_shown_and_lifted(disco: Disco, slot: Path) -> None:
    (slot / "plan.json").unlink()
    lines = disco("list").out.splitlines()
    assert [line.startswith(f"banned: a candidate in {slot} is not tried: ") for line in lines] == [
        True,
        True,
    ]
    assert disco("forgive", plans.cpu().graph.key[:16]).out == f"lifted 2 bans in {slot}\n"
    assert disco("list").out.startswith("No plans in ")


def test_a_record_that_cannot_be_read_is_one_line(
    disco: Disco, slot: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(Bans(slot).all()) == 2
    for path in slot.glob("died-*"):
        path.write_bytes(b"\x1b[2J" * 1000)
    assert disco("list").out.splitlines()[1].split()[-1] == "measured"
    assert len(caplog.messages) == 2


def test_what_cannot_be_forgiven_is_refused(
    disco: Disco, refused: Callable[..., str], slot: Path, tmp_path: Path
) -> None:
    assert "not the start of a key" in refused("forgive", "no such plan")
    assert "no plan in " in refused("forgive", "0")
    (tmp_path / "notes").write_text("neither a plan nor beside one")
    for name in (tmp_path, tmp_path / "notes"):
        said = f"{tmp_path} has no plan.json, and nothing in it is banned; name a plan or its folder"
        assert refused("forgive", name) == f"disco: {said}"
    other = slot.parent / "cpu-cpu-x16"
    shutil.copytree(slot, other)
    assert "fits 2 plans; name one of these folders:" in refused("forgive", plans.cpu().graph.key[:6])
    os.symlink(slot, slot.parent / "cpu-cpu-x4")
    assert "is a symbolic link" in refused("forgive", slot.parent / "cpu-cpu-x4")
    assert len(Bans(slot).all()) == 2
