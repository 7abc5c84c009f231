"""Where an all-reduce may leave its result in the buffer of its operand.

XLA:GPU reduces in place (``AsyncCollectiveCreator`` says so on the start), which saves a buffer per
gradient in flight and keeps NCCL's reads and writes in one place. After the hook nothing inserts a
copy any more, so it must be certain that the buffer is no one else's.
"""

from __future__ import annotations

from disco_hlo.hlo.graph import Graph, Kind

_LIBRARY_CALLS = frozenset({"custom-call", "fusion"})
"""Fixed nodes that write their results into buffers of their own, unless graph.inplace says otherwise."""


def may_overwrite(graph: Graph, all_reduce: int) -> bool:
    """Whether ``all_reduce`` is the only reader of a buffer that the step made for its gradient alone.

    Not so for a gradient that the step returns, that anything else reads (whatever the order: it may
    change), that lives in a parameter's or constant's storage, or that comes from a loop or another
    all-reduce; nor where the result has to end up in a donated parameter.
    """
    if any(writer == all_reduce for _, writer in graph.inplace):
        return False
    home = graph.shown[graph.nodes[all_reduce].operands[0]]
    return readers_of(graph, home) == {all_reduce} and _is_own_buffer(graph, home)


def readers_of(graph: Graph, home: int) -> set[int]:
    """What reads a value, through bitcasts and tuples too; the root stands for the step's caller."""
    found: set[int] = {home} if home == graph.root else set()
    pending = list(graph.users[home])
    while pending:
        user = pending.pop()
        if user == graph.root or graph.nodes[user].kind is not Kind.FREE:
            found.add(user)
        else:
            pending += graph.users[user]
    return found


def _is_own_buffer(graph: Graph, home: int) -> bool:
    node = graph.nodes[home]
    if node.opcode == "get-tuple-element":
        call = node.operands[0]
        taken_apart = all(graph.nodes[user].opcode == "get-tuple-element" for user in graph.users[call])
        return taken_apart and call != graph.root and _is_own_buffer(graph, call)
    updated = [buffer for buffer, writer in graph.inplace if writer == home]
    if updated:
        return all(_is_own_buffer(graph, graph.shown[buffer]) for buffer in updated)
    return node.kind is Kind.FUSIBLE or (node.kind is Kind.FIXED and node.opcode in _LIBRARY_CALLS)
