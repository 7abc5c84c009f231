"""The compiled rules agree with ``hlo.legality``, but for scatters, around which the search makes no kernels."""

from __future__ import annotations

from random import Random

from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import empty_state, new_scratch
from disco_hlo.search.arrays.step import build_step
from disco_hlo.search.boundary.entries import refusal_of
from disco_hlo.search.boundary.state import given as kept_of
from disco_hlo.search.boundary.state import own, written_group
from disco_hlo.search.rules.legality import LEGAL
from disco_hlo.search.rules.results import count_results
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.legality import group_refusal
from disco_hlo.plan.baselines import unfused
from tests.search.random_steps import random_step


def results_of(graph: Graph, owned: list[int]) -> list[int]:
    """Owned nodes that somebody else reads, directly or through free nodes."""
    step = build_step(graph)

    def readers(x: int) -> list[int]:
        return step.edge[step.node[at.READERS_AT, x] : step.node[at.READERS_AT, x + 1]].tolist()

    return [
        x
        for x in owned
        if step.node[at.FLAGS, x] & at.RETURNED or any(reader not in owned for reader in readers(x))
    ]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(6, 40),
    size=st.integers(2, 12),
    backend=st.sampled_from(("cpu", "gpu")),
)
def test_the_compiled_rules_refuse_what_the_rules_refuse(
    seed: int, count: int, size: int, backend: str
) -> None:
    random = Random(seed)
    graph = random_step(random, count, backend=backend)
    step, kept = build_step(graph), kept_of(graph, [unfused(graph)])
    assert not kept.groups
    active = [x for x in range(len(graph)) if step.node[at.FLAGS, x] & at.ACTIVE]
    start = random.randrange(len(active))
    owned = sorted(random.sample(active[start : start + 2 * size], min(size, len(active) - start)))
    state, scratch = empty_state(step), new_scratch(step)
    for x in active:
        own(state, [[x]])
    own(state, [owned])
    count_results(step, state, scratch)
    found = refusal_of(step, state, scratch, owned[0])
    if len(owned) == 1:
        assert found == LEGAL
        return
    group = written_group(graph, owned, [])
    expected = group_refusal(graph, {*group.nodes, *group.duplicates}, results_of(graph, owned))
    if any(graph.nodes[x].opcode == "scatter" for x in owned):
        expected = "a scatter stays as XLA left it"
    if any(graph.nodes[x].opcode not in ("dot", "all-reduce") for x in owned):
        assert (found == LEGAL) == (expected is None), (found, expected)
