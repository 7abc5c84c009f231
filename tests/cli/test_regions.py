"""Regions in what ``disco`` shows of a plan: each with its kernels, its buckets and XLA's own next to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from disco_hlo.profiler.profile import to_json
from tests.cli.conftest import Disco
from tests.cli.test_simulate import processes
from tests.report import plans


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scanned") / "plan"


@pytest.fixture
def plan(disco: Disco, searched: Path) -> Path:
    """A searched plan of a scanned step; the first test that asks for it has it searched."""
    if not searched.exists():
        found = disco(
            "search", plans.SCANNED, "-o", searched, "--evaluations", "20", "--seeds", "1", "--json"
        ).json
        assert set(found["evaluations_of_regions"]) == {"loop1", "loop2"}
        assert found["collectives_not_simulated"] == 0
        times = {(one["name"], one["strategy"]): one["execution_ns"] for one in found["regions"]}
        assert times["entry", "plan"] < times["entry", "XLA"]
        assert times["loop1", "plan"] < times["loop1", "XLA"]
    return searched


def test_each_region_stands_next_to_xlas(disco: Disco, plan: Path) -> None:
    shown = disco("inspect", plan, "--top", "1")
    assert "not simulated" not in shown.err
    rows = [line.split() for line in shown.out.splitlines()]
    table = next(number for number, row in enumerate(rows) if row[:2] == ["region", "by"])
    assert [row[:2] for row in rows[table + 1 : table + 7 : 2]] == [
        ["entry", "plan"], ["loop1", "plan"], ["loop2", "plan"],
    ]  # fmt: skip
    assert [row[0] for row in rows[table + 2 : table + 7 : 2]] == ["XLA", "XLA", "XLA"]


def test_the_kernels_and_buckets_of_one_region_are_listed(
    disco: Disco, refused: Callable[..., str], plan: Path
) -> None:
    entry, loop = (disco("inspect", plan, "--region", name, "--json").json for name in ("entry", "loop2"))
    assert entry["regions"] == loop["regions"]
    sizes = [len(bucket["collectives"]) for bucket in loop["buckets"]]
    assert sum(sizes) == next(one["collectives"] for one in loop["regions"] if one["name"] == "loop2")
    assert loop["order"]["buckets"] == len(sizes)
    assert loop["groups"] != entry["groups"]
    assert "it has entry, loop1, loop2" in refused("inspect", plan, "--region", "loop3")


def test_plans_differ_region_by_region(disco: Disco, plan: Path, tmp_path: Path) -> None:
    found = disco("diff", plan, "--default", "--json").json
    assert (found["region"], found["same"]) == ("entry", False)
    assert found["regions"]["loop1"]["moved_units"]
    shown = disco("diff", plan, "--default", "--region", "loop1").out
    assert "loop1: order:" in shown
    assert "entry" not in shown
    assert disco("diff", plan, plan).out == "A and B execute the same in entry, loop1, loop2.\n"


def test_a_plan_that_leaves_a_loop_alone_has_xlas_kernels_there(
    disco: Disco, plan: Path, tmp_path: Path
) -> None:
    shutil.copytree(plan, tmp_path / "entry")
    file = tmp_path / "entry" / "plan.json"
    content = json.loads(file.read_text())
    content["strategy"]["regions"] = content["strategy"]["regions"][:2]
    file.write_text(json.dumps(content))
    rows = disco("inspect", tmp_path / "entry", "--json").json["regions"]
    assert [row["strategy"] for row in rows if row["name"] == "loop2"] == ["XLA"]
    found = disco("diff", tmp_path / "entry", "--default", "--json").json
    assert [name for name, one in found["regions"].items() if one["same"]] == ["loop2"]


def test_a_plan_for_a_region_that_there_is_not_is_refused(
    disco: Disco, refused: Callable[..., str], plan: Path, tmp_path: Path
) -> None:
    shutil.copytree(plan, tmp_path / "other")
    file = tmp_path / "other" / "plan.json"
    file.write_text(file.read_text().replace('"loop2"', '"loop7"'))
    message = refused("inspect", tmp_path / "other")
    assert (
        "is illegal on the module beside it: the step has no region 'loop7'; it has entry, loop1, loop2"
        in message
    )


def test_without_its_module_a_plan_shows_the_regions_that_it_names(
    disco: Disco, plan: Path, tmp_path: Path
) -> None:
    shutil.copy(plan / "plan.json", tmp_path)
    shown = disco("inspect", tmp_path, "--region", "loop1", "--top", "0").out
    assert "regions: entry, loop1, loop2\nloop1:" in shown


def test_a_profile_of_another_device_costs_the_times_alone(disco: Disco, plan: Path, tmp_path: Path) -> None:
    shutil.copytree(plan, tmp_path / "cpu")
    profile = plans.sockets_profile()
    (tmp_path / "cpu" / "profile.json").write_text(
        to_json(replace(profile, platform=replace(profile.platform, backend="cpu")))
    )
    shown = disco("inspect", tmp_path / "cpu", "--top", "0")
    assert "disco: the regions are shown without times: " in shown.err
    assert "regions: entry, loop1, loop2\n" in shown.out


def test_the_page_and_the_trace_have_a_timeline_of_each_region(
    disco: Disco, plan: Path, tmp_path: Path
) -> None:
    found = disco(
        "report", plan, "-o", tmp_path / "page.html", "--trace", tmp_path / "trace.json", "--json"
    ).json
    assert [one["region"] for one in (found, *found["regions"])] == ["entry", "loop1", "loop2"]
    steps = {row["name"]: row["execution_ns"] for row in found["regionTable"] if row["strategy"] == "plan"}
    for one in (found, *found["regions"]):
        default, ours = one["timelines"]
        assert ours["step"] == steps[one["region"]]
        assert one["groups"]
        assert one["buckets"]
        assert default["rows"][0]["spans"]
    assert processes(tmp_path / "trace.json") == [
        f"{who}, simulated{end}" for end in ("", ", loop1", ", loop2") for who in ("XLA default", "plan")
    ]


def test_plans_are_listed_with_their_regions(disco: Disco, plan: Path, tmp_path: Path) -> None:
    key = json.loads((plan / "plan.json").read_text())["target"]["key"]
    shutil.copytree(plan, tmp_path / "plans" / key[:16] / "gpu-unknown-x1")
    assert disco("list", "--json").json["plans"][0]["regions"] == ["loop1", "loop2"]
    assert disco("list").out.rstrip().endswith("loop1, loop2")
