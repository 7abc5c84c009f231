"""Arrays as compiled code sees them: rows of 64-bit integers by name.

A numba function that takes an array takes nine machine words and counts references to it, which
costs more than what the functions here do. So the three records below hold plain pointers, one for
each row; they are made once, at the entry of what Python calls (:func:`open_views`), and handed down.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from disco_hlo.search import layout as at
from numba import types
from numba.core.extending import intrinsic

from disco_hlo.compiled import compiled


class GraphView(NamedTuple):
    """Rows of :class:`~disco_hlo.search.step.Step`; see ``layout``."""

    flags: Any
    operands_at: Any
    sources_at: Any
    readers_at: Any
    earlier_at: Any
    later_at: Any
    buffers_at: Any
    users_at: Any
    shape: Any
    geometry: Any
    rank: Any
    channel: Any
    key: Any
    alone: Any
    slice_ns: Any
    mixed: Any
    gpu_flags: Any
    reduction: Any
    transpose: Any
    loop: Any
    operand_loop: Any
    elements: Any
    shared_bytes: Any
    moved_bytes: Any
    read: Any
    edge: Any
    special: Any
    special_mask: Any
    limits: Any
    nodes: Any


class StateView(NamedTuple):
    """Rows of :class:`~disco_hlo.search.board.State`; see ``layout``."""

    owner: Any
    next: Any
    count: Any
    place: Any
    order: Any
    copies: Any
    copiers: Any
    cell_node: Any
    cell_unit: Any
    next_of_unit: Any
    next_of_node: Any
    time_ns: Any
    """Part p of the unit with head h takes time_ns[TIME_ROWS * h + p]."""
    digest: Any
    waits: Any
    leaves: Any
    computed: Any
    returned: Any
    moment: Any
    total: Any


class ScratchView(NamedTuple):
    """Rows of :class:`~disco_hlo.search.board.Scratch`; see ``layout``."""

    mark: Any
    inside: Any
    reached: Any
    reached_back: Any
    members: Any
    neighbours: Any
    queue: Any
    queue_back: Any
    value: Any
    needed: Any
    judged: Any
    readers: Any
    judging: Any
    results: Any
    heroes: Any
    packed: Any
    touched: Any
    awaited: Any
    number: Any
    log: Any
    changed: Any
    verdict: Any
    keyed: Any
    refused: Any


class PoolView(NamedTuple):
    """What moves are drawn from, as pointers and lengths."""

    fusible: Any
    """Fusible nodes."""
    fusibles: Any
    ranked: Any
    """All-reduces in production order."""
    ranks: Any


@intrinsic
def pointer_to(context: Any, address: Any) -> Any:
    """The 64-bit integers at an address."""
    del context, address

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(types.int64), generate


@intrinsic
def address_of(context: Any, pointer: Any) -> Any:
    """The address a pointer holds."""
    del context

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(arguments[0], context.get_value_type(signature.return_type))

    return types.int64(pointer), generate


@compiled
def _row(array: Any, row: Any) -> Any:
    return pointer_to(array.ctypes.data + 8 * row * array.shape[1])


@compiled
def open_draws(generator: Any, pools: Any) -> Any:
    """A pointer into the generator, and a view of (fusible nodes, all-reduces in production order)."""
    fusible, ranked = pools
    view = PoolView(
        pointer_to(fusible.ctypes.data), fusible.size, pointer_to(ranked.ctypes.data), ranked.size
    )
    return pointer_to(generator.ctypes.data), view


@compiled
def open_views(step: Any, state: Any, scratch: Any) -> Any:
    """Pointers into a step, a state and a working space, valid while these live."""
    node, word, row = step.node, state.word, scratch.row
    graph_view = GraphView(
        _row(node, at.FLAGS),
        _row(node, at.OPERANDS_AT),
        _row(node, at.SOURCES_AT),
        _row(node, at.READERS_AT),
        _row(node, at.EARLIER_AT),
        _row(node, at.LATER_AT),
        _row(node, at.BUFFERS_AT),
        _row(node, at.USERS_AT),
        _row(node, at.SHAPE),
        _row(node, at.GEOMETRY),
        _row(node, at.RANK),
        _row(node, at.CHANNEL),
        _row(node, at.KEY),
        _row(node, at.ALONE),
        _row(node, at.SLICE),
        _row(node, at.MIXED),
        _row(node, at.GPU_FLAGS),
        _row(node, at.REDUCTION),
        _row(node, at.TRANSPOSE),
        _row(node, at.LOOP),
        _row(node, at.OPERAND_LOOP),
        _row(node, at.ELEMENTS),
        _row(node, at.SHARED_BYTES),
        _row(node, at.MOVED),
        _row(node, at.READ),
        pointer_to(step.edge.ctypes.data),
        pointer_to(step.special.ctypes.data),
        step.special.shape[0] - 1,
        pointer_to(step.limits.ctypes.data),
        node.shape[1] - 1,
    )
    state_view = StateView(
        _row(word, at.OWNER),
        _row(word, at.NEXT),
        _row(word, at.COUNT),
        _row(word, at.PLACE),
        _row(word, at.ORDER),
        _row(word, at.COPIES),
        _row(word, at.COPIERS),
        _row(word, at.CELL_NODE),
        _row(word, at.CELL_UNIT),
        _row(word, at.NEXT_OF_UNIT),
        _row(word, at.NEXT_OF_NODE),
        _row(word, at.TIMES),
        _row(word, at.DIGEST),
        _row(word, at.WAITS),
        _row(word, at.LEAVES),
        _row(word, at.COMPUTED),
        _row(word, at.RETURNED_SUM),
        _row(word, at.MOMENT),
        _row(word, at.TOTAL),
    )
    scratch_view = ScratchView(
        _row(row, at.MARK),
        _row(row, at.INSIDE),
        _row(row, at.REACHED),
        _row(row, at.REACHED_BACK),
        _row(row, at.MEMBERS),
        _row(row, at.NEIGHBOURS),
        _row(row, at.QUEUE),
        _row(row, at.QUEUE_BACK),
        _row(row, at.VALUE),
        _row(row, at.NEEDED),
        _row(row, at.JUDGED),
        _row(row, at.READERS),
        _row(row, at.JUDGING),
        _row(row, at.RESULTS),
        _row(row, at.HEROES),
        _row(row, at.PACKED),
        _row(row, at.TOUCHED),
        _row(row, at.AWAITED),
        pointer_to(scratch.number.ctypes.data),
        pointer_to(scratch.log.ctypes.data),
        pointer_to(scratch.changed.ctypes.data),
        pointer_to(scratch.verdict.ctypes.data),
        pointer_to(scratch.keyed.ctypes.data),
        pointer_to(scratch.refused.ctypes.data),
    )
    return graph_view, state_view, scratch_view
