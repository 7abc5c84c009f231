"""The rules of ``kernel_cost`` again, slow and obvious: contexts are tuples, compared with all a value has."""

from math import prod

from disco_hlo.estimator import kernel_tables as at
from disco_hlo.estimator.kernel_cost import MAXIMUM_CONTEXTS


def obvious_work(tables, most_loops, members, results):
    """(bytes moved, ns of evaluations, elements read across the grain) of a kernel."""
    hoists = tables.constant[at.HOISTS] > 0
    elements, item_bytes, element_ns = tables.value
    contexts = {int(x): [] for x in members}
    written = 0.0
    updated = [int(tables.edge[tables.node[at.OPERANDS_AT, x]]) for x in results]
    in_place = all(tables.node[at.WRITTEN, x] != x for x in results) and not {*updated} & {*contexts}
    for x in results:
        whole = tables.node[at.WRITTEN, x] if in_place else x
        written += elements[whole] * item_bytes[whole]
        extents = tables.edge[tables.node[at.EXTENTS_AT, whole] : tables.node[at.LOOPS_AT, whole]].tolist()
        add(contexts[int(x)], (tuple((extent, 0) for extent in extents), tuple(range(len(extents)))))
    work = 0.0
    for x in map(int, reversed(members)):
        for context in contexts[x]:
            work += evaluations(context, hoists) * element_ns[x]
            unfollowed = 0.0
            for slot in range(tables.node[at.OPERANDS_AT, x], tables.node[at.EXTENTS_AT, x], 2):
                operand = int(tables.edge[slot])
                seen = context_of_operand(tables, most_loops, x, slot, context, hoists)
                if not add(contexts.setdefault(operand, []), seen):
                    unfollowed += evaluations(seen, hoists) * element_ns[operand]
            work += unfollowed
    read = strided = 0.0
    for x in list(contexts)[len(members) :]:
        wanted = sum((evaluations(context, hoists) for context in contexts[x]), 0.0)
        read += min(elements[x], wanted) * item_bytes[x]
        for loops, follows in contexts[x]:
            minor = next((loop for loop in reversed(follows) if loop >= 0), -1)
            if 0 <= minor < max(follows):
                strided += evaluations((loops, follows), hoists)
    return written + read, work, strided


def add(known, context):
    """Whether the value has the context now."""
    if context in known:
        return True
    if len(known) == MAXIMUM_CONTEXTS:
        return False
    known.append(context)
    return True


def evaluations(context, hoists):
    """How often a value is computed."""
    loops, follows = context
    innermost = max(follows, default=-1)
    if innermost < 0:
        return 1.0
    return prod((float(extent) for extent, _ in (loops[: innermost + 1] if hoists else loops)), start=1.0)


def context_of_operand(tables, most_loops, reader, slot, context, hoists):
    """Context of what ``reader`` reads at ``slot``."""
    loops, follows = context
    deepest = max(follows, default=-1)
    outer = list(loops[: deepest + 1] if hoists else loops)
    around = list(outer)
    first, last = tables.node[at.LOOPS_AT, reader], tables.node[at.OPERANDS_AT, reader + 1]
    for extent in tables.edge[first:last].tolist():
        if len(around) < most_loops:
            around.append((extent, reader + 1))
        else:
            around[-1] = (around[-1][0] * extent, around[-1][1])
    operand, map_at = tables.edge[slot], tables.edge[slot + 1]
    rank = tables.node[at.LOOPS_AT, operand] - tables.node[at.EXTENTS_AT, operand]
    everywhere = len(around) - 1 if len(around) > len(outer) else deepest
    seen = []
    for way in tables.edge[map_at : map_at + rank].tolist():
        if way >= 0:
            seen.append(follows[way])
        elif way == at.ALL:
            seen.append(everywhere)
        elif way <= at.ADDED:
            seen.append(min(len(outer) + at.ADDED - way, len(around) - 1))
        else:
            seen.append(-1)
    return tuple(around), tuple(seen)
