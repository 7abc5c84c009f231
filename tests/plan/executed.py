"""Check what an executable runs against the module it was compiled from.

``verify`` judges a module before XLA compiles it; here is the other end. After the hook XLA still
removes optimization barriers, pulls a collective that nothing runs beside together with its wait,
annotates and renames. None of that is a different plan; anything else is.

Of collectives that no plan moves (an all-to-all, for instance) only the wait has a place in the comparison:
when they begin is not compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from disco_hlo.hlo import proto as hlo_proto
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.opcodes import COLLECTIVES, TRANSFERS
from disco_hlo.hlo.proto import Message
from disco_hlo.plan.plan import Strategy
from disco_hlo.plan.read import describe_difference, read

_DEDICATED = ("all-gather-start", "collective-permute-start")
"""Of the starts with an opcode of their own those that may begin a collective which no plan moves."""
_WAITS = ("async-done", "all-gather-done", "collective-permute-done")


def executed_difference(written: bytes, executed: bytes) -> str | None:
    """How the module that an executable holds differs from the one given to XLA; None where it does not.

    Args:
        written: the serialized module as the hook returned it (or saw it, for XLA's own plan).
        executed: the serialized module as read from the executable.

    Raises:
        ModuleError: one of them is no HLO module, or inconsistent.
    """
    mine, theirs = canonicalize(_comparable(written)), canonicalize(_comparable(executed))
    if mine.graph.fingerprint != theirs.graph.fingerprint:
        return f"it computes something else: {_first_difference(mine.graph, theirs.graph)}"
    found = _difference(mine, theirs)
    for one, other in zip(mine.regions, theirs.regions, strict=True):
        for body, executed_body in zip(one.sources, other.sources, strict=True):
            difference = _difference(body, executed_body)
            found = found or (f"in {one.name}, {difference}" if difference else None)
    return found


def _difference(mine: CanonicalModule, theirs: CanonicalModule) -> str | None:
    unmoved = {f"n{node.id}" for node in mine.graph.nodes if node.opcode in COLLECTIVES}
    return describe_difference(mine.graph, settled(read(theirs), unmoved), settled(read(mine), unmoved))


def _comparable(module: bytes) -> bytes:
    return without_unmoved_starts(without_barriers(module))


def without_barriers(module: bytes) -> bytes:
    """The module without its optimization barriers, which stand for their operands."""
    if b"opt-barrier" not in module:
        return module
    parsed = hlo_proto.parse(module)
    for computation in parsed.computations:
        stands_for = {i.id: i.operand_ids[0] for i in computation.instructions if i.opcode == "opt-barrier"}
        if not stands_for:
            continue
        for barrier, operand in stands_for.items():  # a barrier comes after the barriers it reads
            stands_for[barrier] = stands_for.get(operand, operand)
        kept = [i for i in computation.instructions if i.id not in stands_for]
        for instruction in kept:
            for field in (instruction.operand_ids, instruction.control_predecessor_ids):
                field[:] = [stands_for.get(value, value) for value in field]
        computation.root_id = stands_for.get(computation.root_id, computation.root_id)
        _keep(parsed, computation, kept)
    return hlo_proto.serialize(parsed)


def without_unmoved_starts(module: bytes) -> bytes:
    """The module with every asynchronous collective that no plan moves run where it is waited for.

    XLA does so with those that nothing runs beside, transfers of plans included (see :func:`settled`). Here it is
    done whatever runs beside them: that is for comparing, and nothing to compile. As in XLA the collective takes
    its backend config from its start, its shape from its wait, and is left without control dependencies.
    """
    if b"-start" not in module:
        return module
    parsed = hlo_proto.parse(module)
    index = ModuleIndex(parsed)
    for computation in parsed.computations:
        by_id = {i.id: i for i in computation.instructions}
        instead: dict[int, Message] = {}
        dropped: set[int] = set()
        for wait in computation.instructions:
            chain = _back_to_start(wait, by_id)
            collective = _unmoved(chain[-1], wait, index) if chain else None
            if collective is not None:
                instead[wait.id] = collective
                dropped.update(one.id for one in chain)
        if not instead:
            continue
        kept = [instead.get(i.id, i) for i in computation.instructions if i.id not in dropped]
        for instruction in kept:
            before = instruction.control_predecessor_ids
            before[:] = [value for value in before if value not in dropped and value not in instead]
        _keep(parsed, computation, kept)
    return hlo_proto.serialize(parsed)


def _back_to_start(wait: Message, by_id: dict[int, Message]) -> list[Message]:
    """What a wait ends, from the last ``async-update`` to the start; empty for any other instruction."""
    chain: list[Message] = []
    before = by_id.get(wait.operand_ids[0]) if wait.opcode in _WAITS else None
    while before is not None:
        chain.append(before)
        before = by_id.get(before.operand_ids[0]) if before.opcode == "async-update" else None
    return chain


def _unmoved(start: Message, wait: Message, index: ModuleIndex) -> Message | None:
    """The collective that ``start`` begins, to stand for ``wait``; None where it begins something else, or a transfer
    that a plan may move."""
    found = hlo_proto.Instruction()
    if start.opcode in _DEDICATED:
        found.CopyFrom(start)
        found.opcode = start.opcode.removesuffix("-start")
    elif start.opcode == "async-start":
        body = index.computation(start.called_computation_ids[0])
        number_of = {i.id: i.parameter_number for i in body.instructions if i.opcode == "parameter"}
        work = [i for i in body.instructions if i.id not in number_of]
        if len(work) != 1:
            return None
        found.CopyFrom(work[0])
        found.operand_ids[:] = [start.operand_ids[number_of[value]] for value in found.operand_ids]
    if found.opcode not in COLLECTIVES - TRANSFERS:
        return None
    found.id, found.name, found.backend_config = wait.id, wait.name, start.backend_config
    found.shape.CopyFrom(wait.shape)
    del found.control_predecessor_ids[:]
    return found


def _keep(module: Message, computation: Message, kept: Iterable[Message]) -> None:
    """Leave only these of a computation's instructions, in the schedule as well."""
    fresh = hlo_proto.Computation()
    fresh.CopyFrom(computation)
    del fresh.instructions[:]
    fresh.instructions.extend(kept)
    computation.CopyFrom(fresh)
    if computation.id in module.schedule.sequences:
        ids = module.schedule.sequences[computation.id].instruction_ids
        left = {instruction.id for instruction in computation.instructions}
        ids[:] = [value for value in ids if value in left]


def settled(strategy: Strategy, unmoved: Collection[str] = ()) -> Strategy:
    """The strategy with every transfer that no kernel runs beside issued where it is waited for.

    XLA runs such a transfer on the compute stream (``GpuConvertAsyncCollectivesToSync``).

    Args:
        strategy: a plan that was read.
        unmoved: tokens of the collectives that no plan moves; for XLA they are no more than transfers are.
    """
    order: list[str] = []
    run: list[str] = []
    for token in (*strategy.order, ""):
        if token.endswith((".start", ".done")) or token in unmoved:
            run.append(token)
            continue
        order += _paired(run)
        run = []
        order += [token] if token else []
    return replace(strategy, order=tuple(order))


def _paired(run: list[str]) -> list[str]:
    """Tokens of transfers that stand together, each start that meets its done moved right before it."""
    done = {token.removesuffix(".done") for token in run if token.endswith(".done")}
    here = {token.removesuffix(".start") for token in run if token.endswith(".start")} & done
    paired: list[str] = []
    for token in run:
        name, _, part = token.rpartition(".")
        if name not in here:
            paired.append(token)
        elif part == "done":
            paired += [f"{name}.start", token]
    return paired


def _first_difference(mine: Graph, theirs: Graph) -> str:
    for a, b in zip(mine.nodes, theirs.nodes, strict=False):
        if (a.key, a.operands) != (b.key, b.operands):
            return f"n{a.id} is {b.opcode} {b.shape} {b.name}, expected {a.opcode} {a.shape} {a.name}"
    return f"{len(theirs)} nodes, expected {len(mine)}"
