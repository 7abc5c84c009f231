"""The strategy being searched, as arrays that compiled code changes in place and can change back.

Every write goes through :func:`put`, which logs what stood there before; so a move that turns out to
be illegal, and a candidate that was only looked at, are undone in the time they took
(:func:`roll_back`), and a state is copied in one piece. The hash of a unit is a sum of what its nodes add, so that it
follows a change in one addition.

Throughout the compiled files ``g``, ``s`` and ``w`` are the views of the graph, the state and the
working space (``layout``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Int, Row, address_of, inner, pointer_to
from disco_hlo.hlo.graph import flat_lists
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import mix, mixed
from disco_hlo.search.layout import GraphView, ScratchView, StateView
from disco_hlo.search.step import Step

MAXIMUM_MEMBERS: Final = 512
"""Most nodes in one unit. It bounds what one move writes."""
VERDICTS: Final = 1 << 15
"""Kernels whose legality is remembered; a power of two."""
PRODUCERS: Final = 1 << 17
"""How many producers of units are kept between draws; a power of two."""
NOWHERE: Final = 1 << 32
"""Behind every slot."""
_MOVE_WORDS: Final = 1 << 19
_NODE_WORDS: Final = 64
"""Room in the log: for one move among units of that size, and for moving every unit in the order."""
OWNED: Final = 1
COPY: Final = 2
RESULT: Final = 3
NOTHING: Final = 1
"""The hash of what a unit without any node computes."""


class State(NamedTuple):
    """A strategy on a step."""

    word: NDArray[np.int64]
    """``[STATE_ROWS, nodes]``; see ``layout``."""

    @property
    def times(self) -> NDArray[np.int64]:
        """``[nodes, TIME_COLUMNS]``"""
        return self.word[at.TIMES :].reshape(-1, at.TIME_COLUMNS)


class Scratch(NamedTuple):
    """Working space of one search thread."""

    row: NDArray[np.int64]
    """``[SCRATCH_ROWS, nodes]``; see ``layout``."""
    number: NDArray[np.int64]
    """``[NUMBERS]``"""
    log: NDArray[np.int64]
    """Pairs of an address and what stood there."""
    changed: NDArray[np.int64]
    """Nodes whose units may have other members or results than when they were last looked at."""
    verdict: NDArray[np.int64]
    """``[2 * VERDICTS]``: digests of kernels and why each may not stand, as far as nothing pushed them out."""
    keyed: NDArray[np.int64]
    """``[2 * VERDICTS]``: digests of kernels and the keys of their prices, as far as nothing pushed them out."""
    producer: NDArray[np.int64]
    """``[PRODUCERS]``: for units that were drawn, what each may be fused with, as far as nothing pushed it out
    (``producers``)."""


def new_scratch(step: Step) -> Scratch:
    """Working space for states of ``step``."""
    width = _width(step)
    cleared = (at.SCRATCH_ROWS * width, at.NUMBERS, 2 * VERDICTS, 2 * VERDICTS)
    others = (PRODUCERS, _NODE_WORDS * width + 4096, 2 * (_MOVE_WORDS + _NODE_WORDS * width))
    # In one piece, whose pages are large: a page is met for the first time in as long as a move takes.
    words = np.empty(sum(cleared) + sum(others), np.int64)
    words[: sum(cleared)] = 0
    row, number, verdict, keyed, producer, changed, log = np.split(words, np.cumsum((*cleared, *others))[:-1])
    return Scratch(row.reshape(at.SCRATCH_ROWS, width), number, log, changed, verdict, keyed, producer)


def empty_state(step: Step, copies: int = 0) -> State:
    """A state of the right size without any unit, with room for ``copies`` duplicates and more."""
    width = _width(step) + copies
    word = np.full((at.STATE_ROWS, width), -1, np.int64)
    word[at.COUNT] = word[at.TOTAL] = word[at.DIGEST] = word[at.WAITS] = 0
    word[at.NEXT_OF_UNIT, :-1] = np.arange(1, width)
    return State(word)


def copy_state(state: State) -> State:
    """An independent copy."""
    return State(state.word.copy())


def _width(step: Step) -> int:
    return max(int(step.node.shape[1]) - 1, at.TOTALS)


@inner
def put(w: ScratchView, row: Row, x: int, value: Int) -> None:
    """Write ``row[x]`` and log what stood there."""
    entry = 2 * w.number[at.LOGGED]
    w.log[entry] = address_of(row) + 8 * x
    w.log[entry + 1] = row[x]
    w.number[at.LOGGED] += 1
    row[x] = value


@inner
def roll_back(w: ScratchView, mark: int) -> None:
    """Undo all writes since the log had ``mark`` entries."""
    for entry in range(w.number[at.LOGGED] - 1, mark - 1, -1):
        pointer_to(w.log[2 * entry])[0] = w.log[2 * entry + 1]
    w.number[at.LOGGED] = mark


@inner
def has_room(g: GraphView, w: ScratchView) -> Any:
    """Whether the working space can take another move, however large. Otherwise it is refused."""
    words = w.number[at.LOGGED] + 16 * g.nodes
    changes = w.number[at.CHANGES] + 16 * g.nodes
    return words < _NODE_WORDS * g.nodes and changes < _NODE_WORDS * g.nodes


@inner
def note_change(w: ScratchView, node: int) -> None:
    """Remember that the unit that owns ``node`` must be looked at again."""
    w.changed[w.number[at.CHANGES]] = node
    w.number[at.CHANGES] += 1


@inner
def share(x: int, role: int) -> Any:
    """What ``x`` adds to the hash of what a unit computes (row ``COMPUTED``) as ``OWNED`` or as ``COPY``, or to that of
    what the unit returns (row ``RETURNED_SUM``) as ``RESULT``."""
    return np.int64(mix(np.uint64(8 * x + role)))


def kernel_digests(
    kernels: Collection[tuple[Sequence[int], Sequence[int], Sequence[int]]],
) -> NDArray[np.int64]:
    """``[kernels, 2]``: the hashes of what units compute that own and duplicate the nodes of the first two lists, and
    of what they return: the third list."""
    owned, copied, returned = (
        _sums([kernel[part] for kernel in kernels], role) for part, role in enumerate((OWNED, COPY, RESULT))
    )
    return np.stack([NOTHING + owned + copied, returned], axis=1)


def _sums(lists: Sequence[Sequence[int]], role: int) -> NDArray[np.int64]:
    """What the nodes of each list add to a hash together."""
    begin, nodes = flat_lists(lists)
    until = np.concatenate([np.zeros(1, np.int64), np.cumsum(mixed(8 * nodes + role))])
    found: NDArray[np.int64] = until[begin[1:]] - until[begin[:-1]]
    return found


@inner
def special_slot(g: GraphView, computed: int) -> Any:
    """Where ``Step.special`` has a kernel that computes this, -1 where it has none."""
    slot = computed & g.special_mask
    while g.special[3 * slot] != computed:  # ends: half of the table is empty
        if g.special[3 * slot] == 0:
            return -1
        slot = (slot + 1) & g.special_mask
    return slot


@inner
def retire(g: GraphView, s: StateView, w: ScratchView, unit: int) -> None:
    """Take a unit out of the totals: it is no more, or no longer what it was."""
    if s.digest[unit] != 0:
        _count_cuts(g, s, w, unit, -1)
        _count(s, w, unit, -1)
        put(w, s.digest, unit, 0)


@inner
def enlist(g: GraphView, s: StateView, w: ScratchView, unit: int, digest: int) -> None:
    """Count a unit, whose times are filled in, in the totals."""
    put(w, s.digest, unit, digest)
    _count(s, w, unit, 1)
    _count_cuts(g, s, w, unit, 1)


@inner
def _count_cuts(g: GraphView, s: StateView, w: ScratchView, unit: int, sign: int) -> None:
    """Where a kernel comes, or goes, that alone does not find a gradient in its bucket, what cuts it out does, too."""
    if not g.flags[unit] & at.UNCUT or g.flags[unit] & at.COLLECTIVE:
        return
    for e in range(g.uncut_at[unit], g.uncut_at[unit + 1], 2):
        gradient = g.edge[e]
        first = at.TIME_COLUMNS * s.owner[gradient]
        if (
            g.edge[e + 1] != s.digest[unit]
            or s.digest[s.owner[gradient]] == 0
            or s.time_ns[first + at.PACK] < 0
        ):
            continue
        if cut_slot(s, g.edge, g.uncut_at[gradient], g.uncut_at[gradient + 1], unit) == NOWHERE:
            change_ns = sign * g.slice_ns[gradient]
            put(w, s.time_ns, first + at.UNPACK, s.time_ns[first + at.UNPACK] + change_ns)
            put(w, s.total, at.COMPUTE_NS, s.total[at.COMPUTE_NS] + change_ns)


@inner
def cut_slot(s: StateView, pairs: Row, start: int, end: int, besides: int) -> Any:
    """The slot before which a gradient must be cut out of a shared bucket: that of the first unit, other than
    ``besides``, that does not find it there. ``NOWHERE`` where all do.

    Args:
        pairs: in ``pairs[start:end]`` has what ``UNCUT_AT`` says of the gradient.
    """
    first: Any = NOWHERE
    for e in range(start, end, 2):
        reader, digest = pairs[e], pairs[e + 1]
        if digest == 0:
            first = min(first, s.place[s.owner[reader]] if reader != -1 else s.total[at.SLOTS])
        elif digest == s.digest[reader] and reader != besides:
            first = min(first, s.place[reader])
    return first


@inner
def _count(s: StateView, w: ScratchView, unit: int, sign: int) -> None:
    share = np.int64(mix(np.uint64(s.digest[unit])))
    put(w, s.total, at.DIGEST_SUM, s.total[at.DIGEST_SUM] + sign * share)
    first = at.TIME_COLUMNS * unit
    compute_ns = max(0, s.time_ns[first + at.PACK]) + s.time_ns[first + at.UNPACK]
    if s.time_ns[first + at.ON_CHANNEL]:
        put(w, s.total, at.TRANSFER_NS, s.total[at.TRANSFER_NS] + sign * s.time_ns[first + at.MAIN])
    else:
        compute_ns += s.time_ns[first + at.MAIN]
    put(w, s.total, at.COMPUTE_NS, s.total[at.COMPUTE_NS] + sign * compute_ns)


@inner
def holds_copy(s: StateView, unit: int, node: int) -> Any:
    """Whether ``unit`` recomputes ``node`` that another owns; looked for in the shorter of both lists."""
    of_node, of_unit = s.copiers[node], s.copies[unit]
    while of_node != -1 and of_unit != -1:  # ends with the list
        if s.cell_unit[of_node] == unit or s.cell_node[of_unit] == node:
            return True
        of_node, of_unit = s.next_of_node[of_node], s.next_of_unit[of_unit]
    return False


@inner
def computes(s: StateView, unit: int, node: int) -> Any:
    """Whether ``unit`` owns ``node`` or recomputes it."""
    return s.owner[node] == unit or holds_copy(s, unit, node)


@inner
def link(g: GraphView, s: StateView, w: ScratchView, a: int, b: int) -> Any:
    """Make one unit of two and return its head; it stands at the place of ``b``, if that has one."""
    place_a, place_b = s.place[a], s.place[b]
    retire(g, s, w, a)
    retire(g, s, w, b)
    head, other = min(a, b), max(a, b)
    put(w, s.computed, head, s.computed[a] + s.computed[b] - NOTHING)
    put(w, s.returned, head, s.returned[a] + s.returned[b])
    x = other
    while x != -1:  # ends with the list
        put(w, s.owner, x, head)
        x = s.next[x]
    _merge_nodes(s, w, head, other)
    put(w, s.count, head, s.count[head] + s.count[other])
    put(w, s.count, other, 0)
    _merge_copies(s, w, head, other)
    if place_a != -1:
        put(w, s.order, place_a, -1)
        put(w, s.total, at.UNITS, s.total[at.UNITS] - 1)
    put(w, s.place, other, -1)
    put(w, s.place, head, place_b)
    if place_b != -1:
        put(w, s.order, place_b, head)
    note_change(w, head)
    return head


@inner
def _merge_nodes(s: StateView, w: ScratchView, head: int, other: int) -> None:
    tail, left, right = head, s.next[head], other
    while right != -1:  # ends with the list
        if left != -1 and left < right:
            tail, left = left, s.next[left]
            continue
        following = s.next[right]
        put(w, s.next, tail, right)
        put(w, s.next, right, left)
        tail, right = right, following


@inner
def _merge_copies(s: StateView, w: ScratchView, head: int, other: int) -> None:
    """Give ``head`` the duplicates of ``other``, then drop those that the unit owns itself."""
    cell = s.copies[other]
    before, after = -1, s.copies[head]
    put(w, s.copies, other, -1)
    while cell != -1:  # ends with the list
        following, node = s.next_of_unit[cell], s.cell_node[cell]
        while after != -1 and s.cell_node[after] < node:  # ends with the list
            before, after = after, s.next_of_unit[after]
        if s.owner[node] == head or (after != -1 and s.cell_node[after] == node):
            note_change(w, node)
            put(w, s.computed, head, s.computed[head] - share(node, COPY))
            _unlink_from_node(s, w, cell)
            _free_cell(s, w, cell)
        else:
            put(w, s.cell_unit, cell, head)
            put(w, s.next_of_unit, cell, after)
            _follow(s, w, head, before, cell)
            before = cell
        cell = following
    cell = s.copies[head]
    while cell != -1:  # ends with the list
        following = s.next_of_unit[cell]
        if s.owner[s.cell_node[cell]] == head:
            remove_copy(s, w, head, s.cell_node[cell])
        cell = following


@inner
def _follow(s: StateView, w: ScratchView, unit: int, before: int, cell: int) -> None:
    """Let ``cell`` come behind another one in the list of what a unit duplicates, first where that is -1."""
    if before == -1:
        put(w, s.copies, unit, cell)
    else:
        put(w, s.next_of_unit, before, cell)


@inner
def _unlink_from_node(s: StateView, w: ScratchView, cell: int) -> None:
    node = s.cell_node[cell]
    after = s.next_of_node[cell]
    if s.copiers[node] == cell:
        put(w, s.copiers, node, after)
        return
    before = s.copiers[node]
    while s.next_of_node[before] != cell:  # ends: the cell stands in the list of its node
        before = s.next_of_node[before]
    put(w, s.next_of_node, before, after)


@inner
def _free_cell(s: StateView, w: ScratchView, cell: int) -> None:
    put(w, s.cell_node, cell, -1)
    put(w, s.cell_unit, cell, -1)
    put(w, s.next_of_node, cell, -1)
    put(w, s.next_of_unit, cell, s.total[at.FREE_CELL])
    put(w, s.total, at.FREE_CELL, cell)


@inner
def add_copies(s: StateView, w: ScratchView, unit: int, nodes: Row, count: int) -> Any:
    """Let ``unit`` recompute nodes, ascending; False where there is no room left for so many duplicates.

    Follow it up with ``kernels.adopt_orphans``: their owners may have lost the last readers.
    """
    computed = s.computed[unit]
    before, after = -1, s.copies[unit]
    for i in range(count):
        cell, node = s.total[at.FREE_CELL], nodes[i]
        if cell == -1:
            return False
        put(w, s.total, at.FREE_CELL, s.next_of_unit[cell])
        put(w, s.cell_node, cell, node)
        put(w, s.cell_unit, cell, unit)
        put(w, s.next_of_node, cell, s.copiers[node])
        put(w, s.copiers, node, cell)
        while after != -1 and s.cell_node[after] < node:  # ends with the list
            before, after = after, s.next_of_unit[after]
        put(w, s.next_of_unit, cell, after)
        _follow(s, w, unit, before, cell)
        before = cell
        computed += share(node, COPY)
    put(w, s.computed, unit, computed)
    note_change(w, unit)
    return True


@inner
def remove_copy(s: StateView, w: ScratchView, unit: int, node: int) -> None:
    """Let ``unit`` no longer recompute ``node``."""
    before, cell = -1, s.copies[unit]
    while s.cell_node[cell] != node:  # ends: the unit recomputes the node
        before, cell = cell, s.next_of_unit[cell]
    _follow(s, w, unit, before, s.next_of_unit[cell])
    _unlink_from_node(s, w, cell)
    _free_cell(s, w, cell)
    put(w, s.computed, unit, s.computed[unit] - share(node, COPY))
    note_change(w, unit)
    note_change(w, node)


@inner
def take_out(g: GraphView, s: StateView, w: ScratchView, node: int) -> Any:
    """Make a unit of its own of ``node``, without a place yet; returns the head of what is left."""
    unit, after = s.owner[node], s.next[node]
    computed = s.computed[unit] - share(node, OWNED)
    own = share(node, RESULT) if s.leaves[node] else np.int64(0)
    returned = s.returned[unit] - own
    put(w, s.next, node, -1)
    if unit == node:
        rest = after
        _rename(g, s, w, node, rest)
    else:
        rest, before = unit, unit
        while s.next[before] != node:  # ends: the unit owns the node, and not as its head
            before = s.next[before]
        put(w, s.next, before, after)
        put(w, s.count, unit, s.count[unit] - 1)
        put(w, s.owner, node, node)
    put(w, s.count, node, 1)
    put(w, s.computed, node, NOTHING + share(node, OWNED))
    put(w, s.returned, node, own)
    put(w, s.computed, rest, computed)
    put(w, s.returned, rest, returned)
    put(w, s.place, node, -1)
    note_change(w, node)
    note_change(w, rest)
    return rest


@inner
def _rename(g: GraphView, s: StateView, w: ScratchView, old: int, new: int) -> None:
    """Hand everything a unit goes by from its old head, which has left it, to the new one."""
    retire(g, s, w, old)
    x = new
    while x != -1:  # ends with the list
        put(w, s.owner, x, new)
        x = s.next[x]
    put(w, s.count, new, s.count[old] - 1)
    put(w, s.place, new, s.place[old])
    put(w, s.order, s.place[old], new)
    cell = s.copies[old]
    put(w, s.copies, new, cell)
    put(w, s.copies, old, -1)
    while cell != -1:  # ends with the list
        put(w, s.cell_unit, cell, new)
        cell = s.next_of_unit[cell]
