"""Durations of units, each asked for once.

The cost model is whatever the search is handed; it is asked about a kernel the first time one with
these members and results turns up, and never again.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled
from disco_hlo.hlo.flat_graph import ascending, chosen_lists, flat_graph, flat_lists
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.kernel_times import KernelTimes, TellsReadsApart
from disco_hlo.plan.strategy import Group
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import Scratch, State
from disco_hlo.search.arrays.digest import result_share, signature_digests
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.arrays.table import Table, claim, find, new_table, with_room
from disco_hlo.search.boundary.entries import look_up
from disco_hlo.search.boundary.state import Given, written_group
from disco_hlo.search.times.pricing import COPY, INSIDE, RESULT, learn, listed, new_unknown
from disco_hlo.simulator.costs import (
    MAX_TOTAL,
    CostModel,
    LinearTransfers,
    MachineModel,
    bucket_times,
    checked,
    holds_ns,
    unit_for,
)

_SPARE: Final = 16
"""How much longer than its ops alone a state may take, recomputing some of them: what is counted must hold that."""


def unit_of_step(graph: Graph, model: CostModel) -> int:
    """What the time of a step's states is to be counted in, in ns (``simulator.costs.UNITS_NS``)."""
    alone_ns = checked(model.nodes_ns(graph), len(graph), lambda i: f"node {i}")
    sizes = np.array([graph.transfer_bytes(x) for x in graph.all_reduces], np.int64)
    transfers_ns = (
        checked(model.all_reduce_ns(sizes), sizes.size, lambda i: f"{sizes[i]} bytes")
        if sizes.size
        else sizes
    )
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
        alone_ns = checked(model.nodes_ns(graph), len(graph), lambda i: f"node {i}")
        step.node[at.ALONE, : len(graph)] = alone_ns + machine.launch_ns
        step.node[at.HOLD, : len(graph)] = holds_ns(model, graph, alone_ns)
        self.sizes = np.zeros(len(graph), np.int64)
        """Bytes of what each all-reduce leaves, 0 for other nodes."""
        for x in graph.all_reduces:
            self.sizes[x] = graph.nodes[x].shape.size_bytes
            step.node[at.SLICE, x] = machine.copy_ns(int(self.sizes[x]))
            step.node[at.MOVED, x] = graph.transfer_bytes(x)
        if isinstance(model, TellsReadsApart):
            step.node[at.READ, : len(graph)] = model.read_classes(graph)
        self.prices = new_table(at.TIME_COLUMNS)
        self.unknown = new_unknown(len(graph), _pieces(model), _wire(machine))
        self._learn_given_buckets()
        self._flags = step.node[at.FLAGS]
        self._kernels: KernelTimes | None = model if isinstance(model, KernelTimes) else None
        self._given = _given_kernels(graph, kept)

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

        Few are listed at a time where most moves are refused, so nothing is done here for each of them but for
        buckets and for kernels of a start.
        """
        if not count:
            return
        self.prices = with_room(self.prices, count)
        plain, buckets, given, number = _told_apart(self.unknown, count, self._flags, self._given.flat)
        if buckets.size:
            times = [self._bucket_ns(tuple(self._row(row)[0].tolist())) for row in buckets.tolist()]
            learn(self.prices, self.unknown, buckets, np.array(times, np.int64))
        if plain.size:
            self._learn_kernels(plain, self._plain_ns(plain))
        if given.size:
            self._learn_kernels(given, self._given_ns(number))

    def _learn_kernels(self, rows: NDArray[np.int64], times_ns: NDArray[np.int64]) -> None:
        _learn_kernels(self.prices, self.unknown.key, rows, times_ns, self.machine.launch_ns)

    def _plain_ns(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Times of some entries of ``unknown``, which are kernels."""
        if self._kernels is not None:
            return self._checked(self._kernels.kernels_ns(self.graph, *listed(self.unknown, rows)))
        written = []
        for row in rows.tolist():
            members, role = self._row(row)
            owned = members[(role == INSIDE) | (role == RESULT)].tolist()
            written.append(written_group(self.graph, owned, members[role == COPY].tolist()))
        times = self.model.groups_ns(self.graph, written)
        return checked(times, len(written), lambda i: f"a kernel of the nodes {written[i].nodes}")

    def _given_ns(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Times of some kernels of the starts, asked for as they came; Triton's by the group."""
        groups = [self._given.groups[number] for number in numbers.tolist()]
        by_group = np.array([self._kernels is None or group.kind == "triton" for group in groups], np.bool_)
        times = np.zeros(len(groups), np.int64)
        if by_group.any():
            times[by_group] = self.model.groups_ns(
                self.graph, [groups[i] for i in np.flatnonzero(by_group).tolist()]
            )
        if self._kernels is not None and not by_group.all():
            flat, chosen = self._given.flat, numbers[~by_group]
            times[~by_group] = self._kernels.kernels_ns(
                self.graph,
                *chosen_lists(flat.member_at, flat.member, chosen),
                *chosen_lists(flat.result_at, flat.result, chosen),
            )
        return self._checked(times)

    @staticmethod
    def _checked(times: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(checked(times, times.size, lambda _: "a kernel"), MAX_TOTAL)

    def _row(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        start, end = self.unknown.member_at[row : row + 2]
        return self.unknown.member[start:end], self.unknown.role[start:end]

    def _bucket_ns(self, all_reduces: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Times of a bucket, as the prices have them: what is cut out of it is not in them."""
        sizes = [self.graph.transfer_bytes(node) for node in all_reduces]
        kept = self.kept.forms.get(all_reduces)
        variadic = kept is not None and kept.form == "variadic"
        times = bucket_times(self.model, self.machine, sizes, variadic=variadic, name="a bucket")
        pack_ns = -1 if times.pack_ns is None else times.pack_ns
        return pack_ns, times.main_ns, 0, int(times.on_channel)

    def _learn_given_buckets(self) -> None:
        """Buckets that a start writes in a form of its own are found by what they hold; others follow by rule."""
        given = [members for members, bucket in self.kept.forms.items() if bucket.form == "variadic"]
        self.prices = with_room(self.prices, len(given))
        keys = signature_digests([(members, ()) for members in given])
        times = np.array([self._bucket_ns(members) for members in given], np.int64)
        learn(
            self.prices,
            self.unknown._replace(key=keys),
            np.arange(keys.size),
            times.reshape(-1, at.TIME_COLUMNS),
        )


class _FlatKernels(NamedTuple):
    """The kernels of the starts."""

    member_at: NDArray[np.int64]
    member: NDArray[np.int64]
    """As they came, bitcasts included, ascending in each."""
    result_at: NDArray[np.int64]
    result: NDArray[np.int64]
    shown: NDArray[np.int64]
    """``[kernels]``: hash of what each returns, looked at through bitcasts."""
    number: Table
    """From the hash of what each owns and recomputes to its number."""


class _GivenKernels(NamedTuple):
    groups: tuple[Group, ...]
    flat: _FlatKernels


def _given_kernels(graph: Graph, kept: Given) -> _GivenKernels:
    groups, count = tuple(kept.groups.values()), len(graph)
    member_at, member = flat_lists([group.nodes + group.duplicates for group in groups])
    by_kernel = np.repeat(np.arange(len(groups)) * count, np.diff(member_at)) + member
    result_at, result = flat_lists([kept.results[signature] for signature in kept.groups])
    kernel = np.repeat(np.arange(len(groups)), np.diff(result_at))
    shown_by, shown = np.divmod(ascending(kernel * count + flat_graph(graph).shown[result]), count)
    number = with_room(new_table(1), len(groups))
    _put_all(number, signature_digests(kept.groups))
    digests = _result_digests(len(groups), shown_by, shown)
    return _GivenKernels(
        groups, _FlatKernels(member_at, np.sort(by_kernel) % count, result_at, result, digests, number)
    )


@compiled
def _result_digests(count: Any, kernel: Any, result: Any) -> Any:
    found = np.zeros(count, np.int64)
    for i in range(kernel.size):
        found[kernel[i]] += result_share(result[i])
    return found


@compiled
def _told_apart(unknown: Any, count: Any, flags: Any, given: Any) -> Any:
    """Entries that are kernels like any other, buckets, and kernels of a start, with the numbers of these.

    Several moves of one batch may have listed the same kernel: the last of these stands for all.
    """
    key, digest, member_at, member, role = (
        unknown.key, unknown.digest, unknown.member_at, unknown.member, unknown.role
    )  # fmt: skip
    slots = 4
    while slots < 2 * count:  # ends: it doubles
        slots *= 2
    taken = np.full(slots, -1)
    rows, numbers, filled = np.empty((3, count), np.int64), np.empty(count, np.int64), np.zeros(3, np.int64)
    for row in range(count - 1, -1, -1):
        slot = (key[row] ^ (key[row] >> 29)) & (slots - 1)
        while taken[slot] >= 0 and key[taken[slot]] != key[row]:  # ends: half of the table is empty
            slot = (slot + 1) & (slots - 1)
        if taken[slot] >= 0:
            continue
        taken[slot] = row
        sort = 0
        if flags[member[member_at[row]]] & at.ALL_REDUCE:
            sort = 1
        else:
            known = find(given.number, digest[row])
            if known >= 0:
                shown = np.int64(0)
                for k in range(member_at[row], member_at[row + 1]):
                    if role[k] == RESULT:
                        shown += result_share(member[k])
                if shown == given.shown[given.number.value[known, 0]]:
                    sort = 2
                    numbers[filled[2]] = given.number.value[known, 0]
        rows[sort, filled[sort]] = row
        filled[sort] += 1
    return rows[0, : filled[0]], rows[1, : filled[1]], rows[2, : filled[2]], numbers[: filled[2]]


@compiled
def _learn_kernels(prices: Any, key: Any, rows: Any, times_ns: Any, launch_ns: Any) -> None:
    """Keep the times of these entries, which are kernels."""
    for i in range(rows.size):
        value = prices.value[claim(prices, key[rows[i]])]
        value[:] = 0
        value[at.PACK] = -1
        value[at.MAIN] = times_ns[i] + launch_ns


@compiled
def _put_all(table: Any, keys: Any) -> None:
    """Number the keys in the table."""
    for i in range(keys.size):
        table.value[claim(table, keys[i]), 0] = i


def _pieces(model: CostModel) -> NDArray[np.float64]:
    """What all-reduces take, as ``Unknown`` has it."""
    if not isinstance(model, LinearTransfers):
        return np.zeros((3, 0))
    pieces = model.pieces
    return np.array([pieces.from_bytes, pieces.ns_per_byte, pieces.fixed_ns], np.float64)


def _wire(machine: MachineModel) -> NDArray[np.int64]:
    return np.array(
        [machine.launch_ns, machine.memory_bytes_per_us, machine.one_shot_max_bytes, machine.asynchronous],
        np.int64,
    )
