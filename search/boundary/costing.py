"""Durations of units, each asked for once.

The cost model is whatever the search is handed; it is asked about a kernel the first time one with
these members and results turns up, and never again.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.cost_model import CostModel, Kernels, as_all_reduces, triton_emitter
from disco_hlo.hlo.graph import Graph
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import Scratch, State
from disco_hlo.search.arrays.digest import kernel_digests
from disco_hlo.search.arrays.step import Step
from disco_hlo.search.arrays.table import learn, new_table, with_room
from disco_hlo.search.boundary.entries import look_up
from disco_hlo.search.boundary.state import Given
from disco_hlo.search.times.pricing import listed, new_unknown
from disco_hlo.simulator.costs import MAX_TOTAL, MachineModel, bucket_times, checked, holds_ns, unit_for

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
        for x, first_ns in (model.first_collective_ns(graph) if machine.asynchronous else {}).items():
            step.node[at.FLAGS, x] |= at.RUNS_COLLECTIVES
            step.node[at.HEAD, x] = min(first_ns, int(step.node[at.ALONE, x]))
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
        kernels = Kernels.of_arrays(*listed(self.unknown, rows), emitters)
        times = checked(self.model.kernels_ns(self.graph, kernels), rows.size, lambda _: "a kernel")
        values = np.zeros((rows.size, at.TIME_COLUMNS), np.int64)
        values[:, at.PACK], values[:, at.MAIN] = -1, np.minimum(times, MAX_TOTAL) + self.machine.launch_ns
        self.prices = with_room(self.prices, rows.size)
        learn(self.prices, keys, values)

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


def _emitters(kept: Given) -> dict[int, str]:
    """Of the Triton kernels of the starts, by the keys of their prices."""
    tiled = {known: group for known, group in kept.groups.items() if group.kind == "triton"}
    keys = kernel_digests([(*known, kept.results[known]) for known in tiled]).sum(axis=1).tolist()
    return dict(zip(keys, [triton_emitter(group.config) for group in tiled.values()], strict=True))


def _wire(machine: MachineModel) -> NDArray[np.int64]:
    return np.array(
        [machine.launch_ns, machine.memory_bytes_per_us, machine.asynchronous],
        np.int64,
    )
