"""Features: what they say of small kernels by hand, and what they must not depend on."""

from dataclasses import replace
from functools import cache

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.estimator import architecture as spec
from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel
from disco_hlo.estimator.features import Batch, encode, graph_features, joined, selected
from disco_hlo.estimator.kernel_cost import kernels_ns
from disco_hlo.estimator.samples import Grower
from disco_hlo.hlo.cost_model import Kernels
from disco_hlo.hlo.graph import Graph
from tests.estimator.steps import DEVICE, transformer
from tests.graphs import graph_of

CPU = DeviceModel(1e9, 1e9, hoists=True, element_ns={"log": 2.0, "add": 0.5, "reduce": 1.0})

SOFTENED = graph_of(
    "f32[4,8] param; f32[4,8] log 0; f32[4] reduce 1 {1}; f32[4,8] broadcast 2 {0}; f32[4,8] add 1 3; tuple 4"
)


def encoded(
    graph: Graph, members, results, times=None, device: DeviceModel = CPU, tiled: bool = False
) -> Batch:
    model = AnalyticModel(device)
    features = graph_features(graph, model, times or {})
    return encode(
        features,
        Kernels.of_lists([sorted(members)], [sorted(results)], ["triton {}" * tiled]),
        model.scratch(graph),
    )


def column(batch: Batch, name: str) -> list[float]:
    return batch.node[:, spec.NODE.index(name)].tolist()


def edges(batch: Batch, name: str) -> list[tuple[int, int]]:
    """(from, to) of the edges that have this flag."""
    target = np.repeat(np.arange(batch.op.size), np.diff(batch.edge_start))
    chosen = batch.edge[:, spec.EDGE.index(name)] > 0
    return sorted(zip(batch.neighbour[chosen].tolist(), target[chosen].tolist(), strict=True))


def test_nodes_are_the_values_of_the_kernel_in_post_order() -> None:
    batch = encoded(SOFTENED, (1, 2, 3, 4), (4,))
    assert [spec.VOCABULARY[op] for op in batch.op] == ["read", "log", "reduce", "broadcast", "add"]
    assert column(batch, "is_read") == [1, 0, 0, 0, 0]
    assert column(batch, "is_result") == [0, 0, 0, 0, 1]
    assert column(batch, "elements") == [np.float32(np.log2(n + 1)) for n in (32, 32, 4, 32, 32)]
    assert column(batch, "reduced") == [0, 0, 3, 0, 0]
    assert column(batch, "reduces_minor") == [0, 0, 1, 0, 0]
    assert column(batch, "readers") == [1, np.float32(np.log2(3)), 1, 1, 0]
    # The log is evaluated for the result, and once more inside the reduction.
    assert column(batch, "evaluations")[1] == np.float32(np.log2(65))
    assert column(batch, "contexts") == [2, 2, 1, 1, 1]


def test_edges_say_how_one_index_follows_from_the_other() -> None:
    batch = encoded(SOFTENED, (1, 2, 3, 4), (4,))
    assert edges(batch, "itself") == [(n, n) for n in range(5)]
    assert edges(batch, "forward") == [(0, 1), (1, 2), (1, 4), (2, 3), (3, 4)]
    assert edges(batch, "backward") == [(1, 0), (2, 1), (3, 2), (4, 1), (4, 3)]
    assert edges(batch, "identity") == sorted([(0, 1), (1, 0), (1, 4), (4, 1), (3, 4), (4, 3)])
    assert edges(batch, "reduced") == [(1, 2), (2, 1)]
    assert (2, 3) in edges(batch, "broadcast")


def drawn(most_members: int, count: int) -> Kernels:
    """Random fused ops of the step of tests/data."""
    grower = Grower(transformer().graph, [], most_members, 2)
    ops = [op for op in (grower.draw() for _ in range(2 * count)) if op][:count]
    return Kernels.of_lists([o.members for o in ops], [o.results for o in ops])


def test_the_estimate_is_the_analytical_model_s() -> None:
    graph, model, kernels = transformer().graph, AnalyticModel(DEVICE), drawn(48, 60)
    batch = encode(graph_features(graph, model, {}), kernels, model.scratch(graph))
    expected = np.zeros(len(kernels))
    kernels_ns(model.tables(graph), kernels.flat, model.scratch(graph), expected)
    assert batch.estimate_ns.tolist() == np.maximum(expected, 1.0).tolist()
    assert all(np.isfinite(numbers).all() for numbers in (batch.node, batch.edge, batch.kernel))


def test_equal_structure_gives_equal_features_wherever_it_stands() -> None:
    again = graph_of(
        "f32[4,8] param; f32[4,8] param; f32[4,8] multiply 0 1; f32[4,8] log 1; f32[4,8] negate 3; "
        "f32[4] reduce 3 {1}; f32[4,8] broadcast 5 {0}; f32[4,8] add 3 6; tuple 7 4 2"
    )
    here, there = encoded(SOFTENED, (1, 2, 3, 4), (4,)), encoded(again, (3, 5, 6, 7), (7,))
    for mine, theirs in zip(here, there, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_measured_times_show_where_they_should_and_nowhere_else() -> None:
    blind, known = (
        encoded(SOFTENED, (1, 4), (4,), times) for times in ({}, {SOFTENED.nodes[1].key: 12345.0})
    )
    changed = {name for name in spec.NODE if column(blind, name) != column(known, name)}
    assert changed == {"alone_ns", "alone_ratio", "is_measured", "alone_share"}
    changed = {n for i, n in enumerate(spec.KERNEL) if blind.kernel[0, i] != known.kernel[0, i]}
    assert changed == {"alone_sum"}
    assert column(known, "is_measured") == [0, 1, 0, 0]
    assert column(known, "alone_ns")[1] == np.float32(np.log2(12346))


def test_ops_of_no_known_type_are_other() -> None:
    odd = replace(SOFTENED.nodes[1], opcode="ragged-dot")
    graph = replace(SOFTENED, nodes=(SOFTENED.nodes[0], odd, *SOFTENED.nodes[2:]))
    assert encoded(graph, (1, 4), (4,)).op.tolist().count(spec.OTHER) == 1


def test_triton_computes_every_value_once() -> None:
    batch = encoded(SOFTENED, (1, 2, 3, 4), (4,), tiled=True)
    assert column(batch, "evaluations") == column(batch, "elements")
    assert batch.kernel[0, spec.KERNEL.index("tiled")] == 1


@cache
def many() -> Batch:
    """Twenty of them; not to be changed. Made when it is asked for: the first time the code for it is compiled, which
    every process would do as it collects the tests."""
    graph, model = transformer().graph, AnalyticModel(DEVICE)
    return encode(graph_features(graph, model, {}), drawn(12, 20), model.scratch(graph))


@given(st.lists(st.integers(0, 19), max_size=30))
def test_selecting_and_joining_kernels_changes_none_of_them(chosen: list[int]) -> None:
    together = selected(many(), np.array(chosen, np.int64))
    assert together.estimate_ns.tolist() == many().estimate_ns[chosen].tolist()
    if chosen:
        alone = joined([selected(many(), np.array([kernel])) for kernel in chosen])
        for mine, theirs in zip(together, alone, strict=True):
            np.testing.assert_array_equal(mine, theirs)
