"""Loop nests of fused kernels: what they move and how often they compute."""

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel
from disco_hlo.estimator.kernel_cost import MAXIMUM_CONTEXTS, kernel_work
from disco_hlo.hlo.graph import Kind
from tests.captured import captured
from tests.estimator.obvious_cost import obvious_work
from tests.graphs import graph_of

# One evaluation of a log costs 1 ns, everything else nothing: work counts the evaluations of logs.
LOGS = {"log": 1.0, "add": 0.0, "multiply": 0.0, "reduce": 0.0, "divide": 0.0}
CPU = DeviceModel(1e9, 1e9, hoists=True, element_ns=LOGS)
GPU = DeviceModel(1e9, 1e9, hoists=False, element_ns=LOGS)


def work_of(graph, members, results, device=CPU, tiled=False):
    model = AnalyticModel(device)
    arrays = (np.array(sorted(ids)) for ids in (members, results))
    return kernel_work(model.tables(graph), *arrays, tiled, model.scratch(graph))


ROWS = graph_of("f32[4,8] param; f32[4] param; f32[4] log 1; f32[4,8] broadcast 2 {0}; f32[4,8] add 0 3")
COLUMNS = graph_of("f32[4,8] param; f32[8] param; f32[8] log 1; f32[4,8] broadcast 2 {1}; f32[4,8] add 0 3")


@pytest.mark.parametrize(
    ("graph", "device", "logs", "moved"),
    [
        (ROWS, CPU, 4, 128 + 128 + 16),  # moves out of the inner loop
        (ROWS, GPU, 32, 128 + 128 + 16),
        (COLUMNS, CPU, 32, 128 + 128 + 32),
        (COLUMNS, GPU, 32, 128 + 128 + 32),
    ],
)
def test_a_broadcast_recomputes_where_it_cannot_be_hoisted(graph, device, logs, moved):
    assert work_of(graph, {2, 3, 4}, {4}, device) == (moved, logs, 0)


def softmax_like(reduced):
    kept = 1 - reduced
    return graph_of(
        f"f32[4,8] param; f32[] const; f32[4,8] log 0; f32[{(4, 8)[kept]}] reduce 2 1 {{{reduced}}}; "
        f"f32[4,8] broadcast 3 {{{kept}}}; f32[4,8] divide 2 4"
    )


@pytest.mark.parametrize(
    ("reduced", "device", "logs"),
    [
        (1, CPU, 32 + 4 * 8),  # the row sum is hoisted: every log twice
        (0, CPU, 32 + 4 * 8 * 4),  # the column sum is not: every element sums its column again
        (1, GPU, 32 + 4 * 8 * 8),
        (0, GPU, 32 + 4 * 8 * 4),
    ],
)
def test_a_reduction_in_the_middle_is_recomputed(reduced, device, logs):
    moved, work, strided = work_of(softmax_like(reduced), {2, 3, 4, 5}, {5}, device)
    assert (moved, work) == (256, logs)
    assert (strided > 0) == (reduced == 0)


def test_an_array_without_a_layout_is_row_major():
    graph = graph_of("f32[4,8] param; f32[4,8] log 0; f32[4] reduce 1 {1}")
    nodes = tuple(replace(node, shape=replace(node.shape, layout=())) for node in graph.nodes)
    assert work_of(replace(graph, nodes=nodes), {1, 2}, {2}) == work_of(graph, {1, 2}, {2}) == (144, 32, 0)


@pytest.mark.parametrize("base", ["param", "get-tuple-element 0", "bitcast 0"])
def test_an_update_of_what_comes_from_elsewhere_costs_the_update(base):
    """A loop's turn writes one layer of a stacked array; all layers were counted."""
    graph = graph_of(
        f"f32[16,8] param; f32[16,8] {base}; f32[1,8] param; f32[1,8] log 2; f32[16,8] dynamic-update-slice 1 3"
    )
    moved, logs, _ = work_of(graph, {3, 4}, {4}, GPU)
    assert (moved, logs) == (3 * 32, 8), "it also reads what it overwrites"


CHAIN = graph_of("f32[4,8] param; f32[4,8] multiply 0 0; f32[4,8] add 1 0; f32[4,8] log 2; tuple 3")
SCALAR = graph_of("f32[4,8] param; f32[] param; f32[] log 1; f32[4,8] broadcast 2 {}; f32[4,8] add 0 3")
BITCAST = graph_of("f32[4,8] param; f32[4,8] log 0; f32[32] bitcast 1; f32[32] add 2 2")
WORK: dict[str, list[tuple[Any, set[int], set[int], DeviceModel, tuple[int, int, int]]]] = {
    "bytes are distinct reads and results": [
        (CHAIN, {1}, {1}, CPU, (256, 0, 0)), (CHAIN, {1, 2, 3}, {3}, CPU, (256, 32, 0)),
        (CHAIN, {1, 2, 3}, {2, 3}, CPU, (384, 32, 0)),
    ],
    "scalar constants are free": [
        (graph_of("f32[4,8] param; f32[] const; f32[4,8] broadcast 1 {}; f32[4,8] multiply 0 2"), {2, 3}, {3}, CPU,
         (256, 0, 0)),
    ],
    "scalars are computed once": [
        (SCALAR, {2, 3, 4}, {4}, CPU, (260, 1, 0)), (SCALAR, {2, 3, 4}, {4}, GPU, (260, 1, 0)),
    ],
    "a reduction at the end computes its input once": [
        (softmax_like(1), {2, 3}, {3}, CPU, (128 + 16, 32, 0)),
    ],
    "reducing columns reads across the grain": [(softmax_like(0), {2, 3}, {3}, CPU, (128 + 32, 32, 32))],
    "what is read straight and transposed is computed twice": [
        (graph_of("f32[4,4] param; f32[4,4] log 0; f32[4,4] transpose 1 {1,0}; f32[4,4] add 1 2"), {1, 2, 3}, {3}, CPU,
         (128, 32, 16)),
    ],
    "a copy to another layout is a transpose": [
        (graph_of("f32[4,8] param; f32[4,8]{0,1} copy 0"), {1}, {1}, CPU, (256, 0, 32)),
    ],
    "a slice reads and computes only its part": [
        (graph_of("f32[16,8] param; f32[16,8] log 0; f32[4,8] slice 1; f32[4,8] add 2 2"), {1, 2, 3}, {3}, CPU,
         (256, 32, 0)),
    ],
    "an update of what is computed before writes all": [
        (graph_of("f32[16,8] param; f32[1,8] param; f32[16,8] add 0 0; f32[16,8] dynamic-update-slice 2 1"),
         {2, 3}, {3}, GPU, (512 + 512 + 32, 0, 0)),
    ],
    "results of one shape share their loops": [
        (graph_of("f32[4,8] param; f32[4,8] log 0; f32[4,8] add 1 0; f32[4,8] multiply 1 0; tuple 2 3"), {1, 2, 3},
         {2, 3}, CPU, (384, 32, 0)),
    ],
    "bitcasts are looked through": [
        (BITCAST, {1, 2, 3}, {3}, CPU, (256, 32, 0)), (BITCAST, {1, 3}, {3}, CPU, (256, 32, 0)),
    ],
    "a reshape keeps the loops of dimensions that stay": [
        (graph_of("f32[4] param; f32[4] log 0; f32[1,4,1] reshape 1; f32[4] reshape 2; f32[4,8] broadcast 3 {0}"),
         {1, 2, 3, 4}, {4}, CPU, (16 + 128, 4, 0)),
    ],
    "dead duplicates cost nothing": [
        (graph_of("f32[4] param; f32[4] log 0; f32[4] add 0 0; tuple 2"), {1, 2}, {2}, CPU, (32, 0, 0)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_what_a_kernel_moves_and_how_often_it_computes(name):
    for graph, members, results, device, expected in WORK[name]:
        assert work_of(graph, members, results, device) == expected


def test_a_variadic_reduction_walks_its_first_operand():
    graph = graph_of(
        "f32[4,8] param; f32[] const; f32[4,8] log 0; (f32[4],f32[4]) reduce 2 2 1 1 {1}; tuple 3"
    )
    assert work_of(graph, {2, 3}, {3})[1] == 32


def test_a_tiled_kernel_computes_everything_once():
    assert work_of(softmax_like(1), {2, 3, 4, 5}, {5}, GPU, tiled=True) == (256, 32, 0)


@pytest.mark.parametrize(("members", "moved"), [({3}, 3 * 32), ({3, 4}, 512 + 32 + 32 + 512)])
def test_an_update_of_an_update_in_one_kernel_writes_all(members, moved):
    """XLA writes in place only where the array comes from outside the kernel."""
    graph = graph_of(
        "f32[16,8] param; f32[1,8] param; f32[1,8] param; f32[16,8] dynamic-update-slice 0 1; "
        "f32[16,8] dynamic-update-slice 3 2"
    )
    assert work_of(graph, members, {max(members)}, GPU)[0] == moved


@pytest.mark.parametrize("rows", [16, 1])
def test_an_update_beside_another_result_writes_all(rows):
    """XLA writes in place only where all results are updates."""
    graph = graph_of(
        f"f32[16,8] param; f32[1,8] param; f32[{rows},8] param; f32[16,8] dynamic-update-slice 0 1; "
        f"f32[{rows},8] add 2 2"
    )
    added = 2 * 4 * rows * 8
    assert work_of(graph, {3, 4}, {3, 4}, GPU)[0] == 512 + 32 + 512 + added


@st.composite
def kernels(draw):
    """A chain-like graph over arrays of up to three dimensions, and the kernel of all its ops."""
    shapes, lines = [(3, 5, 2)], ["f32[3,5,2] param"]
    for number in range(1, draw(st.integers(2, 9))):
        previous = draw(st.integers(max(0, number - 3), number - 1))
        dims, operands, dimensions = shapes[previous], str(previous), ""
        opcode = draw(st.sampled_from(["log", "add", "transpose", "broadcast", "reduce"]))
        if opcode == "reduce" and len(dims) > 1:
            reduced = draw(st.integers(0, len(dims) - 1))
            dims, dimensions = (*dims[:reduced], *dims[reduced + 1 :]), f" {{{reduced}}}"
        elif opcode == "broadcast" and len(dims) < 3:
            new = draw(st.integers(0, len(dims)))
            dimensions = f" {{{commas(d for d in range(len(dims) + 1) if d != new)}}}"
            dims = (*dims[:new], 4, *dims[new:])
        elif opcode == "transpose":
            order = tuple(draw(st.permutations(range(len(dims)))))
            dims, dimensions = tuple(dims[d] for d in order), f" {{{commas(order)}}}"
        elif opcode == "add":
            others = [i for i in range(number) if shapes[i] == dims]
            operands += f" {draw(st.sampled_from(others))}"
        else:
            opcode = "log"
        shapes.append(dims)
        lines.append(f"f32[{commas(dims)}] {opcode} {operands}{dimensions}")
    return graph_of("\n".join(lines))


def commas(numbers):
    return ",".join(map(str, numbers))


@settings(max_examples=300, deadline=None)
@given(kernels(), st.booleans())
def test_compiled_and_obvious_counting_agree(graph, hoists):
    model, members = AnalyticModel(CPU if hoists else GPU), np.arange(1, len(graph))
    tables, scratch, results = model.tables(graph), model.scratch(graph), members[-1:]
    found = kernel_work(tables, members, results, False, scratch)
    assert found == obvious_work(tables, scratch.loops, members, results)


STEP = captured("h200_models/rnnlm").graph


@cache
def model_of(hoists):
    times_ns = {"exponential": 0.37, "add": 0.011}
    return AnalyticModel(DeviceModel(3e12, 5e13, hoists=hoists, element_ns=times_ns))


def grown_kernel(graph, random, size):
    """Members and results of a kernel grown from a random op to what it reads or is read by."""
    fusible = [node.id for node in graph.nodes if node.kind is Kind.FUSIBLE]
    members, edge = set(), [random.choice(fusible)]
    while edge and len(members) < size:
        x = edge.pop(random.randrange(len(edge)))
        if graph.nodes[x].kind in (Kind.FUSIBLE, Kind.FREE) and x not in members:
            members.add(x)
            edge += [*graph.nodes[x].operands, *graph.users[x]]
    ascending = sorted(members)
    results = [x for x in ascending if not members.issuperset(graph.users[x]) or random.random() < 0.02]
    return ascending, results or ascending[-1:]


@pytest.mark.parametrize("hoists", [True, False])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([2, 10, 60, 400]))
def test_captured_kernels_are_counted_as_the_obvious_way_counts_them(hoists, seed, size):
    """To the last bit, in whatever order they are asked for: all examples share what the model keeps."""
    graph, model = STEP, model_of(hoists)
    members, results = grown_kernel(graph, Random(seed), size)
    tables, scratch = model.tables(graph), model.scratch(graph)
    found = kernel_work(tables, np.array(members), np.array(results), False, scratch)
    assert found == obvious_work(tables, scratch.loops, members, results)


@pytest.mark.parametrize("hoists", [True, False])
def test_nothing_depends_on_what_is_kept(hoists):
    """With room for the contexts of one kernel only, these are forgotten all the time."""
    graph, model = STEP, model_of(hoists)
    tables, scratch = model.tables(graph), model.scratch(graph)
    most = 401 * MAXIMUM_CONTEXTS
    small = scratch._replace(
        context=np.zeros_like(scratch.context[: most + 9]), evaluations=np.zeros(most + 9),
        strided=np.zeros(most + 9, np.bool_), numbers=np.zeros(1 << 13, np.int32), value=scratch.value[:401].copy(),
        memo=np.zeros((8, 2), np.int64), place=np.zeros_like(scratch.place), number=np.zeros(2, np.int64),
    )  # fmt: skip
    for seed in range(40):
        members, results = (np.array(x) for x in grown_kernel(graph, Random(seed), 150))
        expected = kernel_work(tables, members, results, False, scratch)
        assert kernel_work(tables, members, results, False, small) == expected
