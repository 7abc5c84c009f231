"""What splitting the optimizer's state would gain, on steps that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from disco_hlo.hlo.graph import Graph, Shape
from disco_hlo.plan.plan import Sharding
from disco_hlo.plan.strategy import Bucket, Group, Strategy
from disco_hlo.search.optimizer_state import Update, find_update
from disco_hlo.search.sharding_advice import sentence, sharding_advice
from disco_hlo.simulator.costs import CPU, GPU, MachineModel
from tests.search.steps import chain
from tests.simulator.cost_models import TableCosts

MOMENTUM = """
param
param
param
dot 0 2
all-reduce 3
multiply 1 1
add 5 4
subtract 0 6
tuple 7 6
"""
"""p, m, x; the gradient 4, m' = 6, p' = 7. Eight floats each."""
UPDATE = Strategy((Group((5, 6, 7)),), (Bucket((4,)),))
TIMES_NS = (0, 0, 0, 100, 0, 40, 40, 40)


def advised(
    graph: Graph, strategy: Strategy = UPDATE, machine: MachineModel = GPU, devices: int = 2
) -> Sharding | None:
    return sharding_advice(
        graph,
        strategy,
        TableCosts(TIMES_NS),
        machine,
        devices=devices,
        replicated={0, 1},
        everywhere=set(graph.all_reduces),
    )


def test_all_reduce_and_update_against_scattered_sum_shared_update_and_gather() -> None:
    # Now: 100 for the gradient, 32 + 5 for its sum, 120 for the update.
    # Split: 100, then 16 + 5 to scatter, 60 for half the update, 16 + 5 to gather p'.
    found = advised(chain(MOMENTUM))
    assert found == Sharding(
        devices=2, state=(1,), state_bytes=32, saved_bytes=16, step_ns=257, sharded_ns=202
    )


def test_of_four_devices_each_does_a_quarter() -> None:
    found = advised(chain(MOMENTUM), devices=4)
    assert found == Sharding(4, (1,), 32, 24, 257, 100 + 21 + 30 + 21)


def test_launching_a_kernel_does_not_get_shorter() -> None:
    found = advised(chain(MOMENTUM), machine=replace(GPU, launch_ns=10))
    assert found is not None
    assert (found.step_ns, found.sharded_ns) == (277, 222)


def test_where_transfers_block_both_are_in_the_way() -> None:
    found = advised(chain(MOMENTUM), machine=replace(CPU, launch_ns=10))
    assert found is not None
    # The gather is launched like everything else.
    assert (found.step_ns, found.sharded_ns) == (110 + 47 + 130, 110 + 31 + 70 + 31)


def test_a_short_update_is_not_worth_another_transfer() -> None:
    found = sharding_advice(
        chain(MOMENTUM),
        UPDATE,
        TableCosts((0, 0, 0, 100, 0, 2, 1, 1)),
        GPU,
        devices=2,
        replicated={0, 1},
        everywhere={4},
    )
    assert found is not None
    # 100 + 37 + 4 now; 100 + 21 + 2 + 21 split.
    assert (found.step_ns, found.sharded_ns) == (141, 144)


def test_what_the_forward_pass_reads_is_gathered_and_the_rest_is_state() -> None:
    assert find_update(chain(MOMENTUM), 2, {0, 1}, {4}) == Update(
        gradients=(4,), work=frozenset({5, 6, 7}), state=(1,), gathered=((7, 4),), norms=False
    )


def test_an_update_alone_still_hands_out_its_parameters() -> None:
    """No forward pass tells p from m; but nothing is made of p'."""
    alone = chain("param\nparam\nparam\nall-reduce 2\nmultiply 1 1\nadd 4 3\nsubtract 0 5\ntuple 6 5")
    found = find_update(alone, 2, {0, 1}, {3})
    assert found is not None
    assert (found.state, found.gathered) == ((1,), ((6, 3),))


def test_adams_moments_are_told_apart_whatever_buffers_their_new_values_take() -> None:
    adam = chain("""
param
param
param
param
dot 0 3
all-reduce 4
multiply 1 1
add 6 5
multiply 5 5
multiply 2 2
add 9 8
divide 7 10
subtract 0 11
tuple 12 7 10
""")
    crossed = replace(adam, inplace=((1, 12), (0, 10), (2, 7)))
    for graph in (adam, crossed):
        found = find_update(graph, 2, {0, 1, 2}, {5})
        assert found == Update((5,), frozenset({6, 7, 8, 9, 10, 11, 12}), (1, 2), ((12, 5),), False)


def test_nothing_is_said_of_other_steps() -> None:
    graph = chain(MOMENTUM)
    plain = chain("param\nparam\ndot 0 1\nall-reduce 2\nsubtract 0 3\ntuple 4")
    inside = chain(MOMENTUM.replace("tuple 7 6", "dot 4 2\ntuple 7 6 8"))
    assert find_update(plain, 2, {0}, {3}) is None  # no state
    assert find_update(graph, 2, {0}, {4}) is None  # the state is split already
    assert find_update(graph, 2, {0, 1}, set()) is None  # the sum is not over all devices
    assert find_update(graph, 3, {0, 1}, {4}) is None  # eight floats are not split in three
    assert find_update(inside, 2, {0, 1}, {4}) is None  # the sum is an activation too


def test_a_gradient_that_cannot_be_split_stays_in_its_bucket() -> None:
    graph = chain("""
param
param
param
dot 0 2
all-reduce 3
multiply 1 1
add 5 4
subtract 0 6
dot 2 2
all-reduce 8
tuple 7 6 9
""")
    odd = Shape("f32", (7,), (0,))
    nodes = tuple(replace(node, shape=odd) if node.id in (8, 9) else node for node in graph.nodes)
    graph = replace(graph, nodes=nodes)
    found = advised(graph, Strategy((Group((5, 6, 7)),), (Bucket((4, 9), "variadic"),)))
    assert found is not None
    # 100 and 10 for the gradients; 32 + 28 + 5 now; 16 + 5 and 28 + 5 split, and the gather 16 + 5.
    assert (found.step_ns, found.sharded_ns) == (110 + 65 + 120, 110 + 21 + 33 + 60 + 21)


def test_clipping_by_the_norm_takes_another_small_all_reduce() -> None:
    clipped = chain("""
param
param
param
dot 0 2
all-reduce 3
multiply 4 4
reduce 5
broadcast 6
multiply 4 7
add 1 8
subtract 0 9
tuple 10 9
""")
    scalar = Shape("f32")
    nodes = tuple(replace(node, shape=scalar) if node.id == 6 else node for node in clipped.nodes)
    found = find_update(replace(clipped, nodes=nodes), 2, {0, 1}, {4})
    assert found == Update((4,), frozenset({5, 6, 7, 8, 9, 10}), (1,), ((10, 4),), True)


def test_the_advice_in_words() -> None:
    gain = Sharding(2, (1, 2), 3 << 20, 3 << 19, 10_000_000, 8_750_000)
    assert sentence(gain) == (
        "sharding the optimizer state (2 arrays, 3.0 MiB) over the 2 devices would save about 1.25 ms of "
        "10.00 ms and 1.5 MiB a device"
    )
    assert sentence(replace_step(gain, 9_000_000, 9_500_000)).endswith(
        "would cost about 0.50 ms of 9.00 ms and save 1.5 MiB a device"
    )


def replace_step(advice: Sharding, step_ns: int, sharded_ns: int) -> Sharding:
    return structs.replace(advice, step_ns=step_ns, sharded_ns=sharded_ns)
