"""The flat arrays that the compiled search works on: the names of their rows, and how compiled code sees them.

A numba function that takes an array takes nine machine words and counts references to it (``disco_hlo.compiled``), so a
call with thirty arrays costs more than the work it does; with a pointer to each row it still writes seventy words.
Everything about nodes is therefore one array of rows, everything about the strategy another, and the working space a
third. Compiled functions are handed each as a *view*: the address of its first row and the length of a row, with the
few arrays that are no rows; where a row begins is worked out where it is read. Views are made once, at the entry of
what Python calls (:func:`open_views`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model

from disco_hlo.compiled import Ints, Row, inner, pointer_to, shared
from disco_hlo.core import legality, legality_gpu, reasons
from disco_hlo.search.hashing import Generator

if TYPE_CHECKING:
    from disco_hlo.search.state import Scratch, State
    from disco_hlo.search.step import Step

Array = Row
"""Of a view, what is no row."""

for module in (legality, legality_gpu, reasons):
    shared(module)


class GraphView:
    """Of :class:`~disco_hlo.search.step.Step`: what the graph says of node x, never written.

    Rows ending in ``_at`` are CSR offsets into ``edge``: the list of x is ``edge[row[x] : row[x + 1]]``. Rows without a
    word here are those that the rules read, see ``core.rows.Rows``.
    """

    flags: Row
    operands_at: Row
    sources_at: Row
    """Executing nodes whose values x reads, directly or through free nodes, ascending."""
    readers_at: Row
    """The reverse of sources."""
    earlier_at: Row
    """Executing nodes that must run before x though x reads nothing from them."""
    later_at: Row
    """The reverse of earlier."""
    buffers_at: Row
    shape: Row
    geometry: Row
    rank: Row
    """Place of a collective among all of them in production order, 0 for other nodes."""
    channel: Row
    """Collectives with equal numbers may share a bucket: same devices, kind, reduction and element type."""
    key: Row
    """Equal numbers, equal cost key."""
    alone: Row
    """ns of the node as a unit of its own, launch cost included (filled in by ``costs``)."""
    slice_ns: Row
    """ns to slice a collective's array out of a bucket, launch cost included (filled in by ``costs``)."""
    users_at: Row
    mixed: Row
    """A hash of x itself."""
    gpu_flags: Row
    reduction: Row
    transpose: Row
    loop: Row
    operand_loop: Row
    shared_bytes: Row
    moved_bytes: Row
    """Bytes that a collective counts as on the line of the step (filled in by ``costs``)."""
    packed_bytes: Row
    """Bytes that a bucket copies of it, where it is concatenated (filled in by ``costs``)."""
    read: Row
    """Equal numbers: to the cost model a kernel that reads the one is like a kernel that reads the other,
    shapes apart (filled in by ``costs``)."""
    hold_ns: Row
    """ns of the node as a unit of its own that must be done before a transfer begins beside it (filled in by
    ``costs``)."""
    uncut_at: Row
    """Pairs of a node and a hash. Of a collective: who reads it and cannot find it inside a bucket, each by
    its head and the ``DIGEST`` of the unit that cannot, 0 for whatever unit the node is in (-1 and 0: the entry
    root). Of such a head the same the other way round: the collective, and its own digest."""
    element_count: Row
    reads_per_element: Row
    head_ns: Row
    """ns that an op which ``RUNS_COLLECTIVES`` takes before the first of them begins (filled in by
    ``costs``)."""
    edge: Array
    special: Array
    limits: Array
    special_mask: int
    nodes: int


class StateView:
    """Of :class:`~disco_hlo.search.state.State`: the strategy being changed. A unit goes by its smallest owned node,
    its "head"; part p of it takes ``time_ns[TIME_COLUMNS * head + p]``.
    """

    owner: Row
    """Head of the unit that owns node x; -1 for nodes that do not execute."""
    next: Row
    """Next larger node of the same unit, -1 at the end."""
    count: Row
    """At a head: nodes owned; 0 at other nodes."""
    place: Row
    """At a head: slot of the unit in ORDER."""
    order: Row
    """Heads of all units in a topological order, with holes (-1) between."""
    copies: Row
    """At a head: first cell of the nodes duplicated in the unit, ascending; -1 for none."""
    copiers: Row
    """At a node: first cell of the units that duplicate it; -1 for none."""
    cell_node: Row
    """At a cell: a duplicated node, ..."""
    cell_unit: Row
    """... the head of a unit that recomputes it, ..."""
    next_of_unit: Row
    """... the next cell of the same unit and ..."""
    next_of_node: Row
    """... the next cell of the same node. Free cells are chained by NEXT_OF_UNIT."""
    digest: Row
    """At a head: hash of what the unit executes; 0 where that was not looked at yet, and elsewhere. Units whose
    digest is not 0 are counted in ``total``."""
    waits: Row
    """At a head: number of reads and orderings that the unit waits for; several may concern one unit. Climbs do
    not keep it up: the ready queue alone goes by it."""
    leaves: Row
    """At an owned node: 1 where its value leaves the unit, else 0."""
    computed: Row
    """At a head: hash of what the unit owns and recomputes."""
    returned: Row
    """At a head: hash of the nodes whose values leave the unit."""
    total: Row
    """Single numbers: ``UNITS``, .."""
    time_ns: Row
    """Four rows read as ``[nodes, 4]``: at a head, how long the unit runs, launch cost included."""


class ScratchView:
    """Of :class:`~disco_hlo.search.state.Scratch`: working space; contents mean nothing between calls."""

    mark: Row
    inside: Row
    reached: Row
    reached_back: Row
    members: Row
    neighbours: Row
    queue: Row
    queue_back: Row
    value: Row
    needed: Row
    judged: Row
    readers: Row
    results: Row
    heroes: Row
    touched: Row
    awaited: Row
    producers_of: Row
    """At a head: hash of what the unit computed when its producers were listed. These three rows are kept
    between calls."""
    producers_at: Row
    """Where the list began among all that ever were."""
    producer_count: Row
    evaluated: Row
    """At a member of a kernel that is judged: how many elements of it are evaluated."""
    about: Row
    """What the last refusal of a kernel is about (``core.reasons``)."""
    number: Array
    log: Array
    changed: Array
    verdict: Array
    keyed: Array
    producer: Array


def row_numbers(record: type) -> dict[str, int]:
    """The rows of one of the records above, by name: they are numbered as they stand there."""
    rows = [name for name, kind in record.__annotations__.items() if kind == "Row"]
    return {name: number for number, name in enumerate(rows)}


def _rows(record: type, names: str) -> list[int]:
    return [row_numbers(record)[name] for name in names.split()]


# Rows by the names that Python calls them by.
(
    FLAGS, OPERANDS_AT, SOURCES_AT, READERS_AT, EARLIER_AT, LATER_AT, RANK, CHANNEL, KEY, ALONE, SLICE,
    MIXED, MOVED, PACKED, READ, HOLD, UNCUT_AT, HEAD,
) = _rows(
    GraphView,
    "flags operands_at sources_at readers_at earlier_at later_at rank channel key alone slice_ns "
    "mixed moved_bytes packed_bytes read hold_ns uncut_at head_ns",
)  # fmt: skip
(
    OWNER, NEXT, COUNT, PLACE, ORDER, COPIES, COPIERS, CELL_NODE, CELL_UNIT, NEXT_OF_UNIT, NEXT_OF_NODE,
    DIGEST, WAITS, LEAVES, COMPUTED, RETURNED_SUM, TOTAL, TIMES,
) = _rows(
    StateView,
    "owner next count place order copies copiers cell_node cell_unit next_of_unit next_of_node digest "
    "waits leaves computed returned total time_ns",
)  # fmt: skip
NODE_ROWS: Final = len(row_numbers(GraphView))
SCRATCH_ROWS: Final = len(row_numbers(ScratchView))

# Bits of node[FLAGS] beside those of ``core.rows``, which end below them.
FUSIBLE: Final = 1 << 16
"""May join a group. Bitcasts do not have it: they follow their neighbours."""
ACTIVE: Final = 1 << 17
"""Executes: of the kind FUSIBLE, FIXED or COLLECTIVE."""
COLLECTIVE: Final = 1 << 18
RETURNED: Final = 1 << 19
"""The entry root returns it, directly or through free nodes."""
UNCUT: Final = 1 << 20
"""``UNCUT_AT`` has something of it."""
ORDERED: Final = 1 << 21
"""Something must run behind it though it does not read it."""
MUST_BE_RETURNED: Final = 1 << 22
"""``core.legality_gpu.must_be_returned``"""
PRODUCT: Final = 1 << 23
"""A matrix product, a convolution or what else libraries compute."""
RUNS_COLLECTIVES: Final = 1 << 25
"""It runs collectives of its own, such as a loop, beside which no other runs (filled in by ``costs``)."""
VARIADIC: Final = 1 << 24
"""A collective that shares a bucket only as one operand of several: no kernel packs or unpacks it."""

# Columns of TIMES. The first three are also the parts of a unit that a schedule runs one by one.
PACK: Final = 0
"""ns to concatenate the gradients of a bucket, -1 where nothing is to be concatenated."""
MAIN: Final = 1
"""ns of the kernel or the transfer."""
UNPACK: Final = 2
"""ns to slice out of a reduced bucket what its readers do not find in it (``UNCUT_AT``), 0 where they find all."""
ON_CHANNEL: Final = 3
"""1 where MAIN is spent on a communication channel, else 0."""
TIME_COLUMNS: Final = 4
STATE_ROWS: Final = TIMES + TIME_COLUMNS

# State.word[TOTAL].
UNITS: Final = 0
SLOTS: Final = 1
"""Length of ORDER."""
FREE_CELL: Final = 2
DIGEST_SUM: Final = 3
"""Hash of the strategy: of all units, wherever they stand in the order."""
COMPUTE_NS: Final = 4
"""Time of all units on the compute stream."""
TRANSFER_NS: Final = 5
"""Time of all units on the channel."""
TOTALS: Final = 6

# Scratch.number, behind ``core.reasons.STAMP``.
LOGGED: Final = 1
"""Entries of the log that undoes the changes made since it was empty."""
CHANGES: Final = 2
"""Entries of ``Scratch.changed``."""
LISTED: Final = 3
"""Producers listed so far."""
NUMBERS: Final = 4

_POINTER: Final = types.CPointer(types.int64)


class View(types.Type):
    """The type of a record, to numba: rows and arrays are pointers."""

    def __init__(self, record: type) -> None:
        kinds = record.__annotations__
        self.rows = row_numbers(record)
        self.arrays = [name for name, kind in kinds.items() if kind == "Array"]
        self.numbers = [name for name, kind in kinds.items() if kind == "int"]
        super().__init__(name=record.__name__)


_GRAPH, _STATE, _SCRATCH = View(GraphView), View(StateView), View(ScratchView)


@register_model(View)
class _ViewModel(models.StructModel):
    """In memory: the first row, the numbers in a row, then arrays and numbers as they are named."""

    def __init__(self, manager: Any, view: View) -> None:
        fields = [("first", _POINTER), ("width", types.int64)]
        fields += [(name, _POINTER) for name in view.arrays]
        super().__init__(manager, view, fields + [(name, types.int64) for name in view.numbers])


@infer_getattr
class _ViewAttributes(AttributeTemplate):
    key = View

    def generic_resolve(self, view: Any, name: str) -> Any:  # type: ignore[override]
        """The type of a field by its name."""
        if name in view.numbers:
            return types.int64
        return _POINTER if name in view.rows or name in view.arrays else None


@lower_getattr_generic(View)
def _field(context: Any, builder: Any, view: Any, value: Any, name: str) -> Any:
    fields = cgutils.create_struct_proxy(view)(context, builder, value=value)
    if name not in view.rows:
        return getattr(fields, name)
    offset = builder.mul(fields.width, ir.Constant(ir.IntType(64), view.rows[name]))
    return builder.gep(fields.first, [offset])


def _opener(view: View) -> Any:
    """What makes a view in compiled code of a tuple: its first row, the numbers in a row, arrays, numbers."""

    def make(context: Any, fields: Any) -> Any:
        del context

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            del signature
            made = cgutils.create_struct_proxy(view)(context, builder)
            for i, name in enumerate(("first", "width", *view.arrays, *view.numbers)):
                setattr(made, name, builder.extract_value(arguments[0], i))
            return made._getvalue()  # numba has no public name for it

        return view(fields), generate

    return intrinsic(make)


_graph_view, _state_view, _scratch_view = _opener(_GRAPH), _opener(_STATE), _opener(_SCRATCH)
Pools = tuple[Ints, Ints]
"""What moves are drawn from: fusible nodes, and collectives in production order."""


class PoolView(NamedTuple):
    """The same as pointers and lengths."""

    fusible: Row
    fusibles: int
    ranked: Row
    ranks: int


@inner
def open_draws(generator: Generator, pools: Pools) -> Any:
    """A pointer into the generator, and a view of what moves are drawn from."""
    fusible, ranked = pools
    view = PoolView(
        pointer_to(fusible.ctypes.data), fusible.size, pointer_to(ranked.ctypes.data), ranked.size
    )
    return pointer_to(generator.ctypes.data), view


@inner
def open_views(step: Step, state: State, scratch: Scratch) -> Any:
    """Pointers into a step, a state and a working space, valid while these live."""
    node, word, row = step.node, state.word, scratch.row
    graph_view = _graph_view(
        (
            pointer_to(node.ctypes.data), node.shape[1], pointer_to(step.edge.ctypes.data),
            pointer_to(step.special.ctypes.data), pointer_to(step.limits.ctypes.data),
            step.special.shape[0] - 1, node.shape[1] - 1,
        )
    )  # fmt: skip
    scratch_view = _scratch_view(
        (
            pointer_to(row.ctypes.data), row.shape[1], pointer_to(scratch.number.ctypes.data),
            pointer_to(scratch.log.ctypes.data), pointer_to(scratch.changed.ctypes.data),
            pointer_to(scratch.verdict.ctypes.data), pointer_to(scratch.keyed.ctypes.data),
            pointer_to(scratch.producer.ctypes.data),
        )
    )  # fmt: skip
    return graph_view, _state_view((pointer_to(word.ctypes.data), word.shape[1])), scratch_view
