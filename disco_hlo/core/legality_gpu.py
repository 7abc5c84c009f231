"""Which ops may share one kernel on XLA:GPU: the rules beyond those of every backend (``legality``).

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
* Shared memory within the budget (``FusionFitsInBudget``).
* A buffer that the kernel overwrites is read at the element in hand alone (``FusionCanShareBufferHint``,
  ``ShouldFuseInPlaceOp``; in ``legality``); a scatter is the one result, and nothing else in its kernel reads what it
  updates (``CanEmitInputFusedScatter``).

All of it is flags and class numbers of ``gpu_facts`` and walks over operands and users inside the group, each node at
most a few times. What XLA's cost model refuses is left to ours. The heroes of the results stand in row ``heroes``.
"""

from __future__ import annotations

from typing import Any, Final

from disco_hlo.core import gpu_facts as fact
from disco_hlo.core import reasons as why
from disco_hlo.core import rows as at
from disco_hlo.core.reasons import LEGAL, fresh_stamp, refuse

_LOOP: Final = 0
_REDUCTION: Final = 1
_TRANSPOSE: Final = 2

# Behind a web, instead of a hero.
_NOBODY: Final = -1
_SEVERAL: Final = -2


def gpu_results_refusal(g: Any, w: Any, results: Any) -> Any:
    """What can be told of several results alone: beside one that a block reduces, all others are reduced alike, are of
    the loop that goes over what is reduced, or may stand behind a reduction of their own."""
    first = -1
    for i in range(results):
        if first == -1 and g.reduction[w.results[i]] >= 0:
            first = w.results[i]
    if first == -1:
        return LEGAL
    for i in range(results):
        x = w.results[i]
        if g.reduction[x] >= 0:
            if g.reduction[x] != g.reduction[first]:
                return refuse(w, why.REDUCED_BESIDE, first, 0, 0)
        elif not g.gpu_flags[x] & fact.CHAIN and g.loop[x] != g.operand_loop[first]:
            return refuse(w, why.REDUCED_BESIDE, first, 0, 0)
    return LEGAL


def must_be_returned(g: Any, x: Any) -> bool:
    """Whether a kernel that computes a node must return it: a reduction by blocks behind which no chain of ops stands,
    so that it is no result's hero."""
    if g.reduction[x] < 0 or not g.gpu_flags[x] & fact.LONG_REDUCE:
        return False
    return not any(g.gpu_flags[g.edge[e]] & fact.CHAIN for e in range(g.users_at[x], g.users_at[x + 1]))


def gpu_refusal(g: Any, w: Any, count: Any, results: Any, stamp: Any) -> Any:
    """Why XLA:GPU may not run the members as one kernel, ``LEGAL`` where it may; arguments as for ``kernel_refusal``.

    A rule is gone through only where some member is of the kind that it is about.
    """
    flags = gpu_flags = shared_bytes = long_reductions = 0
    for i in range(count):
        x = w.members[i]
        flags |= g.flags[x]
        gpu_flags |= g.gpu_flags[x]
        shared_bytes += g.shared_bytes[x]
        long_reductions += g.gpu_flags[x] & fact.LONG_REDUCE != 0
    if shared_bytes > g.limits[at.SHARED_BYTES_LIMIT]:
        return refuse(w, why.SHARED_MEMORY, shared_bytes, g.limits[at.SHARED_BYTES_LIMIT], 0)
    find_heroes(g, w, count, results, stamp)
    reason = _emitter_refusal(g, w, count, results, long_reductions)
    if reason == LEGAL and results > 1:
        reason = _loop_refusal(g, w, results)
        if reason == LEGAL:
            reason = _producing_result_refusal(g, w, count, results, stamp, gpu_flags & fact.MOVES != 0)
    if reason == LEGAL and (flags & at.TUPLE or gpu_flags & fact.SCATTER):
        reason = _single_result_refusal(g, w, count, results, stamp)
    if reason == LEGAL and long_reductions > 1:
        reason = _nested_reduction_refusal(g, w, count)
    return reason


def is_input_fusion(g: Any, w: Any, results: Any) -> Any:
    """Whether a result comes from a block reduction, a tiled transpose or a scatter; the heroes are found."""
    for i in range(results):
        hero = w.heroes[i]
        if g.gpu_flags[hero] & fact.SCATTER or _is_by_block(g, w.results[i], hero):
            return True
    return False


def find_heroes(g: Any, w: Any, count: Any, results: Any, stamp: Any) -> None:
    """Row ``heroes``: for each result the op that decides how it is computed: itself, or the one reduction, tiled
    transpose or concatenate behind trivial ops (``FindNonTrivialHero``). For all of them in one pass over the members,
    since results that share what is behind them are many."""
    reduces = transposes = concatenates = False
    for i in range(count):
        x = w.members[i]
        reduces = reduces or g.flags[x] & at.REDUCE != 0
        transposes = transposes or g.transpose[x] >= 0
        concatenates = concatenates or g.gpu_flags[x] & fact.CONCATENATE != 0
    for i in range(results):
        w.heroes[i] = _NOBODY
    if transposes or concatenates:
        _find_web_ends(g, w, count, stamp)
    if transposes:
        _find_heroes_behind_web(g, w, count, results, True, stamp)
    if concatenates:
        _find_heroes_behind_web(g, w, count, results, False, stamp)
    for i in range(results):
        if w.heroes[i] == _NOBODY:
            start = _behind_chain(g, w, w.results[i], stamp) if reduces else w.results[i]
            w.heroes[i] = start if g.flags[start] & at.REDUCE else w.results[i]


def _behind_chain(g: Any, w: Any, result: Any, stamp: Any) -> Any:
    start = result
    # Ends: operands come first.
    while g.gpu_flags[start] & fact.CHAIN and w.inside[g.edge[g.operands_at[start]]] == stamp:
        start = g.edge[g.operands_at[start]]
    return start


def _find_web_ends(g: Any, w: Any, count: Any, stamp: Any) -> None:
    """Row ``value``: 1 where every member that needs this one is part of a web, else 0."""
    for i in range(count):
        w.value[w.members[i]] = 1
    for i in range(count - 1, -1, -1):
        x = w.members[i]
        if g.gpu_flags[x] & fact.WEB and w.value[x]:
            continue
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            if w.inside[g.edge[e]] == stamp:
                w.value[g.edge[e]] = 0


def _find_heroes_behind_web(g: Any, w: Any, count: Any, results: Any, transposes: Any, stamp: Any) -> None:
    """Fill in the heroes that are the one transpose, or the one concatenate, behind a web."""
    behind = w.queue_back
    for i in range(count):
        x = w.members[i]
        hero = _NOBODY
        if (g.transpose[x] >= 0) if transposes else (g.gpu_flags[x] & fact.CONCATENATE != 0):
            hero = x
        elif g.gpu_flags[x] & fact.WEB:
            for e in range(g.operands_at[x], g.operands_at[x + 1]):
                operand = g.edge[e]
                if w.inside[operand] == stamp and behind[operand] != _NOBODY and behind[operand] != hero:
                    hero = behind[operand] if hero == _NOBODY else _SEVERAL
        behind[x] = hero
    for i in range(results):
        hero = behind[_behind_chain(g, w, w.results[i], stamp)]
        if w.heroes[i] == _NOBODY and hero >= 0 and w.value[hero]:
            w.heroes[i] = hero


def _is_real_reduction(g: Any, result: Any, hero: Any) -> Any:
    return g.reduction[hero] >= 0 and (hero == result or g.gpu_flags[hero] & fact.RACE_FREE != 0)


def _is_by_block(g: Any, result: Any, hero: Any) -> Any:
    return g.transpose[hero] >= 0 or _is_real_reduction(g, result, hero)


def _emitter(g: Any, w: Any, results: Any) -> Any:
    """The code generator that XLA picks (``GetEmitterFusionKind``). Of these only those that the rules ask about;
    everything else is ``_LOOP``."""
    if _are_done_alike(g, w, results, False):
        return _REDUCTION
    return _TRANSPOSE if _are_done_alike(g, w, results, True) else _LOOP


def _are_done_alike(g: Any, w: Any, results: Any, transposes: Any) -> Any:
    """Whether results are reduced by blocks (else: transposed by tiles), all in one way, and the others are of the loop
    that goes over what is."""
    kind = g.transpose if transposes else g.reduction
    first = -1
    for i in range(results):
        hero = w.heroes[i]
        if first == -1 and (kind[hero] >= 0 if transposes else _is_real_reduction(g, w.results[i], hero)):
            first = hero
    if first == -1:
        return False
    for i in range(results):
        result, hero = w.results[i], w.heroes[i]
        if kind[hero] >= 0 if transposes else _is_real_reduction(g, result, hero):
            if kind[hero] != kind[first]:
                return False
        elif g.loop[result] != g.operand_loop[first]:
            return False
    return True


def _emitter_refusal(g: Any, w: Any, count: Any, results: Any, long_reductions: Any) -> Any:
    chosen = _emitter(g, w, results)
    for i in range(results):
        hero = w.heroes[i]
        if _is_real_reduction(g, w.results[i], hero) and chosen != _REDUCTION:
            return refuse(w, why.REDUCED_BESIDE, hero, 0, 0)
        if results > 1 and g.transpose[hero] >= 0 and chosen != _TRANSPOSE:
            return refuse(w, why.TRANSPOSED_BESIDE, hero, 0, 0)
    if long_reductions == 0:
        return LEGAL
    by_block = fresh_stamp(w)
    for i in range(results):
        w.mark[w.heroes[i]] = by_block if chosen == _REDUCTION else 0
    for i in range(count):
        x = w.members[i]
        if g.reduction[x] >= 0 and g.gpu_flags[x] & fact.LONG_REDUCE and w.mark[x] != by_block:
            return refuse(w, why.REDUCED_INSIDE, x, 0, 0)
    return LEGAL


def _loop_refusal(g: Any, w: Any, results: Any) -> Any:
    """The loop of a result is that of its hero's operand where the hero is done by blocks or tiles."""
    by_block = False
    for i in range(results):
        by_block = by_block or _is_by_block(g, w.results[i], w.heroes[i])
    first = -1
    for i in range(results):
        result, hero = w.results[i], w.heroes[i]
        loop = g.operand_loop[hero] if _is_by_block(g, result, hero) else g.loop[result]
        if i == 0:
            first = loop
        if loop != first:
            return refuse(w, why.OTHER_LOOPS, w.results[0], result, 0)
        if by_block and g.gpu_flags[result] & fact.NESTED_TRANSPOSE:
            return refuse(w, why.OTHER_ORDER, result, 0, 0)
    return LEGAL


def _producing_result_refusal(g: Any, w: Any, count: Any, results: Any, stamp: Any, moves: Any) -> Any:
    if moves:
        _find_moving(g, w, count, stamp)
    for i in range(results):
        result, hero = w.results[i], w.heroes[i]
        goes_on = False
        for e in range(g.users_at[result], g.users_at[result + 1]):
            goes_on = goes_on or w.inside[g.edge[e]] == stamp
        if not goes_on:
            continue
        if not g.gpu_flags[result] & fact.LOOP_PRODUCER or _is_real_reduction(g, result, hero):
            return refuse(w, why.NO_LOOP, result, 0, 0)
        if moves and w.value[result] >= 0:
            return refuse(w, why.MOVED_BEFORE, w.value[result], result, 0)
    return LEGAL


def _find_moving(g: Any, w: Any, count: Any, stamp: Any) -> None:
    """Row ``value``: of what a member needs inside, itself included, one that moves elements; -1: nothing does."""
    for i in range(count):
        x = w.members[i]
        mover, e = x if g.gpu_flags[x] & fact.MOVES else -1, g.operands_at[x]
        while mover < 0 and e < g.operands_at[x + 1]:  # ends: e goes up
            mover = w.value[g.edge[e]] if w.inside[g.edge[e]] == stamp else -1
            e += 1
        w.value[x] = mover


def _single_result_refusal(g: Any, w: Any, count: Any, results: Any, stamp: Any) -> Any:
    for i in range(count):
        x = w.members[i]
        is_alone = results == 1 and w.results[0] == x
        if g.flags[x] & at.TUPLE and not is_alone:
            return refuse(w, why.TUPLE_BESIDE, x, 0, 0)
        if not g.gpu_flags[x] & fact.SCATTER:
            continue
        if g.flags[x] & at.TUPLE or not is_alone:
            return refuse(w, why.SCATTER_BESIDE, x, 0, 0)
        updated = g.edge[g.operands_at[x]]
        inside = w.inside[updated] == stamp
        for e in range(g.users_at[updated], g.users_at[updated + 1]):
            inside = inside or (g.edge[e] != x and w.inside[g.edge[e]] == stamp)
        if inside:
            return refuse(w, why.SCATTERED_INSIDE, updated, x, 0)
    return LEGAL


def _nested_reduction_refusal(g: Any, w: Any, count: Any) -> Any:
    reduced = fresh_stamp(w)
    for i in range(count):
        x = w.members[i]
        after = False
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            after = after or w.mark[g.edge[e]] == reduced
        if g.gpu_flags[x] & fact.LONG_REDUCE:
            if after:
                return refuse(w, why.REDUCED_TWICE, x, 0, 0)
            after = True
        if after:
            w.mark[x] = reduced
    return LEGAL
