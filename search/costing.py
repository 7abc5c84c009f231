"""Durations of units, each asked for once.

The cost model is whatever the search is handed; it is asked about a group the first time one with
these members and results turns up, and never again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
import numpy as np
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.strategy import Group
from disco_hlo.search import layout as at
from disco_hlo.search.arrays import Scratch, State
from disco_hlo.search.digest import unit_digest
from disco_hlo.search.state import Given, members_of, written_group
from disco_hlo.search.step import Step
from disco_hlo.simulator.costs import CostModel, MachineModel


class Priced(NamedTuple):
    """What stood at some units before they were priced."""

    heads: NDArray[np.int32]
    time_ns: NDArray[np.int64]
    digest: NDArray[np.uint64]


class UnitCosts:
    """Durations of the units of one graph under one cost model."""

    def __init__(self, graph: Graph, step: Step, model: CostModel, machine: MachineModel, kept: Given) -> None:
        self.graph = graph
        self.step = step
        self.model = model
        self.machine = machine
        self.kept = kept
        self.alone_ns = np.asarray(model.nodes_ns(graph), np.int64)
        self.sizes = np.array([node.shape.size_bytes for node in graph.nodes], np.int64)
        self.known: dict[int, NDArray[np.int64]] = {}

    def price_all(self, state: State) -> None:
        """Fill in digest and times of every unit."""
        self.price(state, [x for x in range(len(self.graph)) if state.word[at.OWNER, x] == x])

    def price_changed(self, state: State, scratch: Scratch) -> Priced:
        """Fill in what the noted changes left open; returns what :func:`restore` needs."""
        changed = scratch.changed[: scratch.number[at.CHANGES]]
        heads = np.unique(state.word[at.OWNER, changed])
        before = Priced(heads, state.time_ns[:, heads], state.digest[heads])
        self.price(state, heads.tolist())
        scratch.number[at.CHANGES] = 0
        return before

    def price(self, state: State, heads: Iterable[int]) -> None:
        """Fill in digest and times of the units with these heads."""
        missing: list[int] = []
        for head in heads:
            digest = unit_digest(self.step, state, head)
            state.digest[head] = digest
            found = self.known.get(int(digest))
            if found is None:
                missing.append(head)
            else:
                state.time_ns[:, head] = found
        if missing:
            self._ask(state, missing)
        for head in missing:
            self.known[int(state.digest[head])] = state.time_ns[:, head].copy()

    def _ask(self, state: State, heads: Sequence[int]) -> None:
        groups: dict[int, Group] = {}
        for head in heads:
            owned, copies = members_of(state, head)
            if self.step.node[at.FLAGS, head] & at.ALL_REDUCE:
                state.time_ns[:, head] = self._bucket_ns(owned)
                continue
            if len(owned) > 1 or copies:
                groups[head] = self.kept.groups.get((owned, copies)) or written_group(self.graph, owned, copies)
            state.time_ns[:, head] = (-1, self.alone_ns[head] + self.machine.launch_ns, -1, 0)
        if groups:
            times = np.asarray(self.model.groups_ns(self.graph, list(groups.values())), np.int64)
            state.time_ns[at.MAIN_NS, list(groups)] = times + self.machine.launch_ns

    def _bucket_ns(self, all_reduces: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Times of a bucket, by the rules of ``simulator.build``."""
        machine = self.machine
        sizes = self.sizes[list(all_reduces)]
        total = int(sizes.sum())
        kept = self.kept.forms.get(all_reduces)
        variadic = kept is not None and kept.form == "variadic"
        carried = sizes if variadic and not machine.asynchronous else np.array([total], np.int64)
        transfer_ns = int(np.sum(self.model.all_reduce_ns(carried)))
        on_channel = machine.asynchronous and total > machine.one_shot_max_bytes
        main_ns = transfer_ns + (0 if on_channel else machine.launch_ns)
        if variadic or len(sizes) == 1:
            return -1, main_ns, -1, int(on_channel)
        unpacked = [x for x in all_reduces if self.step.node[at.FLAGS, x] & at.UNPACKED]
        unpack_ns = sum(self._copy_ns(int(self.sizes[x])) for x in unpacked) if unpacked else -1
        return self._copy_ns(total), main_ns, unpack_ns, int(on_channel)

    def _copy_ns(self, size_bytes: int) -> int:
        rate = self.machine.memory_bytes_per_us
        return self.machine.launch_ns + (-(-2 * size_bytes * 1000 // rate) if rate else 0)


def restore(state: State, before: Priced) -> None:
    """Undo :meth:`UnitCosts.price_changed`."""
    state.time_ns[:, before.heads] = before.time_ns
    state.digest[before.heads] = before.digest
