"""Random fused ops: all legal, all like what a search would make, and the same for the same seed."""

import pytest

from disco_hlo.core.legality import group_refusal
from disco_hlo.estimator import samples
from disco_hlo.estimator.samples import FusedOp, Grower, is_plain, single_ops
from disco_hlo.hlo.graph import external_reads, readers
from tests.estimator.steps import transformer
from tests.graphs import graph_of

OWN = [FusedOp(o.nodes, o.results) for o in transformer().origins if o.role == "fusion" and o.results]


def drawn(seed: int, count: int = 60, most_members: int = 48) -> list[FusedOp]:
    grower = Grower(transformer().graph, OWN, most_members, seed)
    return [op for op in (grower.draw() for _ in range(count)) if op is not None]


@pytest.mark.parametrize("seed", range(4))
def test_every_sample_is_a_legal_kernel_of_two_ops_or_more(seed: int) -> None:
    graph = transformer().graph
    ops = drawn(seed)
    assert len(ops) > 40
    for op in ops:
        assert group_refusal(graph, op.members, op.results) is None
        assert is_plain(graph, op.members, op.results)
        assert sum(graph.nodes[m].opcode != "bitcast" for m in op.members) >= 2
        assert list(op.members) == sorted(op.members)
        assert list(op.results) == sorted(op.results)


def test_nothing_a_sample_reads_depends_on_what_it_owns() -> None:
    graph = transformer().graph
    for op in drawn(5):
        after: set[int] = set()
        for node in graph.nodes[min(op.results) :]:
            if node.id in op.results or not after.isdisjoint(node.operands):
                after.add(node.id)
        assert after.isdisjoint(external_reads(graph, op.members))


def test_the_same_seed_draws_the_same_samples() -> None:
    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_duplicated_predecessors_keep_their_values_to_themselves() -> None:
    """An op that others read too is either a result or recomputed, and both happen."""
    graph = transformer().graph
    returned = copied = 0
    for op in drawn(6, 200):
        for member in op.members:
            is_read_outside = any(reader not in op.members for reader in readers(graph, member))
            returned += is_read_outside and member in op.results and len(op.results) > 1
            copied += is_read_outside and member not in op.results
    assert returned > 10
    assert copied > 10


def test_samples_reach_the_largest_size_and_not_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "FROM_XLA", 0.0)
    small = drawn(1, 100, 6)
    without_bitcasts = [
        sum(transformer().graph.nodes[m].opcode != "bitcast" for m in op.members) for op in small
    ]
    assert max(without_bitcasts) == 6


def test_kernels_of_xla_are_grown_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a chance to grow, what comes out is what XLA formed."""
    monkeypatch.setattr(samples, "FROM_XLA", 1.0)
    ops = drawn(2, 40, 2)
    known = {frozenset(op.members) for op in OWN}
    graph = transformer().graph
    grown = [frozenset(m for m in op.members if graph.nodes[m].opcode != "bitcast") for op in ops]
    bare = {frozenset(m for m in members if graph.nodes[m].opcode != "bitcast") for members in known}
    assert grown
    assert all(members in bare for members in grown if len(members) > 2)


def test_single_ops_are_one_for_each_cost_key() -> None:
    ops = single_ops(transformer().graph)
    keys = [transformer().graph.nodes[op.members[0]].key for op in ops]
    assert len(keys) == len(set(keys)) > 100
    assert all(op.members == op.results for op in ops)
    assert {op.kind for op in ops} == {"loop", "input"}


def test_kernels_that_overwrite_a_buffer_are_no_samples() -> None:
    """A scatter in a pack wrote into the input that others read (two of them made XLA abort)."""
    graph = graph_of("f32[8] param; f32[8] while 0; f32[8] add 1 0; tuple 2")
    assert is_plain(graph, {2}, {2})
    assert not is_plain(graph, {1, 2}, {2})


def test_kernels_that_read_or_return_tuples_are_no_samples() -> None:
    graph = graph_of("(f32[4],f32[4]) param; (f32[4],f32[4]) reduce 0; f32[4] add 1 1")
    assert not is_plain(graph, {1}, {1})
    assert not is_plain(graph, {2}, {2})
