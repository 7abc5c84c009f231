"""Take all-reduces over a concatenation apart: one all-reduce per part.

XLA's ``all-reduce-contiguous`` pass (GPU) and our own ``concat`` buckets write a bucket as
``slice(all-reduce(concatenate(bitcast(g0), bitcast(g1), ...)))``. Where every reader of such an
all-reduce slices out exactly one part, the parts are separate all-reduces again in canonical form.
Bitcasts of bitcasts are folded on the way, transposes that move no byte become bitcasts, and an
all-reduce moves in front of the bitcast of its operand, so that it does not matter where XLA
reshaped a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from disco_hlo.hlo.flatten import FlatComputation, FlatOp
from disco_hlo.hlo.graph import Shape
from disco_hlo.hlo.opcodes import COLLECTIVE
from disco_hlo.hlo.proto import Instruction, Message, shape_of

_CONCATENATED = frozenset(opcode for opcode, collective in COLLECTIVE.items() if collective.concatenates)


@dataclass(slots=True)
class _Packed:
    """An all-reduce over parts, and where each part ended up in the new list."""

    offsets: list[int]
    reduced: list[int]


def unpack_concatenated(flat: FlatComputation) -> FlatComputation:
    """Rewrite the flat list; sources keep pointing at the ops that replace theirs."""
    return _Unpacker(flat).run()


class _Unpacker:
    def __init__(self, flat: FlatComputation) -> None:
        self.flat = flat
        self.users: list[list[int]] = [[] for _ in flat.ops]
        for position, op in enumerate(flat.ops):
            for operand in op.operands:
                self.users[operand].append(position)
        self.ops: list[FlatOp] = []
        self.new: dict[int, int] = {}
        self.packed: dict[int, _Packed] = {}
        self.produced: dict[int, list[int]] = {}

    def run(self) -> FlatComputation:
        for position, op in enumerate(self.flat.ops):
            first = len(self.ops)
            self._rewrite(position, op)
            self.produced[position] = list(range(first, len(self.ops)))
        for source in self.flat.sources:
            if source.role != "done":
                source.ops[:] = [new for old in source.ops for new in self.produced[old]]
        return FlatComputation(self.ops, self.new[self.flat.root], self.flat.sources, self.flat.control)

    def _emit(self, proto: Message, operands: list[int], source: int) -> int:
        self.ops.append(FlatOp(proto, operands, source))
        return len(self.ops) - 1

    def _rewrite(self, position: int, op: FlatOp) -> None:
        opcode = op.proto.opcode
        if opcode in _CONCATENATED and (offsets := self._part_offsets(position, op)):
            self._unpack(position, op, offsets)
        elif opcode in _CONCATENATED:
            self._reduce_unshaped(position, op)
        elif opcode == "slice" and op.operands[0] in self.packed:
            packed = self.packed[op.operands[0]]
            part = packed.reduced[packed.offsets.index(op.proto.slice_dimensions[0].start)]
            self.flat.sources[op.source].cuts.append(part)
            self.new[position] = self._reshaped(part, op.proto, op.source)
        elif opcode == "bitcast" or (opcode == "transpose" and self._moves_nothing(op)):
            self.new[position] = self._reshaped(self.new[op.operands[0]], op.proto, op.source)
        else:
            self.new[position] = self._emit(
                op.proto, [self.new[operand] for operand in op.operands], op.source
            )
            if op.spare is not None:
                self.ops[self.new[position]].spare = self.new[op.spare]

    def _part_offsets(self, position: int, op: FlatOp) -> list[int] | None:
        """Start of each part, or None where this is not a packed all-reduce read part by part."""
        concatenate = self.flat.ops[op.operands[0]]
        if concatenate.proto.opcode != "concatenate" or len(op.proto.shape.dimensions) != 1:
            return None
        sizes = [self.flat.ops[part].proto.shape.dimensions[0] for part in concatenate.operands]
        limits = list(accumulate(sizes))
        offsets = [limit - size for limit, size in zip(limits, sizes, strict=True)]
        parts = set(zip(offsets, limits, strict=True))
        readers = self.users[position]
        if (
            position == self.flat.root
            or not readers
            or not all(self._slices_one_part(reader, parts) for reader in readers)
        ):
            return None
        return offsets

    def _slices_one_part(self, reader: int, parts: set[tuple[int, int]]) -> bool:
        proto = self.flat.ops[reader].proto
        if proto.opcode != "slice" or len(proto.slice_dimensions) != 1:
            return False
        cut = proto.slice_dimensions[0]
        return cut.stride in (0, 1) and (cut.start, cut.limit) in parts

    def _unpack(self, position: int, op: FlatOp, offsets: list[int]) -> None:
        parts = self.flat.ops[op.operands[0]].operands
        self.packed[position] = _Packed(
            offsets, [self._single(op, self._unshaped(self.new[part])) for part in parts]
        )

    def _reduce_unshaped(self, position: int, op: FlatOp) -> None:
        base = self._unshaped(self.new[op.operands[0]])
        self.new[position] = self._reshaped(self._single(op, base), op.proto, op.source)

    def _single(self, op: FlatOp, operand: int) -> int:
        proto = Instruction()
        proto.CopyFrom(op.proto)
        proto.shape.CopyFrom(self.ops[operand].proto.shape)
        return self._emit(proto, [operand], op.source)

    def _unshaped(self, value: int) -> int:
        while self.ops[value].proto.opcode == "bitcast" and self._same_dtype(
            value, self.ops[value].operands[0]
        ):
            value = self.ops[value].operands[0]
        return value

    def _same_dtype(self, left: int, right: int) -> bool:
        return bool(self.ops[left].proto.shape.element_type == self.ops[right].proto.shape.element_type)

    def _moves_nothing(self, op: FlatOp) -> bool:
        """Whether a transpose only renames dimensions: its result's layout undoes its permutation."""
        result, operand = shape_of(op.proto.shape), self._shape(self.new[op.operands[0]])
        permuted = tuple(op.proto.dimensions[dimension] for dimension in result.layout)
        return bool(result.layout) and permuted == operand.layout

    def _shape(self, value: int) -> Shape:
        return shape_of(self.ops[value].proto.shape)

    def _reshaped(self, value: int, like: Message, source: int) -> int:
        """``value`` as the shape of ``like``: itself, or one bitcast of the innermost operand."""
        while self.ops[value].proto.opcode == "bitcast":
            value = self.ops[value].operands[0]
        if shape_of(like.shape) == self._shape(value):
            return value
        proto = Instruction(name=like.name, opcode="bitcast")
        proto.shape.CopyFrom(like.shape)
        proto.metadata.CopyFrom(like.metadata)
        return self._emit(proto, [value], source)
