"""The strategy being searched, as arrays that compiled code changes in place and can change back.

Every write to the strategy goes through :func:`put`, which logs what stood there before; so a move
that turns out to be illegal, and a candidate that was only looked at, are undone in the time they
took (:func:`roll_back`), and a state is copied in one piece.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.search import layout as at
from disco_hlo.search.jit import compiled
from disco_hlo.search.step import Step

MAXIMUM_MEMBERS: Final = 512
"""Most nodes in one unit. With it one move writes at most ``_MOVE_WORDS`` words and 16 per node."""
_MOVE_WORDS: Final = 1 << 20
_NODE_WORDS: Final = 64


class State(NamedTuple):
    """A strategy on a step. See ``layout`` for the rows."""

    word: NDArray[np.int32]
    """``[STATE_ROWS, nodes]``"""
    time_ns: NDArray[np.int64]
    """``[TIME_ROWS, nodes]``: at the head of a unit, how long it runs and where."""
    digest: NDArray[np.uint64]
    """``[nodes]``: at the head of a unit, the hash of what it executes."""


class Scratch(NamedTuple):
    """Working space of one search thread."""

    row: NDArray[np.int32]
    """``[SCRATCH_ROWS, nodes + 1]``"""
    number: NDArray[np.int64]
    log: NDArray[np.int32]
    """``[2, ...]``: flat position in ``State.word`` and what stood there."""
    changed: NDArray[np.int32]
    """Nodes whose units may have other members or results than when they were last looked at."""


def new_scratch(step: Step) -> Scratch:
    """Working space for states of ``step``."""
    width = max(step.node.shape[1], at.TOTALS)
    log = np.zeros((2, _MOVE_WORDS + _NODE_WORDS * width), np.int32)
    changed = np.zeros(_NODE_WORDS * width + 4096, np.int32)
    return Scratch(np.zeros((at.SCRATCH_ROWS, width), np.int32), np.zeros(at.NUMBERS, np.int64), log, changed)


def empty_state(step: Step) -> State:
    """A state of the right size without any unit."""
    count = step.node.shape[1] - 1
    width = max(count, at.TOTALS)
    word = np.full((at.STATE_ROWS, width), -1, np.int32)
    word[at.COUNT] = 0
    word[at.TOTAL] = 0
    word[at.NEXT_OF_UNIT] = np.arange(1, width + 1)
    word[at.NEXT_OF_UNIT, -1] = -1
    return State(word, np.zeros((at.TIME_ROWS, width), np.int64), np.zeros(width, np.uint64))


def copy_state(state: State) -> State:
    """An independent copy."""
    return State(state.word.copy(), state.time_ns.copy(), state.digest.copy())


@compiled
def put(state: Any, scratch: Any, row: Any, x: Any, value: Any) -> Any:
    """Write one word of the state and log the old one."""
    entry = scratch.number[at.LOGGED]
    scratch.log[0, entry] = row * state.word.shape[1] + x
    scratch.log[1, entry] = state.word[row, x]
    scratch.number[at.LOGGED] = entry + 1
    state.word[row, x] = value


@compiled
def roll_back(state: Any, scratch: Any, mark: Any) -> Any:
    """Undo all writes since the log had ``mark`` entries."""
    flat = state.word.ravel()
    for entry in range(scratch.number[at.LOGGED] - 1, mark - 1, -1):
        flat[scratch.log[0, entry]] = scratch.log[1, entry]
    scratch.number[at.LOGGED] = mark


@compiled
def fresh_stamp(scratch: Any) -> Any:
    """A number no row of the scratch space holds yet."""
    scratch.number[at.STAMP] += 1
    return scratch.number[at.STAMP]


@compiled
def holds_copy(state: Any, unit: Any, node: Any) -> Any:
    """Whether ``unit`` recomputes ``node`` that another owns."""
    cell = state.word[at.COPIERS, node]
    while cell != -1:
        if state.word[at.CELL_UNIT, cell] == unit:
            return True
        cell = state.word[at.NEXT_OF_NODE, cell]
    return False


@compiled
def computes(state: Any, unit: Any, node: Any) -> Any:
    """Whether ``unit`` owns ``node`` or recomputes it."""
    return state.word[at.OWNER, node] == unit or holds_copy(state, unit, node)


@compiled
def has_room(scratch: Any) -> Any:
    """Whether the working space can take another move, however large. Otherwise it is refused."""
    width = scratch.row.shape[1]
    log_left = scratch.log.shape[1] - scratch.number[at.LOGGED]
    changes_left = scratch.changed.size - scratch.number[at.CHANGES]
    return log_left > _MOVE_WORDS + 16 * width and changes_left > 16 * width


@compiled
def note_change(scratch: Any, node: Any) -> None:
    """Remember that the unit that owns ``node`` must be looked at again."""
    scratch.changed[scratch.number[at.CHANGES]] = node
    scratch.number[at.CHANGES] += 1


@compiled
def link(state: Any, scratch: Any, a: Any, b: Any) -> Any:
    """Make one unit of two and return its head; its place is that of ``b``, the other's slot is empty."""
    word = state.word
    place_a, place_b = word[at.PLACE, a], word[at.PLACE, b]
    head, other = min(a, b), max(a, b)
    x = other
    while x != -1:
        put(state, scratch, at.OWNER, x, head)
        x = word[at.NEXT, x]
    _merge_nodes(state, scratch, head, other)
    put(state, scratch, at.COUNT, head, word[at.COUNT, head] + word[at.COUNT, other])
    put(state, scratch, at.COUNT, other, 0)
    _merge_copies(state, scratch, head, other)
    if place_a != -1:
        put(state, scratch, at.ORDER, place_a, -1)
        put(state, scratch, at.TOTAL, at.UNITS, word[at.TOTAL, at.UNITS] - 1)
    put(state, scratch, at.PLACE, other, -1)
    put(state, scratch, at.PLACE, head, place_b)
    put(state, scratch, at.ORDER, place_b, head)
    note_change(scratch, head)
    return head


@compiled
def _merge_nodes(state: Any, scratch: Any, head: Any, other: Any) -> Any:
    word = state.word
    tail, left, right = head, word[at.NEXT, head], other
    while right != -1:
        if left != -1 and left < right:
            tail, left = left, word[at.NEXT, left]
            continue
        put(state, scratch, at.NEXT, tail, right)
        following = word[at.NEXT, right]
        put(state, scratch, at.NEXT, right, left)
        tail, right = right, following


@compiled
def _merge_copies(state: Any, scratch: Any, head: Any, other: Any) -> Any:
    """Give ``head`` the duplicates of ``other``, then drop those that the unit owns itself."""
    word = state.word
    cell = word[at.COPIES, other]
    put(state, scratch, at.COPIES, other, -1)
    while cell != -1:
        following = word[at.NEXT_OF_UNIT, cell]
        node = word[at.CELL_NODE, cell]
        if computes(state, head, node):
            _unlink_from_node(state, scratch, cell)
            _free_cell(state, scratch, cell)
        else:
            put(state, scratch, at.CELL_UNIT, cell, head)
            _insert_cell(state, scratch, head, cell)
        cell = following
    cell = word[at.COPIES, head]
    while cell != -1:
        following = word[at.NEXT_OF_UNIT, cell]
        if word[at.OWNER, word[at.CELL_NODE, cell]] == head:
            remove_copy(state, scratch, head, word[at.CELL_NODE, cell])
        cell = following


@compiled
def _insert_cell(state: Any, scratch: Any, unit: Any, cell: Any) -> Any:
    """Put a cell into the list of its unit, ascending by node."""
    word = state.word
    node = word[at.CELL_NODE, cell]
    before, after = -1, word[at.COPIES, unit]
    while after != -1 and word[at.CELL_NODE, after] < node:
        before, after = after, word[at.NEXT_OF_UNIT, after]
    put(state, scratch, at.NEXT_OF_UNIT, cell, after)
    if before == -1:
        put(state, scratch, at.COPIES, unit, cell)
    else:
        put(state, scratch, at.NEXT_OF_UNIT, before, cell)


@compiled
def _unlink_from_node(state: Any, scratch: Any, cell: Any) -> Any:
    word = state.word
    node = word[at.CELL_NODE, cell]
    after = word[at.NEXT_OF_NODE, cell]
    if word[at.COPIERS, node] == cell:
        put(state, scratch, at.COPIERS, node, after)
        return
    before = word[at.COPIERS, node]
    while word[at.NEXT_OF_NODE, before] != cell:
        before = word[at.NEXT_OF_NODE, before]
    put(state, scratch, at.NEXT_OF_NODE, before, after)


@compiled
def _free_cell(state: Any, scratch: Any, cell: Any) -> Any:
    put(state, scratch, at.CELL_NODE, cell, -1)
    put(state, scratch, at.CELL_UNIT, cell, -1)
    put(state, scratch, at.NEXT_OF_NODE, cell, -1)
    put(state, scratch, at.NEXT_OF_UNIT, cell, state.word[at.TOTAL, at.FREE_CELL])
    put(state, scratch, at.TOTAL, at.FREE_CELL, cell)


@compiled
def add_copy(state: Any, scratch: Any, unit: Any, node: Any) -> Any:
    """Let ``unit`` recompute ``node``; False where there is no room left for another duplicate."""
    word = state.word
    cell = word[at.TOTAL, at.FREE_CELL]
    if cell == -1:
        return False
    put(state, scratch, at.TOTAL, at.FREE_CELL, word[at.NEXT_OF_UNIT, cell])
    put(state, scratch, at.CELL_NODE, cell, node)
    put(state, scratch, at.CELL_UNIT, cell, unit)
    put(state, scratch, at.NEXT_OF_NODE, cell, word[at.COPIERS, node])
    put(state, scratch, at.COPIERS, node, cell)
    _insert_cell(state, scratch, unit, cell)
    note_change(scratch, unit)
    note_change(scratch, word[at.OWNER, node])
    return True


@compiled
def remove_copy(state: Any, scratch: Any, unit: Any, node: Any) -> Any:
    """Let ``unit`` no longer recompute ``node``."""
    word = state.word
    before, cell = -1, word[at.COPIES, unit]
    while word[at.CELL_NODE, cell] != node:
        before, cell = cell, word[at.NEXT_OF_UNIT, cell]
    after = word[at.NEXT_OF_UNIT, cell]
    if before == -1:
        put(state, scratch, at.COPIES, unit, after)
    else:
        put(state, scratch, at.NEXT_OF_UNIT, before, after)
    _unlink_from_node(state, scratch, cell)
    _free_cell(state, scratch, cell)
    note_change(scratch, unit)
    note_change(scratch, word[at.OWNER, node])


@compiled
def take_out(state: Any, scratch: Any, node: Any) -> Any:
    """Make a unit of its own of ``node``, without a place yet; returns the head of what is left."""
    word = state.word
    unit = word[at.OWNER, node]
    after = word[at.NEXT, node]
    put(state, scratch, at.NEXT, node, -1)
    if unit != node:
        before = unit
        while word[at.NEXT, before] != node:
            before = word[at.NEXT, before]
        put(state, scratch, at.NEXT, before, after)
        put(state, scratch, at.COUNT, unit, word[at.COUNT, unit] - 1)
        put(state, scratch, at.OWNER, node, node)
        rest = unit
    else:
        rest = after
        _rename(state, scratch, node, rest)
    put(state, scratch, at.COUNT, node, 1)
    put(state, scratch, at.PLACE, node, -1)
    note_change(scratch, node)
    note_change(scratch, rest)
    return rest


@compiled
def _rename(state: Any, scratch: Any, old: Any, new: Any) -> Any:
    """Hand everything a unit goes by from its old head, which has left it, to the new one."""
    word = state.word
    x = new
    while x != -1:
        put(state, scratch, at.OWNER, x, new)
        x = word[at.NEXT, x]
    put(state, scratch, at.COUNT, new, word[at.COUNT, old] - 1)
    place = word[at.PLACE, old]
    put(state, scratch, at.PLACE, new, place)
    put(state, scratch, at.ORDER, place, new)
    cell = word[at.COPIES, old]
    put(state, scratch, at.COPIES, new, cell)
    put(state, scratch, at.COPIES, old, -1)
    while cell != -1:
        put(state, scratch, at.CELL_UNIT, cell, new)
        cell = word[at.NEXT_OF_UNIT, cell]
