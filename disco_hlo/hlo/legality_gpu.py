"""Which ops may share one kernel on XLA:GPU: the rules beyond those of every backend.

XLA's fusion passes only ever ask whether one more op may join; a strategy states the whole group at
once. So each of their rules is put here as a property of the finished group (the tests hold that every
loop and input fusion of real steps has it, however XLA came to it):

* *Emitter.* The heroes behind the results decide who writes the kernel (``GetEmitterFusionKind``). A
  result whose hero is a block reduction or tiled transpose must get that emitter, and a reduction that
  is no hero would be repeated for every element ("fusion into output of a reduce fusion would create a
  loop fusion").
* *Several results* share one loop: equal reductions or transposes, never both, the rest of a shape that
  the same loop covers (``ShapesCompatibleForMultiOutputFusion``, ``FusionHeroesAreCompatible``); a result
  that other members go on from is computed element by element, and nothing before it moves elements
  (``IsProducerMultiOutputFusible``).
* No long reduction of a long reduction (``PriorityFusion``).
* Shared memory and reductions within the budget (``FusionFitsInBudget``).
* A buffer that the kernel overwrites is read at the element in hand alone (``FusionCanShareBufferHint``,
  ``ShouldFuseInPlaceOp``); a scatter is the one result, and nothing else in its kernel reads what it
  updates (``CanEmitInputFusedScatter``).

All of it is flags and class numbers of ``gpu_facts`` and walks over operands and users inside the group,
each node at most a few times, so that the search can do the same in compiled code. What XLA's cost
model refuses is left to ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal

from disco_hlo.hlo import gpu_facts as fact
from disco_hlo.hlo.gpu_facts import GpuFacts, gpu_facts
from disco_hlo.hlo.graph import Graph, overwritten_names

Emitter = Literal["reduction", "transpose", "scatter", "concatenate", "loop"]

MAXIMUM_REDUCTIONS: Final = 8
"""Block reductions in one kernel; more spill registers (``kMaxUnnestedReductionOutputsPerFusion``)."""
_CONCATENATE_OPERANDS: Final = 4
_UNSUPPORTED = frozenset({"stochastic-convert"})


def emitter_kind(graph: Graph, members: Collection[int], results: Sequence[int]) -> Literal["loop", "input"]:
    """XLA's label of the kernel that computes ``members`` and returns ``results``.

    ``input`` (kInput) where a result comes from a block reduction, a tiled transpose or a scatter, else
    ``loop`` (``ChooseFusionKind``). The label names the emitter, it does not choose it.
    """
    facts, inside = gpu_facts(graph), set(members)
    for result in results:
        hero = find_hero(graph, facts, inside, result)
        if facts.flags[hero] & fact.SCATTER or _is_by_block(facts, result, hero):
            return "input"
    return "loop"


def emitter(graph: Graph, members: Collection[int], results: Sequence[int]) -> Emitter:
    """The code generator that XLA picks for a kernel (``GetEmitterFusionKind``)."""
    facts, inside = gpu_facts(graph), set(members)
    return _emitter(graph, facts, results, [find_hero(graph, facts, inside, result) for result in results])


def find_hero(graph: Graph, facts: GpuFacts, inside: Collection[int], result: int) -> int:
    """The op that decides how ``result`` is computed: itself, or the one reduction, tiled transpose or
    concatenate behind trivial ops (``FindNonTrivialHero``)."""
    start = result
    while facts.flags[start] & fact.CHAIN and graph.nodes[start].operands[0] in inside:
        start = graph.nodes[start].operands[0]
    for wanted in ("transpose", "concatenate"):
        hero = _hero_behind_web(graph, facts, inside, start, wanted)
        if hero is not None:
            return hero
    return start if graph.nodes[start].opcode == "reduce" else result


def _hero_behind_web(
    graph: Graph, facts: GpuFacts, inside: Collection[int], start: int, wanted: str
) -> int | None:
    hero: int | None = None
    seen = {start}
    pending = [start]
    while pending:
        node = pending.pop()
        if facts.transpose[node] >= 0 if wanted == "transpose" else facts.flags[node] & fact.CONCATENATE:
            if hero is not None:
                return None
            hero = node
            continue
        if not facts.flags[node] & fact.WEB:
            continue
        fresh = [x for x in graph.nodes[node].operands if x in inside and x not in seen]
        seen.update(fresh)
        pending += fresh
    if hero is None or any(not facts.flags[x] & fact.WEB for x in _after(graph, inside, hero)):
        return None
    return hero


def _after(graph: Graph, inside: Collection[int], node: int) -> Iterator[int]:
    """Members that need ``node``, itself excluded."""
    seen: set[int] = set()
    pending = [node]
    while pending:
        for user in graph.users[pending.pop()]:
            if user in inside and user not in seen:
                seen.add(user)
                pending.append(user)
                yield user


def _is_real_reduction(facts: GpuFacts, result: int, hero: int) -> bool:
    return bool(facts.reduction[hero] >= 0 and (hero == result or facts.flags[hero] & fact.RACE_FREE))


def _is_by_block(facts: GpuFacts, result: int, hero: int) -> bool:
    return bool(facts.transpose[hero] >= 0) or _is_real_reduction(facts, result, hero)


def _emitter(graph: Graph, facts: GpuFacts, results: Sequence[int], heroes: Sequence[int]) -> Emitter:
    pairs = list(zip(results, heroes, strict=True))
    reductions = [hero for result, hero in pairs if _is_real_reduction(facts, result, hero)]
    if reductions and all(
        facts.reduction[hero] == facts.reduction[reductions[0]]
        if _is_real_reduction(facts, result, hero)
        else facts.loop[result] == facts.operand_loop[reductions[0]]
        for result, hero in pairs
    ):
        return "reduction"
    transposes = [hero for hero in heroes if facts.transpose[hero] >= 0]
    if transposes and all(
        facts.transpose[hero] == facts.transpose[transposes[0]]
        if facts.transpose[hero] >= 0
        else facts.loop[result] == facts.operand_loop[transposes[0]]
        for result, hero in pairs
    ):
        return "transpose"
    if len(results) > 1:
        return "loop"
    if facts.flags[results[0]] & fact.SCATTER:
        return "scatter"
    hero = heroes[0]
    if facts.flags[hero] & fact.CONCATENATE and len(graph.nodes[hero].operands) <= _CONCATENATE_OPERANDS:
        return "concatenate"
    return "loop"


# Rules --------------------------------------------------------------------------------------------


def gpu_refusal(graph: Graph, inside: Collection[int], results: Sequence[int]) -> str | None:
    """Why XLA:GPU may not run these nodes as one kernel, or None.

    Args:
        graph: the step.
        inside: all nodes computed in the kernel; each may be fused, and something reads it.
        results: those whose value leaves it, at least one.
    """
    facts = gpu_facts(graph)
    heroes = [find_hero(graph, facts, inside, result) for result in results]
    return (
        _op_refusal(graph, facts, inside, results)
        or _emitter_refusal(graph, facts, inside, results, heroes)
        or _shared_loop_refusal(graph, facts, results, heroes)
        or _producing_result_refusal(graph, facts, inside, results, heroes)
        or _nested_reduction_refusal(graph, facts, inside)
        or _budget_refusal(facts, inside)
        or _inplace_refusal(graph, facts, inside)
    )


def _named(graph: Graph, node: int) -> str:
    return f"n{node} ({graph.nodes[node].opcode})"


def _op_refusal(graph: Graph, facts: GpuFacts, inside: Collection[int], results: Sequence[int]) -> str | None:
    for member in sorted(inside):
        node = graph.nodes[member]
        if node.opcode in _UNSUPPORTED:
            return f"{_named(graph, member)} has no code generator"
        if node.shape.dtype == "tuple" and list(results) != [member]:
            return f"{_named(graph, member)} has several results and may only be the single result of a group"
        if not facts.flags[member] & fact.SCATTER:
            continue
        if list(results) != [member] or node.shape.dtype == "tuple":
            return f"{_named(graph, member)} may only be the single result of a group"
        updated = node.operands[0]
        if updated in inside or any(updated in graph.nodes[x].operands for x in inside if x != member):
            return f"n{updated}, which {_named(graph, member)} updates in place, is used inside its kernel"
    return None


def _emitter_refusal(
    graph: Graph, facts: GpuFacts, inside: Collection[int], results: Sequence[int], heroes: Sequence[int]
) -> str | None:
    chosen = _emitter(graph, facts, results, heroes)
    for result, hero in zip(results, heroes, strict=True):
        if _is_real_reduction(facts, result, hero) and chosen != "reduction":
            return f"{_named(graph, hero)} would be reduced element by element beside the other results"
        if len(results) > 1 and facts.transpose[hero] >= 0 and chosen != "transpose":
            return f"{_named(graph, hero)} would be transposed element by element beside the other results"
    by_block = set(heroes) if chosen == "reduction" else set()
    nested = [
        x for x in sorted(inside)
        if facts.reduction[x] >= 0 and facts.flags[x] & fact.LONG_REDUCE and x not in by_block
    ]  # fmt: skip
    if nested:
        return f"{_named(graph, nested[0])} would be repeated for every element of its readers"
    return None


def _shared_loop_refusal(
    graph: Graph, facts: GpuFacts, results: Sequence[int], heroes: Sequence[int]
) -> str | None:
    """The loop of a result is that of its hero's operand where the hero is done by blocks or tiles."""
    if len(results) < 2:
        return None
    pairs = list(zip(results, heroes, strict=True))
    by_block = any(_is_by_block(facts, result, hero) for result, hero in pairs)
    loops = [
        facts.operand_loop[hero] if _is_by_block(facts, result, hero) else facts.loop[result]
        for result, hero in pairs
    ]
    for result, loop in zip(results, loops, strict=True):
        if loop != loops[0]:
            first, other = graph.nodes[results[0]], graph.nodes[result]
            return f"results n{first.id} {first.shape} and n{other.id} {other.shape} need different loops"
        if by_block and facts.flags[result] & fact.NESTED_TRANSPOSE:
            return f"{_named(graph, result)} reads in another order than the kernel's other results"
    return None


def _producing_result_refusal(
    graph: Graph, facts: GpuFacts, inside: Collection[int], results: Sequence[int], heroes: Sequence[int]
) -> str | None:
    if len(results) < 2:
        return None
    for result, hero in zip(results, heroes, strict=True):
        if all(user not in inside for user in graph.users[result]):
            continue
        if not facts.flags[result] & fact.LOOP_PRODUCER or _is_real_reduction(facts, result, hero):
            return (
                f"{_named(graph, result)} is a result that the kernel goes on from, and no loop computes it"
            )
        moving = [x for x in _needed(graph, inside, result) if facts.flags[x] & fact.MOVES]
        if moving:
            mover = _named(graph, min(moving))
            return f"{mover} moves elements before n{result}, a result that the kernel goes on from"
    return None


def _needed(graph: Graph, inside: Collection[int], node: int) -> set[int]:
    """Members that ``node`` needs, itself included."""
    found = {node}
    pending = [node]
    while pending:
        fresh = {x for x in graph.nodes[pending.pop()].operands if x in inside} - found
        found |= fresh
        pending += fresh
    return found


def _nested_reduction_refusal(graph: Graph, facts: GpuFacts, inside: Collection[int]) -> str | None:
    reduced: set[int] = set()
    for member in sorted(inside):
        after = any(operand in reduced for operand in graph.nodes[member].operands)
        if facts.flags[member] & fact.LONG_REDUCE:
            if after:
                return f"{_named(graph, member)} reduces what was already reduced in the same kernel"
            after = True
        if after:
            reduced.add(member)
    return None


def _budget_refusal(facts: GpuFacts, inside: Collection[int]) -> str | None:
    shared_bytes = sum(int(facts.shared_bytes[member]) for member in inside)
    if shared_bytes > fact.SHARED_BYTES:
        return f"{shared_bytes} bytes of shared memory, more than {fact.SHARED_BYTES}"
    reductions = sum(facts.reduction[member] >= 0 for member in inside)
    if reductions > MAXIMUM_REDUCTIONS:
        return f"{reductions} reductions, more than {MAXIMUM_REDUCTIONS}"
    return None


def _inplace_refusal(graph: Graph, facts: GpuFacts, inside: Collection[int]) -> str | None:
    for buffer, writer in overwritten_names(graph):
        if writer not in inside or facts.flags[writer] & fact.SCATTER:
            continue
        touched = {buffer}
        for member in sorted(inside):
            if touched.isdisjoint(graph.nodes[member].operands):
                continue
            touched.add(member)
            if not facts.flags[member] & fact.SAME_PLACE or facts.elements[member] != facts.elements[buffer]:
                return (
                    f"n{writer} overwrites the buffer of n{buffer}, which {_named(graph, member)} "
                    "reads at other elements in the same kernel"
                )
    return None
