"""Check a rewritten module before XLA compiles it, whoever wrote it.

A plan's optimized module may come from a file or from another rank. It is enacted only if it is the
same program as the module XLA would run here: same canonical graph, the plan's strategy and nothing
else, and no way to the outside that the source did not have. And only if nothing in it reads a buffer
that was written over (:mod:`~disco_hlo.plan.check_module`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from disco_hlo.errors import PlanError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from disco_hlo.hlo.graph import Graph, Kind
from disco_hlo.hlo.opcodes import SIDE_EFFECTS
from disco_hlo.plan.check_module import check_module
from disco_hlo.plan.legal import planned_regions
from disco_hlo.plan.read import held_otherwise, read
from disco_hlo.plan.strategy import Strategy
from disco_hlo.plan.variants import normal_form


def verify(source: CanonicalModule, optimized: bytes, strategy: Strategy) -> None:
    """Refuse ``optimized`` unless it is ``source`` executed as ``strategy`` says.

    Raises:
        ModuleError: the bytes are no HLO module.
        PlanError: it is another program, another strategy, reaches outside where the source does not, or reads
            what was overwritten.
    """
    written = canonicalize(optimized)
    if written.graph.fingerprint != source.graph.fingerprint:
        raise PlanError(
            f"the optimized module of {source.graph.module_name} computes something else: fingerprint "
            f"{written.graph.fingerprint[:16]}, expected {source.graph.fingerprint[:16]}"
        )
    added = _doors(written) - _doors(source)
    if added:
        raise PlanError(
            f"the optimized module adds {', '.join(sorted(added))}, which its source does not have"
        )
    if [region.name for region in written.regions] != [region.name for region in source.regions]:
        raise PlanError("the optimized module does not have the loops and branches of its source")
    _compare(source, written, strategy, "its entry")
    planned = planned_regions(source, strategy)
    for mine, theirs in zip(source.regions, written.regions, strict=True):
        for original, rewritten in zip(mine.sources, theirs.sources, strict=True):
            _compare(original, rewritten, planned.get(mine.name), mine.name)
    check_module(optimized, source.graph.backend)


def _compare(
    source: CanonicalModule, written: CanonicalModule, strategy: Strategy | None, where: str
) -> None:
    """Refuse a rewritten computation that does not do what a strategy says, or what the source does where there is
    none."""
    otherwise = held_otherwise(written) if strategy is not None else ()
    if otherwise:
        raise PlanError(
            f"the optimized module does not execute its plan: in {where} {', '.join(otherwise[:3])} would wait for "
            "itself, read what is overwritten before it runs, or be what no rule allows"
        )
    difference = describe_difference(
        source.graph, read(written), read(source) if strategy is None else strategy
    )
    if difference:
        raise PlanError(f"the optimized module does not execute its plan: in {where}, {difference}")


def describe_difference(graph: Graph, found: Strategy, wanted: Strategy) -> str | None:
    """How a module's strategy differs from the one wanted, in one clause; None where it does not.

    Their regions are not looked at. An empty order of ``wanted`` stands for any that is possible; :func:`read` leaves
    one open that is not.
    """
    wanted, found = replace(normal_form(graph, wanted), regions=()), replace(found, regions=())
    if not found.order and any(
        node.kind in (Kind.FUSIBLE, Kind.FIXED, Kind.ALL_REDUCE) for node in graph.nodes
    ):
        return "its order runs something before what it must wait for"
    if not wanted.order:
        found = replace(found, order=())
    if found == wanted:
        return None
    for what, have, want in (
        ("op groups", found.groups, wanted.groups),
        ("buckets", found.buckets, wanted.buckets),
    ):
        if have != want:
            differing = len(set(map(str, have)) ^ set(map(str, want)))
            return f"{len(have)} {what}, expected {len(want)} ({differing} differ)"
    first = next(
        i for i, (a, b) in enumerate(zip((*found.order, ""), (*wanted.order, ""), strict=False)) if a != b
    )
    return f"order differs from position {first}"


def _doors(module: CanonicalModule) -> Counter[str]:
    """Instructions that leave XLA: custom calls by target, infeeds, outfeeds, host transfers."""
    found: Counter[str] = Counter()
    for computation in module.module.computations:
        for instruction in computation.instructions:
            if instruction.opcode == "custom-call":
                found[f"custom call {instruction.custom_call_target!r}"] += 1
            elif instruction.opcode in SIDE_EFFECTS:
                found[instruction.opcode] += 1
    return found
