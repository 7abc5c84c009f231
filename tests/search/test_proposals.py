"""What is drawn may be proposed; what is foreseen to be refused is refused when it is made."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from disco_hlo.compiled import compiled
from disco_hlo.plan.plan import Group, Strategy
from disco_hlo.plan.read import read
from disco_hlo.plan.variants import unfused
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import seeded
from disco_hlo.search.kernels import (
    adopt_orphans,
    all_stand,
    join,
    most_owned,
    recompute,
)
from disco_hlo.search.layout import open_draws, open_views
from disco_hlo.search.moves.duplicate import _read_by, _read_of, needed
from disco_hlo.search.moves.refusals import never_joined, never_recomputed
from disco_hlo.search.moves.table import random_move
from disco_hlo.search.ordering import mark_copies, predecessors, settle
from disco_hlo.search.state import copy_state, new_scratch, roll_back
from tests.captured import captured
from tests.graphs import graph_of
from tests.machines import GPU
from tests.search.states import (
    DUPLICATE,
    FUSE,
    REORDER,
    SIBLING,
    Bench,
    check_topological,
    moved,
)


@compiled
def drawn(step: Any, state: Any, scratch: Any, generator: Any, pools: Any, method: Any, pairs: Any) -> None:
    """Fill ``pairs`` with arguments of one kind of move as a climb draws them; -1 where none were found."""
    g, s, w = open_views(step, state, scratch)
    source, pool = open_draws(generator, pools)
    for i in range(pairs.shape[0]):
        pairs[i, 0], pairs[i, 1] = random_move(method, g, s, w, source, pool)


@compiled
def waited_for(step: Any, state: Any, scratch: Any, unit: Any, out: Any) -> Any:
    """The fusible units that a unit waits for; how many."""
    g, s, w = open_views(step, state, scratch)
    count = 0
    for i in range(predecessors(g, s, w, unit, w.neighbours)):
        if g.flags[w.neighbours[i]] & at.FUSIBLE:
            out[count] = w.neighbours[i]
            count += 1
    return count


@compiled
def passed(
    step: Any, state: Any, scratch: Any, consumer: Any, producer: Any, by_producer: Any, out: Any
) -> Any:
    """What one unit reads of another, looked for among what either of them has; how much."""
    g, s, w = open_views(step, state, scratch)
    stamp = mark_copies(s, w, consumer)
    if by_producer:
        count = _read_by(g, s, w, consumer, producer, stamp)
    else:
        count = _read_of(g, s, w, consumer, producer, stamp)
    for i in range(count):
        out[i] = w.needed[i]
    return count


def pools_of(bench: Bench) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What a climb draws from, without gradients."""
    fusible = np.flatnonzero(bench.step.node[at.FLAGS, : len(bench.graph)] & at.FUSIBLE)
    return fusible.astype(np.int64), np.zeros(0, np.int64)


def moved_bench(seed: int) -> tuple[Bench, Random]:
    return moved(seed, 40, GPU, moves=30, methods=6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_producer_is_drawn_and_nothing_else(seed: int) -> None:
    bench, random = moved_bench(seed)
    pools, generator = pools_of(bench), seeded(seed)
    for _ in range(3):
        pairs = np.zeros((3000, 2), np.int64)
        drawn(bench.step, bench.state, bench.scratch, generator, pools, FUSE, pairs)
        found = {(int(a), int(b)) for a, b in pairs if a != -1}
        expected = set()
        out = np.zeros(len(bench.graph), np.int64)
        for head in bench.heads():
            if bench.step.node[at.FLAGS, head] & at.FUSIBLE:
                count = waited_for(bench.step, bench.state, bench.scratch, head, out)
                expected |= {(head, x) for x in out[:count].tolist()}
        assert found <= expected
        # Not listed: what recomputes an op that must run before the unit; and parts of what was cut in two since.
        assert 4 * len(found) >= 3 * len(expected)
        bench.random_moves(random, 5, 6)  # lists made before it are used after it


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_what_a_unit_reads_of_another_is_found_from_either_side(seed: int) -> None:
    bench, _ = moved_bench(seed)
    out = np.zeros(len(bench.graph), np.int64)
    passing = 0
    for consumer in bench.heads():
        for producer in bench.heads():
            if consumer == producer:
                continue
            found = []
            for by_producer in (False, True):
                count = passed(bench.step, bench.state, bench.scratch, consumer, producer, by_producer, out)
                found.append(sorted(out[:count].tolist()))
            assert found[0] == found[1]
            passing += len(found[0])
    assert passing > 0


def drawn_places(bench: Bench, seed: int, count: int) -> list[tuple[int, int]]:
    """Units and slots as a climb draws them to move the one to the other; (-1, -1) where none was found."""
    pairs = np.zeros((count, 2), np.int64)
    drawn(bench.step, bench.state, bench.scratch, seeded(seed), pools_of(bench), REORDER, pairs)
    return [(int(unit), int(slot)) for unit, slot in pairs]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_unit_is_moved_to_the_place_of_another_that_it_may_pass(seed: int) -> None:
    bench, _ = moved_bench(seed)
    order = bench.state.word[at.ORDER].copy()
    for unit, slot in set(drawn_places(bench, seed, 300)) - {(-1, -1)}:
        assert not bench.step.node[at.FLAGS, unit] & at.COLLECTIVE
        assert order[slot] not in (-1, unit)
        before = copy_state(bench.state)
        bench.scratch.number[at.LOGGED] = 0
        assert bench.move(REORDER, unit, slot)
        check_topological(bench)
        bench.state = before


def test_units_are_moved_where_most_slots_are_empty_the_longest_most_often() -> None:
    """Nine of ten proposals were of an empty slot here, and 19 of 20 on one of the captured steps."""
    alone = "\n".join("negate 0" for _ in range(6))
    large = "\n".join(f"add {x} {x}" for x in (0, *range(7, 67)))
    graph = graph_of(f"param\n{alone}\n{large}\ntuple 1 2 3 4 5 6 67", backend="gpu")
    bench = Bench(graph, GPU, start=Strategy((Group(tuple(range(7, 68))),)))
    found = drawn_places(bench, 1, 2000)
    assert len(bench.heads()) == 7
    assert {unit for unit, _ in found} - {-1} == set(bench.heads())
    assert found.count((-1, -1)) < 400
    times_ns = bench.state.times[:, at.MAIN]
    longest = max(bench.heads(), key=lambda unit: times_ns[unit])
    assert sum(unit == longest for unit, _ in found) > 2 * 2000 / 7


def test_a_step_of_buckets_alone_has_no_unit_to_move() -> None:
    bench = Bench(graph_of("param\nall-reduce 0\ntuple 1", backend="gpu"), GPU)
    assert set(drawn_places(bench, 1, 20)) == {(-1, -1)}


KINDS = (FUSE, SIBLING, DUPLICATE)
FORESEEN, WRONGLY, MISSED, STANDING = range(4)


@compiled
def make_anyway(step: Any, state: Any, scratch: Any, apart: Any, kind: Any, a: Any, b: Any) -> Any:
    """Make what a proposal asks for, whether it is foreseen to be refused or not; keep it if it stands and was not.

    Working space ``apart`` is foresight's own, so that no verdict of one is taken for the other. Returns whether it was
    foreseen, and stands, as ``FORESEEN``, ..; -1 where there was nothing to make.
    """
    g, s, w = open_views(step, state, scratch)
    _, _, f = open_views(step, state, apart)
    w.number[at.LOGGED] = w.number[at.CHANGES] = 0
    low = s.place[b]
    if not g.flags[a] & g.flags[b] & at.FUSIBLE or low > s.place[a]:
        return -1
    if kind == DUPLICATE:
        added, members = needed(g, s, w, a, b)
        foreseen = never_recomputed(g, s, w, a, members, added)  # it reads what ``needed`` wrote
        if added == 0 or not recompute(g, s, w, a, w.needed, added):
            roll_back(w, 0)
            return -1
        unit, first = adopt_orphans(g, s, w, a)
    else:
        if s.count[a] + s.count[b] > most_owned(g):
            return -1
        foreseen = never_joined(g, s, f, a, b)
        unit, first = adopt_orphans(g, s, w, join(g, s, w, b, a))
    stands = all_stand(g, s, w, 0)
    settled = stands and settle(g, s, w, unit, min(low, first), s.place[unit])
    if not settled or foreseen:
        roll_back(w, 0)
    return 2 * (1 - foreseen) + stands


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_foreseen_to_be_refused_is_refused_when_it_is_made(fused: bool) -> None:
    source = captured("h200_models/rnnlm")
    bench = Bench(source.graph, GPU, start=read(source) if fused else unfused(source.graph))
    pools, generator, random = pools_of(bench), seeded(1), Random(1)
    fates, apart = np.zeros((len(KINDS), 4), np.int64), new_scratch(bench.step)
    pair = np.zeros((1, 2), np.int64)
    for _ in range(20_000):
        row = random.randrange(len(KINDS))
        drawn(bench.step, bench.state, bench.scratch, generator, pools, KINDS[row], pair)
        if pair[0, 0] >= 0:
            fate = make_anyway(bench.step, bench.state, bench.scratch, apart, KINDS[row], *pair[0])
            fates[row, fate] += fate >= 0
    assert not np.any(fates[:, WRONGLY])
    assert np.all(fates[:, FORESEEN] > 0) or not fused
    assert np.all(fates[:, STANDING] > 0)
