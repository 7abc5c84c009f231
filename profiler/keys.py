"""Whose time a time is: the bodies of loops that events of a trace belong to, and the cost keys under which a time is
found again in another model.

DisCo (section 4.2) times the ops of a step that runs each of them once. Public trainers scan their layers, so most of
their time passes in bodies of loops and branches.

A single op goes by :attr:`Node.key`, a fused kernel by a digest of its structure: the keys of its ops, how they feed
each other, which results leave it. Node numbers, names and the rest of the graph do not matter, so the layers of a
model share keys, and so do models. What is hashed is a text: the emitter, then a line for each node in post-order from
the results, then the numbers of the results. A member's line is its key and the numbers of its operands, of what a
kernel reads the shape and the layout. A search asks for thousands of kernels a second, so the texts are put together in
compiled code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner
from disco_hlo.hlo.attributes import custom_fusion_kind, triton_settings
from disco_hlo.hlo.canonical import CanonicalModule, Origin
from disco_hlo.hlo.collectives import CollectiveKind, collective_bytes, collective_kind
from disco_hlo.hlo.cost_model import FlatKernels, Kernels, triton_emitter
from disco_hlo.hlo.flatten import ModuleIndex
from disco_hlo.hlo.graph import Graph, Kind, as_kernel, flat_graph, flat_shapes, kernel_nodes, once_per_graph
from disco_hlo.hlo.opcodes import COLLECTIVES
from disco_hlo.hlo.proto import parse
from disco_hlo.hlo.regions import regions_called, trip_count
from disco_hlo.hlo.walks import reached
from disco_hlo.profiler.instructions import InstructionTimes
from disco_hlo.profiler.profile import OpTime, merged

GROUP_PREFIX = "g:"
"""First characters of the key of a fused kernel; no :attr:`Node.key` has them."""
_Told = TypeVar("_Told")
_COLLECTIVE_KERNEL = "__triton_collective"
"""XLA:GPU's kernels for small all-reduces and all-gathers."""
_KEY_BYTES: Final = 12
_LINE_END, _SPACE, _ZERO = ord("\n"), ord(" "), ord("0")
_MOST_DIGITS: Final = 20
_MEMBER: Final = -1
"""What ``number`` says of a member that has none yet."""
_OUTSIDE: Final = -2


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

    def called(computation: int) -> Iterator[int]:
        return (i for one in index.computation(computation).instructions for i in one.called_computation_ids)

    for instruction in index.computation(computation_id).instructions:
        for inside in reached(instruction.called_computation_ids, called):
            for one in index.computation(inside).instructions:
                found.setdefault(one.name, instruction.name)
    return found


def in_region(region: str, times: Mapping[str, _Told]) -> dict[str, _Told]:
    """Those of the times, or whatever is told of instructions, that the rewriter named for a region, as if it were an
    entry: ``loop1_g3_add`` is ``g3_add``, and so is ``loop1_2_g3_add``, the same in the second computation of this
    kind."""
    named = re.compile(rf"{region}_(?:\d+_)?([bgn]\d+[._].*)")
    return {found[1]: time for name, time in times.items() if (found := named.fullmatch(name))}


@dataclass(frozen=True)
class Body:
    """A computation that a loop repeats, or that a branch or a call runs."""

    canonical: CanonicalModule
    around: int | None
    """Which of the module's bodies runs it; None: the entry."""
    turns: int
    """How often each time; 0 where the module does not say, and where several ops run it."""
    repeats: bool
    """Whether it is a loop's."""
    owner: Mapping[str, str]
    """Instruction that the body runs, its own ones included -> its own one that runs it."""


def bodies_of(module: CanonicalModule) -> tuple[Body, ...]:
    """The bodies of a module that have a canonical form, each after the one it lies in."""
    index, found = module.index, list[Body]()
    forms = {one.computation: one for region in module.regions for one in region.sources}
    callers = Counter(
        called
        for computation in (module.computation, *forms)
        for instruction in index.computation(computation).instructions
        for _, called in regions_called(instruction)
    )
    pending: list[tuple[int, int | None]] = [(module.computation, None)]
    seen: set[int] = set()
    while pending:
        computation, around = pending.pop()
        instructions = index.computation(computation).instructions
        runs = ((one, kind, called) for one in instructions for kind, called in regions_called(one))
        for instruction, kind, called in runs:
            if called in seen or called not in forms:
                continue
            seen.add(called)
            own = {one.name: one.name for one in index.computation(called).instructions}
            once = kind != "branch" and callers[called] == 1
            turns = (trip_count(instruction) or 0) if once else 0
            owner = owners_in(index, called) | own
            found.append(Body(forms[called], around, turns, kind == "loop", owner))
            pending.append((called, len(found) - 1))
    return tuple(found)


def travelling(source: CanonicalModule) -> dict[CollectiveKind, list[int]]:
    """The collectives of a step that travel as a plan says, those of bodies once: bytes of each, by kind."""
    found: dict[CollectiveKind, list[int]] = {}
    for graph in (source.graph, *(region.source.graph for region in source.regions)):
        for node in graph.collectives:
            found.setdefault(collective_kind(graph.nodes[node]), []).append(collective_bytes(graph, node))
    return found


def keyed_times(
    graph: Graph, origins: Iterable[Origin], times: Mapping[str, InstructionTimes]
) -> dict[str, OpTime]:
    """Measured instruction times of a module by cost key; equal keys are merged.

    ``origins`` say which nodes each instruction computes. Collectives that a plan moves are left out, their
    time follows the fitted lines. Others count from the arrival of the last participant.
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
    if origin.role == "done" or any(graph.nodes[node].kind is Kind.COLLECTIVE for node in origin.nodes):
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


def kernel_keys(graph: Graph, kernels: Kernels) -> list[str]:
    """The key of each kernel."""
    end, written = _texts(_lines(graph), kernels.flat)
    text, ends = written.tobytes(), end.tolist()
    first = kernels.emitters or ("",) * len(kernels)
    return [
        GROUP_PREFIX + blake2b(emitter.encode() + text[a:b], digest_size=_KEY_BYTES).hexdigest()
        for emitter, a, b in zip(first, [0, *ends], ends, strict=False)
    ]


def group_key(graph: Graph, members: Iterable[int], results: Sequence[int], emitter: str = "") -> str:
    """The key of one kernel, as :class:`~disco_hlo.hlo.cost_model.Kernels` has it; the order of its results counts."""
    return kernel_keys(graph, Kernels.of_lists([sorted(members)], [results], [emitter]))[0]


class _Lines(NamedTuple):
    """The texts of a graph's nodes. Arrays are never written."""

    operand_at: NDArray[np.int64]
    operand: NDArray[np.int64]
    line: NDArray[np.int64]
    """``[2 * nodes]``: the line of node x as a member, without the numbers of its operands, at 2 x, and as what a
    kernel reads at 2 x + 1."""
    text_at: NDArray[np.int64]
    """``[lines + 1]``: where each line begins in ``text``."""
    text: NDArray[np.uint8]


@once_per_graph
def _lines(graph: Graph) -> _Lines:
    flat, shapes = flat_graph(graph), flat_shapes(graph)
    keys = [graph.nodes[x].key for x in flat.example.tolist()]  # which tell shapes apart
    is_cloned = flat.is_cloned[flat.example]
    lines = [f"{key} " for key in keys]
    lines += [f"{keys[i]} \n" for i in np.flatnonzero(is_cloned).tolist()]
    lines += [f"read {shape} {shape.layout}\n" for shape in shapes.distinct]
    read = len(keys) + np.where(is_cloned, np.cumsum(is_cloned) - 1, np.sum(is_cloned) + shapes.of_key)
    encoded = [line.encode() for line in lines]
    return _Lines(
        flat.operand_at,
        flat.operand,
        np.stack([flat.of_key, read[flat.of_key]], axis=1).ravel(),
        np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        np.frombuffer(b"".join(encoded), np.uint8),
    )


@compiled
def _texts(lines: _Lines, kernels: FlatKernels) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Where the text of each kernel ends, and all texts one after the other, each but for its emitter."""
    count = kernels.tiled.size
    ends, out = np.empty(count, np.int64), np.empty(1 << 12, np.uint8)
    number = np.full(lines.operand_at.size - 1, _OUTSIDE)
    stack = np.empty(2 * (lines.operand.size + number.size) + 1, np.int64)
    order = np.empty(number.size, np.int64)
    end = 0
    for i in range(count):
        members = kernels.members[kernels.member_at[i] : kernels.member_at[i + 1]]
        results = kernels.results[kernels.result_at[i] : kernels.result_at[i + 1]]
        for x in members:
            number[x] = _MEMBER
        known = _number(lines, results, number, stack, order)
        wanted = end + _most_bytes(lines, order[:known], results.size)
        if wanted > out.size:
            larger = np.empty(2 * wanted, np.uint8)
            for k in range(end):
                larger[k] = out[k]
            out = larger
        end = _write(lines, order[:known], results, number, out, end)
        ends[i] = end
        for x in members:
            number[x] = _OUTSIDE
        for k in range(known):
            number[order[k] if order[k] >= 0 else ~order[k]] = _OUTSIDE
    return ends, out[:end]


@inner
def _number(lines: Any, results: Any, number: Any, stack: Any, order: Any) -> Any:
    """Number the nodes of a kernel in post-order from its results; how many there are. ``order`` has them, with all
    bits flipped where the kernel only reads them."""
    depth, known = 0, 0
    for i in range(results.size - 1, -1, -1):
        stack[depth] = results[i]
        depth += 1
    while depth:  # ends: each op is put there once to be numbered and once to be read
        depth -= 1
        x = stack[depth]
        if x < 0:
            if number[~x] == _MEMBER:
                number[~x], order[known] = known, ~x
                known += 1
        elif number[x] == _MEMBER:
            stack[depth] = ~x
            depth += 1
            for e in range(lines.operand_at[x + 1] - 1, lines.operand_at[x] - 1, -1):
                stack[depth] = lines.operand[e]
                depth += 1
        elif number[x] == _OUTSIDE:
            number[x], order[known] = known, ~x
            known += 1
    return known


@inner
def _most_bytes(lines: Any, order: Any, results: Any) -> Any:
    wanted = 1 + results * _MOST_DIGITS
    for x in order:
        line = lines.line[2 * x if x >= 0 else 2 * ~x + 1]
        wanted += lines.text_at[line + 1] - lines.text_at[line] + 1
        if x >= 0:
            wanted += (lines.operand_at[x + 1] - lines.operand_at[x]) * _MOST_DIGITS
    return wanted


@inner
def _write(lines: Any, order: Any, results: Any, number: Any, out: Any, end: Any) -> Any:
    """The text of a kernel from ``end`` on; where it ends."""
    out[end] = _LINE_END  # that of the emitter
    end += 1
    for x in order:
        line = lines.line[2 * x if x >= 0 else 2 * ~x + 1]
        for k in range(lines.text_at[line], lines.text_at[line + 1]):
            out[end] = lines.text[k]
            end += 1
        if x < 0:
            continue
        first, last = lines.operand_at[x], lines.operand_at[x + 1]
        for e in range(first, last):
            end = _write_number(number[lines.operand[e]], out, end)
            out[end] = _SPACE if e < last - 1 else _LINE_END
            end += 1
        if first == last:
            out[end] = _LINE_END
            end += 1
    for i in range(results.size):
        if i:
            out[end] = _SPACE
            end += 1
        end = _write_number(number[results[i]], out, end)
    return end


@inner
def _write_number(number: Any, out: Any, end: Any) -> Any:
    digits, rest = 1, number // 10
    while rest:  # ends: divided by ten
        digits += 1
        rest //= 10
    for place in range(end + digits - 1, end - 1, -1):
        out[place] = _ZERO + number % 10
        number //= 10
    return end + digits
