"""What must run before what although no data flows: overwritten buffers and control dependencies.

XLA decided which ops update a buffer in place (after copy insertion, so the module it hands over is
safe as it stands). A rewrite may move ops, so the rule behind that safety becomes explicit: every
reader of a buffer runs before the op that overwrites it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.graph import Kind, Node
from disco_hlo.hlo.proto import Message


@dataclass(frozen=True, slots=True)
class OrderRules:
    """See :class:`~disco_hlo.hlo.graph.Graph` for ``before`` and ``inplace``."""

    before: tuple[tuple[int, int], ...]
    inplace: tuple[tuple[int, int], ...]
    dropped_aliases: tuple[tuple[int, int], ...]
    """(parameter number, output index) pairs given up: some reader of the parameter needs the very
    value that would overwrite it, which only a shared kernel can do in place."""
    too_soon: tuple[tuple[int, int], ...]
    """(overwritten node, node that overwrites it in place) where a reader comes later in number: one that may
    need what is written, of a buffer that the source has twice and merging has made one."""
    needing_a_copy: frozenset[int]
    """Dynamic-update-slices of arrays that others have too, or that the step was given. XLA may write into such an
    array, having made sure that all have read it before; where it does not, nobody may."""


def overwritten_operands(proto: Message, index: ModuleIndex) -> tuple[int, ...]:
    """Positions of the operands whose buffer an instruction overwrites (HloDataflowAnalysis'
    in-place pairs). What is called works on the buffers of its caller: a loop that XLA:CPU has put into a call
    overwrites what the call is given."""
    opcode = proto.opcode
    if opcode in ("call", "conditional"):
        overwrites = [one for one in proto.called_computation_ids if _overwrites(one, index)]
        return tuple(range(len(proto.operand_ids))) if overwrites else ()
    if opcode in ("dynamic-update-slice", "while"):
        return (0,)
    if opcode == "scatter":
        return tuple(range((len(proto.operand_ids) - 1) // 2))
    if opcode in ("custom-call", "fusion"):
        return tuple(sorted({pair.operand_index for pair in proto.output_operand_aliasing}))
    return ()


def _overwrites(computation_id: int, index: ModuleIndex) -> bool:
    """Whether anything in a computation overwrites what it is given."""
    known = index.overwrites.get(computation_id)
    if known is None:
        instructions = index.computation(computation_id).instructions
        known = any(overwritten_operands(instruction, index) for instruction in instructions)
        index.overwrites[computation_id] = known
    return known


def _only_read(loop: Message, index: ModuleIndex) -> frozenset[int]:
    """Members of the tuple that a ``while``, or a ``call`` with one in it, takes and returns as they came: nothing is
    written over them."""
    body_id = loop.called_computation_ids[0]
    known = index.only_read.get(body_id)
    if known is None:
        # It is asked for each member of the loop around: without a memory n members take n to the depth.
        known = index.only_read[body_id] = _returned_as_it_came(index.computation(body_id), index)
    return known


def _returned_as_it_came(body: Message, index: ModuleIndex) -> frozenset[int]:
    by_id = {instruction.id: instruction for instruction in body.instructions}

    def came_as(value: int, place: int) -> int | None:
        """Which member of the body's parameter is at this place of a tuple."""
        of = by_id[value]
        if of.opcode == "parameter":
            return place
        if of.opcode == "tuple":
            read = by_id[of.operand_ids[place]]
            whole = read.opcode == "get-tuple-element"
            return came_as(read.operand_ids[0], read.tuple_index) if whole else None
        if _is_loop(of) and place in _only_read(of, index):
            return came_as(of.operand_ids[0], place)
        return None

    count = len(by_id[body.root_id].shape.tuple_shapes)
    return frozenset(place for place in range(count) if came_as(body.root_id, place) == place)


def _is_loop(proto: Message) -> bool:
    return proto.opcode in ("while", "call") and len(proto.operand_ids) == 1


def before_pairs(
    nodes: Sequence[Node],
    protos: Sequence[Message],
    aliases: Sequence[tuple[int, int, int]],
    control: Sequence[tuple[int, int]],
    index: ModuleIndex,
) -> OrderRules:
    """Derive the order rules of a graph.

    Args:
        nodes: the numbered nodes.
        protos: the instruction behind each node.
        aliases: donated parameters as (parameter node, output index, node of that output).
        control: control dependencies between nodes.
        index: the module's computations.
    """
    buffer = _buffers(nodes, protos)
    readers = _buffer_readers(nodes, buffer)
    users = _users(nodes)
    only_read_by = {
        node.id: _only_read(proto, index) - {protos[user].tuple_index for user in users[node.id]}
        for node, proto in zip(nodes, protos, strict=True)
        if _is_loop(proto) and all(nodes[x].opcode == "get-tuple-element" for x in users[node.id])
    }
    inplace: list[tuple[int, int]] = []
    before = set(control)
    dropped: list[tuple[int, int]] = []
    too_soon: list[tuple[int, int]] = []
    for node, proto in zip(nodes, protos, strict=True):
        for position in overwritten_operands(proto, index):
            only_read = only_read_by.get(node.id, frozenset())
            for overwritten in _arrays(nodes, node.operands[position], buffer, only_read):
                inplace.append((overwritten, node.id))
                others = [r for r in readers[overwritten] if r != node.id]
                before |= {(r, node.id) for r in others if r < node.id or not _reaches(node.id, r, users)}
                if any(r > node.id for r in others):
                    too_soon.append((overwritten, node.id))
    for parameter, output, result in aliases:
        writer = buffer[result]
        if writer == parameter or nodes[writer].kind is Kind.PARAMETER:
            continue
        others = [r for r in readers[parameter] if r != writer]
        if any(r > writer and _reaches(writer, r, users) for r in others):
            dropped.append((nodes[parameter].id, output))
            continue
        inplace.append((parameter, writer))
        before |= {(r, writer) for r in others}
    return OrderRules(
        tuple(sorted(before)),
        tuple(sorted(set(inplace))),
        tuple(dropped),
        tuple(too_soon),
        _updates_of_shared_arrays(nodes, buffer, readers),
    )


def _updates_of_shared_arrays(
    nodes: Sequence[Node], buffer: list[int], readers: list[list[int]]
) -> frozenset[int]:
    gathered = (node.operands for node in nodes if node.opcode in ("tuple", "opt-barrier"))
    held = {buffer[member] for members in gathered for member in members}

    def is_shared(updated: int, update: int) -> bool:
        is_given = nodes[updated].kind in (Kind.PARAMETER, Kind.CONSTANT, Kind.FREE)
        return is_given or updated in held or readers[updated] != [update]

    updates = (node for node in nodes if node.opcode == "dynamic-update-slice")
    return frozenset(node.id for node in updates if is_shared(buffer[node.operands[0]], node.id))


def _buffers(nodes: Sequence[Node], protos: Sequence[Message]) -> list[int]:
    """The node that owns the storage each node's value lives in. Bitcasts share their operand's, and
    so does what comes out of an optimization barrier (XLA:GPU keeps them until after the hook)."""
    owner: list[int] = []
    for node in nodes:
        behind = _passed_through(nodes, protos, node)
        owner.append(node.id if behind is None else owner[behind])
    return owner


def _passed_through(nodes: Sequence[Node], protos: Sequence[Message], node: Node) -> int | None:
    """The node whose value this one hands on as it is, where it does that."""
    if node.opcode == "bitcast" or (node.opcode == "opt-barrier" and node.shape.dtype != "tuple"):
        return node.operands[0]
    if node.opcode != "get-tuple-element" or nodes[node.operands[0]].opcode != "opt-barrier":
        return None
    entered = nodes[nodes[node.operands[0]].operands[0]]
    return entered.operands[protos[node.id].tuple_index] if entered.opcode == "tuple" else None


def _buffer_readers(nodes: Sequence[Node], buffer: list[int]) -> list[list[int]]:
    """Who reads each buffer, ascending; a loop reads the arrays that it is given in a tuple."""
    readers: list[list[int]] = [[] for _ in nodes]
    for node in nodes:
        if node.opcode in ("bitcast", "tuple", "opt-barrier"):
            continue
        arrays = {array for operand in set(node.operands) for array in _arrays(nodes, operand, buffer)}
        for array in arrays:
            readers[array].append(node.id)
    return readers


def _arrays(
    nodes: Sequence[Node], value: int, buffer: list[int], but: frozenset[int] = frozenset()
) -> list[int]:
    """The buffers of a value; of a tuple, those of its members but some, by their place in it."""
    if nodes[value].opcode != "tuple":
        return [buffer[value]]
    members = [member for place, member in enumerate(nodes[value].operands) if place not in but]
    return [array for member in members for array in _arrays(nodes, member, buffer)]


def _users(nodes: Sequence[Node]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in nodes]
    for node in nodes:
        for operand in node.operands:
            users[operand].append(node.id)
    return users


def _reaches(start: int, target: int, users: list[list[int]]) -> bool:
    seen = {start}
    stack = [start]
    while stack:
        for user in users[stack.pop()]:
            if user == target:
                return True
            if user < target and user not in seen:
                seen.add(user)
                stack.append(user)
    return False
