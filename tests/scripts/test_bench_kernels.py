"""scripts/bench_kernels.py: it goes on from its rows, survives what hangs or dies, and runs on interpreted devices."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import jax
import pytest

from disco_hlo.kernels.refusals import OLDEST_JAX
from scripts import bench_kernels, kernel_problems

SCRIPT = Path(bench_kernels.__file__)


def process(code: str, tmp_path: Path, seconds: float = 60.0) -> tuple[Any, Any, list[dict[str, Any]]]:
    """What the parent makes of a process that runs `code`."""
    record = bench_kernels.Record(tmp_path / "rows.jsonl")
    chosen, command = argparse.Namespace(out=tmp_path), [sys.executable, "-c", code]
    trying, reason = bench_kernels.run_process(command, {}, record, chosen, monotonic() + seconds)
    return trying, reason, record.rows


SAYS = """
def say(kind, what):
    print(kind, __import__("json").dumps(what), flush=True)
say("ROW", {"kernel": "adam", "size": 4, "kind": "point", "tiles": {"size": 512}, "us": {"fused": 2.0}})
say("TRYING", {"kind": "point", "tiles": {"size": 1024}})
"""


def test_a_process_that_hangs_is_killed_and_what_it_tried_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_kernels, "SILENCE_S", 2.0)
    trying, reason, rows = process(SAYS + "__import__('threading').Event().wait()", tmp_path)
    assert trying == {"kind": "point", "tiles": {"size": 1024}}
    assert reason == "said nothing for 2 s and was killed"
    assert [row["us"] for row in rows] == [{"fused": 2.0}]


def test_a_process_that_is_at_work_when_the_time_is_up_has_no_reason(tmp_path: Path) -> None:
    code = SAYS + "while True: say('TRIED', 'more'); __import__('time').sleep(0.1)"
    assert process(code, tmp_path, seconds=2.0)[1] is None


def test_a_process_that_dies_leaves_its_reason(tmp_path: Path) -> None:
    trying, reason, _ = process(SAYS + "raise ValueError('too much shared memory')", tmp_path)
    assert trying == {"kind": "point", "tiles": {"size": 1024}}
    assert reason == "its process ended with 1: ValueError: too much shared memory"


def test_a_process_that_ends_well_has_no_reason(tmp_path: Path) -> None:
    assert process(SAYS, tmp_path)[1] is None


def test_rows_are_found_again_by_a_later_run(tmp_path: Path) -> None:
    record = bench_kernels.Record(tmp_path / "rows.jsonl")
    record.add({"kernel": "adam", "size": (4, 5), "kind": "final", "us": {"fused": 1.5}})
    again = bench_kernels.Record(tmp_path / "rows.jsonl")
    assert again.has("adam", (4, 5), "final")
    assert not again.has("adam", (4, 6), "final")


def row(kernel: str, size: Any, kind: str, **more: Any) -> dict[str, Any]:
    return {"kernel": kernel, "size": size, "kind": kind, **more}


def test_a_kernel_goes_on_with_the_sizes_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []

    def run(command: list[str], _: Any, record: bench_kernels.Record, *__: Any) -> tuple[Any, Any]:
        jobs.append(json.loads(command[command.index("--job") + 1]))
        if len(jobs) > 1:
            return None, None
        record.add(row("adam", 4, "final", us={}))
        return {"size": 8, "kind": "point", "tiles": {"size": 512}}, "said nothing"

    monkeypatch.setattr(bench_kernels, "run_process", run)
    chosen = argparse.Namespace(out=tmp_path, tiny=False, interpret=False)
    record = bench_kernels.Record(tmp_path / "rows.jsonl")
    bench_kernels.run_kernel(chosen, record, "adam", [4, 8, 16], monotonic() + 60)
    failed = row("adam", 8, "point", tiles={"size": 512}, error="said nothing")
    assert [(job["sizes"], job["done"]) for job in jobs] == [([4, 8, 16], []), ([8, 16], [failed])]


def test_the_tables_have_limits_both_orders_and_the_skew(tmp_path: Path) -> None:
    record = bench_kernels.Record(tmp_path / "rows.jsonl")
    us = {"fused": 200.0, "fused in order of rows": 210.0, "separate": 300.0}
    limits = {"compute alone": 150.0, "link alone": 90.4, "fused without a loop": 220.0}
    size = (8192, 4096, 4096)
    kernels = {"fused": {"copy": [9.0, 1.0], "_kernel_mosaic_gpu_kernel": [100.0, 101.0]}}
    record.add(row("matmul-all-to-all", size, "final", us=us | limits | {"separate without a loop": 319.0}))
    record.add(row("matmul-all-to-all", size, "trace", kernels=kernels))
    record.add(row("adam", 1 << 22, "final", error="no point worked"))
    speed, order, alone = (part.splitlines()[2:] for part in bench_kernels.table(record).split("\n\n"))
    assert speed == ["| matmul-all-to-all | 8192 × 4096 × 4096 | 300 | 200 | 1.50 | 150 | 90 |"]
    assert order == ["| matmul-all-to-all | 8192 × 4096 × 4096 | 200 | 210 | 1.0 % | - |"]
    assert alone == ["| matmul-all-to-all | 8192 × 4096 × 4096 | 319 | 220 | 1.45 | - | - |"]


def test_choices_are_those_of_the_rule_and_what_they_lose_is_told(tmp_path: Path) -> None:
    record = bench_kernels.Record(tmp_path / "rows.jsonl")
    for size, with_link, fused, separate in (
        ([8192, 4096, 4096], True, 350.0, 400.0),
        ([16384, 4096, 4096], True, 700.0, 800.0),
        ([32768, 4096, 4096], False, 1700.0, 1600.0),
    ):
        compute = size[0] * 300 / 8192
        us = {"fused": fused, "separate": separate, "compute alone": compute}
        us |= {"link alone": compute / 3} if with_link else {}
        record.add(row("choices", ["all-gather-matmul", with_link, size], "final", us=us, devices=2))
    found = bench_kernels.choices(record)
    assert [(one["choice"], one["best"], one["told"]) for one in found] == [
        ("fused", "fused", False),
        ("fused", "fused", False),
        ("fused", "separate", True),
    ]
    assert found[-1]["foretold"] == pytest.approx([1400, 1600])
    assert found[-1]["loss"] == pytest.approx(1 / 16)
    *_, last, _, total = bench_kernels.choices_table(record).splitlines()
    assert last.endswith("| 1700.0 | 1600.0 | 1400 / 1600 | fused | separate | 6.2% |")
    assert total == "2 of 3 chosen rightly, 0 of the 1 foretold; the largest loss is 6.2%"


def test_the_page_has_the_tables_of_its_rows() -> None:
    pages = SCRIPT.parents[1] / "docs" / "benchmarks"
    record = bench_kernels.Record(pages / "h100" / "kernels" / "rows.jsonl")
    tables = bench_kernels.table(record).split("\n\n")
    tables.append(bench_kernels.choices_table(record).split("\n\n")[0])
    filled = [one for one in tables if len(one.splitlines()) > 2]
    page = (pages / "kernels.md").read_text()
    assert len(filled) == 3
    assert all(one in page for one in filled)


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < OLDEST_JAX, reason=f"jax {jax.__version__} lacks what the kernels use"
)
def test_it_runs_from_end_to_end_and_does_not_measure_twice(tmp_path: Path) -> None:
    command = [
        sys.executable, SCRIPT, "--out", tmp_path, "--interpret", "--tiny",
        "--kernels", "floor", "embedding-all-to-all",
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    floor, *rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert (floor["kernel"], floor["us"]) == ("floor", {"floor": None})
    assert [(row["kernel"], row["kind"]) for row in rows] == [
        ("embedding-all-to-all", kind) for kind in ("point", "point", "final")
    ]
    assert all(row["roundings"] < 1 for row in rows), rows
    assert set(rows[2]["us"]) == {
        "fused",
        "fused in order of rows",
        "separate",
        "compute alone",
        "link alone",
        "fused without a loop",
        "separate without a loop",
    }
    again = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert again.stdout.splitlines() == [f"4 rows in {tmp_path / 'rows.jsonl'}"]


def test_every_call_of_a_row_is_made_and_timed() -> None:
    """What a compiler may leave out of calls that nobody reads: all but the last."""
    bench = kernel_problems.Bench(interpret=False)
    rows = jax.sharding.PartitionSpec("x")

    def local(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "x") * y

    arrays = jax.numpy.ones((8, 32)), jax.numpy.ones((8, 1))
    call = kernel_problems.Call(local, (rows, rows), rows, arrays)
    text = bench.in_a_row(call, 5, in_a_loop=False).lower(*arrays).compile().as_text()
    assert text.count(" all-reduce(") == 5
    looped: Any = bench.in_a_row(call, 5)
    text = looped.func.lower(*looped.args, *arrays).compile().as_text()
    assert text.count(" all-reduce(") == 2
    assert (text.count(" while("), looped.args) == (1, (5,))
    bench.compile_ahead(call)
    compiled = bench.loops[call.local]
    bench.compile_ahead(call)
    assert bench.loops[call.local] is compiled, "once"
    assert bench.time({"sum": call}, 2)["sum"] is not None
