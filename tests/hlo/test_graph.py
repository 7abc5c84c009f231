"""A graph as flat arrays says what its nodes say; which bitcasts a kernel holds, and what lies behind them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from disco_hlo.hlo.graph import (
    Kind,
    as_kernel,
    behind_bitcasts,
    flat_graph,
    flat_shapes,
    flat_users,
    is_cloned,
    kernel_nodes,
    readers,
)
from tests.graphs import graph_of
from tests.search.steps import random_step

STEP = graph_of("param\nneg 0\nbitcast 1\nbitcast 2\nadd 3 1\nbitcast 4\nmul 5\ntuple 5 6")


def test_behind_a_row_of_bitcasts_lies_the_op() -> None:
    assert behind_bitcasts(STEP) == (0, 1, 1, 1, 4, 4, 6, 7)


def test_a_kernel_holds_the_bitcasts_through_which_its_ops_read_and_no_other() -> None:
    assert kernel_nodes(STEP, (4,)) == (2, 3, 4)
    assert kernel_nodes(STEP, {6, 4}) == (2, 3, 4, 5, 6)
    assert kernel_nodes(STEP, (1,)) == (1,)


def test_a_kernel_of_a_module_is_its_ops_wherever_its_bitcasts_stand() -> None:
    assert as_kernel(STEP, (1, 2, 3, 4, 5), (2, 5)) == ((1, 4), (1, 4))
    assert as_kernel(STEP, (2, 3), (3,)) == ((), (1,))


def test_readers_look_through_bitcasts() -> None:
    assert sorted(readers(STEP, 1)) == [4]
    assert sorted(readers(STEP, 4)) == [6, 7]


def test_the_arrays_are_those_of_the_nodes() -> None:
    graph = random_step(Random(3), 60, backend="gpu")
    flat = flat_graph(graph)
    for node in graph.nodes:
        assert flat.operand[flat.operand_at[node.id] : flat.operand_at[node.id + 1]].tolist() == [
            *node.operands
        ]
        assert flat.kind[node.id] == node.kind
        assert flat.is_bitcast[node.id] == (node.opcode == "bitcast")
        assert flat.is_cloned[node.id] == is_cloned(node)
        assert graph.nodes[flat.example[flat.of_key[node.id]]].key == node.key
    assert flat.first.tolist() == [*graph.first_of_key]
    assert flat.reader.tolist() == [node.id for node in graph.nodes for _ in node.operands]


def test_an_op_that_is_kept_apart_is_not_taken_for_its_twin_that_may_be_fused() -> None:
    """The search fused both, and the last check of its plan refused that."""
    graph = random_step(Random(3), 60)
    twin = next(node for node in graph.nodes if node.kind is Kind.FUSIBLE)
    apart = replace(twin, id=len(graph), kind=Kind.FIXED)
    flat = flat_graph(replace(graph, nodes=(*graph.nodes, apart)))
    assert flat.example[flat.of_key[-1]] == apart.id
    assert flat.kind[flat.example[flat.of_key]].tolist() == flat.kind.tolist()


def test_they_are_made_once() -> None:
    graph = random_step(Random(3), 20)
    assert flat_graph(graph) is flat_graph(graph)
    assert flat_graph(random_step(Random(3), 20)) is not flat_graph(graph)


def test_shapes_users_and_what_bitcasts_show_are_those_of_the_nodes() -> None:
    graph = random_step(Random(5), 60, backend="gpu")
    flat, shapes = flat_graph(graph), flat_shapes(graph)
    users_at, users = flat_users(graph)
    geometry = {}
    for node in graph.nodes:
        key = flat.of_key[node.id]
        place = shapes.of_key[key]
        assert shapes.distinct[place] == node.shape
        assert shapes.elements[place] == node.shape.element_count
        assert (
            geometry.setdefault((node.shape.dims, node.shape.layout), shapes.geometry[place])
            == (shapes.geometry[place])
        )
        read = [graph.nodes[x].shape for x in node.operands]
        assert shapes.reads_in_place[key] == all(
            not shape.dims or (shape.dims, shape.layout) == (node.shape.dims, node.shape.layout)
            for shape in read
        )
        assert users[users_at[node.id] : users_at[node.id + 1]].tolist() == [*graph.users[node.id]]
        shown = node
        while shown.opcode == "bitcast":
            shown = graph.nodes[shown.operands[0]]
        assert flat.shown[node.id] == shown.id
    assert len(set(shapes.distinct)) == len(shapes.distinct)
    assert len({*geometry.values()}) == len(geometry)
    assert any(node.opcode == "bitcast" for node in graph.nodes)
