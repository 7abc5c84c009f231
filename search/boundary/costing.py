"""Durations of units, each asked for once.

The cost model is whatever the search is handed; it is asked about a kernel the first time one with
these members and results turns up, and never again.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled
from disco_hlo.hlo.bitcasts import kernel_nodes
from disco_hlo.hlo.cost_model import CostModel, Kernels, as_all_reduces, triton_emitter
from disco_hlo.hlo.graph import Graph
from disco_hlo.pointers import Ints
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import Scratch, State
from disco_hlo.search.arrays.digest import kernel_digests
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.arrays.table import Table, find, learn, new_table, with_room
from disco_hlo.search.boundary.entries import look_up
from disco_hlo.search.boundary.state import Given
from disco_hlo.search.times.pricing import listed, new_unknown
from disco_hlo.simulator.costs import (
    MAX_TOTAL,
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
    alone_ns = checked(model.op_ns(graph), len(graph), lambda i: f"node {i}")
    line, size_bytes = as_all_reduces(graph, model)
    sizes = size_bytes[list(graph.all_reduces)]
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
        self.sizes = np.zeros(len(graph), np.int64)
        """Bytes of what each all-reduce leaves, 0 for other nodes."""
        for x in graph.all_reduces:
            self.sizes[x] = graph.nodes[x].shape.size_bytes
            step.node[at.SLICE, x] = machine.copy_ns(int(self.sizes[x]))
        step.node[at.READ, : len(graph)] = model.read_classes(graph)
        self.collectives = as_all_reduces(graph, model)
        step.node[at.MOVED, : len(graph)] = self.collectives.size_bytes
        self.prices = new_table(at.TIME_COLUMNS)
        self.unknown = new_unknown(len(graph), self.collectives.line.array, _wire(machine))
        self._learn_given_buckets()
        self._tiled_kernels, self._tiled = _tiled_kernels(graph, kept)

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
        self.prices = with_room(self.prices, count)
        plain, tiled, number = _told_apart(self.unknown.key, count, self._tiled)
        if plain.size:
            self._learn_kernels(plain, Kernels.of_arrays(*listed(self.unknown, plain)))
        if tiled.size:
            self._learn_kernels(tiled, self._tiled_kernels.chosen(number))

    def _learn_kernels(self, rows: NDArray[np.int64], kernels: Kernels) -> None:
        times = checked(self.model.kernels_ns(self.graph, kernels), rows.size, lambda _: "a kernel")
        values = np.zeros((rows.size, at.TIME_COLUMNS), np.int64)
        values[:, at.PACK], values[:, at.MAIN] = -1, np.minimum(times, MAX_TOTAL) + self.machine.launch_ns
        learn(self.prices, self.unknown.key[rows], values)

    def _learn_given_buckets(self) -> None:
        """Buckets that a start writes in a form of its own are found by what they hold; others follow by rule."""
        given = [members for members, bucket in self.kept.forms.items() if bucket.form == "variadic"]
        self.prices = with_room(self.prices, len(given))
        keys = kernel_digests([(members, (), ()) for members in given])[:, 0]
        times = np.array([self._variadic_ns(members) for members in given], np.int64)
        learn(self.prices, keys, times.reshape(-1, at.TIME_COLUMNS))

    def _variadic_ns(self, all_reduces: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Times of a bucket, as the prices have them."""
        line, sizes = self.collectives.line, self.collectives.of(all_reduces)
        times = bucket_times(line, self.machine, sizes, variadic=True, name="a bucket")
        return -1, times.main_ns, 0, int(times.on_channel)


def _tiled_kernels(graph: Graph, kept: Given) -> tuple[Kernels, Table]:
    """The Triton kernels of the starts, with their tiles, and the number of each by the key of its price."""
    tiled = {known: group for known, group in kept.groups.items() if group.kind == "triton"}
    results = [kept.results[known] for known in tiled]
    kernels = Kernels.of_lists(
        [kernel_nodes(graph, group.ops) for group in tiled.values()],
        results,
        [triton_emitter(group.config) for group in tiled.values()],
    )
    number = with_room(new_table(1), len(kernels))
    keys = kernel_digests([(*known, returned) for known, returned in zip(tiled, results, strict=True)])
    learn(number, keys.sum(axis=1), np.arange(len(tiled))[:, None])
    return kernels, number


@compiled
def _told_apart(key: Ints, count: int, tiled: Table) -> Any:
    """Entries that are kernels like any other, and Triton kernels of a start, with the numbers of these.

    Several moves of one batch may have listed the same kernel: the last of these stands for all.
    """
    slots = 4
    while slots < 2 * count:  # ends: it doubles
        slots *= 2
    taken = np.full(slots, -1)
    rows, numbers, filled = np.empty((2, count), np.int64), np.empty(count, np.int64), np.zeros(2, np.int64)
    for row in range(count - 1, -1, -1):
        slot = (key[row] ^ (key[row] >> 29)) & (slots - 1)
        while taken[slot] >= 0 and key[taken[slot]] != key[row]:  # ends: half of the table is empty
            slot = (slot + 1) & (slots - 1)
        if taken[slot] >= 0:
            continue
        taken[slot] = row
        known = find(tiled, key[row])
        sort = 1 if known >= 0 else 0
        if known >= 0:
            numbers[filled[1]] = tiled.value[known, 0]
        rows[sort, filled[sort]] = row
        filled[sort] += 1
    return rows[0, : filled[0]], rows[1, : filled[1]], numbers[: filled[1]]


def _wire(machine: MachineModel) -> NDArray[np.int64]:
    return np.array(
        [machine.launch_ns, machine.memory_bytes_per_us, machine.one_shot_max_bytes, machine.asynchronous],
        np.int64,
    )
