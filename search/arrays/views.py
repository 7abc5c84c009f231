"""Arrays as compiled code sees them: rows of 64-bit integers by name.

A numba function that takes an array counts references to it (``disco_hlo.compiled``); one that takes a pointer to each
row writes seventy words at every call. So each of the three records below is handed down as the address of its first
row and the length of a row, with the few arrays that are no rows; where a row begins is worked out where it is read.
They are made once, at the entry of what Python calls (:func:`open_views`).
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
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.rng import Generator

if TYPE_CHECKING:
    from disco_hlo.search.arrays.board import Scratch, State
    from disco_hlo.search.arrays.step import Step

_POINTER: Final = types.CPointer(types.int64)

for module in (legality, legality_gpu, reasons):
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
    """Of :class:`~disco_hlo.search.arrays.step.Step`; see ``layout``."""

    flags = _row(at.FLAGS)
    operands_at = _row(at.OPERANDS_AT)
    sources_at = _row(at.SOURCES_AT)
    readers_at = _row(at.READERS_AT)
    earlier_at = _row(at.EARLIER_AT)
    later_at = _row(at.LATER_AT)
    buffers_at = _row(at.BUFFERS_AT)
    users_at = _row(at.USERS_AT)
    shape = _row(at.SHAPE)
    geometry = _row(at.GEOMETRY)
    rank = _row(at.RANK)
    channel = _row(at.CHANNEL)
    key = _row(at.KEY)
    alone = _row(at.ALONE)
    slice_ns = _row(at.SLICE)
    mixed = _row(at.MIXED)
    gpu_flags = _row(at.GPU_FLAGS)
    reduction = _row(at.REDUCTION)
    transpose = _row(at.TRANSPOSE)
    loop = _row(at.LOOP)
    operand_loop = _row(at.OPERAND_LOOP)
    shared_bytes = _row(at.SHARED_BYTES)
    moved_bytes = _row(at.MOVED)
    read = _row(at.READ)
    hold_ns = _row(at.HOLD)
    head_ns = _row(at.HEAD)
    uncut_at = _row(at.UNCUT_AT)
    element_count = _row(at.ELEMENT_COUNT)
    reads_per_element = _row(at.READS_PER_ELEMENT)
    edge = _array()
    special = _array()
    limits = _array()
    special_mask = _number()
    nodes = _number()


class StateView:
    """Of :class:`~disco_hlo.search.arrays.board.State`; see ``layout``. Part p of the unit with head h takes
    ``time_ns[TIME_COLUMNS * h + p]``."""

    owner = _row(at.OWNER)
    next = _row(at.NEXT)
    count = _row(at.COUNT)
    place = _row(at.PLACE)
    order = _row(at.ORDER)
    copies = _row(at.COPIES)
    copiers = _row(at.COPIERS)
    cell_node = _row(at.CELL_NODE)
    cell_unit = _row(at.CELL_UNIT)
    next_of_unit = _row(at.NEXT_OF_UNIT)
    next_of_node = _row(at.NEXT_OF_NODE)
    time_ns = _row(at.TIMES)
    digest = _row(at.DIGEST)
    waits = _row(at.WAITS)
    leaves = _row(at.LEAVES)
    computed = _row(at.COMPUTED)
    returned = _row(at.RETURNED_SUM)
    moment = _row(at.MOMENT)
    total = _row(at.TOTAL)


class ScratchView:
    """Of :class:`~disco_hlo.search.arrays.board.Scratch`; see ``layout``."""

    mark = _row(at.MARK)
    inside = _row(at.INSIDE)
    reached = _row(at.REACHED)
    reached_back = _row(at.REACHED_BACK)
    members = _row(at.MEMBERS)
    neighbours = _row(at.NEIGHBOURS)
    queue = _row(at.QUEUE)
    queue_back = _row(at.QUEUE_BACK)
    value = _row(at.VALUE)
    needed = _row(at.NEEDED)
    judged = _row(at.JUDGED)
    readers = _row(at.READERS)
    judging = _row(at.JUDGING)
    results = _row(at.RESULTS)
    heroes = _row(at.HEROES)
    packed = _row(at.PACKED)
    touched = _row(at.TOUCHED)
    awaited = _row(at.AWAITED)
    producers_of = _row(at.PRODUCERS_OF)
    producers_at = _row(at.PRODUCERS_AT)
    producer_count = _row(at.PRODUCER_COUNT)
    evaluated = _row(at.EVALUATED)
    about = _row(at.ABOUT)
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
