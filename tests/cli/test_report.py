from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Disco
from tests.cli.test_simulate import processes
from tests.report import plans


def test_a_page_and_a_trace_are_written(disco: Disco, cpu_plan: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "deep" / "plan.html", tmp_path / "step.json"
    outcome = disco("report", cpu_plan, "-o", page, "--trace", trace, "--json")
    assert outcome.code == 0
    assert outcome.json["head"]["module"] == "jit_mlp_step"
    assert len(outcome.json["timelines"]) == 2
    assert page.read_text().startswith("<!doctype html>")
    assert list(page.parent.iterdir()) == [page]
    assert processes(trace) == ["XLA default, simulated", "plan, simulated"]


def test_a_trace_without_the_module_is_refused(
    refused: Callable[..., str], cpu_plan: Path, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_bytes((cpu_plan / "plan.json").read_bytes())
    assert "has no timelines: the module is not beside it" in refused(
        "report", tmp_path, "--trace", "step.json"
    )


def test_a_trace_of_another_structure_is_refused_with_what_writes_it(
    disco: Disco, refused: Callable[..., str], tmp_path: Path
) -> None:
    folder = plans.save_restructured(tmp_path / "chunked", plans.cpu(), plans.cpu_module("mlp_wide"))
    message = refused("report", folder, "-o", tmp_path / "page.html", "--trace", tmp_path / "step.json")
    assert "plan.json has no timelines: it changes the step's structure (chunk-2)" in message
    assert f"disco simulate {folder / 'module.hlo.pb'} --trace FILE" in message
    assert [path.name for path in tmp_path.iterdir()] == ["chunked"]
    disco("simulate", folder / "module.hlo.pb", "--trace", tmp_path / "step.json")
    assert len(processes(tmp_path / "step.json")) == 1


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
