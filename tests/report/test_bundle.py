from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from disco_hlo.errors import ModuleError, PlanError
from disco_hlo.plan.read import read
from disco_hlo.plan.variants import normal_form
from disco_hlo.report.bundle import locate, open_bundle, open_module, read_module
from tests.captured import captured
from tests.report import plans


@pytest.fixture
def store(tmp_path: Path, cpu_plan: Path) -> Path:
    shutil.copytree(cpu_plan, plans.slot(tmp_path, plans.cpu()))
    return tmp_path


def rewrite(folder: Path, change: Any) -> Path:
    """The plan in ``folder`` after ``change(fields)``."""
    path = folder / "plan.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    return path


def test_a_plan_is_found_by_file_folder_and_start_of_its_key(store: Path) -> None:
    folder = plans.slot(store, plans.cpu())
    key = plans.cpu().graph.key
    for name in (str(folder), str(folder / "plan.json"), key[:4], key[:16], key):
        assert locate(name, store) == folder / "plan.json"


def test_what_is_not_there_or_not_unique_is_said(store: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no plan in .* starts with 0123"):
        locate("0123", tmp_path / "elsewhere")
    with pytest.raises(PlanError, match="no such file or folder, and not the start of a key"):
        locate("my plan", store)
    with pytest.raises(PlanError, match=r"a folder without plan\.json"):
        locate(str(store), store)
    key = plans.cpu().graph.key
    other = store / key[:16] / "cpu-other-x4"
    shutil.copytree(plans.slot(store, plans.cpu()), other)
    with pytest.raises(PlanError, match="fits 2 plans"):
        locate(key[:6], store)
    with pytest.raises(PlanError, match="no plan"):
        locate(key[:16] + "0" * 48, store)


def test_plan_module_and_profile_are_read_together(vgg19_plan: Path) -> None:
    bundle = open_bundle(vgg19_plan / "plan.json")
    assert bundle.missing == ()
    assert bundle.source is not None
    assert bundle.source.graph.fingerprint == bundle.plan.target.fingerprint
    source = captured("h200_models/vgg19")
    assert bundle.default == read(source)
    assert bundle.strategy == normal_form(source.graph, bundle.plan.strategy)
    assert bundle.profile is not None


def test_a_plan_file_of_another_name_has_its_own_files_beside_it(cpu_plan: Path, tmp_path: Path) -> None:
    shutil.copy(cpu_plan / "plan.json", tmp_path / "mine.json")
    shutil.copy(cpu_plan / "default.hlo.pb.gz", tmp_path / "mine.default.hlo.pb.gz")
    assert open_bundle(tmp_path / "mine.json").missing == ()


def test_damaged_and_foreign_neighbours_are_named_and_left_out(cpu_plan: Path, tmp_path: Path) -> None:
    shutil.copytree(cpu_plan, tmp_path, dirs_exist_ok=True)
    (tmp_path / "profile.json").write_text("{")
    (tmp_path / "default.hlo.pb.gz").write_bytes((cpu_plan / "default.hlo.pb.gz").read_bytes()[:500])
    bundle = open_bundle(tmp_path / "plan.json")
    assert bundle.source is None
    assert bundle.profile is None
    assert "damaged gzip file" in bundle.missing[0]
    assert "expected a profile as JSON" in bundle.missing[1]
    (tmp_path / "default.hlo.pb.gz").write_bytes(plans.cpu_module("mlp_wide"))
    assert "is the module of another plan" in open_bundle(tmp_path / "plan.json").missing[0]


def test_an_illegal_plan_is_refused_with_the_reason(cpu_plan: Path, tmp_path: Path) -> None:
    shutil.copytree(cpu_plan, tmp_path, dirs_exist_ok=True)
    path = rewrite(tmp_path, lambda fields: fields["strategy"]["regions"][0]["buckets"].pop())
    with pytest.raises(PlanError, match="illegal on the module beside it: Collectives are in no bucket"):
        open_bundle(path)


@pytest.mark.parametrize("token", ["g999999", "b0.begin", "x1", "g-1", "n" + "9" * 40, ""])
def test_an_order_of_units_that_do_not_exist_is_refused(cpu_plan: Path, tmp_path: Path, token: str) -> None:
    shutil.copy(cpu_plan / "plan.json", tmp_path)
    path = rewrite(tmp_path, lambda fields: fields["strategy"]["regions"][0].update(order=[token]))
    with pytest.raises(PlanError, match="which is no unit of this plan"):
        open_bundle(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "other"}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_plan_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError):
        open_bundle(path)


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "module"
    with pytest.raises(ModuleError, match="no such file"):
        read_module(path)
    path.write_bytes(b"")
    with pytest.raises(ModuleError, match="is empty"):
        read_module(path)
    path.write_bytes(b"HloModule jit_step, is_scheduled=true")
    with pytest.raises(ModuleError, match="looks like HLO text"):
        open_module(path)
    with pytest.raises(ModuleError, match="not a regular file"):
        read_module(tmp_path)
