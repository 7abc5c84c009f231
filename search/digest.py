"""Hashes of units: of the nodes themselves, and of their structure, which is all that cost depends on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from disco_hlo.search import layout as at
from disco_hlo.search.board import fresh_stamp
from disco_hlo.search.neighbours import is_read_outside
from disco_hlo.search.rng import mix

from disco_hlo.compiled import compiled, inner

_OWNED: Final = 1
_COPY: Final = 2
_RESULT: Final = 3
_READ: Final = 1 << 40
_CLONED: Final = 1 << 41
_SHOWN: Final = 1 << 42
_SEED: Final = 0x5EED


@inner
def member_digest(s: Any, unit: Any) -> Any:
    """Hash of what a unit owns and duplicates."""
    total = np.uint64(1)
    x = unit
    while x != -1:
        total += _share(x, _OWNED)
        x = s.next[x]
    cell = s.copies[unit]
    while cell != -1:
        total += _share(s.cell_node[cell], _COPY)
        cell = s.next_of_unit[cell]
    return np.int64(total)


def signature_digest(owned: Iterable[int], copies: Iterable[int]) -> int:
    """The :func:`member_digest` of a unit that owns and duplicates these nodes."""
    return int(_digest_of(np.array([*owned], np.int64), np.array([*copies], np.int64)))


@compiled
def _digest_of(owned: Any, copies: Any) -> Any:
    total = np.uint64(1)
    for x in owned:
        total += _share(x, _OWNED)
    for x in copies:
        total += _share(x, _COPY)
    return np.int64(total)


@inner
def special_slot(g: Any, digest: Any) -> Any:
    """Where ``Step.special`` has a kernel with this ``member_digest``, -1 where it has none."""
    slot = digest & g.special_mask
    while g.special[3 * slot] != digest:
        if g.special[3 * slot] == 0:
            return -1
        slot = (slot + 1) & g.special_mask
    return slot


@compiled
def _share(x: Any, role: Any) -> Any:
    return mix(np.uint64(8 * x + role))


@compiled
def result_share(x: Any) -> Any:
    """What returning ``x`` adds to the :func:`result_digest` of a unit."""
    return _share(x, _RESULT)


@inner
def result_digest(g: Any, s: Any, w: Any, unit: Any) -> Any:
    """Hash of what a unit returns, and the stamp that marks it in row ``leaving``."""
    stamp = fresh_stamp(w)
    total = np.uint64(0)
    x = unit
    while x != -1:
        if is_read_outside(g, s, w, x):
            w.leaving[x] = stamp
            total += result_share(x)
        x = s.next[x]
    return np.int64(total), stamp


@inner
def structure_digest(g: Any, w: Any, count: Any, leaving: Any) -> Any:
    """Hash of the kernel whose ``count`` members (bitcasts included, ascending) stand in row ``members``.

    Equal for kernels in which the same ops feed each other, and leave, in the same way, and read the same
    through bitcasts outside: the layers of a model share their costs. ``leaving`` marks its results.
    """
    stamp = fresh_stamp(w)
    total = mix(np.uint64(_SEED))
    for i in range(count):
        w.mark[w.members[i]] = stamp
        w.value[w.members[i]] = i
    known = count
    for i in range(count):
        x = w.members[i]
        total = mix(total ^ np.uint64(2 * g.key[x] + (w.leaving[x] == leaving)))
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            operand = g.edge[e]
            if g.flags[operand] & at.CLONED:
                total = mix(total ^ np.uint64(_CLONED))
                continue
            while True:
                fresh = w.mark[operand] != stamp
                if fresh:
                    w.mark[operand] = stamp
                    w.value[operand] = known
                    known += 1
                total = mix(total ^ np.uint64(_READ + w.value[operand]))
                if not fresh or not g.flags[operand] & at.BITCAST:
                    break
                total = mix(total ^ np.uint64(_SHOWN + g.key[operand]))
                operand = g.edge[g.operands_at[operand]]
    return np.int64(total)
