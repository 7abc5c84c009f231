"""Orders by rule, on graphs small enough to draw and on a real GPU step."""

from __future__ import annotations

import pytest

from disco_hlo.plan.legal import check_order
from disco_hlo.plan.plan import Bucket, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.units import UnitGraph, unit_graph
from disco_hlo.simulator.orders import Prefetch, list_schedule
from tests.captured import captured
from tests.graphs import graph_of


def units_of(text: str) -> UnitGraph:
    graph = graph_of(text, backend="gpu")
    return unit_graph(graph, Strategy(buckets=tuple(Bucket((n,)) for n in graph.collectives)))


# Two gradients, the one of node 5 available before the one of node 3, and their updates.
STEP = """
    param
    dot 0
    dot 1
    dot 2
    all-reduce 3
    dot 1
    all-reduce 5
    add 4 0
    multiply 7
    add 6 0
    tuple 8 9
"""


def times(units: UnitGraph, compute_ns: int, transfer_ns: int) -> tuple[list[int], list[int]]:
    """The same time for every unit, and for every transfer."""
    return (
        [0 if unit.is_bucket else compute_ns for unit in units.units],
        [transfer_ns if unit.is_bucket else 0 for unit in units.units],
    )


@pytest.mark.parametrize(
    ("step", "asynchronous", "order"),
    [
        pytest.param(
            STEP, True, "n1 n5 b1.start n2 n3 b0.start b1.done n9 b0.done n7 n8",
            id="the all-reduce that can start first does",
        ),
        pytest.param(STEP, False, "n1 n5 b1 n2 n3 b0 n7 n8 n9", id="where they block a bucket is one token"),
        pytest.param(
            "param\ndot 0\nall-reduce 1\nadd 2 0\ndot 0\ndot 4\ntuple 3 5", True, "n1 b0.start n4 n5 b0.done n3",
            id="a reader waits while another unit can run",
        ),
        pytest.param(
            "param\ndot 0\nall-reduce 1\nadd 2 0\nall-reduce 3\ndot 0\ntuple 4 5", True,
            "n1 b0.start n5 b0.done n3 b1.start b1.done", id="an all-reduce waits for another one",
        ),
    ],
)  # fmt: skip
def test_kernels_run_while_collectives_do(step: str, asynchronous: bool, order: str) -> None:
    units = units_of(step)
    assert " ".join(list_schedule(units, *times(units, 10, 15), asynchronous=asynchronous)) == order


def test_the_longer_transfer_goes_first_among_equals() -> None:
    units = units_of("""
        param
        dot 0
        all-reduce 1
        dot 0
        all-reduce 3
        tuple 2 4
    """)
    assert [unit.token for unit in units.units] == ["b0", "b1", "n1", "n3"]
    assert list_schedule(units, [0, 0, 10, 10], [5, 50, 0, 0])[:2] == ("n3", "b1.start")


def test_the_order_of_a_real_step_is_legal_and_starts_its_all_reduces_early() -> None:
    source = captured("h200_models/vgg19")
    strategy = read(source)
    units = unit_graph(source.graph, strategy)
    durations = [1000 * len(unit.nodes) for unit in units.units]
    transfers = [2_000_000 if unit.is_bucket else 0 for unit in units.units]
    order = list_schedule(units, durations, transfers)
    check_order(units, order, asynchronous=True)
    assert order == list_schedule(units, durations, transfers)

    def mean_matmuls_before_a_start(tokens: tuple[str, ...]) -> float:
        done, before = 0, []
        for token in tokens:
            unit = units.units[units.index[token.split(".")[0]]]
            done += sum(source.graph.nodes[node].opcode == "custom-call" for node in unit.nodes)
            before += [done] if token.endswith(".start") else []
        return sum(before) / len(before)

    assert mean_matmuls_before_a_start(order) < 30
    assert mean_matmuls_before_a_start(strategy.order) > 45


# Each of two layers converts its weight (n1, n4), gathers it (b0, b1) and multiplies with it (n3, n6); b2 reduces.
LAYERS = """
    param
    convert 0
    all-reduce 1
    dot 2
    convert 0
    all-reduce 4
    dot 3 5
    all-reduce 6
    tuple 7
"""
KERNELS = ("n1", "n3", "n4", "n6")


def order(units: UnitGraph, convert_ns: int, most_ahead: int) -> tuple[str, ...]:
    converts = [unit.token in ("n1", "n4") for unit in units.units]
    durations = [
        convert_ns if is_convert else 0 if unit.is_bucket else 100
        for unit, is_convert in zip(units.units, converts, strict=True)
    ]
    collectives = [100 if unit.is_bucket else 0 for unit in units.units]
    gathers = [unit.token in ("b0", "b1") for unit in units.units]
    kernels = [units.index[token] for token in KERNELS]
    rule = Prefetch(units, kernels, durations, collectives, converts, gathers, most_ahead)
    others = [rule.with_ahead(most).order() for most in (1, 2, most_ahead)]
    found = rule.order()
    assert others[-1] == found, "an order that was made before leaves nothing behind"
    check_order(units, found, True)
    return found


@pytest.mark.parametrize(
    ("convert_ns", "most_ahead", "wanted"),
    [
        # A light conversion runs early, and the second gather overlaps with the first matmul.
        (10, 2, "n1 b0.start n4 b1.start b0.done n3 b1.done n6 b2.start b2.done"),
        # One gather ahead: the second starts when the first was waited for and its matmul was issued.
        (10, 1, "n1 b0.start b0.done n3 n4 b1.start b1.done n6 b2.start b2.done"),
        # A conversion that takes as long as the gather stays where it is.
        (100, 2, "n1 b0.start b0.done n3 n4 b1.start b1.done n6 b2.start b2.done"),
    ],
)  # fmt: skip
def test_collectives_start_as_early_as_their_operands_allow(
    convert_ns: int, most_ahead: int, wanted: str
) -> None:
    assert order(units_of(LAYERS), convert_ns, most_ahead) == tuple(wanted.split())


# Two slices (n1, n2) go through one barrier, as where jax.checkpoint computes again. Both gathers wait for both; the
# one that is needed first (b0) is the shorter, so that less of what prepares it may be left.
BARRIER = """
    param
    slice 0
    slice 0
    tuple 1 2
    convert 3
    all-reduce 4
    convert 3
    all-reduce 6
    dot 5
    dot 8 7
    tuple 9
"""


def test_of_collectives_that_one_barrier_lets_go_the_first_needed_starts_first() -> None:
    """The longer one started first, as sooner so little was left of its preparations: the first reader waited for
    both, and the order took longer than XLA's."""
    units = units_of(BARRIER)
    durations = [0 if unit.is_bucket else 10 for unit in units.units]
    collectives = [{"b0": 100, "b1": 200}.get(unit.token, 0) for unit in units.units]
    moves = [unit.token in ("n1", "n2", "n4", "n6") for unit in units.units]
    kernels = [units.index[token] for token in ("n1", "n2", "n4", "n6", "n8", "n9")]
    found = Prefetch(units, kernels, durations, collectives, moves, [False] * len(moves), 1).order()
    check_order(units, found, True)
    assert " ".join(found) == "n1 n2 n4 b0.start n6 b1.start b0.done n8 b1.done n9"


def test_what_computes_is_not_brought_forward() -> None:
    """However little time it takes: kernels stay where they were measured."""
    units = units_of(LAYERS)
    durations = [0 if unit.is_bucket else 10 for unit in units.units]
    collectives = [100 if unit.is_bucket else 0 for unit in units.units]
    kernels = [units.index[token] for token in KERNELS]
    nothing = [False] * len(durations)
    found = Prefetch(units, kernels, durations, collectives, nothing, nothing, 1).order()
    assert " ".join(found) == "n1 b0.start b0.done n3 n4 b1.start b1.done n6 b2.start b2.done"
