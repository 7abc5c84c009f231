"""Pipeline sends in shards, as a simulated step would have them (CoCoNet, section 6.3; Megatron-LM's scatter-gather).

What the devices of a group hold alike each of them sends whole to its counterpart. In shards each sends its part, and
the group that receives gathers them. A plan does so to the step before XLA optimizes it
(:func:`~disco_hlo.structure.sharded.slice_send`); here the same question is asked of the step as it runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import CollectiveKind, Groups
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.proto import DetailedModule, Message
from disco_hlo.optimize.costs import SENDS, Costs, Inner, sent_bytes
from disco_hlo.structure.sharded import held_alike, is_deterministic, joins_groups, made_alike
from disco_hlo.whatif.coconet import in_tiles_ns

_CALLS = frozenset({"while", "conditional", "call"})
"""Ops that run regions: what these give is not looked into."""


def in_shards(source: CanonicalModule, costs: Costs, *, overlapped: bool) -> tuple[Costs, str]:
    """Costs in which each send goes in shards where that is possible and faster, and how many do.

    Args:
        source: a region of a step.
        costs: of a machine that is imagined.
        overlapped: whether a send and its gather go buffer tile by buffer tile, else one after the other.
    """
    graph = source.graph
    whole_ns, taken = costs.op_ns(graph), dict[int, Inner]()
    for node, groups in _sent_by_groups(source):
        size = sent_bytes(graph, node)
        pairs = CollectiveKind("collective-permute", graph.nodes[node].groups)
        (sent,) = costs.collective(pairs)([size // len(groups[0])]).tolist()
        (gathered,) = costs.collective(CollectiveKind("all-gather", groups))([size]).tolist()
        sharded_ns = round(in_tiles_ns(size, sent, gathered)) if overlapped else sent + gathered
        if sharded_ns < whole_ns[node]:
            taken[node] = Inner(sharded_ns)
    return costs.around(graph, taken), f"{len(taken)} of {len(sends_of(graph))} sends in shards"


def sends_of(graph: Graph) -> tuple[int, ...]:
    """The sends of a region."""
    return tuple(node.id for node in graph.nodes if node.opcode.removesuffix("-start") in SENDS)


def _sent_by_groups(source: CanonicalModule) -> Iterator[tuple[int, Groups]]:
    """Each send of what the devices of some groups hold alike, with the largest groups whose size divides it."""
    nodes = source.graph.nodes
    grouped = {one.groups for one in nodes if one.opcode in ("all-reduce", "all-gather") and one.groups}
    of_one_size = [groups for groups in grouped if len({len(group) for group in groups}) == 1]
    largest = sorted(of_one_size, key=lambda groups: (-len(groups[0]), groups))
    alike = {groups: _alike(source, groups) for groups in largest}
    for one in nodes:
        if one.opcode.removesuffix("-start") == "collective-permute" and len(one.operands) == 1:
            rows = _outermost(source.graph, one.operands[0])
            for groups in largest:
                is_joined = joins_groups(one.groups, groups) and rows % len(groups[0]) == 0
                if is_joined and one.operands[0] in alike[groups]:
                    yield one.id, groups
                    break


def _outermost(graph: Graph, node: int) -> int:
    """Elements along an array's outermost dimension in memory that has more than one."""
    shape = graph.nodes[node].shape
    order = shape.layout or tuple(reversed(range(len(shape.dims))))
    return next((shape.dims[d] for d in reversed(order) if shape.dims[d] > 1), 1)


def _alike(source: CanonicalModule, groups: Groups) -> set[int]:
    """Nodes that are proven to give the same value on all devices of each group."""
    shardings = _shardings(source)
    found: set[int] = set()
    for one in source.graph.nodes:
        operands_alike = found.issuperset(one.operands)
        if one.opcode == "parameter":
            number = source.protos[one.id].parameter_number
            same = bool(shardings) and held_alike(shardings[number], groups)
        elif one.opcode in ("all-reduce", "all-gather"):
            same = not one.groups or made_alike(one.opcode, one.groups, groups, operands_alike=operands_alike)
        else:
            same = operands_alike and is_deterministic(one.opcode) and one.opcode not in _CALLS
        if same:
            found.add(one.id)
    return found


def _shardings(source: CanonicalModule) -> list[Message]:
    """Of the entry's parameters; none of a region, or where the module does not say."""
    if source.computation != source.module.entry_computation_id:
        return []
    module = DetailedModule.FromString(source.module.SerializeToString())
    count = sum(one.opcode == "parameter" for one in source.graph.nodes)
    return list(module.spmd_parameters_shardings) if len(module.spmd_parameters_shardings) == count else []
