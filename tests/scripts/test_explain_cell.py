"""What kernels and transfers cost each other in a trace, on traces drawn by hand."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluation import explaining
from evaluation.explaining import _section, _sizes
from evaluation.record import CellName
from evaluation.traced_kernels import ELEMENTWISE, TRANSFER, Loss, Piece, drift, losses, paired, pieces

from disco_hlo.errors import DiscoError
from disco_hlo.plan.strategy import Bucket, Group, Strategy
from disco_hlo.profiler.allreduce import fit, point_of
from disco_hlo.profiler.trace import Execution, Trace
from tests.plan.small_graphs import graph

SCRIPT = Path(__file__).parents[2] / "scripts" / "explain_cell.py"
# A gradient (1) travels (2) while a matrix is multiplied (3) and a kernel of 4 and 5 runs.
STEP: Any = Namespace(
    graph=graph("param\ndot 0\nall-reduce 1\ndot 0\nmul 3\nadd 4\ntuple 2 5", backend="gpu"),
    origins=(
        Namespace(name="gemm", nodes=(1,), results=(1,)),
        Namespace(name="all-reduce-start", nodes=(2,), results=(2,)),
        Namespace(name="gemm.1", nodes=(3,), results=(3,)),
        Namespace(name="loop_fusion", nodes=(4, 5), results=(5,)),
    ),
)
ORDER = ("n1", "b0.start", "n3", "g0", "b0.done")
PLAN = Strategy((Group((4, 5)),), (Bucket((2,)),), ORDER)


def trace(*kernels: tuple[str, int, int], device: int = 0, run: int = 0) -> Trace:
    """Kernels as (instruction, start, end) in microseconds."""
    return Trace(
        tuple(
            Execution(
                op, "jit_step", run, device, 1000 * start, 1000 * end, "stream", 1000 * end,
                "ncclDevKernel" if op.startswith(("b", "all")) else "kernel",
            )
            for op, start, end in kernels
        ),
        (),
        "gpu",
    )  # fmt: skip


def both(*traces: Trace) -> Trace:
    return Trace(tuple(item for one in traces for item in one.executions), (), "gpu")


BESIDE = trace(
    ("n1_dot", 0, 100), ("b0.all-reduce", 104, 174), ("n3_dot.2", 101, 151), ("g0_fusion", 152, 192)
)


def test_kernels_and_transfers_are_known_by_what_they_compute() -> None:
    assert pieces(STEP, {}, PLAN, BESIDE) == [
        Piece((1,), "dot", 100_000, 0),
        Piece((2,), TRANSFER, 70_000, 69_000, waited_ns=4000),
        Piece((3,), "dot", 50_000, 47_000),
        Piece((4, 5), ELEMENTWISE, 40_000, 22_000),
    ]


def test_a_transfer_may_wait_for_the_end_of_a_kernel_that_began_before_it() -> None:
    waits = trace(
        ("n1_dot", 0, 100), ("n3_dot", 101, 151), ("b0.all-reduce", 152, 222), ("g0_fusion", 152, 192)
    )
    found = pieces(STEP, {}, PLAN, waits)
    assert found[2] == Piece((2,), TRANSFER, 70_000, 40_000, waited_ns=52_000, behind="dot")


def test_of_a_transfer_the_device_counts_that_came_last() -> None:
    early = trace(("n1_dot", 0, 50), ("b0.all-reduce", 54, 174), device=1)
    found = {one.nodes: one for one in pieces(STEP, {}, PLAN, both(BESIDE, early))}
    assert found[2,] == Piece((2,), TRANSFER, 70_000, 69_000, waited_ns=4000)
    assert found[1,].length_ns == 100_000


def test_xla_s_own_instructions_and_those_in_loops_are_found_by_their_origin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evaluation.traced_kernels.read", lambda _source: PLAN)
    ran = trace(("gemm", 0, 100), ("all-reduce-start", 104, 174), ("inside", 101, 151), ("unknown", 152, 192))
    found = pieces(STEP, {"inside": "loop_fusion"}, None, ran)
    assert [(one.nodes, one.what) for one in found] == [
        ((1,), "dot"),
        ((2,), TRANSFER),
        ((4, 5), ELEMENTWISE),
    ]


def test_a_module_with_a_number_behind_its_name_is_the_step_too() -> None:
    numbered = Trace(tuple(replace(one, module="jit_step__disco_4") for one in BESIDE.executions), (), "gpu")
    assert pieces(STEP, {}, PLAN, numbered) == pieces(STEP, {}, PLAN, BESIDE)


def test_waits_are_by_the_order_of_this_strategy_not_of_one_alike_seen_before() -> None:
    pieces(STEP, {}, replace(PLAN, order=()), BESIDE)
    assert pieces(STEP, {}, PLAN, BESIDE)[1].waited_ns == 4000


def test_a_generated_kernel_in_a_command_buffer_goes_by_its_own_name() -> None:
    executions = [
        replace(one, op="command_buffer_1", kernel=one.op) if one.op == "g0_fusion" else one
        for one in BESIDE.executions
    ]
    assert pieces(STEP, {}, PLAN, Trace(tuple(executions), (), "gpu")) == pieces(STEP, {}, PLAN, BESIDE)


def test_a_trace_of_something_else_is_refused() -> None:
    with pytest.raises(DiscoError, match="the trace holds nothing of jit_step"):
        pieces(STEP, {}, PLAN, Trace((), (), "gpu"))


def test_what_a_kernel_lost_leaves_out_what_the_machine_was_slower_by() -> None:
    alone = [Piece((1,), "dot", 100, 0), Piece((3,), "dot", 40, 0), Piece((2,), TRANSFER, 50, 0)]
    beside = [Piece((1,), "dot", 110, 0), Piece((3,), "dot", 64, 30), Piece((2,), TRANSFER, 70, 69)]
    pairs = paired(alone, beside)
    assert drift(pairs) == 1.1
    assert losses(pairs) == [Loss("dot", 2, 140, 30, 20), Loss(TRANSFER, 1, 50, 69, 20)]


def test_a_row_is_a_table_and_a_line_on_its_transfers() -> None:
    alone = [Piece((3,), "dot", 40_000_000, 0), Piece((2,), TRANSFER, 50_000_000, 0)]
    row = [
        Piece((3,), "dot", 60_000_000, 30_000_000),
        Piece((2,), TRANSFER, 70_000_000, 69_000_000, 52_000, "dot"),
        Piece((9,), "dot", 1, 0),
    ]
    text = _section("plan", alone, row)
    assert "2 of 3 kernels and transfers ran alone, too." in text
    assert "| dot | 1 | 40.00 | 30.00 | 20.00 | 0.67 |" in text
    assert (
        "1 transfers waited 0.05 ms in all once they could have begun, 52 us in the median, 52 at most"
        in text
    )
    assert text.endswith("for a kernel's end: 1 dot.\n")


def test_transfers_alone_are_held_against_the_sweep_by_size() -> None:
    sizes = [1 << n for n in range(8, 14)]
    lines = fit([point_of(size, [1000 + 2 * size] * 5) for size in sizes])
    alone = [Piece((2,), TRANSFER, 3024, 0), Piece((2,), TRANSFER, 5024, 0), Piece((1,), "dot", 9999, 0)]
    assert _sizes(STEP.graph, alone, lines).splitlines()[-1] == "| 1 | 2 | 1.0 | 4.0 |"


def test_a_row_of_which_xla_compiled_another_step_is_named_and_not_held_against_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes were looked for in the default's graph: "g6 holds node 1103, which cannot be part of a kernel"."""
    cell = CellName("rnnlm", "full", "nvlink", 2)
    (tmp_path / f"{cell.stem}.json").touch()
    other = replace(STEP.graph, fingerprint="cafe")
    ran = {"plan": (STEP.graph, PLAN, ()), "no all-reduce combining": (other, PLAN, ())}
    files = Namespace(
        folder=tmp_path,
        module=lambda: b"module",
        trace=lambda name: BESIDE if name in ran else None,
        profile=lambda: None,
    )
    monkeypatch.setattr(explaining, "Files", lambda *_: files)
    monkeypatch.setattr(explaining, "canonicalize", lambda _module: STEP)
    monkeypatch.setattr(explaining, "owners", lambda _module: {})
    monkeypatch.setattr(explaining, "what_ran", lambda _files, name, _source: ran[name])
    monkeypatch.setattr(explaining.Record, "open", lambda *_: Namespace(rows=lambda: dict.fromkeys(ran)))
    text = explaining.explained(tmp_path, cell)
    assert "## plan\n\n0 of 4 kernels and transfers ran alone, too." in text
    assert text.endswith(
        "## no all-reduce combining\n\n"
        "XLA compiled another step for this row: its kernels cannot be held against those of the others.\n"
    )
    assert "## plan" not in explaining.explained(tmp_path, cell, ["no all-reduce combining"])
    with pytest.raises(DiscoError, match="no trace of a row 'O1'"):
        explaining.explained(tmp_path, cell, ["O1"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["bert", "--link", "nvlink"], "there is no record"),
        (["bert", "--link", "carrier pigeon"], "invalid choice"),
    ],
)
def test_bad_arguments_end_with_a_message(tmp_path: Path, options: list[str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
