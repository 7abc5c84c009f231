"""Where an early module multiplies and communicates so that a fused kernel could do both.

Punniyamurthy et al. name the pairs (section II); XLA writes them with reshapes, transposes and type conversions in
between, the operands of a matmul either way round, and a reduce-scatter as an all-reduce of which each device reads its
own shard. This module looks through all of that and changes nothing; `fuse` does.

    all-gather -> dot        all-gather-matmul         the gathered dimension stays in the result
    dot -> reduce-scatter    matmul-reduce-scatter     or all-reduce and the own shard of it
    dot -> all-reduce        matmul-all-reduce         matvec-all-reduce where one operand is a vector
    dot -> all-to-all        matmul-all-to-all         as experts send what they computed for others

Where what is summed comes from no matmul, `update_pattern` looks for an update between the sum and an all-gather.

A kernel takes (M, K) by (K, N), and gathers or scatters M. Where it is the second operand's dimension that the dot
keeps, the kernel multiplies the transposes, the second first, and gives the transposed result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.proto import Message
from disco_hlo.kernels.refusals import MOST_DEVICES
from disco_hlo.kernels.tiles import HALF_TYPES, MATMUL_RANGE, VECTOR_RANGE, MatmulTiles
from disco_hlo.kernels.times import Size
from disco_hlo.kernels.update_pattern import MissedError, UpdateCall, own_shard_of, require_met, update_call
from disco_hlo.structure.chunk import operand_needs, reduction_opcode
from disco_hlo.structure.program import Program, dims, dtype
from disco_hlo.structure.sharded import groups_of

GATHER, SCATTER, ALL_REDUCE, VECTOR, EXCHANGE = (
    "all-gather-matmul",
    "matmul-reduce-scatter",
    "matmul-all-reduce",
    "matvec-all-reduce",
    "matmul-all-to-all",
)
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
# What only renames or moves elements; of a type conversion, too, each element is made of one.
MOVING = ("reshape", "bitcast", "transpose", "copy")
# HLO's names of the types that numpy calls otherwise.
SHORT_NAMES = {"bfloat16": "bf16", "float16": "f16"}


class NoMatmulError(MissedError):
    """What a collective sums or sends comes from no matmul."""


@dataclass(frozen=True, slots=True)
class FusedCall:
    """A matmul and a collective that a kernel could replace.

    Attributes:
        kernel: its name in the catalog.
        computation: id of the computation that both are in.
        collective, matmul: names of the instructions.
        m, k, n: the kernel multiplies (m, k) by (k, n) on each device; n is 1 for a vector. Of an all-gather, m is what
            a device has before it.
        dtype: of all three matrices.
        swapped: the dot's second operand comes first, and the result is the transpose of the dot's.
        first_transposed, second_transposed: the kernel's operand lies the other way round in the dot's, so that a
            transpose comes before the kernel.
        tiles: the points of the kernel's tuning range that fit.
        devices: how many take part: all, in order.
        between: names of the instructions between matmul and collective, in the program's order; of each the dimension
            of its result of which every device has a shard, -1 where every device has all of it.
    """

    kernel: str
    computation: int
    collective: str
    matmul: str
    m: int
    k: int
    n: int
    dtype: str
    swapped: bool
    first_transposed: bool
    second_transposed: bool
    tiles: tuple[MatmulTiles, ...]
    devices: int
    between: tuple[tuple[str, int], ...]

    @property
    def size(self) -> Size:
        """By which its time is known."""
        return Size(self.kernel, self.devices, self.dtype, self.m, self.k, self.n)


Call = FusedCall | UpdateCall


def fused_calls(module: bytes) -> list[Call]:
    """The pairs that a kernel could replace, in the entry and in loops.

    Args:
        module: a serialized HloModuleProto before scheduling.

    Raises:
        IllegalMoveError: the module is scheduled.
        ModuleError: the bytes are no HLO module.
    """
    whole = Program(module)
    calls: list[Call] = []
    for computation in whole.module.computations:
        program = whole.inside(computation.id)
        for collective in program.instructions:
            if collective.opcode not in COLLECTIVES:
                continue
            with contextlib.suppress(MissedError):
                calls.append(fused_call(program, collective))
    return calls


def fused_call(program: Program, collective: Message) -> Call:
    """The call that replaces a collective and its matmul, or its update.

    Raises:
        MissedError: there is none.
    """
    require_met(len(collective.operand_ids) == 1, f"it has {len(collective.operand_ids)} operands")
    devices = _devices(program, collective)
    if collective.opcode == "all-gather":
        return _gather(program, collective, devices)
    if collective.opcode == "all-to-all":
        return _reduce(program, collective, devices)
    reduction = reduction_opcode(program, collective)
    require_met(reduction == "add", f"it applies {reduction or 'more than one op'}")
    try:
        return _reduce(program, collective, devices)
    except NoMatmulError as missed:
        try:
            return update_call(program, collective, devices)
        except MissedError as also:
            raise MissedError(f"{missed}; {also}") from None


def _devices(program: Program, collective: Message) -> int:
    """How many devices take part: all, in order."""
    try:
        groups = groups_of(program, collective)
    except IllegalMoveError as error:
        raise MissedError(str(error)) from None
    count = len(groups[0])
    whole = tuple(range(count))
    require_met(
        groups == (whole,) and count == (program.partitions() or count),
        f"its groups are {groups}; a kernel runs on all devices, in order",
    )
    require_met(count <= MOST_DEVICES, f"{count} devices; a kernel takes {MOST_DEVICES} at most")
    return count


# --- all-gather -> dot ---


def _gather(program: Program, collective: Message, devices: int) -> FusedCall:
    value, dimension = collective, int(collective.dimensions[0])
    between: list[tuple[str, int]] = []
    while (reader := _only_reader(program, value)).opcode != "dot":
        require_met(
            reader.opcode in (*MOVING, "convert"),
            f"{reader.name} ({reader.opcode}) reads it first",
        )
        dimension = _carried(program, reader, dimension, devices)
        value = reader
        between.append((value.name, dimension))
    require_met(reader.operand_ids[0] != reader.operand_ids[1], f"{reader.name} multiplies it by itself")
    product = _Product(program, reader)
    index = list(reader.operand_ids).index(value.id)
    contracted = product.contracted[index]
    require_met(dimension != contracted, f"{reader.name} sums over the gathered dimension")
    require_met(
        product.free[index][0] == dimension,
        f"dimension {dimension} of {value.name} is not the first that {reader.name} keeps of it",
    )
    return product.call(GATHER, collective, index == 1, devices, between)


def _only_reader(program: Program, value: Message) -> Message:
    """What reads a value, if it is one instruction alone."""
    readers = program.readers(value)
    require_met(value.id != program.root and len(readers) > 0, f"the program returns {value.name}")
    names = ", ".join(f"{r.name} ({r.opcode})" for r in readers[:4])
    require_met(len(readers) == 1, f"{value.name} is read by {names}")
    _require_unordered(readers[0])
    return readers[0]


def _require_unordered(instruction: Message) -> None:
    require_met(
        not instruction.control_predecessor_ids,
        f"{instruction.name} waits by a control dependency",
    )


def _carried(program: Program, reader: Message, dimension: int, devices: int) -> int:
    """Which dimension of the reader's result its operand's is, so that shards stay whole."""
    for result in range(len(dims(reader))):
        try:
            needed = operand_needs(program, reader, result, devices)
        except IllegalMoveError:
            continue
        if needed[0] == dimension:
            return result
    raise MissedError(f"{reader.name} ({reader.opcode}) does not keep the shards together")


# --- dot -> reduce-scatter, dot -> all-reduce, dot -> all-to-all ---


def _reduce(program: Program, collective: Message, devices: int) -> FusedCall:
    scattered = (
        int(collective.dimensions[0])
        if collective.opcode in ("reduce-scatter", "all-to-all")
        else _own_shard_of(program, collective, devices)
    )
    value = program.operands(collective)[0]
    between: list[tuple[str, int]] = []
    while value.opcode != "dot":
        require_met(value.opcode != "convert", f"{value.name} makes another type of the partial sums")
        if value.opcode not in MOVING:
            raise NoMatmulError(f"{value.name} ({value.opcode}) gives what it sums or sends")
        _only_reader(program, value)
        between.insert(0, (value.name, -1 if scattered is None else scattered))
        if scattered is not None:
            try:
                needed = operand_needs(program, value, scattered, devices)[0]
            except IllegalMoveError as error:
                raise MissedError(str(error)) from None
            assert needed is not None
            scattered = needed
        value = program.operands(value)[0]
    _only_reader(program, value)
    _require_unordered(value)
    product = _Product(program, value)
    if scattered is None:
        kernel = VECTOR if 1 in product.sizes else ALL_REDUCE
        # Any rows may be an owner's: take the operand whose rows fit, and a vector second.
        orders = [False, True] if product.sizes[0] != 1 else [True]
        missed: MissedError | None = None
        for swapped in orders:
            try:
                return product.call(kernel, collective, swapped, devices, between)
            except MissedError as error:
                missed = missed or error
        assert missed is not None
        raise missed
    firsts = [product.result_of(index) for index in (0, 1)]
    require_met(
        scattered in firsts,
        f"dimension {scattered} of {value.name} is not the first that it keeps of an operand",
    )
    kernel = EXCHANGE if collective.opcode == "all-to-all" else SCATTER
    return product.call(kernel, collective, firsts.index(scattered) == 1, devices, between)


def _own_shard_of(program: Program, collective: Message, devices: int) -> int | None:
    """The dimension of which each device reads its own shard alone; None where anything else is read."""
    readers = program.readers(collective)
    if len(readers) != 1 or collective.id == program.root:
        return None
    return own_shard_of(program, readers[0], devices)


# --- the matmul ---


class _Product:
    """A dot as a product of two matrices: of each operand the dimension that it sums over and those that it keeps."""

    def __init__(self, program: Program, dot: Message) -> None:
        numbers, operands = dot.dot_dimension_numbers, program.operands(dot)
        contracted = [list(numbers.lhs_contracting_dimensions), list(numbers.rhs_contracting_dimensions)]
        require_met(not numbers.lhs_batch_dimensions, f"{dot.name} has batch dimensions")
        require_met(
            len(contracted[0]) == 1,
            f"{dot.name} sums over {len(contracted[0])} dimensions",
        )
        self.computation, self.dot = program.entry.id, dot
        self.contracted = [int(one[0]) for one in contracted]
        self.free = [
            [d for d in range(len(dims(o))) if d != at]
            for o, at in zip(operands, self.contracted, strict=True)
        ]
        self.sizes = [prod(dims(o)[d] for d in free) for o, free in zip(operands, self.free, strict=True)]
        self.depth = dims(operands[0])[self.contracted[0]]
        for operand, at, free in zip(operands, self.contracted, self.free, strict=True):
            met = at in (0, len(free))
            require_met(
                met,
                f"{operand.name}: dimension {at} is summed over, others lie on both sides of it",
            )
        types = [dtype(one) for one in (*operands, dot)]
        known = [SHORT_NAMES[one.name] for one in HALF_TYPES]
        met = types[0] in known and len(set(types)) == 1
        require_met(met, f"{dot.name} multiplies {types[0]} by {types[1]} into {types[2]}; a kernel, {known}")

    def result_of(self, index: int) -> int:
        """Which dimension of the result is the first that is kept of an operand; -1 where none is."""
        return (0 if index == 0 else len(self.free[0])) if self.free[index] else -1

    def call(
        self,
        kernel: str,
        collective: Message,
        swapped: bool,
        devices: int,
        between: Sequence[tuple[str, int]],
    ) -> FusedCall:
        """The kernel's call, if any of its tiles fit."""
        first, second = (1, 0) if swapped else (0, 1)
        m, n = self.sizes[first], self.sizes[second]
        rows = m // devices
        tiles = tuple(
            t
            for t in (VECTOR_RANGE if kernel == VECTOR else MATMUL_RANGE)
            if m % (devices * t.block_m) == 0
            and (kernel == VECTOR or n % t.block_n == 0)
            and self.depth % t.tile_k == 0
            and self.depth >= 2 * t.tile_k
        )
        why = f"{self.dot.name} is ({m}, {self.depth}) by ({self.depth}, {n}), its rows on {devices} devices"
        require_met(bool(tiles), f"{why}: no tiles divide it")
        return FusedCall(
            kernel=kernel,
            computation=self.computation,
            collective=collective.name,
            matmul=self.dot.name,
            m=rows if kernel == GATHER else m,
            k=self.depth,
            n=n,
            dtype=dtype(self.dot),
            swapped=swapped,
            first_transposed=self._lies_across(first, wanted_last=True),
            second_transposed=self._lies_across(second, wanted_last=False),
            tiles=tiles,
            devices=devices,
            between=tuple(between),
        )

    def _lies_across(self, index: int, *, wanted_last: bool) -> bool:
        """Whether an operand's summed dimension is at the other end than the kernel wants it."""
        return bool(self.free[index]) and (self.contracted[index] == len(self.free[index])) != wanted_last
