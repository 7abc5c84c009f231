"""Looking up what changed units cost, in compiled code; what is not known is listed to be asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from disco_hlo.search import layout as at
from disco_hlo.search.board import MAXIMUM_MEMBERS, enlist, fresh_stamp, put, retire
from disco_hlo.search.digest import member_digest, result_digest, structure_digest
from disco_hlo.search.legality import add_bitcasts
from disco_hlo.search.neighbours import count_waits, gather_members, is_read_outside
from disco_hlo.search.table import claim, find
from numpy.typing import NDArray

from disco_hlo.simulator.compiled import compiled


class Unknown(NamedTuple):
    """Units whose cost was never asked for, as flat lists."""

    head: NDArray[np.int64]
    key: NDArray[np.int64]
    """What the cost of each is kept under once it is known."""
    digest: NDArray[np.int64]
    """Hash of each."""
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
        np.zeros(nodes, np.int64),
        np.zeros(nodes, np.int64),
        np.zeros(nodes + 1, np.int64),
        np.zeros(32 * nodes + 8192, np.int64),
        np.zeros(nodes + 1, np.int64),
        np.zeros(32 * nodes + 8192, np.int64),
    )


@compiled
def price_changed(g: Any, s: Any, w: Any, prices: Any, special: Any, unknown: Any) -> Any:
    """Fill in digest, waits and times of the units noted as changed, as far as they are known.

    Args:
        prices: a table from price keys (:func:`_price_key`) to times.
        special: a table whose keys are the :func:`member_digest` of kernels that do not cost what
            their structure says, because they come with an emitter of their own.

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
        members = member_digest(s, unit)
        digest = members + result_digest(g, s, unit)
        if digest == s.digest[unit]:
            continue
        if not _fits(unknown, count):
            return count
        retire(s, w, unit)
        if s.count[unit] == 1 and s.copies[unit] == -1 and not g.flags[unit] & at.ALL_REDUCE:
            _set_times(s, w, unit, -1, g.alone[unit], -1, 0)
            enlist(s, w, unit, digest)
            continue
        key, size = _price_key(g, s, w, unit, members, digest, special)
        slot = find(prices, key)
        if slot >= 0:
            value = prices.value[slot]
            _set_times(s, w, unit, value[at.PACK], value[at.MAIN], value[at.UNPACK], value[at.ON_CHANNEL])
            enlist(s, w, unit, digest)
        else:
            _list(g, s, w, unknown, count, unit, key, size)
            unknown.digest[count] = digest
            count += 1
    w.number[at.CHANGES] = 0
    return count


@compiled
def set_prices(s: Any, w: Any, prices: Any, unknown: Any, count: Any, times: Any) -> None:
    """Keep the times (``[count, TIME_COLUMNS]``) that were asked for, and fill them in."""
    for i in range(count):
        unit = unknown.head[i]
        slot = claim(prices, unknown.key[i])
        for column in range(at.TIME_COLUMNS):
            prices.value[slot, column] = times[i, column]
            put(w, s.time_ns, at.TIME_COLUMNS * unit + column, times[i, column])
        enlist(s, w, unit, unknown.digest[i])


@compiled
def _set_times(s: Any, w: Any, unit: Any, pack: Any, main: Any, unpack: Any, on_channel: Any) -> None:
    first = at.TIME_COLUMNS * unit
    put(w, s.time_ns, first + at.PACK, pack)
    put(w, s.time_ns, first + at.MAIN, main)
    put(w, s.time_ns, first + at.UNPACK, unpack)
    put(w, s.time_ns, first + at.ON_CHANNEL, on_channel)


@compiled
def _price_key(g: Any, s: Any, w: Any, unit: Any, members: Any, digest: Any, special: Any) -> Any:
    """What a unit's cost goes by, and how many members (bitcasts included) stand in row ``members``."""
    _, count = gather_members(s, unit, w.members)
    if g.flags[unit] & at.ALL_REDUCE:
        return digest, count
    count, _ = add_bitcasts(g, w, count)
    if find(special, members) >= 0:
        return digest, count
    return structure_digest(g, s, w, unit, count), count


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
def _list(g: Any, s: Any, w: Any, unknown: Any, i: Any, unit: Any, key: Any, size: Any) -> None:
    start, returned = unknown.member_at[i], unknown.result_at[i]
    for k in range(size):
        x = w.members[k]
        unknown.member[start + k] = x
        if s.owner[x] == unit and is_read_outside(g, s, x):
            unknown.result[returned] = x
            returned += 1
    unknown.head[i] = unit
    unknown.key[i] = key
    unknown.member_at[i + 1] = start + size
    unknown.result_at[i + 1] = returned
