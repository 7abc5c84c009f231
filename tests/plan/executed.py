"""Check what an executable runs against the module it was compiled from.

``verify`` judges a module before XLA compiles it; here is the other end. After the hook XLA still removes
optimization barriers, annotates and renames. None of that is a different plan; anything else is.
"""

from __future__ import annotations

from disco_hlo.hlo import proto as hlo_proto
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.read import describe_difference, read


def executed_difference(written: bytes, executed: bytes) -> str | None:
    """How the module that an executable holds differs from the one given to XLA; None where it does not.

    Args:
        written: the serialized module as the hook returned it (or saw it, for XLA's own plan).
        executed: the serialized module as read from the executable.

    Raises:
        ModuleError: one of them is no HLO module, or inconsistent.
    """
    mine, theirs = canonicalize(without_barriers(written)), canonicalize(without_barriers(executed))
    if mine.graph.fingerprint != theirs.graph.fingerprint:
        return f"it computes something else: {_first_difference(mine.graph, theirs.graph)}"
    found = _difference(mine, theirs)
    for one, other in zip(mine.regions, theirs.regions, strict=True):
        for body, executed_body in zip(one.sources, other.sources, strict=True):
            difference = _difference(body, executed_body)
            found = found or (f"in {one.name}, {difference}" if difference else None)
    return found


def _difference(mine: CanonicalModule, theirs: CanonicalModule) -> str | None:
    return describe_difference(mine.graph, read(theirs), read(mine))


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
        fresh = hlo_proto.Computation()
        fresh.CopyFrom(computation)
        del fresh.instructions[:]
        fresh.instructions.extend(kept)
        computation.CopyFrom(fresh)
        if computation.id in parsed.schedule.sequences:
            ids = parsed.schedule.sequences[computation.id].instruction_ids
            ids[:] = [value for value in ids if value not in stands_for]
    return hlo_proto.serialize(parsed)


def _first_difference(mine: Graph, theirs: Graph) -> str:
    for a, b in zip(mine.nodes, theirs.nodes, strict=False):
        if (a.key, a.operands) != (b.key, b.operands):
            return f"n{a.id} is {b.opcode} {b.shape} {b.name}, expected {a.opcode} {a.shape} {a.name}"
    return f"{len(theirs)} nodes, expected {len(mine)}"
