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
from disco_hlo.search.entries import look_up
from disco_hlo.search.pricing import COPY, INSIDE, RESULT, learn, new_unknown
from disco_hlo.search.state import Given, Signature, written_group
from disco_hlo.search.step import Step
from disco_hlo.search.table import Table, claim, new_table, with_room
from numpy.typing import NDArray

from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.strategy import Group
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
            self.ask(look_up(self.step, state, scratch, self.prices, self.special, self.unknown))

    def ask(self, count: int) -> None:
        """Ask the cost model for the first ``count`` entries of ``unknown``, and keep the answers."""
        if not count:
            return
        self.prices = with_room(self.prices, count)
        offset = self.unknown.member_at
        times = np.full((count, at.TIME_COLUMNS), -1, np.int64)
        times[:, at.ON_CHANNEL] = 0
        first = self.unknown.member[offset[:count]]
        is_bucket = (self.step.node[at.FLAGS, first] & at.ALL_REDUCE) != 0
        for i in np.flatnonzero(is_bucket).tolist():
            times[i] = self._bucket_ns(tuple(self.unknown.member[offset[i] : offset[i + 1]].tolist()))
        kernels = np.flatnonzero(~is_bucket)
        if kernels.size:
            times[kernels, at.MAIN] = self._kernels_ns(kernels.tolist()) + self.machine.launch_ns
        learn(self.prices, self.unknown, count, times)

    def _kernels_ns(self, rows: list[int]) -> NDArray[np.int64]:
        """Times of some entries of ``unknown``: those given by a start are asked for as they came."""
        groups = [self._given(row) for row in rows]
        times = np.zeros(len(rows), np.int64)
        made = [i for i, group in enumerate(groups) if group is None]
        if made and isinstance(self.model, KernelCosts):
            times[made] = self._flat_ns(self.model, [rows[i] for i in made])
        elif made:
            groups = [group or self._written(row) for group, row in zip(groups, rows, strict=True)]
        asked = [(i, group) for i, group in enumerate(groups) if group is not None]
        if asked:
            times[[i for i, _ in asked]] = self.model.groups_ns(self.graph, [group for _, group in asked])
        return times

    def _row(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        start, end = self.unknown.member_at[row : row + 2]
        return self.unknown.member[start:end], self.unknown.role[start:end]

    def _signature(self, row: int) -> Signature:
        members, role = self._row(row)
        owned = members[(role == INSIDE) | (role == RESULT)]
        return tuple(owned.tolist()), tuple(members[role == COPY].tolist())

    def _given(self, row: int) -> Group | None:
        return self.kept.groups.get(self._signature(row)) if self.kept.groups else None

    def _written(self, row: int) -> Group:
        return written_group(self.graph, *self._signature(row))

    def _flat_ns(self, model: KernelCosts, rows: list[int]) -> NDArray[np.int64]:
        parts = [self._row(row) for row in rows]
        members = [part for part, _ in parts]
        results = [part[role == RESULT] for part, role in parts]
        return model.kernels_ns(
            self.graph, _offsets(members), np.concatenate(members), _offsets(results), np.concatenate(results)
        )

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


def _offsets(rows: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    found = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=found[1:])
    return found
