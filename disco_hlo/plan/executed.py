"""Check what an executable runs against the module it was compiled from.

``verify`` judges a module before XLA compiles it; here is the other end. After the hook XLA still
removes optimization barriers, pulls a transfer that nothing runs beside together with its wait,
annotates and renames. None of that is a different plan; anything else is.
"""

from __future__ import annotations

from dataclasses import replace

from disco_hlo.hlo import proto as hlo_proto
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.read import read
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.verify import describe_difference


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
    return describe_difference(mine.graph, settled(read(theirs)), settled(read(mine)))


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
        root = stands_for.get(computation.root_id, computation.root_id)
        fresh = hlo_proto.Computation()
        fresh.CopyFrom(computation)
        del fresh.instructions[:]
        fresh.instructions.extend(kept)
        fresh.root_id = root
        computation.CopyFrom(fresh)
        if computation.id in parsed.schedule.sequences:
            ids = parsed.schedule.sequences[computation.id].instruction_ids
            ids[:] = [value for value in ids if value not in stands_for]
    return hlo_proto.serialize(parsed)


def settled(strategy: Strategy) -> Strategy:
    """The strategy with every transfer that nothing runs beside issued where it is waited for.

    XLA runs such a transfer on the compute stream (``GpuConvertAsyncCollectivesToSync``).
    """
    order: list[str] = []
    run: list[str] = []
    for token in (*strategy.order, ""):
        if token.endswith((".start", ".done")):
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
