"""No value enters a kernel under two names.

XLA:CPU looks at one operand of a kernel to find whether the result may take its buffer. Where the same value is another
operand too, by a bitcast that stands outside, it is overwritten while it is still read. So such bitcasts are computed
inside: then the kernel has the value once, and XLA sees all that it does with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from disco_hlo.hlo.graph import Graph, Kind, once_per_graph
from disco_hlo.plan.ownership import listed_members
from disco_hlo.plan.strategy import Group, Strategy


def named_once(graph: Graph, strategy: Strategy) -> Strategy:
    """The same strategy, whose kernels read each value under one name.

    A kernel of whose nodes every reader has its own now is left out.

    Raises:
        IllegalStrategyError: a group or bucket names what the graph does not have.
    """
    if not _values_with_names(graph):
        return strategy
    listed_members(graph, strategy)  # it refuses nodes that do not exist
    groups = [_with_bitcasts(graph, group) for group in strategy.groups]
    owned = {node for group in groups for node in group.nodes}
    alone = [node for node in _read_by_two_names(graph) if node not in owned]
    if tuple(groups) == strategy.groups and not alone:
        return strategy
    now = _read_from_memory(graph, groups)
    tokens: dict[str, str] = {}
    for node in alone:
        if node in now:
            tokens[f"n{node}"] = f"g{len(groups)}"
            groups.append(_with_bitcasts(graph, Group((node,))))
    before, now = _read_from_memory(graph, strategy.groups), _read_from_memory(graph, groups)
    kept = [
        number
        for number, group in enumerate(groups)
        if before.isdisjoint(group.nodes) or not now.isdisjoint(group.nodes)
    ]
    renamed: dict[str, str | None] = {f"g{number}": None for number in range(len(groups))}
    renamed |= {f"g{number}": f"g{place}" for place, number in enumerate(kept)}
    order = (tokens.get(token, token) for token in strategy.order)
    written = (renamed.get(token, token) for token in order)
    return replace(
        strategy,
        groups=tuple(groups[number] for number in kept),
        order=tuple(token for token in written if token is not None),
    )


def _read_from_memory(graph: Graph, groups: Sequence[Group]) -> set[int]:
    """The nodes that are read from memory, from what is returned and what runs anyway back."""
    owner = {node: {*group.nodes, *group.duplicates} for group in groups for node in group.nodes}
    found: set[int] = set()
    pending = [graph.root, *(node.id for node in graph.nodes if node.kind in (Kind.FIXED, Kind.ALL_REDUCE))]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            inside = owner.get(node, {node})
            pending += [x for member in inside for x in graph.nodes[member].operands if x not in inside]
    return found


def has_two_names(graph: Graph, inside: Collection[int]) -> bool:
    """Whether a kernel reads one value from outside by two names. XLA's own has two buffers then, where canonical form
    has one: a kernel that only moves the layout is a bitcast there."""
    return bool(_doubled(graph, inside))


def _with_bitcasts(graph: Graph, group: Group) -> Group:
    inside = {*group.nodes, *group.duplicates}
    added: set[int] = set()
    while more := _doubled(graph, inside | added):  # bitcasts of bitcasts
        added |= more
    return replace(group, duplicates=tuple(sorted({*group.duplicates, *added}))) if added else group


def _doubled(graph: Graph, inside: Collection[int]) -> set[int]:
    """Bitcasts by which a kernel reads from outside what it also reads by another name."""
    names: dict[int, set[int]] = {}
    for member in inside:
        for operand in graph.nodes[member].operands:
            if operand not in inside:
                names.setdefault(graph.shown[operand], set()).add(operand)
    return {
        name
        for read in names.values()
        if len(read) > 1
        for name in read
        if graph.nodes[name].opcode == "bitcast"
    }


@once_per_graph
def _values_with_names(graph: Graph) -> frozenset[int]:
    """Values that can be read by a bitcast."""
    return frozenset(graph.shown[node.id] for node in graph.nodes if node.opcode == "bitcast")


@once_per_graph
def _read_by_two_names(graph: Graph) -> tuple[int, ...]:
    """Ops that read one value by two names themselves."""
    return tuple(
        node.id
        for node in graph.nodes
        if node.kind is Kind.FUSIBLE and len(node.operands) > 1 and _doubled(graph, (node.id,))
    )
