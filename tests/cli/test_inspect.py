from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from disco_hlo.plan.read import read
from tests.captured import captured
from tests.cli.conftest import Disco
from tests.report import plans
from tests.report.hostile import NAMES, hostile_plan

SUMMARY = "604 op groups with 4187 ops, 2548 duplicated"


def test_a_plan_is_shown(disco: Disco, h200_plan: Path) -> None:
    outcome = disco("inspect", h200_plan, "--top", "3")
    assert outcome.code == 0
    assert outcome.err == ""
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert lines[0] == f"jit_train_step key {plans.h200().graph.key[:16]}"
    assert "plan (this plan) 98 ms 100 ms ± 500 µs" in lines
    assert "no fusion 215 ms out of memory" in lines
    assert "speed-up: measured 1.23x, predicted 1.24x" in lines
    groups = lines.index(SUMMARY)
    assert re.match(r"g\d+ 30 1 loop 2.478 MiB 7 broadcast, 4 compare", lines[groups + 2])
    assert "27 buckets with 150 collectives, 642.6 MiB" in lines
    assert "all-reduce from 1 MiB: T = 0.04 ns/byte x size + 60 µs" in lines
    assert "note: a note" in lines


def test_everything_comes_as_json(disco: Disco, vgg19_plan: Path) -> None:
    found = disco("inspect", vgg19_plan, "--json").json
    source = captured("h200_models/vgg19")
    xla = read(source)
    assert len(found["groups"]) == len(xla.groups)
    assert found["groups"][0]["size"] == max(len(group.ops) for group in xla.groups)
    assert found["measured_speedup"] == 1.23
    assert sum(len(bucket["collectives"]) for bucket in found["buckets"]) == len(source.graph.collectives)
    assert found["order"]["buckets"] == len(xla.buckets)
    assert len(found["order"]["tokens"]) == found["order"]["units"] + len(xla.buckets)
    op = found["ops"][str(found["groups"][0]["nodes"][0])]
    assert set(op) == {"node", "opcode", "shape", "size_bytes", "name", "op_name", "source"}


def test_a_plan_without_its_module_is_shown_by_number(disco: Disco, h200_plan: Path, tmp_path: Path) -> None:
    shutil.copy(h200_plan / "plan.json", tmp_path)
    outcome = disco("inspect", tmp_path)
    assert outcome.code == 0
    assert "604 op groups" in outcome.out
    assert "ops are known by number alone" in outcome.err


def test_an_unmeasured_plan_says_so(disco: Disco, tmp_path: Path) -> None:
    source = plans.cpu()
    folder = plans.save_plan(
        tmp_path, source, plans.cpu_module(), plans.early_collectives(source), measured=None
    )
    assert "speed-up: predicted 1.24x, not measured" in disco("inspect", folder).out


def test_hostile_names_reach_the_terminal_as_text(disco: Disco, tmp_path: Path) -> None:
    folder = hostile_plan(tmp_path)
    for arguments in (("inspect", folder), ("inspect", folder, "--json"), ("diff", folder, "--default")):
        outcome = disco(*arguments)
        assert outcome.code == 0
        assert outcome.out.replace("\n", "").isprintable()
    assert NAMES[0] in disco("inspect", folder, "--json").json["target"]["module_name"]


def test_what_is_no_plan_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "no such file or folder" in refused("inspect", tmp_path / "nothing")
    (tmp_path / "plan.json").write_text('{"format": "disco-hlo plan", "version": 99}')
    assert "this disco-hlo reads version" in refused("inspect", tmp_path)
    (tmp_path / "plan.json").write_bytes(b"\x00" * 100)
    assert "expected a plan as JSON" in refused("inspect", tmp_path / "plan.json", "--json")


def test_a_plan_with_fused_kernels_says_which(disco: Disco, tmp_path: Path) -> None:
    folder = plans.save_restructured(tmp_path / "fused", plans.cpu(), plans.cpu_module("mlp_wide"))
    data = json.loads((folder / "plan.json").read_text())
    pairs = [{"kernel": "matmul-all-reduce"}] * 2 + [{"kernel": "all-gather-matmul"}, 7]
    data["structure"]["moves"] = [{"move": "fuse", "pairs": pairs}]
    (folder / "plan.json").write_text(json.dumps(data))
    shown = disco("inspect", folder, "--top", "1")
    assert "1 time fuse: matmul-all-reduce 2 times, all-gather-matmul 1 time" in shown.out


def test_the_moves_of_a_plan_that_changes_the_structure_are_shown(disco: Disco, tmp_path: Path) -> None:
    folder = plans.save_restructured(tmp_path / "chunked", plans.cpu(), plans.cpu_module("mlp_wide"))
    shown = disco("inspect", folder, "--top", "1")
    assert (shown.code, shown.err) == (0, "")
    assert (
        "structure: chunk-2, 2 moves on the module cccccccccccccccc\n  2 times chunk: 2 instructions, parts 2"
        in (shown.out)
    )
    assert "n17" not in shown.err
    found = disco("inspect", folder, "--json").json
    assert (found["structure"]["name"], len(found["structure"]["moves"])) == ("chunk-2", 2)
    assert found["missing"] == []
    plain = disco("inspect", plans.save_plan(
        tmp_path / "plain", plans.cpu(), plans.cpu_module(), plans.early_collectives(plans.cpu())
    ), "--json").json  # fmt: skip
    assert plain["structure"] is None


def test_moves_of_loops_say_what_they_are_done_to(disco: Disco, tmp_path: Path) -> None:
    folder = plans.save_restructured(tmp_path / "unrolled", plans.cpu(), plans.cpu_module("mlp_wide"))
    data = json.loads((folder / "plan.json").read_text())
    kept = {"move": "keep-turns", "loop": [41, 19], "later": 63, "pairs": [[12, 27], [20, 56]]}
    rotated = [
        {"move": "prefetch", "loop": [4], "gathers": [11]},
        {"move": "finish-later", "loop": [4], "reductions": [7, 8]},
    ]
    data["structure"]["moves"] = [kept, *rotated, *[{"move": "unroll", "loop": [41, 25]}] * 2]
    (folder / "plan.json").write_text(json.dumps(data))
    shown = disco("inspect", folder, "--top", "1").out.splitlines()
    first = shown.index("structure: chunk-2, 5 moves on the module cccccccccccccccc") + 1
    assert [line.strip() for line in shown[first : first + 4]] == [
        "2 times unroll", "1 time keep-turns: 2 values", "1 time prefetch: 1 all-gather",
        "1 time finish-later: 2 reductions",
    ]  # fmt: skip


def test_a_plan_with_another_structure_compares_with_none_of_the_step(disco: Disco, tmp_path: Path) -> None:
    folder = plans.save_restructured(tmp_path / "chunked", plans.cpu(), plans.cpu_module("mlp_wide"))
    refused = disco("diff", folder, "--default")
    assert refused.code == 2
    assert "changes the step's structure (chunk-2)" in refused.err
    assert disco("report", folder, "-o", tmp_path / "plan.html").code == 0
