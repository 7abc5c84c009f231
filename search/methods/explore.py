"""The loop of Algorithm 1 (section 4.5, lines 5 to 24), in compiled code.

It hands back to Python where the cost model must be asked, where there is no room left, and now and then
so that somebody looks at the clock. All three methods propose from the same parent before any of them is
judged, so one question covers the kernels of all; judged they are in turn, as in the paper.
"""

from __future__ import annotations

from typing import Any, Final

from disco_hlo.compiled import Ints, compiled, inner
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import Scratch, State, roll_back
from disco_hlo.search.arrays.rng import Generator, draw
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.arrays.table import Table, claim, find
from disco_hlo.search.arrays.views import GraphView, Pools, ScratchView, StateView, open_draws, open_views
from disco_hlo.search.methods.tree import BEST, CANDIDATES, QUEUED, Tree, add_candidate, go_to, pop
from disco_hlo.search.moves.proposals import make_move, random_apply
from disco_hlo.search.times.pricing import Unknown, price_changed
from disco_hlo.search.times.ready_queue import ready_queue
from disco_hlo.simulator.contention import Progress, ProgressView, open_progress
from disco_hlo.simulator.costs import MAX_TOTAL

# control
LEFT: Final = 0
"""Candidates of the queue to explore before returning."""
EVALUATED: Final = 1
UNCHANGED: Final = 2
"""Candidates in a row that did not improve the best."""
MOST_UNCHANGED: Final = 3
BUDGET: Final = 4
"""Candidates to evaluate in all."""
WANTED: Final = 5
"""Methods that propose from the current parent."""
PROPOSED: Final = 6
"""Methods that have."""
JUDGED: Final = 7
"""How many of their candidates are done with."""
LISTED: Final = 8
"""Kernels in ``unknown``."""
TRACED: Final = 9
"""Entries of ``trace``."""
TRIES: Final = 10
BETA: Final = 11
HALT: Final = 12
"""Not 0: return at once. Set from outside while the code runs."""
CONTROLS: Final = 13

# What it returns.
PAUSED, ASK, FULL, ENDED, CIRCLE = 0, 1, 2, 3, 4


@compiled
def explore(
    step: Step,
    state: State,
    scratch: Scratch,
    generator: Generator,
    pools: Pools,
    methods: Ints,
    alpha: float,
    prices: Table,
    unknown: Unknown,
    progress: Progress,
    seen: Table,
    started: Ints,
    tree: Tree,
    made: Ints,
    moves: Ints,
    trace: Ints,
    control: Ints,
) -> Any:
    """Explore candidates of the queue.

    Args:
        methods: ``[methods]``, in the order in which each step applies them.
        seen: costs by digest; has room for all candidates of ``LEFT`` parents.
        made: ``[methods]``, how many of ``moves`` (``[methods, beta, 3]``) each method made.
        trace: ``[.., 2]``, receives (evaluation, cost) of every improvement of this call.

    Returns:
        ``PAUSED``; ``ASK``: the price of ``LISTED`` kernels is needed; ``FULL``: the tree has no room;
        ``ENDED``: nothing is left to explore, or nothing improved for so long, or the budget is spent.
    """
    g, s, w = open_views(step, state, scratch)
    p = open_progress(progress)
    source, pool = open_draws(generator, pools)
    # Ends: each pass judges one of the candidates that are wanted of a parent, of which so many are left.
    while True:
        if control[HALT] != 0:
            return PAUSED
        if control[JUDGED] == control[WANTED]:
            control[WANTED] = min(methods.size, control[BUDGET] - control[EVALUATED])
            control[PROPOSED] = control[JUDGED] = 0
            if control[WANTED] <= 0 or control[UNCHANGED] >= control[MOST_UNCHANGED]:
                control[WANTED] = 0
                return ENDED
            if tree.number[QUEUED] == 0 or control[LEFT] == 0:
                control[WANTED] = 0
                return ENDED if tree.number[QUEUED] == 0 else PAUSED
            control[LEFT] -= 1
            go_to(tree, state, pop(tree))
        while control[PROPOSED] < control[WANTED]:  # ends: one more is proposed each time
            i = control[PROPOSED]
            times = draw(source, control[BETA] + 1)
            made[i] = random_apply(g, s, w, source, pool, methods[i], times, control[TRIES], moves[i])
            control[PROPOSED] += 1
            control[LISTED] = price_changed(g, s, w, prices, unknown, control[LISTED], True)
            if w.number[at.CHANGES] == 0 and control[JUDGED] == i:
                found = _judge(g, s, w, alpha, p, seen, started, tree, trace, control)
                if found != PAUSED:
                    return found
            roll_back(w, 0)
            w.number[at.CHANGES] = 0
        if control[LISTED]:
            return ASK
        while control[JUDGED] < control[PROPOSED]:  # ends: one more is judged each time
            i = control[JUDGED]
            for k in range(made[i]):
                make_move(g, s, w, moves[i, k, 0], moves[i, k, 1], moves[i, k, 2])
            control[LISTED] = price_changed(g, s, w, prices, unknown, 0, True)
            if control[LISTED]:
                roll_back(w, 0)
                w.number[at.CHANGES] = 0
                return ASK
            found = _judge(g, s, w, alpha, p, seen, started, tree, trace, control)
            if found != PAUSED:
                return found


@inner
def _judge(
    g: GraphView,
    s: StateView,
    w: ScratchView,
    alpha: float,
    p: ProgressView,
    seen: Table,
    started: Ints,
    tree: Tree,
    trace: Ints,
    control: Ints,
) -> Any:
    """Lines 12 to 22 for one candidate, which the state is left without: ``PAUSED``, ``FULL`` or ``CIRCLE``."""
    cost = _cost_ns(g, s, w, p, seen, started)
    best = tree.cost_ns[tree.number[BEST]]
    kept = cost < best or cost <= alpha * best
    if cost < 0 or (kept and not add_candidate(tree, s, w, cost)):
        roll_back(w, 0)
        return CIRCLE if cost < 0 else FULL
    roll_back(w, 0)
    control[JUDGED] += 1
    control[EVALUATED] += 1
    control[UNCHANGED] += 1
    if cost < best:
        tree.number[BEST] = tree.number[CANDIDATES] - 1
        control[UNCHANGED] = 0
        trace[control[TRACED], 0], trace[control[TRACED], 1] = control[EVALUATED], cost
        control[TRACED] += 1
    return PAUSED


@inner
def _cost_ns(g: GraphView, s: StateView, w: ScratchView, p: ProgressView, seen: Table, started: Ints) -> Any:
    """Cost of a priced state; looked up where it was evaluated before. -1 where units wait for each other."""
    digest = s.total[at.DIGEST_SUM]
    slot = find(seen, digest)
    if slot >= 0:
        return seen.value[slot, 0]
    end_ns = s.total[at.COMPUTE_NS]  # where everything runs on one resource, its times just add up
    if end_ns + s.total[at.TRANSFER_NS] > MAX_TOTAL:  # more than can be simulated
        end_ns += s.total[at.TRANSFER_NS]
    elif p.channels > 0:
        end_ns, _ = ready_queue(g, s, w, p, started)
    seen.value[claim(seen, digest), 0] = end_ns
    return end_ns


@compiled
def evaluate(
    step: Step, state: State, scratch: Scratch, progress: Progress, seen: Table, started: Ints
) -> Any:
    """Cost in ns and digest of a priced state; looked up where it was evaluated before."""
    g, s, w = open_views(step, state, scratch)
    return _cost_ns(g, s, w, open_progress(progress), seen, started), s.total[at.DIGEST_SUM]
