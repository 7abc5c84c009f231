"""Whether a move may read a value later than the program did.

On XLA:CPU the moves come after copy insertion: a loop overwrites the value it begins with, and the new value of a
donated argument takes the argument's buffer, because everything that reads the old value comes before. Another reader
keeps that only where the overwriting depends on it.
"""

from __future__ import annotations

from functools import cached_property

from disco_hlo.errors import IllegalMoveError
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.proto import Message
from disco_hlo.hlo.storage import Storage, leaf_at, readers_of, storage_of
from disco_hlo.structure.program import Program


class Buffers:
    """Answers for one program; asked before it is rewritten."""

    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def _place(self) -> dict[int, int]:
        return {i.id: place for place, i in enumerate(self.program.instructions)}

    @cached_property
    def _operands(self) -> list[list[int]]:
        return [[self._place[i] for i in one.operand_ids] for one in self.program.instructions]

    @cached_property
    def _storage(self) -> Storage:
        """Values and buffers, each donated argument in one with the result that takes its place."""
        program, place = self.program, self._place
        found = storage_of(program.instructions, self._operands, ModuleIndex(program.module))
        parameters = {i.parameter_number: i for i in program.instructions if i.opcode == "parameter"}
        root = program.by_id[program.root]
        donated = program.module.input_output_alias.entries
        for entry in donated if program.entry.id == program.module.entry_computation_id else ():
            given = parameters.get(entry.parameter_number)
            results = found.of_op[place[root.id]]
            result = leaf_at(root.shape, entry.output_shape_index)
            if given is not None and result < len(results):
                found.join(found.of_op[place[given.id]][0], results[result])
        return found

    @cached_property
    def _together(self) -> dict[int, list[int]]:
        """The values of each buffer."""
        found: dict[int, list[int]] = {}
        for value in range(len(self._storage.made_by)):
            found.setdefault(self._storage.buffer(value), []).append(value)
        return found

    @cached_property
    def _readers(self) -> list[list[int]]:
        return readers_of(self._storage, self.program.instructions, self._operands)

    def readers(self, value: Message) -> list[Message]:
        """The instructions that read an array, under whatever name, each once."""
        found = {op for one in self._storage.of_op[self._place[value.id]] for op in self._readers[one]}
        return [self.program.instructions[op] for op in sorted(found)]

    def is_only_read(self, value: Message) -> bool:
        """Whether nothing writes over an array, and the program does not return it."""
        storage = self._storage
        returned = storage.of_op[self._place[self.program.root]]
        values = storage.of_op[self._place[value.id]]
        return all(len(self._together[storage.buffer(one)]) == 1 and one not in returned for one in values)

    def check_read(self, value: Message, reader: Message) -> None:
        """Refuse a move by which ``value`` is read where ``reader`` stands.

        Raises:
            IllegalMoveError: it may have been overwritten by then; names both.
        """
        storage = self._storage
        for one in storage.of_op[self._place[value.id]]:
            for other in self._together[storage.buffer(one)]:
                writer = storage.made_by[other]
                by = self.program.instructions[writer]
                if writer > storage.made_by[one] and not self._depends(by, reader):
                    raise IllegalMoveError(
                        f"{reader.name} ({reader.opcode}): {by.name} ({by.opcode}) may overwrite {value.name} before "
                        "it is read there"
                    )

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
