"""scripts/bench_kernels.py: it goes on from its rows, survives what hangs or dies, and runs on interpreted devices."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from disco_hlo.kernels.refusals import OLDEST_JAX
from scripts import bench_kernels

SCRIPT = Path(bench_kernels.__file__)


def process(code: str, tmp_path: Path, silence: float = 30.0) -> tuple[Any, Any, list[dict[str, Any]]]:
    """What the parent makes of a process that runs `code`."""
    record = bench_kernels.Record(tmp_path / "rows.jsonl")
    chosen = argparse.Namespace(out=tmp_path, silence=silence)
    trying, reason = bench_kernels.run_process([sys.executable, "-c", code], {}, record, chosen)
    return trying, reason, record.rows


SAYS = """
def say(kind, what):
    print(kind, __import__("json").dumps(what), flush=True)
say("ROW", {"kernel": "adam", "size": 4, "kind": "point", "tiles": {"size": 512}, "us": {"fused": 2.0}})
say("TRYING", {"kind": "point", "tiles": {"size": 1024}})
"""


def test_a_process_that_hangs_is_killed_and_what_it_tried_is_known(tmp_path: Path) -> None:
    trying, reason, rows = process(SAYS + "__import__('threading').Event().wait()", tmp_path, silence=2.0)
    assert trying == {"kind": "point", "tiles": {"size": 1024}}
    assert reason == "said nothing for 2 s and was killed"
    assert [row["us"] for row in rows] == [{"fused": 2.0}]


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


def test_every_kernel_has_a_turn_before_any_has_its_second() -> None:
    sizes = {"adam": [1, 2, 3], "floor": [()]}
    assert list(bench_kernels.jobs_of(["adam", "floor"], sizes)) == [
        ("adam", 1),
        ("floor", ()),
        ("adam", 2),
        ("adam", 3),
    ]


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__ < OLDEST_JAX, reason=f"jax {jax.__version__} lacks what the kernels use"
)
def test_it_runs_from_end_to_end_and_does_not_measure_twice(tmp_path: Path) -> None:
    command = [
        sys.executable, SCRIPT, "--out", tmp_path, "--interpret", "--tiny", "--kernels", "matvec-all-reduce",
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["kernel"], row["kind"]) for row in rows] == [
        ("matvec-all-reduce", kind) for kind in ("point", "point", "final")
    ]
    assert all(row["exact"] for row in rows), rows
    assert set(rows[2]["us"]) == {
        "fused", "fused in order of rows", "separate", "compute alone", "link alone",
    }  # fmt: skip
    again = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert again.stdout.splitlines() == [f"3 rows in {tmp_path / 'rows.jsonl'}"]


def test_every_call_of_a_row_is_made_and_timed() -> None:
    """What a compiler may leave out of calls that nobody reads: all but the last."""
    bench = bench_kernels.Bench(interpret=False)
    rows = jax.sharding.PartitionSpec("x")

    def local(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "x") * y

    arrays = jax.numpy.ones((8, 32)), jax.numpy.ones((8, 1))
    call = bench_kernels.Call(local, (rows, rows), rows, arrays)
    text = bench.in_a_row(call, 5).lower(*arrays).compile().as_text()
    assert text.count(" all-reduce(") == 5
    assert bench.time({"sum": call}, 2)["sum"] is not None
