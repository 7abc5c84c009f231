"""Which values are overwritten, and whether a move may read one later than the program did.

On XLA:CPU the moves come after copy insertion: a loop overwrites the value it begins with, and the new value of a
donated argument may take the argument's buffer, because everything that reads the old value comes before. Another
reader keeps that only where the overwriting depends on it.
"""

from __future__ import annotations

from functools import cached_property

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.opcodes import FUSIBLE
from disco_hlo.hlo.proto import Message
from disco_hlo.structure.program import Program

_SAME_BUFFER = frozenset({"bitcast", "get-tuple-element", "opt-barrier", "reshape", "tuple"})
"""Ops whose result may lie in the buffer of an operand, unchanged."""
_IN_PLACE = frozenset({"call", "conditional", "dynamic-update-slice", "scatter", "sort", "while"})
"""Ops that may work in the buffer of an operand."""
ONLY_READ = (FUSIBLE - _SAME_BUFFER - _IN_PLACE) | {
    "all-gather",
    "all-reduce",
    "convolution",
    "dot",
    "reduce-scatter",
}
"""Ops that neither overwrite an operand nor hand its buffer on."""


class Buffers:
    """Answers for one program; asked before it is rewritten."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def _place(self) -> dict[int, int]:
        return {i.id: place for place, i in enumerate(self.program.instructions)}

    @cached_property
    def _new(self) -> dict[int, int]:
        """By the number of a donated parameter, the id of what takes its buffer."""
        root, found = self.program.by_id[self.program.root], {}
        for entry in self.program.module.input_output_alias.entries:
            at = list(entry.output_shape_index)
            in_tuple = root.opcode == "tuple" and bool(at)
            found[entry.parameter_number] = root.operand_ids[at[0]] if in_tuple else root.id
        return found

    def check_read(self, value: Message, reader: Message) -> None:
        """Refuse a move by which ``value`` is read where ``reader`` stands.

        Raises:
            IllegalMoveError: it may have been overwritten by then; names both.
        """
        if value.opcode == "constant":
            return
        for by in self._overwriting(value):
            if not self._depends(by, reader):
                raise IllegalMoveError(
                    f"{reader.name} ({reader.opcode}): {by.name} ({by.opcode}) may overwrite {value.name} before it "
                    "is read there"
                )

    def _overwriting(self, value: Message) -> list[Message]:
        found: dict[int, Message] = {}
        shared = {i.id: i for i in self._bases(value)}
        waiting = list(shared.values())
        while waiting:
            one = waiting.pop()
            if one.opcode == "parameter" and one.parameter_number in self._new:
                new = self.program.by_id[self._new[one.parameter_number]]
                found |= {i.id: i for i in self._bases(new, _SAME_BUFFER | _IN_PLACE)}
            for reader in self.program.readers(one):
                if reader.opcode not in _SAME_BUFFER:
                    if reader.opcode not in ONLY_READ:
                        found[reader.id] = reader
                elif reader.id not in shared:
                    shared[reader.id] = reader
                    waiting.append(reader)
        return [i for i in found.values() if i.id not in shared]

    def _bases(self, value: Message, through: frozenset[str] = _SAME_BUFFER) -> list[Message]:
        """The value and what it may share its buffer with, against the dataflow."""
        seen = {value.id: value}
        waiting = [value]
        while waiting:
            one = waiting.pop()
            for operand in self.program.operands(one) if one.opcode in through else ():
                if operand.id not in seen:
                    seen[operand.id] = operand
                    waiting.append(operand)
        return list(seen.values())

    def _depends(self, instruction: Message, earlier: Message) -> bool:
        """Whether ``earlier`` must be done before ``instruction``. What stands before ``earlier`` does not wait for it:
        of an update at the end of a step, read a few instructions before, those few are looked at."""
        first, by_id = self._place[earlier.id], self.program.by_id
        seen: set[int] = set()
        waiting = [instruction]
        while waiting:
            one = waiting.pop()
            for before in (*one.operand_ids, *one.control_predecessor_ids):
                if before == earlier.id:
                    return True
                if before not in seen and self._place[before] > first:
                    seen.add(before)
                    waiting.append(by_id[before])
        return False
