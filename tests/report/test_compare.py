from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.errors import PlanError
from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.report.facts import compare, require_comparable
from tests.report import plans

A = Strategy(
    groups=(Group((1, 2)), Group((4, 5), (1,))),
    buckets=(Bucket((6, 7)), Bucket((8,))),
    order=("g0", "n3", "g1", "b0.start", "b1.start", "b0.done", "b1.done"),
)


def test_a_plan_does_not_differ_from_itself() -> None:
    found = compare(A, A)
    assert found.same
    assert (found.common_groups, found.common_buckets, found.common_units) == (2, 2, 7)


def test_units_are_told_by_their_nodes_not_by_their_numbers() -> None:
    renumbered = Strategy(
        groups=A.groups[::-1],
        buckets=A.buckets[::-1],
        order=("g1", "n3", "g0", "b1.start", "b0.start", "b1.done", "b0.done"),
    )
    assert compare(A, renumbered).same


def test_it_says_exactly_what_differs() -> None:
    b = Strategy(
        groups=(Group((1, 2, 3)), Group((4, 5), (1,))),
        buckets=(Bucket((6,)), Bucket((8, 7))),
        order=("g1", "g0", "b0.start", "b1.start", "b0.done", "b1.done"),
    )
    found = compare(A, b)
    assert not found.same
    assert found.common_groups == 1
    assert [(change.token, change.shares_with) for change in found.groups_a] == [("g0", ("g0", "g1"))]
    assert [(change.token, change.shares_with) for change in found.groups_b] == [("g0", ("g0", "g1", "n3"))]
    assert found.common_buckets == 0
    assert [token for token, _ in found.buckets_a] == ["b0", "b1"]
    assert [(move.all_reduce, move.bucket_a, move.bucket_b) for move in found.moved_all_reduces] == [
        (6, "b0", "b0"), (7, "b0", "b1"), (8, "b1", "b1"),
    ]  # fmt: skip


def test_a_moved_unit_is_named() -> None:
    later = Strategy(A.groups, A.buckets, ("n3", "g1", "b0.start", "b1.start", "b0.done", "g0", "b1.done"))
    found = compare(A, later)
    assert found.moved_units == ("g0",)
    assert not found.same


@given(st.lists(st.integers(0, 30), unique=True), st.integers(0, 2**32))
def test_without_the_moved_units_both_orders_are_one(nodes: list[int], seed: int) -> None:
    shuffled = list(nodes)
    random.Random(seed).shuffle(shuffled)
    a = Strategy(order=tuple(f"n{node}" for node in nodes))
    b = Strategy(order=tuple(f"n{node}" for node in shuffled))
    moved = set(compare(a, b).moved_units)
    assert [token for token in a.order if token not in moved] == [t for t in b.order if t not in moved]
    assert bool(moved) == (nodes != shuffled)
    assert len(moved) < max(len(nodes), 1)


def test_plans_of_two_models_do_not_compare() -> None:
    mlp, wide = plans.cpu("mlp"), plans.cpu("mlp_wide")
    one = plans.made_plan(mlp, plans.early_all_reduces(mlp), b"")
    other = plans.made_plan(wide, plans.early_all_reduces(wide), b"")
    require_comparable(one, one)
    with pytest.raises(PlanError, match=r"do not compare: one is for 'jit_mlp_step' .* 'jit_wide_step'"):
        require_comparable(one, other)
