"""The loop of Algorithm 1 (section 4.5, lines 5 to 24) and its candidates, in compiled code.

It hands back to Python where the cost model must be asked, where there is no room left, and now and then
so that somebody looks at the clock. All three methods propose from the same parent before any of them is
judged, so one question covers the kernels of all; judged they are in turn, as in the paper.

One state is kept, and turned from one candidate into another by taking back and repeating what the
candidates between them changed. Nothing is copied, and no move is made or judged twice. The queue is a
binary heap by cost, then by age.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Ints, address_of, compiled, inner, pointer_to
from disco_hlo.search import layout as at
from disco_hlo.search.costs import Unknown, price_changed
from disco_hlo.search.hashing import Generator, Table, claim, draw, find
from disco_hlo.search.layout import GraphView, Pools, ScratchView, StateView, open_draws, open_views
from disco_hlo.search.moves.table import make_move, random_apply
from disco_hlo.search.ready_queue import ready_queue
from disco_hlo.search.state import Scratch, State, roll_back
from disco_hlo.search.step import Step
from disco_hlo.simulator.contention import Progress, ProgressView, open_progress
from disco_hlo.simulator.costs import MAX_TOTAL
from disco_hlo.simulator.orders import pop, push

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
BETA: Final = 10
HALT: Final = 11
"""Not 0: return at once. Set from outside while the code runs."""
CONTROLS: Final = 12

# What it returns.
PAUSED, ASK, FULL, ENDED, CIRCLE = 0, 1, 2, 3, 4

# Tree.number
CURRENT: Final = 0
"""The candidate that the state is at."""
CANDIDATES: Final = 1
QUEUED: Final = 2
BEST: Final = 3
NUMBERS: Final = 4


class Tree(NamedTuple):
    """Candidates; number 0 is the start."""

    parent: NDArray[np.int64]
    depth: NDArray[np.int64]
    cost_ns: NDArray[np.int64]
    digest: NDArray[np.int64]
    writes_at: NDArray[np.int64]
    """``[candidates + 1]``: candidate c changed the words ``word[writes_at[c] : writes_at[c + 1]]``, ..."""
    word: NDArray[np.int32]
    """... by their place in the state, ..."""
    before: NDArray[np.int64]
    """... which its parent has with these values, ..."""
    after: NDArray[np.int64]
    """... and it itself with these."""
    heap: NDArray[np.int64]
    mark: NDArray[np.int64]
    """``[words of the state]``: the last candidate that changed it."""
    number: NDArray[np.int64]
    """``[NUMBERS]``"""


def new_tree(state: State, candidates: int = 1 << 12, writes: int = 1 << 18) -> Tree:
    """A tree of the start alone, its cost and digest still to be filled in."""
    tree = Tree(
        np.zeros(candidates, np.int64),
        np.zeros(candidates, np.int64),
        np.zeros(candidates, np.int64),
        np.zeros(candidates, np.int64),
        np.zeros(candidates + 1, np.int64),
        np.zeros(writes, np.int32),
        np.zeros(writes, np.int64),
        np.zeros(writes, np.int64),
        np.zeros(candidates, np.int64),
        np.zeros(state.word.size, np.int64),
        np.zeros(NUMBERS, np.int64),
    )
    tree.parent[0] = -1
    tree.number[CANDIDATES] = 1
    return tree


def grown(tree: Tree) -> Tree:
    """The same tree with room for twice as much."""
    rows = {
        name: np.concatenate([row, np.zeros_like(row[: tree.parent.size if name == "writes_at" else row.size])])
        for name, row in tree._asdict().items()
        if name not in ("mark", "number")
    }  # fmt: skip
    return tree._replace(**rows)


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
            go_to(tree, state, _cheapest(tree))
        while control[PROPOSED] < control[WANTED]:  # ends: one more is proposed each time
            i = control[PROPOSED]
            times = draw(source, control[BETA] + 1)
            made[i] = random_apply(g, s, w, source, pool, methods[i], times, moves[i])
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
    elif p.speeds > 1:
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


@inner
def add_candidate(tree: Tree, s: StateView, w: ScratchView, cost_ns: int) -> Any:
    """Keep the state as a child of the current candidate, and queue it; False where there is no room."""
    new = tree.number[CANDIDATES]
    place = tree.writes_at[new]
    if new + 1 >= tree.parent.size or place + w.number[at.LOGGED] > tree.word.size:
        return False
    first: Any = address_of(s.owner)
    for entry in range(w.number[at.LOGGED]):
        address, before = w.log[2 * entry], w.log[2 * entry + 1]
        word = (address - first) // 8
        if tree.mark[word] == new:
            continue
        tree.mark[word] = new
        after = pointer_to(address)[0]
        tree.word[place], tree.before[place], tree.after[place] = word, before, after
        place += before != after
    tree.writes_at[new + 1] = place
    tree.parent[new] = tree.number[CURRENT]
    tree.depth[new] = tree.depth[tree.number[CURRENT]] + 1
    tree.cost_ns[new] = cost_ns
    tree.digest[new] = s.total[at.DIGEST_SUM]
    tree.number[CANDIDATES] = new + 1
    tree.number[QUEUED] = push(tree.heap, tree.number[QUEUED], new, tree.cost_ns, tree.cost_ns)
    return True


@inner
def _cheapest(tree: Tree) -> Any:
    """Take the cheapest candidate out of the queue, which has one; among equals the oldest."""
    first: Any = tree.heap[0]
    tree.number[QUEUED] = pop(tree.heap, tree.number[QUEUED], tree.cost_ns, tree.cost_ns)
    return first


@compiled
def go_to(tree: Tree, state: State, target: int) -> None:
    """Turn the state, which nothing may have been changed in since, into another candidate."""
    word = state.word.ravel()
    up, down = tree.number[CURRENT], target
    path, steps = np.empty(tree.depth[target] + 1, np.int64), 0
    while up != down:  # ends at the root: each pass goes up one of two paths
        if tree.depth[up] >= tree.depth[down]:
            for i in range(tree.writes_at[up], tree.writes_at[up + 1]):
                word[tree.word[i]] = tree.before[i]
            up = tree.parent[up]
        else:
            path[steps] = down
            steps += 1
            down = tree.parent[down]
    for step in range(steps - 1, -1, -1):
        for i in range(tree.writes_at[path[step]], tree.writes_at[path[step] + 1]):
            word[tree.word[i]] = tree.after[i]
    tree.number[CURRENT] = target
