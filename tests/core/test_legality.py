"""The rules of every backend, and of XLA:CPU."""

from __future__ import annotations

import pytest

from disco_hlo.core.legality import group_refusal, kernel, kernel_refusal
from disco_hlo.core.rows import plain_rows
from disco_hlo.hlo.graph import Graph, Kind, Node, Shape
from tests.graphs import graph_of


def steps(*ops: tuple[str, tuple[int, ...], int], backend: str = "cpu") -> Graph:
    """A parameter and then, each reading the one before: an opcode, the dimensions, and elements of a window."""
    nodes = [Node(0, "parameter", shape(ops[0][1]), (), Kind.PARAMETER, "parameter")]
    if ops[0][0] == "reduce":
        nodes[0] = Node(0, "parameter", shape((*ops[0][1], ops[0][2])), (), Kind.PARAMETER, "parameter")
    for i, (opcode, dims, window) in enumerate(ops, 1):
        flops = shape(dims).element_count * (window - 1) if opcode == "reduce-window" else 0
        nodes.append(Node(i, opcode, shape(dims), (i - 1,), Kind.FUSIBLE, f"{i}", flops))
    nodes.append(Node(len(nodes), "tuple", Shape("tuple"), (len(nodes) - 1,), Kind.FREE, "tuple"))
    return Graph(tuple(nodes), len(nodes) - 1, (), backend, "jit_step", "f00d")


def evaluations(graph: Graph, members: set[int], result: int) -> dict[int, int]:
    """How many elements of each member are evaluated."""
    w = kernel(members, [result])
    kernel_refusal(plain_rows(graph), w, len(members), 1, 1, False)
    return {x: w.evaluated[x] for x in members}


def shape(dims: tuple[int, ...]) -> Shape:
    return Shape("f32", dims, tuple(range(len(dims)))[::-1])


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_kernel_of_windows_of_windows_that_would_run_for_minutes_is_none(backend: str) -> None:
    """One turn of a loop of three, each the largest of 619 neighbours: 768 x 619 x 619 elements of the first."""
    windows = steps(*3 * [("reduce-window", (768,), 619)], backend=backend)
    assert evaluations(windows, {1, 2, 3}, 3) == {3: 768, 2: 768 * 619, 1: 768 * 619 * 619}
    refusal = group_refusal(windows, {1, 2, 3}, [3])
    assert refusal is not None
    assert f"one kernel would read {768 * (619 + 619**2 + 619**3)} elements" in refusal
    few = steps(*2 * [("reduce-window", (768,), 30)], backend=backend)
    assert group_refusal(few, {1, 2}, [2]) is None


def test_a_long_sum_that_is_spread_out_is_made_again_for_each_element() -> None:
    for width, is_legal in ((40, True), (100_000, False)):
        spread = steps(("reduce", (8,), width), ("broadcast", (8, width), 1), ("exponential", (8, width), 1))
        assert evaluations(spread, {1, 2, 3}, 3)[1] == 8 * width
        assert (group_refusal(spread, {1, 2, 3}, [3]) is None) == is_legal


def test_a_sum_of_many_elements_reads_each_once() -> None:
    long = steps(("exponential", (10**9,), 1), ("negate", (10**9,), 1), ("reduce", (), 1))
    assert evaluations(long, {1, 2, 3}, 3) == {3: 1, 2: 10**9, 1: 10**9}
    assert group_refusal(long, {1, 2, 3}, [3]) is None


def test_triton_keeps_what_it_has_computed() -> None:
    spread = steps(("reduce", (8,), 100_000), ("broadcast", (8, 100_000), 1), backend="gpu")
    assert group_refusal(spread, {1, 2}, [2], "triton") is None
    assert "one kernel would read" in (group_refusal(spread, {1, 2}, [2]) or "")


def test_a_kernel_that_would_never_end_is_none_either() -> None:
    """What is counted stops where numbers of 64 bits would overflow."""
    windows = steps(*9 * [("reduce-window", (1 << 20,), 1 << 12)])
    assert f"one kernel would read {1 << 60} elements" in (
        group_refusal(windows, set(range(1, 10)), [9]) or ""
    )


CPU_STEP = graph_of("""
    f32[8,4] param
    f32[8,4] negate 0
    f32[8,4] exponential 1
    f32[8] reduce 1 {1}
    f32[8,4] gather 1
    f32[8,4] dot 1
    f32[8,4] copy 0
    f32[32] bitcast 2
    f32[8,4] scatter 1 1 1
    f32[8,4]{0,1} transpose 0
    f32[8,4] reverse 0
    f32[8,4] add 10 1
    tuple 2 3 4 5 6 7 8 9 11
""", inplace=((0, 11),))  # fmt: skip


@pytest.mark.parametrize(
    ("members", "results", "reason"),
    [
        ({1, 2}, [2], None),
        ({1, 2}, [1, 2], None),
        ({1, 2}, [], "the group has no result: nothing outside reads it"),
        ({1, 2, 3}, [2], "n3 (reduce) is computed, but nothing reads it"),
        ({1, 2, 3}, [2, 3], "results n2 f32[8,4] and n3 f32[8] differ in shape or layout"),
        ({2, 9}, [2, 9], "results n2 f32[8,4] and n9 f32[8,4] differ in shape or layout"),
        ({1, 2, 4}, [2, 4], "a concatenate, gather or reduce-window may only be the single result of a group"),
        ({1, 4}, [4], None),
        ({1, 5}, [5], "n5 (dot) cannot be fused"),
        ({1, 8}, [8], "n8 (scatter) cannot be fused"),
        ({2, 6}, [2, 6], "n6 is a copy that gives its value a buffer of its own"),
        ({2, 7}, [7], None),
        ({1, 11}, [11], None),
        ({10, 11}, [11],
            "n11 overwrites the buffer of n0, which n10 (reverse) reads at other elements in the same kernel"),
    ],
)  # fmt: skip
def test_what_may_be_one_kernel_on_cpu(members: set[int], results: list[int], reason: str | None) -> None:
    assert group_refusal(CPU_STEP, members, results) == reason


def test_64_operands_and_results_five_reductions_and_eight_emissions_are_the_most_on_cpu() -> None:
    def kernel_of(count: int, opcode: str) -> Graph:
        """A sum of so many ops, each of which reads a parameter of its own."""
        small = "f32[8]" if opcode == "reduce" else "f32[8,4]"
        lines = ["f32[8,4] param"] * count
        lines += [f"{small} {opcode} {x}" for x in range(count)]
        for x in range(count - 1):
            lines.append(f"{small} add {2 * count + x - 1 if x else count} {count + 1 + x}")
        return graph_of("\n".join(lines))

    for opcode, most, reason in (
        ("negate", 63, "65 operands and results, more than 64"),
        ("reduce", 5, "6 reductions, more than 5"),
    ):
        for count in (most, most + 1):
            graph = kernel_of(count, opcode)
            refusal = group_refusal(graph, range(count, len(graph)), [len(graph) - 1])
            assert refusal == (None if count == most else reason)
    for readers in (3, 4):
        doubled = [f"f32[{8 << x}] concatenate {x} {x}" for x in range(1, readers + 1)]
        graph = graph_of("\n".join(["param", "exponential 0", *doubled]))
        refusal = group_refusal(graph, range(1, len(graph)), [len(graph) - 1])
        expected = "n1 (exponential) would be written 16 times into one kernel, more than 8"
        assert refusal == (None if readers == 3 else expected)
