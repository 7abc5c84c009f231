"""A state with everything that climbs need, and buckets and order by rule for the kernels it has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from disco_hlo.core.marks import fresh_stamp
from disco_hlo.hlo.cost_model import CostModel
from disco_hlo.hlo.graph import Graph
from disco_hlo.plan.baselines import all_reduce_depths
from disco_hlo.plan.strategy import Strategy
from disco_hlo.search.arrays import layout as at
from disco_hlo.search.arrays.board import State, copy_state, new_scratch
from disco_hlo.search.arrays.rng import mixed, seeded
from disco_hlo.search.arrays.table import new_table, with_room
from disco_hlo.search.boundary.costing import UnitCosts, unit_of_step
from disco_hlo.search.boundary.entries import count_order, run_order
from disco_hlo.search.boundary.starts import Starts
from disco_hlo.search.boundary.state import to_strategy
from disco_hlo.search.interruptible import Halted, interruptible
from disco_hlo.search.methods import climb as cl
from disco_hlo.search.moves.arrange import gradients_ready, list_order, regroup
from disco_hlo.search.moves.table import MOVES
from disco_hlo.search.schedule import contiguous_buckets
from disco_hlo.search.times.running_sums import new_segments
from disco_hlo.simulator.costs import MachineModel, coarse

MOST_DRAWS: Final = 4
SMALL_BYTES: Final = (1 << 16, 1 << 20)
"""Of a gradient that may come last: the link has it in less time than a kernel computes it in, mostly."""
BUCKET_ROUNDS: Final = 2
"""How often buckets are computed again for the order that the previous ones led to."""


def apart(gradients: NDArray[np.int64]) -> list[list[int]]:
    """Each in a bucket of its own."""
    return [[x] for x in gradients.tolist()]


class Climber:
    """A state with everything that climbs need."""

    def __init__(
        self, graph: Graph, model: CostModel, machine: MachineModel, starts: Starts, start: int, seed: int
    ) -> None:
        self.unit_ns = unit_of_step(graph, model)
        """What every time of a state counts: of a step of minutes not every nanosecond does."""
        model, machine = coarse(model, machine, self.unit_ns)
        self.graph, self.machine, self.model = graph, machine, model
        self.step, self.kept = starts.step, starts.kept
        self.costs = UnitCosts(self.graph, self.step, self.model, self.machine, self.kept)
        self.scratch = new_scratch(self.step)
        # A restart's seed is the user's times a million.
        self.generator = seeded(int(mixed(np.array([seed % 2**64], np.uint64))[0]))
        node = self.step.node
        self.fusible = np.flatnonzero(node[at.FLAGS, : len(self.graph)] & at.FUSIBLE).astype(np.int64)
        ranked = np.array(sorted(self.graph.all_reduces, key=lambda x: node[at.RANK, x]), np.int64)
        self.pools = (self.fusible, ranked)
        self.seen = {ordered: new_table(1) for ordered in (False, True)}
        self.waiting = np.zeros((cl.MOST_WAITING, 3), np.int64)
        self.segments = new_segments(self.step, ranked, self.machine)
        self.control = np.zeros(cl.CONTROLS, np.int64)
        self.depths = all_reduce_depths(self.graph)
        self.state = self.priced(copy_state(starts.states[start]))
        self.given_runs = _runs_of(self.state, ranked)

    @property
    def evaluations(self) -> int:
        """Candidates looked at."""
        return int(self.control[cl.EVALUATED])

    @property
    def distinct(self) -> int:
        """Candidates that had not been looked at before."""
        return int(self.control[cl.DISTINCT])

    def priced(self, state: State) -> State:
        """The state itself, its times filled in and its units unlike those of any other state."""
        state.word[at.MOMENT] = fresh_stamp(self.scratch)
        self.costs.price_all(state, self.scratch)
        return state

    def draw_by_time(self) -> None:
        """Propose moves of a unit the more often the longer it takes now: there most is to be gained.

        A fusible op is drawn as often as the time of its unit has that of the average unit in it, at least once
        and at most ``MOST_DRAWS`` times as often as others.
        """
        unit = self.state.word[at.OWNER, self.fusible]
        times_ns = self.state.times[:, at.MAIN]
        average_ns = max(1, self.total() // max(1, int(self.state.word[at.TOTAL, at.UNITS])))
        draws = np.clip(times_ns[unit] // average_ns, 1, MOST_DRAWS)
        self.pools = (np.repeat(self.fusible, draws), self.pools[1])

    def draw_alike(self) -> None:
        """Propose moves of every op equally often."""
        self.pools = (self.fusible, self.pools[1])

    def total(self) -> int:
        """Time of all units one after the other, in ``unit_ns``."""
        total = self.state.word[at.TOTAL]
        return int(total[at.COMPUTE_NS] + total[at.TRANSFER_NS])

    def makespan_ns(self) -> int:
        """Time of the state in its order."""
        if not self.machine.asynchronous:
            return self.total() * self.unit_ns
        made = run_order(self.step, self.state, self.scratch, self.segments)
        return int(made[0]) * self.unit_ns

    def strategy(self, state: State) -> Strategy:
        """What a state stands for, with its order."""
        _, count = run_order(self.step, state, self.scratch, self.segments)
        started = self.segments.started[:count]
        return to_strategy(self.graph, self.step, state, self.kept, started, self.machine.asynchronous)

    def climb(
        self,
        moves: Mapping[int, int],
        proposals: int,
        threshold: int,
        *,
        ordered: bool,
        halted: Halted = None,
    ) -> None:
        """Make proposals; the state becomes the best that was met.

        Args:
            threshold: by how much the state may be worse than before a move that is kept, in ``unit_ns``.
            halted: see ``interruptible``.
        """
        control, scratch = self.control, self.scratch
        self.seen[ordered] = with_room(self.seen[ordered], proposals + cl.MOST_WAITING)
        scratch.number[at.LOGGED] = 0
        score = self.total()
        if ordered:
            compute_ns = int(self.state.word[at.TOTAL, at.COMPUTE_NS])
            score = int(count_order(self.step, self.state, scratch, self.segments))
            score += compute_ns // cl.COMPUTE_SHARE
        control[[cl.LEFT, cl.THRESHOLD, cl.ORDERED]] = proposals, threshold, ordered
        control[[cl.CURRENT, cl.BEST]] = score
        control[[cl.LISTED, cl.WAITING, cl.RETRIES, cl.RETRIED, cl.HALT]] = 0
        weights = np.zeros(len(MOVES), np.int64)
        for kind, weight in moves.items():
            weights[kind] = weight

        def climb() -> int:
            listed: int = cl.climb(
                self.step, self.state, scratch, self.generator, self.pools, weights, self.costs.prices,
                self.costs.unknown, self.waiting, self.seen[ordered], self.segments, control,
            )  # fmt: skip
            return listed

        # Ends: each time the first of the moves that waited is decided, as nothing else was decided before it.
        while listed := interruptible(climb, control, cl.HALT, halted):
            self.costs.ask(listed)
            control[cl.RETRIES] = control[cl.WAITING]
            control[[cl.LISTED, cl.WAITING, cl.RETRIED]] = 0

    def reschedule(self, *, small_last: bool = False, halted: Halted = None) -> None:
        """Give the state's kernels the best buckets and order at hand, if these are better than its own.

        Args:
            small_last: also try what brings the large gradients forward. Takes three times as long.
            halted: asked after what is tried first, the order with the buckets as they are.
        """
        best, best_ns = self.state, self.makespan_ns()
        for state in self._arranged(small_last):
            self.state = state
            found_ns = self.makespan_ns()
            if found_ns < best_ns:
                best, best_ns = state, found_ns
            if halted is not None and halted():
                break
        self.state = best

    def _arranged(self, small_last: bool) -> Iterator[State]:
        """The state in the order of a list schedule, as it is and with other buckets (see ``schedule``).

        After each the state must be run in its order: the next buckets depend on when gradients appeared.
        """
        own = self.state
        listed = copy_state(own)
        if not list_order(self.step, listed, self.scratch):
            return
        yield listed
        ranked = self.pools[1]
        if ranked.size < 2:
            return
        for first in (apart(ranked), *(self._small_ones_last(ranked) if small_last else ())):
            runs = first
            for _ in range(1 + BUCKET_ROUNDS):
                state = self._with_buckets(own, runs)
                if state is None:
                    break
                yield state
                runs = self._neighbours_together(ranked)

    def _small_ones_last(self, ranked: NDArray[np.int64]) -> Iterator[list[list[int]]]:
        """All small gradients in one bucket, which waits for the last of them: so what computes them comes last, and
        runs beside the transfer of large ones that else nothing would hide (an embedding's, whose gradient is complete
        only at the end)."""
        sizes, channel = self.costs.sizes, self.step.node[at.CHANNEL]
        for limit in SMALL_BYTES:
            small: dict[tuple[int, int], list[int]] = {}
            for x in ranked[sizes[ranked] <= limit].tolist():
                small.setdefault((int(channel[x]), self.depths[x]), []).append(x)
            if small and any(sizes[x] > limit for x in ranked):
                yield [*apart(ranked[sizes[ranked] > limit]), *small.values()]

    def take_given_buckets(self) -> None:
        """Give the state's kernels the buckets of the start, in the order of a list schedule, if they can have them."""
        if len(self.given_runs) > 1:
            self.state = self._with_buckets(self.state, self.given_runs) or self.state

    def _with_buckets(self, own: State, runs: Sequence[Sequence[int]]) -> State | None:
        """A state with other buckets, in the order of a list schedule; None where a kernel reads one member of a
        bucket and makes another, so that they cannot wait for each other."""
        state = copy_state(own)
        members = np.concatenate([np.sort(run) for run in runs]).astype(np.int64)
        regroup(self.step, state, self.scratch, members, np.cumsum([0, *map(len, runs)], dtype=np.int64))
        self.costs.price_changed(state, self.scratch)
        self.scratch.number[at.LOGGED] = 0
        return state if list_order(self.step, state, self.scratch) else None

    def _neighbours_together(self, ranked: NDArray[np.int64]) -> list[list[int]]:
        """The best runs of gradients, in the order in which they appeared when the state was run last."""
        if not ranked.size:  # a step without gradients
            return []
        ready = gradients_ready(self.step, self.state, self.scratch, self.segments.ends_ns, ranked)
        by_time = np.lexsort((ranked, ready))
        gradients = ranked[by_time]
        channel = self.step.node[at.CHANNEL]
        kinds = [(int(channel[x]), self.depths[x]) for x in gradients.tolist()]
        runs = contiguous_buckets(
            ready[by_time].tolist(),
            self.costs.collectives.size_bytes[gradients].tolist(),
            kinds,
            self.costs.collectives.line,
            self.machine.pace().wait_ns,
        )
        return [gradients[run].tolist() for run in runs]


def _runs_of(state: State, ranked: NDArray[np.int64]) -> list[list[int]]:
    """The members of each bucket."""
    runs: dict[int, list[int]] = {}
    for x, bucket in zip(ranked.tolist(), state.word[at.OWNER, ranked].tolist(), strict=True):
        runs.setdefault(bucket, []).append(x)
    return list(runs.values())
