"""What must run before what since buffers are overwritten, and which values need buffers of their own for that.

XLA's copies make the module safe in the form in which it hands it over. A rewrite moves ops, so the rule behind that
becomes explicit: every reader of a value, the step's caller included, is done before the next value of its buffer is
written (:mod:`disco_hlo.hlo.storage` says which values share one). Where no order does that, the value that is
overwritten needs a buffer of its own, as it had one in XLA's kernels; or a donated argument is not overwritten.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from disco_hlo.errors import ModuleError
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.graph import Kind, Node
from disco_hlo.hlo.opcodes import reads_own_element
from disco_hlo.hlo.proto import Message
from disco_hlo.hlo.storage import Storage, in_place, readers_of, storage_of
from disco_hlo.hlo.walks import reached

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Overwrites:
    """See :class:`~disco_hlo.hlo.graph.Graph` for ``before``, ``inplace``, ``shown`` and ``lies_in``."""

    before: tuple[Pair, ...]
    inplace: tuple[Pair, ...]
    shown: tuple[int, ...]
    lies_in: tuple[tuple[int, ...], ...]
    dropped_aliases: tuple[Pair, ...]
    """(parameter number, output index) pairs given up: something reads the argument when the result must have been
    written already."""
    too_soon: tuple[Pair, ...]
    """(node, node that overwrites it) where something reads the first later, whatever the order. XLA had two buffers:
    merging has made them one."""
    shared_results: tuple[int, ...]
    """Places in the root's tuple whose value is also another result, an argument that is not donated for it, or a
    constant: they need buffers of their own."""
    needing_a_copy: frozenset[int]
    """Dynamic-update-slices of arrays that others have too, or that the step was given. XLA may write into such an
    array, having made sure that all have read it before; where it does not, nobody may."""


def overwrites(
    nodes: Sequence[Node],
    root: int,
    protos: Sequence[Message],
    aliases: Sequence[tuple[int, int, int]],
    control: Sequence[Pair],
    index: ModuleIndex,
    *,
    is_carried: bool = False,
) -> Overwrites:
    """Derive the rules of a graph.

    Args:
        nodes: the numbered nodes; ``protos``: the instruction behind each.
        aliases: donated arguments as (parameter node, output index, node of that output).
        control: control dependencies between nodes.
        index: the module's computations.
        is_carried: of a loop's body: each array of the parameter shares its buffer with the one that the root has in
            its place.
    """
    rules = _Rules(nodes, root, protos, index)
    if is_carried:
        return rules.found(rules.carried(), control, may_drop=False)
    return rules.found(rules.donated(aliases), control, may_drop=True)


@dataclass(frozen=True, slots=True)
class _Alias:
    """A result that takes the buffer of an argument."""

    parameter: int
    output: int
    given: int
    """Value of the argument."""
    result: int
    """And of the result."""


class _Rules:
    def __init__(
        self, nodes: Sequence[Node], root: int, protos: Sequence[Message], index: ModuleIndex
    ) -> None:
        self.nodes, self.protos, self.index = nodes, protos, index
        self.operands = [node.operands for node in nodes]
        self.storage: Storage = storage_of(protos, self.operands, index)
        self.readers = readers_of(self.storage, protos, self.operands)
        self.root, self.results = nodes[root], self.storage.of_op[root]
        self.returned = frozenset(self.results)
        self.order = RunningOrder(self.operands)
        self.of_buffer: dict[int, list[int]] = {}
        for value in range(len(self.storage.made_by)):
            self.of_buffer.setdefault(self.storage.buffer(value), []).append(value)
        self.name = list(self.storage.made_by)
        for node in reversed(nodes):
            if len(self.storage.of_op[node.id]) == 1 and node.shape.dtype != "tuple":
                self.name[self.storage.of_op[node.id][0]] = node.id
        self.before: set[Pair] = set()
        self.inplace: set[Pair] = set()

    def carried(self) -> list[_Alias]:
        """What a loop's body carries from turn to turn.

        Raises:
            ModuleError: it carries tuples within tuples.
        """
        parameters = [node.id for node in self.nodes if node.kind is Kind.PARAMETER]
        is_flat = self.root.opcode == "tuple" and len(self.root.operands) == len(self.results)
        if len(parameters) != 1 or not is_flat:
            raise ModuleError("the loop carries tuples within tuples")
        pairs = zip(self.storage.of_op[parameters[0]], self.results, strict=True)
        return [_Alias(parameters[0], place, *pair) for place, pair in enumerate(pairs)]

    def donated(self, aliases: Iterable[tuple[int, int, int]]) -> list[_Alias]:
        """Donated arguments, from (parameter node, output index, node of that output)."""
        of_op = self.storage.of_op
        return [
            _Alias(parameter, output, of_op[parameter][0], of_op[result][0])
            for parameter, output, result in aliases
        ]

    def found(self, aliases: Sequence[_Alias], control: Sequence[Pair], *, may_drop: bool) -> Overwrites:
        """The rules, where each of these results takes the buffer of an argument. Where that cannot be, the alias is
        given up; or, where it may not, the result gets a copy, written when all have read the argument."""
        for pair in sorted(control):
            if self.order.add(*pair):
                self.before.add(pair)
        shared_results = self._shared_results({(alias.given, alias.output) for alias in aliases})
        needing_a_copy = self._updates_of_shared_arrays()
        too_soon = self._order_buffers(frozenset(alias.parameter for alias in aliases))
        copied = set(shared_results) if not may_drop else set()
        lost = [alias for alias in aliases if alias.output not in copied and not self._is_kept(alias)]
        if may_drop:
            too_soon += self._overwritten_arguments(alias.parameter for alias in lost)
        else:
            shared_results += tuple(alias.output for alias in lost)
        return Overwrites(
            tuple(sorted(self.before)),
            tuple(sorted(self.inplace)),
            tuple(map(self._shown, range(len(self.nodes)))),
            tuple(tuple(map(self.storage.buffer, values)) for values in self.storage.of_op),
            tuple((alias.parameter, alias.output) for alias in lost) if may_drop else (),
            tuple(sorted(too_soon)),
            shared_results,
            needing_a_copy,
        )

    def _shown(self, node: int) -> int:
        values = self.storage.of_op[node]
        return self.name[values[0]] if len(values) == 1 and self.nodes[node].shape.dtype != "tuple" else node

    def _overwritten_arguments(self, parameters: Iterable[int]) -> tuple[Pair, ...]:
        """Arguments that stay the caller's, and what overwrites them all the same."""
        buffers = [self.of_buffer[self.storage.buffer(self.storage.of_op[x][0])] for x in parameters]
        return tuple(
            (self.name[value], writer) for values in buffers for value, writer in self._steps(values)[:1]
        )

    def _order_buffers(self, donated: Collection[int]) -> tuple[Pair, ...]:
        conflicts: set[Pair] = set()
        wanted: dict[Pair, int] = {}
        for values in self.of_buffer.values():
            for value, writer in self._steps(values):
                self.inplace.add((self.name[value], writer))
                if self._is_needed_whole(value, donated) or self._misreads(writer, value):
                    conflicts.add((self.name[value], writer))
                wanted |= dict.fromkeys(self._edges(value, writer), value)
        # Those that go along with the numbers first: they close no circle.
        for first, second in sorted(wanted, key=lambda pair: (pair[0] > pair[1], pair)):
            if self.order.add(first, second):
                self.before.add((first, second))
            else:
                conflicts.add((self.name[wanted[first, second]], second))
        return tuple(sorted(conflicts))

    def _is_needed_whole(self, value: int, donated: Collection[int]) -> bool:
        """Whether the caller has or gets a value, so that nothing may overwrite it."""
        maker = self.nodes[self.storage.made_by[value]]
        is_callers = maker.kind is Kind.PARAMETER and maker.id not in donated
        return value in self.returned or is_callers or maker.kind is Kind.CONSTANT

    def _steps(self, values: Iterable[int]) -> list[Pair]:
        """The values that are overwritten in one buffer, with the op that writes the next one."""
        made_by = self.storage.made_by
        ordered = sorted(values, key=lambda value: (made_by[value], value))
        writers = sorted({made_by[value] for value in ordered})
        following = dict(pairwise(writers))
        return [(value, following[made_by[value]]) for value in ordered if made_by[value] in following]

    def _edges(self, value: int, writer: int) -> list[Pair]:
        """What must run before the op that overwrites a value."""
        maker = self.storage.made_by[value]
        is_made = self.nodes[maker].kind not in (Kind.PARAMETER, Kind.CONSTANT)
        waits = [maker] if is_made and writer not in self.readers[value] else []
        return [(op, writer) for op in (*waits, *self.readers[value]) if op != writer]

    def _misreads(self, writer: int, value: int) -> bool:
        """Whether an op reads what it overwrites at other elements than the one that it writes."""
        node, proto, of_op = self.nodes[writer], self.protos[writer], self.storage.of_op
        if writer not in self.readers[value]:
            return False
        reading = [place for place, x in enumerate(node.operands) if value in of_op[x]]
        if node.opcode == "conditional":  # one branch runs
            return any(of_op[node.operands[place]].count(value) > 1 for place in reading)
        if node.kind is Kind.FUSIBLE:
            shapes = [self.nodes[node.operands[place]].shape for place in reading]
            return not reads_own_element(node.opcode, node.shape, shapes)
        written = {
            operand
            for _, operand, _ in in_place(proto, [self.protos[x].shape for x in node.operands], self.index)
        }
        if written:
            return not written.issuperset(reading) or len(reading) > 1
        if node.opcode in ("while", "call"):
            return sum(of_op[x].count(value) for x in node.operands) > 1
        return not node.opcode.startswith(
            "async-"
        )  # matmuls, sorts, collectives: no order of elements is known

    def _is_kept(self, alias: _Alias) -> bool:
        """Let a result share the buffer of an argument, where that can be."""
        storage, given, result = self.storage, alias.given, alias.result
        if storage.buffer(given) == storage.buffer(result):
            return True
        values = [*self.of_buffer[storage.buffer(given)], *self.of_buffer[storage.buffer(result)]]
        kinds = [self.nodes[storage.made_by[value]].kind for value in values]
        if kinds.count(Kind.PARAMETER) > 1 or Kind.CONSTANT in kinds:
            return False
        steps = self._steps(values)
        if any(value in self.returned or self._misreads(writer, value) for value, writer in steps):
            return False
        edges = list(dict.fromkeys(edge for step in steps for edge in self._edges(*step)))
        if not self.order.add_all(edges):
            return False
        self.before.update(edges)
        self.inplace.update((self.name[value], writer) for value, writer in steps)
        storage.join(given, result)
        self.of_buffer[storage.buffer(given)] = values
        return True

    def _shared_results(self, donated: Collection[Pair]) -> tuple[int, ...]:
        """Places of results that another result, or an argument, has as well; ``donated``: values and the places that
        take their buffers."""
        members = [self.nodes[x] for x in self.root.operands] if self.root.opcode == "tuple" else [self.root]
        if any(member.shape.dtype == "tuple" for member in members):
            return ()  # as XLA left it: nothing of it is merged
        kept: dict[int, int] = {}
        for place, value in enumerate(self.results):
            kind = self.nodes[self.storage.made_by[value]].kind
            if (value, place) in donated:
                kept[value] = place
            elif kind not in (Kind.PARAMETER, Kind.CONSTANT):
                kept.setdefault(value, place)
        return tuple(place for place, value in enumerate(self.results) if kept.get(value) != place)

    def _updates_of_shared_arrays(self) -> frozenset[int]:
        nodes, storage = self.nodes, self.storage
        gathering = (node for node in nodes if node.opcode in ("tuple", "opt-barrier"))
        held = {value for node in gathering for value in storage.of_op[node.id]}

        def is_shared(value: int, update: int) -> bool:
            maker = nodes[storage.made_by[value]]
            is_given = maker.kind in (Kind.PARAMETER, Kind.CONSTANT) or maker.shape.dtype == "tuple"
            return is_given or value in held or self.readers[value] != [update]

        updates = (node for node in nodes if node.opcode == "dynamic-update-slice")
        return frozenset(
            node.id for node in updates if is_shared(storage.of_op[node.operands[0]][0], node.id)
        )


class RunningOrder:
    """The order of ops that wait for each other; an edge that would close a circle is told, not added."""

    def __init__(self, operands: Sequence[Sequence[int]]) -> None:
        self._before: list[list[int]] = [list(read) for read in operands]
        self._after: list[list[int]] = [[] for _ in operands]
        for op, read in enumerate(operands):
            for operand in read:
                self._after[operand].append(op)
        self._rank = list(range(len(operands)))

    def add(self, first: int, second: int) -> bool:
        """Let one op run before another; False, and nothing is added, where it must run after it."""
        if first == second:
            return False
        if self._rank[first] > self._rank[second] and not self._move(first, second):
            return False
        self._before[second].append(first)
        self._after[first].append(second)
        return True

    def add_all(self, pairs: Iterable[tuple[int, int]]) -> bool:
        """:meth:`add` for all pairs, or for none where one is refused."""
        added: list[tuple[int, int]] = []
        for first, second in pairs:
            if not self.add(first, second):
                for one, other in added:
                    self._before[other].remove(one)
                    self._after[one].remove(other)
                return False
            added.append((first, second))
        return True

    def _move(self, first: int, second: int) -> bool:
        rank = self._rank
        later = reached([second], lambda op: (x for x in self._after[op] if rank[x] <= rank[first]))
        if first in later:
            return False
        earlier = reached([first], lambda op: (x for x in self._before[op] if rank[x] >= rank[second]))
        moved = [*sorted(earlier, key=rank.__getitem__), *sorted(later, key=rank.__getitem__)]
        places = sorted(rank[op] for op in moved)
        for op, place in zip(moved, places, strict=True):
            rank[op] = place
        return True
