"""What a plan holds, and how two differ, in the records behind ``disco inspect``, ``disco diff`` and the report."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.plan.plan import Bucket, Group, Strategy
from disco_hlo.report.bundle import open_bundle
from disco_hlo.report.facts import bucket_facts, bytes_saved, compare, group_facts, order_facts, step_times
from tests.graphs import graph_of
from tests.report import plans

CHAIN = graph_of("param\nadd 0 0\nmultiply 1 0\nnegate 2\ntuple 3", elements=None)
"""Vectors of 4, 8, 12, 16 bytes."""


def test_bytes_saved_is_the_traffic_of_the_ops_alone_less_that_of_the_kernel() -> None:
    # Alone: add reads 4 and writes 8, multiply reads 8 and 4 and writes 12, negate reads 12 and writes 16.
    assert bytes_saved(CHAIN, Group((1, 2, 3))) == (4 + 8) + (8 + 4 + 12) + (12 + 16) - (4 + 16)
    assert bytes_saved(CHAIN, Group((1,))) == 0


def test_what_a_kernel_computes_again_does_not_count_as_saved() -> None:
    # Reads 4 bytes twice over and writes 12; multiply alone would read 8 and 4 and write 12.
    assert bytes_saved(CHAIN, Group((2,), (1,))) == (8 + 4 + 12) - (4 + 12)


def test_order_in_numbers() -> None:
    found = order_facts(("g0", "n1", "b0.start", "n2", "b1.start", "b0.done", "b1.done", "g1"), explicit=True)
    assert (found.units, found.kernels, found.buckets) == (6, 4, 2)
    assert (found.kernels_before_first_bucket, found.kernels_after_last_bucket) == (2, 1)
    assert found.most_in_flight == 2
    blocking = order_facts(("g0", "b0", "n1", "b1"), explicit=False)
    assert (blocking.buckets, blocking.most_in_flight, blocking.kernels_after_last_bucket) == (2, 1, 0)


def test_groups_come_largest_first_with_their_ops_and_sources(cpu_plan: Path) -> None:
    bundle = open_bundle(cpu_plan / "plan.json")
    groups = group_facts(bundle)
    assert groups
    assert [group.size for group in groups] == sorted((group.size for group in groups), reverse=True)
    assert sum(len(group.nodes) for group in groups) == sum(len(g.nodes) for g in bundle.strategy.groups)
    assert all(sum(count for _, count in group.opcodes) == group.size for group in groups)
    assert any("tests/steps/models.py:" in group.source for group in groups)


def test_buckets_have_sizes_where_the_module_is_known() -> None:
    strategy = Strategy(buckets=(Bucket((1, 2)), Bucket((4,))))
    known = graph_of("param\nall-reduce 0\nall-reduce 0\nadd 1 2\nall-reduce 3\ntuple 4", elements=None)
    assert [bucket.size_bytes for bucket in bucket_facts(strategy, known)] == [8 + 12, 20]
    assert [bucket.size_bytes for bucket in bucket_facts(strategy, None)] == [None, None]


def test_step_times_are_those_of_the_chosen_candidate() -> None:
    source = plans.cpu()
    plan = plans.plan_of(source, plans.early_collectives(source), b"")
    times = step_times(plan)
    assert times.measured_speedup == 1.23
    assert times.predicted_default == 122_000_000
    assert times.predicted_plan == 98_000_000
    failed = step_times(msgspec.structs.replace(plan, chosen="no fusion"))
    assert failed.measured_plan is None
    assert failed.measured_speedup is None
    nothing = msgspec.structs.replace(plan, chosen="XLA default")
    assert step_times(nothing).measured_speedup == 1.0
    assert step_times(nothing).predicted_plan == 122_000_000
    assert step_times(msgspec.structs.replace(plan, measured=None)).measured_speedup is None


A = Strategy(
    groups=(Group((1, 2)), Group((4, 5), (1,))),
    buckets=(Bucket((6, 7)), Bucket((8,))),
    order=("g0", "n3", "g1", "b0.start", "b1.start", "b0.done", "b1.done"),
)


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
    assert [(move.collective, move.bucket_a, move.bucket_b) for move in found.moved_collectives] == [
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
