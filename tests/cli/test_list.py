from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

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
    assert "is not JSON" in disco("list").out


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
