"""From instruction times to cost keys, under which a time is found again in another model.

A single op goes by :attr:`Node.key`; a fused kernel by a digest of its structure: the keys of its
ops, how they feed each other, which results leave it. Node numbers, names and the rest of the
graph do not matter, so the layers of a model share keys, and so do models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b

from disco_hlo.hlo.attributes import custom_fusion_kind, triton_settings
from disco_hlo.hlo.canonical import Origin
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.graph import Graph, Kind, is_cloned
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.proto import parse
from disco_hlo.profiler.instructions import InstructionTimes
from disco_hlo.profiler.profile import OpTime, merged

_COLLECTIVE_KERNEL = "__triton_collective"
"""XLA:GPU's kernels for small all-reduces and all-gathers."""
GROUP_PREFIX = "g:"
"""First characters of the key of a fused kernel; no :attr:`Node.key` has them."""


def group_key(graph: Graph, members: Collection[int], results: Sequence[int], emitter: str = "") -> str:
    """Cost key of the kernel that computes ``members`` and writes ``results`` (in this order).

    ``emitter`` tells kernels of equal structure apart where XLA can emit them in several ways
    (Triton with its tiles); the default emitters are chosen from the structure and need no name.
    """
    number: dict[int, int] = {}
    lines = [emitter]
    for node_id in _structural_order(graph, set(members), results):
        node = graph.nodes[node_id]
        number[node_id] = len(number)
        if node_id not in members and not is_cloned(node):
            lines.append(f"read {node.shape} {node.shape.layout}")
            continue
        operands = " ".join(str(number[operand]) for operand in node.operands)
        lines.append(f"{node.key} {operands}")
    lines.append(" ".join(str(number[result]) for result in results))
    return GROUP_PREFIX + blake2b("\n".join(lines).encode(), digest_size=12).hexdigest()


def triton_emitter(settings: str) -> str:
    """The ``emitter`` of a Triton kernel's key: its settings are part of what it is."""
    return f"triton {settings}"


def results_of(graph: Graph, owned: Iterable[int], duplicates: Iterable[int] = ()) -> tuple[int, ...]:
    """Owned nodes whose value leaves the group, ascending (see ``Group.nodes``)."""
    owned = sorted(owned)
    inside = {*owned, *duplicates}
    return tuple(n for n in owned if n == graph.root or any(user not in inside for user in graph.users[n]))


def owners(module: bytes) -> dict[str, str]:
    """Instruction in a called computation -> the entry instruction that runs it.

    Bodies of loops and branches, and what asynchronous pairs wrap, show up in traces under their
    own names; this says to which instruction of the entry their time belongs.
    Raises :class:`ModuleError` for bytes that are no module.
    """
    index = ModuleIndex(parse(module))
    found: dict[str, str] = {}
    for instruction in index.computation(index.module.entry_computation_id).instructions:
        pending = list(instruction.called_computation_ids)
        seen: set[int] = set()
        while pending:
            computation_id = pending.pop()
            if computation_id in seen:
                continue
            seen.add(computation_id)
            for inner in index.computation(computation_id).instructions:
                found.setdefault(inner.name, instruction.name)
                pending.extend(inner.called_computation_ids)
    return found


def keyed_times(
    graph: Graph, origins: Iterable[Origin], times: Mapping[str, InstructionTimes]
) -> dict[str, OpTime]:
    """Measured instruction times of a module by cost key; equal keys are merged.

    ``origins`` say which nodes each instruction computes. All-reduces are left out, their time
    follows the fitted line. Other collectives count from the arrival of the last participant.
    """
    found: dict[str, list[OpTime]] = {}
    for origin in origins:
        measured = times.get(origin.name)
        if measured is None or origin.role == "done":
            continue
        key = _origin_key(graph, origin)
        if key is None:
            continue
        waits = any(graph.nodes[node].opcode in COLLECTIVES for node in origin.nodes)
        if origin.proto.fusion_kind == "kCustom":
            waits = waits or custom_fusion_kind(origin.proto) == _COLLECTIVE_KERNEL
        middle = measured.last_arrival_ns if waits else measured.median_ns
        found.setdefault(key, []).append(OpTime(middle, measured.spread_ns, measured.samples))
    return {key: merged(found[key]) for key in sorted(found)}


def _origin_key(graph: Graph, origin: Origin) -> str | None:
    nodes = [graph.nodes[node] for node in origin.nodes]
    if any(node.kind is Kind.ALL_REDUCE for node in nodes):
        return None
    if origin.proto.fusion_kind == "kCustom" and custom_fusion_kind(origin.proto) == "__triton":
        return group_key(graph, origin.nodes, origin.results, triton_emitter(triton_settings(origin.proto)))
    if len(nodes) == 1:
        return nodes[0].key
    return group_key(graph, origin.nodes, origin.results)


def _structural_order(graph: Graph, members: set[int], results: Sequence[int]) -> list[int]:
    """Post-order from the results through the members, their external reads included."""
    order: list[int] = []
    done: set[int] = set()
    stack = [(result, False) for result in reversed(results)]
    while stack:
        node_id, expanded = stack.pop()
        if node_id in done:
            continue
        if expanded or node_id not in members:
            done.add(node_id)
            order.append(node_id)
            continue
        stack.append((node_id, True))
        stack.extend((operand, False) for operand in reversed(graph.nodes[node_id].operands))
    return order
