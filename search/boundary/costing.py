"""Durations of units, each asked for once.

The cost model is whatever the search is handed; it is asked about a kernel the first time one with
these members and results turns up, and never again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import Scratch, State
from disco_hlo.search.arrays.digest import signature_digests
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.arrays.table import claim, find, new_table, with_room
from disco_hlo.search.boundary.entries import look_up
from disco_hlo.search.boundary.state import Given, Signature, source_of, written_group
from disco_hlo.search.times.pricing import COPY, INSIDE, RESULT, learn, listed, new_unknown
from numpy.typing import NDArray

from disco_hlo.compiled import compiled
from disco_hlo.hlo.graph import Graph
from disco_hlo.hlo.kernel_times import KernelTimes, TellsReadsApart
from disco_hlo.plan.strategy import Group
from disco_hlo.simulator.costs import CostModel, LinearTransfers, MachineModel, bucket_times, kernels_ns


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
        alone_ns = np.asarray(model.nodes_ns(graph), np.int64)
        step.node[at.ALONE, : len(graph)] = alone_ns + machine.launch_ns
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
        self._takes_kernels = isinstance(model, KernelTimes)
        self._given_digests = with_room(new_table(0), len(kept.groups))
        _put_all(self._given_digests, signature_digests(kept.groups))

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
        key, member_at, member, _, digest, *_ = self.unknown
        plain, others = _told_apart(key, digest, member_at, member, count, self._flags, self._given_digests)
        if not self._takes_kernels:
            plain, others = plain[:0], np.concatenate([plain, others])
        if plain.size:
            times_ns = self.model.kernels_ns(self.graph, *listed(self.unknown, plain))  # type: ignore[attr-defined]
            _learn_kernels(self.prices, key, plain, times_ns, self.machine.launch_ns)
        if others.size:
            self._ask_each(others)

    def _ask_each(self, rows: NDArray[np.int64]) -> None:
        """Ask for buckets and for what may be a kernel of a start."""
        times = np.full((int(rows.max()) + 1, at.TIME_COLUMNS), -1, np.int64)
        times[:, at.ON_CHANNEL] = 0
        is_bucket = self._flags[self.unknown.member[self.unknown.member_at[rows]]] & at.ALL_REDUCE != 0
        for row in rows[is_bucket].tolist():
            times[row] = self._bucket_ns(tuple(self._row(row)[0].tolist()))
        kernels = rows[~is_bucket].tolist()
        if kernels:
            times[kernels, at.MAIN] = self._kernels_ns(kernels) + self.machine.launch_ns
        learn(self.prices, self.unknown, rows, times)

    def _kernels_ns(self, rows: list[int]) -> NDArray[np.int64]:
        """Times of some entries of ``unknown``: those given by a start are asked for as they came."""
        times = np.zeros(len(rows), np.int64)
        flat: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        written: dict[int, Group] = {}
        for i, row in enumerate(rows):
            members, role = (numbers.tolist() for numbers in self._row(row))
            owned = tuple(x for x, part in zip(members, role, strict=True) if part in (INSIDE, RESULT))
            signature = owned, tuple(x for x, part in zip(members, role, strict=True) if part == COPY)
            results = [x for x, part in zip(members, role, strict=True) if part == RESULT]
            group = self._given(signature, results)
            if not self._takes_kernels or (group is not None and group.kind == "triton"):
                written[i] = group or written_group(self.graph, *signature)
            elif group is None:
                flat[i] = members, results
            else:
                flat[i] = sorted((*group.nodes, *group.duplicates)), self.kept.results[signature]
        if flat and isinstance(self.model, KernelTimes):
            times[list(flat)] = kernels_ns(self.model, self.graph, list(flat.values()))
        if written:
            times[list(written)] = self.model.groups_ns(self.graph, list(written.values()))
        return times

    def _row(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        start, end = self.unknown.member_at[row : row + 2]
        return self.unknown.member[start:end], self.unknown.role[start:end]

    def _given(self, signature: Signature, results: Sequence[int]) -> Group | None:
        """The group of a start, where this is one and returns what that did."""
        group = self.kept.groups.get(signature)
        if group is None:
            return None
        shown = {source_of(self.graph, x) for x in self.kept.results[signature]}
        return group if shown == {*results} else None

    def _bucket_ns(self, all_reduces: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Times of a bucket, as the prices have them; no gradient is cut out of one that is not packed."""
        sizes = [self.graph.transfer_bytes(node) for node in all_reduces]
        kept = self.kept.forms.get(all_reduces)
        variadic = kept is not None and kept.form == "variadic"
        times = bucket_times(self.model, self.machine, sizes, variadic=variadic, name="a bucket")
        if times.pack_ns is None:
            return -1, times.main_ns, -1, int(times.on_channel)
        unpacked = [x for x in all_reduces if self.step.node[at.FLAGS, x] & at.UNPACKED]
        unpack_ns = int(self.step.node[at.SLICE, unpacked].sum()) if unpacked else -1
        return times.pack_ns, times.main_ns, unpack_ns, int(times.on_channel)

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


@compiled
def _told_apart(
    key: Any, digest: Any, member_at: Any, member: Any, count: Any, flags: Any, given: Any
) -> Any:
    """Entries that are kernels like any other, and those that are buckets or hash as a kernel of a start does.

    Several moves of one batch may have listed the same kernel: the last of these stands for all.
    """
    slots = 4
    while slots < 2 * count:
        slots *= 2
    taken = np.full(slots, -1)
    plain, others = np.empty(count, np.int64), np.empty(count, np.int64)
    plains = rest = 0
    for row in range(count - 1, -1, -1):
        slot = (key[row] ^ (key[row] >> 29)) & (slots - 1)
        while taken[slot] >= 0 and key[taken[slot]] != key[row]:
            slot = (slot + 1) & (slots - 1)
        if taken[slot] >= 0:
            continue
        taken[slot] = row
        if flags[member[member_at[row]]] & at.ALL_REDUCE or find(given, digest[row]) >= 0:
            others[rest] = row
            rest += 1
        else:
            plain[plains] = row
            plains += 1
    return plain[:plains], others[:rest]


@compiled
def _learn_kernels(prices: Any, key: Any, rows: Any, times_ns: Any, launch_ns: Any) -> None:
    """Keep the times of these entries, which are kernels."""
    for i in range(rows.size):
        value = prices.value[claim(prices, key[rows[i]])]
        value[:] = -1
        value[at.MAIN] = times_ns[i] + launch_ns
        value[at.ON_CHANNEL] = 0


@compiled
def _put_all(table: Any, keys: Any) -> None:
    """Make the keys known to the table."""
    for key in keys:
        claim(table, key)


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
