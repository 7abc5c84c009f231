"""A graph as flat arrays says what its nodes say."""

from __future__ import annotations

from random import Random

import numpy as np

from disco_hlo.hlo.flat_graph import flat_graph, flat_lists, stretches
from disco_hlo.hlo.graph import is_cloned
from tests.search.random_steps import random_step


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


def test_they_are_made_once() -> None:
    graph = random_step(Random(3), 20)
    assert flat_graph(graph) is flat_graph(graph)
    assert flat_graph(random_step(Random(3), 20)) is not flat_graph(graph)


def test_stretches_are_the_places_of_lists() -> None:
    start, items = flat_lists([[5, 6], [], [7, 8, 9]])
    assert (start.tolist(), items.tolist()) == ([0, 2, 2, 5], [5, 6, 7, 8, 9])
    chosen = np.array([2, 0, 1, 2])
    assert items[stretches(start[chosen], np.diff(start)[chosen])].tolist() == [7, 8, 9, 5, 6, 7, 8, 9]
    assert stretches(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
