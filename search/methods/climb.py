"""Local search from one state: random moves, kept while they do not make it worse by more than allowed.

Threshold accepting (Dueck and Scheuer): annealing without random acceptance, in whole numbers. A
kernel whose cost is not known is put on a list; the move is tried again once the cost is there, so
that a cost model is asked for many kernels at a time. Of two moves of one unit the cost is not asked at
once: where the first is kept, the second makes another kernel.
"""

from __future__ import annotations

from typing import Any, Final

from disco_hlo.compiled import Ints, Row, compiled, inner
from disco_hlo.core.reasons import fresh_stamp
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import MAXIMUM_MEMBERS, Scratch, State, has_room, roll_back
from disco_hlo.search.arrays.rng import Generator, draw
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.arrays.table import Table, claim, find
from disco_hlo.search.arrays.views import GraphView, Pools, ScratchView, StateView, open_draws, open_views
from disco_hlo.search.moves.proposals import (
    ONLY_ORDER,
    SLOW_KEY,
    make_move,
    random_move,
    refusal_key,
    remember_refusal,
    second_unit,
)
from disco_hlo.search.moves.refusals import renew, was_refused
from disco_hlo.search.times.pricing import Unknown, has_place, price_changed
from disco_hlo.search.times.running_sums import ORDER_DIGEST, Segments, SegmentsView, catch_up, open_segments
from disco_hlo.search.times.segments import segments_ns
from disco_hlo.simulator.costs import MAX_TOTAL

# Climb.control
LEFT: Final = 0
"""Proposals still to be made."""
THRESHOLD: Final = 1
"""By how much the state may be worse than before a move that is kept."""
CURRENT: Final = 2
"""Score of the state."""
BEST: Final = 3
"""Score of the best state since the log was empty; the log leads back to it."""
EVALUATED: Final = 4
"""Candidates whose score was found, so far."""
DISTINCT: Final = 5
"""How many of them were never seen before."""
LISTED: Final = 6
"""Kernels in ``unknown``."""
WAITING: Final = 7
"""Moves in ``waiting`` that need the cost of one of them."""
RETRIES: Final = 8
"""Moves in ``waiting`` whose costs have been asked for."""
RETRIED: Final = 9
"""How many of those have been tried again."""
ORDERED: Final = 10
"""1: the score is the makespan of the state's order, as ``segments`` has it. 0: it is the sum of all times."""
HALT: Final = 11
"""Not 0: end at once. Set from outside while the code runs."""
CONTROLS: Final = 12

MOST_WAITING: Final = 128
"""Moves that wait at most. Of a longer list more are refused when their turn comes, others having been kept by then."""
COMPUTE_SHARE: Final = 1024


@compiled
def climb(
    step: Step,
    state: State,
    scratch: Scratch,
    generator: Generator,
    pools: Pools,
    weights: Ints,
    prices: Table,
    unknown: Unknown,
    waiting: Ints,
    seen: Table,
    segments: Segments,
    control: Ints,
) -> Any:
    """Make proposals until none are left or the cost model must be asked.

    Args:
        weights: ``[moves]`` int64, how often each is proposed.
        waiting: ``[MOST_WAITING, 3]`` int64.
        seen: table of the scores of candidates by digest; has room for the proposals left.
        segments: up to date with the state where the score is that of its order.

    Returns:
        The number of units listed as unknown; 0 when all proposals are made, the state then being
        the best one.
    """
    g, s, w = open_views(step, state, scratch)
    c = open_segments(segments)
    source, pool = open_draws(generator, pools)
    total = 0
    for weight in weights:
        total += weight
    waits = fresh_stamp(w)
    while True:  # ends: each pass makes one of the proposals left, or tries one of those again that waited
        if control[HALT] != 0:
            control[LISTED] = 0
            break
        if control[RETRIED] < control[RETRIES]:
            row = control[RETRIED]
            kind, a, b = waiting[row, 0], waiting[row, 1], waiting[row, 2]
            control[RETRIED] += 1
        elif (
            control[LEFT] == 0
            or control[WAITING] == MOST_WAITING
            or not has_place(unknown, control[LISTED], 4 * MAXIMUM_MEMBERS)
        ):
            break
        else:
            kind = _random_kind(source, weights, total)
            a, b = random_move(g, s, w, source, pool, kind)
            control[LEFT] -= 1
        if not has_room(g, w):
            roll_back(w, 0)
            control[CURRENT] = control[BEST]
        _consider(g, s, w, kind, a, b, prices, unknown, waiting, seen, c, waits, control)
    if control[LISTED] == 0:
        roll_back(w, 0)
        control[CURRENT] = control[BEST]
    return control[LISTED]


@inner
def _random_kind(generator: Row, weights: Ints, total: int) -> Any:
    drawn = draw(generator, total)
    kind = 0
    while drawn >= weights[kind]:  # ends: the weights add up to more than was drawn
        drawn -= weights[kind]
        kind += 1
    return kind


@inner
def _consider(
    g: GraphView,
    s: StateView,
    w: ScratchView,
    kind: int,
    a: int,
    b: int,
    prices: Table,
    unknown: Unknown,
    waiting: Ints,
    seen: Table,
    c: SegmentsView,
    waits: int,
    control: Ints,
) -> None:
    """Try one move. What is still to be priced waits, its units marked in row ``awaited`` with ``waits``; and so does,
    untried, what comes to the same units after it."""
    if a < 0:
        return
    other = second_unit(s, kind, b)
    waiting_too = not ONLY_ORDER[kind] and (
        w.awaited[s.owner[a]] == waits or (other >= 0 and w.awaited[other] == waits)
    )
    if waiting_too and SLOW_KEY[kind]:
        _wait(waiting, kind, a, b, control)
        return
    key, _ = refusal_key(g, s, w, kind, a, b)
    if was_refused(w, key):
        return
    if waiting_too:
        _wait(waiting, kind, a, b, control)
        return
    mark = w.number[at.LOGGED]
    w.number[at.FELL] = 0
    if not make_move(g, s, w, kind, a, b):
        remember_refusal(g, s, w, kind, a, b)
        return
    changes = w.number[at.CHANGES]
    control[LISTED] = price_changed(g, s, w, prices, unknown, control[LISTED], False)
    if w.number[at.CHANGES] != 0:
        roll_back(w, mark)
        for i in range(w.number[at.CHANGES]):
            w.awaited[s.owner[w.changed[i]]] = waits
        w.number[at.CHANGES] = 0
        _wait(waiting, kind, a, b, control)
        return
    if s.total[at.COMPUTE_NS] + s.total[at.TRANSFER_NS] > MAX_TOTAL:  # no order of it can be simulated
        roll_back(w, mark)
        return
    if control[ORDERED]:
        catch_up(g, s, w, c, mark)
    score = _score(g, s, c, seen, control)
    if score > control[CURRENT] + control[THRESHOLD]:
        roll_back(w, mark)
        return
    control[CURRENT] = score
    if changes != 0:
        renew(s, w, changes)
    if score < control[BEST]:
        control[BEST] = score
        w.number[at.LOGGED] = 0


@inner
def _wait(waiting: Ints, kind: int, a: int, b: int, control: Ints) -> None:
    if control[WAITING] < MOST_WAITING:
        row = control[WAITING]
        waiting[row, 0], waiting[row, 1], waiting[row, 2] = kind, a, b
        control[WAITING] += 1


@inner
def _score(g: GraphView, s: StateView, c: SegmentsView, seen: Table, control: Ints) -> Any:
    """Score of the state; looked up where the candidate was seen before."""
    control[EVALUATED] += 1
    digest = s.total[at.DIGEST_SUM]
    if control[ORDERED]:
        digest += c.number[ORDER_DIGEST]
    slot = find(seen, digest)
    if slot >= 0:
        return seen.value[slot, 0]
    control[DISTINCT] += 1
    score = s.total[at.COMPUTE_NS] + s.total[at.TRANSFER_NS]
    if control[ORDERED]:
        # Of two orders that take equally long, the one with less compute leaves more to be gained.
        score = segments_ns(g, s, c) + s.total[at.COMPUTE_NS] // COMPUTE_SHARE
    seen.value[claim(seen, digest), 0] = score
    return score
