"""Fused kernels as a structural move: a matmul and its collective in an early module become one custom call, or a sum,
an update and an all-gather.

The kernel of `catalog` is lowered for the shapes of one device, and the instructions of that take the place of the
pair (Punniyamurthy et al., section III: the fused operator stands where framework and compiler had two). XLA lays out,
fuses and orders what is around it.

A kernel fills the device and waits for the same kernel on the other devices. A collective beside it could wait there
for a multiprocessor that the kernel holds here, and the kernel here for one that the collective holds there: both for
ever. So a move puts kernels in one order and lets no collective be under way beside one, by control dependencies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any, Protocol

import msgspec

from disco_hlo.errors import IllegalMoveError, UnsupportedError
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.proto import Message
from disco_hlo.kernels.pattern import (
    GATHER,
    MOVING,
    SCATTER,
    VECTOR,
    Call,
    FusedCall,
    fused_call,
    fused_calls,
)
from disco_hlo.kernels.tiles import MatmulTiles, UpdateTiles
from disco_hlo.kernels.update_pattern import UPDATES, MissedError, Recipe, UpdateCall, program_above
from disco_hlo.structure.moves import Fuse, FusedPair, Move, apply_moves
from disco_hlo.structure.program import Program, computations, dims, dtype, illegal, waits_for
from disco_hlo.structure.sharded import scatter

Shape = tuple[tuple[int, ...], str]
"""Sizes and element type, as HLO calls it."""


class Lower(Protocol):
    """Makes a kernel."""

    def __call__(
        self,
        kernel: str,
        tiles: Any,
        devices: int,
        shapes: tuple[Shape, ...],
        recipe: Recipe | None = None,
        /,
    ) -> bytes:
        """A serialized HloModuleProto, whose entry takes arrays of these shapes on a device and gives one; with a
        recipe several, in a tuple."""
        ...


Pays = Callable[[Call, str, bool], bool]
"""Whether a kernel is worth its place, which a collective of this opcode has now, in a loop or not."""

KERNEL_SCHEDULES = {"fused-kernels": "", "split-fused-kernels": "split"}
"""Schedules that end with kernels, and the schedule that each begins with."""


def kernel_schedules(
    module: bytes,
    others: Mapping[str, tuple[Move, ...]],
    *,
    copies: bool,
    lower: Lower,
    pays: Pays = lambda *_: True,
) -> dict[str, tuple[Move, ...]]:
    """Those of KERNEL_SCHEDULES that a module has a pair for: every pair that a kernel takes and that pays, with its
    likeliest tiles.

    Args:
        module: the early module, as for `apply_moves`.
        others: its other schedules by name.
        copies: as for `Program`.
        lower: see `lowering.lowered`.
        pays: see `times.payer`.
    """
    found: dict[str, tuple[Move, ...]] = {}
    for name, first in KERNEL_SCHEDULES.items():
        before = others.get(first, ())
        if first and not before:
            continue
        moved = apply_moves(module, before, copies=copies)
        if pairs := _pairs(moved, lower, pays):
            found[name] = (*before, Fuse(pairs))
    return found


def _pairs(module: bytes, lower: Lower, pays: Pays) -> tuple[FusedPair, ...]:
    """Pairs of a module that pay and can all be replaced."""
    calls = fused_calls(module)
    wanted: dict[tuple[tuple[int, ...], int], FusedPair] = {}
    for path, program in computations(Program(module)):
        at = {one.name: position for position, one in enumerate(program.instructions)}
        for call in calls:
            if call.computation == program.entry.id:
                collective, matmul = at[call.collective], at[call.matmul]
                opcode, tiles = program.instructions[collective].opcode, asdict(call.tiles[0])
                if not pays(call, opcode, bool(path)):
                    continue
                # A matmul that two collectives could share stays with the first.
                pair = FusedPair(call.kernel, path, collective, opcode, matmul, tiles)
                wanted.setdefault((path, matmul), pair)
    found = tuple(wanted.values())
    if _fits(module, found, lower):
        return found
    kept: tuple[FusedPair, ...] = ()
    for pair in found:
        kept = (*kept, pair) if _fits(module, (*kept, pair), lower) else kept
    return kept


def _fits(module: bytes, pairs: tuple[FusedPair, ...], lower: Lower) -> bool:
    try:
        fuse(Program(module), Fuse(pairs), lower)
    except IllegalMoveError:
        return False
    return True


def fuse(program: Program, move: Fuse, lower: Lower) -> None:
    """Put kernels in the place of the pairs of a move.

    Raises:
        IllegalMoveError: a pair is not what it was, its kernel refuses it, or its loop shares its body with another.
    """
    inside: dict[tuple[int, ...], Program] = {(): program}
    found: list[tuple[Program, Message, FusedPair]] = []
    holders: dict[tuple[int, ...], list[int]] = {}
    for pair in move.pairs:
        for depth, position in enumerate(pair.loop):
            path = pair.loop[: depth + 1]
            loop = inside[path[:-1]].at(position, "while")
            if path not in inside:
                inside[path], _ = inside[path[:-1]].inside_loop(loop)
            holders.setdefault(path[:-1], []).append(loop.id)
        own = inside[pair.loop]
        collective = own.at(pair.collective, pair.opcode)
        if collective.opcode not in COLLECTIVES:
            raise illegal(collective, "no collective")
        own.at(pair.matmul, "all-gather" if pair.kernel in UPDATES else "dot")
        found.append((own, collective, pair))
    matmuls = [own.instructions[pair.matmul].id for own, _, pair in found]
    for (own, collective, pair), matmul in zip(found, matmuls, strict=True):
        kernel = _replace(own, collective, matmul, pair, lower)
        holders.setdefault(pair.loop, []).append(kernel.id)
    for path, ids in holders.items():
        _keep_collectives_away(inside[path], set(ids))
    for path, own in inside.items():
        if path:
            own.flush()


def _replace(own: Program, collective: Message, matmul: int, pair: FusedPair, lower: Lower) -> Message:
    """Replace one pair; returns its custom call."""
    if own.by_id.get(collective.id) is not collective:
        raise illegal(collective, "another pair has it")
    try:
        call = fused_call(own, collective)
    except MissedError as missed:
        raise illegal(collective, str(missed)) from None
    dot = own.by_id.get(matmul)
    if dot is None:
        raise illegal(collective, "another pair has its matmul")
    if call.kernel != pair.kernel or dot.name != call.matmul:
        raise illegal(
            collective,
            f"{call.kernel} takes it with {call.matmul}, expected {pair.kernel} with {dot.name}: the move "
            "was made for another module",
        )
    kind: type[Any] = UpdateTiles if isinstance(call, UpdateCall) else MatmulTiles
    if unknown := pair.tiles.keys() - kind.__dataclass_fields__.keys():
        raise illegal(collective, f"its tiles are none: unknown field {sorted(unknown)[0]!r}")
    try:
        tiles = msgspec.convert(pair.tiles, kind)
        if isinstance(call, UpdateCall):
            return _UpdateWriter(own, call, collective, dot).write(tiles, lower)
        return _MatmulWriter(own, call, collective, dot).write(tiles, lower)
    except msgspec.ValidationError as error:
        raise illegal(collective, f"its tiles are none: {error}") from None
    except UnsupportedError as error:
        raise illegal(collective, str(error)) from None


class _Writer:
    """The instructions that one kernel needs around it."""

    def __init__(self, program: Program, name: str, collective: Message, other: Message) -> None:
        self.program, self.name, self.collective, self.dot = program, name, collective, other
        self.made: list[Message] = []

    def _whole(self, value: Message) -> Message:
        """An operand that is an array of its own. XLA:GPU would put a kernel into one fusion with the slice that it
        reads, or with the update that it writes; a kernel in there is nothing that a plan can keep in its place."""
        source = value
        while source.opcode in MOVING:
            source = self.program.operands(source)[0]
        return self._barrier(value) if source.opcode in ("dynamic-slice", "slice") else value

    def _barrier(self, value: Message) -> Message:
        made = self.program.make("opt-barrier", f"{self.collective.name}.whole", value.shape, [value])
        self.made.append(made)
        return made

    def _reshaped(self, value: Message, wanted: tuple[int, ...]) -> Message:
        if dims(value) == wanted:
            return value
        if prod(dims(value)) != prod(wanted):
            raise illegal(value, f"{list(dims(value))} is not {list(wanted)}")
        return self._make("reshape", value, wanted)

    def _make(self, opcode: str, value: Message, wanted: tuple[int, ...]) -> Message:
        shape = type(value.shape)(element_type=value.shape.element_type, dimensions=wanted)
        shape.layout.minor_to_major.extend(range(len(wanted))[::-1])
        made = self.program.make(opcode, f"{self.collective.name}.{opcode}", shape, [value])
        made.metadata.CopyFrom(self.dot.metadata)
        self.made.append(made)
        return made

    def _graft(self, module: bytes, operands: Sequence[Message]) -> tuple[Message, list[Message]]:
        """Write the entry of another module down with these operands; its custom call and its results."""
        other = Program(module)
        needed = program_above(other, [other.root])
        given = [one for one in other.instructions if one.opcode == "parameter"]
        given.sort(key=lambda one: int(one.parameter_number))
        new = {one.id: operand for one, operand in zip(given, operands, strict=True)}
        kernels = []
        for one in other.instructions:
            if one.id in new or one.id not in needed or one.opcode == "tuple":
                continue
            if one.called_computation_ids:
                raise UnsupportedError(f"{one.name} ({one.opcode}) of {self.name} calls a computation")
            is_kernel = one.opcode in COLLECTIVES | {"custom-call"}
            name = self.name if is_kernel else f"{self.collective.name}.fused"
            copy = self.program.copy(one, name, [new[i] for i in one.operand_ids])
            copy.metadata.CopyFrom(self.dot.metadata)
            new[one.id] = copy
            self.made.append(copy)
            if is_kernel:
                kernels.append(copy)
                # It reaches into other devices; and so its place among collectives is kept when all is scheduled.
                copy.custom_call_has_side_effect = one.opcode == "custom-call"
        if len(kernels) != 1:
            raise UnsupportedError(f"{self.name} is lowered to {len(kernels)} kernels, expected one")
        root = other.by_id[other.root]
        results = list(root.operand_ids) if root.opcode == "tuple" else [root.id]
        return kernels[0], [new[one] for one in results]


class _MatmulWriter(_Writer):
    """Those around one that multiplies."""

    def __init__(self, program: Program, call: FusedCall, collective: Message, dot: Message) -> None:
        super().__init__(program, call.size.key, collective, dot)
        self.call = call
        by_name = {one.name: one for one in program.instructions}
        self.between = [(by_name[name], dimension) for name, dimension in call.between]

    def write(self, tiles: MatmulTiles, lower: Lower) -> Message:
        """Replace the pair; returns the custom call."""
        program, call = self.program, self.call
        operands = program.operands(self.dot)
        if call.kernel == GATHER:
            shard = program.operands(self.collective)[0]
            for one, dimension in self.between:
                shard = self._of_shard(one, dimension, shard)
            operands[int(call.swapped)] = shard
        first, second = (1, 0) if call.swapped else (0, 1)
        left = self._matrix(operands[first], (call.m, call.k), across=call.first_transposed)
        if call.kernel == VECTOR:
            right = self._reshaped(operands[second], (call.k,))
        else:
            right = self._matrix(operands[second], (call.k, call.n), across=call.second_transposed)
        left, right = self._whole(left), self._whole(right)
        shapes = tuple((dims(one), dtype(one)) for one in (left, right))
        kernel, (value,) = self._graft(lower(call.kernel, tiles, call.devices, shapes), [left, right])
        if self._is_stacked():
            value = self._barrier(value)
        value = self._as_product(value)
        if call.kernel == SCATTER:
            for one, dimension in self.between:
                value = self._of_shard(one, dimension, value)
            replaced = self.collective
            if replaced.opcode == "all-reduce":
                (replaced,) = program.readers(self.collective)
            self._substitute(replaced)
            return kernel
        self._substitute(self.dot)
        if call.kernel != GATHER:
            program.substitute(self.collective, program.operands(self.collective))
        return kernel

    def _substitute(self, old: Message) -> None:
        made = self.made[-1]
        if dims(made) != dims(old) or dtype(made) != dtype(old):
            raise illegal(
                old,
                f"the kernel gives {dtype(made)}{list(dims(made))}, expected {dtype(old)}{list(dims(old))}",
            )
        made.shape.CopyFrom(old.shape)
        self.program.substitute(old, self.made)

    def _of_shard(self, one: Message, dimension: int, value: Message) -> Message:
        """A copy of what only moves or converts elements, for a shard."""
        copy = self.program.copy(one, f"{one.name}.shard", [value])
        copy.shape.dimensions[dimension] //= self.call.devices
        self.made.append(copy)
        return copy

    def _matrix(self, value: Message, wanted: tuple[int, ...], *, across: bool) -> Message:
        if not across:
            return self._reshaped(value, wanted)
        return self._transposed(self._reshaped(value, wanted[::-1]))

    def _as_product(self, value: Message) -> Message:
        """The kernel's result in the dimensions of the dot's."""
        call, wanted = self.call, list(dims(self.dot))
        if call.kernel == SCATTER:
            numbers = self.dot.dot_dimension_numbers
            of_first = len(dims(self.program.operands(self.dot)[0])) - len(numbers.lhs_contracting_dimensions)
            wanted[of_first if call.swapped else 0] //= call.devices
        if call.swapped and call.kernel != VECTOR:
            value = self._transposed(value)
        return self._reshaped(value, tuple(wanted))

    def _is_stacked(self) -> bool:
        """Whether the result is written into a larger array."""
        waiting, program = [self.dot if self.call.kernel == GATHER else self.collective], self.program
        while waiting:
            for reader in program.readers(waiting.pop()):
                if reader.opcode == "dynamic-update-slice":
                    return True
                waiting += [reader] if reader.opcode in (*MOVING, "dynamic-slice") else []
        return False

    def _transposed(self, value: Message) -> Message:
        made = self._make("transpose", value, dims(value)[::-1])
        made.dimensions.extend((1, 0))
        return made


class _UpdateWriter(_Writer):
    """Those around one that updates."""

    def __init__(self, program: Program, call: UpdateCall, collective: Message, gather: Message) -> None:
        super().__init__(program, call.size.key, collective, gather)
        self.call = call

    def write(self, tiles: UpdateTiles, lower: Lower) -> Message:
        """Replace sum, update and all-gather; returns the custom call."""
        program, call = self.program, self.call
        named = {one.name: one for one in program.instructions}
        shard = call.elements // call.devices
        operands = [self._reshaped(program.operands(self.collective)[0], (call.elements,))]
        for name, is_whole in zip(call.arrays, call.recipe.whole, strict=True):
            operands.append(self._reshaped(named[name], (call.elements if is_whole else shard,)))
        operands += [self._reshaped(named[name], (1,)) for name in call.scalars]
        operands = [self._whole(one) for one in operands]
        shapes = tuple((dims(one), dtype(one)) for one in operands)
        lowered = lower(call.kernel, tiles, call.devices, shapes, call.recipe)
        kernel, values = self._graft(lowered, operands)
        old = [self.dot, *(named[name] for name in call.kept)]
        new = [self._reshaped(value, dims(one)) for value, one in zip(values, old, strict=True)]
        for one, value in zip(old, new, strict=True):
            value.shape.CopyFrom(one.shape)
        program.place(self.made, len(program.instructions))
        for one, value in zip(old, new, strict=True):
            program.substitute(one, [value])
        program.in_order()
        return kernel


def _keep_collectives_away(program: Program, kernels: set[int]) -> None:
    """Order every kernel behind the last, and every collective before or behind each kernel."""
    _make_no_later_reduce_scatters(program)
    ordered = [
        one
        for one in program.instructions
        if one.id in kernels or one.opcode in COLLECTIVES or one.opcode.endswith("-start")
    ]
    bits = {one.id: 1 << number for number, one in enumerate(ordered)}
    above = _above(program, bits)
    last: Message | None = None
    since: list[Message] = []
    behind: dict[int, int] = {}
    orders: list[tuple[Message, Message]] = []
    for one in program.instructions:
        behind[one.id] = bits.get(one.id, 0)
        for earlier in waits_for(one):
            behind[one.id] |= behind[earlier]
        if one.id not in bits:
            continue
        if one.id in kernels:
            new = [
                before
                for before in ([last, *since] if last else since)
                if not above[one.id] & bits[before.id]
            ]
            last, since = one, []
        else:
            new = [last] if last is not None and not behind[one.id] & bits[last.id] else []
            since.append(one)
        for before in new:
            orders.append((before, one))
            behind[one.id] |= behind[before.id]
    ends: dict[int, Message] = {}
    for before, one in orders:
        if before.opcode in COLLECTIVES and before.id not in kernels and before.id not in ends:
            ends[before.id] = _barrier_behind(program, before)
        if one.opcode in COLLECTIVES and one.id not in kernels:
            one = _barrier_before(program, one)
        one.control_predecessor_ids.append(ends.get(before.id, before).id)
    program.in_order()
    program.waited_for()


def _barrier_behind(program: Program, collective: Message) -> Message:
    """What waits for a collective waits for this: XLA combines, fuses and replaces no instruction with an order."""
    barrier = program.make("opt-barrier", f"{collective.name}.whole", collective.shape, [collective])
    program.place([barrier], program.position(collective) + 1)
    program.redirect(collective, barrier, keep={barrier.id})
    return barrier


def _barrier_before(program: Program, collective: Message) -> Message:
    """What a collective waits for, this waits for instead."""
    first, *rest = program.operands(collective)
    barrier = program.make("opt-barrier", f"{collective.name}.later", first.shape, [first])
    program.place([barrier], program.position(collective))
    program.reads(collective, [barrier.id, *(one.id for one in rest)])
    return barrier


def _above(program: Program, bits: Mapping[int, int]) -> dict[int, int]:
    """For each instruction the bits of itself and all that it waits for."""
    found: dict[int, int] = {}
    for one in program.instructions:
        found[one.id] = bits.get(one.id, 0)
        for before in waits_for(one):
            found[one.id] |= found[before]
    return found


def _make_no_later_reduce_scatters(program: Program) -> None:
    """Let XLA find no sum of which only a piece is taken. It would make a reduce-scatter of both, and fail: it removes
    no instruction that another waits for."""
    for one in [one for one in program.instructions if one.opcode == "all-reduce"]:
        if scatter(program, one) is None and _is_cut(program, one):
            _barrier_behind(program, one)


def _is_cut(program: Program, value: Message) -> bool:
    readers = program.readers(value)
    while len(readers) == 1 and readers[0].opcode in MOVING:
        readers = program.readers(readers[0])
    return len(readers) == 1 and readers[0].opcode == "dynamic-slice"
