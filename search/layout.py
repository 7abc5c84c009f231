"""The flat arrays that the compiled search works on: the names of their rows, and how compiled code sees them.

A numba function that takes an array takes nine machine words and counts references to it (``disco_hlo.compiled``), so a
call with thirty arrays costs more than the work it does; with a pointer to each row it still writes seventy words.
Everything about nodes is therefore one array of rows, everything about the strategy another, and the working space a
third. Compiled functions are handed each as a *view*: the address of its first row and the length of a row, with the
few arrays that are no rows; where a row begins is worked out where it is read. Views are made once, at the entry of
what Python calls (:func:`open_views`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

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

# Step.node: what the graph says of node x, never written. Rows ending in _AT are CSR offsets into
# Step.edge: the list of x is edge[node[ROW, x] : node[ROW, x + 1]]. What the rules read is described in
# ``core.rows.Rows``: FLAGS, OPERANDS_AT, BUFFERS_AT, USERS_AT, SHAPE, GEOMETRY, ELEMENT_COUNT, READS_PER_ELEMENT, and
# GPU_FLAGS to SHARED_BYTES.
FLAGS: Final = 0
OPERANDS_AT: Final = 1
SOURCES_AT: Final = 2
"""Executing nodes whose values x reads, directly or through free nodes, ascending."""
READERS_AT: Final = 3
"""The reverse of sources."""
EARLIER_AT: Final = 4
"""Executing nodes that must run before x though x reads nothing from them."""
LATER_AT: Final = 5
"""The reverse of earlier."""
BUFFERS_AT: Final = 6
SHAPE: Final = 7
GEOMETRY: Final = 8
RANK: Final = 9
"""Place of an all-reduce among all of them in production order, 0 for other nodes."""
CHANNEL: Final = 10
"""All-reduces with equal numbers may share a bucket: same devices, reduction and element type."""
KEY: Final = 11
"""Equal numbers, equal cost key."""
ALONE: Final = 12
"""ns of the node as a unit of its own, launch cost included (filled in by ``costing``)."""
SLICE: Final = 13
"""ns to slice an all-reduce out of a bucket, launch cost included (filled in by ``costing``)."""
USERS_AT: Final = 14
MIXED: Final = 15
"""A hash of x itself."""
GPU_FLAGS: Final = 16
REDUCTION: Final = 17
TRANSPOSE: Final = 18
LOOP: Final = 19
OPERAND_LOOP: Final = 20
SHARED_BYTES: Final = 21
MOVED: Final = 22
"""Bytes that an all-reduce moves (filled in by ``costing``)."""
READ: Final = 23
"""Equal numbers: to the cost model a kernel that reads the one is like a kernel that reads the other, shapes apart
(filled in by ``costing``)."""
HOLD: Final = 24
"""ns of the node as a unit of its own that must be done before a transfer begins beside it (filled in by
``costing``)."""
UNCUT_AT: Final = 25
"""Pairs of a node and a hash. Of an all-reduce: who reads it and cannot find it inside a bucket, each by its head and
the ``DIGEST`` of the unit that cannot, 0 for whatever unit the node is in (-1 and 0: the entry root). Of such a head
the same the other way round: the all-reduce, and its own digest."""
ELEMENT_COUNT: Final = 26
READS_PER_ELEMENT: Final = 27
HEAD: Final = 28
"""ns that an op which ``RUNS_COLLECTIVES`` takes before the first of them begins (filled in by ``costing``)."""
NODE_ROWS: Final = 29

# Bits of node[FLAGS] beside those of ``core.rows``, which end below them.
FUSIBLE: Final = 1 << 16
"""May join a group. Bitcasts do not have it: they follow their neighbours."""
ACTIVE: Final = 1 << 17
"""Executes: of the kind FUSIBLE, FIXED or ALL_REDUCE."""
ALL_REDUCE: Final = 1 << 18
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
"""It runs collectives of its own, such as a loop, beside which no other runs (filled in by ``costing``)."""
VARIADIC: Final = 1 << 24
"""A collective that shares a bucket only as one operand of several: no kernel packs or unpacks it."""

# State.word: the strategy being changed. A unit goes by its smallest owned node, its "head".
OWNER: Final = 0
"""Head of the unit that owns node x; -1 for nodes that do not execute."""
NEXT: Final = 1
"""Next larger node of the same unit, -1 at the end."""
COUNT: Final = 2
"""At a head: nodes owned; 0 at other nodes."""
PLACE: Final = 3
"""At a head: slot of the unit in ORDER."""
ORDER: Final = 4
"""Heads of all units in a topological order, with holes (-1) between."""
COPIES: Final = 5
"""At a head: first cell of the nodes duplicated in the unit, ascending; -1 for none."""
COPIERS: Final = 6
"""At a node: first cell of the units that duplicate it; -1 for none."""
CELL_NODE: Final = 7
"""At a cell: a duplicated node, ..."""
CELL_UNIT: Final = 8
"""... the head of a unit that recomputes it, ..."""
NEXT_OF_UNIT: Final = 9
"""... the next cell of the same unit and ..."""
NEXT_OF_NODE: Final = 10
"""... the next cell of the same node. Free cells are chained by NEXT_OF_UNIT."""
DIGEST: Final = 11
"""At a head: hash of what the unit executes; 0 where that was not looked at yet, and elsewhere.
Units whose digest is not 0 are counted in the totals below."""
WAITS: Final = 12
"""At a head: number of reads and orderings that the unit waits for; several may concern one unit. Climbs
do not keep it up: the ready queue alone goes by it."""
LEAVES: Final = 13
"""At an owned node: 1 where its value leaves the unit, else 0."""
COMPUTED: Final = 14
"""At a head: hash of what the unit owns and recomputes."""
RETURNED_SUM: Final = 15
"""At a head: hash of the nodes whose values leave the unit."""
MOMENT: Final = 16
"""At a head: which change was the last of what decides about moves of the unit (``refusals``)."""
TOTAL: Final = 17
"""Single numbers, see below."""
TIMES: Final = 18
"""Four rows read as ``[nodes, 4]``: at a head, how long the unit runs, launch cost included."""
STATE_ROWS: Final = 22

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
"""Time of all units on communication channels."""
TOTALS: Final = 6

# Scratch.row: working space; contents mean nothing between calls.
MARK: Final = 0
INSIDE: Final = 1
REACHED: Final = 2
REACHED_BACK: Final = 3
MEMBERS: Final = 4
NEIGHBOURS: Final = 5
QUEUE: Final = 6
QUEUE_BACK: Final = 7
VALUE: Final = 8
NEEDED: Final = 9
JUDGED: Final = 10
READERS: Final = 11
JUDGING: Final = 12
RESULTS: Final = 13
HEROES: Final = 14
PACKED: Final = 15
TOUCHED: Final = 16
AWAITED: Final = 17
PRODUCERS_OF: Final = 18
"""At a head: hash of what the unit computed when its producers were listed. These three rows are kept between calls."""
PRODUCERS_AT: Final = 19
"""Where the list began among all that ever were."""
PRODUCER_COUNT: Final = 20
EVALUATED: Final = 21
"""At a member of a kernel that is judged: how many elements of it are evaluated."""
ABOUT: Final = 22
"""What the last refusal of a kernel is about (``core.reasons``)."""
SCRATCH_ROWS: Final = 23

# Scratch.number, behind ``core.marks.STAMP``.
LOGGED: Final = 1
"""Entries of the log that undoes the changes made since it was empty."""
CHANGES: Final = 2
"""Entries of ``Scratch.changed``."""
FELL: Final = 3
"""0, or where the last move failed for a kernel that may not stand: how many entries of ``Scratch.changed`` are nodes
of units that it would have changed."""
LISTED: Final = 4
"""Producers listed so far."""
NUMBERS: Final = 5
_POINTER: Final = types.CPointer(types.int64)
for module in (legality, legality_gpu, reasons, reasons):
    shared(module)


@dataclass(frozen=True)
class _Field:
    kind: str
    row: int = -1


def _row(number: int) -> Row:
    return cast("Row", _Field("row", number))


def _array() -> Row:
    return cast("Row", _Field("array"))


def _number() -> int:
    return cast("int", _Field("number"))


class GraphView:
    """Of :class:`~disco_hlo.search.step.Step`; see ``layout``."""

    flags = _row(FLAGS)
    operands_at = _row(OPERANDS_AT)
    sources_at = _row(SOURCES_AT)
    readers_at = _row(READERS_AT)
    earlier_at = _row(EARLIER_AT)
    later_at = _row(LATER_AT)
    buffers_at = _row(BUFFERS_AT)
    users_at = _row(USERS_AT)
    shape = _row(SHAPE)
    geometry = _row(GEOMETRY)
    rank = _row(RANK)
    channel = _row(CHANNEL)
    key = _row(KEY)
    alone = _row(ALONE)
    slice_ns = _row(SLICE)
    mixed = _row(MIXED)
    gpu_flags = _row(GPU_FLAGS)
    reduction = _row(REDUCTION)
    transpose = _row(TRANSPOSE)
    loop = _row(LOOP)
    operand_loop = _row(OPERAND_LOOP)
    shared_bytes = _row(SHARED_BYTES)
    moved_bytes = _row(MOVED)
    read = _row(READ)
    hold_ns = _row(HOLD)
    head_ns = _row(HEAD)
    uncut_at = _row(UNCUT_AT)
    element_count = _row(ELEMENT_COUNT)
    reads_per_element = _row(READS_PER_ELEMENT)
    edge = _array()
    special = _array()
    limits = _array()
    special_mask = _number()
    nodes = _number()


class StateView:
    """Of :class:`~disco_hlo.search.state.State`; see ``layout``. Part p of the unit with head h takes
    ``time_ns[TIME_COLUMNS * h + p]``."""

    owner = _row(OWNER)
    next = _row(NEXT)
    count = _row(COUNT)
    place = _row(PLACE)
    order = _row(ORDER)
    copies = _row(COPIES)
    copiers = _row(COPIERS)
    cell_node = _row(CELL_NODE)
    cell_unit = _row(CELL_UNIT)
    next_of_unit = _row(NEXT_OF_UNIT)
    next_of_node = _row(NEXT_OF_NODE)
    time_ns = _row(TIMES)
    digest = _row(DIGEST)
    waits = _row(WAITS)
    leaves = _row(LEAVES)
    computed = _row(COMPUTED)
    returned = _row(RETURNED_SUM)
    moment = _row(MOMENT)
    total = _row(TOTAL)


class ScratchView:
    """Of :class:`~disco_hlo.search.state.Scratch`; see ``layout``."""

    mark = _row(MARK)
    inside = _row(INSIDE)
    reached = _row(REACHED)
    reached_back = _row(REACHED_BACK)
    members = _row(MEMBERS)
    neighbours = _row(NEIGHBOURS)
    queue = _row(QUEUE)
    queue_back = _row(QUEUE_BACK)
    value = _row(VALUE)
    needed = _row(NEEDED)
    judged = _row(JUDGED)
    readers = _row(READERS)
    judging = _row(JUDGING)
    results = _row(RESULTS)
    heroes = _row(HEROES)
    packed = _row(PACKED)
    touched = _row(TOUCHED)
    awaited = _row(AWAITED)
    producers_of = _row(PRODUCERS_OF)
    producers_at = _row(PRODUCERS_AT)
    producer_count = _row(PRODUCER_COUNT)
    evaluated = _row(EVALUATED)
    about = _row(ABOUT)
    number = _array()
    log = _array()
    changed = _array()
    verdict = _array()
    keyed = _array()
    refused = _array()
    producer = _array()


def row_numbers(record: type) -> dict[str, int]:
    """The rows of one of the records above, by name."""
    return {
        name: field.row
        for name, field in vars(record).items()
        if isinstance(field, _Field) and field.kind == "row"
    }


class View(types.Type):
    """The type of a record, to numba: rows and arrays are pointers."""

    def __init__(self, record: type) -> None:
        fields = {name: field for name, field in vars(record).items() if isinstance(field, _Field)}
        self.rows = row_numbers(record)
        self.arrays = [name for name, field in fields.items() if field.kind == "array"]
        self.numbers = [name for name, field in fields.items() if field.kind == "number"]
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
"""What moves are drawn from: fusible nodes, and all-reduces in production order."""


class PoolView(NamedTuple):
    """The same as pointers and lengths."""

    fusible: Row
    fusibles: int
    ranked: Row
    ranks: int


@inner
def _pointer(array: Ints) -> Any:
    return pointer_to(array.ctypes.data)


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
            _pointer(node), node.shape[1], _pointer(step.edge), _pointer(step.special), _pointer(step.limits),
            step.special.shape[0] - 1, node.shape[1] - 1,
        )
    )  # fmt: skip
    scratch_view = _scratch_view(
        (
            _pointer(row), row.shape[1], _pointer(scratch.number), _pointer(scratch.log), _pointer(scratch.changed),
            _pointer(scratch.verdict), _pointer(scratch.keyed), _pointer(scratch.refused),
            _pointer(scratch.producer),
        )
    )  # fmt: skip
    return graph_view, _state_view((_pointer(word), word.shape[1])), scratch_view
