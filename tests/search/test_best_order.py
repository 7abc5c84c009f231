"""An order by local search, on a step small enough to work out."""

from __future__ import annotations

from disco_hlo.plan.order import check_order
from disco_hlo.plan.strategy import Bucket, Strategy
from disco_hlo.plan.units import unit_graph
from disco_hlo.search.schedule import best_of, best_order, with_order
from tests.machines import CPU, GPU
from tests.plan.small_graphs import graph
from tests.simulator.cost_models import TableCosts

# A weight (1) is gathered (b0, 17 ns) for two matmuls (3, 4), the second of which makes a gradient (b1, 29 ns). Two
# kernels wait for nothing: n6 takes not quite as long as the first collective, n7 as long as the last.
STEP = graph("""
    param
    convert 0
    all-reduce 1
    dot 2
    dot 3
    all-reduce 4
    exp 0
    exp 0
    tuple 5 6 7
""")
COSTS = TableCosts((0, 10, 0, 20, 20, 0, 12, 30, 0))
BUCKETS = (Bucket((2,)), Bucket((5,)))


def test_kernels_run_during_the_collectives_that_they_hide() -> None:
    """By rule both run during the first collective, so as not to wait for it, and nothing hides the last."""
    by_rule = with_order(STEP, Strategy(buckets=BUCKETS), COSTS, GPU)
    assert " ".join(by_rule.strategy.order) == "n1 b0.start n6 n7 b0.done n3 n4 b1.start b1.done"
    assert by_rule.predicted_ns == 10 + 12 + 30 + 20 + 20 + 29
    found = best_order(STEP, Strategy(buckets=BUCKETS), COSTS, GPU)
    check_order(unit_graph(STEP, found.strategy), found.strategy.order, True)
    assert " ".join(found.strategy.order) == "n1 b0.start n6 b0.done n3 n4 b1.start n7 b1.done"
    assert found.predicted_ns == 10 + 17 + 20 + 20 + 30


def test_where_collectives_block_the_order_is_that_of_the_rules() -> None:
    strategy = Strategy(buckets=BUCKETS)
    assert best_order(STEP, strategy, COSTS, CPU) == with_order(STEP, strategy, COSTS, CPU)


def test_an_order_within_the_memory_limit_is_taken() -> None:
    """What runs during the collective leaves results that lie there until they are read."""
    step = graph("param\nall-reduce 0\nexp 0\nexp 0\ndot 1\ndot 2 4\ndot 3 5\ntuple 6")
    strategy, costs = Strategy(buckets=(Bucket((1,)),)), TableCosts((0, 0, 10, 10, 10, 10, 10, 0))
    fast = ("b0.start", "n2", "n3", "b0.done", "n4", "n5", "n6")
    small = ("b0.start", "b0.done", "n4", "n2", "n5", "n3", "n6")
    either = best_of(step, strategy, [small, fast], costs, GPU)
    assert (either.strategy.order, either.predicted_ns) == (fast, 50)
    limited = best_of(step, strategy, [fast, small], costs, GPU, either.peak_bytes - 1)
    assert (limited.strategy.order, limited.predicted_ns) == (small, 13 + 50)
    assert limited.peak_bytes < either.peak_bytes
    assert best_of(step, strategy, [fast, small], costs, GPU, 0) == limited
