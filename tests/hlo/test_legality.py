"""How often a kernel may evaluate one element."""

from __future__ import annotations

import pytest

from disco_hlo.hlo.graph import Graph, Kind, Node, Shape
from disco_hlo.hlo.legality import evaluations, group_refusal


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


def shape(dims: tuple[int, ...]) -> Shape:
    return Shape("f32", dims, tuple(range(len(dims)))[::-1])


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_kernel_of_windows_of_windows_that_would_run_for_minutes_is_none(backend: str) -> None:
    """One turn of a loop of three, each the largest of 619 neighbours: 768 x 619 x 619 elements of the first."""
    windows = steps(*3 * [("reduce-window", (768,), 619)], backend=backend)
    assert evaluations(windows, {1, 2, 3}, [3]) == {3: 768, 2: 768 * 619, 1: 768 * 619 * 619}
    refusal = group_refusal(windows, {1, 2, 3}, [3])
    assert refusal is not None
    assert f"one kernel would read {768 * (619 + 619**2 + 619**3)} elements" in refusal
    few = steps(*2 * [("reduce-window", (768,), 30)], backend=backend)
    assert group_refusal(few, {1, 2}, [2]) is None


def test_a_long_sum_that_is_spread_out_is_made_again_for_each_element() -> None:
    for width, is_legal in ((40, True), (100_000, False)):
        spread = steps(("reduce", (8,), width), ("broadcast", (8, width), 1), ("exponential", (8, width), 1))
        assert evaluations(spread, {1, 2, 3}, [3])[1] == 8 * width
        assert (group_refusal(spread, {1, 2, 3}, [3]) is None) == is_legal


def test_a_sum_of_many_elements_reads_each_once() -> None:
    long = steps(("exponential", (10**9,), 1), ("negate", (10**9,), 1), ("reduce", (), 1))
    assert evaluations(long, {1, 2, 3}, [3]) == {3: 1, 2: 10**9, 1: 10**9}
    assert group_refusal(long, {1, 2, 3}, [3]) is None


def test_triton_keeps_what_it_has_computed() -> None:
    spread = steps(("reduce", (8,), 100_000), ("broadcast", (8, 100_000), 1), backend="gpu")
    assert group_refusal(spread, {1, 2}, [2], "triton") is None
    assert "one kernel would read" in (group_refusal(spread, {1, 2}, [2]) or "")
