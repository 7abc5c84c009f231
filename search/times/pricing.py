"""Looking up what changed units cost, in compiled code; what is not known is listed to be asked for."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Int, Ints, compiled, inner
from disco_hlo.core import rows
from disco_hlo.core.reasons import fresh_stamp
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import (
    MAXIMUM_MEMBERS,
    NOWHERE,
    VERDICTS,
    cut_slot,
    enlist,
    put,
    retire,
)
from disco_hlo.search.arrays.digest import special_slot
from disco_hlo.search.arrays.rng import mix
from disco_hlo.search.arrays.table import Table, find
from disco_hlo.search.arrays.views import GraphView, ScratchView, StateView
from disco_hlo.search.rules.legality import add_bitcasts
from disco_hlo.search.rules.neighbours import count_waits, gather_members


class Unknown(NamedTuple):
    """Kernels whose cost was never asked for, as flat lists."""

    key: NDArray[np.int64]
    """What the cost of each is to be kept under."""
    member_at: NDArray[np.int64]
    """Number i computes member[member_at[i] : member_at[i + 1]], ascending, bitcasts included."""
    member: NDArray[np.int64]
    returned: NDArray[np.bool_]
    """Whether each member leaves it."""
    pieces: NDArray[np.float64]
    """``[3, pieces]``: ``hlo.cost_model.LinearPieces``, which all-reduces go by; none in a step without."""
    wire: NDArray[np.int64]
    """``[4]``: launch cost in ns, bytes a µs of copies (0: no limit), most bytes of a transfer that blocks the
    compute stream (-1: none does), whether transfers ever run beside it."""


_READ: Final = 1 << 40
_CLONED: Final = 1 << 41
_SEED: Final = 0x5EED


def new_unknown(nodes: int, pieces: NDArray[np.float64], wire: NDArray[np.int64]) -> Unknown:
    """Room for ``nodes`` kernels that compute 32 nodes each on average."""
    room = 32 * nodes + 16 * MAXIMUM_MEMBERS
    return Unknown(
        np.zeros(nodes, np.int64),
        np.zeros(nodes + 1, np.int64),
        np.empty(room, np.int64),  # written before it is read, and most of it never
        np.empty(room, np.bool_),
        pieces,
        wire,
    )


@inner
def price_changed(
    g: GraphView, s: StateView, w: ScratchView, prices: Table, unknown: Unknown, listed: int, counting: bool
) -> Any:
    """Fill in digest, waits and times of the units noted as changed, as far as these are known.

    Args:
        prices: a table from price keys (:func:`_price_key`) to times.
        listed: how many entries ``unknown`` has already.
        counting: whether to keep up row ``waits``, which the ready queue alone goes by.

    Returns:
        How many it has now. Where anything is left open the changes remain noted: once the prices
        are there (``table.learn``), call again, or undo the changes.
    """
    stamp = fresh_stamp(w)
    count, left_open = listed, False
    for i in range(w.number[at.CHANGES]):
        x = w.changed[i]
        if counting:
            _recount_later(g, s, w, x)
        unit = s.owner[x]
        if w.judged[unit] == stamp:
            continue
        w.judged[unit] = stamp
        if counting:
            put(w, s.waits, unit, count_waits(g, s, w, unit))
        digest = s.computed[unit] + s.returned[unit]
        if digest == s.digest[unit]:
            continue
        retire(g, s, w, unit)
        single = s.count[unit] == 1 and s.copies[unit] == -1 and not g.flags[unit] & at.ALL_REDUCE
        if single and not _is_tiled(g, s.computed[unit]):
            _set_times(s, w, unit, -1, g.alone[unit], 0, 0)
            enlist(g, s, w, unit, digest)
            continue
        place, size = 2 * ((digest ^ (digest >> 17)) & (VERDICTS - 1)), np.int64(-1)
        if w.keyed[place] != digest:
            w.keyed[place + 1], size = _price_key(g, s, w, unit, digest)
            w.keyed[place] = digest
        key = w.keyed[place + 1]
        slot = find(prices, key)
        if slot >= 0:
            value = prices.value[slot]
            unpack = _cut_ns(g, s, unit) if value[at.PACK] >= 0 else 0
            _set_times(s, w, unit, value[at.PACK], value[at.MAIN], unpack, value[at.ON_CHANNEL])
            enlist(g, s, w, unit, digest)
            continue
        if g.flags[unit] & at.ALL_REDUCE:
            _set_bucket_times(g, s, w, unit, unknown)
            enlist(g, s, w, unit, digest)
            continue
        left_open = True
        if size < 0:
            _, size = _price_key(g, s, w, unit, digest)
        if has_place(unknown, count, size):
            _list(g, s, w, unknown, count, unit, key, size)
            count += 1
    if not left_open:
        w.number[at.CHANGES] = 0
    return count


@compiled
def listed(unknown: Unknown, rows: Ints) -> Any:
    """Entries as ``hlo.cost_model.Kernels`` has them: members and results, each with its offsets."""
    member_at, result_at = np.zeros(rows.size + 1, np.int64), np.zeros(rows.size + 1, np.int64)
    for i in range(rows.size):
        start, end = unknown.member_at[rows[i]], unknown.member_at[rows[i] + 1]
        member_at[i + 1] = member_at[i] + end - start
        result_at[i + 1] = result_at[i]
        for k in range(start, end):
            result_at[i + 1] += unknown.returned[k]
    members, results = np.empty(member_at[-1], np.int64), np.empty(result_at[-1], np.int64)
    count = returned = 0
    for row in rows:
        for k in range(unknown.member_at[row], unknown.member_at[row + 1]):
            members[count] = unknown.member[k]
            count += 1
            if unknown.returned[k]:
                results[returned] = unknown.member[k]
                returned += 1
    return member_at, members, result_at, results


@inner
def _is_tiled(g: GraphView, computed: int) -> Any:
    """Whether the kernel that computes this is one of Triton's."""
    if not g.special_mask:
        return False
    slot = special_slot(g, computed)
    return slot >= 0 and g.special[3 * slot + 2] != 0


@inner
def _set_times(
    s: StateView, w: ScratchView, unit: int, pack: int, main: Int, unpack: int, on_channel: int
) -> None:
    first = at.TIME_COLUMNS * unit
    put(w, s.time_ns, first + at.PACK, pack)
    put(w, s.time_ns, first + at.MAIN, main)
    put(w, s.time_ns, first + at.UNPACK, unpack)
    put(w, s.time_ns, first + at.ON_CHANNEL, on_channel)


@inner
def _set_bucket_times(g: GraphView, s: StateView, w: ScratchView, bucket: int, unknown: Unknown) -> None:
    """Times of a bucket in the form that :func:`~disco_hlo.plan.legal.bucket_of` gives it, by the rules of
    ``bucket_times`` (simulator.costs)."""
    moved_bytes = one_by_one_ns = np.int64(0)
    x = bucket
    while x != -1:  # ends with the list
        moved_bytes += g.moved_bytes[x]
        one_by_one_ns += _collective_ns(unknown, g.moved_bytes[x])
        x = s.next[x]
    launch_ns, rate, asynchronous = unknown.wire[0], unknown.wire[1], unknown.wire[2] != 0
    is_variadic = g.flags[bucket] & at.VARIADIC != 0
    main_ns = one_by_one_ns if is_variadic and not asynchronous else _collective_ns(unknown, moved_bytes)
    if not asynchronous:
        main_ns += launch_ns
    if s.count[bucket] == 1 or is_variadic:
        _set_times(s, w, bucket, -1, main_ns, 0, asynchronous)
        return
    pack_ns = launch_ns - (-2 * moved_bytes * 1000 // rate if rate else 0)
    _set_times(s, w, bucket, pack_ns, main_ns, _cut_ns(g, s, bucket), asynchronous)


@inner
def _collective_ns(unknown: Unknown, moved_bytes: Int) -> Any:
    """Time of an all-reduce of this size on the line."""
    pieces, piece = unknown.pieces, 0
    while piece + 1 < pieces.shape[1] and pieces[0, piece + 1] <= moved_bytes:  # ends: piece goes up
        piece += 1
    return np.int64(np.rint(pieces[1, piece] * np.float64(moved_bytes) + pieces[2, piece]))


@inner
def _cut_ns(g: GraphView, s: StateView, bucket: int) -> Any:
    """What it takes to cut out of a shared bucket what its readers do not find in it. No price has that, for it depends
    on who they are."""
    total = np.int64(0)
    x = bucket
    while x != -1:  # ends with the list
        if g.flags[x] & at.UNCUT and cut_slot(s, g.edge, g.uncut_at[x], g.uncut_at[x + 1], -1) != NOWHERE:
            total += g.slice_ns[x]
        x = s.next[x]
    return total


@inner
def _price_key(g: GraphView, s: StateView, w: ScratchView, unit: int, digest: int) -> Any:
    """What a unit's cost goes by, and how many members (bitcasts included) stand in row ``members``."""
    _, count = gather_members(s, unit, w.members)
    if g.flags[unit] & at.ALL_REDUCE:
        return s.computed[unit], count
    count, _ = add_bitcasts(g, w, count)
    if _is_tiled(g, s.computed[unit]):
        return digest, count
    return _structure_digest(g, s, w, unit, count), count


@inner
def _structure_digest(g: GraphView, s: StateView, w: ScratchView, unit: int, count: int) -> Any:
    """Hash of a unit whose ``count`` members (bitcasts included, ascending) stand in row ``members``.

    Equal for kernels in which the same ops feed each other, and leave, in the same way, that hold the same constants
    and read what is the same to the cost model (row ``READ``): the layers of a model share their costs.
    """
    stamp = fresh_stamp(w)
    total = mix(np.uint64(_SEED))
    for i in range(count):
        w.mark[w.members[i]] = stamp
        w.value[w.members[i]] = i
    known = count
    for i in range(count):
        x = w.members[i]
        total = mix(total ^ np.uint64(2 * g.key[x] + (s.owner[x] == unit and s.leaves[x] != 0)))
        for e in range(g.operands_at[x], g.operands_at[x + 1]):
            operand = g.edge[e]
            if g.flags[operand] & rows.CLONED:
                total = mix(total ^ np.uint64(_CLONED + g.key[operand]))
                continue
            fresh = w.mark[operand] != stamp
            if fresh:
                w.mark[operand] = stamp
                w.value[operand] = known
                known += 1
            total = mix(total ^ np.uint64(_READ + w.value[operand]))
            if fresh:
                total = mix(total ^ np.uint64(g.read[operand]))
    return np.int64(total)


@inner
def _recount_later(g: GraphView, s: StateView, w: ScratchView, x: int) -> None:
    """Those that run after ``x`` wait for every unit that computes it, whose number may have changed."""
    for e in range(g.later_at[x], g.later_at[x + 1]):
        unit, cell = s.owner[g.edge[e]], s.copiers[g.edge[e]]
        while True:  # ends with the list
            put(w, s.waits, unit, count_waits(g, s, w, unit))
            if cell == -1:
                break
            unit = s.cell_unit[cell]
            cell = s.next_of_node[cell]


@inner
def has_place(unknown: Unknown, count: int, size: Int) -> Any:
    """Whether one more kernel can be listed, which has so many members."""
    left = unknown.member.size - unknown.member_at[count]
    return count < unknown.key.size and left >= size


@inner
def _list(
    g: GraphView, s: StateView, w: ScratchView, unknown: Unknown, i: int, unit: int, key: int, size: Int
) -> None:
    start = unknown.member_at[i]
    for k in range(size):
        x = w.members[k]
        unknown.member[start + k] = x
        unknown.returned[start + k] = (
            not g.flags[x] & rows.BITCAST and s.owner[x] == unit and s.leaves[x] != 0
        )
    unknown.key[i] = key
    unknown.member_at[i + 1] = start + size
