"""Refused proposals: known the second time, where they were refused."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_hlo.compiled import compiled
from disco_hlo.search import layout as at
from disco_hlo.search.layout import open_views
from disco_hlo.search.moves.refusals import renew, was_refused
from disco_hlo.search.moves.table import make_move, refusal_key, remember_refusal
from tests.machines import GPU
from tests.search.entries import undo
from tests.search.kinds import ABSORB, DUPLICATE, FUSE, UNFUSE
from tests.search.random_steps import random_step
from tests.search.states import Bench


@compiled
def proposed(step: Any, state: Any, scratch: Any, kind: Any, a: Any, b: Any) -> Any:
    """Propose a move as a climb does: whether its refusal was known, whether it was made, whether a kernel was the
    reason if not."""
    g, s, w = open_views(step, state, scratch)
    key, _ = refusal_key(g, s, w, kind, a, b)
    known = was_refused(w, key)
    w.number[at.FELL] = 0
    made = make_move(g, s, w, kind, a, b)
    if not made:
        remember_refusal(g, s, w, kind, a, b)
    return known, made, w.number[at.FELL] != 0


@compiled
def keep(step: Any, state: Any, scratch: Any) -> None:
    """Keep the moves since the changes were last looked at."""
    _, s, w = open_views(step, state, scratch)
    renew(s, w, w.number[at.CHANGES])


def fresh_bench(seed: int) -> Bench:
    bench = Bench(random_step(Random(seed), 40, backend="gpu"), GPU)
    bench.state.word[at.MOMENT] = 0
    return bench


def proposals(bench: Bench) -> list[tuple[int, int, int]]:
    heads = bench.heads()
    pairs = [(kind, a, b) for kind in (FUSE, DUPLICATE) for a in heads for b in heads if a != b]
    taken = [(UNFUSE, int(bench.state.word[at.OWNER, x]), x) for x in range(len(bench.graph))]
    return pairs + [move for move in taken if move[1] != -1] + [(ABSORB, a, -1) for a in heads]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_is_known_to_be_refused_is_refused_in_that_state(seed: int) -> None:
    bench, random = fresh_bench(seed), Random(seed)
    for _ in range(6):
        bench.scratch.refused[:] = 0  # a change of further units may make legal what was refused before it
        moves = proposals(bench)
        for _ in range(2):
            for move in moves:
                mark = int(bench.scratch.number[at.LOGGED])
                known, made, _ = proposed(bench.step, bench.state, bench.scratch, *move)
                assert not (known and made)
                undo(bench.step, bench.state, bench.scratch, mark)
        for move in random.sample(moves, len(moves)):
            if proposed(bench.step, bench.state, bench.scratch, *move)[1]:
                keep(bench.step, bench.state, bench.scratch)
                bench.costs.price_changed(bench.state, bench.scratch)
                break


def test_a_proposal_whose_kernel_may_not_stand_is_built_once() -> None:
    bench = fresh_bench(3)
    fell = 0
    for kind, a, b in proposals(bench):
        if kind not in (FUSE, DUPLICATE):
            continue
        mark = int(bench.scratch.number[at.LOGGED])
        known, made, by_kernel = proposed(bench.step, bench.state, bench.scratch, kind, a, b)
        undo(bench.step, bench.state, bench.scratch, mark)
        if not made and by_kernel:
            fell += 1
            assert not known
            assert proposed(bench.step, bench.state, bench.scratch, kind, a, b)[0]
    assert fell > 0


def test_undoing_a_change_brings_back_what_was_refused_before_it() -> None:
    bench = fresh_bench(3)
    moves = [move for move in proposals(bench) if move[0] == FUSE]
    for move in moves:
        mark = int(bench.scratch.number[at.LOGGED])
        proposed(bench.step, bench.state, bench.scratch, *move)
        undo(bench.step, bench.state, bench.scratch, mark)
    before = bench.scratch.refused.copy()
    first = next(m for m in moves if proposed(bench.step, bench.state, bench.scratch, *m)[1])
    keep(bench.step, bench.state, bench.scratch)
    assert bench.state.word[at.MOMENT].any()
    undo(bench.step, bench.state, bench.scratch, 0)
    assert not bench.state.word[at.MOMENT].any()
    assert np.array_equal(before, bench.scratch.refused), first
