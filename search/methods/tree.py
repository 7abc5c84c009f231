"""The candidates of Algorithm 1: what each changed in its parent, and which comes next.

One state is kept, and turned from one candidate into another by taking back and repeating what the
candidates between them changed. Nothing is copied, and no move is made or judged twice. The queue is a
binary heap by cost, then by age.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import address_of, compiled, inner, pointer_to
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import State
from disco_hlo.search.arrays.views import ScratchView, StateView

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
    _push(tree, new)
    return True


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


@inner
def _is_first(tree: Tree, a: int, b: int) -> Any:
    return tree.cost_ns[a] < tree.cost_ns[b] or (tree.cost_ns[a] == tree.cost_ns[b] and a < b)


@inner
def _push(tree: Tree, candidate: int) -> None:
    place = tree.number[QUEUED]
    tree.number[QUEUED] += 1
    while place and _is_first(tree, candidate, tree.heap[(place - 1) // 2]):  # ends: place is halved
        tree.heap[place] = tree.heap[(place - 1) // 2]
        place = (place - 1) // 2
    tree.heap[place] = candidate


@inner
def pop(tree: Tree) -> Any:
    """The cheapest candidate of the queue, which has one; among equals the oldest."""
    first: Any = tree.heap[0]
    tree.number[QUEUED] -= 1
    count = tree.number[QUEUED]
    last, place = tree.heap[count], 0
    while 2 * place + 1 < count:  # ends: place doubles
        child = 2 * place + 1
        if child + 1 < count and _is_first(tree, tree.heap[child + 1], tree.heap[child]):
            child += 1
        if not _is_first(tree, tree.heap[child], last):
            break
        tree.heap[place] = tree.heap[child]
        place = child
    tree.heap[place] = last
    return first
