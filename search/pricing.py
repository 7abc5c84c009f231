"""Looking up what changed units cost, in compiled code; what is not known is listed to be asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.search import layout as at
from disco_hlo.search.board import MAXIMUM_MEMBERS, fresh_stamp, put
from disco_hlo.search.digest import unit_digest
from disco_hlo.search.jit import compiled
from disco_hlo.search.legality import add_bitcasts
from disco_hlo.search.neighbours import count_waits, gather_members, is_read_outside
from disco_hlo.search.table import claim, find


class Unknown(NamedTuple):
    """Units whose cost was never asked for, as flat lists."""

    head: NDArray[np.int64]
    """``[...]``"""
    member_at: NDArray[np.int64]
    """Unit i computes member[member_at[i] : member_at[i + 1]], ascending, bitcasts included."""
    member: NDArray[np.int64]
    result_at: NDArray[np.int64]
    """Unit i returns result[result_at[i] : result_at[i + 1]], ascending."""
    result: NDArray[np.int64]


def new_unknown(nodes: int) -> Unknown:
    """Room for ``nodes`` units that compute 32 nodes each on average."""
    return Unknown(
        np.zeros(nodes, np.int64),
        np.zeros(nodes + 1, np.int64),
        np.zeros(32 * nodes + 8192, np.int64),
        np.zeros(nodes + 1, np.int64),
        np.zeros(32 * nodes + 8192, np.int64),
    )


@compiled
def price_changed(g: Any, s: Any, w: Any, prices: Any, unknown: Any) -> Any:
    """Fill in digest and times of the units noted as changed, as far as they are known.

    Returns how many are listed in ``unknown``. Where that is full, changes remain noted: ask for
    those prices and call again.
    """
    stamp = fresh_stamp(w)
    count = 0
    for i in range(w.number[at.CHANGES]):
        x = w.changed[i]
        _recount_later(g, s, w, x)
        unit = s.owner[x]
        if w.judged[unit] == stamp:
            continue
        w.judged[unit] = stamp
        put(w, s.waits, unit, count_waits(g, s, unit))
        digest = unit_digest(g, s, unit)
        if digest == s.digest[unit]:
            continue
        if not _fits(unknown, count):
            return count
        put(w, s.digest, unit, digest)
        slot = find(prices, digest)
        if slot >= 0:
            for column in range(at.TIME_COLUMNS):
                put(w, s.time_ns, at.TIME_COLUMNS * unit + column, prices.value[slot, column])
        else:
            _list(g, s, w, unknown, count, unit)
            count += 1
    w.number[at.CHANGES] = 0
    return count


@compiled
def set_prices(s: Any, w: Any, prices: Any, unknown: Any, count: Any, times: Any) -> None:
    """Keep the times (``[count, TIME_COLUMNS]``) that were asked for, and fill them in."""
    for i in range(count):
        unit = unknown.head[i]
        slot = claim(prices, s.digest[unit])
        for column in range(at.TIME_COLUMNS):
            prices.value[slot, column] = times[i, column]
            put(w, s.time_ns, at.TIME_COLUMNS * unit + column, times[i, column])


@compiled
def _recount_later(g: Any, s: Any, w: Any, x: Any) -> None:
    """Those that run after ``x`` wait for every unit that computes it, whose number may have changed."""
    for e in range(g.later_at[x], g.later_at[x + 1]):
        unit, cell = s.owner[g.edge[e]], s.copiers[g.edge[e]]
        while True:
            put(w, s.waits, unit, count_waits(g, s, unit))
            if cell == -1:
                break
            unit = s.cell_unit[cell]
            cell = s.next_of_node[cell]


@compiled
def _fits(unknown: Any, count: Any) -> Any:
    left = unknown.member.size - unknown.member_at[count]
    return count < unknown.head.size and left > 4 * MAXIMUM_MEMBERS


@compiled
def _list(g: Any, s: Any, w: Any, unknown: Any, i: Any, unit: Any) -> None:
    owned, count = gather_members(s, unit, w.members)
    returned = unknown.result_at[i]
    for k in range(owned):
        if is_read_outside(g, s, w.members[k]):
            unknown.result[returned] = w.members[k]
            returned += 1
    if count > 1:
        count, _ = add_bitcasts(g, w, count)
    start = unknown.member_at[i]
    for k in range(count):
        unknown.member[start + k] = w.members[k]
    unknown.head[i] = unit
    unknown.member_at[i + 1] = start + count
    unknown.result_at[i + 1] = returned
