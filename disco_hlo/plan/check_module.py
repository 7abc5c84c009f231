"""The last check before XLA compiles a module of ours: does anything read what has been overwritten?

After the hook XLA inserts no copy and checks nothing. Which values share a buffer, and in which order they are written
and read, stands in the bytes alone, so the check reads nothing else: no graph, no strategy, none of the code that
decides what may be written. It goes through each scheduled computation in its order and remembers which value each
buffer holds.

It refuses a module

1. that has no schedule for what runs, or whose order or calls make no sense;
2. in which a value is read after another one of its buffer was written;
3. in which a value enters a kernel by two names, where XLA may give the kernel's result its buffer, having looked at
   one name alone;
4. in which a kernel that must write over an operand reads it at other elements than it writes;
5. with two results in one buffer, or a result in the buffer of a constant or an argument that was not donated.
"""

from __future__ import annotations

from disco_hlo.backends import BACKENDS, Backend
from disco_hlo.errors import PlanError
from disco_hlo.hlo import proto
from disco_hlo.hlo.proto import Message
from disco_hlo.plan.check_kernels import Kernels
from disco_hlo.plan.check_reader import (
    NOTHING,
    Block,
    Body,
    Leaves,
    MalformedError,
    Reader,
    Step,
    Values,
    leaf_count,
)


def check_module(data: bytes, backend: str) -> None:
    """Refuse a module whose buffers would not hold what is read from them.

    Args:
        data: what goes to XLA: a serialized, scheduled HloModuleProto.
        backend: its name.

    Raises:
        ModuleError: the bytes are no HLO module.
        PlanError: the first fault, with the names of both values.
    """
    found = faults(data, backend)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise PlanError(f"the module would compute wrong numbers: {found[0]}{more}")


def faults(data: bytes, backend: str) -> list[str]:
    """Why a module must not be compiled, one sentence for each fault; empty where it may.

    Raises:
        ModuleError: the bytes are no HLO module.
    """
    module = proto.parse(data)
    try:
        reader = Reader(module)
        entry = reader.entry()
        check = _Check(reader.values, reader.bodies, BACKENDS[backend])
        check.entry(entry, reader.arguments)
    except MalformedError as error:
        return [str(error)]
    except (IndexError, KeyError, RecursionError) as error:  # operands, indices or calls that lead nowhere
        return [f"{module.name} contradicts itself: {type(error).__name__} {error}"]
    return check.faults


class _Check:
    """Goes through the steps in their order and remembers which value each buffer holds."""

    def __init__(self, values: Values, bodies: dict[int, Body], backend: Backend) -> None:
        self.faults: list[str] = []
        self._values = values
        self._itself, self._buffer = _shared_buffers(values)
        self._holds: dict[int, int] = {}
        """Which value a buffer holds."""
        self._arguments: set[int] = set()
        """Buffers of arguments."""
        self._last_read: dict[int, int] = {}
        self._now = 0
        self._two_names: list[tuple[int, int, str]] = []
        """(time, value, sentence) of kernels whose result XLA may put into a value's buffer if it is free then."""
        self._kernels = Kernels(values, bodies, backend)

    def entry(self, block: Block, arguments: Leaves) -> None:
        """Check the whole module, of which this is the entry, with its arguments."""
        self._read_only()
        for value in arguments:
            buffer = self._buffer[value]
            if buffer in self._holds:
                both = f"{self._values.name(self._holds[buffer])} and {self._values.name(value)}"
                self.faults.append(f"{both} are arguments of {block.name} in one buffer")
            if buffer:
                self._arguments.add(buffer)
                self._holds[buffer] = value
        self._run(block)
        self._read(block.ends_with, block.body.root, block)
        self._results(block)
        for time, value, sentence in self._two_names:
            if self._last_read.get(value, 0) <= time and value not in self._values.read_only:
                self.faults.append(sentence)

    def _read_only(self) -> None:
        """No other value may be in the buffer of a constant or of an argument that was not donated."""
        values = self._values
        wanted = {self._buffer[one]: one for one in values.read_only if self._buffer[one] != NOTHING}
        if not wanted:
            return
        for value in range(len(self._itself) - 1, 0, -1):
            kept = wanted.get(self._buffer[value])
            if kept is not None and kept != self._itself[value] and value not in values.phis:
                del wanted[self._buffer[value]]
                self.faults.append(
                    f"{self._values.name(value)} is written over {self._values.name(kept)}, which must not change"
                )
        for kept in wanted.values():
            self.faults.append(
                f"{self._values.name(kept)} must not change, but a loop or conditional has it in its own buffer"
            )

    def _results(self, block: Block) -> None:
        """No two results of the module in one buffer, and none in the buffer of what must not change."""
        values = self._values
        names = _returned(block.body)
        seen: dict[int, str] = {}
        for value, name in zip(block.ends_with, names, strict=True):
            if value == NOTHING:
                continue
            if values.itself(value) in values.read_only:
                self.faults.append(
                    f"{block.body.root.name} returns {name}, which is the unchangeable {self._values.name(value)}"
                )
            buffer = values.buffer(value)
            if buffer in seen:
                self.faults.append(
                    f"{block.body.root.name} returns {seen[buffer]} and {name}, which are in one buffer"
                )
            seen[buffer] = name

    # --- going through the steps -------------------------------------------------------------------

    def _run(self, block: Block) -> None:
        for step in block.steps:
            self._now += 1
            if step.kind == "op":
                self._op(step, block)
            elif step.kind == "done":
                self._done(step, block)
            elif step.kind == "while":
                self._loop(step, block)
            elif step.kind == "conditional":
                self._branches(step, block)
            else:
                self._run(step.blocks[0])

    def _op(self, step: Step, block: Block) -> None:
        for operand in step.operands:
            self._read(operand, step.runs, block)
        self._kernel(step, block)
        self._define_all(step.results, step)

    def _done(self, step: Step, block: Block) -> None:
        """An async op ends: what it was given must still be there, unless it wrote over it itself."""
        for operand in step.operands:
            own = {self._itself[value] for value in operand}
            left = [one for one in operand if self._holds.get(self._buffer[one]) not in own]
            self._read(left, step.instruction, block)
            self._last_read.update((self._itself[value], self._now) for value in operand)

    def _loop(self, step: Step, block: Block) -> None:
        carried = zip(step.operands[0], step.starts, strict=True)
        self._read([one for one, phi in carried if self._itself[phi] == phi], step.instruction, block)
        self._define_all(step.starts, step)
        for inner in step.blocks:
            self._run(inner)
        body = step.blocks[1]
        self._now += 1
        self._read(body.ends_with, body.body.root, body)
        self._define_all(step.results, step)

    def _branches(self, step: Step, block: Block) -> None:
        """Branches exclude each other: what one writes, another one does not see. XLA keeps the operands until all are
        done, so no kernel inside gets the buffer of one."""
        for operand in step.operands:
            self._read(operand, step.runs, block)
        before, written = self._holds, dict[int, int]()
        for branch in step.blocks:
            self._holds = dict(before)
            self._run(branch)
            self._now += 1
            self._read(branch.ends_with, branch.body.root, branch)
            written.update(self._holds.items() - before.items())
        self._holds = before | written
        self._now += 1
        self._last_read |= dict.fromkeys((self._itself[value] for value in step.starts), self._now)
        self._define_all(step.results, step)

    def _read(self, values: Leaves, reader: Message, block: Block) -> None:
        holds, buffers, itself, last, now = (
            self._holds, self._buffer, self._itself, self._last_read, self._now,
        )  # fmt: skip
        for value in values:
            one = itself[value]
            last[one] = now
            buffer = buffers[one]
            if not buffer:
                continue
            held = holds.get(buffer)
            if held != one:
                by = "nothing has written" if held is None else f"{self._values.name(held)} has overwritten"
                self.faults.append(
                    f"{reader.name} reads {self._values.name(one)}, which {by} before, in {block.name}"
                )

    def _define_all(self, results: Leaves, step: Step) -> None:
        written: dict[int, int] = {}
        for one in results:
            buffer = self._buffer[one]
            if not buffer or self._itself[one] != one:
                continue
            if buffer in written:
                both = f"{self._values.name(written[buffer])} and {self._values.name(one)}"
                self.faults.append(f"{step.runs.name} writes {both} into one buffer")
            written[buffer] = one
        self._holds |= written

    # --- kernels -----------------------------------------------------------------------------------

    def _kernel(self, step: Step, block: Block) -> None:
        """What a kernel writes over must be read before, element by element."""
        places: dict[int, list[tuple[int, int]]] = {}
        for place, operand in enumerate(step.operands):
            for leaf, value in enumerate(operand):
                if value != NOTHING:
                    places.setdefault(self._itself[value], []).append((place, leaf))
        for value, names in places.items():
            if self._buffer[value]:
                self._must_share(step, value, names, block)
            if len(names) > 1:
                self._may_share(step, value, names, block)

    def _must_share(self, step: Step, value: int, names: list[tuple[int, int]], block: Block) -> None:
        for result, written in enumerate(step.results):
            if self._buffer[written] != self._buffer[value]:
                continue
            if not all(self._kernels.reads_what_it_writes(step, *at, result, block.body) for at in names):
                self.faults.append(
                    f"{step.runs.name} writes {self._values.name(written)} over {self._values.name(value)} "
                    f"and reads that at other elements than it writes, in {block.name}"
                )

    def _may_share(self, step: Step, value: int, names: list[tuple[int, int]], block: Block) -> None:
        """XLA puts a result into the buffer of an operand of its size that nothing reads any more, having looked at
        some of the operand's names alone. Not so a result that must be in the buffer of an argument."""
        size = self._values.size(value)
        for result, written in enumerate(step.results):
            if written == NOTHING or self._values.size(written) != size:
                continue
            if self._buffer[written] in self._arguments:
                continue
            if self._kernels.may_write_over(step, names, result, block.body):
                self._two_names.append((
                    self._now, value,
                    f"{step.runs.name} reads {self._values.name(value)} by two names and may write "
                    f"{self._values.name(written)} over it, in {block.name}",
                ))  # fmt: skip
                return


def _returned(body: Body) -> list[str]:
    """The instruction behind each array that a computation returns."""
    root = body.root
    behind = [body.by_id[one] for one in root.operand_ids] if root.opcode == "tuple" else [root]
    return [str(one.name) for one in behind for _ in range(leaf_count(one.shape))]


def _shared_buffers(values: Values) -> tuple[list[int], list[int]]:
    """What each value is, and its buffer; a buffer that holds one value only is :data:`NOTHING`."""
    count = len(values.definers)
    itself = list(range(count))
    buffer = [values.buffer(one) for one in range(count)]
    holders: dict[int, int] = {}
    shared = set()
    for one in range(1, count):
        itself[one] = values.itself(one)
        if holders.setdefault(buffer[one], itself[one]) != itself[one]:
            shared.add(buffer[one])
    return itself, [one if one in shared else NOTHING for one in buffer]
