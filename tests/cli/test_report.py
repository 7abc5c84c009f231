from __future__ import annotations

import json
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


def test_the_timelines_are_written_as_a_trace_with_named_tracks(
    disco: Disco, cpu_plan: Path, tmp_path: Path
) -> None:
    outcome = disco("report", cpu_plan, "--trace", tmp_path / "step.json")
    assert outcome.code == 0
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["XLA default, simulated", "plan, simulated"]


def test_a_trace_without_the_module_is_refused(
    refused: Callable[..., str], cpu_plan: Path, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_bytes((cpu_plan / "plan.json").read_bytes())
    assert "has no timelines: the module is not beside it" in refused(
        "report", tmp_path, "--trace", "step.json"
    )


def test_bad_input_is_refused_and_leaves_nothing(
    refused: Callable[..., str], cpu_plan: Path, tmp_path: Path
) -> None:
    assert refused("report", cpu_plan) == (
        "disco: expected -o FILE for the page, --trace FILE for a trace, or --json for the content"
    )
    assert "is a folder; name a file" in refused("report", cpu_plan, "-o", tmp_path)
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refused("report", cpu_plan, "-o", tmp_path / "file" / "plan.html")
    (tmp_path / "plan.json").write_text("{}")
    assert "disco-hlo plan" in refused("report", tmp_path, "-o", tmp_path / "plan.html")
    assert not (tmp_path / "plan.html").exists()
