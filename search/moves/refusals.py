"""Proposals that were refused, remembered, so that they are not built again to be refused again.

Where a plan leaves little to be fused, most of what is drawn makes a kernel that may not stand, and is drawn again
soon. Every unit has a number in the state, a new one whenever it changes for good (:func:`renew`); undoing the change
brings back the number from before. A refusal is remembered under the proposal and the numbers of its units, and holds
wherever these meet again; so are moves for which there was nothing to be recomputed, or no room, and units that must
stay for somebody. Not remembered is what concerned further units, and what failed because units would wait
for each other: that depends on all the others. Where somebody else's change would make legal what was refused (a third
unit that no longer reads a value), the refusal holds until its units change: a move is missed, none is made that is
illegal.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from disco_hlo.compiled import inner
from disco_hlo.core.marks import fresh_stamp
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import REFUSALS, put
from disco_hlo.search.arrays.rng import mix
from disco_hlo.search.moves.absorb import absorbers
from disco_hlo.search.moves.proposals import ABSORB, DUPLICATE, FUSE, SIBLING, UNFUSE

NO_KEY: Final = 0


@inner
def refusal_key(g: Any, s: Any, w: Any, kind: Any, a: Any, b: Any) -> Any:
    """What the refusal of a move is remembered under, ``NO_KEY`` for moves of which none is."""
    if kind == UNFUSE:
        return _with_unit(s, _with_unit(s, _with(np.int64(b), kind), a), s.owner[b])
    if b >= 0 and (kind == FUSE or kind == SIBLING or kind == DUPLICATE):
        key = _with(np.int64(0), DUPLICATE if kind == DUPLICATE else FUSE)
        return _with_unit(s, _with_unit(s, key, a), b)
    if kind != ABSORB or s.owner[a] != a:
        return np.int64(NO_KEY)
    key = _with_unit(s, _with(np.int64(0), kind), a)
    if was_refused(w, key):
        return key  # it must stay for somebody
    for i in range(absorbers(g, s, w, a)):
        key = _with_unit(s, key, w.readers[i])
    return key


@inner
def _with(key: Any, number: Any) -> Any:
    return np.int64(mix(np.uint64(key) + np.uint64(number) + np.uint64(1)))


@inner
def _with_unit(s: Any, key: Any, unit: Any) -> Any:
    return _with(_with(key, unit), s.moment[unit])


@inner
def _place(key: Any) -> Any:
    return (key ^ (key >> 17)) & (REFUSALS - 1)


@inner
def was_refused(w: Any, key: Any) -> Any:
    """Whether a move is known to be refused here."""
    return key != NO_KEY and w.refused[_place(key)] == key


@inner
def remember_refusal(g: Any, s: Any, w: Any, key: Any, kind: Any, a: Any, b: Any) -> None:
    """Remember a refused move that is undone, where a kernel that may not stand was the reason (``at.FELL``)."""
    fell = w.number[at.FELL]
    if key == NO_KEY or fell == 0:
        return
    stamp = fresh_stamp(w)
    w.reached[a] = stamp
    if kind == ABSORB:
        for i in range(absorbers(g, s, w, a)):
            w.reached[w.readers[i]] = stamp
    else:
        w.reached[s.owner[b]] = stamp
    for i in range(fell):
        if w.reached[s.owner[w.changed[i]]] != stamp:
            return
    w.refused[_place(key)] = key


@inner
def renew(s: Any, w: Any, changes: Any) -> None:
    """Give new numbers to the units that a kept move has changed.

    Args:
        changes: how many entries of ``changed`` are the move's.
    """
    moment = fresh_stamp(w)
    for i in range(changes):
        unit = s.owner[w.changed[i]]
        if w.judged[unit] == moment:
            continue
        w.judged[unit] = moment
        put(w, s.moment, unit, moment)
