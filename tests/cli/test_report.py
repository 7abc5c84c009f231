from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Disco


def test_a_page_is_written(disco: Disco, cpu_plan: Path, tmp_path: Path) -> None:
    page = tmp_path / "deep" / "plan.html"
    outcome = disco("report", cpu_plan, "-o", page)
    assert outcome.code == 0
    assert str(page) in outcome.out
    assert page.read_text().startswith("<!doctype html>")
    assert list(page.parent.iterdir()) == [page]


def test_its_content_comes_as_json(disco: Disco, cpu_plan: Path) -> None:
    found = disco("report", cpu_plan, "--json").json
    assert found["head"]["module"] == "jit_mlp_step"
    assert len(found["timelines"]) == 2


def test_bad_input_is_refused_and_leaves_nothing(
    refused: Callable[..., str], cpu_plan: Path, tmp_path: Path
) -> None:
    assert refused("report", cpu_plan) == "disco: expected -o FILE for the page, or --json for its content"
    assert "is a folder; name a file" in refused("report", cpu_plan, "-o", tmp_path)
    (tmp_path / "file").write_text("")
    assert "cannot create the folder" in refused("report", cpu_plan, "-o", tmp_path / "file" / "plan.html")
    (tmp_path / "plan.json").write_text("{}")
    assert "disco-hlo plan" in refused("report", tmp_path, "-o", tmp_path / "plan.html")
    assert not (tmp_path / "plan.html").exists()
