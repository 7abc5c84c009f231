"""Pipeline sends in shards, as a simulated step would have them (CoCoNet, section 6.3; Megatron-LM's scatter-gather).

What the devices of a group hold alike each of them sends whole to its counterpart. In shards each sends its part, and
the group that receives gathers them. A plan does so to the step before XLA optimizes it
(:func:`~disco_hlo.structure.sharded.slice_send`); here the same question is asked of the step as it runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from disco_hlo.hlo.canonical import CanonicalModule
from disco_hlo.hlo.collectives import CollectiveKind, Groups
from disco_hlo.hlo.cost_model import on_one_line
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.opcodes import ALIKE
from disco_hlo.hlo.proto import DetailedInstruction, DetailedModule, serialize
from disco_hlo.optimize.costs import SENDS, Costs, Inner, sent_bytes
from disco_hlo.structure.program import Program
from disco_hlo.structure.sharded import SameValues, joins_groups
from disco_hlo.whatif.coconet import in_tiles_ns

Sends = dict[int, Groups]
"""The sends of a region that can go in shards, each with the groups of devices that hold its array alike."""


def sends_of(graph: Graph) -> tuple[int, ...]:
    """The sends of a region."""
    return tuple(node.id for node in graph.nodes if node.opcode.removesuffix("-start") in SENDS)


def sends_ns(graph: Graph, costs: Costs) -> dict[int, int]:
    """What each send of a region takes, whether it may overlap with kernels as a plan says or not."""
    ops_ns, (line, size_bytes) = costs.op_ns(graph), on_one_line(graph, costs)
    travels = {*graph.collectives}
    return {
        node: int(line(size_bytes[node]) if node in travels else ops_ns[node]) for node in sends_of(graph)
    }


def sent_by_groups(source: CanonicalModule) -> dict[str, Sends]:
    """By region what can go in shards."""
    if not any(sends_of(one.graph) for one in source.computations.values()):
        return {}
    step = Program(_plain(source))
    return {
        name: dict(_sent(region, step.inside(region.computation)))
        for name, region in source.computations.items()
        if sends_of(region.graph)
    }


def in_shards(graph: Graph, costs: Costs, sends: Sends, *, overlapped: bool) -> tuple[Costs, str]:
    """Costs in which each send goes in shards where that is possible and faster, and how many do.

    Args:
        graph: of a region.
        costs: of a machine that is imagined.
        sends: what can go in shards.
        overlapped: whether a send and its gather go buffer tile by buffer tile, else one after the other.
    """
    whole_ns, taken = sends_ns(graph, costs), dict[int, Inner]()
    for node, groups in sends.items():
        size = sent_bytes(graph, node)
        pairs = CollectiveKind("collective-permute", graph.nodes[node].groups)
        (sent,) = costs.collective(pairs)([size // len(groups[0])]).tolist()
        (gathered,) = costs.collective(CollectiveKind("all-gather", groups))([size]).tolist()
        sharded_ns = round(in_tiles_ns(size, sent, gathered)) if overlapped else sent + gathered
        if sharded_ns < whole_ns[node]:
            taken[node] = Inner(sharded_ns)
    return costs.around(graph, taken), f"{len(taken)} of {len(sends_of(graph))} sends in shards"


def _sent(region: CanonicalModule, program: Program) -> Iterator[tuple[int, Groups]]:
    """The largest groups count whose size divides what is sent."""
    nodes = region.graph.nodes
    grouped = {one.groups for one in nodes if one.opcode in ALIKE and one.groups}
    of_one_size = [groups for groups in grouped if len({len(group) for group in groups}) == 1]
    largest = sorted(of_one_size, key=lambda groups: (-len(groups[0]), groups))
    proven = {groups: SameValues(program, groups).proven for groups in largest}
    for node in sends_of(region.graph):
        operands = program.instructions[node].operand_ids
        for groups in largest if len(operands) == 1 else ():
            is_whole = _outermost(region.graph, nodes[node].operands[0]) % len(groups[0]) == 0
            if (
                is_whole
                and operands[0] in proven[groups]
                and joins_groups(program.instructions[node], groups)
            ):
                yield node, groups
                break


def _outermost(graph: Graph, node: int) -> int:
    """Elements along an array's outermost dimension in memory that has more than one."""
    shape = graph.nodes[node].shape
    order = shape.layout or tuple(reversed(range(len(shape.dims))))
    return next((shape.dims[d] for d in reversed(order) if shape.dims[d] > 1), 1)


def _plain(source: CanonicalModule) -> bytes:
    """The step as a module without a schedule, fusions and halves of sends: of each region an instruction a node, at
    the node's place."""
    module = DetailedModule.FromString(source.module.SerializeToString())
    module.ClearField("schedule")
    written = {one.id: one for one in module.computations}
    for region in source.computations.values():
        first = region.computation << 32
        made = [DetailedInstruction.FromString(one.SerializeToString()) for one in region.protos]
        for node, one in zip(region.graph.nodes, made, strict=True):
            one.id = first + node.id
            one.operand_ids[:] = [first + operand for operand in node.operands]
            one.ClearField("control_predecessor_ids")
            if node.opcode == "collective-permute-start":
                one.opcode = "collective-permute"
                one.shape.CopyFrom(made[node.operands[0]].shape)
            elif node.opcode == "collective-permute-done":
                one.opcode = "copy"
        computation = written[region.computation]
        del computation.instructions[:]
        computation.instructions.extend(made)
        computation.root_id = first + region.graph.root
    return serialize(module)
