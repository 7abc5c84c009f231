"""Arrays as compiled code sees them: rows of 64-bit integers by name.

A numba function that takes an array counts references to it (``disco_hlo.pointers``); one that takes a pointer to each
row writes seventy words at every call. So each of the three records below is handed down as the address of its first
row and the length of a row, with the few arrays that are no rows; where a row begins is worked out where it is read.
They are made once, at the entry of what Python calls (:func:`open_views`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model

from disco_hlo.compiled import inner, shared
from disco_hlo.core import legality, legality_gpu, marks, reasons
from disco_hlo.pointers import pointer_to
from disco_hlo.search.arrays import layout as at

_POINTER: Final = types.CPointer(types.int64)

for module in (legality, legality_gpu, marks, reasons):
    shared(module)


class View(types.Type):
    """The type of a record of rows, to numba. ``rows`` are read as pointers by their names, and so are the arrays
    named in ``arrays``; ``numbers`` are what they are."""

    rows: ClassVar[dict[str, int]]
    arrays: ClassVar[tuple[str, ...]] = ()
    numbers: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        super().__init__(name=type(self).__name__)


class GraphView(View):
    """Of :class:`~disco_hlo.search.arrays.step.Step`; see ``layout``."""

    rows: ClassVar = {
        "flags": at.FLAGS,
        "operands_at": at.OPERANDS_AT,
        "sources_at": at.SOURCES_AT,
        "readers_at": at.READERS_AT,
        "earlier_at": at.EARLIER_AT,
        "later_at": at.LATER_AT,
        "buffers_at": at.BUFFERS_AT,
        "users_at": at.USERS_AT,
        "shape": at.SHAPE,
        "geometry": at.GEOMETRY,
        "rank": at.RANK,
        "channel": at.CHANNEL,
        "key": at.KEY,
        "alone": at.ALONE,
        "slice_ns": at.SLICE,
        "mixed": at.MIXED,
        "gpu_flags": at.GPU_FLAGS,
        "reduction": at.REDUCTION,
        "transpose": at.TRANSPOSE,
        "loop": at.LOOP,
        "operand_loop": at.OPERAND_LOOP,
        "shared_bytes": at.SHARED_BYTES,
        "moved_bytes": at.MOVED,
        "read": at.READ,
        "hold_ns": at.HOLD,
        "uncut_at": at.UNCUT_AT,
        "element_count": at.ELEMENT_COUNT,
        "reads_per_element": at.READS_PER_ELEMENT,
    }
    arrays = ("edge", "special", "limits")
    numbers = ("special_mask", "nodes")


class StateView(View):
    """Of :class:`~disco_hlo.search.arrays.board.State`; see ``layout``. Part p of the unit with head h takes
    ``time_ns[TIME_COLUMNS * h + p]``."""

    rows: ClassVar = {
        "owner": at.OWNER,
        "next": at.NEXT,
        "count": at.COUNT,
        "place": at.PLACE,
        "order": at.ORDER,
        "copies": at.COPIES,
        "copiers": at.COPIERS,
        "cell_node": at.CELL_NODE,
        "cell_unit": at.CELL_UNIT,
        "next_of_unit": at.NEXT_OF_UNIT,
        "next_of_node": at.NEXT_OF_NODE,
        "time_ns": at.TIMES,
        "digest": at.DIGEST,
        "waits": at.WAITS,
        "leaves": at.LEAVES,
        "computed": at.COMPUTED,
        "returned": at.RETURNED_SUM,
        "moment": at.MOMENT,
        "total": at.TOTAL,
    }


class ScratchView(View):
    """Of :class:`~disco_hlo.search.arrays.board.Scratch`; see ``layout``."""

    rows: ClassVar = {
        "mark": at.MARK,
        "inside": at.INSIDE,
        "reached": at.REACHED,
        "reached_back": at.REACHED_BACK,
        "members": at.MEMBERS,
        "neighbours": at.NEIGHBOURS,
        "queue": at.QUEUE,
        "queue_back": at.QUEUE_BACK,
        "value": at.VALUE,
        "needed": at.NEEDED,
        "judged": at.JUDGED,
        "readers": at.READERS,
        "judging": at.JUDGING,
        "results": at.RESULTS,
        "heroes": at.HEROES,
        "packed": at.PACKED,
        "touched": at.TOUCHED,
        "awaited": at.AWAITED,
        "producers_of": at.PRODUCERS_OF,
        "producers_at": at.PRODUCERS_AT,
        "producer_count": at.PRODUCER_COUNT,
        "evaluated": at.EVALUATED,
        "about": at.ABOUT,
    }
    arrays = ("number", "log", "changed", "verdict", "keyed", "refused", "producer")


_GRAPH, _STATE, _SCRATCH = GraphView(), StateView(), ScratchView()


@register_model(GraphView)
@register_model(StateView)
@register_model(ScratchView)
class _ViewModel(models.StructModel):
    """In memory: the first row, the numbers in a row, then arrays and numbers as they are named."""

    def __init__(self, manager: Any, view: Any) -> None:
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


class PoolView(NamedTuple):
    """What moves are drawn from, as pointers and lengths."""

    fusible: Any
    """Fusible nodes."""
    fusibles: Any
    ranked: Any
    """All-reduces in production order."""
    ranks: Any


@inner
def _pointer(array: Any) -> Any:
    return pointer_to(array.ctypes.data)


@inner
def open_draws(generator: Any, pools: Any) -> Any:
    """A pointer into the generator, and a view of (fusible nodes, all-reduces in production order)."""
    fusible, ranked = pools
    view = PoolView(
        pointer_to(fusible.ctypes.data), fusible.size, pointer_to(ranked.ctypes.data), ranked.size
    )
    return pointer_to(generator.ctypes.data), view


@inner
def open_views(step: Any, state: Any, scratch: Any) -> Any:
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
