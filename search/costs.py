"""What units cost: looked up in compiled code; what is not known is listed, and the cost model is asked for it.

The cost model is whatever the search is handed. It is asked about a kernel the first time one with these members and
results turns up, and never again; about many at a time, since several moves wait for one answer.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import Int, Ints, compiled, inner
from disco_hlo.core import rows
from disco_hlo.core.reasons import fresh_stamp
from disco_hlo.hlo.cost_model import CostModel, Kernels, on_one_line, triton_emitter
from disco_hlo.hlo.graph import Graph, stretches
from disco_hlo.search import layout as at
from disco_hlo.search.hashing import Table, find, learn, mix, new_table, with_room
from disco_hlo.search.kernels import add_bitcasts
from disco_hlo.search.layout import GraphView, ScratchView, StateView, open_views
from disco_hlo.search.ordering import count_waits, gather_members
from disco_hlo.search.state import (
    MAXIMUM_MEMBERS,
    NOWHERE,
    VERDICTS,
    Scratch,
    State,
    cut_slot,
    enlist,
    kernel_digests,
    put,
    retire,
    special_slot,
)
from disco_hlo.search.step import Step
from disco_hlo.search.strategies import Given
from disco_hlo.simulator.costs import MAX_TOTAL, MachineModel, bucket_times, checked, holds_ns, unit_for

_SPARE: Final = 16
"""How much longer than its ops alone a state may take, recomputing some of them: what is counted must hold that."""
_READ: Final = 1 << 40
_CLONED: Final = 1 << 41
_SEED: Final = 0x5EED


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
    """``[3, pieces]``: ``hlo.cost_model.LinearPieces``, which collectives go by; none in a step without."""
    wire: NDArray[np.int64]
    """``[3]``: launch cost in ns, bytes a µs of copies (0: no limit), whether transfers ever run beside compute."""


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


def unit_of_step(graph: Graph, model: CostModel) -> int:
    """What the time of a step's states is to be counted in, in ns (``simulator.costs.UNITS_NS``)."""
    alone_ns = checked(model.op_ns(graph), len(graph), lambda i: f"node {i}")
    line, size_bytes = on_one_line(graph, model)
    sizes = size_bytes[list(graph.collectives)]
    transfers_ns = checked(line(sizes), sizes.size, lambda i: f"{sizes[i]} bytes")
    return unit_for(_SPARE * (alone_ns.sum(dtype=np.float64) + transfers_ns.sum(dtype=np.float64)))


class UnitCosts:
    """Durations of the units of one graph under one cost model."""

    def __init__(
        self, graph: Graph, step: Step, model: CostModel, machine: MachineModel, kept: Given
    ) -> None:
        self.graph = graph
        self.step = step
        self.model = model
        self.machine = machine
        self.kept = kept
        alone_ns = checked(model.op_ns(graph), len(graph), lambda i: f"node {i}")
        step.node[at.ALONE, : len(graph)] = alone_ns + machine.launch_ns
        step.node[at.HOLD, : len(graph)] = holds_ns(model, graph, alone_ns)
        for x, first_ns in (model.first_collective_ns(graph) if machine.asynchronous else {}).items():
            step.node[at.FLAGS, x] |= at.RUNS_COLLECTIVES
            step.node[at.HEAD, x] = min(first_ns, int(step.node[at.ALONE, x]))
        self.sizes = np.zeros(len(graph), np.int64)
        """Bytes of what each collective leaves, 0 for other nodes."""
        for x in graph.collectives:
            self.sizes[x] = graph.nodes[x].shape.size_bytes
            step.node[at.SLICE, x] = machine.copy_ns(int(self.sizes[x]))
        step.node[at.READ, : len(graph)] = model.read_classes(graph)
        self.collectives = on_one_line(graph, model)
        step.node[at.MOVED, : len(graph)] = self.collectives.size_bytes
        step.node[at.PACKED, : len(graph)] = self.sizes
        self.prices = new_table(at.TIME_COLUMNS)
        wire = np.array([machine.launch_ns, machine.memory_bytes_per_us, machine.asynchronous], np.int64)
        self.unknown = new_unknown(len(graph), self.collectives.line.array, wire)
        self._learn_given_buckets()
        self._emitters = _emitters(kept)

    def price_all(self, state: State, scratch: Scratch) -> None:
        """Fill in digest and times of every unit."""
        heads = np.flatnonzero(state.word[at.OWNER, : len(self.graph)] == np.arange(len(self.graph)))
        scratch.changed[: heads.size] = heads
        scratch.number[at.CHANGES] = heads.size
        self.price_changed(state, scratch)
        scratch.number[at.LOGGED] = 0

    def price_changed(self, state: State, scratch: Scratch) -> None:
        """Fill in digest and times of the units noted as changed."""
        while scratch.number[at.CHANGES]:
            self.ask(look_up(self.step, state, scratch, self.prices, self.unknown))

    def ask(self, count: int) -> None:
        """Ask the cost model for the first ``count`` entries of ``unknown``, and keep the answers.

        Few are listed at a time where most moves are refused, so nothing is done here for each of them.
        """
        if not count:
            return
        # Several moves of one batch may have listed the same kernel: the last of these stands for all.
        _, last = np.unique(self.unknown.key[:count][::-1], return_index=True)
        rows = count - 1 - np.sort(last)
        keys = self.unknown.key[rows]
        emitters = [self._emitters.get(key, "") for key in keys.tolist()] if self._emitters else ()
        kernels = Kernels.of_arrays(*_listed(self.unknown, rows), emitters)
        times = checked(self.model.kernels_ns(self.graph, kernels), rows.size, lambda _: "a kernel")
        values = np.zeros((rows.size, at.TIME_COLUMNS), np.int64)
        values[:, at.PACK], values[:, at.MAIN] = -1, np.minimum(times, MAX_TOTAL) + self.machine.launch_ns
        self.prices = with_room(self.prices, rows.size)
        learn(self.prices, keys, values)

    def _learn_given_buckets(self) -> None:
        """Buckets that a start writes in a form of its own are found by what they hold; others follow by rule."""
        given = [members for members, bucket in self.kept.forms.items() if bucket.form == "variadic"]
        self.prices = with_room(self.prices, len(given))
        keys = np.ascontiguousarray(kernel_digests([(members, (), ()) for members in given])[:, 0])
        times = np.array([self._variadic_ns(members) for members in given], np.int64)
        learn(self.prices, keys, times.reshape(-1, at.TIME_COLUMNS))

    def _variadic_ns(self, collectives: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Times of a bucket, as the prices have them."""
        line, sizes = self.collectives.line, self.collectives.of(collectives)
        times = bucket_times(line, self.machine, sizes, packed_bytes=None, name="a bucket")
        return -1, times.main_ns, 0, int(times.on_channel)


def _emitters(kept: Given) -> dict[int, str]:
    """Of the Triton kernels of the starts, by the keys of their prices."""
    tiled = {known: group for known, group in kept.groups.items() if group.kind == "triton"}
    keys = kernel_digests([(*known, kept.results[known]) for known in tiled]).sum(axis=1).tolist()
    return dict(zip(keys, [triton_emitter(group.config) for group in tiled.values()], strict=True))


def _listed(unknown: Unknown, rows: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Entries as ``hlo.cost_model.Kernels`` has them: members and results, each with its offsets."""
    begin, lengths = unknown.member_at[rows], unknown.member_at[rows + 1] - unknown.member_at[rows]
    places = stretches(begin, lengths)
    members, returned = unknown.member[places], unknown.returned[places]
    member_at = np.concatenate([[0], np.cumsum(lengths)])
    result_at = np.concatenate([[0], np.cumsum(returned)])[member_at]
    return member_at, members, result_at, members[returned]


@compiled
def look_up(step: Step, state: State, scratch: Scratch, prices: Table, unknown: Unknown) -> Any:
    """Fill in what the noted changes cost, as far as it is known; number of kernels listed as unknown."""
    g, s, w = open_views(step, state, scratch)
    return price_changed(g, s, w, prices, unknown, 0, True)


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
        are there (``hashing.learn``), call again, or undo the changes.
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
        single = s.count[unit] == 1 and s.copies[unit] == -1 and not g.flags[unit] & at.COLLECTIVE
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
        if g.flags[unit] & at.COLLECTIVE:
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
    moved_bytes = packed_bytes = one_by_one_ns = np.int64(0)
    x = bucket
    while x != -1:  # ends with the list
        moved_bytes += g.moved_bytes[x]
        packed_bytes += g.packed_bytes[x]
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
    pack_ns = launch_ns - (-2 * packed_bytes * 1000 // rate if rate else 0)
    _set_times(s, w, bucket, pack_ns, main_ns, _cut_ns(g, s, bucket), asynchronous)


@inner
def _collective_ns(unknown: Unknown, moved_bytes: Int) -> Any:
    """Time of a collective of this size on the line."""
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
    if g.flags[unit] & at.COLLECTIVE:
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
