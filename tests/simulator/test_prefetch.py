"""Collectives started early around kernels that stay where they are, on a graph small enough to draw."""

from __future__ import annotations

import pytest

from disco_hlo.plan.order import check_order
from disco_hlo.plan.units import UnitGraph
from disco_hlo.simulator.prefetch import Prefetch
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
    durations = [
        convert_ns if unit.token in ("n1", "n4") else 0 if unit.is_bucket else 100 for unit in units.units
    ]
    collectives = [100 if unit.is_bucket else 0 for unit in units.units]
    gathers = [unit.token in ("b0", "b1") for unit in units.units]
    kernels = [units.index[token] for token in KERNELS]
    found = Prefetch(units, kernels, durations, collectives, gathers, most_ahead).order()
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
