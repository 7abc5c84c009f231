"""What the compiled rules say of a unit is what they say, as plain Python, of the kernel that is written for it."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.core.legality import group_refusal
from disco_hlo.core.reasons import LEGAL, TOO_MANY_EVALUATIONS, sentence
from disco_hlo.hlo.graph import Graph, Kind, Node, Shape, kernel_nodes
from disco_hlo.plan.variants import unfused
from disco_hlo.search import layout as at
from disco_hlo.search.kernels import STAYS_ALONE, count_results
from disco_hlo.search.state import empty_state, new_scratch
from disco_hlo.search.step import build_step, is_active
from disco_hlo.search.strategies import given as kept_of
from disco_hlo.search.strategies import own
from tests.search.states import refusal_of
from tests.search.steps import random_step


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


def both(graph: Graph, owned: list[int]) -> tuple[int, str | None, str | None]:
    """Why nodes may not be one kernel: the number and sentence of the compiled rules, and that of the plain ones."""
    step, kept = build_step(graph), kept_of(graph, [unfused(graph)])
    assert not kept.groups
    state, scratch = empty_state(step), new_scratch(step)
    for x in np.flatnonzero(step.node[at.FLAGS, : len(graph)] & at.ACTIVE).tolist():
        own(state, [[x]])
    own(state, [owned])
    count_results(step, state, scratch)
    plain = group_refusal(graph, kernel_nodes(graph, owned), results_of(graph, owned))
    found = refusal_of(step, state, scratch, owned[0])
    said = (
        sentence(graph, found, scratch.row[at.row_numbers(at.ScratchView)["about"], :3].tolist())
        if found > LEGAL
        else None
    )
    return found, said, plain


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(6, 40),
    size=st.integers(2, 12),
    backend=st.sampled_from(("cpu", "gpu")),
)
def test_a_unit_is_refused_for_what_its_kernel_is_refused_for(
    seed: int, count: int, size: int, backend: str
) -> None:
    random = Random(seed)
    graph = random_step(random, count, backend=backend)
    active = [node.id for node in graph.nodes if is_active(node)]
    start = random.randrange(len(active))
    owned = sorted(random.sample(active[start : start + 2 * size], min(size, len(active) - start)))
    found, said, plain = both(graph, owned)
    if len(owned) == 1:
        assert found == LEGAL
    elif found == STAYS_ALONE:  # around scatters the search makes no kernels
        assert plain is not None or any(graph.nodes[x].opcode == "scatter" for x in owned)
    else:
        assert said == plain


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), backend=st.sampled_from(("cpu", "gpu")))
def test_compiled_rules_count_alike_what_a_kernel_evaluates(seed: int, backend: str) -> None:
    random = Random(seed)
    graph = reduced_again_and_again(random, backend)
    found, said, plain = both(graph, list(range(1, len(graph) - 1)))
    assert said == plain
    assert (found == TOO_MANY_EVALUATIONS) == ("one kernel would read" in (plain or ""))


def reduced_again_and_again(random: Random, backend: str) -> Graph:
    """A matrix reduced, spread out, joined and seen through windows, one after the other."""
    nodes = [Node(0, "parameter", matrix(random), (), Kind.PARAMETER, "parameter")]
    for i in range(1, random.randrange(3, 9)):
        last = nodes[-1].shape
        opcode = random.choice(
            ("reduce", "reduce-window", "exponential", "concatenate", "add")
            if len(last.dims) == 2
            else ("broadcast", "exponential")
        )
        shape, flops, operands = last, 0, (i - 1,)
        if opcode == "reduce":
            shape = Shape("f32", last.dims[1:], (0,))
        if opcode == "broadcast":
            shape = Shape("f32", (random.choice((1, 40, 900)), *last.dims), (1, 0))
        if opcode == "concatenate":
            shape, operands = Shape("f32", (2 * last.dims[0], last.dims[1]), (1, 0)), (i - 1, i - 1)
        if opcode == "reduce-window":
            flops = shape.element_count * (random.choice((2, 70, 900)) - 1)
        if opcode == "add":
            operands = (i - 1, i - 1)
        dimensions = (1,) if opcode == "broadcast" else (0,)
        key = f"{opcode} {shape} {last} {flops}"
        nodes.append(Node(i, opcode, shape, operands, Kind.FUSIBLE, key, flops, dimensions=dimensions))
    nodes.append(Node(len(nodes), "tuple", Shape("tuple"), (len(nodes) - 1,), Kind.FREE, "tuple"))
    return Graph(tuple(nodes), len(nodes) - 1, (), backend, "jit_step", "f00d")


def matrix(random: Random) -> Shape:
    return Shape("f32", (random.choice((1, 8, 300)), random.choice((1, 40, 900))), (1, 0))
