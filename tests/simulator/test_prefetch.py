"""Collectives started early around kernels that stay where they are, on a graph small enough to draw."""

from __future__ import annotations

import pytest

from disco_hlo.plan.order import check_order
from disco_hlo.plan.units import UnitGraph
from disco_hlo.simulator.orders import Prefetch
from tests.simulator.test_list_schedule import units_of

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
    found = Prefetch(units, kernels, durations, collectives, converts, gathers, most_ahead).order()
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
