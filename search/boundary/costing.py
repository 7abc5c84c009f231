"""Durations of units, each asked for once.

The cost model is whatever the search is handed; it is asked about a kernel the first time one with
these members and results turns up, and never again.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled
from disco_hlo.hlo.cost_model import CostModel, Kernels, as_all_reduces, triton_emitter
from disco_hlo.hlo.flat_graph import ascending, flat_graph
from disco_hlo.hlo.graph import Graph
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import Scratch, State
from disco_hlo.search.arrays.digest import result_share, signature_digests
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.arrays.table import Table, claim, find, new_table, with_room
from disco_hlo.search.boundary.entries import look_up
from disco_hlo.search.boundary.state import Given
from disco_hlo.search.times.pricing import learn, listed, new_unknown
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
        self._given_kernels, self._given = _given_kernels(graph, kept)

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
        plain, given, number = _told_apart(self.unknown, count, self._given)
        if plain.size:
            self._learn_kernels(plain, Kernels.of_arrays(*listed(self.unknown, plain)))
        if given.size:
            self._learn_kernels(given, self._given_kernels.chosen(number))

    def _learn_kernels(self, rows: NDArray[np.int64], kernels: Kernels) -> None:
        times = checked(self.model.kernels_ns(self.graph, kernels), rows.size, lambda _: "a kernel")
        times_ns = np.minimum(times, MAX_TOTAL)
        _learn_kernels(self.prices, self.unknown.key, rows, times_ns, self.machine.launch_ns)

    def _learn_given_buckets(self) -> None:
        """Buckets that a start writes in a form of its own are found by what they hold; others follow by rule."""
        given = [members for members, bucket in self.kept.forms.items() if bucket.form == "variadic"]
        self.prices = with_room(self.prices, len(given))
        keys = signature_digests([(members, ()) for members in given])
        times = np.array([self._variadic_ns(members) for members in given], np.int64)
        learn(
            self.prices,
            self.unknown._replace(key=keys),
            np.arange(keys.size),
            times.reshape(-1, at.TIME_COLUMNS),
        )

    def _variadic_ns(self, all_reduces: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Times of a bucket, as the prices have them."""
        line, sizes = self.collectives.line, self.collectives.of(all_reduces)
        times = bucket_times(line, self.machine, sizes, variadic=True, name="a bucket")
        return -1, times.main_ns, 0, int(times.on_channel)


class _Given(NamedTuple):
    """How the kernels of the starts are known again."""

    shown: NDArray[np.int64]
    """``[kernels]``: hash of what each returns, looked at through bitcasts."""
    number: Table
    """From the hash of what each owns and recomputes to its number."""


def _given_kernels(graph: Graph, kept: Given) -> tuple[Kernels, _Given]:
    """The kernels of the starts as they came, bitcasts included."""
    count, groups = len(graph), kept.groups.values()
    results = [kept.results[signature] for signature in kept.groups]
    kernels = Kernels.of_lists(
        [sorted(group.nodes + group.duplicates) for group in groups],
        results,
        [triton_emitter(group.config) if group.kind == "triton" else "" for group in groups],
    )
    result_at, result = kernels.flat.result_at, kernels.flat.results
    kernel = np.repeat(np.arange(len(kernels)), np.diff(result_at))
    shown_by, shown = np.divmod(ascending(kernel * count + flat_graph(graph).shown[result]), count)
    number = with_room(new_table(1), len(kernels))
    _put_all(number, signature_digests(kept.groups))
    return kernels, _Given(_result_digests(len(kernels), shown_by, shown), number)


@compiled
def _result_digests(count: Any, kernel: Any, result: Any) -> Any:
    found = np.zeros(count, np.int64)
    for i in range(kernel.size):
        found[kernel[i]] += result_share(result[i])
    return found


@compiled
def _told_apart(unknown: Any, count: Any, given: Any) -> Any:
    """Entries that are kernels like any other, and kernels of a start, with the numbers of these.

    Several moves of one batch may have listed the same kernel: the last of these stands for all.
    """
    key, digest, member_at, member = unknown.key, unknown.digest, unknown.member_at, unknown.member
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
        sort, known = 0, find(given.number, digest[row])
        if known >= 0:
            shown = np.int64(0)
            for k in range(member_at[row], member_at[row + 1]):
                if unknown.returned[k]:
                    shown += result_share(member[k])
            if shown == given.shown[given.number.value[known, 0]]:
                sort = 1
                numbers[filled[1]] = given.number.value[known, 0]
        rows[sort, filled[sort]] = row
        filled[sort] += 1
    return rows[0, : filled[0]], rows[1, : filled[1]], numbers[: filled[1]]


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


def _wire(machine: MachineModel) -> NDArray[np.int64]:
    return np.array(
        [machine.launch_ns, machine.memory_bytes_per_us, machine.one_shot_max_bytes, machine.asynchronous],
        np.int64,
    )
