"""Durations of units, each asked for once.

The cost model is whatever the search is handed; it is asked about a kernel the first time one with
these members and results turns up, and never again.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from disco_hlo.search import layout as at
from disco_hlo.search.board import Scratch, State
from disco_hlo.search.digest import digest_of_members
from disco_hlo.search.entries import fill_in, look_up
from disco_hlo.search.pricing import Unknown, new_unknown
from disco_hlo.search.state import Given, members_of, written_group
from disco_hlo.search.step import Step
from disco_hlo.search.table import Table, claim, new_table, with_room
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph
from disco_hlo.simulator.costs import CostModel, MachineModel


@runtime_checkable
class KernelCosts(Protocol):
    """What a cost model may offer beside ``groups_ns``: kernels as flat arrays, with their results.

    It is asked in place of ``groups_ns`` for kernels that the search made. A kernel's results depend
    on who else reads its nodes, so they are given.
    """

    def kernels_ns(
        self,
        graph: Graph,
        member_at: NDArray[np.int64],
        members: NDArray[np.int64],
        result_at: NDArray[np.int64],
        results: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Time of each kernel i, which computes members[member_at[i] : member_at[i + 1]], ascending,
        and returns results[result_at[i] : result_at[i + 1]]; launch cost not included."""


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
        self.sizes = np.array([node.shape.size_bytes for node in graph.nodes], np.int64)
        for x in graph.all_reduces:
            step.node[at.SLICE, x] = self._copy_ns(int(self.sizes[x]))
        self.prices = new_table(at.TIME_COLUMNS)
        self.special = _special(kept)
        self.unknown = new_unknown(len(graph))

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
            count = look_up(self.step, state, scratch, self.prices, self.special, self.unknown)
            self.price_unknown(state, scratch, count)

    def price_unknown(self, state: State, scratch: Scratch, count: int) -> None:
        """Ask for the first ``count`` units that are listed as unknown, and fill them in."""
        if count:
            self.prices = with_room(self.prices, count)
            times = self._ask(state, self.unknown, count)
            fill_in(self.step, state, scratch, self.prices, self.unknown, count, times)

    def _ask(self, state: State, unknown: Unknown, count: int) -> NDArray[np.int64]:
        heads = unknown.head[:count]
        times = np.full((count, at.TIME_COLUMNS), -1, np.int64)
        times[:, at.ON_CHANNEL] = 0
        is_bucket = (self.step.node[at.FLAGS, heads] & at.ALL_REDUCE) != 0
        for i in np.flatnonzero(is_bucket).tolist():
            times[i] = self._bucket_ns(members_of(state, int(heads[i]))[0])
        groups = np.flatnonzero(~is_bucket)
        if groups.size:
            times[groups, at.MAIN] = self._groups_ns(state, unknown, groups) + self.machine.launch_ns
        return times

    def _groups_ns(self, state: State, unknown: Unknown, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        signatures = [members_of(state, head) for head in unknown.head[rows].tolist()]
        given = [self.kept.groups.get(signature) for signature in signatures]
        made = [i for i, group in enumerate(given) if group is None]
        times = np.zeros(len(rows), np.int64)
        if made and isinstance(self.model, KernelCosts):
            times[made] = self._kernels_ns(self.model, unknown, rows[made])
        elif made:
            groups = [written_group(self.graph, *signatures[i]) for i in made]
            times[made] = self.model.groups_ns(self.graph, groups)
        old = [i for i, group in enumerate(given) if group is not None]
        if old:
            times[old] = self.model.groups_ns(self.graph, [group for group in given if group is not None])
        return times

    def _kernels_ns(self, model: KernelCosts, unknown: Unknown, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        member_at, members = _selected(unknown.member_at, unknown.member, rows)
        result_at, results = _selected(unknown.result_at, unknown.result, rows)
        return model.kernels_ns(self.graph, member_at, members, result_at, results)

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
        unpack_ns = int(self.step.node[at.SLICE, unpacked].sum()) if unpacked else -1
        return self._copy_ns(total), main_ns, unpack_ns, int(on_channel)

    def _copy_ns(self, size_bytes: int) -> int:
        rate = self.machine.memory_bytes_per_us
        return self.machine.launch_ns + (-(-2 * size_bytes * 1000 // rate) if rate else 0)


def _special(kept: Given) -> Table:
    """The groups that come with settings of an emitter, by what they compute."""
    found = [
        digest_of_members(np.array(key[0], np.int64), np.array(key[1], np.int64))
        for key, group in kept.groups.items()
        if group.kind == "triton"
    ]
    table = with_room(new_table(1, 16), len(found))
    for digest in found:
        claim(table, digest)
    return table


def _selected(
    offset: NDArray[np.int64], item: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Some rows of a list of lists, as a list of lists."""
    chosen = [item[offset[row] : offset[row + 1]] for row in rows]
    at_row = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(items) for items in chosen], out=at_row[1:])
    return at_row, np.concatenate(chosen)
