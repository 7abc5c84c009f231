"""From instruction times to cost keys, under which a time is found again in another model.

A single op goes by :attr:`Node.key`, a fused kernel by a digest of its structure (``kernel_keys``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from disco_hlo.hlo.attributes import custom_fusion_kind, triton_settings
from disco_hlo.hlo.canonical import Origin
from disco_hlo.hlo.cost_model import triton_emitter
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.graph import Graph, Kind, as_kernel, kernel_nodes
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.proto import parse
from disco_hlo.profiler.instructions import InstructionTimes
from disco_hlo.profiler.kernel_keys import group_key
from disco_hlo.profiler.profile import OpTime, merged

_Told = TypeVar("_Told")
_COLLECTIVE_KERNEL = "__triton_collective"
"""XLA:GPU's kernels for small all-reduces and all-gathers."""


def owners(module: bytes) -> dict[str, str]:
    """Instruction in a called computation -> the entry instruction that runs it.

    Bodies of loops and branches, and what asynchronous pairs wrap, show up in traces under their
    own names; this says to which instruction of the entry their time belongs.
    Raises :class:`ModuleError` for bytes that are no module.
    """
    index = ModuleIndex(parse(module))
    return owners_in(index, index.module.entry_computation_id)


def owners_in(index: ModuleIndex, computation_id: int) -> dict[str, str]:
    """The same for another computation than the entry: instruction in what it calls -> its own that runs it."""
    found: dict[str, str] = {}
    for instruction in index.computation(computation_id).instructions:
        pending = list(instruction.called_computation_ids)
        seen: set[int] = set()
        while pending:
            called = pending.pop()
            if called in seen:
                continue
            seen.add(called)
            for inner in index.computation(called).instructions:
                found.setdefault(inner.name, instruction.name)
                pending.extend(inner.called_computation_ids)
    return found


def in_region(region: str, times: Mapping[str, _Told]) -> dict[str, _Told]:
    """Those of the times, or whatever is told of instructions, that the rewriter named for a region, as if it were an
    entry: ``loop1_g3_add`` is ``g3_add``, and so is ``loop1_2_g3_add``, the same in the second computation of this
    kind."""
    named = re.compile(rf"{region}_(?:\d+_)?([bgn]\d+[._].*)")
    return {found[1]: time for name, time in times.items() if (found := named.fullmatch(name))}


def keyed_times(
    graph: Graph, origins: Iterable[Origin], times: Mapping[str, InstructionTimes]
) -> dict[str, OpTime]:
    """Measured instruction times of a module by cost key; equal keys are merged.

    ``origins`` say which nodes each instruction computes. All-reduces are left out, their time
    follows the fitted line. Other collectives count from the arrival of the last participant.
    """
    found: dict[str, list[OpTime]] = {}
    for origin in origins:
        measured, key = times.get(origin.name), origin_key(graph, origin)
        if measured is None or key is None:
            continue
        waits = any(graph.nodes[node].opcode in COLLECTIVES for node in origin.nodes)
        if origin.proto.fusion_kind == "kCustom":
            waits = waits or custom_fusion_kind(origin.proto) == _COLLECTIVE_KERNEL
        middle = measured.last_arrival_ns if waits else measured.median_ns
        found.setdefault(key, []).append(OpTime(middle, measured.spread_ns, measured.samples))
    return {key: merged(found[key]) for key in sorted(found)}


def origin_key(graph: Graph, origin: Origin) -> str | None:
    """Under which the time of an instruction is known; None for what follows a line, and for the ends of what has a
    start."""
    if origin.role == "done" or any(graph.nodes[node].kind is Kind.ALL_REDUCE for node in origin.nodes):
        return None
    ops, results = as_kernel(graph, origin.nodes, origin.results)
    if not ops:  # it only shows a value in another shape
        return None
    if origin.proto.fusion_kind == "kCustom" and custom_fusion_kind(origin.proto) == "__triton":
        return kernel_key(graph, ops, results, triton_emitter(triton_settings(origin.proto)))
    return kernel_key(graph, ops, results)


def kernel_key(graph: Graph, ops: Sequence[int], results: Sequence[int], emitter: str = "") -> str:
    """The key of the kernel that computes ``ops``, wherever bitcasts stand: of one op by itself that of the op."""
    if len(ops) == 1 and not emitter:
        return graph.nodes[ops[0]].key
    return group_key(graph, kernel_nodes(graph, ops), results, emitter)
