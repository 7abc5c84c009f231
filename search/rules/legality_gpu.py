"""The rules of ``hlo.legality_gpu`` for groups under change, in compiled code.

What they are for, and where they come from, is said there; the functions have the names they have
there, but for the budget of shared memory and reductions, which is counted in passing. A property test
holds the two equal, but for scatters, around which the search makes no kernels. A group's members stand in
row ``members``, ascending, and are marked in row ``inside`` with ``stamp``; its results in row ``results``,
their heroes in ``heroes``.
"""

from __future__ import annotations

from typing import Any, Final

from disco_hlo.compiled import inner
from disco_hlo.hlo import gpu_facts as fact
from disco_hlo.hlo.legality_gpu import MAXIMUM_REDUCTIONS
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import fresh_stamp

_LOOP: Final = 0
_REDUCTION: Final = 1
_TRANSPOSE: Final = 2

# Behind a web, instead of a hero.
_NOBODY: Final = -1
_SEVERAL: Final = -2


@inner
def is_gpu_kernel(g: Any, w: Any, count: Any, results: Any, stamp: Any) -> Any:
    """Whether XLA:GPU may run the members as one kernel, as far as the rules beyond all backends' go."""
    flags = gpu_flags = shared_bytes = 0
    reductions = long_reductions = buffers = 0
    transposes = False
    for i in range(count):
        x = w.members[i]
        flags |= g.flags[x]
        gpu_flags |= g.gpu_flags[x]
        shared_bytes += g.shared_bytes[x]
        reductions += g.reduction[x] >= 0
        long_reductions += g.gpu_flags[x] & fact.LONG_REDUCE != 0
        transposes = transposes or g.transpose[x] >= 0
        buffers += g.buffers_at[x + 1] - g.buffers_at[x]
    if shared_bytes > fact.SHARED_BYTES or reductions > MAXIMUM_REDUCTIONS:
        return False
    _find_heroes(g, w, count, results, stamp, flags, gpu_flags, transposes)
    # A rule is gone through only where some member is of the kind that it is about.
    return (
        _emitter_fits(g, w, count, results, long_reductions)
        and _loops_agree(g, w, results)
        and (not flags & at.TUPLE or _tuples_are_alone(g, w, count, results))
        and _results_may_produce(g, w, count, results, stamp, gpu_flags & fact.MOVES != 0)
        and (long_reductions < 2 or _reductions_are_not_nested(g, w, count))
        and (buffers == 0 or _writes_where_it_reads(g, w, count, stamp))
    )


@inner
def _find_heroes(
    g: Any, w: Any, count: Any, results: Any, stamp: Any, flags: Any, gpu_flags: Any, transposes: Any
) -> None:
    """Row ``heroes``: for each result the op that decides how it is computed. For all of them in one pass
    over the members, since results that share what is behind them are many.

    Args:
        flags: the bits that any member has; ``gpu_flags``: those of the GPU's facts.
        transposes: whether any member is a transpose done by tiles.
    """
    concatenates = gpu_flags & fact.CONCATENATE != 0
    for i in range(results):
        w.heroes[i] = -1
    if transposes or concatenates:
        _find_web_ends(g, w, count, stamp)
    if transposes:
        _find_heroes_behind_web(g, w, count, results, True, stamp)
    if concatenates:
        _find_heroes_behind_web(g, w, count, results, False, stamp)
    for i in range(results):
        if w.heroes[i] == -1:
            start = _behind_chain(g, w, w.results[i], stamp) if flags & at.REDUCE else w.results[i]
            w.heroes[i] = start if g.flags[start] & at.REDUCE else w.results[i]


@inner
def _behind_chain(g: Any, w: Any, result: Any, stamp: Any) -> Any:
    start = result
    # Ends: operands come first.
    while g.gpu_flags[start] & fact.CHAIN and w.inside[g.edge[g.operands_at[start]]] == stamp:
        start = g.edge[g.operands_at[start]]
    return start


@inner
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


@inner
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
        if w.heroes[i] == -1 and hero >= 0 and w.value[hero]:
            w.heroes[i] = hero


@inner
def _is_real_reduction(g: Any, result: Any, hero: Any) -> Any:
    return g.reduction[hero] >= 0 and (hero == result or g.gpu_flags[hero] & fact.RACE_FREE != 0)


@inner
def _is_by_block(g: Any, result: Any, hero: Any) -> Any:
    return g.transpose[hero] >= 0 or _is_real_reduction(g, result, hero)


@inner
def _emitter(g: Any, w: Any, results: Any) -> Any:
    """Of the emitters only those that the rules ask about; everything else is ``_LOOP``."""
    first = -1
    for i in range(results):
        if first == -1 and _is_real_reduction(g, w.results[i], w.heroes[i]):
            first = w.heroes[i]
    if first != -1:
        agree = True
        for i in range(results):
            result, hero = w.results[i], w.heroes[i]
            if _is_real_reduction(g, result, hero):
                agree = agree and g.reduction[hero] == g.reduction[first]
            else:
                agree = agree and g.loop[result] == g.operand_loop[first]
        if agree:
            return _REDUCTION
    first = -1
    for i in range(results):
        if first == -1 and g.transpose[w.heroes[i]] >= 0:
            first = w.heroes[i]
    if first == -1:
        return _LOOP
    for i in range(results):
        result, hero = w.results[i], w.heroes[i]
        if g.transpose[hero] >= 0:
            if g.transpose[hero] != g.transpose[first]:
                return _LOOP
        elif g.loop[result] != g.operand_loop[first]:
            return _LOOP
    return _TRANSPOSE


@inner
def _tuples_are_alone(g: Any, w: Any, count: Any, results: Any) -> Any:
    for i in range(count):
        x = w.members[i]
        if g.flags[x] & at.TUPLE and not (results == 1 and w.results[0] == x):
            return False
    return True


@inner
def _emitter_fits(g: Any, w: Any, count: Any, results: Any, long_reductions: Any) -> Any:
    chosen = _emitter(g, w, results)
    for i in range(results):
        hero = w.heroes[i]
        if _is_real_reduction(g, w.results[i], hero) and chosen != _REDUCTION:
            return False
        if results > 1 and g.transpose[hero] >= 0 and chosen != _TRANSPOSE:
            return False
    if long_reductions == 0:
        return True
    by_block = fresh_stamp(w)
    for i in range(results):
        w.mark[w.heroes[i]] = by_block if chosen == _REDUCTION else 0
    for i in range(count):
        x = w.members[i]
        if g.reduction[x] >= 0 and g.gpu_flags[x] & fact.LONG_REDUCE and w.mark[x] != by_block:
            return False
    return True


@inner
def _loops_agree(g: Any, w: Any, results: Any) -> Any:
    if results < 2:
        return True
    by_block = False
    for i in range(results):
        by_block = by_block or _is_by_block(g, w.results[i], w.heroes[i])
    first = -1
    for i in range(results):
        result, hero = w.results[i], w.heroes[i]
        loop = g.operand_loop[hero] if _is_by_block(g, result, hero) else g.loop[result]
        if i == 0:
            first = loop
        if loop != first or (by_block and g.gpu_flags[result] & fact.NESTED_TRANSPOSE):
            return False
    return True


@inner
def _results_may_produce(g: Any, w: Any, count: Any, results: Any, stamp: Any, moves: Any) -> Any:
    if results < 2:
        return True
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
            return False
        if moves and w.value[result]:
            return False
    return True


@inner
def _find_moving(g: Any, w: Any, count: Any, stamp: Any) -> None:
    """Row ``value``: 1 where what a member needs inside, itself included, moves elements, else 0."""
    for i in range(count):
        x = w.members[i]
        moves, e = g.gpu_flags[x] & fact.MOVES != 0, g.operands_at[x]
        while not moves and e < g.operands_at[x + 1]:  # ends: e goes up
            moves = w.inside[g.edge[e]] == stamp and w.value[g.edge[e]] != 0
            e += 1
        w.value[x] = moves


@inner
def _reductions_are_not_nested(g: Any, w: Any, count: Any) -> Any:
    reduced = fresh_stamp(w)
    for i in range(count):
        x = w.members[i]
        after = False
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            after = after or w.mark[g.edge[e]] == reduced
        if g.gpu_flags[x] & fact.LONG_REDUCE:
            if after:
                return False
            after = True
        if after:
            w.mark[x] = reduced
    return True


@inner
def _writes_where_it_reads(g: Any, w: Any, count: Any, stamp: Any) -> Any:
    for i in range(count):
        writer = w.members[i]
        for e in range(g.buffers_at[writer], g.buffers_at[writer + 1]):
            if not _reads_in_place(g, w, g.edge[e], stamp):
                return False
    return True


@inner
def _reads_in_place(g: Any, w: Any, buffer: Any, stamp: Any) -> Any:
    touched = fresh_stamp(w)
    w.mark[buffer] = touched
    w.queue[0] = buffer
    pending = 1
    while pending > 0:  # ends: a node is put there once, being marked before
        pending -= 1
        x = w.queue[pending]
        for e in range(g.users_at[x], g.users_at[x + 1]):
            user = g.edge[e]
            if w.inside[user] != stamp or w.mark[user] == touched:
                continue
            if not g.gpu_flags[user] & fact.SAME_PLACE or g.elements[user] != g.elements[buffer]:
                return False
            w.mark[user] = touched
            w.queue[pending] = user
            pending += 1
    return True
