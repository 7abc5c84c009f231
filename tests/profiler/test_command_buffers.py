"""Names of kernels in command buffers, from a trace without: traces drawn by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.profiler.command_buffers import Lane, _lanes, _named_lanes, with_names
from disco_hlo.profiler.contention import launch_gap_ns
from disco_hlo.profiler.instructions import instruction_times
from disco_hlo.profiler.trace import Execution, RunWindow, Trace

Row = tuple[str, str, int, int]
"""Instruction, kernel, start and end in us."""

NAMED: Sequence[Row] = [
    ("g0_fusion", "g0_fusion", 0, 12),
    ("n1_dot", "nvjet_128", 13, 51),
    ("n1_dot", "splitk_reduce", 52, 55),
    ("b0_all-reduce", "ncclDevKernel", 56, 70),
    ("n2_dot", "nvjet_128", 71, 91),
    ("b1_all-reduce", "ncclDevKernel", 92, 96),
    ("g3_fusion.1", "g0_fusion", 97, 109),
]
BUFFERED: Sequence[Row] = [
    ("command_buffer_1", "g0_fusion_1", 0, 10),
    ("command_buffer_1", "nvjet_128", 11, 48),
    ("command_buffer_1", "splitk_reduce", 49, 51),
    ("all-reduce.7", "ncclDevKernel", 49, 65),
    ("command_buffer_2", "nvjet_128", 66, 85),
    ("all-reduce.8", "ncclDevKernel", 80, 90),
    ("g3_fusion", "g0_fusion_1", 91, 101),
]


def trace(module: str, *runs: Sequence[Row], device: int = 0) -> Trace:
    executions = [
        Execution(op, module, run, device, 1000 * start, 1000 * end, kernel)
        for run, rows in enumerate(runs)
        for op, kernel, start, end in rows
    ]
    return Trace(tuple(executions), (RunWindow(0, 1),) * len(runs))


def test_kernels_go_by_the_names_of_those_in_their_places_and_transfers_by_theirs() -> None:
    found = with_names(trace("jit_a", BUFFERED, BUFFERED), "jit_a", trace("jit_b", NAMED), "jit_b").trace
    assert {one.module for one in found.executions} == {"jit_b"}
    assert len(found.windows) == 2
    assert [
        (one.op, one.start_ns // 1000, one.end_ns // 1000) for one in found.executions if one.run == 1
    ] == [
        ("g0_fusion", 0, 10),
        ("n1_dot", 11, 48),
        ("b0_all-reduce", 49, 65),
        ("n1_dot", 49, 51),
        ("n2_dot", 66, 85),
        ("b1_all-reduce", 80, 90),
        ("g3_fusion.1", 91, 101),
    ]


def test_times_are_those_in_command_buffers() -> None:
    found = with_names(trace("jit_a", *[BUFFERED] * 3), "jit_a", trace("jit_b", *[NAMED] * 3), "jit_b").trace
    times = {op: time.median_ns for op, time in instruction_times(found, "jit_b", {}).items()}
    assert times == {
        "g0_fusion": 10_000, "n1_dot": 39_000, "b0_all-reduce": 16_000, "n2_dot": 19_000,
        "b1_all-reduce": 10_000, "g3_fusion.1": 10_000,
    }  # fmt: skip
    assert launch_gap_ns(found, "jit_b") == 1000


def test_each_device_has_names_of_its_own() -> None:
    other = [(op.replace("n2", "n5"), *rest) for op, *rest in NAMED]
    both = [trace("jit_b", NAMED), trace("jit_b", other, device=1)]
    named = Trace(tuple(one for part in both for one in part.executions), ())
    found = with_names(trace("jit_a", BUFFERED, device=1), "jit_a", named, "jit_b").trace
    assert "n5_dot" in {one.op for one in found.executions}
    assert "n2_dot" not in {one.op for one in found.executions}


def test_a_kernel_that_one_of_the_two_has_alone_is_left_out() -> None:
    copied = [*BUFFERED[:3], ("command_buffer_1", "MemcpyD2D", 51, 52), *BUFFERED[3:]]
    found = with_names(trace("jit_a", copied), "jit_a", trace("jit_b", NAMED), "jit_b")
    assert found.unnamed_ns == 1000
    assert found.lanes["copies D2D"] == Lane(1000, 0, {"MemcpyD2D": 1000})
    whole = with_names(trace("jit_a", BUFFERED), "jit_a", trace("jit_b", NAMED), "jit_b")
    assert (whole.trace, whole.unnamed_ns) == (found.trace, 0)


def row_of(kernels: str) -> list[Row]:
    """A kernel a letter, of 10 us, each with an instruction of its own; M are copies."""
    return [
        (f"n{i}_op", "MemcpyD2D" if letter == "M" else letter, 10 * i, 10 * i + 10)
        for i, letter in enumerate(kernels)
    ]


@pytest.mark.parametrize(
    ("timed", "named", "expected"),
    [
        (
            "a" + 12 * "k" + "x" + 12 * "k",
            "a" + 12 * "k" + "y" + 12 * "k",
            {i: i for i in range(26) if i != 13},
        ),
        (4 * "abc", 2 * "abc" + "ab" + "abc", {i: i if i < 8 else i - 1 for i in range(12) if i != 8}),
        ("abMcM", "aMbMcM", {0: 0, 1: 2, 2: 3, 3: 4, 4: 5}),
        ("abMMcM", "abMcM", {0: 0, 1: 1, 2: 2, 3: 2, 4: 3, 5: 4}),
        ("aMbM", "ab", {0: 0, 2: 1}),
        ("xabcx", "xcabx", {0: 0, 1: 2, 2: 3, 4: 4}),
    ],
)
def test_kernels_that_are_alike_keep_their_places(timed: str, named: str, expected: dict[int, int]) -> None:
    """The longest run that both have was named first, and where one kernel differed others had their neighbours' names.
    Of copies, all alike, one more in one trace shifted the rest; or left all of them without a name."""
    mine, others = row_of(timed), row_of(named)
    found = dict(_pairs_of(mine, others))
    assert found == expected


def _pairs_of(timed: Sequence[Row], named: Sequence[Row]) -> list[tuple[int, int]]:
    lanes = [_lanes(trace("jit_step", rows).executions) for rows in (timed, named)]
    return [
        (one.start_ns // 10_000, int(other.op[1:].partition("_")[0]))
        for pairs in _named_lanes(*lanes).values()
        for one, other in pairs
    ]


def test_a_trace_of_other_kernels_tells_no_names() -> None:
    other = [
        ("command_buffer_1", "cutlass_gemm" if kernel == "nvjet_128" else kernel, *at)
        for _, kernel, *at in BUFFERED
    ]
    with pytest.raises(
        ProfileError, match=r"22 µs of 78 µs of jit_a, kernels, have a name in the trace of jit_b without"
    ):
        with_names(trace("jit_a", other), "jit_a", trace("jit_b", NAMED), "jit_b")
    with pytest.raises(ProfileError, match="nothing of jit_c has a name"):
        with_names(trace("jit_a", BUFFERED), "jit_c", trace("jit_b", NAMED), "jit_b")


def test_long_transfers_do_not_make_up_for_kernels_without_names() -> None:
    """Over slow links transfers are nine tenths of the time, and their names did for all of it."""
    other = [(op, "cutlass_gemm" if kernel == "nvjet_128" else kernel, *at) for op, kernel, *at in BUFFERED]
    slow = [*other, ("all-reduce.9", "ncclDevKernel", 110, 9_110)]
    named = [*NAMED, ("b2_all-reduce", "ncclDevKernel", 110, 9_110)]
    with pytest.raises(ProfileError, match="of jit_a, kernels, have a name"):
        with_names(trace("jit_a", slow), "jit_a", trace("jit_b", named), "jit_b")


def llama_layer(at: int, layer: int, *, buffered: bool) -> list[Row]:
    """One layer of a Llama-like step, forth and back, from ``at`` on, in us: matmuls that cuBLAS splits and clears
    semaphores for, cuDNN attention, which clears more in command buffers, and a copy."""
    rows: list[Row] = []

    def run(op: str, kernel: str, us: int) -> None:
        nonlocal at
        rows.append(("command_buffer_3" if buffered else f"n{layer}{op}", kernel, at, at + us))
        at += us

    run("1_fusion", f"input_reduce_fusion_{layer}", 40)
    run("2_custom-call", "Memset 3", 1)
    run("2_custom-call", "nvjet_tst_splitK", 300)
    run("2_custom-call", "splitKreduce_kernel", 20)
    run("3_custom-call", "cudnn_generated_fort_native_sdpa_flash_fprop", 250)
    run("4_copy", "memcpy128" if buffered else "MemcpyD2D", 20)
    if buffered:  # cuDNN clears what it sums up in, as a node of the graph; outside a kernel of its own does
        run("5_custom-call", "Memset 0", 3)
    run("5_custom-call", "cudnn_generated_fort_native_sdpa_flash_bprop", 600)
    if buffered:
        run("5_custom-call", "memset32_post", 2)
    run("5_custom-call", "cudnn_convert_dq", 30)
    return rows


def llama(layers: int, *, buffered: bool) -> list[Row]:
    rows: list[Row] = []
    for layer in range(layers):
        rows += llama_layer(rows[-1][3] + 1 if rows else 0, layer, buffered=buffered)
        if not buffered:  # the host reads whether the loop goes on
            rows.append((f"while.{layer}", "MemcpyD2H", rows[-1][3], rows[-1][3] + 1))
    return rows


def test_memsets_without_names_that_take_little_of_a_step_do_not_cost_its_profile() -> None:
    """Every profile of a Llama-like step in command buffers was given up: "0.00 of 0.73 ms, memsets"."""
    timed = trace("jit_a", *[llama(16, buffered=True)] * 5)
    found = with_names(timed, "jit_a", trace("jit_b", *[llama(16, buffered=False)] * 3), "jit_b")
    # Those of matmuls, and those between two kernels of one instruction.
    assert found.lanes["memsets"] == Lane(5 * 16 * 6_000, 5 * 16 * 3_000, {"Memset 0": 5 * 16 * 3_000})
    assert found.lanes["copies D2D"] == Lane(5 * 16 * 20_000, 5 * 16 * 20_000, {})
    assert found.lanes["kernels"].unnamed == {}
    assert found.unnamed_ns == 16 * 3_000
    times = instruction_times(found.trace, "jit_b", {})
    assert (times["n72_custom-call"].median_ns, times["n75_custom-call"].median_ns) == (321_000, 632_000)
    assert times["n74_copy"].median_ns == 20_000


@pytest.mark.parametrize(("kernel", "lane"), [("Memset 3", "memsets"), ("MemcpyH2D", "copies H2D")])
def test_memsets_or_copies_without_names_that_take_much_of_a_step_do(kernel: str, lane: str) -> None:
    timed = [*llama(16, buffered=True), ("command_buffer_9", kernel, 100_000, 100_700)]
    named = trace("jit_b", llama(16, buffered=False))
    with pytest.raises(ProfileError, match=f"jit_a, {lane}, have a name .* most of the rest is {kernel}"):
        with_names(trace("jit_a", timed), "jit_a", named, "jit_b")


def test_copies_of_one_direction_do_not_cost_those_of_another_their_names() -> None:
    """Without command buffers the host reads whether a loop goes on, and no copy had a name."""
    found = with_names(
        trace("jit_a", llama(2, buffered=True)), "jit_a", trace("jit_b", llama(2, buffered=False)), "jit_b"
    )
    copies = [one.op for one in found.trace.executions if one.kernel == "memcpy128"]
    assert copies == ["n04_copy", "n14_copy"]
