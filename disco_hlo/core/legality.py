"""Which nodes may share one kernel: what Python asks, the rules of every backend, and those of XLA:CPU.

XLA trusts the module the hook returns: some illegal fusions are compile errors, others crash the
process, and an in-place update fused carelessly gives wrong numbers. So legality is decided here,
before XLA sees anything. The rules mirror XLA's own (cpu_instruction_fusion.cc,
cpu_multi_output_fusion.cc; for GPU see ``legality_gpu``); what XLA itself grouped is legal by
construction and is not judged by them (see ``plan.apply``).

The rules (``*_refusal``), ``legality_gpu`` and ``reasons.refuse`` are plain Python, and are what numba compiles for the
search: ``g`` are the rows of a graph (``rows``), ``w`` is working space. In row ``members`` of it stand the
nodes that a kernel computes, ascending, bitcasts included, each marked in row ``inside`` with ``stamp``; in row
``results`` those whose values leave it. A rule returns the number of its reason and notes what it is about
(``reasons``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from disco_hlo.backends import BACKENDS
from disco_hlo.core import gpu_facts as fact
from disco_hlo.core import reasons as why
from disco_hlo.core import rows as at
from disco_hlo.core.legality_gpu import find_heroes, gpu_refusal, gpu_results_refusal, is_input_fusion
from disco_hlo.core.reasons import LEGAL, fresh_stamp, refuse, sentence
from disco_hlo.core.rows import plain_rows
from disco_hlo.hlo.graph import Graph

REPETITION: Final = 100
"""How many times as much as its ops by themselves one kernel may read. Of XLA's own kernels (Triton's aside, which keep
tiles) none reads more than 10 times as much, in the steps of ``tests/data``."""
FEW_READS: Final = 1 << 20
"""A kernel may always read so many elements, its own included: that takes a millisecond."""
MOST_WORK: Final = 1 << 44
"""The work of ops by themselves is counted no further: no device does so much, and a number holds many times it."""
MOST_READS: Final = 1 << 60
"""What a kernel reads is counted no further: twice as much still fits a number."""
_INSIDE = 1
"""What marks the members."""


def group_refusal(
    graph: Graph, members: Collection[int], results: Sequence[int], kind: str = "loop"
) -> str | None:
    """Why these nodes may not run as one kernel, or None where they may.

    Args:
        graph: the step.
        members: all nodes computed inside, owned and duplicated.
        results: the owned members whose value leaves the kernel, at least one.
        kind: the emitter, as in ``plan.plan.Group``. XLA chooses between its own by what is inside.
    """
    g, w = plain_rows(graph), kernel(members, results)
    tiled = kind == "triton"
    reason = results_refusal(g, w, len(results), tiled)
    if reason == LEGAL:
        reason = kernel_refusal(g, w, len(w.members), len(results), _INSIDE, tiled)
    return None if reason == LEGAL else sentence(graph, reason, w.about)


def emitter_kind(graph: Graph, members: Collection[int], results: Sequence[int]) -> Literal["loop", "input"]:
    """XLA's label of the kernel that computes ``members`` and returns ``results``.

    ``input`` (kInput) on GPU where a result comes from a block reduction, a tiled transpose or a scatter, else
    ``loop`` (``ChooseFusionKind``). The label names the emitter, it does not choose it.
    """
    if not BACKENDS[graph.backend].has_heroes:
        return "loop"
    g, w = plain_rows(graph), kernel(members, results)
    find_heroes(g, w, len(w.members), len(results), _INSIDE)
    return "input" if is_input_fusion(g, w, len(results)) else "loop"


def _row() -> defaultdict[int, int]:
    return defaultdict(int)


@dataclass(slots=True)
class Kernel:
    """One kernel as the rules see it: working space of its own, as large as the kernel."""

    members: Sequence[int]
    """Ascending."""
    results: Sequence[int]
    inside: dict[int, int]
    number: list[int] = field(default_factory=lambda: [_INSIDE])
    about: list[int] = field(default_factory=lambda: [0, 0, 0])
    mark: dict[int, int] = field(default_factory=_row)
    value: dict[int, int] = field(default_factory=_row)
    evaluated: dict[int, int] = field(default_factory=_row)
    heroes: dict[int, int] = field(default_factory=_row)
    queue: dict[int, int] = field(default_factory=_row)
    queue_back: dict[int, int] = field(default_factory=_row)


def kernel(members: Collection[int], results: Sequence[int]) -> Kernel:
    """The kernel that computes ``members`` and returns ``results``."""
    return Kernel(sorted(members), results, defaultdict(int, dict.fromkeys(members, _INSIDE)))


# The rules --------------------------------------------------------------------------------------


def results_refusal(g: Any, w: Any, results: Any, tiled: Any) -> Any:
    """Why no kernel returns so many nodes in row ``results``, whatever it computes; ``LEGAL`` where one may.

    ``tiled`` as for :func:`kernel_refusal`.
    """
    if results == 0:
        return refuse(w, why.NO_RESULT, 0, 0, 0)
    if results == 1 or tiled:
        return LEGAL
    if g.limits[at.HAS_HEROES]:
        return gpu_results_refusal(g, w, results)
    first = w.results[0]
    for i in range(results):
        x = w.results[i]
        if g.shape[x] != g.shape[first]:
            return refuse(w, why.RESULT_SHAPES, first, x, 0)
        if g.flags[x] & at.SINGLE_RESULT:
            return refuse(w, why.SEVERAL_RESULTS, 0, 0, 0)
    return LEGAL


def kernel_refusal(g: Any, w: Any, count: Any, results: Any, stamp: Any, tiled: Any) -> Any:
    """Why nodes may not run as one kernel that returns what it may (:func:`results_refusal`); ``LEGAL`` where they may.

    What most kernels of a search fail by comes first.

    Args:
        g: the rows of the graph.
        w: working space, with the kernel in it.
        count: how many nodes the kernel computes.
        results: how many of them leave it.
        stamp: what marks them in row ``inside``.
        tiled: whether Triton emits it. What Triton can emit is judged by the tiles that XLA found for it, and none are
            made here; it computes nothing again.
    """
    reason = _member_refusal(g, w, count, results, stamp, tiled)
    if reason == LEGAL and g.limits[at.HAS_HEROES] and not tiled:
        reason = gpu_refusal(g, w, count, results, stamp)
    if reason == LEGAL:
        reason = _size_refusal(g, w, count, results, stamp)
    if reason == LEGAL:
        reason = _emission_refusal(g, w, count, results, stamp)
    if reason == LEGAL and not tiled:
        reason = _evaluation_refusal(g, w, count, results, stamp)
        if reason == LEGAL:
            reason = _inplace_refusal(g, w, count, stamp)
    return reason


def _mark_results(w: Any, count: Any, results: Any) -> None:
    """Row ``value`` of each member: 1 where it stands in row ``results``, else 0."""
    for i in range(count):
        w.value[w.members[i]] = 0
    for i in range(results):
        w.value[w.results[i]] = 1


def _member_refusal(g: Any, w: Any, count: Any, results: Any, stamp: Any, tiled: Any) -> Any:
    _mark_results(w, count, results)
    for i in range(count):
        x = w.members[i]
        used, e = w.value[x] != 0, g.users_at[x]
        while not used and e < g.users_at[x + 1]:  # ends: e goes up
            used = w.inside[g.edge[e]] == stamp
            e += 1
        if not used:
            return refuse(w, why.DEAD_MEMBER, x, 0, 0)
        flags = g.flags[x]
        if not flags & at.JOINS:
            return refuse(w, why.NOT_FUSIBLE, x, 0, 0)
        if flags & at.OWN_BUFFER:
            return refuse(w, why.OWN_BUFFER_COPY, x, 0, 0)
        if flags & at.NOT_GENERATED and not tiled:
            return refuse(w, why.NO_GENERATOR, x, 0, 0)
    return LEGAL


def _size_refusal(g: Any, w: Any, count: Any, results: Any, stamp: Any) -> Any:
    """Scalar constants are cloned, and are no operands."""
    seen = fresh_stamp(w)
    operands = reductions = 0
    for i in range(count):
        x = w.members[i]
        if g.flags[x] & at.REDUCE:
            reductions += 1
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            operand = g.edge[e]
            if w.inside[operand] == stamp or w.mark[operand] == seen or g.flags[operand] & at.CLONED:
                continue
            w.mark[operand] = seen
            operands += 1
    if operands + results > g.limits[at.OPERANDS_LIMIT]:
        return refuse(w, why.TOO_MANY_OPERANDS, operands + results, g.limits[at.OPERANDS_LIMIT], 0)
    if reductions > g.limits[at.REDUCTIONS_LIMIT]:
        return refuse(w, why.TOO_MANY_REDUCTIONS, reductions, g.limits[at.REDUCTIONS_LIMIT], 0)
    return LEGAL


def _emission_refusal(g: Any, w: Any, count: Any, results: Any, stamp: Any) -> Any:
    """How many times the emitter writes each member, in row ``value``: once per distinct way its elements are indexed.

    Elementwise readers share their own index; every other reader adds one of its own for each time it is written
    itself, and each time it lists the member.
    """
    _mark_results(w, count, results)
    for i in range(count - 1, -1, -1):
        x = w.members[i]
        written = max(1, w.value[x])
        if written > g.limits[at.EMISSIONS_LIMIT]:
            return refuse(w, why.TOO_MANY_EMISSIONS, x, written, g.limits[at.EMISSIONS_LIMIT])
        elementwise = g.flags[x] & at.ELEMENTWISE
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            operand = g.edge[e]
            if w.inside[operand] != stamp:
                continue
            if elementwise:
                w.value[operand] = max(w.value[operand], written)
            else:
                w.value[operand] += written
    return LEGAL


def _evaluation_refusal(g: Any, w: Any, count: Any, results: Any, stamp: Any) -> Any:
    """How many elements of each member are evaluated, repeats included, in row ``evaluated``; and read to do so.

    Nothing is kept inside a kernel. A reduction of another one's window evaluates that anew for each of its own
    elements, and so does whatever reads a broadcast of it: such factors multiply.
    """
    alone = 0
    for i in range(count):
        x = w.members[i]
        alone = min(MOST_WORK, alone + g.element_count[x] * max(1, g.reads_per_element[x]))
        w.evaluated[x] = 0
    for i in range(results):
        w.evaluated[w.results[i]] = g.element_count[w.results[i]]
    together = 0
    for i in range(count - 1, -1, -1):
        x = w.members[i]
        own, reads, elementwise = w.evaluated[x], g.reads_per_element[x], g.flags[x] & at.ELEMENTWISE
        work = own * max(1, reads) if own <= MOST_READS // max(1, reads) else MOST_READS
        together = min(MOST_READS, together + work)
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            operand = g.edge[e]
            if w.inside[operand] != stamp:
                continue
            share = max(1, g.element_count[x] // max(1, g.element_count[operand]))
            added = work if reads else own // share
            before = w.evaluated[operand]
            w.evaluated[operand] = max(before, added) if elementwise else min(MOST_READS, before + added)
    if together > max(FEW_READS, REPETITION * alone):
        return refuse(w, why.TOO_MANY_EVALUATIONS, together, alone, 0)
    return LEGAL


def _inplace_refusal(g: Any, w: Any, count: Any, stamp: Any) -> Any:
    """A kernel that overwrites a buffer may read it only at the element it is about to write."""
    for i in range(count):
        writer = w.members[i]
        if g.gpu_flags[writer] & fact.SCATTER:
            continue
        for e in range(g.buffers_at[writer], g.buffers_at[writer + 1]):
            elsewhere = _reads_elsewhere(g, w, g.edge[e], writer, stamp)
            if elsewhere >= 0:
                return refuse(w, why.SHARED_BUFFER, writer, g.edge[e], elsewhere)
    return LEGAL


def _reads_elsewhere(g: Any, w: Any, buffer: Any, writer: Any, stamp: Any) -> Any:
    """A member that depends on other elements of ``buffer`` than the one that ``writer`` writes; -1: there is none."""
    touched = fresh_stamp(w)
    w.mark[buffer] = touched
    w.queue[0], pending = buffer, 1
    while pending > 0:  # ends: a node is put there once, being marked before
        pending -= 1
        x = w.queue[pending]
        for e in range(g.users_at[x], g.users_at[x + 1]):
            user = g.edge[e]
            if w.inside[user] != stamp or w.mark[user] == touched:
                continue
            if g.limits[at.HAS_HEROES]:
                in_place = (
                    g.gpu_flags[user] & fact.SAME_PLACE != 0
                    and g.element_count[user] == g.element_count[buffer]
                )
            elif x == buffer and g.flags[user] & at.BITCAST:
                continue  # another name of the buffer, which is looked at for itself
            else:
                in_place = g.flags[user] & at.ELEMENTWISE != 0 and g.geometry[user] == g.geometry[writer]
            if not in_place:
                return user
            w.mark[user] = touched
            w.queue[pending] = user
            pending += 1
    return -1
