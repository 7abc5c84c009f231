"""What must hold of a module before anything reckons with its numbers.

XLA checks its own modules; of what comes from a file nobody has. What is asked here is what the rest of the project
relies on: every id is defined once and before it is used, every number lies in its range and fits the arrays that
hold it, and computations call each other to an end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NoReturn

from disco_hlo.errors import ModuleError
from disco_hlo.hlo.graph import DTYPE_BYTES
from disco_hlo.hlo.opcodes import COLLECTIVE, COLLECTIVES, ELEMENTWISE
from disco_hlo.hlo.proto import DTYPES, Message
from disco_hlo.printable import counted

MOST_BYTES: Final = 1 << 50
"""No array is larger: a petabyte. Sums over all arrays of a module stay inside 64 bits."""
_DEEPEST_CALL: Final = 64
"""Computations inside one another. XLA nests loops, calls and fusions a few deep."""
_DEEPEST_TUPLE: Final = 64
_MOST_RANK: Final = 64
_MOST_WINDOW: Final = 1 << 31

_OPERANDS: Final[Mapping[str, tuple[int, int | None]]] = {
    **dict.fromkeys(ELEMENTWISE, (1, 3)),
    **dict.fromkeys(COLLECTIVES, (1, None)),
    **dict.fromkeys(
        ("broadcast", "reshape", "reverse", "slice", "transpose", "bitcast", "opt-barrier", "get-tuple-element",
         "while", "get-dimension-size", "fft", "cholesky", "all-reduce-done", "all-gather-done", "async-done",
         "async-update", "copy-start", "copy-done", "collective-permute-done"), (1, 1)
    ),
    **dict.fromkeys(("parameter", "constant", "iota"), (0, 0)),
    **dict.fromkeys(("concatenate", "all-reduce-start", "all-gather-start", "conditional"), (1, None)),
    **dict.fromkeys(("dot", "convolution"), (2, None)),
    **dict.fromkeys(("pad", "gather", "add-dependency"), (2, 2)),
    **dict.fromkeys(("reduce", "reduce-window"), (2, None)),
    "dynamic-slice": (1, None),
    "dynamic-update-slice": (2, None),
    "select-and-scatter": (3, 3),
    "scatter": (3, None),
}  # fmt: skip
"""Fewest and most operands of the opcodes whose operands the project looks at by their places."""
_CALLED: Final[Mapping[str, tuple[int, int | None]]] = {
    **{opcode: (1, 1) for opcode, collective in COLLECTIVE.items() if collective.reduces},
    "fusion": (1, 1), "call": (1, 1), "while": (2, 2), "conditional": (1, None), "reduce": (1, 1),
    "reduce-window": (1, 1), "scatter": (1, 1), "map": (1, 1), "all-reduce-start": (1, 1),
    "sort": (1, 1), "select-and-scatter": (2, 2), "async-start": (1, 1),
}  # fmt: skip
_FUSION_KINDS: Final = ("kLoop", "kInput", "kOutput", "kCustom")
_TUPLES: Final = ("get-tuple-element", "tuple", "all-gather-start")
_BODIES_OF_OPERANDS: Final = ("fusion", "call")
"""Their computation has a parameter for every operand."""


def check_module(module: Message) -> None:
    """Refuse a module that no XLA has written.

    Raises:
        ModuleError: something in it is defined twice or not at all, out of range, or calls itself.
    """
    _Checker(module).run()


class _Checker:
    def __init__(self, module: Message) -> None:
        self.module = module
        self.computations: dict[int, Message] = {}
        self.parameters: dict[int, int] = {}
        """How many each computation has."""
        self.known_shapes: set[bytes] = set()

    def fail(self, where: str, what: str) -> NoReturn:
        raise ModuleError(f"module {self.module.name[:200]!r} is damaged: {where} {what}")

    def run(self) -> None:
        for computation in self.module.computations:
            if computation.id in self.computations:
                self.fail(f"computation {computation.id}", "is listed twice")
            self.computations[computation.id] = computation
            opcodes = [instruction.opcode for instruction in computation.instructions]
            self.parameters[computation.id] = opcodes.count("parameter")
        self._check_calls()
        for computation in self.module.computations:
            self._check_computation(computation)
        self._check_schedule()
        self._check_aliases()

    def _check_calls(self) -> None:
        """Every computation that is called exists, and none calls itself, directly or through others."""
        called = {
            number: {one for i in computation.instructions for one in i.called_computation_ids}
            for number, computation in self.computations.items()
        }
        for number, others in called.items():
            missing = [one for one in others if one not in called]
            if missing:
                self.fail(f"computation {number}", f"calls computation {min(missing)}, which is missing")
        depth: dict[int, int] = {}
        left = dict(called)
        for level in range(_DEEPEST_CALL):
            done = [number for number, others in left.items() if others <= depth.keys()]
            if not done:
                break
            depth |= dict.fromkeys(done, level)
            left = {number: others for number, others in left.items() if number not in depth}
        if left:
            self.fail(f"computation {min(left)}", f"calls itself, or others more than {_DEEPEST_CALL} deep")

    def _check_computation(self, computation: Message) -> None:
        where = f"computation {computation.name[:200]!r}"
        known: dict[int, Message] = {}
        numbers: set[int] = set()
        for instruction in computation.instructions:
            if instruction.id in known:
                self.fail(where, f"lists instruction {instruction.id} twice")
            self._check_instruction(instruction, known)
            known[instruction.id] = instruction
            if instruction.opcode == "parameter":
                numbers.add(instruction.parameter_number)
        if computation.root_id not in known:
            self.fail(where, f"has no root {computation.root_id}")
        if numbers != set(range(self.parameters[computation.id])):
            self.fail(where, "does not number its parameters 0, 1, ..")
        for instruction in known.values():
            stray = [one for one in instruction.control_predecessor_ids if one not in known]
            if stray:
                self.fail(
                    _named(instruction), f"runs after instruction {stray[0]}, which its computation lacks"
                )

    def _check_instruction(self, instruction: Message, known: Mapping[int, Message]) -> None:
        opcode, where = instruction.opcode, _named(instruction)
        stray = [one for one in instruction.operand_ids if one not in known]
        if stray:
            self.fail(where, f"reads {stray[:8]}, which no earlier instruction defines")
        self._check_count(where, "operands", len(instruction.operand_ids), _OPERANDS.get(opcode))
        self._check_count(where, "computations", len(instruction.called_computation_ids), _CALLED.get(opcode))
        self._check_shape(where, instruction.shape, 0)
        if opcode == "fusion" and instruction.fusion_kind not in _FUSION_KINDS:
            self.fail(where, f"is a fusion of kind {instruction.fusion_kind[:80]!r}")
        if opcode in _BODIES_OF_OPERANDS:
            wanted = self.parameters[instruction.called_computation_ids[0]]
            self._check_count(where, "operands", len(instruction.operand_ids), (wanted, wanted))
        for pair in instruction.output_operand_aliasing:
            self._check_within(where, "aliased operand", [pair.operand_index], len(instruction.operand_ids))
        _check_attributes(self, instruction, [known[one].shape for one in instruction.operand_ids])

    def _check_count(
        self, where: str, what: str, count: int, expected: tuple[int, int | None] | None
    ) -> None:
        if expected is None or (expected[0] <= count and (expected[1] is None or count <= expected[1])):
            return
        fewest, most = expected
        words = (
            f"{fewest}" if fewest == most else f"at least {fewest}" if most is None else f"{fewest} to {most}"
        )
        self.fail(where, f"has {count} {what}, expected {words}")

    def _check_shape(self, where: str, shape: Message, depth: int) -> None:
        data = shape.SerializeToString()
        if data in self.known_shapes:
            return
        dtype = DTYPES.get(shape.element_type)
        if dtype is None:
            self.fail(where, f"has the element type {shape.element_type}, expected one of {sorted(DTYPES)}")
        if depth > _DEEPEST_TUPLE:
            self.fail(where, f"is a tuple in a tuple, more than {_DEEPEST_TUPLE} deep")
        if dtype == "tuple":
            for element in shape.tuple_shapes:
                self._check_shape(where, element, depth + 1)
        else:
            self._check_array(where, dtype, shape)
        self.known_shapes.add(data)

    def _check_array(self, where: str, dtype: str, shape: Message) -> None:
        extents, layout = list(shape.dimensions), list(shape.layout.minor_to_major)
        size_bytes: float = DTYPE_BYTES[dtype]
        if len(extents) > _MOST_RANK:
            self.fail(where, f"has {len(extents)} dimensions, expected at most {_MOST_RANK}")
        for extent in extents:
            # A bound on the product that no empty dimension hides: strides are made of the others.
            size_bytes *= max(extent, 1)
            if extent < 0 or size_bytes > MOST_BYTES:
                self.fail(
                    where,
                    f"has the dimensions {extents[:8]}, expected 0 or more and {MOST_BYTES} bytes in all",
                )
        if layout and sorted(layout) != list(range(len(extents))):
            self.fail(where, f"has {counted(len(extents), 'dimension')} in the order {layout[:8]}")

    def _check_within(self, where: str, what: str, numbers: Collection[int], limit: int) -> None:
        wrong = [number for number in numbers if not 0 <= number < limit]
        if wrong:
            self.fail(where, f"has the {what} {wrong[0]}, expected 0 to {limit - 1}")

    def _check_distinct(self, where: str, what: str, numbers: Sequence[int], limit: int) -> None:
        self._check_within(where, what, numbers, limit)
        if len({*numbers}) != len(numbers):
            self.fail(where, f"has the {what}s {list(numbers)[:8]}, each of which it may name once")

    def _check_schedule(self) -> None:
        for number, sequence in self.module.schedule.sequences.items():
            computation = self.computations.get(number)
            if computation is None:
                self.fail("the schedule", f"is of computation {number}, which is missing")
            listed, ids = sequence.instruction_ids, {one.id for one in computation.instructions}
            if len(listed) != len(ids) or {*listed} != ids:
                self.fail(
                    f"computation {computation.name[:200]!r}:",
                    "its schedule does not list its instructions exactly once",
                )

    def _check_aliases(self) -> None:
        entry = self.computations[self.module.entry_computation_id]
        root = next(one for one in entry.instructions if one.id == entry.root_id)
        outputs = len(root.shape.tuple_shapes) if DTYPES[root.shape.element_type] == "tuple" else 1
        for alias in self.module.input_output_alias.entries:
            place = list(alias.output_shape_index)[:1] or [0]
            self._check_within("an alias", "parameter", [alias.parameter_number], self.parameters[entry.id])
            self._check_within("an alias", "output", place, outputs)


def _named(instruction: Message) -> str:
    return f"instruction {instruction.name[:200]!r} ({instruction.opcode[:80]})"


def _check_attributes(check: _Checker, instruction: Message, operands: Sequence[Message]) -> None:
    """The numbers by which an opcode names dimensions and members."""
    opcode, where, shape = instruction.opcode, _named(instruction), instruction.shape
    rank = len(shape.dimensions)
    first = len(operands[0].dimensions) if operands else 0
    dimensions = instruction.dimensions
    if opcode in _TUPLES:
        _check_tuple(check, where, instruction, operands)
    elif opcode == "broadcast":
        check._check_distinct(where, "dimension", dimensions, rank)
        check._check_count(where, "dimensions", len(dimensions), (first, first))
    elif opcode == "transpose":
        check._check_distinct(where, "dimension", dimensions, first)
        check._check_count(where, "dimensions", len(dimensions), (rank, rank))
        if [operands[0].dimensions[x] for x in dimensions] != list(shape.dimensions):
            check.fail(where, f"makes {list(shape.dimensions)} of {list(operands[0].dimensions)}")
    elif opcode in ("reduce", "reverse"):
        check._check_distinct(where, "dimension", dimensions, first)
    elif opcode in COLLECTIVE and COLLECTIVE[opcode].along:
        # Of several arrays, each along the same dimension.
        rank = min((len(one.dimensions) for one in operands), default=0)
        check._check_within(where, "dimension", dimensions, rank)
    elif opcode == "iota":
        check._check_within(where, "dimension", dimensions, max(rank, 1))
    elif opcode == "concatenate":
        _check_concatenate(check, where, instruction, operands)
    elif opcode == "slice":
        _check_slice(check, where, instruction, operands[0])
    elif opcode == "dot":
        _check_dot(check, where, instruction, operands)
    elif opcode == "convolution":
        feature = instruction.convolution_dimension_numbers.kernel_input_feature_dimension
        check._check_within(where, "feature dimension", [feature], len(operands[1].dimensions))
    sizes = [number for one in instruction.window.dimensions for number in (one.size, one.stride)]
    check._check_within(where, "window size", sizes, _MOST_WINDOW)


def _check_tuple(check: _Checker, where: str, instruction: Message, operands: Sequence[Message]) -> None:
    members = len(instruction.shape.tuple_shapes)
    if instruction.opcode == "get-tuple-element":
        check._check_within(where, "member", [instruction.tuple_index], len(operands[0].tuple_shapes))
    elif instruction.opcode == "tuple":
        check._check_count(where, "operands", len(operands), (members, members))
    else:
        check._check_count(where, "results", members, (2, None))


def _check_concatenate(
    check: _Checker, where: str, instruction: Message, operands: Sequence[Message]
) -> None:
    dimensions, rank = instruction.dimensions, len(instruction.shape.dimensions)
    check._check_within(where, "dimension", dimensions, max(rank, 1))
    if len(dimensions) != 1 or any(len(one.dimensions) != rank for one in operands):
        check.fail(where, "joins arrays that it does not fit")


def _check_slice(check: _Checker, where: str, instruction: Message, operand: Message) -> None:
    extents, cuts = operand.dimensions, instruction.slice_dimensions
    check._check_count(where, "slices", len(cuts), (len(extents), len(extents)))
    for extent, cut in zip(extents, cuts, strict=True):
        if not (0 <= cut.start <= cut.limit <= extent and cut.stride >= 0):
            check.fail(where, f"cuts {cut.start} to {cut.limit} in steps of {cut.stride} out of {extent}")


def _check_dot(check: _Checker, where: str, instruction: Message, operands: Sequence[Message]) -> None:
    numbers = instruction.dot_dimension_numbers
    left = [*numbers.lhs_contracting_dimensions, *numbers.lhs_batch_dimensions]
    right = [*numbers.rhs_contracting_dimensions, *numbers.rhs_batch_dimensions]
    check._check_distinct(where, "dimension", left, len(operands[0].dimensions))
    check._check_distinct(where, "dimension", right, len(operands[1].dimensions))
    if len(left) != len(right):
        check.fail(where, f"pairs the dimensions {left[:8]} and {right[:8]}")
