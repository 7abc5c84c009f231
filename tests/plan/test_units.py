"""Units, what they wait for, and their order, on graphs small enough to draw."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.errors import IllegalStrategyError
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.legal import check_order, default_order, late_waits, started_late
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.plan.units import groups_with_own_copies, unit_graph
from tests.graphs import graph_of
from tests.simulator.random_steps import random_step, random_strategy


def waits(graph: Graph, strategy: Strategy) -> dict[str, str]:
    """For each unit, what it waits for, as text."""
    found = unit_graph(graph, strategy)
    return {
        unit.token: " ".join(found.units[j].token for j in needed)
        for unit, needed in zip(found.units, found.dependencies, strict=True)
    }


# Two gradients, each reduced and applied to its parameter.
STEP = graph_of(
    "param\ndot 0\nmul 1\nall-reduce 2\nadd 3 0\nmul 1\nall-reduce 5\nadd 6 0\ntuple 4 7", elements=None
)
SEPARATE = (Bucket((3,)), Bucket((6,)))


CHAIN = "param\nexp 0\nmul 1\nadd 1\ntuple 2 3"
WAITS: dict[str, tuple[Graph, Strategy, dict[str, str]]] = {
    "units of an unfused step": (
        STEP, Strategy(buckets=SEPARATE),
        {"b0": "n2", "b1": "n5", "n1": "", "n2": "n1", "n4": "b0", "n5": "n1", "n7": "b1"},
    ),
    "one bucket waits for all its gradients": (
        STEP, Strategy(buckets=(Bucket((3, 6)),)),
        {"b0": "n2 n5", "n1": "", "n2": "n1", "n4": "b0", "n5": "n1", "n7": "b0"},
    ),
    "values are read from the group that owns them": (
        STEP, Strategy((Group((2, 5)), Group((4, 7))), SEPARATE),
        {"g0": "n1", "g1": "b0 b1", "b0": "g0", "b1": "g0", "n1": ""},
    ),
    "a group recomputes its duplicates and the owner still serves the others": (
        graph_of(CHAIN), Strategy((Group((2,), duplicates=(1,)),)), {"g0": "", "n1": "", "n3": "n1"},
    ),
    "an op that every reader recomputes is not executed": (
        graph_of("param\nneg 0\nexp 1\nmul 2\nadd 2\ntuple 3 4"),
        Strategy((Group((3,), duplicates=(1, 2)), Group((4,), duplicates=(1, 2)))), {"g0": "", "g1": ""},
    ),
    "free nodes pass values through": (
        graph_of("param\nexp 0\nbitcast 1\nbitcast 2\nmul 3\ntuple 4"), Strategy(), {"n1": "", "n4": "n1"},
    ),
    "before pairs order units": (
        graph_of("param\nexp 0\ndot 0\ntuple 1 2", before=((1, 2),)), Strategy(), {"n1": "", "n2": "n1"},
    ),
    "readers of a tuple member run before the tuple is overwritten": (
        graph_of("param\ndot 0\nget-tuple-element 1\nexp 2\ndot 1\ntuple 3 4", before=((2, 4),)), Strategy(),
        {"n1": "", "n3": "n1", "n4": "n1 n3"},
    ),
    "a kernel that computes what it reads by a bitcast waits for nobody": (
        graph_of("param\nexp 0\nbitcast 1\nmul 2\nneg 1\ntuple 3 4"), Strategy((Group((3,), (1,)),)),
        {"g0": "", "n1": "", "n4": "n1"},
    ),
    "a bitcast orders nothing": (
        graph_of("param\nbitcast 0\nexp 1\ndot 0\ntuple 2 3", before=((1, 3),)), Strategy(), {"n2": "", "n3": ""},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_what_a_unit_waits_for(name: str) -> None:
    step, strategy, expected = WAITS[name]
    assert waits(step, strategy) == expected


def test_a_strategy_names_no_bitcast() -> None:
    step = graph_of("param\nexp 0\nbitcast 1\nmul 2\ntuple 3")
    with pytest.raises(
        IllegalStrategyError, match=r"g0 holds node 2 \(bitcast\), and strategies name no bitcasts"
    ):
        unit_graph(step, Strategy((Group((1, 2, 3)),)))


def test_everyone_who_recomputes_a_reader_runs_before_the_write_in_place() -> None:
    shared = graph_of("param\nexp 0\nneg 1\nmul 1\ndot 0\ntuple 2 3 4", before=((1, 4),))
    assert waits(shared, Strategy((Group((2,), duplicates=(1,)),)))["n4"] == "g0 n1"


def test_who_recomputes_what_is_overwritten_may_run_after_the_write() -> None:
    # 1 is overwritten by 3; 2 reads it, and so does XLA's kernel of 2 and 4, which needs 3 as well.
    step = graph_of("param\nexp 0\nneg 1\ndot 1\nmul 2 3\ntuple 4", before=((2, 3),), inplace=((1, 3),))
    assert waits(step, Strategy())["n3"] == "n1 n2"
    recomputing = Group((2, 4), duplicates=(1,))
    assert waits(step, Strategy((recomputing,))) == {"g0": "n3", "n1": "", "n3": "n1"}
    assert groups_with_own_copies(step, (Group((0,)), recomputing)) == {1}
    assert groups_with_own_copies(step, (Group((1, 2)),)) == set()


def test_who_recomputes_what_it_reads_of_what_a_loop_overwrites_may_run_after_the_loop() -> None:
    """A loop overwrites several arrays; none but the one that it reads need be recomputed."""
    text = "param\nexp 0\nabs 0\nneg 1\ndot 1 2\nmul 3 4\ntuple 5"
    step = graph_of(text, before=((3, 4),), inplace=((1, 4), (2, 4)))
    assert waits(step, Strategy())["n4"] == "n1 n2 n3"
    assert waits(step, Strategy((Group((3, 5), duplicates=(1,)),)))["n4"] == "n1 n2"
    other = graph_of(text, before=((3, 4),), inplace=((0, 4), (2, 4)))
    assert waits(other, Strategy((Group((3,), duplicates=(1,)),)))["n4"] == "g0 n1 n2"


def test_values_in_memory_with_their_readers() -> None:
    found = unit_graph(STEP, Strategy((Group((2, 5)),), SEPARATE))
    tokens = [unit.token for unit in found.units]
    assert [
        (v.node, v.size_bytes, tokens[v.producer], [tokens[i] for i in v.readers], v.returned)
        for v in found.values
    ] == [
        (2, 12, "g0", ["b0"], False),
        (5, 24, "g0", ["b1"], False),
        (3, 16, "b0", ["n4"], False),
        (6, 28, "b1", ["n7"], False),
        (1, 8, "n1", ["g0"], False),
        (4, 20, "n4", [], True),
        (7, 32, "n7", [], True),
    ]


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Strategy((Group((1, 2, 5)), Group((2,))), SEPARATE), r"node 2 \(mul\) belongs to g0 and to g1"),
        (Strategy((Group((2, 99)),), SEPARATE), "g0 holds node 99, but the graph has nodes 0 to 8"),
        (Strategy((Group((2, 10**30)),), SEPARATE), "g0 holds node 10{30}, but the graph has nodes 0 to 8"),
        (Strategy((Group((-1, 2)),), SEPARATE), "g0 holds node -1, but the graph has nodes 0 to 8"),
        (Strategy((Group(()),), SEPARATE), "g0 owns no node"),
        (Strategy((Group((5, 2)),), SEPARATE), "g0 does not list its nodes in ascending order: 5, 2"),
        (Strategy((Group((2, 2)),), SEPARATE), "g0 does not list its nodes in ascending order: 2, 2"),
        (Strategy((Group((0, 1)),), SEPARATE), r"g0 holds node 0 \(parameter\), .* \(parameter\)"),
        (Strategy((Group((2, 3)),), SEPARATE), r"g0 holds node 3 \(all-reduce\), .* \(collective\)"),
        (Strategy((Group((4, 7, 8)),), SEPARATE), r"g0 holds node 8 \(tuple\), .* \(free\)"),
        (Strategy((Group((2,), (2,)),), SEPARATE), r"g0 both owns and duplicates node 2 \(mul\)"),
        (Strategy((Group((2,), (5,)),), SEPARATE), r"g0 duplicates node 5 \(mul\), which nothing in it"),
        (Strategy(buckets=(Bucket((3,)),)), r"Collectives are in no bucket: node 6 \(all-reduce\)\."),
        (Strategy(buckets=(Bucket((3, 6)), Bucket((6,)))), r"node 6 \(all-reduce\) belongs to b0 and to b1"),
        (Strategy(buckets=(Bucket((3, 3)), Bucket((6,)))), r"node 3 \(all-reduce\) belongs to b0 and to b0"),
        (Strategy(buckets=(Bucket((3, 5)), Bucket((6,)))), r"b0 holds node 5 \(mul\), which is no collective"),
        (Strategy(buckets=(Bucket(()), *SEPARATE)), "b0 holds no collective"),
        (Strategy((Group((2, 4)),), SEPARATE),
            r"circle: g0 \(nodes 2, 4\) waits for b0 \(nodes 3\) waits for g0 \(nodes 2, 4\)\."),
        (Strategy((Group((1,)), Group((2,), (1,)), Group((5,), (1,))), SEPARATE),
            r"Nothing reads what g0 \(nodes 1\) produces"),
    ],
)  # fmt: skip
def test_illegal_structures_are_named(strategy: Strategy, message: str) -> None:
    with pytest.raises(IllegalStrategyError, match=message):
        unit_graph(STEP, strategy)


def test_an_all_reduce_of_an_all_reduce_cannot_share_its_bucket() -> None:
    chained = graph_of("param\nall-reduce 0\nall-reduce 1\ntuple 2")
    with pytest.raises(IllegalStrategyError, match=r"circle: b0 \(nodes 1, 2\) waits for b0"):
        unit_graph(chained, Strategy(buckets=(Bucket((1, 2)),)))


DEFAULT_ORDERS: dict[str, tuple[Graph, bool, str]] = {
    "where collectives block": (STEP, False, "n1 n2 b0 n4 n5 b1 n7"),
    "issues early and waits late": (STEP, True, "n1 n2 b0.start n5 b1.start b0.done n4 b1.done n7"),
    "waits for a bucket that only the root reads at the end": (
        graph_of("param\nexp 0\nall-reduce 1\nneg 0\nall-reduce 3\nmul 4\ntuple 2 5"), True,
        "n1 b0.start n3 b1.start b1.done n5 b0.done",
    ),
    "of a unit that reads two buckets": (
        graph_of("param\nall-reduce 0\nall-reduce 0\nadd 1 2\nneg 1\ntuple 3 4"), True,
        "b0.start b1.start b0.done n4 b1.done n3",
    ),
    # A saved plan without an order means what it meant when it was saved.
    "a unit keeps its place when one of two buckets that it reads is waited for": (
        graph_of("param\nall-reduce 0\nall-reduce 0\nall-reduce 0\nneg 3\nadd 1 3\nadd 2 4\ntuple 5 6"), True,
        "b0.start b1.start b2.start b2.done n4 b1.done n6 b0.done n5",
    ),
    "of chained all-reduces": (
        graph_of("param\nall-reduce 0\nall-reduce 1\ntuple 2"), True, "b0.start b0.done b1.start b1.done",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULT_ORDERS)
def test_default_order(name: str) -> None:
    step, asynchronous, expected = DEFAULT_ORDERS[name]
    buckets = tuple(Bucket((node,)) for node in step.collectives)
    assert " ".join(default_order(unit_graph(step, Strategy(buckets=buckets)), asynchronous)) == expected


@given(st.integers(0, 2**32), st.integers(2, 60), st.booleans())
@settings(max_examples=200)
def test_default_orders_of_random_strategies_are_legal_and_wait_late(
    seed: int, nodes: int, asynchronous: bool
) -> None:
    random = Random(seed)
    step, _ = random_step(random, nodes)
    units = unit_graph(step, random_strategy(random, step, asynchronous=asynchronous))
    order = default_order(units, asynchronous)
    check_order(units, order, asynchronous)
    for token, following in pairwise(order):
        if token.endswith(".done") and not following.endswith(".done"):
            reader = units.index[following.removesuffix(".start")]
            assert units.index[token.removesuffix(".done")] in units.dependencies[reader]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("n1 n2 b0 n5 b1 n7", r"leaves out units of the strategy: n4\."),
        ("n1 n2 b0 n4 n5 b1 n7 n8 g0", r"does not have: n8, g0\."),
        ("n1 n2 b0 n4 n5 b1 n7 n7", r"names units twice: n7\."),
        ("n1 n2 n4 b0 n5 b1 n7", "n4 at position 2, before b0 at position 3, which it must wait for"),
        ("n1 n2 b0.start b0.done n4 n5 b1 n7", r"does not have: b0.start, b0.done\."),
        ("n1 n2 n5 b0.done b0.start b1.start b1.done n4 n7", r"b0\.done at position 3, before b0\.start at position 4"),
        ("n1 n2 n5 b0.start b1.start n4 b0.done b1.done n7", r"n4 at position 5, before b0\.done at position 6"),
    ],
)  # fmt: skip
def test_bad_orders_are_named(order: str, message: str) -> None:
    with pytest.raises(IllegalStrategyError, match=message):
        check_order(unit_graph(STEP, Strategy((), SEPARATE)), order.split(), "b1.done" in order)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("b0.start n1 b0.done n2", "b0.start n1 b0.done n2"),
        ("b0.start b1.start b0.done n1 b1.done", "b1.start b0.start b0.done n1 b1.done"),
        ("b0.start n1 b1.start b0.done b1.done n2", "b0.start n1 b0.done b1.start b1.done n2"),
        ("b0.start b1.start b0.done b1.done n1", "b0.start b0.done b1.start b1.done n1"),
        ("b0.start b2.start b0.done b2.done n1", "b0.start b0.done b2.start b2.done n1"),
        ("b0.start b2.start n1 b0.done b2.done", "b0.start b2.start n1 b0.done b2.done"),
    ],
)
def test_a_collective_that_hides_nothing_starts_right_before_it_ends(order: str, expected: str) -> None:
    """XLA:GPU puts it there behind the hook: what was written another way was executed in another order."""
    buckets = (Bucket((1,)), Bucket((2,)), Bucket((3, 4), "variadic"))
    assert started_late(buckets, order.split()) == tuple(expected.split())
    assert started_late(buckets, expected.split()) == tuple(expected.split())


def test_the_kernel_that_packs_a_bucket_is_hidden_by_what_was_started_before() -> None:
    buckets = (Bucket((1,)), Bucket((2, 3)))
    order = ("b0.start", "b1.start", "b0.done", "n4", "b1.done")
    assert started_late(buckets, order) == order


# Two copies (1, 3), each waited for (2, 4); the first is read by 6, the second by nothing but the root.
COPIES = """
    param
    async-start 0
    async-done 1
    async-start 0
    async-done 3
    dot 0
    dot 5 2
    tuple 6 4
"""


def test_a_copy_next_to_the_kernels_is_waited_for_by_its_reader() -> None:
    """Orders of ours waited at once, so that nothing ran next to the copies; XLA's own waits where they are read."""
    step = graph_of(COPIES)
    units = unit_graph(step, Strategy())
    order = ("n1", "n2", "n3", "n4", "n5", "n6")
    found = late_waits(step, units, order)
    check_order(units, found, True)
    assert found == ("n1", "n3", "n5", "n2", "n6", "n4")
    assert late_waits(step, units, found) == found


def test_a_copy_of_a_copy_starts_when_the_first_is_over() -> None:
    step = graph_of("param\nasync-start 0\nasync-done 1\nasync-start 2\nasync-done 3\ndot 0\ntuple 4 5")
    units = unit_graph(step, Strategy())
    found = late_waits(step, units, ("n1", "n2", "n3", "n4", "n5"))
    check_order(units, found, True)
    assert found == ("n1", "n2", "n3", "n5", "n4")
