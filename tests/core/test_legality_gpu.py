"""XLA:GPU's fusion rules, on graphs small enough to judge by eye and on two real steps."""

from __future__ import annotations

from functools import partial

import pytest

from disco_hlo.core.gpu_facts import gpu_facts
from disco_hlo.core.legality import emitter_kind, group_refusal, kernel
from disco_hlo.core.legality_gpu import find_heroes
from disco_hlo.core.rows import plain_rows
from disco_hlo.hlo.flatten import emitter_of
from disco_hlo.hlo.graph import Graph
from tests import graphs
from tests.captured import captured

graph_of = partial(graphs.graph_of, backend="gpu")

# What XLA itself does ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h200_transformer_default", "h200_transformer_unfused"])
def test_every_loop_and_input_fusion_of_a_real_step_is_legal(name: str) -> None:
    step = captured(name)
    kernels = [o for o in step.origins if o.role == "fusion" and emitter_of(o.proto) in ("loop", "input")]
    refused = {o.name: group_refusal(step.graph, o.nodes, o.results) for o in kernels}
    assert len(kernels) > 700
    assert {name: reason for name, reason in refused.items() if reason} == {}


def test_the_label_is_xlas_but_for_twelve_that_it_gave_before_a_transpose_was_simplified_away() -> None:
    source = captured("h200_transformer_default")
    graph = source.graph
    kernels = [o for o in source.origins if o.role == "fusion" and emitter_of(o.proto) in ("loop", "input")]
    differ = [o.name for o in kernels if emitter_kind(graph, o.nodes, o.results) != emitter_of(o.proto)]
    assert len(differ) == 12
    assert all(name.startswith("input_concatenate_fusion") for name in differ)


# Heroes and emitters ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dimensions", "by_block"),
    [
        ("512,1024", "1", True),  # rows
        ("512,1024", "0", True),  # columns
        ("512,1024", "0,1", True),  # everything
        ("512,5", "1", False),  # 5 does not divide a warp
        ("512,8", "1", True),  # 4 rows fit a warp
        ("16,1024", "0", False),  # too few rows to split
        ("8,512,64", "0,2", True),  # rows in batches
        ("8,64,8,64", "0,2", False),  # neither the kept nor the reduced dimensions are neighbours
    ],
)
def test_a_reduction_is_done_by_a_block_where_its_dimensions_are_neighbours_and_long(
    shape: str, dimensions: str, by_block: bool
) -> None:
    extents = shape.split(",")
    kept = ",".join(extent for i, extent in enumerate(extents) if str(i) not in dimensions.split(","))
    step = graph_of(f"""
        f32[{shape}] param
        f32[] const
        f32[{kept}] reduce 0 1 {{{dimensions}}}
    """)
    assert (gpu_facts(step).reduction[2] >= 0) == by_block
    assert emitter_kind(step, (2,), (2,)) == ("input" if by_block else "loop")


@pytest.mark.parametrize(
    ("dtype", "before", "after", "permutation", "by_tiles"),
    [
        ("f32", "64,128", "128,64", "1,0", True),
        ("f32", "4,64,128", "64,4,128", "1,0,2", False),  # whole rows of 512 bytes move
        ("f32", "64,128,2", "128,64,2", "1,0,2", True),  # pairs move: 64 bits at a time
        ("f32", "8,128", "128,8", "1,0", False),  # fewer elements than pay off
        ("f32", "8,1024", "1024,8", "1,0", True),
        ("f32", "1,64,128", "128,1,64", "2,0,1", True),  # a dimension of one element does not count
        ("bf16", "64,128", "128,64", "1,0", True),
        ("f32", "2,3,64,128", "128,2,3,64", "3,0,1,2", True),
    ],
)
def test_a_transpose_is_done_by_tiles_where_neighbours_part(
    dtype: str, before: str, after: str, permutation: str, by_tiles: bool
) -> None:
    step = graph_of(f"""
        {dtype}[{before}] param
        {dtype}[{after}] transpose 0 {{{permutation}}}
    """)
    assert (gpu_facts(step).transpose[1] >= 0) == by_tiles


def hero(graph: Graph, members: set[int], result: int) -> int:
    """The op that decides how the one result of a kernel is computed."""
    w = kernel(members, [result])
    find_heroes(plain_rows(graph), w, len(members), 1, 1)
    return w.heroes[0]


REDUCED = "f32[512,1024] param; f32[] const; f32[512] reduce 0 1 {1}; "
ONE_TURNED = "f32[64,128] param; f32[128,64] param; f32[128,64] transpose 0 {1,0}; f32[128,64] add 2 1"
BOTH_TURNED = (
    "f32[64,128] param; f32[64,128] param; f32[128,64] transpose 0 {1,0}; f32[128,64] transpose 1 {1,0}; "
    "f32[128,64] add 2 3"
)


@pytest.mark.parametrize(
    ("text", "members", "expected", "emitter"),
    [
        (REDUCED + "bf16[512] convert 2; bf16[8,64] bitcast 3", {2, 3, 4}, 2, "input"),  # behind trivial ops
        (ONE_TURNED, {2, 3}, 2, "input"),  # behind ops of several operands
        (BOTH_TURNED, {2, 3, 4}, 4, "loop"),  # of two transposes none
        ("f32[8] param; f32[16] concatenate 0 0 {0}; f32[16] negate 1", {1, 2}, 1, "loop"),
    ],
)
def test_a_hero_is_found_through_trivial_ops(
    text: str, members: set[int], expected: int, emitter: str
) -> None:
    step, result = graph_of(text), max(members)
    assert hero(step, members, result) == expected
    assert emitter_kind(step, members, [result]) == emitter


def test_a_reduction_that_two_operands_go_into_after_is_no_hero() -> None:
    step = graph_of(REDUCED + "f32[512] param; f32[512] add 2 3")
    assert hero(step, {2, 4}, 4) == 4
    reason = "n2 (reduce) would be repeated for every element of its readers"
    assert group_refusal(step, {2, 4}, [4]) == reason


# Several results ----------------------------------------------------------------------------------

SIBLINGS = """
    f32[512,1024] param
    f32[] const
    f32[512] reduce 0 1 {1}
    f32[1024] reduce 0 1 {0}
    f32[512,1024] negate 0
    f32[1024,512] transpose 0 {1,0}
    f32[524288] bitcast 4
    f32[512] negate 2
    f32[512] reduce 4 1 {1}
    f32[256,1024] slice 0
    f32[512,1024] exponential 0
    s32[512,1024] convert 0
"""


@pytest.mark.parametrize(
    ("results", "reason"),
    [
        ((4, 10), None),
        ((4, 11), None),  # element types need not agree
        ((4, 9), "results n4 f32[512,1024] and n9 f32[256,1024] need different loops"),
        ((2, 4), None),  # the reduction loops over what the other result is
        ((2, 3), "n2 (reduce) would be reduced element by element beside the other results"),
        ((4, 5), None),  # transposing loops over its operand
        ((2, 5), "n5 (transpose) would be transposed element by element beside the other results"),
        ((3, 9), "n3 (reduce) would be reduced element by element beside the other results"),
    ],
)
def test_several_results_share_one_loop(results: tuple[int, ...], reason: str | None) -> None:
    assert group_refusal(graph_of(SIBLINGS), set(results), results) == reason


KERNELS: dict[str, tuple[str, list[tuple[set[int], list[int], str | None]]]] = {
    "a result of equal elements in other dimensions shares the loop": (
        "f32[512,1024] param; f32[524288] bitcast 0; f32[512,1024] negate 0; f32[524288] negate 1",
        [({1, 2, 3}, [2, 3], None)],
    ),
    "a nested transpose does not stand beside a block reduction": (
        "f32[8,64,128] param; f32[] const; f32[64,8,128] transpose 0 {1,0,2}; f32[8,64] reduce 0 1 {2}",
        [({2, 3}, [3, 2], "n2 (transpose) reads in another order than the kernel's other results")],
    ),
    "a kernel does not go on from a result that it reduced": (
        "f32[512,1024] param; f32[] const; f32[512] reduce 0 1 {1}; f32[512] negate 2",
        [({2, 3}, [3], None), ({2, 3}, [2, 3], "... no loop computes it ...")],
    ),
    "nothing moves elements before a result that the kernel goes on from": (
        "f32[4,64,128] param; f32[64,4,128] transpose 0 {1,0,2}; f32[64,4,128] negate 1; f32[64,4,128] exponential 2",
        [
            ({1, 2, 3}, [3], None),
            ({1, 2, 3}, [2, 3], "n1 (transpose) moves elements before n2, a result that the kernel goes on from"),
        ],
    ),
    "no reduction of a reduction": (
        "f32[512,1024] param; f32[] const; f32[512] reduce 0 1 {1}; f32[] reduce 2 1 {0}",
        [({2, 3}, [3], "..."), ({2}, [2], None)],
    ),
    "two columns fit shared memory and three do not": (
        "f32[512,1024] param; f32[] const; f32[512,1024] exponential 0; f32[512,1024] negate 0; "
        "f32[1024] reduce 0 1 {0}; f32[1024] reduce 2 1 {0}; f32[1024] reduce 3 1 {0}",
        [
            ({2, 4, 5}, [4, 5], None),
            ({2, 3, 4, 5, 6}, [4, 5, 6], "49536 bytes of shared memory, more than 49152"),
        ],
    ),
    "an op without a code generator stays alone": (
        "f32[8] param; u32[8] param; f32[8] negate 0; bf16[8] stochastic-convert 2 1",
        [({2, 3}, [3], "n3 (stochastic-convert) has no code generator")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_which_ops_are_one_kernel_with_which_results(name: str) -> None:
    text, asked = KERNELS[name]
    for members, results, reason in asked:
        found = group_refusal(graph_of(text), members, results)
        if reason is None or "..." not in reason:
            assert found == reason
        else:
            assert reason.replace("...", "").strip() in (found or "nothing")


# Reductions, budgets ------------------------------------------------------------------------------


def test_eight_rows_are_the_most() -> None:
    lines = ["f32[512,1024] param", "f32[] const"]
    opcodes = "negate exponential abs sine cosine tanh floor ceil sign"
    lines += [f"f32[512,1024] {opcode} 0" for opcode in opcodes.split()]
    lines += [f"f32[512] reduce {i} 1 {{1}}" for i in range(2, 11)]
    step = graph_of("\n".join(lines))
    assert group_refusal(step, {*range(2, 10), *range(11, 19)}, list(range(11, 19))) is None
    assert group_refusal(step, range(2, 20), list(range(11, 20))) == "9 reductions, more than 8"


def test_96_operands_and_results_are_the_most() -> None:
    def sums(count: int) -> Graph:
        lines = ["f32[8] param"] * count + ["f32[8] add 0 1"]
        lines += [f"f32[8] add {count + i - 1} {i + 1}" for i in range(1, count - 1)]
        return graph_of("\n".join(lines))

    allowed, more = sums(95), sums(96)
    assert group_refusal(allowed, range(95, len(allowed)), [len(allowed) - 1]) is None
    reason = group_refusal(more, range(96, len(more)), [len(more) - 1])
    assert reason == "97 operands and results, more than 96"


# In place -----------------------------------------------------------------------------------------


def test_a_buffer_is_read_where_it_is_overwritten_bitcasts_included() -> None:
    step = graph_of(
        """
        f32[512,1024] param
        f32[524288] bitcast 0
        f32[524288] negate 1
        f32[512,1024] bitcast 2
        f32[512,1024] add 3 0
        f32[1024,512] transpose 0 {1,0}
        f32[1024,512] param
        f32[1024,512] add 5 6
        f32[512,1024] bitcast 7
    """,
        inplace=((0, 4), (0, 7)),
    )
    assert group_refusal(step, {1, 2, 3, 4}, [4]) is None
    assert group_refusal(step, {5, 7}, [7]) == (
        "n7 overwrites the buffer of n0, which n5 (transpose) reads at other elements in the same kernel"
    )


SCATTER = """
    f32[512,1024] param
    s32[64,1] param
    f32[64,1024] param
    f32[64,1024] negate 2
    f32[512,1024] scatter 0 1 3
    f32[512,1024] negate 4
    f32[512,1024] exponential 0
    f32[512,1024] scatter 6 1 3
    f32[64,1024] slice 0
    f32[512,1024] scatter 0 1 8
"""


@pytest.mark.parametrize(
    ("members", "results", "reason"),
    [
        ({3, 4}, [4], None),
        ({3, 4, 5}, [5], "n4 (scatter) may only be the single result of a group"),
        ({3, 6, 7}, [7], "n6, which n7 (scatter) updates in place, is used inside its kernel"),
        ({8, 9}, [9], "n0, which n9 (scatter) updates in place, is used inside its kernel"),
    ],
)
def test_a_scatter_takes_its_updates_along_and_nothing_else(
    members: set[int], results: list[int], reason: str | None
) -> None:
    assert group_refusal(graph_of(SCATTER, inplace=((0, 4),)), members, results) == reason
