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

from disco_hlo.compiled import Int, inner
from disco_hlo.core.reasons import fresh_stamp
from disco_hlo.search.arrays.board import REFUSALS, put
from disco_hlo.search.arrays.rng import mix
from disco_hlo.search.arrays.views import GraphView, ScratchView, StateView

NO_KEY: Final = 0


@inner
def no_key(_g: GraphView, _s: StateView, _w: ScratchView, _salt: int, _a: int, _b: int) -> Any:
    """The ``cache_key`` of moves of which no refusal is remembered."""
    return np.int64(NO_KEY), 0


@inner
def key_of_pair(_g: GraphView, s: StateView, w: ScratchView, salt: int, a: int, b: int) -> Any:
    """The ``cache_key`` of a move of two units, given by their heads."""
    if b < 0:
        return np.int64(NO_KEY), 0
    w.readers[0] = b
    return with_unit(s, with_unit(s, with_number(np.int64(0), salt), a), b), 1


@inner
def with_number(key: Int, number: int) -> Any:
    """A key that holds a number, too."""
    return np.int64(mix(np.uint64(key) + np.uint64(number) + np.uint64(1)))


@inner
def with_unit(s: StateView, key: Int, unit: int) -> Any:
    """A key that holds a unit as it is now, too."""
    return with_number(with_number(key, unit), s.moment[unit])


@inner
def place_of(key: int) -> Any:
    """Where a key stands in ``Scratch.refused``."""
    return (key ^ (key >> 17)) & (REFUSALS - 1)


@inner
def was_refused(w: ScratchView, key: int) -> Any:
    """Whether a move is known to be refused here."""
    return key != NO_KEY and w.refused[place_of(key)] == key


@inner
def renew(s: StateView, w: ScratchView, changes: int) -> None:
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
